"""Watches the memory of a job on this node, and kills a Ray worker before Slurm ends the whole job.

Memory is counted as Slurm counts memory. Slurm enforces a memory limit in one of two ways. With `task/cgroup` the kernel limits
the job's cgroup. With `JobAcctGatherParams=OverMemoryKill` slurmd adds up the resident memory of the job's processes. With
`NoShared`, this sum leaves out shared memory; with `UsePss`, each process counts with its proportion of shared memory
(slurm.conf(5)). If Slurm is configured in neither way, nothing enforces the limit.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass, field, replace
from typing import Callable, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from ..process.loop import Loop
from ..process.processes import Process, command_line, descendants, environment, kill_all, recent_table
from ..protocol.messages import TextEnum
from . import resources
from .slurm_config import query_config, setting
from .usage import Shared, memory_of

# ---- The decision; pure

# Shares of the memory limit from which the Dagster log shows a warning, and from which a Ray worker is killed.
WARN, KILL = 0.90, 0.95
# Share of the limit below which memory must fall before the next warning. It must stay below `WARN`: otherwise memory that rises
# and falls around this share repeats the warning each time.
_REARM = 0.85
# A worker is killed only if it uses at least the smaller of this share of the limit and this many bytes.
_LEAST_SHARE, _LEAST = 0.05, 256 * 2**20
# Seconds in which the memory of a killed worker should become free, before another worker is killed; gibibytes take some
# tenths of a second.
_SETTLE = 3.0
_FILL_RATE = 2 * 2**30  # Bytes per second by which memory use grows at most; one process touches new memory about that fast.
_SHORTEST, _LONGEST = 0.1, 5.0  # The least and the most seconds between two samples.


class GroupKind(TextEnum):
    """The kind of the process that leads a group of processes; only Ray workers may be killed."""

    WORKER = "worker"  # A Ray worker.
    DRIVER = "driver"  # A payload's own process.
    SYSTEM = "system"  # Any other process, such as Ray's daemons and this runtime.


class Group(NamedTuple):
    """A leading process, such as a Ray worker, and the processes below it that count with it (see `process_groups`)."""

    pid: int
    name: str  # What messages call the group, such as "ray::train".
    memory: int  # Bytes that become free when the group ends.
    kind: GroupKind


class Sample(NamedTuple):
    """One measurement on a node: the memory that the job uses and the job's limit, both in bytes, and the groups of processes.

    `groups` is empty if the job uses less than the share `WARN` of the limit.
    """

    used: int
    limit: int
    groups: Sequence[Group] = ()


@dataclass(frozen=True)
class State:
    """What the memory watch remembers from one sample of this node to the next."""

    warned: bool = False  # Whether a warning was given since memory use last fell below `_REARM`.
    victim: Optional[int] = None  # Process id of the Ray worker that was killed last.
    killed_at: float = 0.0  # When that worker was killed, in seconds of a monotonic clock.


class Action(NamedTuple):
    """What a sample of the memory requires: a sentence for the Dagster log, and perhaps the kill of a Ray worker.

    `kill` is the process id of this worker; None if the sentence is only a warning.
    """

    message: str
    kill: Optional[int] = None


def decide(node: str, state: State, sample: Sample, now: float, may_kill: bool = True) -> Tuple[State, Optional[Action]]:
    """Returns the state to remember for the next sample, and the warning or kill that `sample` requires.

    The second part is None if the sample requires neither. `state` is the state that was returned for the previous sample. `node`
    is the node's name for messages. `now` is the time of the sample, in seconds of a monotonic clock. With `may_kill=False`, for
    a limit that Slurm does not enforce, there are only warnings. A pure function.
    """
    share = sample.used / sample.limit
    if share < _REARM:
        return State(), None
    use = "%s uses %d %% of %s" % (node, 100 * sample.used // sample.limit, _in_mib(sample.limit))
    victim = _victim(state, sample, now) if may_kill and share >= KILL else None
    if victim is not None:
        advice = "raise SlurmQueueConfig.mem, or have Ray run fewer tasks at once with num_cpus= or memory= of the task"
        killed = "%s: killed the largest Ray worker, %s, before Slurm ends the whole job; %s" % (use, _named(victim), advice)
        return State(True, victim.pid, now), Action(killed, victim.pid)
    if share < WARN or state.warned:
        return state, None
    largest = _largest(sample.groups)
    return replace(state, warned=True), Action(use if largest is None else "%s; largest: %s" % (use, _named(largest)))


def pause(used: int, limit: int) -> float:
    """Returns the seconds to wait until the next sample, which are fewer if `used` is nearer to `limit` (both in bytes)."""
    return min(_LONGEST, max(_SHORTEST, (KILL * limit - used) / _FILL_RATE))


def _victim(state: State, sample: Sample, now: float) -> Optional[Group]:
    """Returns the Ray worker to kill, the one that uses most memory; None if no worker is to be killed now.

    No worker is to be killed in three cases: the last victim was killed less than `_SETTLE` seconds ago and still runs; a
    payload's own process uses more than any worker; or the largest worker is so small that killing it would not help. Groups of
    the kind `SYSTEM` do not count.
    """
    if state.victim in {group.pid for group in sample.groups} and now < state.killed_at + _SETTLE:
        return None
    largest = _largest([group for group in sample.groups if group.kind != GroupKind.SYSTEM])
    least = min(_LEAST_SHARE * sample.limit, _LEAST)
    return largest if largest is not None and largest.kind == GroupKind.WORKER and largest.memory >= least else None


def _largest(groups: Sequence[Group]) -> Optional[Group]:
    return max(groups, key=lambda group: group.memory, default=None)


def _named(group: Group) -> str:
    size = "%.1f GiB" % (group.memory / 2**30) if group.memory >= 2**30 else _in_mib(group.memory)
    return "%s, pid %d, %s" % (group.name, group.pid, size)


def _in_mib(size: int) -> str:
    return "%d MiB" % (size // 2**20)  # The unit of `SlurmQueueConfig.mem`.


# ---- What is counted

# The file with the memory use of a cgroup, in versions 2 and 1, and the fields of `memory.stat` for memory that the kernel can
# free at need.
_RECLAIMABLE = {
    "memory.current": ("inactive_file", "active_file", "slab_reclaimable"),
    "memory.usage_in_bytes": ("total_inactive_file", "total_active_file"),
}
_JOB = re.compile(r"/job_\d+(/|$)")  # The directory in a cgroup's path that Slurm makes for each job, in both versions.


def memory_accounting(config: Optional[str]) -> Tuple[Shared, bool]:
    """Returns how slurmd counts shared memory, and whether slurmd ends a job whose processes together exceed its memory limit.

    `config` has Slurm's settings as text, or is None if they are unknown. If slurmd ends no such jobs, or if `config` is None,
    the result is `Shared.NEVER` and False.
    """
    params = setting(config, "JobAcctGatherParams").lower()
    if "overmemorykill" not in params:
        return Shared.NEVER, False
    private = "noshare" in params or setting(config, "JobAcctGatherType").endswith("cgroup")
    return Shared.ONCE if "usepss" in params else Shared.NEVER if private else Shared.EACH, True


def job_cgroups(limits: Iterable[Tuple[str, int]]) -> List[Tuple[str, int]]:
    """Returns those entries of `limits` that are cgroups of a Slurm job with a real limit.

    An entry is a cgroup directory and a memory limit in bytes. A limit that exceeds the memory of the machine is not real.
    """
    memory = resources.hardware_memory()  # Version 1 writes a huge number for no limit.
    return [(directory, limit) for directory, limit in limits if _JOB.search(directory) and 0 < limit < memory]


def fullest(cgroups: Iterable[Tuple[str, int]]) -> Optional[Tuple[int, int]]:
    """Returns the bytes used and the bytes allowed in the cgroup that uses the largest share of its limit.

    An entry of `cgroups` is the path of a cgroup directory and a limit in bytes. Cgroups that cannot be read are ignored; the
    result is None if none is left.
    """
    uses = [(_cgroup_use(directory), limit) for directory, limit in cgroups]
    readable = [(used, limit) for used, limit in uses if used is not None]
    return max(readable, key=lambda each: each[0] / each[1], default=None)


def _cgroup_use(directory: str) -> Optional[int]:
    """Bytes of memory that a cgroup uses, without memory that the kernel can free; None if the cgroup's files cannot be read."""
    for name, reclaimable in _RECLAIMABLE.items():
        with contextlib.suppress(OSError, ValueError):
            with open(os.path.join(directory, name)) as file:
                used = int(file.read())
            with open(os.path.join(directory, "memory.stat")) as file:
                fields = dict(line.split() for line in file)
            return max(0, used - sum(int(fields.get(key, 0)) for key in reclaimable))
    return None


