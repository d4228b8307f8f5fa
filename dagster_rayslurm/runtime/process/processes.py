"""The processes below this runtime: list and kill them, run programs, and kill what payloads leave behind.

This needs /proc and prctl of Linux. On other systems (macOS) there are only process groups, and these functions find no
descendants.
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

_PR_SET_PDEATHSIG = 1  # Operations of prctl(2).
_PR_SET_CHILD_SUBREAPER = 36

_CLOCK_STEP = 0.05
"""Seconds within which the starts of two processes cannot be ordered, because the kernel counts start times in ticks."""

_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


class Process(NamedTuple):
    """One process of this machine, as /proc/PID/stat describes it."""

    pid: int
    parent: int
    """Process id of the parent."""
    cpu_seconds: float
    """CPU time that the process has used, in user and kernel mode."""
    started: float = 0.0
    """Start time on the clock of `uptime`, to a hundredth of a second."""
    name: str = ""
    """Name of the program, cut off after 15 bytes."""


def become_subreaper() -> None:
    """Make this process adopt all orphans below it, instead of PID 1 (prctl(2), Linux 3.4)."""
    if _libc is not None:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def raise_file_limit(wanted: int = 65535) -> None:
    """Raise this process's soft limit of open files as far as the hard limit allows; children inherit it.

    Ray opens some thousands of files on a large node (Ray 2.60 warns below a limit of 8192), and the head's runtime has one
    connection to each node.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft == resource.RLIM_INFINITY or soft >= target:
        return
    with contextlib.suppress(OSError, ValueError):  # macOS has an even lower limit, which only the kernel knows.
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))


def die_with_parent(signum: int = signal.SIGKILL) -> Callable[[], None]:
    """Returns a `preexec_fn` for `subprocess`, by which the kernel signals the child when this process ends (prctl(2))."""
    parent = os.getpid()

    def arrange() -> None:
        if _libc is not None:
            _libc.prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0)
            if os.getppid() != parent:  # The parent ended before the prctl call.
                os.kill(os.getpid(), signum)

    return arrange


def table() -> Dict[int, Process]:
    """All processes of this machine, by process id; those that end meanwhile may be missing."""
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
            continue  # The process ended meanwhile.
        end = stat.rindex(b")")  # The name, in parentheses, may contain any character.
        fields = stat[end + 2 :].split()
        cpu = (int(fields[11]) + int(fields[12])) / tick
        called = stat[stat.index(b"(") + 1 : end].decode("utf-8", "replace")
        found[int(name)] = Process(int(name), int(fields[1]), cpu, int(fields[19]) / tick, called)
    return found


def descendants(root: int, processes: Optional[Dict[int, Process]] = None) -> List[Process]:
    """The processes below `root`, including zombies, without `root` itself; `processes` is a `table` that was read before."""
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
    """Whether a process was started with an entry `NAME=value` in its environment."""
    return os.fsencode(entry) in environment(pid)


def environment(pid: int) -> List[bytes]:
    """The entries `NAME=value` that a process was started with; none if the process is gone or belongs to another user."""
    return _read(pid, "environ").split(b"\0")


def command_line(pid: int) -> bytes:
    """The arguments of a process, each ended by NUL; b"" if the process is gone. A process may change its own arguments."""
    return _read(pid, "cmdline")


def _read(pid: int, name: str) -> bytes:
    """The content of /proc/PID/NAME; b"" if it cannot be read."""
    try:
        with open("/proc/%d/%s" % (pid, name), "rb") as file:
            return file.read()
    except OSError:
        return b""


def with_environment(entry: str) -> List[int]:
    """Process ids below this process that were started with an entry `NAME=value` in their environment."""
    return [process.pid for process in descendants(os.getpid()) if has_environment(process.pid, entry)]


