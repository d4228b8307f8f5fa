"""When to try again."""

from __future__ import annotations

import random
import time

_FIRST, _SHORT, _LONGEST = 0.2, 1.5, 30.0
_SHARE = 0.05


class Backoff:
    """Pauses between tries: longer and longer, but beyond a start never more than a twentieth of the outage so far.

    Args:
        since: `time.monotonic()` when it began.
    """

    def __init__(self, since: float) -> None:
        self._since = since
        self._next = _FIRST

    @property
    def seconds(self) -> float:
        """How long it has lasted."""
        return time.monotonic() - self._since

    def pause(self) -> float:
        """Seconds to wait now; jitter keeps many processes from coming back in step."""
        pause = min(self._next, max(_SHORT, _SHARE * self.seconds), _LONGEST)
        self._next *= 2
        return pause * random.uniform(0.5, 1.0)
