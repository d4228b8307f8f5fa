"""`python -I runtime.pyz run DIR | serve DIR | ray-node ORDER`."""

import sys

if sys.version_info < (3, 8):
    sys.exit("rayslurm runtime: Python 3.8 or newer is needed, %s is %s" % (sys.executable, sys.version.split()[0]))


def run(run_dir):  # type: (str) -> int
    """Run the one payload of a run directory for the parent process."""
    from . import control, loop, scratch, supervisor

    scratch.sweep()
    runner = supervisor.Supervisor(loop.Loop(), supervisor.load_spec(run_dir), scratch.Scratch())
    control.serve_parent(runner, run_dir)
    runner.run()
    return 0


def serve(session_dir):  # type: (str) -> int
    """Run payloads for whoever connects, until idle."""
    from . import control, loop, scratch, supervisor

    scratch.sweep()
    private = scratch.Scratch()
    runner = supervisor.Supervisor(loop.Loop(), supervisor.load_spec(session_dir), private)
    server = control.SessionServer(runner, session_dir, private.join("control.sock"))
    try:
        runner.run()
    finally:
        server.close()
    return 0


def main(argv):  # type: (list[str]) -> int
    """Take the role that the command line names."""
    role = argv[0] if argv else ""
    if role == "ray-node":
        from . import ray_node

        return ray_node.main(argv[1:])
    if role in ("run", "serve"):
        from . import keeper

        return keeper.guard(lambda: (run if role == "run" else serve)(argv[1]))
    sys.exit(__doc__)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
