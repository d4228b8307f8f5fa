"""Run programs such as `squeue` and `nvidia-smi` without blocking the loop."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import Any, Callable, Optional, Sequence

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
