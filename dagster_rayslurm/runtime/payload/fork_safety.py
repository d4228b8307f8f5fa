"""What keeps an interpreter from being forked for a payload, or a payload from being forked from it.

Part of the template; see `template`.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from typing import Dict, Iterable, List, NamedTuple, Optional, Tuple

_FORK_SAFE_POOLS = ("openblas", "libmkl", "libiomp5", "libomp")
"""Libraries whose threads end before a fork and come back on demand after it (pthread_atfork); libgomp's do not."""

_FORK_SAFE_THREADS = ("jemalloc_bg_thd",)
"""Threads whose library does without them in a forked process (jemalloc 5, which pyarrow brings)."""

_DEVICES = ("/dev/nvidia", "/dev/kfd")

Status = Dict[str, Tuple[int, int]]
"""Time of change and size of files."""


class Threads(NamedTuple):
    """What is known of the threads and devices of a process."""

    python: List[str]
    """Names of Python's threads but for the main one."""
    others: List[str]
    """Names that the kernel has for the threads but for the main one, Python's included."""
    name: str
    """The main thread's own; one without a name of its own inherits it."""
    libraries: List[str]
    """Shared libraries that are mapped."""
    devices: List[str]
    cpus: int


def fork_problem(seen: Threads) -> Optional[str]:
    """Why no payload can be forked from a process, in the words that follow "because"; None if it can."""
    if seen.devices:
        return "importing them opened a GPU (%s), which no forked process can use" % seen.devices[0]
    if seen.python:
        return "importing them started the thread %r, which no forked process has" % seen.python[0]
    others = [name for name in seen.others if name not in _FORK_SAFE_THREADS]
    strange = [name for name in others if name != seen.name]
    if strange:
        return "importing them started the thread %r, which no forked process has" % strange[0]
    ends = ["/".join(library.split("/")[-2:]) for library in seen.libraries]  # Debian: openblas-pthread/libblas.so.3
    pools = [end for end in ends if any(pool in end for pool in _FORK_SAFE_POOLS)]
    if len(others) > len(pools) * max(seen.cpus - 1, 1):
        return "importing them started %d threads, which no forked process has" % len(others)
    return None


def look_at_threads() -> Threads:
    """Facts about this process (proc(5))."""
    main = threading.main_thread()
    me = str(os.getpid())
    names = {task: read("/proc/self/task/%s/comm" % task).strip() for task in os.listdir("/proc/self/task")}
    mapped = {line.split(None, 5)[5].strip() for line in read("/proc/self/maps").splitlines() if ".so" in line}
    opened = {_link("/proc/self/fd/%s" % fd) for fd in os.listdir("/proc/self/fd")}
    return Threads(
        [thread.name for thread in threading.enumerate() if thread is not main],
        [name for task, name in sorted(names.items()) if task != me],
        names[me],
        sorted(mapped),
        sorted(path for path in opened if path.startswith(_DEVICES)),
        os.cpu_count() or 1,
    )


def shadowed(directory: str, modules: Dict[str, Optional[str]]) -> Optional[str]:
    """A module that is imported already and that the payload would import from its own directory instead.

    Args:
        directory: what comes first in the payload's search path.
        modules: files of the imported modules that an interpreter does not have at its start, by name.
    """
    try:
        entries = list(os.scandir(directory))
    except OSError:
        return None
    for entry in entries:
        name, dot, extension = entry.name.partition(".")
        if name not in modules or (modules[name] or "").startswith(os.path.join(directory, "")):
            continue
        is_package = not dot and os.path.exists(os.path.join(entry.path, "__init__.py"))
        if is_package or extension == "py" or extension.endswith("so"):
            return name
    return None


def changed(files: Status) -> Optional[str]:
    """A file that is no longer what it was when it was imported."""
    return next((path for path, status in files.items() if _status(path) != status), None)


def sources(names: Iterable[str]) -> Status:
    """The files whose change must be noticed: those of the modules asked for, and of all that are not installed."""
    installed = tuple({os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib", "purelib", "platlib")})
    own, found = os.path.dirname(os.path.dirname(__file__)), {}
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if isinstance(path, str) and not path.startswith(own) and (name in names or not path.startswith(installed)):
            found[path] = _status(path)
    return found


def _status(path: str) -> Tuple[int, int]:
    try:
        found = os.stat(path)
        return found.st_mtime_ns, found.st_size
    except OSError:
        return 0, 0


def read(path: str) -> str:
    """The text of a file of /proc."""
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
