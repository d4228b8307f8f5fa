"""This machine as the place where the runtime works: no SSH, the same protocol."""

from __future__ import annotations

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
        os.makedirs(path, mode=0o700, exist_ok=True)

    def download(self, path: str, local_path: str) -> None:
        os.makedirs(os.path.dirname(local_path), exist_ok=True)
        shutil.copyfile(path, local_path)

    def remove(self, path: str) -> None:
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=True)
        elif os.path.lexists(path):
            os.unlink(path)