def process_groups(table: Dict[int, Process], ray_pids: Iterable[int], payload_pids: Iterable[int]) -> List[Group]:
    """Divides this process and all processes below it into groups; returns the groups, each with the memory of its processes.

    Args:
        table: All processes of this machine, by process id.
        ray_pids: Processes below which Ray's workers run. Each worker leads a group of all processes below the worker.
        payload_pids: The payloads' own processes. Each leads a group of all processes below it, except Ray workers.

    Every other process is a group of its own.
    """
    leaders = {pid: GroupKind.DRIVER for pid in payload_pids}
    for root in ray_pids:
        leaders.update({each.pid: GroupKind.WORKER for each in descendants(root, table) if _is_worker(each)})
    members: Dict[int, List[int]] = {}
    for pid in [os.getpid(), *(each.pid for each in descendants(os.getpid(), table))]:
        leader = pid
        while leader in table and leader not in leaders:
            leader = table[leader].parent
        members.setdefault(leader if leader in leaders else pid, []).append(pid)
    groups = []
    for leader, pids in members.items():
        kind = leaders.get(leader, GroupKind.SYSTEM)
        name = _title(leader) if kind == GroupKind.WORKER else os.path.basename(_title(leader))
        name = "the payload's own process" if kind == GroupKind.DRIVER else name
        groups.append(Group(leader, name, memory_of(pids, Shared.NEVER), kind))
    return groups


