"""What is known about a run, as far as its record, its runtime and Slurm tell."""

from __future__ import annotations

import collections
import time
from dataclasses import dataclass, field
from typing import Any

from ..errors import without_colours
from ..runtime.protocol.record import Record, tail_lines
from ..slurm.accounting import JobFacts

_KEPT = 4096
"""Characters of each piece of output that are remembered."""


@dataclass
class Evidence:
    """What is known about a run; `outcome.judge` turns it into a verdict."""

    end: Record | None = None
    started_at: float | None = None
    """When the runtime took the payload over, by the clock of its node."""
    queued: bool = False
    """Whether it was last heard to wait for its turn in a session: nothing of it has run."""
    opened: int = 0
    """Writers that opened Pipes; a process that the payload starts may be one more."""
    closed: int = 0
    exception: dict[str, Any] | None = None
    message_error: str | None = None
    runtime_exit: str | None = None
    """How the runtime ended, in words, if it did so before its `end` was seen."""
    runtime_log: str = ""
    culprit: str | None = None
    """What ended first, where the runtime of one node took the others with it."""
    job: JobFacts | None = None
    """What Slurm says of the job; asked for only where the record does not tell all."""
    unrecorded: str | None = None
    """How it is known that the payload has ended, although its runtime lives and has recorded no `end`."""
    interrupted: bool = False
    usage: dict[str, Any] = field(default_factory=dict)
    """What had been used when the runtime last told; the `end` has all of it."""
    context: dict[str, Any] = field(default_factory=dict)
    """Facts about the nodes that the payload started on; the `end` has these, too."""
    nodes_lost: int = 0
    """How often the runtime told that a node is lost while the payload ran."""
    damaged_lines: int = 0
    unreachable: str | None = None
    """Why the record could not be read for `connection_loss_timeout`."""
    cut_off: bool = False
    """Whether that was because nothing there can be reached, so that there is no use in asking anybody."""
    heard_at: float = field(default_factory=time.monotonic)
    """When the record last grew, by this machine's monotonic clock."""
    tails: dict[str, str] = field(default_factory=dict)
    last_output: collections.deque[tuple[str, str]] = field(default_factory=lambda: collections.deque(maxlen=64))
    """Stream and text of the last output."""

    @property
    def started(self) -> bool:
        return self.started_at is not None

    @property
    def known(self) -> Record | None:
        """The `end`, or as much of it as is known without it."""
        return self.end or ({"context": self.context, "usage": self.usage} if self.context else None)

    def take_usage(self, usage: dict[str, Any], memory: float) -> None:
        """Take what has been used so far.

        Args:
            usage: the figures, without points.
            memory: bytes that are in use now.
        """
        before, points = self.usage, self.usage.get("points", [])
        elapsed = usage["elapsed"] - before.get("elapsed", 0.0)
        busy = (usage["cpu_seconds"] - before.get("cpu_seconds", 0.0)) / elapsed if elapsed > 0 else 0.0
        self.usage = {**usage, "points": [*points, [usage["elapsed"], busy, memory]]}

    def output_tail(self) -> str:
        """The last lines of the output, without colours."""
        return tail_lines(without_colours("".join(text for _, text in self.last_output)))

    def last_errors(self) -> str:
        """What the payload wrote to its standard error last."""
        return "".join(text for stream, text in self.last_output if stream == "stderr")

    def take_output(self, record: Record) -> None:
        """Remember the end of some output."""
        self.last_output.append((record["s"], record["d"][-_KEPT:]))
