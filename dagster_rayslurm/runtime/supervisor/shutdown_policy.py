"""When a runtime ends: whether it takes payloads, what time it has left, and when nothing is left to wait for."""

from __future__ import annotations

from typing import Callable, Optional

from ..process.loop import Loop, Timers
from ..protocol.end import End, EndReason
from ..protocol.spec import RuntimeSpec
from .queue import PayloadQueue

_CLOSING_TIME = 0.5
"""Seconds that a session stays reachable after its last payload, so that late clients learn why it closes."""
_FAILURE_TIME = 5.0
"""The same for a session that served no payload: its creators learn why it failed."""
_MIN_IDLE = 5.0
"""Seconds without a payload after which a session gives way to other jobs; the next step of a run may take a few."""
_REGULAR = (EndReason.CANCEL, EndReason.TERMINATED, EndReason.TIMEOUT)
"""Reasons that are no failure of a session that served no payload."""


class ShutdownPolicy:
    """Decides when a runtime ends. A runtime with an `idle_timeout` is a session, which lives on without a payload.

    Args:
        loop: where everything happens; it stops at the end.
        spec: the start record.
        queue: the runtime's payloads.
        in_allocation: whether it runs in a Slurm allocation, where its creators may wait to learn why it ends.
        finish: called when the last payload has ended and no other one will come.
        on_idle: called with the end when the session was idle for too long.
    """

    def __init__(
        self,
        loop: Loop,
        spec: RuntimeSpec,
        queue: PayloadQueue,
        in_allocation: bool,
        finish: Callable[[], None],
        on_idle: Callable[[End], None],
    ) -> None:
        self.ending: Optional[str] = None
        """Why the payloads are being ended."""
        self.draining: Optional[str] = None
        """Why no more payloads are taken, while the present ones go on."""
        self.failed: Optional[str] = None
        """Why a session failed before it served a payload."""
        self.time_left: Callable[[], Optional[float]] = lambda: None
        """Returns the seconds that the allocation has left, None for no limit."""
        self._loop = loop
        self._idle_timeout = spec.idle_timeout
        self._queue = queue
        self._in_allocation = in_allocation
        self._finish = finish
        self._on_idle = on_idle
        self._ending_since = 0.0
        self._idle_since = loop.now()
        self._timers = Timers(loop)

    @property
    def is_session(self) -> bool:
        return self._idle_timeout is not None

    @property
    def closing(self) -> Optional[str]:
        """Why no more payloads are taken; None while they are."""
        return self.ending or self.draining

    @property
    def ending_for(self) -> float:
        """Seconds for which payloads are being ended; 0 if they are not."""
        return self._loop.now() - self._ending_since if self.ending is not None else 0.0

    @property
    def idle_for(self) -> Optional[float]:
        """Seconds without a payload; None while there is one."""
        return None if len(self._queue) else self._loop.now() - self._idle_since

    def end(self, end: End) -> None:
        """Record that payloads are being ended; the first reason stands."""
        if self.ending is not None:
            return
        self.ending, self._ending_since = end.message or "it ends", self._loop.now()
        if self.is_session and not self._queue.served and end.reason not in _REGULAR:
            self.failed = self.ending

    def busy(self) -> None:
        """Record that a payload came."""
        self._timers.cancel("idle")

    def give_way(self) -> bool:
        """End an idle session because another job waits for its nodes; whether it ends.

        A session that has served no payload goes on: its creator is about to send one.
        """
        idle = self.idle_for
        if idle is None or idle < _MIN_IDLE or not self._queue.served:
            return False
        if self.ending is None:
            self._on_idle(End(EndReason.CANCEL, "it was idle, and another job of its user waits for its nodes"))
        return True

    def settle(self) -> None:
        """Without payloads: end, or wait for the idle timeout."""
        if len(self._queue):
            return
        if self.failed is not None and self._in_allocation:
            self._loop.call_later(_FAILURE_TIME, self._loop.stop)
        elif self.ending is not None or (not self.is_session and self._queue.served):
            self._finish()
        elif self.draining is not None:
            self._loop.call_later(_CLOSING_TIME if self._queue.served else _FAILURE_TIME, self._loop.stop)
        elif self._idle_timeout is not None:
            self._idle_since = self._loop.now()
            end = End(EndReason.CANCEL, "it was idle for %g s" % self._idle_timeout)
            self._timers.due("idle", self._idle_timeout, lambda: self._on_idle(end))
