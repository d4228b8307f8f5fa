"""Cancel requests: a file asks the runtime to end its payload, and is written again until that succeeds."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any

from ..follow import Evidence
from ..runtime.protocol.record import CANCEL
from ..ssh.base import Connection

_INTERVAL = 1.0
"""Seconds between two attempts to deliver a request."""


def cancel_path(run_dir: str) -> str:
    """Returns the path of the file in which a runtime looks for a cancel request."""
    return os.path.join(run_dir, CANCEL)


def cancel_request_json(now: bool) -> str:
    """Returns the content of a cancel request's file; `now` leaves the payload no grace period."""
    return json.dumps({"op": "cancel", "now": now})


def write_cancel_request(connection: Connection, run_dir: str, now: bool) -> None:
    """Ask the runtime of a run directory to end its payload, at once or after its grace period.

    Raises:
        OSError: the file cannot be written.
    """
    connection.write(cancel_path(run_dir), cancel_request_json(now).encode())


class CancelRequest:
    """The cancel request for one payload: made by `send`, and repeated by `resend` until it is delivered.

    Args:
        deliver: called with `now` to deliver the request; raises OSError on failure.

    Attributes:
        now: whether the request leaves the payload no grace period; None before `send`.
        delivered: whether the request has arrived, so that it need not be repeated.
        error: why the last delivery failed; None if it worked.
        sent_at: time of the last try to deliver the request, by this machine's monotonic clock.
    """

    def __init__(self, deliver: Callable[[bool], Any], log: Any) -> None:
        self.now: bool | None = None
        self.delivered = False
        self.error: OSError | None = None
        self.sent_at = 0.0
        self._deliver = deliver
        self._log = log
        self._warned = False

    def send(self, now: bool) -> None:
        """Send a request, unless an equal one was sent; a request without a grace period replaces one with a grace period."""
        if self.now is None or now > self.now:
            self.now, self.delivered = now, False
            self._try(now)

    def resend(self) -> None:
        """Repeat a request that was not delivered, at most once a second."""
        if self.now is not None and not self.delivered and time.monotonic() - self.sent_at >= _INTERVAL:
            self._try(self.now)

    def resend_for(self, evidence: Evidence) -> None:
        """Resend the request; mark the payload unreachable in the evidence if a request without grace period cannot arrive."""
        self.resend()
        if self.now and self.error is not None:
            evidence.unreachable = str(self.error)

    def _try(self, now: bool) -> None:
        try:
            self._deliver(now)
            self.delivered, self.error = True, None
        except OSError as error:
            self.error = error
            if not self._warned:
                self._warned = True
                self._log.warning(f"[rayslurm] the payload cannot be told to end, which is tried again: {error}")
        self.sent_at = time.monotonic()
