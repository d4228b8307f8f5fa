"""`AgentClient` starts the agent of `edge` on a channel of an SSH client and sends it requests, many at a time."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from functools import cache
from typing import Any, Protocol

from .. import edge
from ..edge.agent import Sender, command_line, messages, program
from . import errors
from .config import SSHConnectionResource

_MAX_NOISE = 1024 * 1024
"""Most bytes of output of the shell's start-up files before the agent's hello."""
_MIN_PYTHON = (3, 6)
_GRACE = 5.0
"""Seconds after the deadline of a request in which the agent should have said so itself."""
_BUFFER = 256 * 1024


class Refused(Exception):
    """Raised when the server opens no further session on this login (`MaxSessions`, sshd_config(5)). Nothing was started."""


class Stream(Protocol):
    """Standard input and output of a command that an SSH client runs."""

    def sendall(self, data: bytes) -> None:
        """Send bytes; raises `OSError` or `EOFError` if the channel has ended."""
        ...

    def recv(self, size: int) -> bytes:
        """Some bytes; b"" at the end."""
        ...

    def close(self) -> None:
        """End the channel, which ends the command's standard input."""
        ...

    def failure(self, noise: str) -> Exception:
        """The exception for a command that has ended at once, after it printed `noise`: `Refused` or a `ConnectionFailed`."""
        ...


def agent_command(ssh: SSHConnectionResource) -> tuple[str, bytes]:
    """The command that starts an agent, and the beginning of its hello."""
    word = secrets.token_hex(8)
    return command_line(ssh.python, word), f"\n{word}{word} ".encode()


@cache
def _program() -> bytes:
    return program(os.path.dirname(edge.__file__))


class AgentClient:
    """A running agent, which calls functions for many threads at once.

    Args:
        ssh: the server.
        stream: a channel on which the command of `agent_command` was started.
        hello: the beginning of the hello.

    Raises:
        Refused, ConnectionFailed: the agent does not start. Nothing was called.
    """

    def __init__(self, ssh: SSHConnectionResource, stream: Stream, hello: bytes) -> None:
        self._ssh, self._stream = ssh, stream
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Future[Any]] = {}
        self.lost = False
        self.heard = time.monotonic()
        alarm = threading.Timer(ssh.connect_timeout, stream.close)
        alarm.daemon = True
        alarm.start()
        try:
            with contextlib.suppress(OSError, EOFError):
                stream.sendall(_program())
            self._rest = self._skip_noise(hello)
        except BaseException:
            stream.close()
            raise
        finally:
            alarm.cancel()
        self._sender = Sender(stream.sendall, stream.close)
        threading.Thread(target=self._receive, name="rayslurm-agent", daemon=True).start()

    def submit(self, deadline: float | None, function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
        """Start a call, and return a function that waits for its result.

        Raises:
            ConnectionGone: the agent had ended before.
        """
        number, future = next(self._numbers), Future[Any]()
        self._waiting[number] = future
        if self.lost:
            raise errors.gone(self._ssh)
        name = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
        self._sender.send({"id": number, "call": name}, list(arguments))

        def wait() -> Any:
            try:
                return future.result(None if deadline is None else max(0.0, deadline - time.monotonic()) + _GRACE)
            except BaseException as error:
                if not future.done():  # Nobody waits any more.
                    self._sender.send({"id": number, "cancel": True}, [])
                    if isinstance(error, NotInTime):
                        raise TimeoutError from None
                raise

        return wait

    def close(self) -> None:
        """End the agent, and the commands that it runs."""
        self._stream.close()

    def _skip_noise(self, hello: bytes) -> bytes:
        """Read up to the agent's hello; returns what has arrived after it."""
        received = b""
        pattern = re.compile(re.escape(hello) + rb"(\d+)\.(\d+)\n")
        while not (found := pattern.search(received)):
            data = b""
            with contextlib.suppress(OSError, EOFError):
                data = self._stream.recv(_BUFFER)
            if not data or len(received) > _MAX_NOISE:
                raise self._stream.failure(received.decode("utf-8", "replace")[-300:].strip())
            received += data
        version = int(found[1]), int(found[2])
        if version < _MIN_PYTHON:
            raise errors.no_python(self._ssh, f"it is Python {version[0]}.{version[1]}")
        return received[found.end() :]

    def _read(self, size: int) -> bytes:
        parts, missing = [], size
        if self._rest:
            parts, self._rest = [self._rest[:size]], self._rest[size:]
            missing -= len(parts[0])
        while missing:
            data = self._stream.recv(min(missing, _BUFFER))
            if not data:
                break
            parts.append(data)
            missing -= len(data)
        return b"".join(parts)

    def _receive(self) -> None:
        with contextlib.suppress(Exception):  # Whatever ended the channel: who waits gets `ConnectionLost` below.
            for header, values in messages(self._read):
                self.heard = time.monotonic()
                future = self._waiting.pop(header["id"], None)
                if future is not None:
                    _resolve(future, header, values)
        self.lost = True
        for future in list(self._waiting.values()):
            with contextlib.suppress(Exception):
                future.set_exception(errors.lost(self._ssh))
        self.close()


def _resolve(future: Future[Any], header: dict[str, Any], values: list[Any]) -> None:
    """Set the result or exception of a call from the agent's answer."""
    if "failure" in header:
        future.set_exception(RuntimeError(f"{header['failure']} on the edge node: {values[0]}"))
    elif "errno" in header:
        said, name = values
        future.set_exception(OSError(header["errno"], said, name) if header["errno"] is not None else OSError(said))
    else:
        future.set_result(tuple(values) if header["tuple"] else values[0])
