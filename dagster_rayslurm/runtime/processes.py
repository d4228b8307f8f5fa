"""Processes of this runtime: who descends from it, and how to make sure that none outlives it (Linux: /proc, prctl).

Elsewhere (macOS) process groups are all there is, and the functions here find no descendants.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time
from typing import Callable, Dict, Iterable, List, NamedTuple, Optional

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


class Process(NamedTuple):
    """One row of /proc/PID/stat."""

    pid: int
    parent: int
    cpu_seconds: float


def become_subreaper() -> None:
    """Adopt every orphan below this process, instead of losing it to PID 1 (prctl(2), Linux 3.4)."""
    if _libc is not None:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def raise_file_limit(wanted: int = 65535) -> None:
    """Raise the soft limit of open files as far as the hard one allows; children inherit it.

    Ray needs some thousands on a large node (Ray 2.60 warns below 8192), a head one for each node besides.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft == resource.RLIM_INFINITY or soft >= target:
        return
    with contextlib.suppress(OSError, ValueError):  # macOS has a lower limit still, which only the kernel knows.
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))


def die_with_parent(signum: int = signal.SIGKILL) -> Callable[[], None]:
    """A `preexec_fn` that has the kernel signal the child when its parent ends (prctl(2))."""
    parent = os.getpid()

    def arrange() -> None:
        if _libc is not None:
            _libc.prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0)
            if os.getppid() != parent:  # The parent ended before the kernel was asked.
                os.kill(os.getpid(), signum)

    return arrange


def table() -> Dict[int, Process]:
    """Every process of this machine that can be read."""
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
        fields = stat[stat.rindex(b")") + 2 :].split()  # The name, in parentheses, may hold anything.
        cpu = (int(fields[11]) + int(fields[12])) / tick
        found[int(name)] = Process(int(name), int(fields[1]), cpu)
    return found


def descendants(root: int, processes: Optional[Dict[int, Process]] = None) -> List[Process]:
    """The processes below `root`, without itself; zombies too."""
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
    try:
        with open("/proc/%d/environ" % pid, "rb") as file:
            return os.fsencode(entry) in file.read().split(b"\0")
    except OSError:
        return False


def with_environment(entry: str) -> List[int]:
    """The processes below this one that were started with `NAME=value` in their environment."""
    return [process.pid for process in descendants(os.getpid()) if has_environment(process.pid, entry)]


def signal_group(pid: int, signum: int) -> None:
    """Signal what is left of a process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: EPERM when only zombies are left.
        os.killpg(pid, signum)


def signal_name(signum: int) -> str:
    """ "SIGUSR1"; signals without a name of their own, such as real-time ones, by number."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return "signal %d" % signum


def kill_all(pids: Iterable[int]) -> None:
    """SIGKILL some processes; those that are gone, or that `sudo` made another user's, are no error."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


def kill_orphans(keep: Iterable[int]) -> None:
    """SIGKILL what this subreaper adopted, with all below it; `keep` are the children it started itself."""
    everything = table()
    me, kept = os.getpid(), set(keep)
    for process in [each for each in everything.values() if each.parent == me and each.pid not in kept]:
        kill_all([process.pid, *(below.pid for below in descendants(process.pid, everything))])


def kill_descendants(root: int, collect: Callable[[], None], deadline: float = 5.0) -> List[int]:
    """SIGKILL everything below `root` until nothing is left, not even a zombie for PID 1.

    Args:
        root: this process, which must be a subreaper so that orphans below become its children.
        collect: reaps the children that ended.
        deadline: seconds after which what still stands (uninterruptible sleep) is given up.

    Returns:
        The process ids that could not be ended.
    """
    until = time.monotonic() + deadline
    pause = 0.001
    while True:
        collect()
        left = [process.pid for process in descendants(root)]
        if not left or time.monotonic() > until:
            return left
        kill_all(left)
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
