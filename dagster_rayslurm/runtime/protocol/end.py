"""How a payload or a Ray cluster ended."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import Optional


class EndReason(str, Enum):
    """Why a payload ended, as the `end` record says it; `outcome.verdict` maps each to a kind of failure."""

    EXIT = "exit"
    """The payload's process ended by itself: see its exit code or signal."""
    CANCEL = "cancel"
    """Dagster or `cleanup_cluster` asked for the end."""
    TERMINATED = "terminated"
    """The runtime received a signal, for instance from Slurm."""
    TIMEOUT = "timeout"
    """The payload's or the allocation's time limit."""
    RETURNED = "returned"
    """The session did not start the payload and gives it back."""
    ALLOCATION = "allocation"
    """The allocation has fewer resources than asked for."""
    ENVIRONMENT = "environment"
    """The environment lacks Ray, or has another version."""
    SPAWN = "spawn"
    """The command cannot be started."""
    CLUSTER_START = "cluster-start"
    CLUSTER_LOST = "cluster-lost"
    RECORD = "record"
    """The run directory cannot be written."""
    OTHER_COMPONENT = "other-component"
    """Separate topology: another component failed."""
    RUNTIME = "runtime"
    """A defect of the runtime."""

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class End:
    """How a payload ended."""

    reason: EndReason
    message: Optional[str] = None
    exit_code: Optional[int] = None
    signal: Optional[int] = None


def defect(error: BaseException) -> End:
    """The end of a payload that a defect of the runtime has ended: one line; where it happened is in the tail."""
    said = " ".join(str(error).split())
    return End(EndReason.RUNTIME, type(error).__name__ + (": " + said if said else ""))


class Ending:
    """What is known of a payload's end: what its process came to, and why the runtime ended it.

    Attributes:
        exit: how the process ended; None while it has not.
        verdict: why the runtime ends it, or has; None if it does not.
    """

    def __init__(self) -> None:
        self.exit: Optional[End] = None
        self.verdict: Optional[End] = None

    def decide(self, end: End) -> None:
        """End it for a reason, unless there is one already: the first one stands."""
        self.verdict = self.verdict or end

    @property
    def by_itself(self) -> bool:
        """Whether it ran to an end of its own, so that it took as long as it takes."""
        return self.verdict is None and self.exit is not None and self.exit.signal is None

    @property
    def terminated(self) -> bool:
        """Whether a signal from outside ended the run, so that Slurm may run it again."""
        return self.verdict is not None and self.verdict.reason == EndReason.TERMINATED

    @property
    def exit_code(self) -> int:
        """The exit code that a shell would report for the payload; 1 if something else ended the run."""
        if self.verdict is not None or self.exit is None:
            return 1
        return 128 + self.exit.signal if self.exit.signal is not None else int(self.exit.exit_code or 0)

    @property
    def how(self) -> Optional[End]:
        """Why it was ended, or how it ended by itself; None while it has not."""
        return self.verdict or self.exit


_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_PREFIX = re.compile(r"^\d{4}-\d\d-\d\d [\d:,]+\t[A-Z]+ \S+ -- ")
_TELLS_NOTHING = re.compile(r"\b(DEBUG|INFO)\b|`\{\}`")
"""Lines that are no errors, and the ones in which `ray start` prints a format without its values."""


class ClusterError(Exception):
    """The cluster did not start or was lost.

    Attributes:
        reason: ENVIRONMENT, CLUSTER_START or CLUSTER_LOST.
    """

    def __init__(self, reason: EndReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def last_words(log: str) -> str:
    """The last line of the log of `ray start` that may tell why it ended; "" if there is none."""
    lines = [line for line in map(str.strip, _COLOURS.sub("", log).splitlines()) if line and not _TELLS_NOTHING.search(line)]
    return _PREFIX.sub("", lines[-1])[:500] if lines else ""
