"""How payloads and Ray clusters end: the reasons, the `End` of a payload, and the error of a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Optional


class TextEnum(str, Enum):
    """A choice that is text in JSON and in messages."""

    def __str__(self) -> str:
        return str(self.value)


class EndReason(TextEnum):
    """Why a payload ended, as the `end` record says it; `outcome.verdict` maps each to a kind of failure."""

    EXIT = "exit"  # The payload's process ended by itself; `End.exit_code` or `End.signal` says how.
    CANCEL = "cancel"  # Dagster or `cleanup_cluster` cancelled the payload.
    TERMINATED = "terminated"  # The runtime received a signal, for instance from Slurm.
    TIMEOUT = "timeout"  # The payload's or the allocation's time limit was reached.
    RETURNED = "returned"  # The session accepted the payload but never started it; another session may run it.
    ALLOCATION = "allocation"  # The allocation has fewer resources than were requested of Slurm.
    ENVIRONMENT = "environment"  # The payload's Python environment lacks Ray, or has another version of it.
    SPAWN = "spawn"  # The payload's command cannot be started.
    CLUSTER_START = "cluster-start"  # The Ray cluster did not start.
    CLUSTER_LOST = "cluster-lost"  # The Ray cluster was lost after it had started.
    RECORD = "record"  # The run directory cannot be written.
    OTHER_COMPONENT = "other-component"  # In the separate topology, another component failed.
    RUNTIME = "runtime"  # The runtime has a defect, or lost the other components of the separate topology.


@dataclass(frozen=True)
class End:
    """How a payload ended: the reason, an explanation for the Dagster log, and how its process ended."""

    reason: EndReason
    message: Optional[str] = None  # None if the reason says it all.
    exit_code: Optional[int] = None  # Of the payload's process; None if a signal or the runtime ended it.
    signal: Optional[int] = None  # The signal that ended the payload's process.


def defect(error: BaseException) -> End:
    """The `End` of a payload that an unexpected exception in the runtime ended; its message is one line without traceback."""
    text = " ".join(str(error).split())
    return End(EndReason.RUNTIME, type(error).__name__ + (": " + text if text else ""))


class ClusterError(Exception):
    """Raised when a Ray cluster did not start, and passed on when one was lost; `reason` tells which, or ENVIRONMENT."""

    def __init__(self, reason: EndReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
