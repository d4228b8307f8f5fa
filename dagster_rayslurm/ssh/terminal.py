"""Connects this process's terminal, or its standard input and output, to a command on a channel of paramiko."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import termios
import threading
import tty
from collections.abc import Iterator
from typing import Any

_BUFFER = 65536
_STDIN = 0


def has_terminal() -> bool:
    """Whether standard input and output are a terminal, so that a remote shell can be interactive."""
    return os.isatty(_STDIN) and os.isatty(1)


def shell_status(code: int) -> int:
    """Returns the exit code that a shell shows for a process: 128 + N for the signal N, which Python's subprocess shows as -N."""
    return 128 - code if code < 0 else code


def relay(channel: Any, command: str) -> int:
    """Run a command on the server with this process's input and output; returns the command's exit code.

    `channel` is a new channel of paramiko, on which nothing runs yet. If this process has a terminal, the command gets a terminal
    on the server.
    """
    if not has_terminal():
        channel.exec_command(command)
        return _copy(channel)
    columns, rows = shutil.get_terminal_size()
    channel.get_pty(os.environ.get("TERM", "xterm"), columns, rows)
    channel.exec_command(command)
    with _raw_terminal(), _resized(channel):
        return _copy(channel)


@contextlib.contextmanager
def _raw_terminal() -> Iterator[None]:
    """Inside the block, this process's terminal is in raw mode, so that the remote command gets each key unchanged."""
    before = termios.tcgetattr(_STDIN)
    try:
        tty.setraw(_STDIN)
        yield
    finally:
        termios.tcsetattr(_STDIN, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _resized(channel: Any) -> Iterator[None]:
    """Inside the block, send each new size of this terminal to the remote terminal; has no effect outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def resize(*_: object) -> None:
        columns, rows = os.get_terminal_size(_STDIN)
        with contextlib.suppress(Exception):  # The channel may be closing.
            channel.resize_pty(columns, rows)

    before = signal.signal(signal.SIGWINCH, resize)
    try:
        yield
    finally:
        signal.signal(signal.SIGWINCH, before)


def _copy(channel: Any) -> int:
    """Copy this process's input to the channel, and the channel's outputs to this process's outputs, until the command ends.

    Returns the command's exit code.
    """
    sources: list[Any] = [channel, _STDIN]
    while True:
        ready, _, _ = select.select(sources, [], [])
        if _STDIN in ready:
            data = os.read(_STDIN, _BUFFER)
            if data:
                channel.sendall(data)
            else:
                channel.shutdown_write()
                sources.remove(_STDIN)
        if channel in ready:
            ended = True
            while channel.recv_ready():
                ended = _write(sys.stdout, channel.recv(_BUFFER)) == 0
            while channel.recv_stderr_ready():
                ended = _write(sys.stderr, channel.recv_stderr(_BUFFER)) == 0
            if ended and (channel.eof_received or channel.closed):
                return int(channel.recv_exit_status())


def _write(stream: Any, data: bytes) -> int:
    """Write `data` to this process's output `stream`; returns the number of bytes in `data`."""
    stream.buffer.write(data)
    stream.buffer.flush()
    return len(data)
