"""The order that a payload ends: given again until it has arrived, as whoever takes it may be out of reach."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any

from ..follow import Evidence
from ..runtime.protocol.record import CANCEL
from ..runtime.protocol.requests import Operation
from ..ssh.base import Connection

_INTERVAL = 1.0
"""Seconds between two tries."""


def cancel_path(run_dir: str) -> str:
    """Where a runtime finds what it is asked for."""
    return os.path.join(run_dir, CANCEL)


def cancel_request_json(now: bool) -> str:
    """What is written there."""
    return json.dumps({"op": Operation.CANCEL, "now": now})


def write_cancel_request(connection: Connection, run_dir: str, now: bool) -> None:
    """Ask the runtime at work in a run directory to end its payload.

    Args:
        connection: reaches the files.
        run_dir: the run directory.
        now: whether to leave it no time.

    Raises:
        OSError: it cannot be written.
    """
    connection.write(cancel_path(run_dir), cancel_request_json(now).encode())


class CancelRequest:
    """The order that a payload ends; there is none before `issue`.

    Args:
        give: gives it, with whether to leave no time; an OSError if it does not arrive.
        log: the step's log.

    Attributes:
        now: whether it leaves no time; None if there is no order.
        delivered: whether it need not be given again.
        error: why it could not be given the last time.
        sent_at: when that was, or when it arrived, by this machine's monotonic clock.
    """

    def __init__(self, give: Callable[[bool], Any], log: Any) -> None:
        self.now: bool | None = None
        self.delivered = False
        self.error: OSError | None = None
        self.sent_at = 0.0
        self._give = give
        self._log = log
        self._told = False

    def send(self, now: bool) -> None:
        """Give it, unless it was given before; one that leaves no time takes the place of one that does."""
        if self.now is None or now > self.now:
            self.now, self.delivered = now, False
            self._try(now)

    def resend(self) -> None:
        """Give it again, if it has not arrived and was not given just now; for whoever waits for the end."""
        if self.now is not None and not self.delivered and time.monotonic() - self.sent_at >= _INTERVAL:
            self._try(self.now)

    def resend_for(self, evidence: Evidence) -> None:
        """The same, for a payload that is followed: nobody waits on if it was to end at once and cannot be told."""
        self.resend()
        if self.now and self.error is not None:
            evidence.unreachable = str(self.error)

    def _try(self, now: bool) -> None:
        try:
            self._give(now)
            self.delivered, self.error = True, None
        except OSError as error:
            self.error = error
            if not self._told:
                self._told = True
                self._log.warning(f"[rayslurm] the payload cannot be told to end, which is tried again: {error}")
        self.sent_at = time.monotonic()
