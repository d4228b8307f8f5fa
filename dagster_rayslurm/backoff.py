"""Exponential back-off with jitter, for loops that retry after an outage."""

from __future__ import annotations

import random
import time

_FIRST, _SHORT, _LONGEST = 0.2, 1.5, 30.0
"""Seconds: the first pause, the upper bound of pauses in a short outage, and the longest pause of all."""
_SHARE = 0.05
"""Upper bound of a pause in a longer outage, as a share of the outage so far."""


class Backoff:
    """Computes the pauses between retries in one outage.

    Each pause is twice the last one, but at most 30 s, and at most 1.5 s or a twentieth of the outage, whichever is longer.

    Args:
        since: `time.monotonic()` when the outage began; now if not given.
    """

    def __init__(self, since: float | None = None) -> None:
        self._since = time.monotonic() if since is None else since
        self._next = _FIRST

    @property
    def seconds(self) -> float:
        """Duration of the outage so far, in seconds."""
        return time.monotonic() - self._since

    def pause(self) -> float:
        """Returns the seconds to sleep before the next retry. Jitter keeps many processes from retrying at the same moment."""
        pause = min(self._next, max(_SHORT, _SHARE * self.seconds), _LONGEST)
        self._next *= 2
        return pause * random.uniform(0.5, 1.0)
