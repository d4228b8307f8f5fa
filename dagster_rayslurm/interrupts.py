"""Hold back SIGINT and SIGTERM while a run is cancelled and cleaned up."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_REPEATED = 1.0
"""Seconds within which a second interrupt counts as the first: Ctrl-C reaches a step process from the terminal and from
Dagster's multiprocess executor."""


@contextmanager
def _handled_by(take: Callable[[int], None]) -> Iterator[None]:
    """Handle SIGINT and SIGTERM with `take`; restore both handlers even if a signal arrives meanwhile."""
    with ExitStack() as stack:
        for signum in _SIGNALS:
            # None: the handler was not installed by Python, so it cannot be restored.
            stack.callback(signal.signal, signum, signal.getsignal(signum) or signal.SIG_DFL)
            signal.signal(signum, lambda received, _: take(received))
        yield


@contextmanager
def delayed_interrupts() -> Iterator[None]:
    """Delay SIGINT and SIGTERM during a step that must not be interrupted halfway; raise the first one afterwards."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    try:
        with _handled_by(came.append):
            yield
    finally:
        if came:
            signal.raise_signal(came[0])


@contextmanager
def deferred_interrupts() -> Iterator[Callable[[], bool]]:
    """Ignore SIGINT and SIGTERM; only the main thread receives them, so other threads do nothing.

    Yields:
        A function: whether another interrupt came after the one that started the cleanup.
    """
    began = time.monotonic()
    again = threading.Event()

    def take(*_: Any) -> None:
        if time.monotonic() - began > _REPEATED:
            again.set()

    if threading.current_thread() is not threading.main_thread():
        yield again.is_set
        return
    with _handled_by(take):
        yield again.is_set
