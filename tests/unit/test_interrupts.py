"""Delayed interrupts: none is lost, and the previous handlers are restored."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest

from dagster_rayslurm.backends import base as interrupts
from dagster_rayslurm.backends.base import deferred_interrupts, delayed_interrupts, noticed_interrupts

BOTH = (signal.SIGINT, signal.SIGTERM)


class Stopped(BaseException):
    """What the handlers of the test raise."""


def stop(signum: int, _: Any) -> None:
    raise Stopped(signum)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = [(signum, signal.signal(signum, stop)) for signum in BOTH]
    yield
    for signum, handler in before:
        signal.signal(signum, handler)


def in_place() -> list[Any]:
    return [signal.getsignal(signum) for signum in BOTH]


@pytest.mark.parametrize("signum", BOTH)
def test_a_delayed_interrupt_is_raised_at_the_end(signum: signal.Signals) -> None:
    done = False
    with pytest.raises(Stopped) as caught, delayed_interrupts():
        signal.raise_signal(signum)
        signal.raise_signal(signum)
        done = True
    assert done and caught.value.args == (signum,) and in_place() == [stop, stop]


def test_a_delayed_interrupt_is_raised_after_an_error() -> None:
    with pytest.raises(Stopped), delayed_interrupts():
        signal.raise_signal(signal.SIGTERM)
        raise ValueError
    assert in_place() == [stop, stop]


@pytest.mark.parametrize("held", [delayed_interrupts, deferred_interrupts])
@pytest.mark.parametrize("signum", BOTH)
@pytest.mark.parametrize("moment", [1, 2, 3, 4])
def test_an_interrupt_while_handlers_are_replaced(
    held: Callable[[], AbstractContextManager[Any]], signum: signal.Signals, moment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each single change, in both directions: what was there before is there again."""
    real, changes = signal.signal, 0

    def change(which: int, handler: Any) -> Any:
        nonlocal changes
        before = real(which, handler)
        changes += 1
        if changes == moment:
            signal.raise_signal(signum)
        return before

    monkeypatch.setattr(interrupts.signal, "signal", change)
    came = False
    try:
        with held():
            pass
    except Stopped:
        came = True
    monkeypatch.undo()
    assert in_place() == [stop, stop]
    # Only who defers them counts those that come meanwhile instead.
    assert came or held is deferred_interrupts


@pytest.mark.parametrize("signum", BOTH)
def test_an_interrupt_that_python_has_ignored_is_raised_again(signum: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    class Garbage:
        def __del__(self) -> None:
            signal.raise_signal(signum)

    ignored: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: ignored.append(found.exc_type))
    with pytest.raises(Stopped) as caught, noticed_interrupts() as raise_ignored:
        raise_ignored()
        Garbage()
        assert ignored == [Stopped]
        raise_ignored()
    assert caught.value.args == (signum,) and in_place() == [stop, stop]


def test_a_handler_that_raises_nothing_is_called_as_without_notice() -> None:
    came: list[int] = []
    signal.signal(signal.SIGINT, lambda signum, _: came.append(signum))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with noticed_interrupts():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    assert came == [signal.SIGINT]


def test_other_threads_receive_no_interrupts() -> None:
    seen: list[list[Any]] = []

    def work() -> None:
        with delayed_interrupts(), deferred_interrupts(), noticed_interrupts():
            seen.append(in_place())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [[stop, stop]]
