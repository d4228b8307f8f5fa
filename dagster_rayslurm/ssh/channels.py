"""The channels of one login: its interface, and how many sessions the server allows on it."""

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
"""Sessions on one login that sshd allows by default (`MaxSessions`, sshd_config(5) of OpenSSH 9.2)."""
_RAISE_AFTER = 30.0
"""Seconds after a refusal until one more session is tried."""


class Refused(Exception):
    """The server opens no further session on this login (`MaxSessions`, sshd_config(5)); nothing was started."""


class Process(Protocol):
    """A remote command with its streams."""

    def write(self, data: bytes) -> None:
        """Send input. Blocks while the server accepts none. Input that the command no longer reads is dropped."""
        ...

    def read(self, timeout: float) -> tuple[bytes, bytes]:
        """New bytes of stdout and stderr; both are empty after `timeout` seconds.

        Raises:
            EOFError: both streams are at their end.
        """
        ...

    def why(self, stdout: bytes, stderr: bytes) -> Exception:
        """Why the streams ended before the command did: `Refused` or a `ConnectionFailed`."""
        ...

    def close(self) -> None:
        """Close the streams. The server side then ends the command."""
        ...


class Transport(Protocol):
    """One login. Its methods raise `Refused`, or `ConnectionFailed` before anything was started."""

    @property
    def ssh(self) -> SSHConnectionResource:
        """The server."""
        ...

    def alive(self) -> bool:
        """Whether the login still works, as far as is known."""
        ...

    def subsystem(self, name: str) -> Any:
        """A channel with `send`, `recv` and `close` to a subsystem such as "sftp"."""
        ...

    def execute(self, command: str) -> Process:
        """Start a command in the login shell."""
        ...

    def tunnel(self, host: str, port: int, client: socket.socket) -> None:
        """Copy a client's bytes to and from a port that the server can reach, until both directions have ended."""
        ...

    def close(self) -> None:
        """Log out."""
        ...


class ChannelPool:
    """Hands out the sessions of a login: one for files, which all threads share, and the others for commands.

    A refusal of the server tells how many it allows. With one session only, files and commands take turns.
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
        """A session to run a command on.

        Args:
            deadline: `time.monotonic()` until which to wait for a free session.

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
        """The session for files. Other threads use it at the same time.

        Raises:
            Refused: the server allows no further session now.
            ConnectionFailed: the server has no SFTP, or the login is gone.
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
        """Log out and close all channels."""
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
        """After a refusal: the server allows the sessions that were open before the refused one."""
        with self._changed:
            were_open = self._commands + (self._sftp is not None or self._file_users > 0) - 1
            self._limit = max(1, min(self._limit, were_open))
            self._limit_set_at = time.monotonic()
            self._changed.notify_all()

    def _raise_limit(self) -> None:
        """Some time after a refusal: sshd counts a session until its shell is reaped, and others may share the login."""
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
