"""The hub of a cluster: one thread that follows the payloads of all callers in this process, and threads for blocking work.

The run record of each payload is read at intervals. If the next reads of several records are due at about the same time, the hub
does all of them with one call on the edge node. `slurm.shared_queue` queries Slurm's queue once for all payloads.
"""

from __future__ import annotations

import math
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import dagster as dg

from ..ssh.base import Connection
from ..ssh.local import LocalConnection
from .follower import Follower, Following

try:
    from dagster._utils.interrupts import pop_captured_interrupt
except ImportError:  # This version of Dagster captures no interrupts.
    pop_captured_interrupt = lambda: False  # noqa: E731

T = TypeVar("T")

_WORKERS = 8  # Number of threads of a hub that start payloads, and of its threads that judge and end payloads.
# Seconds by which a run may be polled early, for each run that the hub follows: one call then serves many runs.
_SPREAD = 0.0005
_INTERRUPT_INTERVAL = 1.0  # Seconds between two looks for an interrupt that Dagster has captured.


class Workers:
    """A pool of at most `count` threads for blocking work; the threads start when work is submitted.

    The threads are daemon threads, so that they do not delay the exit of the process.
    """

    def __init__(self, name: str, count: int) -> None:
        self._name, self._count = name, count
        self._lock, self._started = threading.Lock(), 0
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()

    def submit(self, work: Callable[[], T], cancellable: bool = True) -> Future[T]:
        """Have a thread call `work`, and return a future of its result at once.

        If `cancellable` is True, the future can be cancelled until the call begins; otherwise it cannot be cancelled.
        """
        future: Future[T] = Future()
        if not cancellable:
            future.set_running_or_notify_cancel()
        self._work.put((future, work))
        with self._lock:
            if self._started < self._count:
                threading.Thread(target=self._run, name=f"{self._name}-{self._started}", daemon=True).start()
                self._started += 1
        return future

    def _run(self) -> None:
        while True:
            future, work = self._work.get()
            if not future.running() and not future.set_running_or_notify_cancel():
                continue
            try:
                result = work()
            except BaseException as error:  # noqa: BLE001 - the caller that waits for the future gets the error
                future.set_exception(error)
            else:
                future.set_result(result)
            del future, work  # Otherwise a waiting thread would keep the objects of a run in memory.


@dataclass(eq=False)
class Followed:
    """The payloads of one run that a hub follows. The caller waits for the future `ended`.

    The future gets the result None when the payloads have ended. If a poll raises an exception, the future gets this exception.
    If Dagster interrupts the process, the future gets Dagster's exception for interrupts.
    """

    following: Following
    follower: Follower = field(init=False)  # The follower that is polled next.
    due: float = field(init=False)  # The time of the next poll, by the monotonic clock.
    ended: Future[None] = field(default_factory=Future)
    _lock: threading.Lock = field(default_factory=threading.Lock)  # Held during a poll.
    _left: bool = False

    def __post_init__(self) -> None:
        self._steps = self.following.steps()
        self.follower, self.due = next(self._steps)
        self.ended.set_running_or_notify_cancel()  # Only the hub ends it.

    def advance(self) -> None:
        """Poll `follower` once and choose the next one. An exception of the poll becomes the exception of the future `ended`.

        Does nothing after `leave` was called.
        """
        with self._lock:
            if self._left:
                return
            try:
                self.follower, self.due = next(self._steps)
            except StopIteration:
                self.end(None)
            except BaseException as error:  # noqa: BLE001 - the caller that waits for `ended` gets the error
                self.end(error)

    def end(self, error: BaseException | None) -> None:
        """Complete the future `ended`: with the exception `error`, or with the result None. Only the first call has an effect."""
        with suppress(InvalidStateError):
            self.ended.set_result(None) if error is None else self.ended.set_exception(error)

    def interrupt(self) -> None:
        """Interrupt the run: give the future `ended` Dagster's exception for interrupts, so that the caller ends the payloads.

        If the caller is already ending the payloads, `following` has a deadline. The method then takes the payloads' grace period
        away, by a call of `hurry`, and does not complete the future.
        """
        self.following.hurry()
        if self.following.deadline == math.inf:
            self.end(dg.DagsterExecutionInterruptedError())

    def wait(self) -> None:
        """Block until the payloads have ended, and raise the exception of `ended` if it has one.

        An interrupt of the process ends the wait, within `_INTERRUPT_INTERVAL` seconds if another thread received the signal.
        """
        while wait([self.ended], _INTERRUPT_INTERVAL).not_done:
            pass
        self.ended.result()

    def leave(self) -> None:
        """Stop following the payloads, and complete the future `ended`. Blocks until a poll that is under way has ended."""
        self._left = True
        with self._lock:
            self.end(None)


