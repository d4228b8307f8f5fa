"""How much memory a job uses on this node, counted as Slurm counts it.

Slurm enforces a memory limit in one of two ways. With `task/cgroup` the kernel limits the job's cgroup. With
`JobAcctGatherParams=OverMemoryKill` slurmd adds up the resident memory of the job's processes. Shared memory does not
count with `NoShared`, and counts in proportion with `UsePss` (slurm.conf(5)). Without either way nothing enforces the limit.
"""

from __future__ import annotations

import os
import re
from typing import Callable, Dict, Iterable, List, NamedTuple, Optional, Tuple

_PAGE = os.sysconf("SC_PAGE_SIZE")
_RECLAIMABLE = {
    "memory.current": ("inactive_file", "active_file", "slab_reclaimable"),
    "memory.usage_in_bytes": ("total_inactive_file", "total_active_file"),
}
"""The file with the memory use of a cgroup, in versions 2 and 1, and the fields of `memory.stat` for memory that the kernel can
free at need."""
_JOB = re.compile(r"/job_\d+(/|$)")
"""The directory in a cgroup's path that Slurm makes for each job, in both cgroup versions."""

SHOW_CONFIG = ("scontrol", "show", "config")
"""The command whose output says how slurmd counts memory."""


def resident_and_shared(pid: int) -> Tuple[int, int]:
    """Bytes of resident memory of a process, and how many of them it may share with others; zeros if the process has ended."""
    try:
        with open("/proc/%d/statm" % pid) as file:
            fields = file.read().split()
    except OSError:
        return 0, 0
    return int(fields[1]) * _PAGE, int(fields[2]) * _PAGE


def private_memory(pid: int) -> int:
    """Bytes of memory that become free when a process ends: its resident memory without memory that it may share with others."""
    resident, shared = resident_and_shared(pid)
    return resident - shared


def resident_memory(pid: int) -> int:
    """Bytes of resident memory of a process, shared memory included."""
    return resident_and_shared(pid)[0]


def proportional_memory(pid: int) -> int:
    """Bytes of resident memory of a process, each shared page divided by the number of processes that map it (Linux 4.14)."""
    try:
        with open("/proc/%d/smaps_rollup" % pid) as file:
            found = re.search(r"^Pss:\s+(\d+) kB", file.read(), re.MULTILINE)
    except OSError:
        return 0
    return int(found.group(1)) * 1024 if found else 0


class MemoryAccounting(NamedTuple):
    """How slurmd counts the memory of a job."""

    memory_of: Callable[[int], int]
    """Returns the bytes that count for a process id."""
    enforced: bool
    """Whether slurmd ends a job whose processes exceed the memory limit in sum."""


def memory_accounting(config: Optional[str]) -> MemoryAccounting:
    """How slurmd counts memory, read from `config`, the output of `SHOW_CONFIG`; without output, slurmd enforces no limit."""
    values: Dict[str, str] = dict(re.findall(r"^(\w+)\s*= (.*)$", config or "", re.MULTILINE))
    params = values.get("JobAcctGatherParams", "").lower()
    if "overmemorykill" not in params:
        return MemoryAccounting(private_memory, enforced=False)
    if "usepss" in params:
        return MemoryAccounting(proportional_memory, enforced=True)
    private = "noshare" in params or values.get("JobAcctGatherType", "").endswith("/cgroup")
    return MemoryAccounting(private_memory if private else resident_memory, enforced=True)


def job_cgroups(limits: Iterable[Tuple[str, int]]) -> List[Tuple[str, int]]:
    """The cgroups that Slurm made for this job and limits, as pairs (directory, bytes).

    Args:
        limits: all limits that apply to this process (`resources.cgroup_limits`).
    """
    memory = _PAGE * os.sysconf("SC_PHYS_PAGES")  # Version 1 writes a huge number for no limit.
    return [(directory, limit) for directory, limit in limits if _JOB.search(directory) and 0 < limit < memory]


def fullest(cgroups: Iterable[Tuple[str, int]]) -> Optional[Tuple[int, int]]:
    """Bytes used and bytes allowed in the cgroup that is nearest to its limit; None if no cgroup can be read."""
    uses = [(_cgroup_use(directory), limit) for directory, limit in cgroups]
    readable = [(used, limit) for used, limit in uses if used is not None]
    return max(readable, key=lambda each: each[0] / each[1], default=None)


def _cgroup_use(directory: str) -> Optional[int]:
    """Bytes of memory that a cgroup uses, without memory that the kernel can free; None if its files cannot be read."""
    for name, reclaimable in _RECLAIMABLE.items():
        try:
            with open(os.path.join(directory, name)) as file:
                used = int(file.read())
            with open(os.path.join(directory, "memory.stat")) as file:
                fields = dict(line.split() for line in file)
        except (OSError, ValueError):
            continue
        return max(0, used - sum(int(fields.get(key, 0)) for key in reclaimable))
    return None
