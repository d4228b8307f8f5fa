"""Stray processes: what finished payloads left running on this node, outside of their process group and of Ray."""

from __future__ import annotations

import contextlib
import sys
from typing import Dict, Optional

from . import processes
from .loop import Loop, Timer

_AGAIN = (1.0, 5.0)
"""Seconds after the first look in which a payload's last processes end, and leave more orphans."""


class StrayProcesses:
    """Ends the orphans on this node that no running payload can own.

    A daemon says nothing of its payload: it may have another session and another environment. But it belongs to a payload
    that ran when it started, so once all of those have ended, it is a stray.

    Args:
        loop: where the timers run; its children are no orphans.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._running: Dict[str, float] = {}
        """When the payloads that run began, by nonce, on the clock of `processes.uptime`."""
        self._timer: Optional[Timer] = None

    def begin(self, nonce: str) -> None:
        """A payload is about to start processes on this node."""
        self._running.setdefault(nonce, processes.uptime())

    def end(self, nonce: str) -> None:
        """A payload has ended: end its strays now, and those that appear shortly after."""
        self._running.pop(nonce, None)
        self._sweep(0)

    def _sweep(self, looks: int) -> None:
        oldest = min(self._running.values()) if self._running else None
        ended = []
        with contextlib.suppress(OSError):  # Out of file descriptors, perhaps; the next look may succeed.
            ended = processes.kill_orphans(keep=self._loop.children(), before=oldest)
        if ended:
            print("rayslurm: ended stray processes of finished payloads: %s" % ", ".join(ended), file=sys.stderr, flush=True)
        if self._timer is not None:
            self._timer.cancel()
        if looks < len(_AGAIN):
            self._timer = self._loop.call_later(_AGAIN[looks], lambda: self._sweep(looks + 1))
