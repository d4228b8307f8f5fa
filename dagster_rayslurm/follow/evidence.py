"""Evidence: what is known about a payload from its record, its runtime and Slurm. Pure."""

from __future__ import annotations

import collections
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import without_colours
from ..runtime.protocol.record import Record, tail_lines
from ..slurm.accounting import JobFacts

_OUTPUT_CHUNK = 4096  # Most characters that are kept of each piece of output; `last_output` has 64 pieces.


@dataclass
class Evidence:
    """What is known about one payload so far; `outcome.judge` turns this into a verdict."""

    end: Record | None = None  # The last record of the payload, which says how the payload ended.
    started_at: float | None = None  # When the runtime accepted the payload, by the clock of the runtime's node.
    queued: bool = False  # Whether the payload waits in a session and has not started.
    opened: int = 0  # How many processes opened Dagster Pipes: the payload, and perhaps its children.
    closed: int = 0
    exception: dict[str, Any] | None = None  # The first that the payload reported when it closed Dagster Pipes.
    message_error: str | None = None  # Why Dagster refused a Pipes message.
    runtime_exit: str | None = None  # How the runtime ended, in words, if it ended and no `end` was read.
    runtime_log: str = ""
    culprit: str | None = None  # A clause about the runtime whose failure ended the runtimes on the other nodes.
    job: JobFacts | None = None  # Slurm's accounting of the job; fetched only if the record does not explain the end.
    ended_unrecorded: str | None = None  # Why the payload must have ended although its runtime lives and recorded no `end`.
    interrupted: bool = False  # Whether an interrupt of Dagster ended the payload.
    # Usage, and facts about environment, nodes and allocation, so far; the `end` has the final ones.
    usage: dict[str, Any] = field(default_factory=dict)
    context: dict[str, Any] = field(default_factory=dict)
    nodes_lost: int = 0
    damaged_lines: int = 0
    unreachable: str | None = None  # Why the record could not be read for `connection_loss_timeout`.
    connection_lost: bool = False  # Whether that is because the connection to the cluster is lost; then Slurm is, too.
    # When the record last grew, by this machine's monotonic clock.
    last_growth: float = field(default_factory=lambda: time.monotonic())
    tails: dict[str, str] = field(default_factory=dict)  # The ends of log files, by title.
    # The last pieces of output, each with its stream, "stdout" or "stderr".
    last_output: collections.deque[tuple[str, str]] = field(default_factory=lambda: collections.deque(maxlen=64))

    @property
    def started(self) -> bool:
        """Whether the runtime has accepted the payload."""
        return self.started_at is not None

    @property
    def end_or_partial(self) -> Record | None:
        """The `end` record; while there is none, a record of the context and usage so far; None without a context."""
        return self.end or ({"context": self.context, "usage": self.usage} if self.context else None)

    def add_record(self, record: Record, nonce: str) -> None:
        """Add one line of the record; an `end` counts only with the payload's own nonce."""
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
        """Count a Pipes message that opens or closes Pipes, and keep an exception that it reports."""
        self.opened += method == "opened"
        self.closed += method == "closed"
        if method == "log" or method.startswith("report_"):
            # The sender still has Pipes open: the earlier `closed` came from a forked child that left the parent's context.
            self.closed = min(self.closed, max(0, self.opened - 1))
        exception = params.get("exception") if method == "closed" else None
        # Every main function of click or typer ends with SystemExit; the exit code tells success from failure.
        if exception and exception.get("name") != "SystemExit" and self.exception is None:
            self.exception = exception

    def add_output(self, record: Record) -> None:
        """Add a piece of output; only the last pieces are kept."""
        self.last_output.append((record["s"], record["d"][-_OUTPUT_CHUNK:]))

    def output_tail(self) -> str:
        """Returns the last lines of the output, without colour codes."""
        return tail_lines(without_colours("".join(text for _, text in self.last_output)))

    def last_errors(self) -> str:
        """Returns the end of the payload's standard error."""
        return "".join(text for stream, text in self.last_output if stream == "stderr")

    def _add_usage(self, usage: dict[str, Any], memory: float) -> None:
        """Append a point of the usage chart: seconds since the start, CPUs busy since the last point, bytes in use."""
        before, points = self.usage, self.usage.get("points", [])
        elapsed = usage["elapsed"] - before.get("elapsed", 0.0)
        busy = (usage["cpu_seconds"] - before.get("cpu_seconds", 0.0)) / elapsed if elapsed > 0 else 0.0
        self.usage = {**usage, "points": [*points, [usage["elapsed"], busy, memory]]}
