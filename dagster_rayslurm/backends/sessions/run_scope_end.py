"""The end of a session whose run is over, whatever it takes; done by the process that `run_end` starts."""

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
"""Seconds for which it is tried to reach a cluster that cannot be reached; then the session's idle_timeout is left."""
_PAUSES = (1.0, 2.0, 5.0, 10.0, 30.0)


def end_session(session: Mapping[str, Any], patience: float = _PATIENCE, sleep: Callable[[float], None] = time.sleep) -> None:
    """End all that there is of a session, and try again for a while if the cluster cannot be reached.

    Args:
        session: as `run_end.end_with_run` got it.
        patience: seconds after which it is given up.
        sleep: waits.

    Raises:
        OSError: the cluster cannot be reached.
        StartError: the session does not end.
    """
    deadline = time.monotonic() + patience
    pauses = iter(_PAUSES)
    while True:
        try:
            return _end(session)
        except ConnectionFailed as error:
            if not error.temporary or time.monotonic() > deadline:
                raise
        except (OSError, StartError):
            if time.monotonic() > deadline:
                raise
        sleep(next(pauses, _PAUSES[-1]))


def _end(session: Mapping[str, Any]) -> None:
    if session["kind"] == "local":
        return end_directory(Path(session["base"]) / "sessions" / session["key"])
    ssh = None if session["ssh"] is None else SSHConnectionResource(**session["ssh"])
    end_sessions(connection_to(ssh), session["base"], session["key"])
