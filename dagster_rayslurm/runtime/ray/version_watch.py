"""Whether the environment is still the one that this runtime started with."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
from typing import Optional, Tuple

Mark = Tuple[str, Tuple[Tuple[int, int, int], ...]]

_FILES = ("__init__.py", "_version.py")
"""Files of Ray that another version, or another installation of the same one, has anew."""


def ray_mark(known: Optional[Mark] = None) -> Optional[Mark]:
    """What tells one installed Ray from another, without importing it; None if there is none.

    Args:
        known: what was told before.

    Raises:
        OSError: the file system does not say, as one that is away for a moment; that is no other Ray.
    """
    importlib.invalidate_caches()
    try:
        spec = importlib.util.find_spec("ray")
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None:
        if known is not None:
            _status(known[0])  # Python takes any error for a directory that is not there.
        return None
    directory = os.path.dirname(spec.origin)
    found = []
    for name in _FILES:
        info = _status(os.path.join(directory, name))
        if info is None:
            continue
        found.append((info.st_ino, info.st_size, info.st_mtime_ns))
    return directory, tuple(found)


def _status(path: str) -> Optional[os.stat_result]:
    """The status of a file, None if there is none.

    Raises:
        OSError: that cannot be told.
    """
    try:
        return os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


class RayVersionWatch:
    """Tells whether the environment's Ray is still the one that was there at first."""

    def __init__(self) -> None:
        self._mark: Optional[Mark] = None
        with contextlib.suppress(OSError):
            self._mark = ray_mark()

    def has_changed(self) -> bool:
        """Whether it is another one by now, or gone; never, if there was none."""
        try:
            return self._mark is not None and ray_mark(self._mark) != self._mark
        except OSError:
            return False  # Its file system is away for a moment; a payload that cannot do without it will tell.
