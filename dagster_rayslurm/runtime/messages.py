"""The Pipes messages of a payload, on their way into the journal."""

from __future__ import annotations

import os
import time
from typing import Callable

from .record import split_lines

_CHUNK = 256 * 1024


class MessageFile:
    """The file that `dagster_pipes` appends messages to by default; complete lines move into the journal."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file = open(path, "xb+", buffering=0)
        self._partial = b""
        self.count = 0

    def remove(self) -> None:
        """Give the file back; a warm session outlives its payloads by far."""
        self._file.close()
        os.unlink(self._path)

    def copy(self, keep: Callable[..., None]) -> bool:
        """Move one chunk of messages on; False if there was none."""
        data = self._file.read(_CHUNK)
        if not data:
            return False
        lines, self._partial = split_lines(self._partial + data)
        now = time.time()
        records = [{"type": "pipes", "at": now, "line": line.decode("utf-8", "replace")} for line in lines if line]
        self.count += len(records)
        if records:
            keep(*records)
        return True

    def copy_rest(self, keep: Callable[..., None]) -> None:
        """Move all on that is there by now: its payload has ended, and whoever still writes is none of it."""
        end = os.fstat(self._file.fileno()).st_size
        while self._file.tell() < end and self.copy(keep):
            continue
