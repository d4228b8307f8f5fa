"""Keeps a list of the nodes that failed a health check, for all runs of this user. The base directory has a file for each node.

Processes on any machine write and read the files without locks. Ages are differences between times of the file system.
"""

import contextlib
import json
import os
import re

from . import base_directory, files
from .sessions import clock_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

DIRECTORY = "unhealthy"  # In the base directory.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")  # Of a node; other files of the directory are temporary.
_MOST_BYTES = 65536


def note(base: str, nodes: "Sequence[dict[str, str]]") -> None:
    """Record failed health checks of nodes in the base directory `base`.

    Each dict in `nodes` has the name of the `node`, the name of the `check`, and as `found` what the check found.
    """
    directory = os.path.join(base, DIRECTORY)
    base_directory.make_private(directory)
    for each in nodes:
        if _NAME.fullmatch(each["node"]):
            files.write(os.path.join(directory, each["node"]), json.dumps(each).encode("utf-8"), 0o600)


def known(base: str, most_age: float) -> "list[dict[str, Any]]":
    """Return a dict for each node that failed a health check at most `most_age` seconds ago, the latest failure first.

    The dict has the name of the `node`, the name of the `check`, what the check found as `found`, and the `age` in seconds. The
    function removes the records of older failures from the base directory `base`.
    """
    directory, found = os.path.join(base, DIRECTORY), []
    names = [name for name in os.listdir(directory) if _NAME.fullmatch(name)] if os.path.isdir(directory) else []
    now = clock_of(directory) if names else 0.0
    for name in names:
        path = os.path.join(directory, name)
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # Another process may remove the file meanwhile.
            age = now - os.stat(path).st_mtime
            if age > most_age:
                os.unlink(path)
                continue
            entry = json.loads(files.read(path, 0, _MOST_BYTES).decode("utf-8"))
            found.append({"node": name, "check": str(entry["check"]), "found": str(entry["found"]), "age": max(0.0, age)})
    return sorted(found, key=lambda each: (each["age"], each["node"]))
