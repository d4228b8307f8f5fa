"""Why a job waits, in words, and why it can never start: each component of a heterogeneous job has a reason of its own. Pure.

Slurm 22.05 and 24.11 show the first component as waiting for resources even if another component can never start, and never
place two components of a job on the same node.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from .refusals import impossible, with_requested_values
from .request import JobRequest
from .snapshot import QueueRow

_UNINFORMATIVE = ("", "None", "Priority", "Resources")
"""Reasons that say only that the job waits for its turn."""
_TODAY = 18 * 3600.0
"""Seconds up to which an expected start is shown as a time of day, without the date."""
_AWAITED = ("BeginTime", "Dependency", "Licenses", "Priority", "Reservation", "Resources")
"""Beginnings of reasons that name what a job waits for; other reasons name what is wrong with it."""


def component_request(row: QueueRow, request: JobRequest) -> JobRequest:
    """The request for the component that a row of the queue shows.

    For an unknown component it is a request with the label and the partition of the row.
    """
    number = row.label.partition("+")[2]
    if number.isdigit() and int(number) < len(request.components) > 1:
        return request.components[int(number)].without_further_components
    if number:
        return replace(request.without_further_components, component_id=row.label, partition=row.partition)
    return request


def most_informative_row(rows: Sequence[QueueRow]) -> QueueRow | None:
    """The row of the component that delays the job the longest, as far as Slurm says; None if all rows say the same."""
    if len({(row.reason, row.start) for row in rows}) < 2:
        return None

    def rank(row: QueueRow) -> tuple[int, float]:
        never = impossible(row.reason, row.partition) is not None
        return (2 if never else int(row.reason not in _UNINFORMATIVE)), row.start or 0.0

    return max(rows, key=rank)


def pending_reason(reason: str, rows: Sequence[QueueRow], request: JobRequest) -> str:
    """Slurm's reason why a job waits, with the name of the component that waits longest; "" if it is not known.

    Args:
        reason: the reason of the job, which is that of its first component.
        rows: the components; empty for a job without components.
        request: the request for the job.
    """
    row = most_informative_row(rows)
    return reason if row is None else f"{row.reason or row.state} (component {component_request(row, request).component_id})"


def waiting_text(reason: str, start: float | None, now: float) -> str:
    """What a waiting job waits for, and until when, in words; "" if Slurm says neither.

    Args:
        reason: Slurm's word for why it waits; "" for none.
        start: when Slurm expects it to start, in seconds of the epoch. Jobs before it may end ahead of their time limits.
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
    """Why one of the components, and so the job, can never start; None if all may start."""
    for row in rows:
        part = component_request(row, request)
        reason = impossible(row.reason, part.partition)
        if reason:
            return f"component {part.component_id!r}: {with_requested_values(reason, part)}"
    return None


def too_many_nodes(row: QueueRow, request: JobRequest, sizes: Mapping[str, int]) -> str | None:
    """Why a job without components can never start, if it requests more nodes than its partition has; else None.

    Slurm's reason is `PartitionNodeLimit`, which also stands for nodes that are down and may come back.

    Args:
        row: the job in the queue.
        request: the request for the job.
        sizes: number of nodes of each partition.
    """
    nodes = sizes.get(row.partition, request.num_nodes)
    if request.num_nodes <= nodes:
        return None
    advice = "lower SlurmQueueConfig.num_nodes, or choose another partition"
    return with_requested_values(f"partition {row.partition} has {nodes} nodes; {advice} ({row.reason})", request)


def partition_too_small(rows: Sequence[QueueRow], request: JobRequest, sizes: Mapping[str, int]) -> str | None:
    """A warning if components together request more nodes of a partition than it has; else None.

    Slurm takes such a job and never starts it.

    Args:
        rows: the components in the queue.
        request: the request for the job.
        sizes: number of nodes of each partition.
    """
    for partition in dict.fromkeys(row.partition for row in rows):
        parts = [component_request(row, request) for row in rows if row.partition == partition]
        nodes = sum(row.num_nodes for row in rows if row.partition == partition)
        if nodes > sizes.get(partition, nodes):
            names = " and ".join(repr(part.component_id) for part in parts)
            return (
                f"components {names} ask for {nodes} nodes of partition {partition} in all, and it has {sizes[partition]}: Slurm "
                "gives each component nodes of its own, so this job does not start unless nodes are added; ask for fewer"
            )
    return None
