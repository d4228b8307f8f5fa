"""Run programs and forked tasks without blocking the loop.

Programs that are asked something, such as `squeue` and `nvidia-smi`: nothing waits for their answers.

Work that may take long, or hang with a file system, beside the loop: in a forked process that hands over JSON.

A thread would not do: it cannot be ended, and what is forked beside one must not run Python (the `preexec_fn` of
`subprocess`). The loop's process has no threads, so a fork of it may do anything.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import traceback
from typing import Any, Callable, List, NoReturn, Optional, Sequence

from . import processes
from .loop import Loop


def query_program(loop: Loop, argv: Sequence[str], patience: float, answered: Callable[[Optional[str]], None]) -> None:
    """Run a program.

    Args:
        loop: where everything happens.
        argv: its command.
        patience: seconds after which it is killed.
        answered: called with what it has printed when it has ended, or with None if it failed. One that waits for a device or a
            file system in a way that no signal ends never does.

    Raises:
        OSError: it cannot be started.
    """
    reader, writer = os.pipe()
    os.set_blocking(reader, False)  # Whatever holds the other end, such as what the program has left behind.

    def ended(code: int, _: Any) -> None:
        hung.cancel()
        with os.fdopen(reader, "rb") as file:
            text = (file.read() or b"").decode("utf-8", "replace")
        answered(text if code == 0 else None)

    try:
        pid = loop.spawn(
            argv,
            ended,
            stdin=subprocess.DEVNULL,
            stdout=writer,
            stderr=subprocess.DEVNULL,
            preexec_fn=processes.die_with_parent(),
        )
    except OSError:
        os.close(reader)
        raise
    finally:
        os.close(writer)

    def hangs() -> None:
        processes.signal_group(pid, signal.SIGKILL)

    hung = loop.call_later(patience, hangs)


class ForkedTask:
    """Runs a function in a process of its own.

    Args:
        loop: where everything happens.
        work: returns what JSON can hold; it is called in the process.
        done: called from the loop with that, or with None if the process ended without it.

    Raises:
        OSError: there can be no other process.
    """

    def __init__(self, loop: Loop, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        self._loop = loop
        self._done = done
        self._said: List[bytes] = []
        self._running = True
        reader, writer = os.pipe()
        die_with_parent = processes.die_with_parent()
        try:
            self.pid = os.fork()
        except OSError:
            os.close(reader)
            os.close(writer)
            raise
        if self.pid == 0:
            _run_in_fork(work, writer, die_with_parent)
        os.close(writer)
        self._fd = reader
        loop.adopt(self.pid, self._exited)
        loop.on_readable(reader, self._read)

    def end(self) -> None:
        """End it at once; `done` is not called any more."""
        if self._fd >= 0:
            self._close()
            if self._running:
                processes.kill_all([self.pid])

    def _exited(self, *_: Any) -> None:
        self._running = False

    def _read(self) -> None:
        data = os.read(self._fd, 65536)
        if data:
            return self._said.append(data)
        self._close()
        try:
            result = json.loads(b"".join(self._said).decode("ascii"))
        except ValueError:
            result = None  # It was ended, or failed: its traceback is in the runtime's log.
        self._done(result)

    def _close(self) -> None:
        self._loop.forget(self._fd)
        os.close(self._fd)
        self._fd = -1


def _run_in_fork(work: Callable[[], Any], writer: int, die_with_parent: Callable[[], None]) -> NoReturn:
    """Do the work and end, whatever happens: the loop that this process has inherited is not its own."""
    try:
        os.setsid()  # Ended as a group, as all that is started here.
        signal.set_wakeup_fd(-1)  # It is the parent's, which would hear of this process's signals.
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)  # Slurm sends them to every process; the parent says when to end.
        die_with_parent()
        with os.fdopen(writer, "wb") as file:
            file.write(json.dumps(work()).encode("ascii"))
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(1)
