"""A snapshot of Slurm's queue: the rows of `squeue`, and the format of the file that shares them. Pure; Slurm 22.05 and 24.11."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

_VERSION = 1
"""Version of the file's format."""

_UNIT = "\x1f"
# The name comes last, as it may contain any character. %A is the number of a component or array task itself, %i the label that
# users know; %S of a pending job is when Slurm expects it to start.
COLUMNS = "".join(_UNIT + column for column in ("%A", "%i", "%T", "%r", "%S", "%V", "%D", "%N", "%P", "%j"))
"""The columns of `squeue --format`; a mark, which begins each row, stands before them."""


@dataclass(frozen=True)
class QueueRow:
    """A job, or one component of a heterogeneous job, in the queue.

    Attributes:
        job_id: the number of the job, or the own number of a component or array task.
        label: the number that users know, such as "12+1" or "12_[1-5]".
        state: Slurm's word, such as "PENDING".
        reason: why it waits, or why it ended; "None" for none.
        start: when it started, or is expected to, in seconds of the epoch; None if Slurm does not know.
        submit: when it was submitted or requeued.
        num_nodes: number of nodes that it has or requests.
        nodes: its nodes in Slurm's short form; "" while it has none.
        partition: one partition, or several separated by commas while it is pending.
        name: the job name, with any characters.
    """

    job_id: int
    label: str
    state: str
    reason: str
    start: float | None
    submit: float | None
    num_nodes: int
    nodes: str
    partition: str
    name: str

    @property
    def is_leader(self) -> bool:
        """Whether the id in this row stands for a whole job: a job without components, or the first component of one."""
        component = self.label.partition("+")[2]
        return not component or component == "0"

    @property
    def leader_label(self) -> str:
        """The beginning of the label that all components of the job share."""
        return self.label.partition("+")[0]


@dataclass(frozen=True)
class QueueSnapshot:
    """All jobs of the user in one answer of `squeue`.

    Attributes:
        began: when squeue was called, by the cluster's clock; jobs that were submitted later are not in the snapshot.
        rows: the jobs, including those that ended recently.
        took: seconds that squeue took.
    """

    began: float
    rows: tuple[QueueRow, ...]
    took: float = 0.0

    @cached_property
    def _by_id(self) -> dict[int, QueueRow]:
        return {row.job_id: row for row in self.rows}

    def job(self, job_id: int) -> QueueRow | None:
        """The row of a job; None if it is not in the queue."""
        return self._by_id.get(job_id)

    def components(self, job_id: int) -> tuple[QueueRow, ...]:
        """The rows of a job's components, in order; for a job without components, its one row.

        Slurm forgets each component at a time of its own, the first component too.
        """
        row = self.job(job_id)
        if row is not None and "+" not in row.label:
            return (row,)
        leader = str(job_id) if row is None else row.leader_label
        own = [each for each in self.rows if "+" in each.label and each.leader_label == leader]
        return tuple(sorted(own, key=lambda each: each.job_id))

    def named(self, name: str) -> tuple[QueueRow, ...]:
        """The rows of the jobs with this name."""
        return tuple(row for row in self.rows if row.name == name)


def render_snapshot(snapshot: QueueSnapshot) -> bytes:
    """A snapshot as a line of JSON."""
    rows = [dataclasses.astuple(row) for row in snapshot.rows]
    content = {"version": _VERSION, "began": snapshot.began, "took": snapshot.took, "rows": rows}
    return json.dumps(content, separators=(",", ":")).encode() + b"\n"


def parse_snapshot(data: bytes) -> QueueSnapshot | None:
    """The snapshot in the content of a file; None if it holds none, or one of another version."""
    try:
        content: dict[str, Any] = json.loads(data)
        if content["version"] != _VERSION:
            return None
        rows = tuple(QueueRow(*row) for row in content["rows"])
        return QueueSnapshot(float(content["began"]), rows, float(content["took"]))
    except (ValueError, KeyError, TypeError):
        return None


def parse_squeue(text: str, mark: str) -> tuple[QueueRow, ...]:
    """The rows of `squeue --format` with `mark` and `COLUMNS`, under `SLURM_TIME_FORMAT=%s` and `LC_ALL=C`.

    Raises:
        ValueError: the text has other lines.
    """
    before, *rows = ("\n" + text.removesuffix("\n")).split(f"\n{mark}{_UNIT}")
    if before.strip():
        raise ValueError(f"squeue printed {before.strip()[:200]!r} where jobs were expected")
    return tuple(map(_row, rows))


def _row(text: str) -> QueueRow:
    fields = text.split(_UNIT, COLUMNS.count(_UNIT) - 1)
    try:
        number, label, state, reason, start, submit, num_nodes, nodes, partition, name = fields
        return QueueRow(
            job_id=int(number),
            label=label,
            state=state,
            reason=reason,
            start=parse_time(start),
            submit=parse_time(submit),
            num_nodes=parse_count(num_nodes),
            nodes=nodes,
            partition=partition,
            name=name,
        )
    except ValueError:
        raise ValueError(f"squeue printed {text[:200]!r} where a job was expected") from None


def parse_time(text: str) -> float | None:
    """A time as Slurm prints it with `SLURM_TIME_FORMAT=%s`; None for "N/A", "Unknown" and such."""
    return float(text) if re.fullmatch(r"[1-9][0-9]*", text) else None


def parse_count(text: str) -> int:
    """A number as Slurm prints it: "1K" for 1024 nodes (convert_num_unit), the first of a range "2-4", 0 for any other text."""
    match = re.match(r"([0-9]+)([KM]?)(?:-|$)", text)
    return int(match[1]) * {"": 1, "K": 1024, "M": 1024 * 1024}[match[2]] if match else 0
