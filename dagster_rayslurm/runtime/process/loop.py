"""Event loop of the runtime: waits for file descriptors, timers, signals and ends of child processes, all in one thread.

The loop replaces asyncio for two reasons. First, the loop reaps children itself: the loop learns their resource usage, and also
reaps orphans that this process adopted as a subreaper. Second, the loop starts no threads, which would make forks unsafe.
"""

from __future__ import annotations

import heapq
import itertools
import os
import selectors
import signal
import socket
import subprocess
import time
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, List, Optional, Sequence, Set, Tuple

# Called when a process has ended, with its exit code (negative: the signal that killed it) and its `resource.struct_rusage`.
ExitCallback = Callable[[int, Any], None]


@dataclass(eq=False)
class Timer:
    """A call that `Loop.call_later` has scheduled; `cancel` prevents the call. `Timer()` stands for no call."""

    call: Optional[Callable[[], object]] = None  # None after `cancel`.

    def cancel(self) -> None:
        self.call = None


class Loop:
    """The event loop; it runs all callbacks in one thread, one after another, so no state needs a lock.

    There is one loop in a process, because it handles the process's signals and reaps all its children.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: List[Tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._children: Dict[int, Tuple[Optional["subprocess.Popen[bytes]"], ExitCallback]] = {}
        self._signals: Dict[int, Callable[[int], None]] = {}
        self._received: Set[int] = set()  # The signals that this process has received and the loop has not handled yet.
        self._stopping = False
        self._wakeup, self._wakeup_writer = socket.socketpair()
        self._wakeup.setblocking(False)
        self._wakeup_writer.setblocking(False)
        signal.set_wakeup_fd(self._wakeup_writer.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, self._receive)
        self.on_readable(self._wakeup.fileno(), self._wake)

    def on_readable(self, fd: int, call: Callable[[], None]) -> None:
        """Have `call` called by the loop whenever the file descriptor `fd` is readable, until `forget(fd)`."""
        self._selector.register(fd, selectors.EVENT_READ, call)

    def on_writable(self, fd: int, call: Callable[[], None]) -> None:
        """Have `call` called by the loop whenever the file descriptor `fd` is writable, until `forget(fd)`.

        A socket is also writable when it has failed to connect.
        """
        self._selector.register(fd, selectors.EVENT_WRITE, call)

    def forget(self, fd: int) -> None:
        """Stop watching the file descriptor `fd`; a descriptor that is not watched is ignored."""
        if fd in self._selector.get_map():
            self._selector.unregister(fd)

    @staticmethod
    def now() -> float:
        """Seconds on the monotonic clock."""
        return time.monotonic()

    def call_later(self, delay: float, call: Callable[[], object]) -> Timer:
        """Have `call` called once by the loop after `delay` seconds; returns a timer whose `cancel` prevents the call."""
        timer = Timer(call)
        heapq.heappush(self._timers, (time.monotonic() + delay, next(self._order), timer))
        return timer

    def on_signal(self, signum: int, call: Callable[[int], None]) -> None:
        """Whenever this process receives the signal `signum`, call `call` with this number from the loop.

        Replaces an earlier callback for the same signal, and unblocks the signal.
        """
        self._signals[signum] = call
        signal.signal(signum, self._receive)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signum])  # The keeper blocked the signal until it has a handler.

    def spawn(self, argv: Sequence[str], on_exit: ExitCallback, **options: Any) -> int:
        """Start a process in a POSIX session of its own, and return its process id without waiting.

        `argv` has the command and its arguments; `options` are arguments of `subprocess.Popen`. When the process ends, the loop
        calls `on_exit` with its exit code, or -N after signal N, and its `resource.struct_rusage`. Raises OSError if the process
        cannot be started.
        """
        process: "subprocess.Popen[bytes]" = subprocess.Popen(argv, start_new_session=True, **options)
        self._children[process.pid] = (process, on_exit)
        return process.pid

    def adopt(self, pid: int, on_exit: ExitCallback) -> None:
        """Have `on_exit` called when the process `pid` ends, with the same arguments as in `spawn`.

        The process must be an orphan that has become a child of this process, because this process is a subreaper.
        """
        self._children[pid] = (None, on_exit)

    def children(self) -> List[int]:
        """Process ids of the children that this loop started or adopted and has not reaped yet."""
        return list(self._children)

    def stop(self) -> None:
        """Make `run` return soon: after the callbacks of the events and timers that are due now."""
        self._stopping = True

    def run(self) -> None:
        """Wait for events and call their callbacks; blocks until one of the callbacks calls `stop`."""
        while not self._stopping:
            timeout = max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None
            for key, _ in self._selector.select(timeout):
                if self._selector.get_map().get(key.fd) is key:  # An earlier callback of this round may have closed it.
                    key.data()
            now = time.monotonic()  # A timer that another timer sets with delay 0 runs in the next round.
            while self._timers and self._timers[0][0] <= now:
                timer = heapq.heappop(self._timers)[2]
                if timer.call is not None:
                    timer.call()

    def resume(self, seconds: float) -> None:
        """Run the loop again after it was stopped; blocks until the next `stop()`, but for at most `seconds` seconds."""
        self._stopping = False
        timer = self.call_later(seconds, self.stop)
        self.run()
        timer.cancel()

    def _receive(self, signum: int, _: object) -> None:
        self._received.add(signum)

    def _wake(self) -> None:
        """Call the callbacks of the signals that this process has received since the last call; after SIGCHLD, reap children."""
        # The bytes only wake the loop. They may lack a signal: while the loop is busy, ends of children can fill the socket.
        self._wakeup.recv(4096)
        received, self._received = self._received, set()
        # Signals come before the ends of children: Slurm signals all processes of a step, so the signal explains those ends.
        for signum in received & set(self._signals):
            self._signals[signum](signum)
        if signal.SIGCHLD in received:
            self.reap()

    def reap(self) -> None:
        """Reap all children that have ended, without blocking; for those that the loop started or adopted, call `on_exit`."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._children:
                process, on_exit = self._children.pop(pid)
                code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
                if process is not None:
                    process.returncode = code  # Popen must not wait for a process that is already reaped.
                on_exit(code, usage)


@dataclass(eq=False)
class Timers:
    """Timers by name: a new timer cancels the earlier timer of the same name.

    When a timer is due, its function is not called directly but passed to `safely`, which must call it and may catch exceptions.
    """

    loop: Loop
    safely: Callable[[Callable[[], None]], None] = lambda call: call()
    _timers: Dict[str, Timer] = field(default_factory=dict)

    def due(self, name: str, delay: float, call: Callable[[], None]) -> None:
        """Have `call` called once after `delay` seconds; cancels an earlier timer with the same `name` that is not due yet."""
        self.cancel(name)
        self._timers[name] = self.loop.call_later(delay, lambda: self.safely(call))

    def cancel(self, name: str) -> None:
        if name in self._timers:
            self._timers.pop(name).cancel()

    def cancel_all(self) -> None:
        for name in list(self._timers):
            self.cancel(name)
