"""Virtual time: simulated processes take turns in one thread, and sleeping costs nothing.

A process is a greenlet. It runs until it sleeps or waits for a lock; then the process whose time comes first runs on. All random
choices come from the seed. Inside a process the functions of `time` show virtual time by the clock of the process's host, and
`threading` makes simulated locks and threads.
"""

from __future__ import annotations

import _thread
import errno
import heapq
import itertools
import os
import random
import secrets
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from greenlet import getcurrent, greenlet

EPOCH = 1_800_000_000.0
"""Wall-clock time at the beginning of each history, in seconds of the epoch."""


class Killed(BaseException):
    """Ends a process without running any more of its effects, as SIGKILL does."""


class Stuck(Exception):
    """Raised when a history does not end within its time limit, or makes too many steps."""


@dataclass
class Host:
    """A machine with a clock of its own.

    Attributes:
        skew: seconds by which the clock is ahead of the true time. A fault may change it while the history runs.
        full: whether its file system has no space left, but for `spare` bytes.
    """

    name: str
    skew: float = 0.0
    full: bool = False
    spare: int = 0

    def take(self, size: int) -> None:
        """Use some space of the file system."""
        if self.full and size > self.spare:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.spare -= size if self.full else 0


_ANY_HOST = Host("-")  # Of what runs outside of all processes.


class Process(greenlet):
    """A simulated process, or a thread of one.

    Attributes:
        finished: whether its function has returned; then `result` is what it returned.
        error: the exception that ended the process, if any.
        turns: how often it has run on.
        trap: a number of turns, and what then happens in place of the next turn.
        handlers: the functions that take its signals, the last one first; without one a signal raises `KeyboardInterrupt`.
    """

    def __init__(self, world: World, name: str, host: Host, function: Callable[[], Any]) -> None:
        super().__init__(self._main, parent=world.hub)
        self.name, self.host = name, host
        self.alive, self.finished, self.result, self.error = True, False, None, None
        self.threads: list[Process] = []
        self.wake_id = self.turns = 0
        self.pending: BaseException | None = None
        self.trap: tuple[int, Callable[[], None]] | None = None
        self.handlers: list[Callable[[int], None]] = []
        self._function = function

    def _main(self) -> None:
        try:
            self.result = self._function()
            self.finished = True
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001
            self.error = error
        finally:
            self.alive = False


