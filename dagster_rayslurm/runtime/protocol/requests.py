"""Requests to a running runtime and its answers; a request is a JSON object that names its operation in `op`."""

from __future__ import annotations

import traceback
from enum import Enum
from typing import Any, Callable, Dict

Answer = Dict[str, Any]
"""The answer to a request. If its `ok` is False, `error` says why, and `message` may explain it for the Dagster log."""


class Operation(str, Enum):
    """What a request is for."""

    RUN = "run"
    """Run the payload of a run directory."""
    WITHDRAW = "withdraw"
    """Do not run a payload, even if the request to run it arrives later than this one."""
    CANCEL = "cancel"
    """End a payload."""
    DESCRIBE = "describe"
    """Answer with the state of the runtime, and change nothing."""
    STOP = "stop"
    """End all payloads and the runtime."""
    YIELD = "yield"
    """End the runtime if it is idle, because another Slurm job waits for its nodes."""

    def __str__(self) -> str:
        return self.value


class Refusal(str, Enum):
    """Why a request is refused: the `error` of an answer."""

    DUPLICATE = "duplicate"
    """This payload was accepted before."""
    CLOSING = "closing"
    """The runtime takes no more payloads."""
    MISFIT = "misfit"
    """The payload needs more resources than Slurm granted on the nodes."""
    MISSING = "missing"
    """Files that the payload needs are not on the cluster; `missing` lists them."""
    MISSING_SECRETS = "missing-secrets"
    """The file with the payload's secrets is missing."""
    RECORD = "record"
    """The run directory cannot be written."""
    WITHDRAWN = "withdrawn"
    """A request to withdraw this payload came before."""
    REFUSED = "refused"
    """The request or the payload is invalid, or the runtime failed to handle it."""
    UNKNOWN = "unknown request"
    """The runtime does not know the operation."""
    BUSY = "busy"
    """The session is not idle."""
    KEPT = "kept"
    """The session is configured not to yield."""
    GONE = "gone"
    """The runtime has ended; the client gives this answer itself."""

    def __str__(self) -> str:
        return self.value


def refuse(error: Refusal, message: object = None, **more: Any) -> Answer:
    """The answer to a request that is refused, with the reason; `more` are further keys of the answer."""
    answer = {"ok": False, "error": error.value, **more}
    return answer if message is None else {**answer, "message": str(message)}


def answer_safely(handle: Callable[[], Any]) -> Any:
    """The answer of `handle`; if it raises an exception, a refusal, because one request must not end the payloads of others."""
    try:
        return handle()
    except Exception as error:
        traceback.print_exc()
        return refuse(Refusal.REFUSED, "%s: %s" % (type(error).__name__, error))
