"""Whether the environment is still the one that this runtime started with."""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Optional, Tuple

Mark = Tuple[str, Tuple[Tuple[int, int, int], ...]]

_FILES = ("__init__.py", "_version.py")
"""Files of Ray that another version, or another installation of the same one, has anew."""


def ray_mark() -> Optional[Mark]:
    """What tells one installed Ray from another, without importing it; None if there is none."""
    importlib.invalidate_caches()
    try:
        spec = importlib.util.find_spec("ray")
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:
        return None
    directory = os.path.dirname(spec.origin)
    found = []
    for name in _FILES:
        try:
            info = os.stat(os.path.join(directory, name))
        except OSError:
            continue
        found.append((info.st_ino, info.st_size, info.st_mtime_ns))
    return directory, tuple(found)
