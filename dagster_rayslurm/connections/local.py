"""This machine as the place where the runtime works: no SSH, the same protocol."""

from __future__ import annotations

import contextlib
import os
import shutil

from ..runtime.record import write_atomically


class LocalConnection:
    """Files of this machine."""

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

    def download(self, path: str, local_path: str) -> None:
        self.make_dir(os.path.dirname(local_path))
        shutil.copyfile(path, local_path)

    def remove(self, path: str) -> None:
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=True)
        elif os.path.lexists(path):
            os.unlink(path)
