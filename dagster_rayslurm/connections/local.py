"""This machine as the place where the runtime works: no SSH, the same protocol."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from ..runtime.record import temporary_name, write_atomically
from .base import Completed, Progress

_CHUNK = 1024 * 1024


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
        try:
            process = subprocess.Popen(
                list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
            )
        except OSError as error:  # As a shell would say it: 127 for what is not there, 126 for what cannot be run.
            code = 127 if isinstance(error, FileNotFoundError) else 126
            return Completed(code, b"", f"{command[0]}: {error.strerror}".encode())
        try:
            stdout, stderr = process.communicate(stdin, timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{self.place}: {shlex.join(command)[:200]} took over {timeout:g} s and was ended") from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        code = process.returncode
        return Completed(128 - code if code < 0 else code, stdout, stderr)

    def home(self) -> str:
        return os.path.expanduser("~")

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
        if not os.path.isdir(path):
            self.make_dir(os.path.dirname(path))  # os.makedirs gives its mode to the last one only.
            with contextlib.suppress(FileExistsError):  # Another run was faster.
                os.mkdir(path, 0o700)

    def upload(self, local_path: str, path: str, progress: Progress | None = None, mode: int = 0o600) -> None:
        _copy(local_path, path, progress, mode)

    def download(self, path: str, local_path: str, progress: Progress | None = None) -> None:
        self.make_dir(os.path.dirname(local_path))
        _copy(path, local_path, progress, None)

    def remove(self, path: str) -> None:
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=True)
        elif os.path.lexists(path):
            os.unlink(path)

    def forward(self, host: str, port: int) -> LocalForward:
        return LocalForward(host, port)

    def close(self) -> None: ...


def _copy(source_path: str, path: str, progress: Progress | None, mode: int | None) -> None:
    temporary = temporary_name(path)
    try:
        with open(source_path, "rb") as source, open(temporary, "xb") as target:
            size = os.fstat(source.fileno()).st_size
            while data := source.read(_CHUNK):
                target.write(data)
                if progress:
                    progress(target.tell(), max(size, target.tell()))
            if mode is not None:
                os.fchmod(target.fileno(), mode)
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
