"""Defines the values in messages: reasons why payloads end, commands and events between runtimes, requests and refusals."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from enum import Enum
from typing import Any, Callable, Dict, Optional

# The answer to a request. If its `ok` is False, `error` says why, and `message` may explain it for the Dagster log.
Answer = Dict[str, Any]


class TextEnum(str, Enum):
    """An enum whose values are texts; in JSON and in messages, a member is written as its value."""

    def __str__(self) -> str:
        return str(self.value)


class EndReason(TextEnum):
    """Why a payload ended: the `reason` in the `end` record, the last line that the runtime writes about a payload.

    On Dagster's side, the module `outcome.verdict` turns the reason into success or a kind of failure. Some reasons concern the
    separate topology, in which each component (group of equal nodes) of a heterogeneous job has its own payload and runtime.
    """

    EXIT = "exit"  # The payload's process ended by itself; `End.exit_code` or `End.signal` says how.
    CANCEL = "cancel"  # Dagster or `cleanup_cluster` cancelled the payload.
    TERMINATED = "terminated"  # The runtime received a signal, for instance from Slurm.
    TIMEOUT = "timeout"  # The payload's or the allocation's time limit was reached.
    RETURNED = "returned"  # The session accepted the payload but never started it; another session may run it.
    ALLOCATION = "allocation"  # The allocation has fewer resources than were requested of Slurm.
    ENVIRONMENT = "environment"  # The payload's Python environment lacks Ray, or has another version of Ray.
    SPAWN = "spawn"  # The payload's command cannot be started.
    CLUSTER_START = "cluster-start"  # The Ray cluster did not start.
    CLUSTER_LOST = "cluster-lost"  # The Ray cluster was lost after it had started.
    INFEASIBLE = "infeasible"  # The payload waits for what its Ray cluster can never grant.
    RECORD = "record"  # The run directory cannot be written.
    OTHER_COMPONENT = "other-component"  # In the separate topology, another component failed.
    RUNTIME = "runtime"  # The runtime has a defect, or lost the other components of the separate topology.


@dataclass(frozen=True)
class End:
    """How a payload ended: the reason, an explanation for the Dagster log, and how the payload's process ended."""

    reason: EndReason
    message: Optional[str] = None  # None if the reason says it all.
    exit_code: Optional[int] = None  # Of the payload's process; None if it did not start, or if a signal or the runtime ended it.
    signal: Optional[int] = None  # The signal that ended the payload's process; None if no signal ended it.


def defect(error: BaseException) -> End:
    """Returns the `End` of a payload that fails because of a bug in the runtime; `error` is the exception that the bug raised.

    The message of the `End` is one line with the type and the text of the exception, without traceback.
    """
    text = " ".join(str(error).split())
    return End(EndReason.RUNTIME, type(error).__name__ + (": " + text if text else ""))


# A node that failed a health check: its name as Slurm calls it (`node`), the `check`, and what the check `found`.
Unhealthy = Dict[str, str]


