"""Processes below this runtime: list and kill them, run programs, end stray processes of payloads (Linux: /proc, prctl).

On other systems (macOS) there are only process groups, and these functions find no descendants.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional, Sequence

from .loop import Loop, Timer

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_CLOCK_STEP = 0.05
"""Seconds within which the starts of two processes cannot be ordered, because the kernel counts ticks."""

_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


class Process(NamedTuple):
    """One row of /proc/PID/stat."""

    pid: int
    parent: int
    cpu_seconds: float
    started: float = 0.0
    """Start time on the clock of `uptime`, to a hundredth of a second."""
    name: str = ""


def become_subreaper() -> None:
    """Make this process the parent of all orphans below it, instead of PID 1 (prctl(2), Linux 3.4)."""
    if _libc is not None:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def raise_file_limit(wanted: int = 65535) -> None:
    """Raise the soft limit of open files as far as the hard one allows; children inherit it.

    Ray needs some thousands on a large node (Ray 2.60 warns below 8192), and the head's runtime one for each node.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft == resource.RLIM_INFINITY or soft >= target:
        return
    with contextlib.suppress(OSError, ValueError):  # macOS has an even lower limit, which only the kernel knows.
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))


def die_with_parent(signum: int = signal.SIGKILL) -> Callable[[], None]:
    """A `preexec_fn` with which the kernel signals the child when its parent ends (prctl(2))."""
    parent = os.getpid()

    def arrange() -> None:
        if _libc is not None:
            _libc.prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0)
            if os.getppid() != parent:  # The parent ended before the prctl call.
                os.kill(os.getpid(), signum)

    return arrange


def table() -> Dict[int, Process]:
    """All readable processes of this machine, by process id."""
    if sys.platform != "linux":
        return {}
    tick = os.sysconf("SC_CLK_TCK")
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open("/proc/%s/stat" % name, "rb") as file:
                stat = file.read()
        except OSError:
            continue  # It ended meanwhile.
        end = stat.rindex(b")")  # The name, in parentheses, may contain any character.
        fields = stat[end + 2 :].split()
        cpu = (int(fields[11]) + int(fields[12])) / tick
        called = stat[stat.index(b"(") + 1 : end].decode("utf-8", "replace")
        found[int(name)] = Process(int(name), int(fields[1]), cpu, int(fields[19]) / tick, called)
    return found


def descendants(root: int, processes: Optional[Dict[int, Process]] = None) -> List[Process]:
    """The processes below `root`, including zombies, without `root` itself."""
    processes = table() if processes is None else processes
    below: Dict[int, List[Process]] = {}
    for process in processes.values():
        below.setdefault(process.parent, []).append(process)
    found: List[Process] = []
    queue = [root]
    while queue:
        children = below.get(queue.pop(), [])
        found += children
        queue += [child.pid for child in children]
    return found


def has_environment(pid: int, entry: str) -> bool:
    """Whether a process was started with `NAME=value` in its environment."""
    return os.fsencode(entry) in environment(pid)


def environment(pid: int) -> List[bytes]:
    """The `NAME=value` entries that a process was started with; none if it is gone or another user's."""
    return _read(pid, "environ").split(b"\0")


def command_line(pid: int) -> bytes:
    """The arguments of a process, each ended by NUL; a process may change that text. b"" if it is gone."""
    return _read(pid, "cmdline")


def _read(pid: int, name: str) -> bytes:
    try:
        with open("/proc/%d/%s" % (pid, name), "rb") as file:
            return file.read()
    except OSError:
        return b""


def with_environment(entry: str) -> List[int]:
    """The processes below this one that were started with `NAME=value` in their environment."""
    return [process.pid for process in descendants(os.getpid()) if has_environment(process.pid, entry)]


def signal_group(pid: int, signum: int) -> None:
    """Signal a process group, if it still exists."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: EPERM when only zombies are left.
        os.killpg(pid, signum)


def signal_name(signum: int) -> str:
    """ "SIGUSR1"; signals without a name, such as real-time ones, by number."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return "signal %d" % signum


def kill_all(pids: Iterable[int]) -> None:
    """SIGKILL some processes; ignores those that are gone or, by `sudo`, belong to another user."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


def uptime() -> float:
    """Seconds since this machine booted; the clock of `Process.started`."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if sys.platform == "linux" else time.monotonic()


