"""The kinds of messages between the head's runtime and the node agents of worker nodes."""

from __future__ import annotations

from enum import Enum


class NodeCommand(str, Enum):
    """What the head commands a worker node to do: the `op` of a message from the head."""

    START_RAY = "ray"
    """Start Ray and join the Ray cluster. `attempt` is higher each time that the head had to start Ray again on another port."""
    RAY_READY = "ready"
    """Treat an end of Ray as a loss from now on: this node has joined the Ray cluster."""
    END_RAY = "end-ray"
    """End Ray on this node for one Ray cluster."""
    MEASURE = "measure"
    """Measure usage for a payload."""
    REPORT = "report"
    """Stop measuring for a payload, and send its usage."""
    ENDING = "ending"
    """Stay until STOP, even after a signal: the head was signalled too, and gives payloads their grace period."""
    STOP = "stop"
    """End the runtime of this node."""

    def __str__(self) -> str:
        return self.value


class NodeEvent(str, Enum):
    """What happened on a worker node: the `event` of a message from its node agent, or of one that the head makes itself."""

    JOINED = "joined"
    """The node connected for the first time. The head makes this event itself."""
    LOST = "lost"
    """The node's connection was lost. The head makes this event itself."""
    RAY_FAILED = "failed"
    """Ray did not start on the node, or ended unexpectedly."""
    RAY_ENDED = "ended"
    """The node has carried out END_RAY."""
    USAGE = "usage"
    """The answer to REPORT: the measured usage."""
    MEMORY = "memory"
    """The node's memory is nearly full, or a Ray worker was killed for it."""

    def __str__(self) -> str:
        return self.value
