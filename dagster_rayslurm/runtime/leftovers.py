"""What payloads left in the cluster that is kept warm: looked for at a payload's end, and again once nothing runs."""

from __future__ import annotations

from typing import Callable, List, Optional

from .audit import Tables, leaks, not_back
from .cluster import RayCluster
from .loop import Loop, Timer

_PATIENCE = 0.3
"""Seconds that the end of a payload waits for the answer, which takes some milliseconds."""
_IDLE = 10.0
"""Seconds after the last payload's end in which Ray gives back what was only slow to go."""
_IDLE_PATIENCE = 5.0


class Leftovers:
    """Looks for what is left.

    Args:
        loop: where the timers run.
        cluster: tells the cluster that is kept warm, or None.
    """

    def __init__(self, loop: Loop, cluster: Callable[[], Optional[RayCluster]]) -> None:
        self.found: List[str] = []
        """What holds resources although nothing runs, as sentences."""
        self._loop = loop
        self._cluster = cluster
        self._timer: Optional[Timer] = None

    def of(self, nonce: str) -> Callable[[Callable[[List[str]], None]], None]:
        """Asks, at the end of a payload, what its jobs leave alive."""

        def audit(done: Callable[[List[str]], None]) -> None:
            self._ask(_PATIENCE, lambda tables: done([] if tables is None else leaks(tables, nonce)))

        return audit

    def look_when_idle(self, idle: Callable[[], bool]) -> None:
        """Look whether all resources are back, unless something runs by then."""
        if self._timer is not None:
            self._timer.cancel()

        def answered(tables: Optional[Tables]) -> None:
            if tables is not None and idle():
                self.found = not_back(tables)

        def look() -> None:
            if idle():
                self._ask(_IDLE_PATIENCE, answered)

        if self._cluster() is not None:
            self._timer = self._loop.call_later(_IDLE, look)

    def _ask(self, patience: float, done: Callable[[Optional[Tables]], None]) -> None:
        cluster = self._cluster()
        if cluster is None:
            return done(None)
        cluster.audit(patience, done)
