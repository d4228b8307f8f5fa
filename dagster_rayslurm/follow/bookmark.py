"""What of a payload was handed on to Dagster, for whoever goes on with the payload after this process was killed.

Dagster keeps output in a file of this machine, in which nobody can tell later what is the payload's. So the follower notes
after each batch, in a file of this machine, too, how far into the record the batch went: whoever goes on begins there, and
what is repeated is the one batch that was shown and not yet noted. That costs one small write; on the cluster it would be a
command for each batch, and in Dagster's database a transaction. Where a machine is lost with its files, both are lost: then
all output is repeated, and none is missing.

Log messages stand in Dagster's event log, which thereby says itself what it has. Results and custom messages wait in memory
for the end of the step; the record has them all, so they are read from its beginning.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ..ssh.local import LocalConnection

_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_SIZE = 1024
"""Bytes of the file: whatever is noted covers all that was noted before."""


@dataclass(frozen=True)
class ReattachState:
    """What was handed on of a payload before it was followed, if anything was.

    Attributes:
        offset: where in the recorded output to go on.
        logged: level and text of what stands in Dagster's event log since the payload started, oldest first. The messages of
            a payload stand there in the order of its record, among others. So each is looked for behind the one before it;
            the first that is not there ends the search, and is handed on with all that follow.
        note: told how far the output is handed on.
    """

    offset: int = 0
    logged: Iterator[tuple[int, str]] = field(default_factory=lambda: iter(()))
    note: Callable[[int], None] = lambda _: None


class Bookmark:
    """A place in the output of one payload. What cannot be noted is repeated, so no trouble with its file is any.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._where = _where()
        self._fd: int | None = None
        self._failed = False

    def read(self) -> int:
        """The offset that was noted last; 0 if there is none, or none that is good here and now."""
        try:
            noted = json.loads(self._path.read_bytes()[:_SIZE])
            return int(noted["offset"]) if noted["where"] == self._where else 0
        except (OSError, ValueError, TypeError, KeyError):
            return 0

    def note(self, offset: int) -> None:
        """Note how far all output is handed on."""
        try:
            if self._fd is None and not self._failed:
                self._fd = self._opened()
            if self._fd is not None:
                os.pwrite(self._fd, json.dumps({"where": self._where, "offset": offset}).encode().ljust(_SIZE), 0)
        except OSError:
            self._failed = True

    def _opened(self) -> int:
        LocalConnection().make_dir(str(self._path.parent))
        return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def close(self) -> None:
        """Note no more; what was noted stays."""
        if self._fd is not None:
            os.close(self._fd)
        self._fd, self._failed = None, True

    def remove(self) -> None:
        """Leave nothing behind."""
        self.close()
        with contextlib.suppress(OSError):
            self._path.unlink()


def _where() -> list[str]:
    """This machine since it was booted: another one has other files, and a crash may lose what was shown and keep this."""
    boot_id = ""
    with contextlib.suppress(OSError):  # There is none but on Linux.
        boot_id = Path(_BOOT_ID).read_text().strip()
    return [socket.gethostname(), boot_id]
