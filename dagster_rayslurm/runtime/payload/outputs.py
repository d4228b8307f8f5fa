"""Small results that travel back: files of the payload's directory that match the patterns asked for.

Whoever waits for everything at once must not wait for a file system: what is not small is copied beside the loop.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import stat
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

from ..process.loop import Loop
from ..process.subprocesses import ForkedTask

Entry = Dict[str, Union[str, int]]


class Collected(NamedTuple):
    """The result of copying the outputs of one payload.

    Attributes:
        taken: name and size of each copied file.
        left_out: one sentence for each pattern without a match, and for each file that is too large or no longer there.
        failed: one sentence for each file that should have been copied and could not be.
    """

    taken: List[Entry]
    left_out: List[str]
    failed: List[str]


NOTHING = Collected([], [], [])


_SMALL_BYTES = 4 * 2**20
_SMALL_NUMBER = 32
"""What is copied at once: on a network file system that takes some milliseconds, as a process of its own does."""
_MOST_SENTENCES = 50
"""The `end` has to fit into the space that is set aside for it, whatever the number of files."""


class Collection:
    """Copies the outputs of one payload, and can be cut short.

    Args:
        loop: where everything happens.
        work_dir: where the payload ran.
        target: directory that the files are copied to.
        patterns: shell patterns of the files.
        max_bytes: cap on the sum of sizes.
        done: called once, before this returns if there is little to copy.
    """

    def __init__(
        self,
        loop: Loop,
        work_dir: str,
        target: str,
        patterns: Sequence[str],
        max_bytes: int,
        done: Callable[[Collected], None],
    ) -> None:
        self._done: Optional[Callable[[Collected], None]] = done
        self._aside: Optional[ForkedTask] = None

        def everything() -> Collected:
            try:
                return collect_outputs(work_dir, target, patterns, max_bytes)
            except OSError as error:
                return Collected([], [], ["all of them: %s" % error.strerror])

        if patterns:
            with contextlib.suppress(OSError):  # No other process, or no such directory.
                if _is_much(work_dir, patterns, max_bytes):
                    self._aside = ForkedTask(loop, everything, self._copied)
        if self._aside is None:
            self._finish(everything() if patterns else NOTHING)

    @property
    def pid(self) -> Optional[int]:
        """The process that copies, while one does."""
        return self._aside.pid if self._aside is not None and self._done is not None else None

    def cut(self, why: str) -> None:
        """Have it done at once, without what is not there yet."""
        if self._aside is not None and self._done is not None:
            self._aside.end()
            self._finish(Collected([], ["all of them: %s while they were copied" % why], []))

    def _copied(self, result: Optional[Sequence[List[Any]]]) -> None:
        """Take what the other process copied, as JSON gives it back; None if that process failed."""
        self._finish(
            Collected([], [], ["all of them: the process that copied them failed"]) if result is None else Collected(*result)
        )

    def _finish(self, result: Collected) -> None:
        done, self._done = self._done, None
        if done is not None:
            done(result)


def _is_much(work_dir: str, patterns: Sequence[str], max_bytes: int) -> bool:
    """Whether copying, or just looking, may take long.

    Raises:
        OSError: it cannot be looked.
    """
    if any("**" in pattern for pattern in patterns):
        return True  # There may be a tree of any size to walk.
    found = _find(work_dir, patterns)[0]
    small = [size for size in found.values() if size <= max_bytes]
    return len(found) > _SMALL_NUMBER or min(sum(small), max_bytes) > _SMALL_BYTES


def collect_outputs(work_dir: str, target: str, patterns: Sequence[str], max_bytes: int) -> Collected:
    """Copy matching files into the run directory, smallest first, until the cap.

    Args:
        work_dir: where the payload ran.
        target: directory that the files are copied to, under their path relative to `work_dir`.
        patterns: shell patterns as `glob.glob` takes them; `**` crosses directories.
        max_bytes: cap on the sum of sizes.
    """
    found, left_out = _find(work_dir, patterns)
    taken: List[Entry] = []
    failed: List[str] = []
    total = 0
    for name, size in sorted(found.items(), key=lambda item: (item[1], item[0])):
        if total + size > max_bytes:
            left_out.append("%s (%d bytes) exceeds what is left of the limit of %d bytes" % (name, size, max_bytes))
            continue
        source = os.path.join(work_dir, name)
        try:
            _copy(source, os.path.join(target, name))
        except OSError as error:
            if os.path.lexists(source):
                failed.append("%s: %s" % (name, error.strerror or error))
            else:
                left_out.append("%s was removed before it could be copied" % name)
            continue
        total += size
        taken.append({"name": name, "size": size})
    return Collected(taken, _shortened(left_out), _shortened(failed))


def _copy(source: str, target: str) -> None:
    """Copy one file, and leave nothing behind if that fails.

    Raises:
        OSError: it cannot be read or written.
    """
    os.makedirs(os.path.dirname(target), exist_ok=True)
    try:
        shutil.copyfile(source, target)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(target)
        raise


def _shortened(sentences: List[str]) -> List[str]:
    more = len(sentences) - _MOST_SENTENCES
    return sentences if more <= 0 else [*sentences[:_MOST_SENTENCES], "and %d more" % more]


def _find(work_dir: str, patterns: Sequence[str]) -> Tuple[Dict[str, int], List[str]]:
    """Sizes of the files that match, and a sentence for each pattern that matches none."""
    found: Dict[str, int] = {}
    missing = []
    for pattern in patterns:
        sizes = {}
        for name in _matches(work_dir, pattern):
            with contextlib.suppress(OSError):  # It has been removed since.
                status = os.stat(os.path.join(work_dir, name))
                if stat.S_ISREG(status.st_mode):
                    sizes[name] = status.st_size
        if not sizes:
            missing.append("no file that the payload made matches %r" % pattern)
        found.update(sizes)
    return found, missing


def _matches(work_dir: str, pattern: str) -> List[str]:
    """Paths below `work_dir` that match and are the payload's own: no link to an input, nothing outside."""
    root = os.path.join(glob.escape(work_dir), pattern)
    real = os.path.realpath(work_dir)
    found = glob.glob(root, recursive=True)
    own = [path for path in found if os.path.realpath(path) == os.path.join(real, os.path.relpath(path, work_dir))]
    return [os.path.relpath(path, work_dir) for path in own]
