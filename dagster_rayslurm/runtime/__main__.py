"""Program of the runtime: `python -I runtime.pyz run DIR` starts the role `run` with the directory DIR as its argument.

The other roles with a directory are: node, element, part, session, serve, ask. Further roles: relay, ray-node, health, archive.
"""

# Types stand in comments, because an older Python must parse this file to say that it is too old. Each role imports what it
# needs when it begins: a start takes about 0.13 s, most of it imports.

import mmap
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Optional  # noqa: F401

    from .node import allocation
    from .process.scratch import Scratch  # noqa: F401
    from .protocol.spec import RuntimeSpec  # noqa: F401
    from .supervisor.supervisor import Supervisor

    Lead = Callable[[Supervisor, allocation.Allocation], int]

if sys.version_info < (3, 8):
    sys.exit("rayslurm runtime: Python 3.8 or newer is needed, %s is %s" % (sys.executable, sys.version.split()[0]))

# A byte of memory that the keeper process shares with its child, the runtime. On a worker node, the runtime sets the byte to 1
# when the head node knows this node. From then on Ray can go on without the node, so `srun` must not end the step with it.
_dispensable = mmap.mmap(-1, 1)


def run(spec, run_dir):  # type: (RuntimeSpec, str) -> int
    """Run the payload of the run directory `run_dir` without Slurm, and block until the payload has ended; returns 0.

    Returns 0 even if the payload has failed: the run record tells the result. If the parent process ends, the payload is
    cancelled. `spec` is the start record of the runtime, which tells the runtime what to do. If `spec` has a barrier
    (`spec.meeting`), this process runs the payload of one of several components on this machine. The components wait for each
    other at the barrier.
    """
    from dataclasses import replace

    from .protocol import record
    from .supervisor import request_server

    if spec.meeting is None:
        runner = _supervisor(spec)
        request_server.serve_run_dir(runner, run_dir, orphaned=request_server.parent_is_gone)
        runner.run()
        return 0

    from .separate import participant  # One of several components on this machine (separate topology).

    here, remark = participant.component_share(spec)
    runner = _supervisor(replace(spec, components=[]), here=here)
    barrier = participant.join_barrier(runner, record.run_of_component(run_dir))
    payload = request_server.serve_run_dir(runner, run_dir, orphaned=request_server.parent_is_gone)
    barrier.watch(payload)
    if remark:
        payload.phase("cluster-start", remark)
    runner.run()
    barrier.close()
    return 0


def node(spec, run_dir):  # type: (RuntimeSpec, str) -> int
    """Run the runtime on one node of a Slurm job, and block until it ends; returns the exit code of this process.

    The first node runs the payload of the run directory `run_dir`; the other nodes join the first node's Ray cluster. `spec` is
    the start record of the runtime.
    """
    from .supervisor import request_server

    def lead(runner, here):  # type: (Supervisor, allocation.Allocation) -> int
        request_server.serve_run_dir(runner, run_dir)
        _run_on_time(runner, here)
        return runner.exit_code

    return _lead_or_work(spec, _allocation(spec), run_dir, lead)


def element(spec, array_dir):  # type: (RuntimeSpec, str) -> int
    """Run the runtime on one node of an element of a job array, and block until it ends; returns the exit code of this process.

    As in `node`, the first node runs a payload, and the other nodes join its Ray cluster. The payload is that of the element: its
    run directory is below `array_dir`, the directory of the array. `spec` is the start record of the whole array.
    """
    from .payload import element as elements
    from .supervisor import request_server

    here, own = _allocation(spec), elements.find(array_dir, int(os.environ["SLURM_ARRAY_TASK_ID"]))

    def lead(runner, here):  # type: (Supervisor, allocation.Allocation) -> int
        own.lay_out()
        request_server.serve_run_dir(runner, own.run_dir).on_ended.append(own.mark_ended)
        _run_on_time(runner, here)
        return runner.exit_code

    return _lead_or_work(own.spec(spec), here, own.run_dir, lead)


def part(spec, run_dir):  # type: (RuntimeSpec, str) -> int
    """Run the runtime on one node of a job in which each component has its own payload and Ray cluster (separate topology).

    Blocks until this runtime ends; returns the exit code. The first node of a component runs the component's payload; its other
    nodes join the first node's Ray cluster. `spec` is the start record, and `run_dir` the run directory, of the whole job.
    """
    from dataclasses import replace

    from .node.allocation import head_address
    from .protocol import record
    from .protocol.spec import load_spec
    from .separate import participant
    from .supervisor import request_server

    whole = _allocation(spec)
    directory = record.component_dir(run_dir, whole.component_of(whole.node_id) or "")

    def lead(runner, here):  # type: (Supervisor, allocation.Allocation) -> int
        barrier = participant.join_barrier(runner, run_dir, here, whole.head_addresses)
        barrier.watch(request_server.serve_run_dir(runner, directory))
        _run_on_time(runner, here)
        barrier.close()
        return barrier.exit_code

    here = whole.of_own_group()
    if here.node_id == 0:
        others = [node for node in whole.nodes if node not in here.nodes]
        here = replace(here, head_addresses=[head_address(replace(here, nodes=[*here.nodes, *others]))])
    return _lead_or_work(load_spec(directory), here, run_dir, lead)