class Hub:
    """Follows the payloads of many callers in one thread. All methods may be called from any thread."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._name = f"rayslurm-{connection.place}"
        self.starting = Workers(f"{self._name}-start", _WORKERS)
        # Separate threads, so that runs can end while all threads of `starting` wait for sbatch.
        self.ending = Workers(f"{self._name}-end", _WORKERS)
        self._change = threading.Condition()
        self._followed: list[Followed] = []
        self._thread: threading.Thread | None = None
        self._interrupted_at = -math.inf

    def follow(self, following: Following, began: float) -> Followed:
        """Begin to follow the payloads of a run in the hub's thread; returns the new `Followed` at once.

        `began` is the start of the run by the monotonic clock. If `interrupt` was called after `began`, the run is interrupted at
        once, unless the caller is already ending the payloads.
        """
        followed = Followed(following)
        with self._change:
            if self._interrupted_at > began and following.deadline == math.inf:
                followed.interrupt()
                return followed
            self._followed.append(followed)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                try:
                    self._thread.start()
                except BaseException:
                    self._thread = None
                    self._followed.remove(followed)
                    raise
            self._change.notify()
        return followed

    def interrupt(self) -> None:
        """Interrupt all runs that have begun, as Ctrl-C would: see `Followed.interrupt`. Later runs are not interrupted.

        A run that has begun, but whose payloads are not followed yet, is interrupted by its call of `follow`.
        """
        with self._change:
            self._interrupted_at = time.monotonic()
            for each in self._followed:
                each.interrupt()

    def _run(self) -> None:
        try:
            while (due := self._next_due()) is not None:
                # An executor that runs steps outside of the main thread does not look for interrupts itself.
                if pop_captured_interrupt():
                    for hub in list(_hubs.values()):
                        hub.interrupt()
                with self._connection.read_ahead([read for each in due for read in each.follower.next_reads()]):
                    for each in due:
                        each.advance()
        except BaseException as error:  # noqa: BLE001 - nobody may wait for a thread that has ended
            with self._change:
                self._thread, left, self._followed = None, self._followed, []
            for each in left:
                each.end(error)

    def _next_due(self) -> list[Followed] | None:
        """Wait until a poll is due, for `_INTERRUPT_INTERVAL` seconds at most; returns the runs whose polls are due.

        The list is empty if no poll is due by then. If no payloads are followed any more, the result is None; the hub's thread
        then ends.
        """
        with self._change:
            while True:
                self._followed = [each for each in self._followed if not each.ended.done()]
                if not self._followed:
                    self._thread = None
                    return None
                now = time.monotonic()
                pause = min(each.due for each in self._followed) - now
                if pause <= 0:
                    return [each for each in self._followed if each.due <= now + _SPREAD * len(self._followed)]
                if not self._change.wait(min(pause, _INTERRUPT_INTERVAL)) and pause > _INTERRUPT_INTERVAL:
                    return []


_lock = threading.Lock()
_hubs: dict[int, Hub] = {}  # By the connection's id; 0 for this machine.


def hub_of(connection: Connection) -> Hub:
    """Returns the hub of a connection; the first call makes it. All connections to this machine share one hub."""
    key = 0 if isinstance(connection, LocalConnection) else id(connection)  # The hub keeps the connection alive.
    with _lock:
        return _hubs.get(key) or _hubs.setdefault(key, Hub(connection))


def follow_in_hub(following: Following, began: float) -> Followed:
    """Begin to follow the payloads of a run in the hub of their connection; returns at once. For `began`, see `Hub.follow`."""
    return hub_of(following.followed[0][0].connection).follow(following, began)


def _forget_all() -> None:
    """Forget all hubs; called in a forked child process, which has none of the hubs' threads."""
    global _lock
    _lock = threading.Lock()
    _hubs.clear()


os.register_at_fork(after_in_child=_forget_all)
