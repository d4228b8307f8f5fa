"""What payloads left in the cluster that is kept warm: looked for at a payload's end, and again once nothing runs."""

from __future__ import annotations

import time
from typing import Callable, List, Optional

from ..process.loop import Loop, Timer
from ..ray.cluster import RayCluster
from ..ray.leak_check import Tables, leaks, not_back, still_left

_PATIENCE = 0.3
"""Seconds that the end of a payload waits for the answer, which takes some milliseconds."""
_IDLE = 10.0
"""Seconds after the last payload's end in which Ray gives back what was only slow to go."""
_IDLE_PATIENCE = 5.0
_AGAIN = 2.0
"""Seconds after a payload's end in which Ray gives back what that payload has ended: a session may never be idle."""


class LeakWatch:
    """Looks for what is left.

    Args:
        loop: where the timers run.
        cluster: tells the cluster that is kept warm, or None.
    """

    def __init__(self, loop: Loop, cluster: Callable[[], Optional[RayCluster]]) -> None:
        self.found: List[str] = []
        """What is at work although no payload runs, as sentences."""
        self._left: Optional[Tables] = None
        """What the GCS knew when that was found, less what has gone since."""
        self._loop = loop
        self._cluster = cluster
        self._timer: Optional[Timer] = None
        self._again: Optional[Timer] = None

    def of(self, nonce: str) -> Callable[[Callable[[List[str]], None]], None]:
        """Asks, at the end of a payload that is about to start, what it leaves alive."""
        began = time.time()

        def audit(done: Callable[[List[str]], None]) -> None:
            def answered(tables: Optional[Tables]) -> None:
                self._forget_what_is_gone(tables)
                if self.found and self._again is None:
                    self._again = self._loop.call_later(_AGAIN, self._look_again)
                done([] if tables is None else leaks(tables, nonce, began))

            self._ask(_PATIENCE, answered)

        return audit

    def look_when_idle(self, idle: Callable[[], bool]) -> None:
        """Look whether all resources are back, unless something runs by then."""
        if self._timer is not None:
            self._timer.cancel()

        def answered(tables: Optional[Tables]) -> None:
            if tables is not None and idle():
                self._left, self.found = tables, not_back(tables)

        def look() -> None:
            if idle():
                self._ask(_IDLE_PATIENCE, answered)

        if self._cluster() is not None:
            self._timer = self._loop.call_later(_IDLE, look)

    def _look_again(self) -> None:
        self._again = None
        self._ask(_IDLE_PATIENCE, self._forget_what_is_gone)

    def _forget_what_is_gone(self, tables: Optional[Tables]) -> None:
        if tables is not None and self._left is not None:
            self._left = still_left(self._left, tables)
            self.found = not_back(self._left)

    def _ask(self, patience: float, done: Callable[[Optional[Tables]], None]) -> None:
        cluster = self._cluster()
        if cluster is None:
            return done(None)
        cluster.audit(patience, done)
