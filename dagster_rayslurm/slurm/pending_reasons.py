"""What the queue tells of a job that waits: of a heterogeneous one each component waits for reasons of its own. Pure.

Slurm 22.05 and 24.11 show the leader as waiting for resources even where another component can never start, and place
components of a job on nodes of their own, always.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from .errors import impossible, with_values
from .request import JobRequest
from .snapshot import QueueRow

_VAGUE = ("", "None", "Priority", "Resources")
"""Reasons that tell no more than that there is a queue."""
_TODAY = 18 * 3600.0
"""Seconds within which a time of day is not ambiguous."""
_AWAITED = ("BeginTime", "Dependency", "Licenses", "Priority", "Reservation", "Resources")
"""Beginnings of reasons that are what a job waits for; others are what is wrong with it."""


def part_of(row: QueueRow, request: JobRequest) -> JobRequest:
    """What the component in a row was asked for; with the row's label for its name if that is not known."""
    component = row.label.partition("+")[2]
    if component.isdigit() and int(component) < len(request.parts) > 1:
        return request.parts[int(component)].alone
    return replace(request.alone, component_id=row.label, partition=row.partition) if component else request


def most_telling(rows: Sequence[QueueRow]) -> QueueRow | None:
    """The component that holds up the job the longest, as far as Slurm says; None if all of them tell the same."""
    if len({(row.reason, row.start) for row in rows}) < 2:
        return None

    def tells(row: QueueRow) -> tuple[int, float]:
        never = impossible(row.reason, row.partition) is not None
        return (2 if never else int(row.reason not in _VAGUE)), row.start or 0.0

    return max(rows, key=tells)


def why(reason: str, rows: Sequence[QueueRow], request: JobRequest) -> str:
    """Why a job waits, in Slurm's word, and which component does; "" if that is not known.

    Args:
        reason: that of the job, which is its first component's.
        rows: of its components; none for a job that is none of several.
        request: what was asked for.
    """
    row = most_telling(rows)
    return reason if row is None else f"{row.reason or row.state} (component {part_of(row, request).component_id})"


def waiting_text(reason: str, start: float | None, now: float) -> str:
    """What a waiting job waits for, and until when, in words; "" if Slurm says neither.

    Args:
        reason: Slurm's word for why it waits; "" for none.
        start: when Slurm expects it to start, in seconds of the epoch: jobs before it may end ahead of their time limits.
        now: the time, in seconds of the epoch.
    """
    if not reason and not start:
        return ""
    waiting = f"waiting for {reason}" if reason.startswith(_AWAITED) else f"waiting: {reason}" if reason else "waiting"
    if not start:
        return waiting
    day = "%H:%M UTC" if start - now < _TODAY else "%Y-%m-%d %H:%M UTC"
    return f"{waiting}; Slurm expects a start at {time.strftime(day, time.gmtime(start))} at the latest"


def never_starts(rows: Sequence[QueueRow], request: JobRequest) -> str | None:
    """Why one of the components can never start, and with it the job; None if none is known to be so."""
    for row in rows:
        part = part_of(row, request)
        never = impossible(row.reason, part.partition)
        if never:
            return f"component {part.component_id!r}: {with_values(never, part)}"
    return None


def too_many_nodes(row: QueueRow, request: JobRequest, sizes: Mapping[str, int]) -> str | None:
    """Why a job of one kind of nodes can never start, if it asks for more nodes than its partition has.

    Slurm's word for that is `PartitionNodeLimit`, which also stands for nodes that are down and may come back.

    Args:
        row: of the job.
        request: what was asked for.
        sizes: nodes of each partition.
    """
    nodes = sizes.get(row.partition, request.num_nodes)
    if request.num_nodes <= nodes:
        return None
    advice = "lower SlurmQueueConfig.num_nodes, or choose another partition"
    return with_values(f"partition {row.partition} has {nodes} nodes; {advice} ({row.reason})", request)


def crowded(rows: Sequence[QueueRow], request: JobRequest, sizes: Mapping[str, int]) -> str | None:
    """Whether components ask for more nodes of a partition than it has: Slurm takes such a job, and never starts it.

    Args:
        rows: of the components.
        request: what was asked for.
        sizes: nodes of each partition.
    """
    for partition in dict.fromkeys(row.partition for row in rows):
        parts = [part_of(row, request) for row in rows if row.partition == partition]
        nodes = sum(row.num_nodes for row in rows if row.partition == partition)
        if nodes > sizes.get(partition, nodes):
            names = " and ".join(repr(part.component_id) for part in parts)
            return (
                f"components {names} ask for {nodes} nodes of partition {partition} in all, and it has {sizes[partition]}: Slurm "
                "gives each component nodes of its own, so this job does not start unless nodes are added; ask for fewer"
            )
    return None
