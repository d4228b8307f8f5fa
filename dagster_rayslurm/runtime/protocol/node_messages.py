"""Messages between the head's runtime and the agents of worker nodes."""

from __future__ import annotations

from enum import Enum


class NodeCommand(str, Enum):
    """What the head tells a node, as the `op` of a message."""

    START_RAY = "ray"
    """Start Ray and join the cluster; `attempt` grows when the head had to take another port."""
    RAY_READY = "ready"
    """The cluster counts this node in: from now on the end of its Ray is a loss."""
    END_RAY = "end-ray"
    MEASURE = "measure"
    """Measure usage for a payload."""
    REPORT = "report"
    """Stop measuring for a payload, and send its usage."""
    ENDING = "ending"
    """The head was signalled and gives payloads their grace period; a node that was signalled as well stays until STOP."""
    STOP = "stop"

    def __str__(self) -> str:
        return self.value


class NodeEvent(str, Enum):
    """What the head hears of a node, as the `event` of a message."""

    JOINED = "joined"
    """The node connected for the first time. Made by the head."""
    LOST = "lost"
    """The node's connection was lost. Made by the head."""
    RAY_FAILED = "failed"
    RAY_ENDED = "ended"
    """Confirms END_RAY."""
    USAGE = "usage"
    """Answers REPORT."""
    MEMORY = "memory"
    """The node's memory is nearly full, or a Ray worker was killed for it."""

    def __str__(self) -> str:
        return self.value
