"""Whether a payload that an earlier Dagster process started is what is requested now, and which job runs that payload."""

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
"""File in the run directory of a session's payload: what the payload required before the session adapted it."""

_MOST_BYTES = 4 * 1024 * 1024
"""Bytes of one read of a file in the run directory."""
_CALLER_LINES = (b"# rayslurm: ", b"#SBATCH --comment=")
"""Beginnings of lines of a job script that name the Dagster run, and so differ between attempts."""
_RANDOM: dict[str, Any] = {"control_key": None, "control_ports": []}
"""Members of `runtime.json` that are random, with the values that replace them in a comparison."""
_CALLER_MEMBERS = ("run_id", "ray", "want_cpus", "want_gpus", "time_limit")
"""Members of `payload.json` that name the Dagster run, or that a session chose; a comparison leaves them out."""


def reattachable_job(
    connection: Connection,
    run_dir: str,
    nonce: str,
    request: Mapping[str, bytes],
    job_of: Callable[[Record | None], str | None],
    log: Any,
) -> str | None:
    """Returns the id of the job whose payload a retry may continue: same request, and not failed; None if there is none.

    Args:
        request: the files of the run directory as they would be written now.
        job_of: finds the id of the payload's job from the record's `start`, or from None; returns None if the job is gone.
        log: the step's Dagster log, for a warning if the job runs for another request.

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
    """Whether the files of two run directories state the same request, apart from Dagster run and random keys. Pure."""
    return _normalized(one) == _normalized(other)


def _normalized(files: Mapping[str, bytes]) -> list[Any] | None:
    """Returns what a comparison of requests compares, without Dagster run and random keys; None if a file is damaged."""
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
    """Returns the last `start` and the `end` of a payload's record; None for each that is missing."""
    reader = LineReader()
    start, end = None, None
    while data := connection.read(os.path.join(run_dir, JOURNAL), reader.next_read, _MOST_BYTES):
        for record in reader.feed(data):
            if record.get("type") == "start":
                start = record
            elif record.get("type") == "end" and record.get("nonce") == nonce:
                end = record
    return start, end
