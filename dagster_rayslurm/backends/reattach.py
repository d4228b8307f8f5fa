"""Whether a payload that another Dagster process left behind is what is asked for now, and worth to go on with."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from ..runtime.protocol.end import EndReason
from ..runtime.protocol.record import JOURNAL, PAYLOAD, RUNTIME, LineReader, Record
from ..slurm.submit import JOB_SCRIPT
from ..ssh.base import Connection

REQUIREMENTS_FILE = "wish.json"
"""File of a run directory in a session: what the payload asked for, before the session made anything of it."""

_MOST_BYTES = 4 * 1024 * 1024
_WHO_ASKS = (b"# rayslurm: ", b"#SBATCH --comment=")
_BY_CHANCE: dict[str, Any] = {"control_key": None, "control_ports": []}
"""Members of a runtime's start record that are made up for each."""
_OF_THE_SESSION = ("run_id", "ray", "want_cpus", "want_gpus", "time_limit")
"""Members of a payload's start record that name the caller, or that a session chose for the payload."""


def job_with(
    connection: Connection,
    run_dir: str,
    nonce: str,
    asked: Mapping[str, bytes],
    job_of: Callable[[Record | None], str | None],
    log: Any,
) -> str | None:
    """The job of a payload that is under way, or has succeeded unheard, and was started with the same request; None if it is not.

    Args:
        connection: reaches the files.
        run_dir: its run directory.
        nonce: its name.
        asked: the files that say what is asked for now.
        job_of: finds the job that has it, by the record's `start` if it has one; None if there is no such job any more.
        log: told of a job that is under way for another request.

    Raises:
        OSError: that cannot be found out.
    """
    if connection.stat(os.path.join(run_dir, JOURNAL)) is None:
        return None
    there = {name: connection.read(os.path.join(run_dir, name), 0, _MOST_BYTES) for name in asked}
    start, end = _start_and_end(connection, run_dir, nonce)
    if end is not None:
        succeeded = end["reason"] == EndReason.EXIT and end["exit_code"] == 0
        if start is None or not succeeded or not same_request(there, asked):
            return None
        return str(start["allocation"]["job_id"])
    job_id = job_of(start)
    if job_id is not None and not same_request(there, asked):
        log.warning(
            f"[rayslurm] Slurm job {job_id} goes on with what the attempt before asked for, which is not what is asked for now; "
            f"see {run_dir} on {connection.place}, where `scancel {job_id}` ends the job"
        )
        return None
    return job_id


def same_request(one: Mapping[str, bytes], other: Mapping[str, bytes]) -> bool:
    """Whether two sets of files ask for the same, but for who asks and for keys. Pure."""
    return _request(one) == _request(other)


def _request(files: Mapping[str, bytes]) -> list[Any] | None:
    request: list[Any] = []
    try:
        payload = json.loads(files[PAYLOAD])
        request.append({key: value for key, value in payload.items() if key not in _OF_THE_SESSION})
        if RUNTIME in files:
            request.append({**json.loads(files[RUNTIME]), **_BY_CHANCE})
    except ValueError:
        return None
    if REQUIREMENTS_FILE in files:
        request.append(files[REQUIREMENTS_FILE])
    request += [line for line in files.get(JOB_SCRIPT, b"").splitlines() if not line.startswith(_WHO_ASKS)]
    return request


def _start_and_end(connection: Connection, run_dir: str, nonce: str) -> tuple[Record | None, Record | None]:
    """The last `start` of a payload's record, and its `end`."""
    reader = LineReader()
    start, end = None, None
    while data := connection.read(os.path.join(run_dir, JOURNAL), reader.next_read, _MOST_BYTES):
        for record in reader.feed(data):
            if record.get("type") == "start":
                start = record
            elif record.get("type") == "end" and record.get("nonce") == nonce:
                end = record
    return start, end
