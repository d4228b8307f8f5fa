"""End the session of a Dagster run that has ended; the watcher process of the run imports this module."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...errors import StartError
from ...ssh.base import ConnectionFailed
from ...ssh.config import SSHConnectionResource
from ...ssh.pool import connection_to
from .listing import end_sessions
from .local import end_directory

_PATIENCE = 600.0
"""Seconds for which the cluster may be out of reach; after that the session ends by its idle_timeout."""
_PAUSES = (1.0, 2.0, 5.0, 10.0, 30.0)
"""Seconds between two tries; the last number repeats."""


def end_session(target: Mapping[str, Any], patience: float = _PATIENCE, sleep: Callable[[float], None] = time.sleep) -> None:
    """End a session, with retries while the cluster is out of reach.

    Args:
        target: the session, as `local_target` or `slurm_target` describes it.
        patience: seconds after which no further try begins.
        sleep: waits between two tries.

    Raises:
        OSError: the cluster cannot be reached.
        StartError: the session does not end.
    """
    deadline = time.monotonic() + patience
    pauses = iter(_PAUSES)
    while True:
        try:
            return _end(target)
        except (OSError, StartError) as error:
            permanent = isinstance(error, ConnectionFailed) and not error.temporary
            if permanent or time.monotonic() > deadline:
                raise
        sleep(next(pauses, _PAUSES[-1]))


def _end(target: Mapping[str, Any]) -> None:
    if target["kind"] == "local":
        return end_directory(Path(target["base"]) / "sessions" / target["key"])
    ssh = None if target["ssh"] is None else SSHConnectionResource(**target["ssh"])
    end_sessions(connection_to(ssh), target["base"], target["key"])
