"""How much memory a job uses on this node, counted as Slurm counts it.

Slurm enforces a memory limit in one of two ways. With `task/cgroup` the kernel limits the job's cgroup. With
`JobAcctGatherParams=OverMemoryKill` slurmd adds up the resident memory of the job's processes. Shared memory does not
count with `NoShared`, and counts in proportion with `UsePss` (slurm.conf(5)). Without either way nothing enforces the limit.

Decides when to warn that a node's memory is nearly full, and which Ray worker to kill before Slurm ends the job. Pure.

Watches the memory of a job on this node, and kills a Ray worker before Slurm ends the whole job.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass, replace
from enum import Enum
from typing import Callable, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from ..process import processes
from ..process.loop import Loop
from ..process.processes import PROCESS_TABLE, Process, query_program, resident_and_shared
from . import resources

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


WARN, KILL = 0.90, 0.95
"""Shares of the memory limit from which the Dagster log shows a warning, and from which a Ray worker is killed."""
_REARM = 0.85
"""Share of the limit below which memory must fall before the next warning; it stays below `WARN`, so that memory that hovers
around `WARN` causes one warning."""
_LEAST_SHARE, _LEAST = 0.05, 256 * 2**20
"""A worker is killed only if it uses at least the smaller of this share of the limit and this many bytes."""
_SETTLE = 3.0
"""Seconds in which the memory of a killed worker should become free, before another worker is killed; gibibytes take some
tenths of a second."""
_FILL_RATE = 2 * 2**30
"""Bytes per second by which memory use is expected to grow at most; one process touches new memory about that fast."""
_SHORTEST, LONGEST = 0.1, 5.0
"""The least and the most seconds between two samples."""


class GroupKind(str, Enum):
    """What the leading process of a group is; only Ray workers may be killed."""

    WORKER = "worker"
    """A Ray worker."""
    DRIVER = "driver"
    """A payload's own process."""
    SYSTEM = "system"
    """Any other process, such as Ray's daemons and this runtime."""

    def __str__(self) -> str:
        return self.value


class Group(NamedTuple):
    """A leading process with the processes below it, whose memory counts together.

    Attributes:
        pid: id of the leading process.
        name: what messages call the group, such as "ray::train".
        memory: bytes that become free when the group ends.
    """

    pid: int
    name: str
    memory: int
    kind: GroupKind


class Sample(NamedTuple):
    """Bytes of memory that the job uses on one node, and the limit; `groups` may be empty unless `needs_groups` is true."""

    used: int
    limit: int
    groups: Sequence[Group] = ()


@dataclass(frozen=True)
class State:
    """What the guard remembers between two samples of a node."""

    warned: bool = False
    """Whether a warning was given since memory use last fell below `_REARM`."""
    victim: Optional[int] = None
    """Process id of the Ray worker that was killed last."""
    killed_at: float = 0.0
    """When that worker was killed, in seconds of a monotonic clock."""


class Action(NamedTuple):
    """What to do: a sentence to show in the Dagster log and, in `kill`, the process id of a Ray worker to kill, if any."""

    message: str
    kill: Optional[int] = None


def decide(node: str, state: State, sample: Sample, now: float, may_kill: bool = True) -> Tuple[State, List[Action]]:
    """The warnings and kills that one sample calls for, and the state for the next sample.

    Args:
        node: name of the node for messages.
        state: the state that the call for the previous sample returned.
        now: seconds of a monotonic clock.
        may_kill: whether a Ray worker may be killed; False if neither Slurm nor the kernel enforces the limit.
    """
    share = sample.used / sample.limit
    if share < _REARM:
        return State(), []
    victim = _victim(state, sample, now) if may_kill and share >= KILL else None
    if victim is not None:
        return State(True, victim.pid, now), [Action(_killed(node, sample, victim), victim.pid)]
    if share < WARN or state.warned:
        return state, []
    return replace(state, warned=True), [Action(_warning(node, sample))]


def needs_groups(state: State, used: int, limit: int) -> bool:
    """Whether memory use is so high that `decide` needs the groups of the sample, which take some time to collect."""
    return used >= (KILL if state.warned else WARN) * limit


