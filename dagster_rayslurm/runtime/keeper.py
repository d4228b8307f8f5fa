"""The keeper: a parent that does nothing but make sure that no process outlives the runtime.

The runtime tears down what it started. The keeper is for the case that the runtime itself is killed: it is the
runtime's parent and a subreaper, so everything below becomes its child, and it ends all of it. When the keeper is
killed instead, the kernel sends the runtime SIGTERM, which then tears down as usual.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import Callable

from . import processes, scratch

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def guard(main: Callable[[], int], excused: Callable[[], bool] = lambda: False) -> int:
    """Run `main` in a forked child and outlive it.

    Args:
        main: what to run.
        excused: asked in this process when `main` has ended: whether its end, however it came, is no failure.

    Returns:
        The exit code of `main`, or 128 + the signal that ended it; 0 if it is excused. The child never returns from here.
    """
    processes.become_subreaper()
    arrange = processes.die_with_parent(signal.SIGTERM)
    # Blocked until the handlers stand: a signal in between would end the keeper alone.
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    child = os.fork()
    if child == 0:
        arrange()
        processes.become_subreaper()
        _exit_with(main)
    for signum in _FORWARDED:
        signal.signal(signum, lambda received, _: _forward(child, received))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    # The runtime alone holds the control channel: its other end must see EOF when the runtime ends.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    code = _wait(child)
    for signum in _FORWARDED:
        signal.signal(signum, signal.SIG_IGN)  # Nobody is left to forward to, and the tidying up must not be broken off.
    processes.kill_descendants(os.getpid(), collect=_collect)
    scratch.sweep()
    if code != 0 and excused():
        print("rayslurm: this node's runtime ended with exit code %d; the other nodes go on without it" % code, file=sys.stderr)
        return 0
    return code


def _forward(child: int, signum: int) -> None:
    """Pass a signal on; the child may just have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signum)


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
