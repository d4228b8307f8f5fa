"""Context managers that delay or ignore SIGINT and SIGTERM, for steps of a run that must not be cut short.

Only the main thread receives signals, so in other threads the blocks run unchanged.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

_REPEATED = 1.0
"""Seconds within which a further signal belongs to the same interrupt: Ctrl-C reaches a step process twice, from the terminal
and from Dagster's multiprocess executor."""


@contextmanager
def _handled_by(take: Callable[[int], None]) -> Iterator[None]:
    """Call `take` with each SIGINT or SIGTERM inside the block; afterwards the former handlers are back."""
    with ExitStack() as stack:
        for signum in (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ():
            # getsignal returns None for a handler that Python did not install; such a handler cannot be restored.
            stack.callback(signal.signal, signum, signal.getsignal(signum) or signal.SIG_DFL)
            signal.signal(signum, lambda received, _: take(received))
        yield


@contextmanager
def delayed_interrupts() -> Iterator[None]:
    """Delay SIGINT and SIGTERM inside a block that must not be interrupted halfway; the first one takes effect afterwards."""
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

    Yields a function that says whether a further interrupt came after the one that started the cleanup.
    """
    ignored_until = time.monotonic() + _REPEATED
    later: list[int] = []
    with _handled_by(lambda signum: later.append(signum) if time.monotonic() > ignored_until else None):
        yield lambda: bool(later)
