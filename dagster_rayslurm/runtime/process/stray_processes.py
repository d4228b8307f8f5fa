"""Stray processes: processes that finished payloads left on this node outside of their process group and of Ray."""

from __future__ import annotations

import contextlib
import sys
from typing import Dict, Optional

from . import processes
from .loop import Loop, Timer

_LATER_SWEEPS = (1.0, 5.0)
"""Pauses before the second and the third sweep: a payload's last processes may leave orphans when they end."""


class StrayProcesses:
    """Kills orphans on this node that no running payload can own.

    The environment and the session of a daemon need not name its payload. But the payload ran when the daemon started, so once
    all payloads of that time have ended, the daemon is a stray.

    Args:
        loop: its child processes are never strays.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._running: Dict[str, float] = {}
        """Start of each running payload by nonce, on the clock of `processes.uptime`."""
        self._timer: Optional[Timer] = None

    def begin(self, nonce: str) -> None:
        """Note that a payload is about to start processes on this node."""
        self._running.setdefault(nonce, processes.uptime())

    def end(self, nonce: str) -> None:
        """Note that a payload has ended: kill its strays now, and those that appear shortly after."""
        self._running.pop(nonce, None)
        self._sweep(0)

    def _sweep(self, sweeps: int) -> None:
        oldest = min(self._running.values()) if self._running else None
        ended = []
        with contextlib.suppress(OSError):  # No file descriptors are left, perhaps; the next sweep may succeed.
            ended = processes.kill_orphans(keep=self._loop.children(), before=oldest)
        if ended:
            print("rayslurm: ended stray processes of finished payloads: %s" % ", ".join(ended), file=sys.stderr, flush=True)
        if self._timer is not None:
            self._timer.cancel()
        if sweeps < len(_LATER_SWEEPS):
            self._timer = self._loop.call_later(_LATER_SWEEPS[sweeps], lambda: self._sweep(sweeps + 1))
