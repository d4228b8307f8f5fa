"""Context managers that delay or ignore SIGINT and SIGTERM, for steps of a run that must not be cut short."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_REPEATED = 1.0
"""Seconds within which a further signal belongs to the same interrupt: Ctrl-C reaches a step process twice, from the terminal
and from Dagster's multiprocess executor."""


@contextmanager
def _handled_by(take: Callable[[int], None]) -> Iterator[None]:
    """Call `take` with each SIGINT or SIGTERM inside the block; afterwards the former handlers are back."""
    with ExitStack() as stack:
        for signum in _SIGNALS:
            # getsignal returns None for a handler that Python did not install; such a handler cannot be restored.
            stack.callback(signal.signal, signum, signal.getsignal(signum) or signal.SIG_DFL)
            signal.signal(signum, lambda received, _: take(received))
        yield


@contextmanager
def delayed_interrupts() -> Iterator[None]:
    """Delay SIGINT and SIGTERM inside a block that must not be interrupted halfway; the first one takes effect afterwards."""
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
    """Ignore SIGINT and SIGTERM inside a block that cleans up after an interrupt.

    Only the main thread receives signals, so in other threads the block runs unchanged.

    Yields:
        A function that returns whether a further interrupt came after the one that started the cleanup.
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
