"""All run directories, sessions and Slurm jobs of this user, in one call for the command line."""

import os

from . import sessions, slurm

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

# Files of a run directory that `ps` needs, and the most bytes of each.
_FILES = (("status.json", 4096), ("job_id", 64), ("exit", 4096), ("journal.jsonl", 4096))


def listing(base: str, squeue: "Sequence[str]", timeout: float) -> "dict[str, Any]":
    """The run directories and sessions below `base`, and what squeue prints; without words for squeue it is not called.

    Raises PermissionError if a directory of sessions belongs to another user.
    """
    found = {}  # type: dict[str, Any]
    found.update({"runs": runs(os.path.join(base, "runs")), "sessions": sessions.generations(base, "*", False)})
    found["queue"] = None
    if squeue:
        code, out, error = slurm.run(list(squeue), b"", timeout, [])
        found["queue"] = [code, out.decode("utf-8", "replace"), error.decode("utf-8", "replace")]
    return found


def runs(directory: str) -> "list[dict[str, Any]]":
    """The run directories, the oldest first: name, time of the last change, and the beginnings of some files."""
    found = []
    try:
        names = os.listdir(directory)
    except OSError:
        return []
    for name in names:
        path = os.path.join(directory, name)
        try:
            if os.path.isdir(path):
                texts = {file: _beginning(os.path.join(path, file), size) for file, size in _FILES}
                found.append({"name": name, "modified": os.stat(path).st_mtime, "files": texts})
        except OSError:
            pass  # A sweep removes it meanwhile.
    return sorted(found, key=lambda run: run["modified"])


def _beginning(path: str, size: int) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(size).decode("utf-8", "replace")
    except OSError:
        return ""
