"""`python -I runtime.pyz run DIR | node DIR | part DIR | session DIR | serve DIR | ask DIR | ray-node ORDER | hold FILE`."""

# Types stand in comments, because an older Python must parse this file to say that it is too old. Each role imports what it
# needs when it begins: a start takes about 0.13 s, most of it imports.

import mmap
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable

    from .node import allocation
    from .payload.payload import Payload  # noqa: F401
    from .protocol.spec import RuntimeSpec  # noqa: F401
    from .supervisor import supervisor

    Lead = Callable[[supervisor.Supervisor, allocation.Allocation], int]

if sys.version_info < (3, 8):
    sys.exit("rayslurm runtime: Python 3.8 or newer is needed, %s is %s" % (sys.executable, sys.version.split()[0]))


def run(run_dir):  # type: (str) -> int
    """Run the one payload of a run directory for the parent process, without Slurm. Returns the exit code."""
    from .process import loop, scratch
    from .protocol import spec as start_records
    from .supervisor import local_server, supervisor

    scratch.sweep()
    spec = start_records.load_spec(run_dir)
    if spec.meeting is not None:
        return _run_component(run_dir, spec)
    runner = supervisor.Supervisor(loop.Loop(), spec, scratch.Scratch())
    local_server.serve_parent(runner, run_dir)
    runner.run()
    return 0


def _run_component(run_dir, spec):  # type: (str, RuntimeSpec) -> int
    """Run the payload of one of several components on this machine (separate topology) for the parent process, without Slurm."""
    from dataclasses import replace

    from .process import loop, scratch
    from .protocol import record
    from .separate import participant
    from .supervisor import local_server, supervisor

    here, remark = participant.component_share(spec)
    runner = supervisor.Supervisor(loop.Loop(), replace(spec, components=[]), scratch.Scratch(), here=here)
    barrier = participant.join_barrier(runner, record.run_of_component(run_dir))
    payload = local_server.serve_parent(runner, run_dir)
    barrier.watch(payload)
    if remark:
        payload.phase("cluster-start", remark)
    runner.run()
    barrier.close()
    return 0


def node(run_dir, dispensable):  # type: (str, mmap.mmap) -> int
    """Serve as one node of a Slurm step: the first node runs the payload of the run directory, the others join its Ray cluster.

    Args:
        dispensable: a byte that a worker node sets to 1 when the head knows it. Ray can go on without it from then on, so its
            end must not make `srun` end the step.

    Returns:
        The exit code.
    """
    from .supervisor import local_server, time_limit

    def lead(runner, here):  # type: (supervisor.Supervisor, allocation.Allocation) -> int
        local_server.serve_run_dir(runner, run_dir)
        time_limit.watch(runner, here.job_id)
        runner.run()
        return runner.exit_code

    return _be_node(run_dir, dispensable, lead)


def part(run_dir, dispensable):  # type: (str, mmap.mmap) -> int
    """Serve as one node of a Slurm step with a payload per component (separate topology).

    The first node of each component runs its payload, the others join the component's Ray cluster. See `node`.
    """
    from dataclasses import replace

    from .node.allocation import head_address
    from .protocol import record
    from .protocol import spec as start_records
    from .separate import participant
    from .supervisor import local_server, time_limit

    whole = _allocation(start_records.load_spec(run_dir))
    directory = record.component_dir(run_dir, whole.component_of(whole.node_id) or "")

    def lead(runner, here):  # type: (supervisor.Supervisor, allocation.Allocation) -> int
        barrier = participant.join_barrier(runner, run_dir, here, whole.head_addresses)
        payload = local_server.serve_run_dir(runner, directory)
        barrier.watch(payload)
        time_limit.watch(runner, here.job_id)
        runner.run()
        barrier.close()
        return barrier.exit_code

    here = whole.of_own_group()
    if here.node_id == 0:
        others = [node for node in whole.nodes if node not in here.nodes]
        here = replace(here, head_addresses=[head_address(replace(here, nodes=[*here.nodes, *others]))])
    return _lead_or_work(start_records.load_spec(directory), here, run_dir, dispensable, lead)


