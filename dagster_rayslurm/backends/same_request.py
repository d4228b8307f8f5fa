"""Whether a payload that an earlier Dagster process started is the same request as now, and which job runs it."""

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
"""File of a run directory in a session: what the payload requires, before the session adapted it."""

_MOST_BYTES = 4 * 1024 * 1024
_CALLER_LINES = (b"# rayslurm: ", b"#SBATCH --comment=")
"""Beginnings of lines of a job script that name the caller."""
_RANDOM: dict[str, Any] = {"control_key": None, "control_ports": []}
"""Members of a runtime's start record that are random."""
_CALLER_MEMBERS = ("run_id", "ray", "want_cpus", "want_gpus", "time_limit")
"""Members of a payload's start record that name the caller, or that a session chose."""


def reattachable_job(
    connection: Connection,
    run_dir: str,
    nonce: str,
    request: Mapping[str, bytes],
    job_of: Callable[[Record | None], str | None],
    log: Any,
) -> str | None:
    """The job of a payload that runs, waits or succeeded unnoticed, if it was started by the same request; else None.

    Args:
        request: the files of the run directory as they would be written now.
        job_of: the payload's job, by the record's `start` if it has one; None if the job is gone.
        log: the step's log, for a warning if the job runs for another request.

    Raises:
        OSError: the files cannot be read.
    """
    if connection.stat(os.path.join(run_dir, JOURNAL)) is None:
        return None
    same = same_request({name: connection.read(os.path.join(run_dir, name), 0, _MOST_BYTES) for name in request}, request)
    start, end = _start_and_end(connection, run_dir, nonce)
    if end is not None:
        succeeded = end["reason"] == EndReason.EXIT and end["exit_code"] == 0
        return str(start["allocation"]["job_id"]) if start is not None and succeeded and same else None
    job_id = job_of(start)
    if job_id is not None and not same:
        log.warning(
            f"[rayslurm] Slurm job {job_id} goes on with what the attempt before asked for, which is not what is asked for now; "
            f"see {run_dir} on {connection.place}, where `scancel {job_id}` ends the job"
        )
        return None
    return job_id


def same_request(one: Mapping[str, bytes], other: Mapping[str, bytes]) -> bool:
    """Whether two sets of files are the same request, regardless of caller and random keys. Pure."""
    return _normalized(one) == _normalized(other)


def _normalized(files: Mapping[str, bytes]) -> list[Any] | None:
    request: list[Any] = []
    try:
        payload = json.loads(files[PAYLOAD])
        request.append({key: value for key, value in payload.items() if key not in _CALLER_MEMBERS})
        if RUNTIME in files:
            request.append({**json.loads(files[RUNTIME]), **_RANDOM})
    except ValueError:
        return None
    if REQUIREMENTS_FILE in files:
        request.append(files[REQUIREMENTS_FILE])
    request += [line for line in files.get(JOB_SCRIPT, b"").splitlines() if not line.startswith(_CALLER_LINES)]
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
