"""The order that a payload ends: given again until it has arrived, as whoever takes it may be out of reach."""

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
"""Seconds between two tries."""


def cancel_file(run_dir: str) -> str:
    """Where a runtime finds what it is asked for."""
    return os.path.join(run_dir, CANCEL)


def order_text(now: bool) -> str:
    """What is written there."""
    return json.dumps({"op": "cancel", "now": now})


def write_order(connection: Connection, run_dir: str, now: bool) -> None:
    """Ask the runtime at work in a run directory to end its payload.

    Args:
        connection: reaches the files.
        run_dir: the run directory.
        now: whether to leave it no time.

    Raises:
        OSError: it cannot be written.
    """
    connection.write(cancel_file(run_dir), order_text(now).encode())


class CancelRequest:
    """The order that a payload ends; there is none before `issue`.

    Args:
        give: gives it, with whether to leave no time; an OSError if it does not arrive.
        log: the step's log.

    Attributes:
        now: whether it leaves no time; None if there is no order.
        arrived: whether it need not be given again.
        problem: why it could not be given the last time.
        tried_at: when that was, or when it arrived, by this machine's monotonic clock.
    """

    def __init__(self, give: Callable[[bool], Any], log: Any) -> None:
        self.now: bool | None = None
        self.arrived = False
        self.problem: OSError | None = None
        self.tried_at = 0.0
        self._give = give
        self._log = log
        self._told = False

    def issue(self, now: bool) -> None:
        """Give it, unless it was given before; one that leaves no time takes the place of one that does."""
        if self.now is None or now > self.now:
            self.now, self.arrived = now, False
            self._try(now)

    def repeat(self) -> None:
        """Give it again, if it has not arrived and was not given just now; for whoever waits for the end."""
        if self.now is not None and not self.arrived and time.monotonic() - self.tried_at >= _INTERVAL:
            self._try(self.now)

    def see_to(self, evidence: Evidence) -> None:
        """The same, for a payload that is followed: nobody waits on if it was to end at once and cannot be told."""
        self.repeat()
        if self.now and self.problem is not None:
            evidence.unreachable = str(self.problem)

    def _try(self, now: bool) -> None:
        try:
            self._give(now)
            self.arrived, self.problem = True, None
        except OSError as error:
            self.problem = error
            if not self._told:
                self._told = True
                self._log.warning(f"[rayslurm] the payload cannot be told to end, which is tried again: {error}")
        self.tried_at = time.monotonic()
