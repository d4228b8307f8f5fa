"""How payloads and Ray clusters end."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Optional


class EndReason(str, Enum):
    """Why a payload ended, as the `end` record says it; `outcome.verdict` maps each to a kind of failure."""

    EXIT = "exit"
    """The payload's process ended by itself: see its exit code or signal."""
    CANCEL = "cancel"
    """Dagster or `cleanup_cluster` cancelled it."""
    TERMINATED = "terminated"
    """The runtime received a signal, for instance from Slurm."""
    TIMEOUT = "timeout"
    """The payload's or the allocation's time limit."""
    RETURNED = "returned"
    """The session returned the payload without starting it."""
    ALLOCATION = "allocation"
    """The allocation has fewer resources than requested."""
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
    """The end of a payload that a defect of the runtime ended; the message is one line, without the traceback."""
    text = " ".join(str(error).split())
    return End(EndReason.RUNTIME, type(error).__name__ + (": " + text if text else ""))


class PayloadEnd:
    """How one payload ends, while it does: by its own process, by the runtime, or by both.

    Attributes:
        exit: how the process ended; None until then.
        forced: why the runtime ends the payload; None if it does not.
    """

    def __init__(self) -> None:
        self.exit: Optional[End] = None
        self.forced: Optional[End] = None

    def force(self, end: End) -> None:
        """Set why the runtime ends the payload; only the first reason counts."""
        self.forced = self.forced or end

    @property
    def result(self) -> Optional[End]:
        """How the payload ended: the runtime's reason, else the end of the process; None until then."""
        return self.forced or self.exit

    @property
    def ran_to_exit(self) -> bool:
        """Whether the process exited by itself, so that its duration is that of a whole run."""
        return self.forced is None and self.exit is not None and self.exit.signal is None

    @property
    def terminated(self) -> bool:
        """Whether a signal to the runtime ended the payload, so that Slurm may run it again."""
        return self.forced is not None and self.forced.reason == EndReason.TERMINATED

    @property
    def exit_code(self) -> int:
        """The exit code that a shell would report for the process; 1 if the runtime ended the payload."""
        if self.forced is not None or self.exit is None:
            return 1
        return 128 + self.exit.signal if self.exit.signal is not None else int(self.exit.exit_code or 0)


class ClusterError(Exception):
    """The Ray cluster did not start or was lost.

    Attributes:
        reason: ENVIRONMENT, CLUSTER_START or CLUSTER_LOST.
    """

    def __init__(self, reason: EndReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
