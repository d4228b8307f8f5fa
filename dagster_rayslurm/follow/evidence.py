"""What is known about a run from its record, its runtime and Slurm. Pure."""

from __future__ import annotations

import collections
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import without_colours
from ..runtime.protocol.record import Record, tail_lines
from ..slurm.accounting import JobFacts

_OUTPUT_CHUNK = 4096
"""Characters of each output record that are kept."""


@dataclass
class Evidence:
    """What is known about a run; `outcome.judge` turns it into a verdict."""

    end: Record | None = None
    started_at: float | None = None
    """When the runtime accepted the payload, by its node's clock."""
    queued: bool = False
    """Whether the payload waits in a session and has not started."""
    opened: int = 0
    """Writers that opened Pipes; a child process of the payload may be another one."""
    closed: int = 0
    exception: dict[str, Any] | None = None
    message_error: str | None = None
    """Why Dagster refused a Pipes message."""
    runtime_exit: str | None = None
    """How the runtime ended, in words, if it ended before its `end` was read."""
    runtime_log: str = ""
    culprit: str | None = None
    """The runtime that failed first, where it ended those of the other nodes."""
    job: JobFacts | None = None
    """Slurm's accounting of the job; queried only where the record does not explain the end."""
    ended_unrecorded: str | None = None
    """Why the payload must have ended although its runtime lives and recorded no `end`."""
    interrupted: bool = False
    usage: dict[str, Any] = field(default_factory=dict)
    """Resource usage so far; the `end` has the final figures."""
    context: dict[str, Any] = field(default_factory=dict)
    """Facts about the nodes; the `end` repeats them."""
    nodes_lost: int = 0
    """Nodes that were lost while the payload ran."""
    damaged_lines: int = 0
    unreachable: str | None = None
    """Why the record could not be read for `connection_loss_timeout`."""
    connection_lost: bool = False
    """Whether the record is unreachable because the whole connection is lost, so that Slurm is unreachable, too."""
    last_growth: float = field(default_factory=time.monotonic)
    """When the record last grew, by this machine's monotonic clock."""
    tails: dict[str, str] = field(default_factory=dict)
    """Ends of log files, by their title."""
    last_output: collections.deque[tuple[str, str]] = field(default_factory=lambda: collections.deque(maxlen=64))
    """Stream and text of the last output."""

    @property
    def started(self) -> bool:
        return self.started_at is not None

    @property
    def end_or_partial(self) -> Record | None:
        """The `end`; without one, its members that are known already."""
        return self.end or ({"context": self.context, "usage": self.usage} if self.context else None)

    def add_record(self, record: Record, nonce: str) -> None:
        """Take one record of the journal; an `end` counts only with the payload's own nonce."""
        kind = record.get("type")
        if kind == "start":
            self.started_at = float(record["at"])
        elif kind == "phase":
            self.nodes_lost += record["phase"] == "node-lost"
            self.queued = record["phase"] == "queued"
        elif kind == "tail":
            self.tails[record["name"]] = record["text"]
        elif kind == "context":
            self.context = record["context"]
        elif kind == "usage":
            self._add_usage(record["usage"], record["memory"])
        elif kind == "end" and record.get("nonce") == nonce:
            self.end = record

    def add_message(self, method: str, params: Mapping[str, Any]) -> None:
        """Take one Pipes message."""
        self.opened += method == "opened"
        self.closed += method == "closed"
        if method == "log" or method.startswith("report_"):
            # This writer still has Pipes open: a forked child that left the context sent `closed` for its parent.
            self.closed = min(self.closed, max(0, self.opened - 1))
        exception = params.get("exception") if method == "closed" else None
        # Every click or typer main ends with SystemExit; the exit code says what it meant.
        if exception and exception.get("name") != "SystemExit" and self.exception is None:
            self.exception = exception

    def add_output(self, record: Record) -> None:
        """Keep the end of the output."""
        self.last_output.append((record["s"], record["d"][-_OUTPUT_CHUNK:]))

    def output_tail(self) -> str:
        """The last lines of the output, without colours."""
        return tail_lines(without_colours("".join(text for _, text in self.last_output)))

    def last_errors(self) -> str:
        """The last standard error of the payload."""
        return "".join(text for stream, text in self.last_output if stream == "stderr")

    def _add_usage(self, usage: dict[str, Any], memory: float) -> None:
        """Append a point of the usage chart: seconds since the start, CPUs busy since the last point, bytes in use."""
        before, points = self.usage, self.usage.get("points", [])
        elapsed = usage["elapsed"] - before.get("elapsed", 0.0)
        busy = (usage["cpu_seconds"] - before.get("cpu_seconds", 0.0)) / elapsed if elapsed > 0 else 0.0
        self.usage = {**usage, "points": [*points, [usage["elapsed"], busy, memory]]}
