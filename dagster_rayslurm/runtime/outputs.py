"""Small results that travel back: files of the payload's directory that match the patterns asked for."""

from __future__ import annotations

import glob
import os
import shutil
from typing import Dict, List, Sequence, Tuple, Union

Entry = Dict[str, Union[str, int]]


def collect_outputs(work_dir: str, target: str, patterns: Sequence[str], max_bytes: int) -> Tuple[List[Entry], List[str]]:
    """Copy matching files into the run directory, smallest first, until the cap.

    Args:
        work_dir: where the payload ran.
        target: directory that the files are copied to, under their path relative to `work_dir`.
        patterns: shell patterns as `glob.glob` takes them; `**` crosses directories.
        max_bytes: cap on the sum of sizes.

    Returns:
        What was copied, as name and size; and a sentence for each file or pattern that was not.
    """
    found: Dict[str, int] = {}
    left_out = []
    for pattern in patterns:
        names = [name for name in _matches(work_dir, pattern) if os.path.isfile(os.path.join(work_dir, name))]
        if not names:
            left_out.append("no file that the payload made matches %r" % pattern)
        found.update({name: os.path.getsize(os.path.join(work_dir, name)) for name in names})
    taken: List[Entry] = []
    total = 0
    for name, size in sorted(found.items(), key=lambda item: (item[1], item[0])):
        if total + size > max_bytes:
            left_out.append("%s (%d bytes) exceeds what is left of the limit of %d bytes" % (name, size, max_bytes))
            continue
        total += size
        copy = os.path.join(target, name)
        os.makedirs(os.path.dirname(copy), exist_ok=True)
        shutil.copyfile(os.path.join(work_dir, name), copy)
        taken.append({"name": name, "size": size})
    return taken, left_out


def _matches(work_dir: str, pattern: str) -> List[str]:
    """Paths below `work_dir` that match and are the payload's own: no link to an input, nothing outside."""
    root = os.path.join(glob.escape(work_dir), pattern)
    real = os.path.realpath(work_dir)
    found = glob.glob(root, recursive=True)
    own = [path for path in found if os.path.realpath(path) == os.path.join(real, os.path.relpath(path, work_dir))]
    return [os.path.relpath(path, work_dir) for path in own]
