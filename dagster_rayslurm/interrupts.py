"""Interrupts while a cancelled run is wound down: counted, so that none of them breaks off the cleaning up."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_SAME = 1.0
"""Seconds within which another interrupt is the same one: Ctrl-C reaches a step process once from the terminal and
once from the process that runs the steps (Dagster's multiprocess executor)."""


@contextmanager
def _taken_by(take: Callable[[int], None]) -> Iterator[None]:
    """Let somebody else have SIGINT and SIGTERM, and give both back even if one of them comes while that is done."""
    with ExitStack() as stack:
        for signum in _SIGNALS:
            # None: whoever handled it is not known to Python, so it cannot be given back.
            stack.callback(signal.signal, signum, signal.getsignal(signum) or signal.SIG_DFL)
            signal.signal(signum, lambda received, _: take(received))
        yield


@contextmanager
def delayed_interrupts() -> Iterator[None]:
    """Hold SIGINT and SIGTERM back for a moment in which nobody could say what was done and what was not."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    try:
        with _taken_by(came.append):
            yield
    finally:
        if came:
            signal.raise_signal(came[0])


@contextmanager
def deferred_interrupts() -> Iterator[Callable[[], bool]]:
    """Hold SIGINT and SIGTERM back; only the main thread gets them, so elsewhere there is nothing to hold.

    Yields:
        Whether somebody interrupted once more, after the one that led here.
    """
    began = time.monotonic()
    again = threading.Event()

    def take(*_: Any) -> None:
        if time.monotonic() - began > _SAME:
            again.set()

    if threading.current_thread() is not threading.main_thread():
        yield again.is_set
        return
    with _taken_by(take):
        yield again.is_set
