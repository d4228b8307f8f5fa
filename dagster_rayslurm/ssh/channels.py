"""SSH channels of one login: what an SSH client implements (`Transport`), and how threads share the channels (`ChannelPool`).

In this module a session is an SSH session channel, which carries one command or the SFTP subsystem. The server limits how many
sessions are open at once on one login.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any, Protocol

from . import errors
from .config import SSHConnectionResource
from .sftp import Sftp, SftpLost

_MAX_SESSIONS = 10
"""Number of open sessions that sshd allows on one login by default (`MaxSessions`, sshd_config(5) of OpenSSH 9.2)."""
_RAISE_AFTER = 30.0
"""Seconds after the server refused a session until `ChannelPool` raises its limit by one session again."""


class Refused(Exception):
    """Raised when the server opens no further session on this login (`MaxSessions`, sshd_config(5)). Nothing was started."""


class Process(Protocol):
    """A running remote command with its input and output streams."""

    def write(self, data: bytes) -> None:
        """Send bytes to the command's standard input. Blocks while the server accepts none.

        Input that the command no longer reads is dropped.
        """
        ...

    def read(self, timeout: float) -> tuple[bytes, bytes]:
        """New bytes of stdout and of stderr. Both are empty if none arrive within `timeout` seconds.

        Raises:
            EOFError: both streams have ended.
        """
        ...

    def why(self, stdout: bytes, stderr: bytes) -> Exception:
        """The exception for streams that ended before the command did: `Refused` or a `ConnectionFailed`.

        Args:
            stdout: all output so far, of the login shell or of the SSH client.
            stderr: all error output so far.
        """
        ...

    def close(self) -> None:
        """Close the streams, which makes the server end the command."""
        ...


class Transport(Protocol):
    """One login to an SSH server, as an SSH client provides it.

    The methods that open a channel raise `Refused`, or `ConnectionFailed` if the failure precedes the start of anything.
    """

    @property
    def ssh(self) -> SSHConnectionResource:
        """The configuration of the server and the login."""
        ...

    def alive(self) -> bool:
        """Whether the login still works, as far as this process knows without asking the server."""
        ...

    def subsystem(self, name: str) -> Any:
        """Open a subsystem of the server, such as "sftp", and return its channel with `send`, `recv` and `close`."""
        ...

    def execute(self, command: str) -> Process:
        """Start a command in the login shell of the server, and return the running command."""
        ...

    def tunnel(self, host: str, port: int, client: socket.socket) -> None:
        """Copy bytes between a local client and `host:port`, which the server can reach, until both directions have ended."""
        ...

    def close(self) -> None:
        """Log out."""
        ...


class ChannelPool:
    """Hands out the sessions of one login: one SFTP session, which all threads share, and one session for each command.

    The number of open sessions has a limit, which the pool learns from the server: it is lowered when the server refuses a
    session. If the server allows only one session, files and commands take turns.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._limit = _MAX_SESSIONS
        self._limit_set_at = 0.0
        self._commands = 0
        self._file_users = 0
        self._changed = threading.Condition()
        self._sftp: Sftp | None = None
        self._sftp_lock = threading.Lock()

    @contextlib.contextmanager
    def for_command(self, deadline: float | None = None) -> Iterator[Transport]:
        """Reserve a session for one command; yields the login on which to start that command.

        Args:
            deadline: value of `time.monotonic()` until which to wait for a free session; None to wait without limit.

        Raises:
            Refused: the server allows no further session now.
            TimeoutError: no session became free in time.
        """
        with self._changed:
            self._raise_limit()
            timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._changed.wait_for(self._has_room_for_command, timeout):
                raise TimeoutError
            self._commands += 1
            if self._limit == 1:
                self._close_sftp()
        try:
            yield self.transport
        except Refused:
            self._lower_limit()
            raise
        finally:
            with self._changed:
                self._commands -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def for_files(self) -> Iterator[Sftp]:
        """The SFTP session. Other threads use the same session at the same time.

        Raises:
            Refused: the server allows no further session now.
            ConnectionFailed: the server offers no SFTP, or the login has ended.
        """
        with self._changed:
            self._raise_limit()
            self._changed.wait_for(self._has_room_for_files)
            self._file_users += 1
        try:
            with self._sftp_lock:
                if self._sftp is None or self._sftp.lost:
                    self._close_sftp()
                    self._sftp = self._open_sftp()
                sftp = self._sftp
            yield sftp
        except Refused:
            self._lower_limit()
            raise
        finally:
            with self._changed:
                self._file_users -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """Log out, which ends all channels."""
        self.transport.close()  # First: threads that wait for a response then return.
        with self._sftp_lock:
            self._close_sftp()

    def _has_room_for_command(self) -> bool:
        if self._limit == 1:
            return self._commands == 0 and self._file_users == 0
        return self._commands < self._limit - 1  # One session is kept free for files.

    def _has_room_for_files(self) -> bool:
        if self._limit == 1:
            return self._commands == 0 and self._file_users == 0
        return self._sftp is not None or self._commands < self._limit

    def _lower_limit(self) -> None:
        """Set the limit to the number of sessions that were open when the server refused one more."""
        with self._changed:
            were_open = self._commands + (self._sftp is not None or self._file_users > 0) - 1
            self._limit = max(1, min(self._limit, were_open))
            self._limit_set_at = time.monotonic()
            self._changed.notify_all()

    def _raise_limit(self) -> None:
        """Allow one more session if the last refusal is long past.

        A refusal may be temporary: sshd counts a session until its shell is reaped, and other processes may share the login.
        """
        if self._limit < _MAX_SESSIONS and time.monotonic() - self._limit_set_at > _RAISE_AFTER:
            self._limit += 1
            self._limit_set_at = time.monotonic()

    def _open_sftp(self) -> Sftp:
        stream = self.transport.subsystem("sftp")
        alarm = threading.Timer(self.transport.ssh.connect_timeout, stream.close)
        alarm.daemon = True
        alarm.start()
        try:
            return Sftp(stream)
        except SftpLost as error:
            if self.transport.alive():
                raise errors.no_sftp(self.transport.ssh, str(error)) from None
            raise errors.gone(self.transport.ssh) from None
        finally:
            alarm.cancel()

    def _close_sftp(self) -> None:
        sftp, self._sftp = self._sftp, None
        if sftp is not None:
            sftp.close()
