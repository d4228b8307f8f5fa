"""The interface of connections: files and commands of the machine where the runtime works. Needs no SSH client."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

Progress = Callable[[int, int], None]
"""Receives the progress of a transfer: bytes that have arrived, bytes in total."""

_VARIABLE = re.compile(r"(^|/)\$(\w+|\{\w+\})(/|$)")


class ConnectionFailed(ConnectionError):
    """The connection cannot be made, or broke. The message is one sentence that names the remedy.

    Attributes:
        temporary: whether the same configuration may succeed later.
    """

    def __init__(self, sentence: str, temporary: bool) -> None:
        super().__init__(sentence)
        self.temporary = temporary


class ServerBusy(ConnectionFailed):
    """The server refuses logins for now."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence, temporary=True)


class ConnectionGone(ConnectionFailed):
    """The connection had ended before the operation started."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence, temporary=True)


class ConnectionLost(ConnectionFailed):
    """The connection broke during the operation. Nobody knows whether the server carried it out."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence, temporary=True)


@dataclass(frozen=True)
class Completed:
    """Exit code and output of a command. The exit code is 128 + N after signal N."""

    returncode: int
    stdout: bytes
    stderr: bytes


@dataclass(frozen=True)
class Stat:
    """Attributes of a file.

    Attributes:
        owner: user id of the owner.
        modified: time of the last change in whole seconds since the epoch, by the clock of that machine.
    """

    owner: int
    modified: float


class Forward(Protocol):
    """A TCP port of this machine that leads to a port behind the connection. Several clients may use it at once."""

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
    """Files and commands of one machine: this one, or an edge node behind SSH.

    All paths are absolute. All methods may be called from several threads at once.

    A connection logs in at first use, and again after a loss. File operations are repeated after a loss for up to
    `connect_timeout` seconds; then they raise `ConnectionFailed`. A command that may have run is never repeated. An error
    of the machine itself, such as a missing permission, is an `OSError` of the matching class.
    """

    @property
    def place(self) -> str:
        """Name of the machine in messages, such as "dev@edge:22"."""
        ...

    def run(self, command: Sequence[str], stdin: bytes = b"", timeout: float | None = None) -> Completed:
        """Run a command and wait until it ends. No shell interprets its words.

        The exit code is 127 if there is no such program, as in a shell. Background processes that the command leaves
        behind are not waited for, and their output is dropped.

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
        """Home directory of the user."""
        ...

    def user_id(self) -> int:
        """Number of the user."""
        ...

    def stat(self, path: str) -> Stat | None:
        """Attributes of a file or directory, or None if there is none. Links are followed. No command is run.

        Raises:
            OSError: the attributes cannot be read.
        """
        ...

    def read(self, path: str, offset: int, limit: int) -> bytes:
        """At most `limit` bytes of a file from `offset` on. Returns b"" at the end of the file, and if there is no file.

        Raises:
            OSError: the file cannot be read.
        """
        ...

    def write(self, path: str, data: bytes, mode: int = 0o600) -> None:
        """Replace a file atomically.

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
        """Rename a file within its directory, atomically. No command is run.

        The operation is repeated after a lost connection, so the file may be renamed although this raises.

        Raises:
            FileNotFoundError: there is no such file, perhaps because an earlier try has renamed it.
            OSError: the file cannot be renamed.
        """

    def remove(self, path: str) -> None:
        """Remove a file, or a directory with everything in it. A missing path is no error.

        Raises:
            OSError: a part of it could not be removed.
        """
        ...

    def forward(self, host: str, port: int) -> Forward:
        """Make a TCP port that the machine can reach reachable from this machine."""
        ...

    def close(self) -> None:
        """Close all that is open. The next use connects again."""
        ...


# -- paths as users write them -------------------------------------------------------------------------------------------


def check_no_variable(path: str, field: str) -> None:
    """Refuse a path with a shell variable in it, because nothing expands it.

    Raises:
        ValueError: names the field.
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
    """The path with a leading "~" replaced by the home directory of the login.

    Raises:
        OSError: the home directory is not known, and the connection cannot tell it.
    """
    return posixpath.join(connection.home(), path[2:]) if path == "~" or path.startswith("~/") else path