def pause(used: int, limit: int) -> float:
    """Seconds until the next sample: the nearer to the limit, the sooner."""
    return min(LONGEST, max(_SHORTEST, (KILL * limit - used) / _FILL_RATE))


def _victim(state: State, sample: Sample, now: float) -> Optional[Group]:
    """The Ray worker to kill; None if the last killed worker has not ended yet, or if killing the largest would not help."""
    pids = {group.pid for group in sample.groups}
    if state.victim in pids and now < state.killed_at + _SETTLE:
        return None
    largest = _largest([group for group in sample.groups if group.kind != GroupKind.SYSTEM])
    least = min(_LEAST_SHARE * sample.limit, _LEAST)
    if largest is None or largest.kind != GroupKind.WORKER or largest.memory < least:
        return None
    return largest


def _largest(groups: Sequence[Group]) -> Optional[Group]:
    return max(groups, key=lambda group: group.memory, default=None)


def _use(node: str, sample: Sample) -> str:
    return "%s uses %d %% of %s" % (node, 100 * sample.used // sample.limit, in_mib(sample.limit))


def _warning(node: str, sample: Sample) -> str:
    largest = _largest(sample.groups)
    if largest is None:
        return _use(node, sample)
    return "%s; largest: %s, pid %d, %s" % (_use(node, sample), largest.name, largest.pid, in_words(largest.memory))


def _killed(node: str, sample: Sample, victim: Group) -> str:
    return (
        "%s: killed the largest Ray worker, %s, pid %d, %s, before Slurm ends the whole job; raise SlurmQueueConfig.mem, or "
        "have Ray run fewer tasks at once with num_cpus= or memory= of the task"
        % (_use(node, sample), victim.name, victim.pid, in_words(victim.memory))
    )


def in_mib(size: int) -> str:
    """A size in MiB, the unit of `SlurmQueueConfig.mem`, for messages."""
    return "%d MiB" % (size // 2**20)


def in_words(size: int) -> str:
    """A size in GiB, or in MiB below one GiB, for messages."""
    return "%.1f GiB" % (size / 2**30) if size >= 2**30 else in_mib(size)


_SCONTROL_TIMEOUT = 20.0
"""Seconds in which `scontrol` must answer."""
_QUERY_SHARE = 0.5
"""Share of the memory limit from which Slurm is asked how it counts memory. Most jobs never use so much, which spares Slurm a
query from each node."""
_PAUSE_FACTOR = 10
"""The pause after a sample is at least this many times as long as the sample took; a node may have thousands of processes."""
_TABLE_AGE = 0.1
"""Greatest age in seconds of a process table from /proc that a sample may use."""
_NO_LIMIT = 2**62
"""The limit in bytes where there is none."""

Report = Callable[[str, bool], None]
"""Called with a sentence for the Dagster log, and whether a Ray worker was killed."""


class MemoryWatch:
    """Samples the memory that a Slurm job uses on this node, warns of a full node, and kills a Ray worker if need be.

    Args:
        node: name of this node for messages.
        ray_pids: returns the ids of the processes below which Ray's workers run; nothing is watched while there are none.
        payload_pids: returns the process ids of the payloads on this node.
        report: called for each warning and each kill.
        environ: environment variables with Slurm's memory limit.
    """

    def __init__(
        self,
        loop: Loop,
        node: str,
        ray_pids: Callable[[], List[int]],
        payload_pids: Callable[[], Iterable[int]],
        report: Report,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self._loop = loop
        self._node = node
        self._ray_pids = ray_pids
        self._payload_pids = payload_pids
        self._report = report
        self._cgroups = job_cgroups(resources.cgroup_limits())
        self._limit = resources.slurm_memory(environ)
        self._accounting: Optional[MemoryAccounting] = None
        self._queried = False
        self._state = State()
        if self._cgroups or self._limit:
            loop.call_later(0.0, self._sample_and_repeat)

    def _sample_and_repeat(self) -> None:
        began = self._loop.now()
        pause = LONGEST
        if self._ray_pids():
            with contextlib.suppress(OSError):  # Out of file descriptors, perhaps; the next sample may succeed.
                pause = self._sample()
        self._loop.call_later(max(pause, _PAUSE_FACTOR * (self._loop.now() - began)), self._sample_and_repeat)

    def _sample(self) -> float:
        """Take one sample, warn or kill if it calls for that, and return the seconds until the next sample."""
        used, limit = fullest(self._cgroups) or self._memory_of_processes()
        if not self._cgroups and self._accounting is None:
            if used >= _QUERY_SHARE * limit:
                self._query_slurm()
            return pause(used, limit)
        groups: List[Group] = []
        table: Dict[int, Process] = {}
        if needs_groups(self._state, used, limit):
            _, table = PROCESS_TABLE.read()
            groups = process_groups(table, self._ray_pids(), self._payload_pids())
        may_kill = self._accounting is None or self._accounting.enforced
        sample = Sample(used, limit, groups)
        self._state, actions = decide(self._node, self._state, sample, self._loop.now(), may_kill)
        for action in actions:
            if action.kill is not None:
                processes.kill_all([action.kill, *(each.pid for each in processes.descendants(action.kill, table))])
            self._report(action.message, action.kill is not None)
        return pause(used, limit)

    def _memory_of_processes(self) -> Tuple[int, int]:
        """Bytes that this runtime's processes use, and the limit; until Slurm has told how it counts, shared memory counts."""
        _, table = PROCESS_TABLE.read(_TABLE_AGE)
        pids = [os.getpid(), *(process.pid for process in processes.descendants(os.getpid(), table))]
        memory_of = resident_memory if self._accounting is None else self._accounting.memory_of
        return sum(map(memory_of, pids)), self._limit or _NO_LIMIT

    def _query_slurm(self) -> None:
        """Ask Slurm, once only, how it counts memory."""
        if self._queried:
            return
        self._queried = True

        def answered(config: Optional[str]) -> None:
            self._accounting = memory_accounting(config)

        try:
            query_program(self._loop, SHOW_CONFIG, _SCONTROL_TIMEOUT, answered)
        except OSError:  # This node has no scontrol.
            answered(None)


def process_groups(table: Dict[int, Process], ray_pids: Iterable[int], payload_pids: Iterable[int]) -> List[Group]:
    """The processes below this runtime in groups: each Ray worker and each payload's process leads a group of all processes below
    it, and each other process is a group of its own.

    Args:
        table: all processes of this machine by id.
        ray_pids: the processes below which Ray's workers run.
        payload_pids: the payloads' own processes.
    """
    leaders = {pid: GroupKind.DRIVER for pid in payload_pids}
    for root in ray_pids:
        leaders.update({each.pid: GroupKind.WORKER for each in processes.descendants(root, table) if is_worker(each)})
    children: Dict[int, List[int]] = {}
    for process in table.values():
        children.setdefault(process.parent, []).append(process.pid)
    memory: Dict[int, int] = {}
    queue = [(os.getpid(), os.getpid())]
    while queue:
        pid, leader = queue.pop()
        memory[leader] = memory.get(leader, 0) + private_memory(pid)
        for child in children.get(pid, []):
            queue.append((child, leader if leader in leaders and child not in leaders else child))
    kinds = {pid: leaders.get(pid, GroupKind.SYSTEM) for pid in memory}
    return [Group(pid, _name(pid, kinds[pid]), size, kinds[pid]) for pid, size in memory.items()]


def is_worker(process: Process) -> bool:
    """Whether a process is a Ray worker that runs a payload's tasks or actor, not one of Ray's own processes (Ray 2.60)."""
    entries = processes.environment(process.pid)
    # Ray's agents have a raylet and no job; processes that a worker starts have both, but another parent.
    by_raylet = b"RAY_RAYLET_PID=%d" % process.parent in entries
    return by_raylet and any(each.startswith(b"RAY_JOB_ID=") for each in entries) and "JobSupervisor" not in _title(process.pid)


def _title(pid: int) -> str:
    """The first word of a process's command line, where a Ray worker writes what it does."""
    return processes.command_line(pid)[:200].split(b"\0")[0].decode("utf-8", "replace")


def _name(pid: int, kind: GroupKind) -> str:
    """What messages call a group of processes."""
    if kind == GroupKind.DRIVER:
        return "the payload's own process"
    return _title(pid) if kind == GroupKind.WORKER else os.path.basename(_title(pid))
