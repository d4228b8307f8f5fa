"""Decide when a runtime ends: after its last payload, or, for a session, after it was idle for a while or has failed."""

from __future__ import annotations

from typing import Callable, Optional

from ..process.loop import Loop, Timers
from ..protocol.end import End, EndReason
from ..protocol.spec import RuntimeSpec
from .queue import PayloadQueue

_CLOSING_TIME = 0.5
"""Seconds that a closing session stays reachable after its last payload, so that late clients learn why it closes."""
_FAILURE_TIME = 5.0
"""Seconds that a session that served no payload stays reachable, so that the runs that started it learn why it failed."""
_MIN_IDLE = 5.0
"""Seconds without a payload before a session may end for another job's sake; the next step of a run may take some to come."""
_REGULAR = (EndReason.CANCEL, EndReason.TERMINATED, EndReason.TIMEOUT)
"""Reasons for which a session may end without having served a payload, and yet has not failed."""


class ShutdownPolicy:
    """Decides when a runtime ends. A runtime with an `idle_timeout` is a session, which waits for further payloads.

    Args:
        loop: the event loop, which is stopped at the runtime's end.
        spec: the start record.
        queue: the runtime's payloads.
        in_allocation: whether the runtime runs in a Slurm allocation; then the runs that started a session may wait to learn
            why it failed.
        finish: called when the last payload has ended and no other one will come.
        on_idle: called with the reason when a session must end because it is idle.
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
        """Why the payloads are being ended; None while they are not."""
        self.draining: Optional[str] = None
        """Why no more payloads are taken while the present ones go on; None if that is not so."""
        self.failed: Optional[str] = None
        """Why a session failed before it served a payload; None if it did not."""
        self.time_left: Callable[[], Optional[float]] = lambda: None
        """Returns the seconds until the allocation's time limit; None if there is no limit, or it is not known."""
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
        """Whether the runtime waits for further payloads after its last one."""
        return self._idle_timeout is not None

    @property
    def closing(self) -> Optional[str]:
        """Why no more payloads are taken; None while payloads are taken."""
        return self.ending or self.draining

    @property
    def ending_for(self) -> float:
        """Seconds since the runtime began to end its payloads; 0 if it has not."""
        return self._loop.now() - self._ending_since if self.ending is not None else 0.0

    @property
    def idle_for(self) -> Optional[float]:
        """Seconds for which the runtime has had no payload; None while it has one."""
        return None if len(self._queue) else self._loop.now() - self._idle_since

    def end(self, end: End) -> None:
        """Record that the runtime ends its payloads, and why; a later call changes nothing."""
        if self.ending is not None:
            return
        self.ending, self._ending_since = end.message or "it ends", self._loop.now()
        if self.is_session and not self._queue.served and end.reason not in _REGULAR:
            self.failed = self.ending

    def busy(self) -> None:
        """Called when a payload is added: the session is not idle any more."""
        self._timers.cancel("idle")

    def give_way(self) -> bool:
        """End an idle session because another Slurm job of its user waits for nodes. Returns whether the session ends.

        A session that has served no payload goes on, because the run that started it is about to send one.
        """
        idle = self.idle_for
        if idle is None or idle < _MIN_IDLE or not self._queue.served:
            return False
        if self.ending is None:
            self._on_idle(End(EndReason.CANCEL, "it was idle, and another job of its user waits for its nodes"))
        return True

    def settle(self) -> None:
        """End a runtime that has no payload: at once, or after the idle timeout of a session. With payloads, do nothing."""
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
