"""Lists the output files of a payload, so that Dagster can fetch them from the payload's working directory."""

from __future__ import annotations

import contextlib
import glob
import os
import stat
from typing import Dict, Iterator, List, Sequence, Union

_MAX_SENTENCES = 50
"""Most sentences in `left_out`; the `end` record must fit into a fixed amount of reserved disk space."""


class OutputSearch:
    """Finds the regular files in a payload's working directory that match patterns, smallest first, up to a limit in bytes.

    Links to inputs are not outputs, and neither are files outside the working directory.

    Args:
        work_dir: the working directory.
        patterns: shell patterns as `glob.glob` takes them; `**` crosses directories.
        max_bytes: limit on the sum of the file sizes.
    """

    def __init__(self, work_dir: str, patterns: Sequence[str], max_bytes: int) -> None:
        self.files: List[Dict[str, Union[str, int]]] = []
        """Name and size in bytes of each file for Dagster to fetch."""
        self.left_out: List[str] = []
        """One sentence for each pattern without a match and for each file beyond the limit."""
        self._work_dir = work_dir
        self._real_work_dir = os.path.realpath(work_dir)
        self._patterns = patterns
        self._max_bytes = max_bytes

    def run(self) -> Iterator[None]:
        """Fill `files` and `left_out`; yields between files and directories, so that the caller can pause."""
        sizes: Dict[str, int] = {}
        for pattern in self._patterns:
            matched = False
            for path in _expand(self._work_dir, pattern.split("/")):
                yield
                with contextlib.suppress(OSError):  # The file was removed meanwhile.
                    status = os.stat(path)
                    name = os.path.relpath(path, self._work_dir)
                    own = os.path.realpath(path) == os.path.join(self._real_work_dir, name)
                    if own and stat.S_ISREG(status.st_mode):
                        sizes[name] = status.st_size
                        matched = True
            if not matched:
                self.left_out.append("no file that the payload made matches %r" % pattern)
        self._select(sizes)

    def _select(self, sizes: Dict[str, int]) -> None:
        """Divide the files that were found into `files` and `left_out`."""
        total = 0
        for name, size in sorted(sizes.items(), key=lambda item: (item[1], item[0])):
            if total + size > self._max_bytes:
                sentence = "%s (%d bytes) exceeds what is left of the limit of %d bytes" % (name, size, self._max_bytes)
                self.left_out.append(sentence)
            else:
                total += size
                self.files.append({"name": name, "size": size})
        more = len(self.left_out) - _MAX_SENTENCES
        if more > 0:
            self.left_out[_MAX_SENTENCES:] = ["and %d more" % more]


def _expand(directory: str, parts: Sequence[str]) -> Iterator[str]:
    """Paths below a directory that match the parts of a pattern, and every directory that a `**` walks through.

    `glob.iglob` would walk a whole tree before its first match, which may take minutes on a network file system.
    """
    if "**" not in parts:
        yield from glob.iglob(os.path.join(glob.escape(directory), *parts))
        return
    position = list(parts).index("**")
    starts = _expand(directory, parts[:position]) if position else [directory]
    for start in starts:
        for path, names, _ in os.walk(start):  # `os.walk` follows no links, and what links lead to is no output.
            names[:] = [name for name in names if not name.startswith(".")]
            yield path
            yield from _expand(path, parts[position + 1 :] or ["*"])
