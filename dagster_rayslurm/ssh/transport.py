"""One login as the connections see it: what opens channels, whichever SSH client is behind it."""

from __future__ import annotations

import socket
from typing import Any, Protocol

from .config import SSHConnectionResource


class Refused(Exception):
    """The server opens no further session on this login (`MaxSessions`, sshd_config(5)); nothing was started."""


class Process(Protocol):
    """A remote command with its streams."""

    def write(self, data: bytes) -> None:
        """Hand it input; blocks while the server takes none. What it takes no more is dropped."""
        ...

    def read(self, timeout: float) -> tuple[bytes, bytes]:
        """What came on stdout and stderr; two times nothing after `timeout` seconds.

        Raises:
            EOFError: the command's streams are closed and read.
        """
        ...

    def why(self, stdout: bytes, stderr: bytes) -> Exception:
        """Why the streams ended before the command did: `Refused` or a `ConnectionFailed`."""
        ...

    def close(self) -> None:
        """Let go of it; its lifeline ends."""
        ...


class Transport(Protocol):
    """One login. What it raises: `Refused`, or `ConnectionFailed` before anything was started."""

    @property
    def ssh(self) -> SSHConnectionResource:
        """The server that was logged in to."""
        ...

    def alive(self) -> bool:
        """Whether it still works, as far as is known."""
        ...

    def subsystem(self, name: str) -> Any:
        """A channel with `send`, `recv` and `close` to a subsystem such as "sftp"."""
        ...

    def execute(self, command: str) -> Process:
        """Start a command in the login shell."""
        ...

    def tunnel(self, host: str, port: int, client: socket.socket) -> None:
        """Carry a client's bytes to and from a port that is reached from there, until both sides are done."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...
