"""`Connection`, the interface for files and commands of the machine where the runtime works, and its exceptions.

This module imports no SSH client.
"""

from __future__ import annotations

import os
import posixpath
import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

Progress = Callable[[int, int], None]
"""Called during a file transfer with the number of bytes that have arrived and the total number of bytes."""

_VARIABLE = re.compile(r"(^|/)\$(\w+|\{\w+\})(/|$)")


class ConnectionFailed(ConnectionError):
    """Raised when a connection cannot be made or has broken. The message is one sentence that names the remedy.

    Attributes:
        temporary: whether a later try with the same configuration may succeed.
    """

    def __init__(self, sentence: str, temporary: bool) -> None:
        super().__init__(sentence)
        self.temporary = temporary


class ServerBusy(ConnectionFailed):
    """Raised when the SSH server refuses logins for now."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence, temporary=True)


class ConnectionGone(ConnectionFailed):
    """Raised when the connection had ended before the operation started, so the server did not carry it out."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence, temporary=True)


class ConnectionLost(ConnectionFailed):
    """Raised when the connection broke during an operation, so it is unknown whether the server carried it out."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence, temporary=True)


@dataclass(frozen=True)
class Completed:
    """Exit code and output of a command that has ended. The exit code is 128 + N if signal N ended the command."""

    returncode: int
    stdout: bytes
    stderr: bytes


@dataclass(frozen=True)
class Stat:
    """Owner and modification time of a file.

    Attributes:
        owner: user id of the owner.
        modified: time of the last change in whole seconds since the epoch, by the clock of the machine that holds the file.
    """

    owner: int
    modified: float


class Forward(Protocol):
    """A TCP port of this machine that is forwarded to a port behind the connection. Several clients may use it at once."""

    @property
    def host(self) -> str: ...

    @property
    def port(self) -> int: ...

    def close(self) -> None:
        """Stop listening and disconnect all clients."""
        ...

    def __enter__(self) -> Forward: ...

    def __exit__(self, *exc_info: object) -> None: ...


class Connection(Protocol):
    """Access to the files and commands of one machine: this machine, or an edge node behind SSH.

    All paths are absolute. All methods may be called from several threads at once.

    A connection logs in at its first use, and again when it was lost. A file operation is repeated after a loss for up to
    `connect_timeout` seconds, and then raises `ConnectionFailed`. A command that may have run is never repeated. An error
    of the machine itself, such as a missing permission, raises an `OSError` of the matching class.
    """

    @property
    def place(self) -> str:
        """Name of the machine in messages, such as "dev@edge:22"."""
        ...

    def run(self, command: Sequence[str], stdin: bytes = b"", timeout: float | None = None) -> Completed:
        """Run a command, wait until it ends, and return its exit code and output. No shell interprets its words.

        The exit code is 127 if the program does not exist, as in a shell. `run` does not wait for background processes that
        the command leaves behind, and drops their output.

        Args:
            command: program and arguments.
            stdin: the whole standard input.
            timeout: seconds after which the command is killed, with all processes that it started.

        Raises:
            ValueError: a word contains a NUL character.
            TimeoutError: the command took longer than `timeout` seconds.
            ConnectionLost: the connection broke, and the command may have run.
            ConnectionFailed: there is no connection, and the command did not run.
        """
        ...

    def home(self) -> str:
        """The home directory of the user who is logged in."""
        ...

    def user_id(self) -> int:
        """The numeric id of the user who is logged in."""
        ...

    def stat(self, path: str) -> Stat | None:
        """Owner and modification time of a file or directory, or None if the path does not exist. Links are followed.

        The connection runs no command for this.

        Raises:
            OSError: the attributes cannot be read.
        """
        ...

    def read(self, path: str, offset: int, limit: int) -> bytes:
        """At most `limit` bytes of a file from `offset` on; b"" at the end of the file, or if the file does not exist.

        Raises:
            OSError: the file cannot be read.
        """
        ...

    def write(self, path: str, data: bytes, mode: int = 0o600) -> None:
        """Write a file: create it, or replace it atomically.

        Raises:
            OSError: the file cannot be written.
        """
        ...

    def make_dir(self, path: str) -> None:
        """Make a directory and its parents, with access for this user only. An existing directory is no error.

        Raises:
            OSError: the directory cannot be made.
        """
        ...

    def upload(self, local_path: str, path: str, progress: Progress | None = None, mode: int = 0o600) -> None:
        """Copy a file from this machine, and replace the target atomically once the copy is complete.

        Raises:
            OSError: the file cannot be read here or written there.
        """
        ...

    def download(self, path: str, local_path: str, progress: Progress | None = None) -> None:
        """Copy a file to this machine, and make the directories above it.

        Raises:
            OSError: the file cannot be read there or written here.
        """
        ...

    def rename(self, old: str, new: str) -> None:
        """Rename a file within its directory, atomically. The connection runs no command for this.

        The rename is repeated after a lost connection, so the file may have been renamed although `rename` raises.

        Raises:
            FileNotFoundError: the file does not exist, perhaps because an earlier try has renamed it.
            OSError: the file cannot be renamed.
        """

    def remove(self, path: str) -> None:
        """Remove a file, or a directory with everything in it. A missing path is no error.

        Raises:
            OSError: the file, or a part of the directory, could not be removed.
        """
        ...

    def forward(self, host: str, port: int) -> Forward:
        """Return a local port that is forwarded to `host:port`, an address that the machine behind the connection can reach."""
        ...

    def close(self) -> None:
        """Log out. The next use of the connection logs in again."""
        ...


# -- paths as users write them -------------------------------------------------------------------------------------------


def check_no_variable(path: str, field: str) -> None:
    """Refuse a path that contains a shell variable, because nothing expands variables in paths.

    Raises:
        ValueError: the path contains a variable. The message names `field`, the configuration field of the path.
    """
    found = _VARIABLE.search(path)
    if found:
        raise ValueError(
            f'{field}: {path!r}: variables such as ${found[2]} are not expanded; write the value, or begin with "~/"'
        )


def is_rooted(path: str) -> bool:
    """Whether a path is absolute or begins with "~/"."""
    return os.path.isabs(path) or path == "~" or path.startswith("~/")


def expand_home(connection: Connection, path: str) -> str:
    """The path with a leading "~" replaced by the home directory of the connection's user.

    Raises:
        OSError: the connection cannot find out the home directory.
    """
    return posixpath.join(connection.home(), path[2:]) if path == "~" or path.startswith("~/") else path


class Backoff:
    """The pauses between retries in one outage, which began at `since` (`time.monotonic()`), or now.

    Each pause is twice the last one, but at most 30 s, and at most 1.5 s or a twentieth of the outage, whichever is longer.
    """

    def __init__(self, since: float | None = None) -> None:
        self._since = time.monotonic() if since is None else since
        self._next = 0.2

    @property
    def seconds(self) -> float:
        """Duration of the outage so far, in seconds."""
        return time.monotonic() - self._since

    def pause(self) -> float:
        """Returns the seconds to sleep before the next retry. Jitter keeps many processes from retrying at the same moment."""
        pause = min(self._next, max(1.5, 0.05 * self.seconds), 30.0)
        self._next *= 2
        return pause * random.uniform(0.5, 1.0)
