"""Exponential back-off with jitter, for every loop that tries again after an outage."""

from __future__ import annotations

import random
import time

_FIRST, _SHORT, _LONGEST = 0.2, 1.5, 30.0
_SHARE = 0.05


class Backoff:
    """Pauses between the tries of one outage: they double, but stay below 1.5 s or a twentieth of the outage, and below 30 s.

    Args:
        since: `time.monotonic()` when the outage began; now if not given.
    """

    def __init__(self, since: float | None = None) -> None:
        self._since = time.monotonic() if since is None else since
        self._next = _FIRST

    @property
    def seconds(self) -> float:
        """Duration of the outage so far."""
        return time.monotonic() - self._since

    def pause(self) -> float:
        """Seconds to sleep before the next try. Jitter keeps many processes from coming back in step."""
        pause = min(self._next, max(_SHORT, _SHARE * self.seconds), _LONGEST)
        self._next *= 2
        return pause * random.uniform(0.5, 1.0)