def signal_group(pid: int, signum: int) -> None:
    """Send a signal to a process group, if the group still exists; `pid` is the id of its first process."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: EPERM when only zombies are left.
        os.killpg(pid, signum)


def signal_name(signum: int) -> str:
    """The name of a signal, such as "SIGUSR1"; "signal 35" for signals without a name, such as real-time signals."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return "signal %d" % signum


def kill_all(pids: Iterable[int]) -> None:
    """Send SIGKILL to processes; ignores those that are gone, and those that belong to another user (because of `sudo`)."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


def uptime() -> float:
    """Seconds since this machine booted, which is the clock of `Process.started`."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if sys.platform == "linux" else time.monotonic()


def kill_orphans(keep: Iterable[int], before: Optional[float] = None) -> List[str]:
    """Send SIGKILL to the orphans that this process adopted as their subreaper, and to all processes below them.

    Args:
        keep: process ids of the children that this process started itself, which are no orphans.
        before: only orphans that started before this time, on the clock of `uptime`, are killed; None for all.

    Returns:
        The killed orphans, each as text with its name and process id.
    """
    everything = table()
    me, kept = os.getpid(), set(keep)
    orphans = [each for each in everything.values() if each.parent == me and each.pid not in kept]
    strays = [each for each in orphans if before is None or each.started < before - _CLOCK_STEP]
    for process in strays:
        kill_all([process.pid, *(below.pid for below in descendants(process.pid, everything))])
    return ["%s (pid %d)" % (process.name, process.pid) for process in strays]


def kill_descendants(root: int, collect: Callable[[], None], timeout: float = 5.0) -> List[int]:
    """Send SIGKILL to all processes below `root` until none is left, not even a zombie that PID 1 would have to reap.

    Args:
        root: id of this process, which must be a subreaper so that orphans below become its children.
        collect: reaps the children that have ended.
        timeout: seconds after which the function gives up processes that do not end, such as those in uninterruptible sleep.

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
    """Run a program and call back with its standard output, without blocking.

    Args:
        loop: the event loop.
        argv: the program and its arguments.
        timeout: seconds after which the program is killed.
        on_answer: called once the program has ended: with its output, or with None if it failed or was killed. It is not called
            as long as the program hangs in an uninterruptible wait for a device or a file system.

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
"""Seconds before the second and the third search for strays: a payload's last processes may leave orphans when they end."""


class StrayProcesses:
    """Kills the stray processes on this node: orphans that no running payload can have started.

    A payload's daemon may have another environment and another session, so neither shows which payload started it. But that
    payload ran when the daemon started. So once all payloads of that time have ended, the daemon is a stray.

    Args:
        loop: the event loop; its child processes are never strays.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._running: Dict[str, float] = {}
        """Start time of each running payload, on the clock of `uptime`, by the payload's nonce."""
        self._timer: Optional[Timer] = None

    def begin(self, nonce: str) -> None:
        """To be called before a payload starts processes on this node; `nonce` identifies the payload."""
        self._running.setdefault(nonce, uptime())

    def end(self, nonce: str) -> None:
        """To be called when a payload has ended: kills the stray processes now, and again some seconds later."""
        self._running.pop(nonce, None)
        self._sweep(0)

    def _sweep(self, sweeps: int) -> None:
        """Kill the present strays, and set the timer for the next search; `sweeps` counts the searches before this one."""
        oldest = min(self._running.values()) if self._running else None
        ended = []
        with contextlib.suppress(OSError):  # Such as no free file descriptor; the next sweep may succeed.
            ended = kill_orphans(keep=self._loop.children(), before=oldest)
        if ended:
            print("rayslurm: ended stray processes of finished payloads: %s" % ", ".join(ended), file=sys.stderr, flush=True)
        if self._timer is not None:
            self._timer.cancel()
        if sweeps < len(_LATER_SWEEPS):
            self._timer = self._loop.call_later(_LATER_SWEEPS[sweeps], lambda: self._sweep(sweeps + 1))
