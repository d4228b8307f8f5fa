"""`LocalConnection`, this machine as a `Connection`, and the private directory that all processes of a user share."""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO

from ..runtime.protocol.record import temporary_name, write_atomically
from .base import Completed, Progress, Stat

_CHUNK = 1024 * 1024
"""Bytes that a copy reads at once."""
_LONGEST_TIMEOUT = 1e6
"""Seconds; a longer timeout of a command is cut to this, because the system accepts no arbitrarily long ones."""
_LONGEST_DIR = 40
"""Characters of XDG_RUNTIME_DIR up to which `private_dir` lies in it; the path of a control socket must stay short."""


@dataclass(frozen=True)
class LocalForward:
    """A port as `LocalConnection.forward` returns it: the given address itself, which this machine reaches without forwarding."""

    host: str
    port: int

    def close(self) -> None: ...

    def __enter__(self) -> LocalForward:
        return self

    def __exit__(self, *exc_info: object) -> None: ...


def private_dir() -> str:
    """The directory for sockets and locks that only this user's processes can access. It is made at the first use.

    The path is short, because the path of a control socket in it may not exceed 107 bytes (unix(7)).

    Raises:
        OSError: the directory cannot be made, or other users can access it.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    short = 0 < len(runtime) <= _LONGEST_DIR and os.path.isdir(runtime)
    path = f"{runtime}/rayslurm" if short else f"/tmp/rayslurm-{os.getuid()}"
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        status = os.lstat(path)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise OSError(f"{path} is not a directory of user {os.getuid()} alone; remove it or mend its owner and mode")
    return path


class LocalConnection:
    """Files and commands of this machine, without SSH."""

    @property
    def place(self) -> str:
        return "this machine"

    def run(self, command: Sequence[str], stdin: bytes = b"", timeout: float | None = None) -> Completed:
        if not command or any("\0" in word for word in command):
            raise ValueError("a command needs a word at least, and no NUL character")
        # Files instead of pipes, because a pipe stays open as long as a background process of the command holds it.
        with tempfile.TemporaryFile() as stdin_file, tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
            stdin_file.write(stdin)
            stdin_file.seek(0)
            try:
                process = subprocess.Popen(list(command), stdin=stdin_file, stdout=stdout, stderr=stderr, start_new_session=True)
            except OSError as error:  # A shell exits with these codes too.
                code = 127 if isinstance(error, FileNotFoundError) else 126
                return Completed(code, b"", f"{command[0]}: {error.strerror}".encode())
            try:
                code = process.wait(None if timeout is None else min(timeout, _LONGEST_TIMEOUT))
            except subprocess.TimeoutExpired:
                raise TimeoutError(f"{self.place}: {shlex.join(command)[:200]} took over {timeout:g} s and was ended") from None
            finally:
                if process.returncode is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            stdout.seek(0)
            stderr.seek(0)
            return Completed(128 - code if code < 0 else code, stdout.read(), stderr.read())

    def home(self) -> str:
        return os.path.expanduser("~")

    def user_id(self) -> int:
        return os.geteuid()

    def stat(self, path: str) -> Stat | None:
        try:
            status = os.stat(path)
        except FileNotFoundError:
            return None
        return Stat(status.st_uid, int(status.st_mtime))

    def read(self, path: str, offset: int, limit: int) -> bytes:
        try:
            with open(path, "rb") as file:
                file.seek(offset)
                return file.read(limit)
        except FileNotFoundError:
            return b""

    def write(self, path: str, data: bytes, mode: int = 0o600) -> None:
        write_atomically(path, data, mode)

    def make_dir(self, path: str) -> None:
        if path and not os.path.isdir(path):
            self.make_dir(os.path.dirname(path))  # os.makedirs applies its mode to the last directory only.
            try:
                os.mkdir(path, 0o700)
            except FileExistsError:
                if not os.path.isdir(path):  # Another process may have made it.
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from None

    def upload(self, local_path: str, path: str, progress: Progress | None = None, mode: int = 0o600) -> None:
        _copy(local_path, path, progress, mode)

    def download(self, path: str, local_path: str, progress: Progress | None = None) -> None:
        self.make_dir(os.path.dirname(local_path))
        _copy(path, local_path, progress, None)

    def rename(self, old: str, new: str) -> None:
        os.rename(old, new)

    def remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            if not os.path.isdir(path) or os.path.islink(path):
                return os.unlink(path)
            shutil.rmtree(path, ignore_errors=True)  # Another process may remove parts of it as well.
            if os.path.lexists(path):
                shutil.rmtree(path)  # Raises the reason.

    def forward(self, host: str, port: int) -> LocalForward:
        return LocalForward(host, port)

    def close(self) -> None: ...


def _copy(source_path: str, path: str, progress: Progress | None, mode: int | None) -> None:
    """Copy a file, and replace the target atomically once the copy is complete. A `mode` of None stands for 0644."""
    temporary = temporary_name(path)
    try:
        with open(source_path, "rb") as source, _created(temporary) as target:
            size = os.fstat(source.fileno()).st_size
            while data := source.read(_CHUNK):
                target.write(data)
                if progress:
                    progress(target.tell(), max(size, target.tell()))
            os.fchmod(target.fileno(), 0o644 if mode is None else mode)
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def _created(path: str) -> BinaryIO:
    """A new file, open for writing, that other users cannot read."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb")
