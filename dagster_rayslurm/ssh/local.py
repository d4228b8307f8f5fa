"""This machine as the place where the runtime works: no SSH, the same protocol."""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO

from ..runtime.protocol.record import temporary_name, write_atomically
from .base import Completed, Progress, Stat

_CHUNK = 1024 * 1024
_LONGEST = 1e6


@dataclass(frozen=True)
class LocalForward:
    """A port that needs no forwarding: it is reached from here anyway."""

    host: str
    port: int

    def close(self) -> None: ...

    def __enter__(self) -> LocalForward:
        return self

    def __exit__(self, *exc_info: object) -> None: ...


class LocalConnection:
    """Files and commands of this machine."""

    @property
    def place(self) -> str:
        return "this machine"

    def run(self, command: Sequence[str], stdin: bytes = b"", timeout: float | None = None) -> Completed:
        if not command or any("\0" in word for word in command):
            raise ValueError("a command needs a word at least, and no NUL character")
        # Files, not pipes: nobody waits for what the command leaves running in the background.
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
            given.write(stdin)
            given.seek(0)
            try:
                process = subprocess.Popen(list(command), stdin=given, stdout=stdout, stderr=stderr, start_new_session=True)
            except OSError as error:  # As a shell would say it: 127 for what is not there, 126 for what cannot be run.
                code = 127 if isinstance(error, FileNotFoundError) else 126
                return Completed(code, b"", f"{command[0]}: {error.strerror}".encode())
            try:
                code = process.wait(None if timeout is None else min(timeout, _LONGEST))
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
            found = os.stat(path)
        except FileNotFoundError:
            return None
        return Stat(found.st_uid, int(found.st_mtime))

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
            self.make_dir(os.path.dirname(path))  # os.makedirs gives its mode to the last one only.
            try:
                os.mkdir(path, 0o700)
            except FileExistsError:
                if not os.path.isdir(path):  # Else another run was faster.
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
            shutil.rmtree(path, ignore_errors=True)  # As much as goes, whatever of it another one removes as well.
            if os.path.lexists(path):
                shutil.rmtree(path)  # Says why.

    def forward(self, host: str, port: int) -> LocalForward:
        return LocalForward(host, port)

    def close(self) -> None: ...


def _copy(source_path: str, path: str, progress: Progress | None, mode: int | None) -> None:
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
    """A new file that nobody else can read while it grows."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb")
