"""Makes an archive of Ray's logs on one node when a payload fails: `ray-logs-NODE.tar.gz` in the payload's run directory.

A separate process makes the archive, because compression takes longer than the runtime may wait.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import tarfile
from typing import Iterator, List, NamedTuple, Tuple

# Most bytes of one log that are kept, from its end, and most bytes of all logs of a node, before compression.
_MOST_OF_FILE, _MOST = 4 * 2**20, 32 * 2**20
LEFT_OUT = "LEFT_OUT.txt"  # Lists the logs that are missing in the archive, or lack their beginning.


class Log(NamedTuple):
    """A log file: its path below the directory of logs, its size in bytes, and the time of its last change (Unix time)."""

    name: str
    size: int
    modified: float


def archive_name(node: str) -> str:
    """Returns the file name of the archive of a node's logs, such as "ray-logs-c1.tar.gz".

    `node` is the node's name for messages, such as "c1 (component gpu)"; characters other than letters, digits, "_", "." and "-"
    are replaced by "-".
    """
    return "ray-logs-%s.tar.gz" % re.sub(r"[^\w.-]+", "-", node).strip("-")


def select(logs: List[Log], most_of_file: int = _MOST_OF_FILE, most: int = _MOST) -> Tuple[List[Tuple[Log, int]], List[str]]:
    """Returns the logs for the archive, each with the offset of the first byte to keep, and texts about what is missing.

    Each text names a log that is left out or lacks its beginning. The logs changed last come first. Of each log at most the last
    `most_of_file` bytes are kept, and at most `most` bytes of all logs together. A pure function.
    """
    kept, left_out = [], []
    for log in sorted(logs, key=lambda each: (-each.modified, each.name)):
        size = min(log.size, most_of_file, most)
        if size < log.size:
            left_out.append("%s: the first %d bytes" % (log.name, log.size - size) if size else log.name)
        if size or not log.size:
            kept.append((log, log.size - size))
        most -= size
    return kept, left_out


def main(argv: List[str]) -> int:
    """Write the archive of the logs below a directory; returns the exit code 0.

    `argv` has two paths: the directory, and the archive, which is replaced if it exists. What `select` leaves out is listed in a
    file in the archive. A log that cannot be read is left out. Raises OSError if the archive cannot be written.
    """
    directory, target = argv
    kept, left_out = select(list(_logs(directory)))
    os.nice(10)
    fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "wb") as file, tarfile.open(fileobj=file, mode="w:gz", compresslevel=6) as archive:
        for log, offset in kept:
            with contextlib.suppress(OSError), open(os.path.join(directory, log.name), "rb") as source:
                source.seek(offset)
                _add(archive, log.name, source.read(log.size - offset), log.modified)
        if left_out:
            _add(archive, LEFT_OUT, "".join("%s\n" % each for each in left_out).encode("utf-8", "surrogateescape"), 0.0)
    return 0


def _add(archive: tarfile.TarFile, name: str, content: bytes, modified: float) -> None:
    entry = tarfile.TarInfo("ray-logs/" + name)
    entry.size, entry.mtime, entry.mode = len(content), int(modified), 0o600
    archive.addfile(entry, io.BytesIO(content))


def _logs(directory: str) -> Iterator[Log]:
    for path, _, names in os.walk(directory):
        for name in names:
            full = os.path.join(path, name)
            with contextlib.suppress(OSError):  # It was removed meanwhile.
                if os.path.isfile(full) and not os.path.islink(full):
                    status = os.stat(full)
                    yield Log(os.path.relpath(full, directory), status.st_size, status.st_mtime)
