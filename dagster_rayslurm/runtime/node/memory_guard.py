"""Decides when to warn of a full node, and which Ray worker to kill. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import List, NamedTuple, Optional, Sequence, Tuple

WARN, KILL = 0.90, 0.95
"""Shares of the limit from which the user is warned, and from which a Ray worker is killed."""
_REARM = 0.85
"""Share of the limit below which memory must fall before the next warning; it stays below `WARN`, so that memory that hovers
around `WARN` causes one warning."""
_LEAST_SHARE, _LEAST = 0.05, 256 * 2**20
"""A worker that uses less than both this share of the limit and this many bytes is not killed."""
_SETTLE = 3.0
"""Seconds for which the memory of a killed worker may take to become free; gibibytes take some tenths of a second."""
_FILL_RATE = 2 * 2**30
"""Bytes per second by which memory may grow until the next sample; one process touches new memory about that fast."""
_SHORTEST, LONGEST = 0.1, 5.0
"""Seconds between two samples."""


class GroupKind(str, Enum):
    """What a group of processes is."""

    WORKER = "worker"
    """A Ray worker."""
    DRIVER = "driver"
    """A payload's own process."""
    SYSTEM = "system"

    def __str__(self) -> str:
        return self.value


class Group(NamedTuple):
    """A process with the processes below it.

    Attributes:
        pid: the process.
        name: as the user knows it, such as "ray::train".
        memory: bytes that become free when the group ends.
    """

    pid: int
    name: str
    memory: int
    kind: GroupKind


class Sample(NamedTuple):
    """Memory of the job on one node. `groups` may be empty unless `needs_groups`."""

    used: int
    limit: int
    groups: Sequence[Group] = ()


@dataclass(frozen=True)
class State:
    """What the guard remembers between two samples of a node."""

    warned: bool = False
    """Whether the user was warned."""
    victim: Optional[int] = None
    killed_at: float = 0.0


class Action(NamedTuple):
    """A sentence for the user; `kill` is the Ray worker to kill, if any."""

    message: str
    kill: Optional[int] = None


def decide(node: str, state: State, sample: Sample, now: float, may_kill: bool = True) -> Tuple[State, List[Action]]:
    """The new state, and the actions that one sample calls for.

    Args:
        node: name of the node.
        state: as returned for the sample before.
        now: seconds of a monotonic clock.
        may_kill: False if nothing enforces the limit.
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
    """Whether `decide` needs the groups of the sample."""
    return used >= (KILL if state.warned else WARN) * limit


def pause(used: int, limit: int) -> float:
    """Seconds until the next sample: the nearer to the limit, the sooner."""
    return min(LONGEST, max(_SHORTEST, (KILL * limit - used) / _FILL_RATE))


def _victim(state: State, sample: Sample, now: float) -> Optional[Group]:
    """The Ray worker to kill; None if the memory of the last one is not free yet, or if no kill would help."""
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
    """A size in the unit of `SlurmQueueConfig.mem`."""
    return "%d MiB" % (size // 2**20)


def in_words(size: int) -> str:
    """A size in the unit that is easiest to compare."""
    return "%.1f GiB" % (size / 2**30) if size >= 2**30 else in_mib(size)
