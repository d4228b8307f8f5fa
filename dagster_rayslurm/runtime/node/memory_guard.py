"""Decides when to warn that a node's memory is nearly full, and which Ray worker to kill before Slurm ends the job. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import List, NamedTuple, Optional, Sequence, Tuple

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