def session(spec, session_dir):  # type: (RuntimeSpec, str) -> int
    """Run the runtime on one node of a session's Slurm job, and block until the session ends; returns the exit code.

    The first node runs payloads for clients; the other nodes join its Ray cluster. `spec` is the start record of the session, and
    `session_dir` is the directory of this generation (allocation) of the session.
    """
    return _lead_or_work(spec, _allocation(spec), session_dir, lambda runner, here: _serve_clients(runner, session_dir, here))


def serve(spec, session_dir):  # type: (RuntimeSpec, str) -> int
    """Run a session on this machine, without Slurm, and block until the session ends; returns the exit code 0.

    `spec` is the start record of the session, and `session_dir` is the directory of this generation (start) of the session.
    """
    _serve_clients(_supervisor(spec), session_dir)
    return 0


def _serve_clients(runner, session_dir, here=None):  # type: (Supervisor, str, Optional[allocation.Allocation]) -> int
    from .protocol import rpc
    from .supervisor import request_server

    spec = runner.spec
    assert spec.control_key is not None
    # Clients and worker nodes use different keys, so that neither can take the other's server for its own.
    key = rpc.derive_key(spec.control_key, "requests")
    server = request_server.RequestServer(runner, session_dir, key, spec.control_ports, here)
    try:
        _run_on_time(runner, here)
    finally:
        server.close()
    return 1 if runner.queue.failed else 0


def _run_on_time(runner, here):  # type: (Supervisor, Optional[allocation.Allocation]) -> None
    """Run the payloads of the runtime `runner`, and block until the runtime ends.

    `here` is the allocation of the Slurm job; None without Slurm. In a Slurm job, the function also sends payloads the configured
    warning signal before the job's time limit, and ends a session before this limit.
    """
    if here is not None:
        from .supervisor import time_limit

        time_limit.watch(runner, here.job_id)
    runner.run()


def _supervisor(spec, **more):  # type: (RuntimeSpec, Any) -> Supervisor
    from .process import loop, scratch
    from .supervisor import supervisor

    scratch.sweep()
    return supervisor.Supervisor(loop.Loop(), spec, scratch.Scratch(), **more)


def _allocation(spec):  # type: (RuntimeSpec) -> allocation.Allocation
    """Return the Slurm allocation of this task.

    In a heterogeneous job, Slurm sets some environment variables for another component; the function corrects these variables in
    `os.environ`. The process exits with an error message in two cases: this task does not belong to a Slurm step; or the start
    record `spec` lists components, but the job has a different number of components.
    """
    from .node import allocation

    here = allocation.from_environ(os.environ)
    if here is None:
        sys.exit("rayslurm runtime: this is no task of a Slurm step: SLURM_JOB_ID and SLURM_NODEID are not set")
    try:
        return allocation.select_component(os.environ, here, [each.component_id for each in spec.components])
    except ValueError as error:
        sys.exit("rayslurm runtime: %s" % error)


def _lead_or_work(spec, here, log_dir, lead):  # type: (RuntimeSpec, allocation.Allocation, str, Lead) -> int
    """On the first node of the allocation `here`, call `lead`; on any other node, run the runtime of a worker node.

    Blocks until the runtime of this node ends; returns the exit code. `lead` is a function that runs payloads and returns the
    exit code. Its arguments are a new `Supervisor` and `here`. `spec` is the start record. `log_dir` is the directory of the
    nodes' logs.
    """
    if here.node_id == 0:
        return lead(_supervisor(spec, allocation=here, log_dir=log_dir), here)

    from .process import loop, scratch
    from .ray import agent

    scratch.sweep()
    helper = agent.Worker(loop.Loop(), spec, here, scratch.Scratch(), log_dir, lambda: _dispensable.__setitem__(0, 1))
    helper.run()
    if helper.exit_code:
        _dispensable[0] = 0
    return helper.exit_code


# Roles that srun starts as tasks of a Slurm step.
_IN_A_STEP = {"node": node, "element": element, "part": part, "session": session}
_ROLES = {"run": run, "serve": serve, **_IN_A_STEP}  # Roles that run payloads; each has a keeper as its parent.


def main(argv):  # type: (list[str]) -> int
    """Run the role that the first word of `argv` names, such as `node`; returns the role's exit code.

    `argv` has the words of the command line after the program; the module's docstring lists the roles. For an unknown role, the
    process prints that docstring as an error message and exits.
    """
    role = argv[0] if argv else ""
    if role == "ray-node":
        from .ray import node_main

        return node_main.main(argv[1:])
    if role == "health":
        from .node import health

        return health.main(argv[1:])
    if role == "archive":
        from .node import log_archive

        return log_archive.main(argv[1:])
    if role == "ask":
        from .protocol import rpc

        return rpc.main(argv[1])
    if role == "relay":
        from .protocol import relay

        return relay.main()
    if role not in _ROLES:
        sys.exit(__doc__)

    from .process import processes

    def begin():  # type: () -> int
        from .protocol.spec import load_spec

        return _ROLES[role](load_spec(argv[1]), argv[1])

    if role in _IN_A_STEP:
        from .node import local_copy

        local_copy.enter(argv)
    processes.raise_file_limit()
    # A Dagster process ends the job of a single payload; a session may have no Dagster process, so the keeper ends its job.
    orphaned = (lambda: processes.cancel_own_job(os.environ)) if role == "session" else (lambda: None)
    return processes.guard(begin, lambda: _dispensable[0] == 1, role in _IN_A_STEP, orphaned)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
