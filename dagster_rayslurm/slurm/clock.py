"""The clock of the cluster: what happens there is compared with itself, never with this machine's clock."""

from __future__ import annotations

import time
from collections.abc import Callable

from ..connections.base import Connection


class ClusterClock:
    """The clock of the edge node, as this machine can tell it without asking each time.

    Args:
        connection: how to ask.
        local: this machine's clock, in seconds; it may stand still while the machine sleeps.
    """

    def __init__(self, connection: Connection, local: Callable[[], float] = time.monotonic) -> None:
        self._connection = connection
        self.local = local
        self._offset: float | None = None

    def now(self) -> float:
        """Seconds of the epoch there; asked for once, then reckoned.

        Raises:
            OSError: it cannot be asked.
        """
        if self._offset is None:
            asked = self.local()
            done = self._connection.run(["date", "+%s.%N"], timeout=60)
            try:
                stamp = float(done.stdout)
            except ValueError:
                said = (done.stderr or done.stdout).decode("utf-8", "replace").strip()[-500:]
                raise OSError(f"{self._connection.place}: `date +%s.%N` does not say the time: {said}") from None
            self.heard(stamp, asked, self.local())
        assert self._offset is not None
        return self.local() + self._offset

    def heard(self, stamp: float, asked: float, answered: float) -> None:
        """Learn from any answer that carries the time there.

        Args:
            stamp: the time there.
            asked: `local()` before the question.
            answered: `local()` after the answer.
        """
        low, high = stamp - answered, stamp - asked
        before = (low + high) / 2 if self._offset is None else self._offset
        self._offset = min(max(before, low), high)
