"""Timers by name, of which a new one takes the place of the one before."""

from __future__ import annotations

from typing import Callable, Dict

from .loop import Loop, Timer


class Timers:
    """The timers of one thing.

    Args:
        loop: where they run.
        safely: makes the calls.
    """

    def __init__(self, loop: Loop, safely: Callable[[Callable[[], None]], None] = lambda call: call()) -> None:
        self._loop = loop
        self._safely = safely
        self._timers: Dict[str, Timer] = {}

    def due(self, name: str, delay: float, call: Callable[[], None]) -> None:
        """Have `call` made later, instead of what was due under this name."""
        self.cancel(name)
        self._timers[name] = self._loop.call_later(delay, lambda: self._safely(call))

    def cancel(self, name: str) -> None:
        """Have nothing called that is due under this name."""
        if name in self._timers:
            self._timers.pop(name).cancel()

    def cancel_all(self) -> None:
        """Have nothing called any more."""
        for name in list(self._timers):
            self.cancel(name)