def _is_worker(process: Process) -> bool:
    """Whether a process is a Ray worker that runs a payload's tasks or actor, and not a process of Ray's own (Ray 2.60)."""
    entries = environment(process.pid)
    # Ray's agents have a raylet and no job; processes that a worker starts have both, but another parent.
    by_raylet = b"RAY_RAYLET_PID=%d" % process.parent in entries
    return by_raylet and any(each.startswith(b"RAY_JOB_ID=") for each in entries) and "JobSupervisor" not in _title(process.pid)


def _title(pid: int) -> str:
    """The first argument in a process's command line, cut off after 200 bytes; "" if the process is gone.

    A Ray worker writes the name of its task or actor there.
    """
    return command_line(pid)[:200].split(b"\0")[0].decode("utf-8", "replace")


# ---- The watch

_SCONTROL_TIMEOUT = 20.0  # Seconds in which `scontrol` must answer.
# Share of the memory limit from which Slurm is asked how it counts memory. Most jobs never use so much, which spares Slurm a
# query from each node.
_QUERY_SHARE = 0.5
# The pause after a sample is at least this many times as long as the sample took; a node may have thousands of processes.
_PAUSE_FACTOR = 10
_TABLE_AGE = 0.1  # Greatest age in seconds of a process table from /proc that a sample may use.


@dataclass(eq=False)
class MemoryWatch:
    """Samples the memory that a Slurm job uses on this node; near the job's limit, first warns and then kills a Ray worker.

    The watch begins when the object is created, and lasts as long as the event loop runs. Without a memory limit, nothing is
    watched.
    """

    loop: Loop
    node: str  # Name of this node for messages.
    ray_pids: Callable[[], List[int]]  # The processes below which Ray's workers run; nothing is watched while there are none.
    payload_pids: Callable[[], Iterable[int]]  # The payloads' own processes on this node.
    report: Callable[[str, bool], None]  # Called with a sentence for the Dagster log, and whether a Ray worker was killed.
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)

    def __post_init__(self) -> None:
        self._cgroups = job_cgroups(resources.cgroup_limits())
        self._limit = resources.slurm_memory(self.environ)
        self._shared = Shared.EACH  # How shared memory counts; this value holds until Slurm's configuration is known.
        self._enforced: Optional[bool] = True if self._cgroups else None  # Whether Slurm enforces the limit; None while unknown.
        self._queried = False
        self._state = State()
        if self._cgroups or self._limit:
            self.loop.call_later(0.0, self._sample_and_repeat)

    def _sample_and_repeat(self) -> None:
        began, delay = self.loop.now(), _LONGEST
        if self.ray_pids():
            with contextlib.suppress(OSError):  # Out of file descriptors, perhaps; the next sample may succeed.
                delay = self._sample()
        self.loop.call_later(max(delay, _PAUSE_FACTOR * (self.loop.now() - began)), self._sample_and_repeat)

    def _sample(self) -> float:
        """Take one sample, and warn or kill a Ray worker if `decide` says so; returns the seconds until the next sample.

        While it is not known whether Slurm enforces the limit, a sample causes neither a warning nor a kill. In this case, if at
        least half of the limit is used, the method queries Slurm's configuration, once.
        """
        used, limit = fullest(self._cgroups) or (self._memory_of_processes(), self._limit or 2**62)
        if self._enforced is None:
            if used >= _QUERY_SHARE * limit and not self._queried:
                self._query_slurm()
            return pause(used, limit)
        groups: List[Group] = []
        table: Dict[int, Process] = {}
        if used >= WARN * limit:
            _, table = recent_table(_TABLE_AGE)
            groups = process_groups(table, self.ray_pids(), self.payload_pids())
        self._state, action = decide(self.node, self._state, Sample(used, limit, groups), self.loop.now(), self._enforced)
        if action is not None:
            if action.kill is not None:
                kill_all([action.kill, *(each.pid for each in descendants(action.kill, table))])
            self.report(action.message, action.kill is not None)
        return pause(used, limit)

    def _memory_of_processes(self) -> int:
        """Bytes of memory that this process and all processes below it use."""
        _, table = recent_table(_TABLE_AGE)
        return memory_of([os.getpid(), *(process.pid for process in descendants(os.getpid(), table))], self._shared)

    def _query_slurm(self) -> None:
        """Start a query of Slurm's settings without waiting; `_answered` is called with the settings, or with None on failure."""
        self._queried = True
        try:
            query_config(self.loop, _SCONTROL_TIMEOUT, self._answered)
        except OSError:
            self._answered(None)

    def _answered(self, config: Optional[str]) -> None:
        self._shared, self._enforced = memory_accounting(config)