def session(session_dir, dispensable):  # type: (str, mmap.mmap) -> int
    """Serve as one node of a session's Slurm step: the first node runs payloads for clients until the session ends.

    A session ends when it is idle for too long, has failed, or comes to its time limit. See `node`.
    """
    from .protocol import rpc
    from .supervisor import session_server, time_limit

    def lead(runner, here):  # type: (supervisor.Supervisor, allocation.Allocation) -> int
        spec = runner.spec
        assert spec.control_key is not None
        # Clients and worker nodes use different keys, so that neither can take the other's server for its own.
        key = rpc.derive_key(spec.control_key, "requests")
        server = session_server.SessionServer(runner, session_dir, here, key, spec.control_ports)
        time_limit.watch(runner, here.job_id)
        try:
            runner.run()
        finally:
            server.close()
        return 1 if runner.queue.failed else 0

    return _be_node(session_dir, dispensable, lead)


def _be_node(directory, dispensable, lead):
    # type: (str, mmap.mmap, Lead) -> int
    """Serve as one node of a Slurm step: the first node calls `lead`, the others are worker nodes. Returns the exit code."""
    from .protocol import spec as start_records

    spec = start_records.load_spec(directory)
    return _lead_or_work(spec, _allocation(spec), directory, dispensable, lead)


def _allocation(spec):  # type: (RuntimeSpec) -> allocation.Allocation
    """The Slurm allocation in which this task runs. Changes `os.environ` so that it describes the task's own component."""
    from .node import allocation

    here = allocation.from_environ(os.environ)
    if here is None:
        sys.exit("rayslurm runtime: this is no task of a Slurm step: SLURM_JOB_ID and SLURM_NODEID are not set")
    try:
        return allocation.select_component(os.environ, here, [each.component_id for each in spec.components])
    except ValueError as error:
        sys.exit("rayslurm runtime: %s" % error)


def _lead_or_work(spec, here, log_dir, dispensable, lead):
    # type: (RuntimeSpec, allocation.Allocation, str, mmap.mmap, Lead) -> int
    """Call `lead` on the first node of an allocation; serve as a worker node on the others. Returns the exit code."""
    from .nodes import worker
    from .process import loop, scratch
    from .supervisor import supervisor

    scratch.sweep()
    if here.node_id > 0:
        helper = worker.Worker(loop.Loop(), spec, here, scratch.Scratch(), lambda: dispensable.__setitem__(0, 1))
        helper.run()
        if helper.exit_code:
            dispensable[0] = 0
        return helper.exit_code
    return lead(supervisor.Supervisor(loop.Loop(), spec, scratch.Scratch(), here, log_dir), here)


def serve(session_dir):  # type: (str) -> int
    """Run a session on this machine, without Slurm: run payloads for clients until it is idle for too long."""
    from .process import loop, scratch
    from .protocol import spec as start_records
    from .supervisor import local_server, supervisor

    scratch.sweep()
    private = scratch.Scratch()
    runner = supervisor.Supervisor(loop.Loop(), start_records.load_spec(session_dir), private)
    server = local_server.LocalSessionServer(runner, session_dir, private.join("control.sock"))
    try:
        runner.run()
    finally:
        server.close()
    return 0


_IN_A_STEP = ("node", "part", "session")
"""Roles that srun starts as tasks of a Slurm step."""


def main(argv):  # type: (list[str]) -> int
    """Run the role that the first argument names, and return the exit code; see the module's docstring."""
    role = argv[0] if argv else ""
    if role == "ray-node":
        from .ray import node_main

        return node_main.main(argv[1:])
    if role == "hold":
        from .ray import node_main

        return node_main.hold(argv[1])
    if role == "ask":
        from .protocol import rpc

        return rpc.main(argv[1])
    dispensable = mmap.mmap(-1, 1)  # One byte in memory that the keeper process and its child, the runtime, share.
    roles = {
        "run": run,
        "node": lambda run_dir: node(run_dir, dispensable),
        "part": lambda run_dir: part(run_dir, dispensable),
        "session": lambda session_dir: session(session_dir, dispensable),
        "serve": serve,
    }
    if role in roles:
        from .process import processes

        processes.raise_file_limit()
        # A Dagster process ends the job of a single payload; a session may have no Dagster process, so the keeper ends its job.
        orphaned = (lambda: processes.cancel_own_job(os.environ)) if role == "session" else (lambda: None)
        return processes.guard(lambda: roles[role](argv[1]), lambda: dispensable[0] == 1, role in _IN_A_STEP, orphaned)
    sys.exit(__doc__)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
