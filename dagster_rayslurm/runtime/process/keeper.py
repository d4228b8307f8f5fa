"""The keeper: a parent that does nothing but make sure that no process outlives the runtime.

The runtime tears down what it started. The keeper is for the case that the runtime itself is killed: it is the
runtime's parent and a subreaper, so everything below becomes its child, and it ends all of it. When the keeper is
killed instead, the kernel sends the runtime SIGTERM, which then tears down as usual. The keeper itself asks every now and
then whether its parent still lives: it sends the runtime SIGTERM when Slurm's slurmstepd has been killed, as nobody else
would ever end what runs on the node, nor perhaps the job.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import Callable

from . import processes, scratch

_ORPHANED_AFTER = 2.0
"""Seconds between two looks at the parent. The kernel's own message (prctl(2), PR_SET_PDEATHSIG) tells of the end of the
thread that forked, which is no reason."""

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def guard(
    main: Callable[[], int],
    excused: Callable[[], bool] = lambda: False,
    in_a_step: bool = False,
    orphaned: Callable[[], None] = lambda: None,
) -> int:
    """Run `main` in a forked child and outlive it.

    Args:
        main: what to run.
        excused: asked in this process when `main` has ended: whether its end, however it came, is no failure.
        in_a_step: whether the parent is the slurmstepd of a job step, without which `main` must not go on.
        orphaned: called in this process when `main` has ended and that slurmstepd is gone.

    Returns:
        The exit code of `main`, or 128 + the signal that ended it; 0 if it is excused. The child never returns from here.
    """
    processes.become_subreaper()
    arrange = processes.die_with_parent(signal.SIGTERM)
    parent = os.getppid()
    # Blocked until the handlers stand: a signal in between would end the keeper alone.
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    child = os.fork()
    if child == 0:
        arrange()
        processes.become_subreaper()
        _exit_with(main)
    for signum in _FORWARDED:
        signal.signal(signum, lambda received, _: _forward(child, received))
    if in_a_step:
        signal.signal(signal.SIGALRM, lambda *_: _end_an_orphan(child, parent))
        signal.setitimer(signal.ITIMER_REAL, _ORPHANED_AFTER, _ORPHANED_AFTER)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    # The runtime alone holds the control channel: its other end must see EOF when the runtime ends.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    code = _wait(child)
    signal.setitimer(signal.ITIMER_REAL, 0)
    for signum in _FORWARDED:
        signal.signal(signum, signal.SIG_IGN)  # Nobody is left to forward to, and the tidying up must not be broken off.
    processes.kill_descendants(os.getpid(), collect=_collect)
    scratch.sweep()
    if in_a_step and os.getppid() != parent:
        orphaned()
    if code != 0 and excused():
        print("rayslurm: this node's runtime ended with exit code %d; the other nodes go on without it" % code, file=sys.stderr)
        return 0
    return code


def _forward(child: int, signum: int) -> None:
    """Pass a signal on; the child may just have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signum)


def _end_an_orphan(child: int, parent: int) -> None:
    if os.getppid() != parent:
        signal.setitimer(signal.ITIMER_REAL, 0)  # Once: a second signal would cut the payload's grace period short.
        _forward(child, signal.SIGTERM)


def _exit_with(main: Callable[[], int]) -> None:
    """Leave the forked child by `main`'s code, never by returning into the parent's stack."""
    code = 70  # EX_SOFTWARE of sysexits(3), unless `main` says otherwise.
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


def _collect() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue
    except ChildProcessError:
        return
