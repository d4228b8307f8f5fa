"""The sessions of one login: how many are open, how many the server allows, and the one that files go over."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from . import errors
from .sftp import Sftp, SftpLost
from .transport import Refused, Transport

_MAX_SESSIONS = 10
"""Sessions on one login that sshd allows unless told otherwise (`MaxSessions`, sshd_config(5) of OpenSSH 9.2)."""
_FORGET_AFTER = 30.0
"""Seconds after a refusal until one session more is tried again."""


class ChannelPool:
    """Hands out the sessions of a login.

    How many there are is learned when the server refuses one. Files keep a session for as long as there are two at
    least; with one, files and commands take turns.

    Args:
        link: the login.
    """

    def __init__(self, link: Transport) -> None:
        self.link = link
        self._limit = _MAX_SESSIONS
        self._learned_at = 0.0
        self._open = 0
        self._changed = threading.Condition()
        self._turn = threading.Lock()
        self._sftp_lock = threading.Lock()
        self._sftp: Sftp | None = None

    @contextlib.contextmanager
    def for_command(self, deadline: float | None = None) -> Iterator[Transport]:
        """A session to run a command on.

        Args:
            deadline: `time.monotonic()` until which to wait for one.

        Raises:
            Refused: the server has none to give right now.
            TimeoutError: none came free in time.
        """
        with self._taking_turns() as turns:
            if turns:
                self.drop_sftp()
            self._take(turns, deadline, spare=0 if turns or self._sftp is not None else 1)
            try:
                yield self.link
            except Refused:
                self._learn()
                raise
            finally:
                self._give_back()

    @contextlib.contextmanager
    def for_files(self) -> Iterator[Sftp]:
        """The session that files go over; other threads use it at the same time.

        Raises:
            Refused: the server has none to give right now.
            ConnectionFailed: it does not speak SFTP, or the login is gone.
        """
        with self._taking_turns() as turns:
            with self._sftp_lock:
                if self._sftp is None or self._sftp.lost:
                    self._close_sftp()
                    self._sftp = self._open_sftp(turns)
                sftp = self._sftp
            yield sftp

    def drop_sftp(self) -> None:
        """Close the session that files go over; the next file opens it again."""
        with self._sftp_lock:
            self._close_sftp()

    def close(self) -> None:
        """Close all that is open."""
        self.link.close()  # First: whoever waits for an answer then waits no more.
        self.drop_sftp()

    @contextlib.contextmanager
    def _taking_turns(self) -> Iterator[bool]:
        if self._limit > 1:
            yield False
        else:
            with self._turn:
                yield True

    def _open_sftp(self, turns: bool) -> Sftp:
        self._take(turns)
        try:
            return self._shake_hands()
        except BaseException as error:
            if isinstance(error, Refused):
                self._learn()
            self._give_back()
            raise

    def _shake_hands(self) -> Sftp:
        stream = self.link.subsystem("sftp")
        alarm = threading.Timer(self.link.ssh.connect_timeout, stream.close)
        alarm.daemon = True
        alarm.start()
        try:
            return Sftp(stream)
        except SftpLost as error:
            if self.link.alive():
                raise errors.no_sftp(self.link.ssh, str(error)) from None
            raise errors.gone(self.link.ssh) from None
        finally:
            alarm.cancel()

    def _close_sftp(self) -> None:
        if self._sftp is not None:
            self._sftp.close()
            self._sftp = None
            self._give_back()

    def _learn(self) -> None:
        """A refusal tells how many the server allows: those that were open."""
        with self._changed:
            self._limit = max(1, min(self._limit, self._open - 1))
            self._learned_at = time.monotonic()
            self._changed.notify_all()

    def _take(self, turns: bool, deadline: float | None = None, spare: int = 0) -> None:
        """Count one more as open, once that is allowed.

        Args:
            turns: whether the caller takes turns.
            deadline: `time.monotonic()` until which to wait.
            spare: how many sessions to leave to others.

        Raises:
            Refused: it has become known meanwhile that files and commands must take turns.
            TimeoutError: the deadline passed.
        """
        with self._changed:
            if self._limit < _MAX_SESSIONS and time.monotonic() - self._learned_at > _FORGET_AFTER:
                self._limit += 1  # sshd counts a session until its shell is reaped, and others may share the login.
                self._learned_at = time.monotonic()
            timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._changed.wait_for(
                lambda: self._open < max(1, self._limit - spare) or (self._limit == 1 and not turns), timeout
            ):
                raise TimeoutError
            if self._open >= self._limit:
                raise Refused
            self._open += 1

    def _give_back(self) -> None:
        with self._changed:
            self._open -= 1
            self._changed.notify_all()
