"""Requests to a running runtime, and its answers: JSON objects with an operation `op`."""

from __future__ import annotations

import traceback
from enum import Enum
from typing import Any, Callable, Dict

Answer = Dict[str, Any]
"""`ok`, and if it is False an `error` and perhaps a `message` for the user."""


class Operation(str, Enum):
    """What a request is for."""

    RUN = "run"
    """Run the payload of a run directory."""
    WITHDRAW = "withdraw"
    """Never run a payload whose request may still arrive."""
    CANCEL = "cancel"
    """End a payload."""
    DESCRIBE = "describe"
    """Answer with the state of the runtime."""
    STOP = "stop"
    """End all payloads and the runtime."""
    YIELD = "yield"
    """End the runtime if it is idle, for another job that waits for its nodes."""

    def __str__(self) -> str:
        return self.value


class Refusal(str, Enum):
    """Why a request is refused: the `error` of an answer."""

    DUPLICATE = "duplicate"
    """This payload was accepted before."""
    CLOSING = "closing"
    """The runtime takes no more payloads."""
    MISFIT = "misfit"
    """The payload needs more than the nodes grant."""
    MISSING = "missing"
    """Files that the payload needs are not on the cluster; `missing` lists them."""
    MISSING_SECRETS = "missing-secrets"
    RECORD = "record"
    """The run directory cannot be written."""
    WITHDRAWN = "withdrawn"
    REFUSED = "refused"
    """The request or the payload is invalid, or the runtime failed to handle it."""
    UNKNOWN = "unknown request"
    BUSY = "busy"
    """The session is not idle."""
    KEPT = "kept"
    """The session is configured not to yield."""
    GONE = "gone"
    """The runtime has ended; the client makes this answer up."""

    def __str__(self) -> str:
        return self.value


def refuse(error: Refusal, message: object = None, **more: Any) -> Answer:
    """An answer that says why a request is refused."""
    answer = {"ok": False, "error": error.value, **more}
    return answer if message is None else {**answer, "message": str(message)}


def answer_safely(handle: Callable[[], Any]) -> Any:
    """The result of handling a request; an exception becomes an answer, because it must not end other clients' payloads."""
    try:
        return handle()
    except Exception as error:
        traceback.print_exc()
        return refuse(Refusal.REFUSED, "%s: %s" % (type(error).__name__, error))
