"""What the rest of the project needs of the place where the runtime works."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

Progress = Callable[[int, int], None]
"""Told of a transfer as it goes: bytes that have arrived, bytes in all."""


class ConnectionFailed(ConnectionError):
    """The place cannot be reached, or no longer; the message is one sentence that names the remedy.

    Attributes:
        temporary: whether the same configuration may well succeed later.
    """

    def __init__(self, sentence: str, temporary: bool) -> None:
        super().__init__(sentence)
        self.temporary = temporary


class ServerBusy(ConnectionFailed):
    """The server turns logins away for now."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence, temporary=True)


class ConnectionGone(ConnectionFailed):
    """The connection had ended before anything was started on it."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence, temporary=True)


class ConnectionLost(ConnectionFailed):
    """The connection broke while something was under way; whether it was carried out is not known."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence, temporary=True)


@dataclass(frozen=True)
class Completed:
    """How a command ended.

    Attributes:
        returncode: its exit code; 128 + N after signal N.
        stdout: what it wrote there.
        stderr: what it wrote there.
    """

    returncode: int
    stdout: bytes
    stderr: bytes


@dataclass(frozen=True)
class Stat:
    """What is known of a file without opening it.

    Attributes:
        owner: the user id there.
        modified: when it was changed last, by the clock there, in whole seconds of the epoch.
    """

    owner: int
    modified: float


class Forward(Protocol):
    """A TCP port of this machine that leads to a port over there; several clients may use it at once."""

    @property
    def host(self) -> str: ...

    @property
    def port(self) -> int: ...

    def close(self) -> None:
        """Stop listening and cut the clients off."""
        ...

    def __enter__(self) -> Forward: ...

    def __exit__(self, *exc_info: object) -> None: ...


class Connection(Protocol):
    """Reaches the files and commands of the place where the runtime works. Every path is absolute there.

    All of it may be called from several threads. File operations try again by themselves after a lost connection, for
    `connect_timeout` seconds; whatever the place itself refuses is an `OSError` of the fitting class.
    """

    @property
    def place(self) -> str:
        """What messages call it, such as "dev@edge:22"."""
        ...

    def run(self, command: Sequence[str], stdin: bytes = b"", timeout: float | None = None) -> Completed:
        """Run a command and wait for its end; its words are taken as they are, no shell looks at them.

        A program that is not there ends with 127, as in a shell. What the command leaves running in the background is
        neither waited for nor listened to.

        Args:
            command: the program and its arguments.
            stdin: all that it can read.
            timeout: seconds after which it is ended, with all that it started.

        Raises:
            ValueError: a word contains a NUL character.
            TimeoutError: it took longer than `timeout` seconds.
            ConnectionLost: the connection broke while the command may have run.
            ConnectionFailed: the connection cannot be had; the command did not run.
        """
        ...

    def home(self) -> str:
        """The home directory there."""
        ...

    def user_id(self) -> int:
        """The number of the user there."""
        ...

    def stat(self, path: str) -> Stat | None:
        """What is known of a file or directory, or of what a link leads to; None if it is not there. No command is run.

        Raises:
            OSError: it cannot be looked at.
        """
        ...

    def read(self, path: str, offset: int, limit: int) -> bytes:
        """At most `limit` bytes of a file from `offset` on; b"" at its end, or if it is not there yet.

        Raises:
            OSError: it cannot be read.
        """
        ...

    def write(self, path: str, data: bytes, mode: int = 0o600) -> None:
        """Replace a file in one step.

        Raises:
            OSError: it cannot be written.
        """
        ...

    def make_dir(self, path: str) -> None:
        """Make a directory of this user alone, and its parents.

        Raises:
            OSError: it cannot be made.
        """
        ...

    def upload(self, local_path: str, path: str, progress: Progress | None = None, mode: int = 0o600) -> None:
        """Copy a file from this machine to there, replacing it in one step once it is complete.

        Raises:
            OSError: it cannot be read here or written there.
        """
        ...

    def download(self, path: str, local_path: str, progress: Progress | None = None) -> None:
        """Copy a file from there to this machine, making the directories it needs.

        Raises:
            OSError: it cannot be read there or written here.
        """
        ...

    def rename(self, old: str, new: str) -> None:
        """Give a file another name in the same directory, in one step. No command is run.

        A connection that breaks has this done again, so that an answer may be lost and the file be renamed all the same.

        Raises:
            FileNotFoundError: there is no such file, perhaps because an earlier try has renamed it.
            OSError: it cannot be renamed.
        """

    def remove(self, path: str) -> None:
        """Remove a file or a directory with all in it; one that is not there is no error.

        Raises:
            OSError: something of it stays.
        """
        ...

    def forward(self, host: str, port: int) -> Forward:
        """Make a TCP port that can be reached from there reachable from this machine."""
        ...

    def close(self) -> None:
        """Let go of what is open; the next use connects again."""
        ...
