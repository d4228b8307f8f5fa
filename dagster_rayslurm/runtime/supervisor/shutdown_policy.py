"""How long a runtime lives: whether it takes payloads, what time it has left, and when there is nothing left to wait for."""

from __future__ import annotations

from typing import Callable, Optional

from ..process.loop import Loop, Timers
from ..protocol.end import End, EndReason
from ..protocol.spec import RuntimeSpec
from .queue import PayloadQueue

_LAST_WORD = 0.5
"""Seconds that a runtime which takes no more payloads outlasts the last one, so that whoever asks learns why."""

_LAST_REASON = 5.0
"""Seconds that a session which failed before it served anybody stays, so that those who wait for it learn why."""

_AT_REST = 5.0
"""Seconds without a payload after which a session gives way to others; the next step of the same run may take a few."""

_PROPER = (EndReason.CANCEL, EndReason.TERMINATED, EndReason.TIMEOUT)
"""Reasons for which a session may end that has served nobody."""


class ShutdownPolicy:
    """Knows when a runtime ends. One with an `idle_timeout` is a session, which lives on without a payload.

    Args:
        loop: where everything happens; it stops at the end.
        spec: the runtime.
        roster: its payloads.
        in_allocation: whether it is in one of Slurm's, where somebody else may wait to learn why it ends.
        on_idle: called with how the runtime ends that was idle for too long.
    """

    def __init__(
        self, loop: Loop, spec: RuntimeSpec, roster: PayloadQueue, in_allocation: bool, on_idle: Callable[[End], None]
    ) -> None:
        self.ending: Optional[str] = None
        """Why payloads that are here are being ended."""
        self.draining: Optional[str] = None
        """Why no more payloads are taken, while those that are here go on."""
        self.failed: Optional[str] = None
        """Why a session that has served nobody could not."""
        self.time_left: Callable[[], Optional[float]] = lambda: None
        """Tells the seconds that the allocation has left, None for no limit."""
        self.leave: Callable[[], None] = loop.stop
        """Called when the last payload has ended and no other is to come."""
        self._loop = loop
        self._idle_timeout = spec.idle_timeout
        self._roster = roster
        self._in_allocation = in_allocation
        self._on_idle = on_idle
        self._ending_since = 0.0
        self._idle_since = loop.now()
        self._timers = Timers(loop)

    @property
    def is_session(self) -> bool:
        """Whether it lives on without a payload."""
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
        return None if len(self._roster) else self._loop.now() - self._idle_since

    def end(self, end: End) -> None:
        """Take note that payloads are being ended; the first reason stands."""
        if self.ending is not None:
            return
        self.ending, self._ending_since = end.message or "it ends", self._loop.now()
        if self.is_session and not self._roster.served and end.reason not in _PROPER:
            self.failed = self.ending

    def busy(self) -> None:
        """Take note that a payload is here."""
        self._timers.cancel("idle")

    def give_way(self) -> bool:
        """End a session that is idle, for another job that waits for its nodes; whether it ends.

        A session that has not served a payload yet goes on: its creator is about to send one.
        """
        idle = self.idle_for
        if idle is None or idle < _AT_REST or not self._roster.served:
            return False
        if self.ending is None:
            self._on_idle(End(EndReason.CANCEL, "it was idle, and another job of its user waits for its nodes"))
        return True

    def settle(self) -> None:
        """With nothing to run: end, or wait for `idle_timeout`."""
        if len(self._roster):
            return
        if self.failed is not None and self._in_allocation:
            self._loop.call_later(_LAST_REASON, self._loop.stop)
        elif self.ending is not None or (not self.is_session and self._roster.served):
            self.leave()
        elif self.draining is not None:
            self._loop.call_later(_LAST_WORD if self._roster.served else _LAST_REASON, self._loop.stop)
        elif self._idle_timeout is not None:
            self._idle_since = self._loop.now()
            end = End(EndReason.CANCEL, "it was idle for %g s" % self._idle_timeout)
            self._timers.due("idle", self._idle_timeout, lambda: self._on_idle(end))