def kill_orphans(keep: Iterable[int], before: Optional[float] = None) -> List[str]:
    """SIGKILL the orphans that this subreaper adopted, with all processes below them.

    Args:
        keep: the children that this process started itself, which are no orphans.
        before: kill only orphans that started before this time on the clock of `uptime`; None for all.

    Returns:
        The killed orphans as text: name and process id.
    """
    everything = table()
    me, kept = os.getpid(), set(keep)
    orphans = [each for each in everything.values() if each.parent == me and each.pid not in kept]
    strays = [each for each in orphans if before is None or each.started < before - _CLOCK_STEP]
    for process in strays:
        kill_all([process.pid, *(below.pid for below in descendants(process.pid, everything))])
    return ["%s (pid %d)" % (process.name, process.pid) for process in strays]


def kill_descendants(root: int, collect: Callable[[], None], timeout: float = 5.0) -> List[int]:
    """SIGKILL all processes below `root` until none is left, not even a zombie for PID 1.

    Args:
        root: this process, which must be a subreaper so that orphans below become its children.
        collect: reaps the children that ended.
        timeout: seconds after which processes in uninterruptible sleep are given up.

    Returns:
        The process ids that could not be killed.
    """
    deadline = time.monotonic() + timeout
    pause = 0.001
    while True:
        collect()
        left = [process.pid for process in descendants(root)]
        if not left or time.monotonic() > deadline:
            return left
        kill_all(left)
        time.sleep(pause)
        pause = min(2 * pause, 0.05)


def query_program(loop: Loop, argv: Sequence[str], timeout: float, on_answer: Callable[[Optional[str]], None]) -> None:
    """Run a program without blocking.

    Args:
        loop: the event loop.
        argv: the command.
        timeout: seconds after which the program is killed.
        on_answer: called with the output when the program has ended, or with None if it failed or was killed. Never called while
            the program hangs in an uninterruptible wait for a device or a file system.

    Raises:
        OSError: the program cannot be started.
    """
    reader, writer = os.pipe()
    os.set_blocking(reader, False)  # A process that the program left behind may keep the other end open.

    def ended(code: int, _: Any) -> None:
        timer.cancel()
        with os.fdopen(reader, "rb") as file:
            text = (file.read() or b"").decode("utf-8", "replace")
        on_answer(text if code == 0 else None)

    try:
        pid = loop.spawn(
            argv,
            ended,
            stdin=subprocess.DEVNULL,
            stdout=writer,
            stderr=subprocess.DEVNULL,
            preexec_fn=die_with_parent(),
        )
    except OSError:
        os.close(reader)
        raise
    finally:
        os.close(writer)

    timer = loop.call_later(timeout, lambda: signal_group(pid, signal.SIGKILL))


_LATER_SWEEPS = (1.0, 5.0)
"""Pauses before the second and the third sweep: a payload's last processes may leave orphans when they end."""


class StrayProcesses:
    """Kills orphans on this node that no running payload can own.

    The environment and the session of a daemon need not name its payload. But the payload ran when the daemon started, so once
    all payloads of that time have ended, the daemon is a stray.

    Args:
        loop: its child processes are never strays.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._running: Dict[str, float] = {}
        """Start of each running payload by nonce, on the clock of `uptime`."""
        self._timer: Optional[Timer] = None

    def begin(self, nonce: str) -> None:
        """Note that a payload is about to start processes on this node."""
        self._running.setdefault(nonce, uptime())

    def end(self, nonce: str) -> None:
        """Note that a payload has ended: kill its strays now, and those that appear shortly after."""
        self._running.pop(nonce, None)
        self._sweep(0)

    def _sweep(self, sweeps: int) -> None:
        oldest = min(self._running.values()) if self._running else None
        ended = []
        with contextlib.suppress(OSError):  # No file descriptors are left, perhaps; the next sweep may succeed.
            ended = kill_orphans(keep=self._loop.children(), before=oldest)
        if ended:
            print("rayslurm: ended stray processes of finished payloads: %s" % ", ".join(ended), file=sys.stderr, flush=True)
        if self._timer is not None:
            self._timer.cancel()
        if sweeps < len(_LATER_SWEEPS):
            self._timer = self._loop.call_later(_LATER_SWEEPS[sweeps], lambda: self._sweep(sweeps + 1))