class World:
    """The processes, the virtual time and the random choices of one history."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        random.seed(seed)  # For the package's own random pauses.
        self.now = 0.0
        self.hub = getcurrent()
        self._trace: list[tuple[float, str, str]] = []
        self.steps = 0
        self._order = itertools.count()
        self._queue: list[tuple[float, int, Process, int]] = []
        self.processes: list[Process] = []
        self._closing = False

    # -- processes

    def spawn(self, name: str, host: Host, function: Callable[[], Any], delay: float = 0.0) -> Process:
        """Start a process; it first runs after `delay` seconds."""
        process = Process(self, name, host, function)
        self.processes.append(process)
        self._wake(process, delay)
        return process

    def kill(self, process: Process) -> None:
        """End a process at once, with its threads: nothing of it runs any more, not even `finally`."""
        if process.alive:
            process.alive = False
            self.say(f"SIGKILL {process.name}")
        for thread in process.threads:
            self.kill(thread)

    def interrupt(self, process: Process, error: BaseException) -> None:
        """Raise an exception in a process, where it sleeps or waits."""
        if process.alive:
            process.pending = error
            self._wake(process, 0.0)

    def signal(self, process: Process, signum: int) -> None:
        """Send SIGINT or SIGTERM to a process of Dagster."""
        if not process.alive:
            return
        if process.handlers:
            process.handlers[-1](signum)
        else:
            self.interrupt(process, KeyboardInterrupt())

    @contextmanager
    def handled_by(self, take: Callable[[int], None]) -> Iterator[None]:
        """Stands for `backends.base._handled_by`."""
        process = self._running()
        process.handlers.append(take)
        try:
            yield
        finally:
            process.handlers.pop()

    def raise_signal(self, signum: int) -> None:
        """Stands for `signal.raise_signal`."""
        process = self._running()
        if not process.handlers:
            raise KeyboardInterrupt
        process.handlers[-1](signum)

    @property
    def pending(self) -> bool:
        """Whether anything is left to run."""
        return any(process.alive and wake_id == process.wake_id for _, _, process, wake_id in self._queue)

    @property
    def current(self) -> Process | None:
        """The process that runs now; None outside of all processes."""
        running = getcurrent()
        return running if isinstance(running, Process) else None

    def run(self, until: Callable[[], bool], limit: float, most_steps: int = 200_000) -> None:
        """Run all processes until a condition holds.

        Raises:
            Stuck: the condition does not hold within `limit` seconds or `most_steps` steps, or nothing is left to run.
        """
        while not until():
            if not self._queue:
                raise Stuck("nothing is left to run")
            due, _, process, wake_id = heapq.heappop(self._queue)
            if not process.alive or wake_id != process.wake_id:
                continue
            if due > limit:
                raise Stuck(f"not over after {limit:g} s; {process.name} would run next")
            self.now = max(self.now, due)
            self.steps += 1
            if self.steps > most_steps:
                raise Stuck(f"not over after {most_steps} steps; {process.name} would run next")
            process.turns += 1
            if process.trap is not None and process.turns >= process.trap[0]:
                action, process.trap = process.trap[1], None
                self._wake(process, 0.0)
                action()
            else:
                process.switch()

    def close(self) -> None:
        """Unwind the processes that have not ended; what they still try to do raises `Killed`."""
        self._closing = True
        for process in self.processes:
            while process and not process.dead:
                process.throw(Killed)

    # -- time

    def sleep(self, seconds: float) -> None:
        """Let other processes run for `seconds` of virtual time."""
        process = self._running()
        self._wake(process, max(0.0, seconds))
        self._switch(process)

    def wait(self, ready: Callable[[], bool], timeout: float | None, waiters: list[Process]) -> bool:
        """Wait until `ready` holds, which somebody who wakes `waiters` sees to; returns whether it holds."""
        process = self._running()
        deadline = None if timeout is None else self.now + timeout
        while not ready():
            if deadline is not None and self.now >= deadline:
                return False
            waiters.append(process)
            process.wake_id += 1
            if deadline is not None:
                self._wake(process, deadline - self.now)
            try:
                self._switch(process)
            finally:
                if process in waiters:
                    waiters.remove(process)
        return True

    def notify(self, waiters: list[Process]) -> None:
        """Wake the processes that wait in a list."""
        for process in waiters:
            self._wake(process, 0.0)

    def _running(self) -> Process:
        process = self.current
        if process is None:
            raise RuntimeError("only a simulated process can wait")
        if self._closing or not process.alive:
            raise Killed
        return process

    def _wake(self, process: Process, delay: float) -> None:
        process.wake_id += 1
        heapq.heappush(self._queue, (self.now + delay, next(self._order), process, process.wake_id))

    def _switch(self, process: Process) -> None:
        self.hub.switch()
        if self._closing or not process.alive:
            raise Killed
        if process.pending is not None:
            error, process.pending = process.pending, None
            raise error

    # -- what happened

    def say(self, text: str) -> None:
        """Add a line to the trace of this history."""
        process = self.current
        self._trace.append((self.now, process.name if process else "-", text))

    @property
    def trace(self) -> list[str]:
        """What was said, with the time in seconds and the process."""
        return [f"{at:10.3f}  {name:<14} {text}" for at, name, text in self._trace]

    # -- the standard library inside processes

    @contextmanager
    def clocks(self) -> Iterator[None]:
        """Replace the clock, locks, threads and random names of the standard library inside processes."""

        names = random.Random(self.seed)
        write, pwrite, unlink, open_fd, mkdir, utime = os.write, os.pwrite, os.unlink, os.open, os.mkdir, os.utime

        def host() -> Host:
            process = self.current
            return process.host if process else _ANY_HOST

        def fake_write(fd: int, data: Any) -> int:
            host().take(len(data))
            return write(fd, data)

        def fake_pwrite(fd: int, data: Any, offset: int) -> int:
            host().take(len(data))
            return pwrite(fd, data, offset)

        def fake_open(path: Any, flags: int, *more: Any, **named: Any) -> int:
            new = flags & os.O_CREAT and not os.path.exists(path)
            if new:
                host().take(1)
            fd = open_fd(path, flags, *more, **named)
            if new and self.current:
                utime(path, (wall(), wall()))
            return fd

        def fake_mkdir(path: Any, *more: Any, **named: Any) -> None:
            mkdir(path, *more, **named)
            if self.current:
                utime(path, (wall(), wall()))

        def fake_utime(path: Any, times: Any = None, **named: Any) -> None:
            utime(path, (wall(), wall()) if times is None and not named and self.current else times, **named)

        def fake_unlink(path: Any, **named: Any) -> None:
            size = os.stat(path).st_size if host().full and not named else 0
            unlink(path, **named)
            host().spare += size

        def virtual(real: Callable[..., Any], simulated: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *args: simulated(*args) if self.current is not None else real(*args)

        wall = lambda: EPOCH + self.now + (self.current.host.skew if self.current else 0.0)  # noqa: E731
        token = lambda size=16: names.randbytes(size) if size < 1024 else bytes(size)  # noqa: E731
        thread = _thread_class(self)
        start = lambda work, args: thread(target=work, args=args).start()  # noqa: E731
        replaced = [
            (time, "sleep", virtual(time.sleep, self.sleep)),
            (time, "monotonic", virtual(time.monotonic, lambda: 1000.0 + self.now)),
            (time, "time", virtual(time.time, wall)),
            (secrets, "token_hex", virtual(secrets.token_hex, lambda size=16: token(size).hex())),
            (secrets, "token_bytes", virtual(secrets.token_bytes, token)),
            (uuid, "uuid4", virtual(uuid.uuid4, lambda: uuid.UUID(bytes=token(16), version=4))),
            (os, "urandom", virtual(os.urandom, token)),
            (os, "write", fake_write),
            (os, "pwrite", fake_pwrite),
            (os, "open", fake_open),
            (os, "mkdir", fake_mkdir),
            (os, "utime", fake_utime),
            (os, "unlink", fake_unlink),
            (os, "fsync", virtual(os.fsync, lambda fd: utime(fd, (wall(), wall())))),
            (signal, "raise_signal", virtual(signal.raise_signal, self.raise_signal)),
            (threading, "Lock", virtual(threading.Lock, lambda: Lock(self))),
            (threading, "RLock", virtual(threading.RLock, lambda: Lock(self, reentrant=True))),
            (threading, "Event", virtual(threading.Event, lambda: Event(self))),
            (threading, "Thread", thread),
            (_thread, "start_new_thread", virtual(_thread.start_new_thread, start)),
        ]
        patches = [mock.patch.object(module, name, value) for module, name, value in replaced]
        for patch in patches:
            patch.start()
        try:
            yield
        finally:
            for patch in reversed(patches):
                patch.stop()


class Lock:
    """A lock between simulated processes."""

    def __init__(self, world: World, reentrant: bool = False) -> None:
        self._world, self._reentrant = world, reentrant
        self._owner: object = None
        self._depth = 0
        self._waiters: list[Process] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = self._world.current
        if self._reentrant and self._depth and self._owner is me:
            self._depth += 1
            return True
        patience = 0.0 if not blocking else None if timeout < 0 else timeout
        if self._depth and not (patience != 0.0 and self._world.wait(lambda: not self._depth, patience, self._waiters)):
            return False
        self._owner, self._depth = me, 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._world.notify(self._waiters)

    def locked(self) -> bool:
        return bool(self._depth)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exc_info: object) -> None:
        self.release()


class Event:
    """An event between simulated processes."""

    def __init__(self, world: World) -> None:
        self._world, self._set = world, False
        self._waiters: list[Process] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        self._world.notify(self._waiters)

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        return self._world.wait(self.is_set, timeout, self._waiters)


def _thread_class(world: World) -> type[threading.Thread]:
    real = threading.Thread

    class Thread(real):  # type: ignore[misc,valid-type]
        """A thread of a simulated process, or a real one outside of all processes."""

        _process: Process | None = None

        def start(self) -> None:
            starter = world.current
            if starter is None:
                return super().start()
            self._process = world.spawn(f"{starter.name}/{self.name}", starter.host, self.run)
            starter.threads.append(self._process)

        def is_alive(self) -> bool:
            return super().is_alive() if self._process is None else self._process.alive

        def join(self, timeout: float | None = None) -> None:
            if self._process is None:
                return super().join(timeout)
            deadline = None if timeout is None else world.now + timeout
            while self._process.alive and (deadline is None or world.now < deadline):
                world.sleep(0.05)

    return Thread
