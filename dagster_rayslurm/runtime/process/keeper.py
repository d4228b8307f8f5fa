"""The keeper: the runtime's parent process, which ends everything below it when the runtime has ended.

The runtime itself cleans up what it started. The keeper is for the case that the runtime is killed: it is a subreaper, so all
orphans below become its children, and it kills them. If the keeper is killed instead, the kernel sends the runtime SIGTERM. The
keeper also checks whether its own parent still lives: if slurmstepd was killed, it sends the runtime SIGTERM, because nothing
else would end the processes on this node, and perhaps not the job.
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
"""Seconds between two checks of the parent. The kernel's own signal (prctl(2), PR_SET_PDEATHSIG) comes already when the thread
ends that forked, which is no reason to end."""

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

_SCANCEL_DELAY = 25.0
"""Seconds before the job is cancelled: until then Dagster asks Slurm why the payload ended, and must not read "cancelled"."""
_SCANCEL_TIMEOUT = 60.0
_SCANCEL_TRIES = 10
_SCANCEL_PAUSE = 30.0


def guard(
    main: Callable[[], int],
    excused: Callable[[], bool] = lambda: False,
    in_a_step: bool = False,
    orphaned: Callable[[], None] = lambda: None,
) -> int:
    """Run `main` in a forked child, and afterwards kill everything below this process.

    Args:
        main: what the child runs; it never returns from here.
        excused: called in this process after the end of `main`; True makes the exit code 0.
        in_a_step: whether the parent is the slurmstepd of a job step, without which `main` must end.
        orphaned: called in this process after the end of `main` if that slurmstepd is gone.

    Returns:
        The exit code of `main`, or 128 + the signal that ended it.
    """
    processes.become_subreaper()
    arrange = processes.die_with_parent(signal.SIGTERM)
    parent = os.getppid()
    # Blocked until the handlers are set: a signal in between would end the keeper alone.
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
    # Only the runtime may hold the control channel: the other end must see EOF when the runtime ends.
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
    """Cancel this task's job if this is its first node: after slurmstepd was killed, srun waits for this task for ever.

    Retries while slurmctld does not answer.

    Args:
        environ: the task's environment.
        sleep: `time.sleep`, replaced in tests.
    """
    if environ.get("SLURM_NODEID") != "0":
        return
    sleep(_SCANCEL_DELAY)
    command, nothing = ["scancel", "--quiet", environ["SLURM_JOB_ID"]], subprocess.DEVNULL
    for _ in range(_SCANCEL_TRIES):
        try:
            # The output of this process is not read any more.
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
    """Send the child SIGTERM if the parent has ended."""
    if os.getppid() != parent:
        signal.setitimer(signal.ITIMER_REAL, 0)  # Once: a second signal would cut the payload's grace period short.
        _forward(child, signal.SIGTERM)


def _exit_with(main: Callable[[], int]) -> None:
    """Exit the forked child with the code of `main`, without returning into the parent's stack."""
    code = 70  # EX_SOFTWARE of sysexits(3), unless `main` returns.
    try:
        code = main()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(code)


def _wait(child: int) -> int:
    while True:
        pid, status = os.wait()
        if pid == child:
            return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue
    except ChildProcessError:
        return
