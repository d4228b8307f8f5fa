"""Run programs such as `squeue` and `nvidia-smi` without blocking the loop."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import Any, Callable, Optional, Sequence

from . import processes
from .loop import Loop


def query_program(loop: Loop, argv: Sequence[str], timeout: float, on_answer: Callable[[Optional[str]], None]) -> None:
    """Run a program without blocking.

    Args:
        loop: the event loop.
        argv: the command.
        timeout: seconds after which the program is killed.
        on_answer: called with the output when the program has ended, or with None if it failed or was killed. Never called while
            the program hangs in an uninterruptible wait for a device or a file system.

    Raises:
        OSError: the program cannot be started.
    """
    reader, writer = os.pipe()
    os.set_blocking(reader, False)  # A process that the program left behind may keep the other end open.

    def ended(code: int, _: Any) -> None:
        timer.cancel()
        with os.fdopen(reader, "rb") as file:
            text = (file.read() or b"").decode("utf-8", "replace")
        on_answer(text if code == 0 else None)

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

    timer = loop.call_later(timeout, lambda: processes.signal_group(pid, signal.SIGKILL))