class ClusterError(Exception):
    """The failure of a Ray cluster: raised if the cluster did not start, passed to callbacks if the cluster was lost.

    `reason` is CLUSTER_START or CLUSTER_LOST, or ENVIRONMENT if the installed Ray cannot be used. `unhealthy` describes the node
    whose failed health check is the cause; None for any other cause.
    """

    def __init__(self, reason: EndReason, message: str, unhealthy: Optional[Unhealthy] = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.unhealthy = unhealthy  # The node whose failed health check is the cause; None for any other cause.


class NodeCommand(TextEnum):
    """A command from the runtime on the head node to the runtime on a worker node: the value of `op` in the message."""

    # Start Ray and join the Ray cluster. `attempt` in the message counts the starts of Ray on the head. If Ray must start again
    # on the head, for instance because a port was taken, the command comes again with a higher `attempt`.
    START_RAY = "ray"
    END_RAY = "end-ray"  # End Ray on this node for one Ray cluster.
    MEASURE = "measure"  # Measure usage for a payload.
    REPORT = "report"  # Stop measuring for a payload, and send its usage.
    ARCHIVE = "archive"  # Archive the logs of Ray into the run directory of a payload that failed.
    ENDING = "ending"  # Stay until STOP, even after a signal: the head was signalled too, and gives payloads their grace period.
    STOP = "stop"  # End the runtime of this node.


class NodeEvent(TextEnum):
    """The kind of an event on a worker node: the value of `event` in a message of the node.

    The head makes some of these messages itself, when a node connects or is lost.
    """

    JOINED = "joined"  # The node connected, for the first time or again. The head makes this event itself.
    LOST = "lost"  # The node's connection was lost. The head makes this event itself.
    GONE = "gone"  # The node has not reconnected in time after a loss. The head makes this event itself.
    RAY_FAILED = "failed"  # Ray did not start on the node, or ended unexpectedly.
    RAY_ENDED = "ended"  # The node has carried out END_RAY.
    USAGE = "usage"  # The answer to REPORT: the measured usage.
    ARCHIVED = "archived"  # The answer to ARCHIVE: the name of the archive, or None if it could not be written.
    MEMORY = "memory"  # The node's memory is nearly full, or the runtime has killed a Ray worker to free memory.


class Operation(TextEnum):
    """The operation that a client requests from a running runtime: the value of `op` in the request."""

    RUN = "run"  # Run the payload of a run directory.
    WITHDRAW = "withdraw"  # Do not run a payload, even if the request to run the payload arrives after this request.
    CANCEL = "cancel"  # End a payload.
    DESCRIBE = "describe"  # Answer with the state of the runtime, and change nothing.
    STOP = "stop"  # End all payloads and the runtime.
    RELAY = "relay"  # Hand this connection to a relay, through which the client reaches ports of the head node.
    YIELD = "yield"  # End the runtime if it is idle, because another Slurm job waits for its nodes.


class Refusal(TextEnum):
    """Why the runtime refuses a request: the value of `error` in the answer."""

    DUPLICATE = "duplicate"  # This payload was accepted before.
    CLOSING = "closing"  # The runtime takes no more payloads.
    MISFIT = "misfit"  # The payload needs more resources than Slurm granted on the nodes.
    MISSING = "missing"  # Files that the payload needs are not on the cluster; `missing` lists them.
    RECORD = "record"  # The run directory cannot be written.
    WITHDRAWN = "withdrawn"  # A request to withdraw this payload came before.
    REFUSED = "refused"  # The request or the payload is invalid, or the runtime failed to handle it.
    UNKNOWN = "unknown request"  # The runtime does not know the operation.
    BUSY = "busy"  # Answer to YIELD, which asks a session to end for another job: it has a payload, or had one a moment ago.
    KEPT = "kept"  # Answer to YIELD: the session's configuration forbids it to end for another job (`yield_when_idle=False`).
    GONE = "gone"  # The runtime has ended; the client gives this answer itself.


def refuse(error: Refusal, message: object = None, **more: Any) -> Answer:
    """Returns an answer that refuses a request, such as `{"ok": False, "error": "closing", "message": "it was idle for 60 s"}`.

    `error` is the kind of refusal. `message` explains the refusal; None leaves the key out. `more` has further keys of the
    answer.
    """
    answer = {"ok": False, "error": error.value, **more}
    return answer if message is None else {**answer, "message": str(message)}


def answer_safely(handle: Callable[[], Any]) -> Any:
    """Call `handle`, which answers a request, and return its answer.

    If `handle` raises an exception, print the traceback and return a refusal instead. An uncaught exception would end the
    runtime, and with the runtime the payloads of other clients.
    """
    try:
        return handle()
    except Exception as error:
        traceback.print_exc()
        return refuse(Refusal.REFUSED, "%s: %s" % (type(error).__name__, error))
