"""The sessions of one login: how many are open, how many the server allows, and the one that files go over."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from . import failures
from .link import Link, Refused
from .sftp import Sftp, SftpLost

_MAX_SESSIONS = 10
"""Sessions on one login that sshd allows unless told otherwise (`MaxSessions`, sshd_config(5) of OpenSSH 9.2)."""


class Sessions:
    """Hands out the sessions of a login.

    How many there are is learned when the server refuses one. Files keep a session for as long as there are two at
    least; with one, files and commands take turns.

    Args:
        link: the login.
    """

    def __init__(self, link: Link) -> None:
        self.link = link
        self._limit = _MAX_SESSIONS
        self._open = 0
        self._changed = threading.Condition()
        self._turn = threading.Lock()
        self._sftp_lock = threading.Lock()
        self._sftp: Sftp | None = None

    @contextlib.contextmanager
    def for_command(self) -> Iterator[Link]:
        """A session to run a command on.

        Raises:
            Refused: the server has none to give right now.
        """
        with self._taking_turns() as turns:
            if turns:
                self.drop_sftp()
            self._take(turns)
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
        self.drop_sftp()
        self.link.close()

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
        try:
            return Sftp(self.link.subsystem("sftp"))
        except SftpLost as error:
            if self.link.alive():
                raise failures.no_sftp(self.link.ssh, str(error)) from None
            raise failures.gone(self.link.ssh) from None

    def _close_sftp(self) -> None:
        if self._sftp is not None:
            self._sftp.close()
            self._sftp = None
            self._give_back()

    def _learn(self) -> None:
        """A refusal tells how many the server allows: those that were open."""
        with self._changed:
            self._limit = max(1, min(self._limit, self._open - 1))
            self._changed.notify_all()

    def _take(self, turns: bool) -> None:
        """Count one more as open, once that is allowed.

        Raises:
            Refused: it has become known meanwhile that files and commands must take turns.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._open < self._limit or (self._limit == 1 and not turns))
            if self._open >= self._limit:
                raise Refused
            self._open += 1

    def _give_back(self) -> None:
        with self._changed:
            self._open -= 1
            self._changed.notify()
