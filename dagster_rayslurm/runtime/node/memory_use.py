"""How much memory a job uses on this node, counted the way that Slurm counts it.

Slurm enforces a memory limit in one of two ways. With `task/cgroup` the kernel limits the job's cgroup. With
`JobAcctGatherParams=OverMemoryKill` slurmd adds up the job's processes: their resident memory, less what they share with
`NoShared`, or their proportional share with `UsePss` (slurm.conf(5)). Without either nothing enforces the limit.
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
"""The file that says what a cgroup uses, in versions 2 and 1, and what in `memory.stat` the kernel frees before it kills."""
_JOB = re.compile(r"/job_\d+(/|$)")
"""The part of a cgroup's path that Slurm gives each job, in both versions."""

SETTINGS = ("scontrol", "show", "config")
"""The command that tells how slurmd counts."""


def private_memory(pid: int) -> int:
    """Bytes that become free when a process ends: resident memory less what it may share."""
    resident, shared = _statm(pid)
    return resident - shared


def resident_memory(pid: int) -> int:
    """Bytes of memory that a process has, with what it shares."""
    return _statm(pid)[0]


def proportional_memory(pid: int) -> int:
    """Resident memory with each shared page divided by the number of processes that map it (Linux 4.14)."""
    try:
        with open("/proc/%d/smaps_rollup" % pid) as file:
            found = re.search(r"^Pss:\s+(\d+) kB", file.read(), re.MULTILINE)
    except OSError:
        return 0
    return int(found.group(1)) * 1024 if found else 0


class Counting(NamedTuple):
    """How the memory of processes is added up, and whether slurmd enforces the limit that way."""

    memory_of: Callable[[int], int]
    enforced: bool


UNKNOWN = Counting(private_memory, enforced=False)


def counting(settings: Optional[str]) -> Counting:
    """How slurmd counts, from the answer to `SETTINGS`; None if there is no answer."""
    values: Dict[str, str] = dict(re.findall(r"^(\w+)\s*= (.*)$", settings or "", re.MULTILINE))
    said = values.get("JobAcctGatherParams", "").lower()
    if "overmemorykill" not in said:
        return UNKNOWN
    if "usepss" in said:
        return Counting(proportional_memory, enforced=True)
    apart = "noshare" in said or values.get("JobAcctGatherType", "").endswith("/cgroup")
    return Counting(private_memory if apart else resident_memory, enforced=True)


def of_job(limits: Iterable[Tuple[str, int]]) -> List[Tuple[str, int]]:
    """Those cgroups that Slurm made for the job and that have a limit.

    Args:
        limits: directories of cgroups with their limits in bytes (`machine.cgroup_limits`).
    """
    memory = _PAGE * os.sysconf("SC_PHYS_PAGES")  # Version 1 writes a huge number for no limit.
    return [(directory, limit) for directory, limit in limits if _JOB.search(directory) and 0 < limit < memory]


def fullest(cgroups: Iterable[Tuple[str, int]]) -> Optional[Tuple[int, int]]:
    """Bytes used and allowed in the cgroup that is nearest to its limit; None if there is none."""
    found: List[Tuple[int, int]] = []
    for directory, limit in cgroups:
        used = _cgroup_use(directory)
        if used is not None:
            found.append((used, limit))
    return max(found, key=lambda each: each[0] / each[1], default=None)


def _cgroup_use(directory: str) -> Optional[int]:
    """Bytes that a cgroup uses and the kernel cannot free; file cache it can."""
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


def _statm(pid: int) -> Tuple[int, int]:
    """Bytes resident and shared of a process; none if it is gone."""
    try:
        with open("/proc/%d/statm" % pid) as file:
            fields = file.read().split()
    except OSError:
        return 0, 0
    return int(fields[1]) * _PAGE, int(fields[2]) * _PAGE
