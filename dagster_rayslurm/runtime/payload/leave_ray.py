"""Leaving a Ray cluster at the end of a driver without the half second that Ray sleeps there, where that has no use.

Part of the template; see `template`. Ray's own exit handler sleeps so that what its workers printed last reaches the
driver (Ray 2.60: `ray.shutdown` in `_private/worker.py`). Where nothing can be on its way there is nothing to wait for.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

_UNDERWAY = 1.0
"""Seconds in which a printed line has certainly reached the driver: new files are found every half a second, and read
ten times a second (Ray 2.60: `_private/log_monitor.py`)."""

_TAIL = 65536
_MARKS = (b":job_id:", b":actor_name:", b":task_name:")
"""What Ray itself writes into a worker's log (Ray 2.60: `LOG_PREFIX_*`)."""


def leave() -> None:
    """An exit handler: it runs after the user's own, which may still use Ray, and before Ray's."""
    ray = sys.modules.get("ray")
    try:
        if ray is not None and ray.is_initialized() and not _may_be_underway(ray):
            ray.shutdown()
    except Exception:
        return  # Another Ray, another inside: its own handler knows how to leave.


def _may_be_underway(ray: Any) -> bool:
    """Whether a worker may have printed something that is not here yet; of other nodes nobody can tell."""
    if sum(node["Alive"] for node in ray.nodes()) != 1:
        return True
    return printed_since(ray._private.worker._global_node.get_logs_dir_path(), time.time() - _UNDERWAY)


def printed_since(logs: str, since: float) -> bool:
    """Whether a worker, or a daemon that fails, has lately printed a line of its own into a directory of logs."""
    with os.scandir(logs) as entries:
        for entry in entries:
            stem, extension = os.path.splitext(entry.name)
            told = extension in (".out", ".err") if stem.startswith("worker-") else extension == ".err"
            if told and entry.stat().st_mtime >= since and _has_lines(entry.path):
                return True
    return False


def _has_lines(path: str) -> bool:
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL))
        return size > _TAIL or any(line and not line.startswith(_MARKS) for line in file.read().split(b"\n"))
