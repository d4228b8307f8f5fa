"""`Connection`, the interface to the files and commands of one machine (this machine or an edge node), and its exceptions.

`edge` is the package of functions that a connection runs on the machine. This module imports no SSH client.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import posixpath
import random
import re
import shlex
import socket
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ..edge import files, processes
from ..edge.agent import PART

T = TypeVar("T")
# Called during a file transfer with the number of bytes that have arrived and the total number of bytes.
Progress = Callable[[int, int], None]
# Starts a function of `edge` with some arguments, and returns a function that waits for its result.
Submit = Callable[..., Callable[[], Any]]

# A read of a file: its path, an offset, and the most bytes to read.
Read = tuple[str, int, int]

_READ_AHEAD = 16 * 1024 * 1024  # Most bytes of one answer to `Connection.read_ahead`, unless it has very many files.
_LEAST_READ = 65536  # Bytes that each file may have in such an answer at least.
_WINDOW = 12  # Number of parts in flight during a transfer: 3 MiB, somewhat more than the window of an OpenSSH channel.
_VARIABLE = re.compile(r"(^|/)\$(\w+|\{\w+\})(/|$)")


class ConnectionFailed(ConnectionError):
    """Raised when a connection cannot be made or has broken; if `temporary` is True, a retry without changes may succeed.

    `subject` is the part of a login that failed: "network", "host key", "authentication" or "login shell".
    """

    def __init__(self, sentence: str, temporary: bool = True, subject: str = "network") -> None:
        super().__init__(sentence)
        self.temporary, self.subject = temporary, subject


class ServerBusy(ConnectionFailed):
    """Raised when the SSH server closes connections before the login.

    Too many logins are in progress, or the server is restarting.
    """


class ConnectionGone(ConnectionFailed):
    """Raised when the connection had ended before the operation started, so that the server did not carry out the operation."""


class ConnectionLost(ConnectionFailed):
    """Raised when the connection broke during an operation: the server may or may not have carried out the operation."""


@dataclass(frozen=True)
class Completed:
    """Exit code and output of a command that has ended. The exit code is 128 + N if signal N ended the command."""

    returncode: int
    stdout: bytes
    stderr: bytes


class Connection(ABC):
    """Access to the files and commands of one machine: this machine, or an edge node behind SSH.

    All paths are absolute. All methods may be called from several threads at once.

    A connection logs in at its first use, and again after the login was lost. After a loss, a file operation is repeated for up
    to `connect_timeout` seconds (a field of the SSH configuration), and then raises `ConnectionFailed`. A command that may have
    run is never repeated. An error of the machine itself, such as a missing permission, raises an `OSError` of the matching
    class.
    """

    _ahead: dict[Read, bytes | OSError] | None = None  # Parts or errors that `read_ahead` got; None outside of its block.

    @property
    @abstractmethod
    def place(self) -> str:
        """Name of the machine in messages, such as "dev@edge:22"."""

    @abstractmethod
    def attempt(self, doing: str, operation: Callable[[Submit], T], repeat: bool, deadline: float | None = None) -> T:
        """Call `operation`, which runs functions of the package `edge` on the machine, and return the result of `operation`.

        While the machine is out of reach, and after a lost connection, the method tries again for up to `connect_timeout`
        seconds. If the machine may have carried out the operation, and `repeat` is False, the method raises `ConnectionLost`
        instead.

        Args:
            doing: the operation in error messages, such as "reading /a/b"; "" to name only the file that the error itself names.
            operation: a function with one argument. The argument is a function of the type `Submit`, which `operation` calls to
                start functions of `edge`.
            repeat: whether the machine may carry out the operation twice.
            deadline: the value of `time.monotonic()` at which calls end with `TimeoutError`, and after which nothing is repeated;
                None for no deadline. A connection to this machine, without SSH, ignores the deadline.
        """

    @abstractmethod
    def connect(self, host: str, port: int, timeout: float) -> socket.socket:
        """Returns a socket that is connected to `host:port`. The machine makes the connection, and resolves the name `host`.

        `timeout` is the socket's timeout in seconds. If nothing listens at `host:port`, a connection by SSH returns a socket that
        ends at once, and a connection to this machine raises `OSError`.
        """

    @abstractmethod
    def stream(self, command: Sequence[str]) -> socket.socket:
        """Start a command, and return a socket that is connected to the command's standard input and output.

        No shell interprets the words of the command. The socket ends when the command ends, and may also carry the command's
        standard error. If the command cannot be started, a connection by SSH returns a socket that ends at once, and a connection
        to this machine raises `OSError`.
        """

    @abstractmethod
    def interact(self, command: Sequence[str]) -> int:
        """Run a command on the machine, connected to this process's terminal or, without one, to this process's input and output.

        Returns the command's exit code, 128 + N if the signal N has killed the command.
        """

    @abstractmethod
    def close(self) -> None:
        """Log out. The next use of the connection logs in again."""

    def call(self, function: Callable[..., T], *args: Any, repeat: bool = False, timeout: float | None = None) -> T:
        """Call a function of the package `edge` on the machine, and return the function's result.

        Raises TimeoutError if the call took longer than `timeout` seconds; the call's commands were then killed. Raises
        ConnectionLost if the connection broke and the function may have been called. Raises any OSError of the function itself.

        Args:
            function: the function to call.
            args: the arguments of `function`: bytes or JSON values. The result is such a value, or a tuple of such values.
            repeat: whether `function` is called again after a lost connection although it may have been called already.
            timeout: the seconds for the call; None for no limit. A connection to this machine, without SSH, ignores the timeout;
                so `function` must limit its commands and waits itself.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        return self.attempt("", lambda submit: submit(function, *args)(), repeat, deadline)  # type: ignore[no-any-return]

    def run(
        self,
        command: Sequence[str],
        stdin: bytes = b"",
        timeout: float | None = None,
        function: Callable[..., Any] = processes.run,
        options: Sequence[Any] = (),
    ) -> Completed:
        """Run a command, wait until the command ends, and return its exit code and output.

        The exit code is 127 if the program does not exist, as in a shell. `run` does not wait for background processes that the
        command leaves behind, and drops the output of these processes.

        Raises TimeoutError if the command took longer than `timeout` seconds; the command and all processes that it started were
        then killed. Raises ConnectionLost if the connection broke, and the command may have run. Raises ConnectionFailed if no
        connection was possible, so that the command did not run.

        Args:
            command: the words of the command, which no shell interprets.
            stdin: the command's standard input.
            timeout: the seconds for the command; None for no limit.
            function: the function of `edge` that runs the command. Its arguments are the command, the standard input, the seconds
                left, and the items of `options`. Its result is like that of `processes.run`.
            options: the last arguments of `function`.
        """
        if not command or any("\0" in word for word in command):
            raise ValueError("a command needs a word at least, and no NUL character")
        deadline = None if timeout is None else time.monotonic() + timeout

        def operation(submit: Submit) -> Any:
            remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
            return submit(function, list(command), stdin, remaining, *options)()

        try:
            code, out, err = self.attempt("", operation, False, deadline)
        except TimeoutError:
            code = None
        if code is None:
            raise TimeoutError(f"{self.place}: {shlex.join(command)[:200]} took over {timeout:g} s and was ended")
        return Completed(code, out, err)

    def home(self) -> str:
        """Returns the home directory of the user who is logged in; raises `OSError` if the account has none."""
        if not self._home.startswith("/"):
            raise OSError(f"{self.place}: the login has no HOME; the account needs a home directory")
        return self._home

    @property
    def _home(self) -> str:
        return self.call(files.home, repeat=True)

    def modified(self, path: str) -> float | None:
        """Returns the time of the last change of a file or directory, in seconds since the epoch; None if `path` is missing."""
        return self._on_file(f"looking at {path}", files.modified, path)

    def read(self, path: str, offset: int, limit: int) -> bytes:
        """Returns at most `limit` bytes of a file from `offset` on; b"" at the end of the file, or if the file does not exist."""
        answers = self._ahead  # Another thread may set the attribute to None meanwhile.
        answer = answers.pop((path, offset, limit), None) if answers else None
        if isinstance(answer, OSError):
            raise answer.with_traceback(None)
        if answer is not None:
            return answer
        return self._on_file(f"reading {path}", files.read, path, offset, limit)

    @contextlib.contextmanager
    def read_ahead(self, reads: Sequence[Read]) -> Iterator[None]:
        """Read parts of several files by one call; inside the block, `read` returns these parts without a further call.

        Each item of `reads` has the path, offset and limit of a later `read`. Only the first `read` with an item's path, offset
        and limit returns the part; a second such `read` calls the machine again. A part may be shorter than the limit although
        the file goes on. If the one call failed, the first `read` for each part raises the error. Only one thread at a time may
        use this method.
        """
        limit = min(max(_LEAST_READ, _READ_AHEAD // max(1, len(reads))), max((each[2] for each in reads), default=0))
        try:
            paths, offsets = "\0".join(each[0] for each in reads), [each[1] for each in reads]
            sizes, data = self.call(files.read_many, paths, offsets, limit, repeat=True) if reads else ([], b"")
        except OSError as error:
            self._ahead = dict.fromkeys(reads, error)
        else:
            self._ahead, end = {}, 0
            for each, size in zip(reads, sizes, strict=True):
                if size >= 0:  # A file that cannot be read is read alone, which tells why.
                    self._ahead[each] = data[end : end + min(size, each[2])]
                    end += size
        try:
            yield
        finally:
            self._ahead = None

    def write(self, path: str, data: bytes, mode: int = 0o600) -> None:
        """Write `data` into a file; an existing file is replaced atomically. `mode` has the file's permissions."""
        self._on_file(f"writing {path}", files.write, path, data, mode)

    def make_dir(self, path: str) -> None:
        """Create a directory and its missing parents, with access for this user only. An existing directory is no error."""
        self._on_file(f"making the directory {path}", files.make_dir, path)

    def rename(self, old: str, new: str) -> None:
        """Rename a file within its directory, atomically.

        After a lost connection the rename is repeated; the repeated rename raises `FileNotFoundError` if the first attempt was
        carried out.
        """
        self._on_file(f"renaming {old}", files.rename, old, new)

    def remove(self, path: str) -> None:
        """Remove a file, or a directory with everything in it. A missing path is no error."""
        self._on_file(f"removing {path}", files.remove, path)

    def _on_file(self, doing: str, function: Callable[..., T], *args: Any) -> T:
        """Call a function of `edge` and return the result. After a lost connection, the call is repeated.

        `doing` names the operation in error messages, such as "reading /a/b".
        """
        return self.attempt(doing, lambda submit: submit(function, *args)(), True)  # type: ignore[no-any-return]

    def upload(self, local_path: str, path: str, progress: Progress | None = None, mode: int = 0o600) -> None:
        """Copy a file of this machine to `path`; the file at `path` is replaced atomically once the copy is complete.

        After a lost connection the copy continues behind the bytes that have arrived. `progress` is called with the number of
        bytes that have arrived and the number of bytes in the file. `mode` has the permissions of the new file.
        """
        temporary, done = files.temporary_name(path), 0

        def put(submit: Submit) -> None:
            nonlocal done
            with open(local_path, "rb") as source:
                size = os.fstat(source.fileno()).st_size
                if size <= PART:
                    submit(files.write, path, source.read(), mode)()
                    return _report(progress, size, size)
                fd, done = submit(files.open_write, temporary, done)()
                source.seek(done)
                starts = range(done, size, PART)
                try:
                    for count in _pipelined(submit(files.write_at, fd, start, source.read(PART)) for start in starts):
                        done += count
                        _report(progress, done, max(size, done))
                except OSError:
                    with contextlib.suppress(OSError):
                        submit(files.close, fd)()
                    raise
                submit(files.finish, fd, temporary, path, mode)()

        try:
            self.attempt(f"copying {local_path} to {path}", put, True)
        except ConnectionFailed:
            raise
        except OSError:
            with contextlib.suppress(OSError):
                self.remove(temporary)
            raise

    def download(self, path: str, local_path: str, progress: Progress | None = None) -> None:
        """Copy a file to `local_path` on this machine; the directory of `local_path` is created if necessary.

        After a lost connection the copy continues behind the bytes that have arrived. `progress` is called with the number of
        bytes that have arrived and the number of bytes in the file.
        """
        files.make_dir(os.path.dirname(local_path))
        temporary = files.temporary_name(local_path)
        version: list[int] = []

        def get(submit: Submit) -> None:
            nonlocal version
            with open(temporary, "ab") as target:
                fd, version, start, data = submit(files.open_read, path, version, target.tell(), PART)()
                target.truncate(start)  # The file may have been replaced meanwhile.
                starts = range(start + len(data), version[0], PART)
                try:
                    for part in itertools.chain([data], _pipelined(submit(files.read_at, fd, start, PART) for start in starts)):
                        target.write(part)
                        _report(progress, target.tell(), max(version[0], target.tell()))
                finally:
                    with contextlib.suppress(OSError):
                        submit(files.close, fd)

        try:
            self.attempt(f"copying {path} to {local_path}", get, True)
            os.replace(temporary, local_path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)


def _pipelined(calls: Iterable[Callable[[], T]]) -> Iterator[T]:
    """Yields the results of calls in order, while up to `_WINDOW` calls are in progress.

    `calls` is lazy: the iterator starts a call only when this function takes the next item. The item is a function that waits for
    the result of the call and returns the result. If a call raises OSError, this function first waits for all calls in progress.
    """
    waiting = deque[Callable[[], T]]()
    try:
        for call in calls:
            waiting.append(call)
            if len(waiting) == _WINDOW:
                yield waiting.popleft()()
        while waiting:
            yield waiting.popleft()()
    except OSError:
        for call in waiting:  # The caller closes the file that the calls use, and another file may then get the same number.
            with contextlib.suppress(OSError):
                call()
        raise


def _report(progress: Progress | None, done: int, size: int) -> None:
    """Call `progress` with the number of bytes that have arrived and the total, unless `progress` is None or `size` is 0."""
    if progress and size:
        progress(done, size)


# -- paths as users write them -------------------------------------------------------------------------------------------


def check_no_variable(path: str, field: str) -> None:
    """Raise `ValueError` if `path`, the value of the configuration field `field`, contains a shell variable.

    dagster-rayslurm expands only a "~" at the beginning of a path.
    """
    if found := _VARIABLE.search(path):
        raise ValueError(
            f'{field}: {path!r}: variables such as ${found[2]} are not expanded; write the value, or begin with "~/"'
        )


def is_rooted(path: str) -> bool:
    """Whether a path is absolute, is "~", or begins with "~/"."""
    return os.path.isabs(path) or path == "~" or path.startswith("~/")


def expand_home(connection: Connection, path: str) -> str:
    """Returns the path with a leading "~" replaced by the home directory of the connection's user.

    Raises `OSError` if the user has no home directory.
    """
    return posixpath.join(connection.home(), path[2:]) if path == "~" or path.startswith("~/") else path


class Backoff:
    """Computes the pauses between retries while a machine is out of reach.

    Each pause is twice the last pause, up to a limit. The limit is a twentieth of the outage so far, but at least 1.5 s and at
    most 30 s. `since` is the start of the outage, as a value of `time.monotonic()`; None for now.
    """

    def __init__(self, since: float | None = None) -> None:
        self._since = time.monotonic() if since is None else since
        self._next = 0.2

    @property
    def seconds(self) -> float:
        """Duration of the outage so far, in seconds."""
        return time.monotonic() - self._since

    def pause(self) -> float:
        """Returns the seconds to sleep before the next retry.

        The pause has a random part, so that many processes do not retry at the same time.
        """
        pause = min(self._next, max(1.5, 0.05 * self.seconds), 30.0)
        self._next *= 2
        return pause * random.uniform(0.5, 1.0)
