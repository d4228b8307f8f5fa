"""The keeper: the parent process of a runtime, which kills all processes below itself when the runtime has ended.

The runtime itself cleans up what it started. The keeper is for the case that the runtime is killed: it is a subreaper, so all
orphans below the runtime become the keeper's children, and it kills them. If the keeper is killed instead, the kernel sends the
runtime SIGTERM. The keeper also checks whether its own parent still lives. If slurmstepd was killed, the keeper sends the runtime
SIGTERM, because nothing else would end the processes on this node, and perhaps nothing would end the job.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from typing import Callable, Mapping

from . import processes, scratch

_PARENT_CHECK_INTERVAL = 2.0
"""Seconds between two checks whether slurmstepd, the keeper's parent, still lives.

The kernel's own signal (prctl(2), PR_SET_PDEATHSIG) is of no use here: it comes already when the thread of slurmstepd ends that
forked the keeper."""

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""The signals that the keeper passes on to the runtime."""

_SCANCEL_DELAY = 25.0
"""Seconds before the keeper cancels its job: until then Dagster asks Slurm why the payload ended, and must not see a cancel."""
_SCANCEL_TIMEOUT = 60.0
"""Seconds for one call of scancel."""
_SCANCEL_TRIES = 10
_SCANCEL_PAUSE = 30.0
"""Seconds between two calls of scancel, of which there are at most `_SCANCEL_TRIES`."""


def guard(
    main: Callable[[], int],
    excused: Callable[[], bool] = lambda: False,
    in_a_step: bool = False,
    orphaned: Callable[[], None] = lambda: None,
) -> int:
    """Turn this process into the keeper: run `main` in a forked child, and afterwards kill all processes below this one.

    Args:
        main: the runtime; it runs in the child, which exits with the returned code.
        excused: called in the keeper after the end of `main`; whether a failed runtime still makes the exit code 0.
        in_a_step: whether the keeper's parent is the slurmstepd of a job step; if slurmstepd ends, `main` must end as well.
        orphaned: called in the keeper after the end of `main` if that slurmstepd is gone.

    Returns:
        The exit code of `main`, or 128 + the signal that ended it; 0 if excused.
    """
    processes.become_subreaper()
    arrange = processes.die_with_parent(signal.SIGTERM)
    parent = os.getppid()
    # Signals are blocked until the handlers are set: a signal before that would end the keeper but not its child.
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    child = os.fork()
    if child == 0:
        arrange()
        processes.become_subreaper()
        _exit_with(main)
    for signum in _FORWARDED:
        signal.signal(signum, lambda received, _: _forward(child, received))
    if in_a_step:
        signal.signal(signal.SIGALRM, lambda *_: _check_parent(child, parent))
        signal.setitimer(signal.ITIMER_REAL, _PARENT_CHECK_INTERVAL, _PARENT_CHECK_INTERVAL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    # Standard input is the control channel. Only the runtime may hold it: the other end must see EOF when the runtime ends.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    code = _wait(child)
    signal.setitimer(signal.ITIMER_REAL, 0)
    for signum in _FORWARDED:
        signal.signal(signum, signal.SIG_IGN)  # There is no child to forward to, and the cleanup must not be interrupted.
    processes.kill_descendants(os.getpid(), collect=_reap)
    scratch.sweep()
    if in_a_step and os.getppid() != parent:
        orphaned()
    if code != 0 and excused():
        print("rayslurm: this node's runtime ended with exit code %d; the other nodes go on without it" % code, file=sys.stderr)
        return 0
    return code


def cancel_own_job(environ: Mapping[str, str], sleep: Callable[[float], None] = time.sleep) -> None:
    """Cancel the Slurm job of this task, because srun waits for the task for ever after slurmstepd was killed.

    Only the first node of the job does so. scancel is tried again while slurmctld does not answer.

    Args:
        environ: the task's environment, which names the job and the node.
        sleep: `time.sleep`, replaced in tests.
    """
    if environ.get("SLURM_NODEID") != "0":
        return
    sleep(_SCANCEL_DELAY)
    command, nothing = ["scancel", "--quiet", environ["SLURM_JOB_ID"]], subprocess.DEVNULL
    for _ in range(_SCANCEL_TRIES):
        try:
            # Without slurmstepd nothing reads the output of this process, so scancel gets none of its descriptors.
            if subprocess.run(command, stdin=nothing, stdout=nothing, stderr=nothing, timeout=_SCANCEL_TIMEOUT).returncode == 0:
                return
        except subprocess.TimeoutExpired:
            pass
        except OSError:
            return  # This node has no scancel.
        sleep(_SCANCEL_PAUSE)


def _forward(child: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # The child may just have ended.
        os.kill(child, signum)


def _check_parent(child: int, parent: int) -> None:
    """Send the runtime, our child, SIGTERM if slurmstepd, our parent, has ended."""
    if os.getppid() != parent:
        signal.setitimer(signal.ITIMER_REAL, 0)  # Once: a second signal would cut the payload's grace period short.
        _forward(child, signal.SIGTERM)


def _exit_with(main: Callable[[], int]) -> None:
    """Run `main` and exit the forked child with its code, never returning to the code that the parent goes on with."""
    code = 70  # EX_SOFTWARE of sysexits(3), unless `main` returns.
    try:
        code = main()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(code)


def _wait(child: int) -> int:
    """The exit code of the child, or 128 + the signal that ended it. Reaps all other children that end before."""
    while True:
        pid, status = os.wait()
        if pid == child:
            return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def _reap() -> None:
    """Reap the children that have ended, without blocking."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue
    except ChildProcessError:
        return
