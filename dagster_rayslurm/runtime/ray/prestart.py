"""Idle Ray workers for the next payload: a driver that finds none waits until Ray has started some.

A worker of Ray belongs to one job and ends with it; one without a job yet takes the first that needs it. A Ray without the
RPC that starts such workers, or without `grpcio`, starts its workers when it needs them. Read in and tried on Ray 2.60.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from typing import Any, Dict, Set

from ..process import processes
from . import internals

MOST = 4
"""Idle workers at most; each takes some 60 MB of memory."""

_START_TIMEOUT = 60.0
"""Seconds in which a worker has certainly begun to write its log."""
_POLL = 0.1

_LOG = re.compile(r"worker-[0-9a-f]+-f+-([0-9]+)\.out")
"""Log of a worker that had no job when it was started, with its process id."""
_HAS_JOB = b":job_id:"
"""The first bytes that a worker writes into its log when it gets a job."""


def logs_of(ray_temp_dir: str) -> str:
    """Ray's directory of logs."""
    return os.path.join(ray_temp_dir, "session_latest", "logs")


def idle_workers(logs: str) -> Set[int]:
    """The processes of this node's workers that have no job yet, by Ray's directory of logs."""
    return {pid for name, pid in _worker_logs(logs).items() if _is_worker(pid) and not _has_job(os.path.join(logs, name))}


def serve(fd: int, gcs: str, logs: str, cpus: int) -> None:
    """Start missing idle workers after each byte from `fd`, in a thread.

    Args:
        gcs: "HOST:PORT" of the GCS.
        logs: Ray's directory of logs.
        cpus: number of workers that Ray runs here at once; no more than that wait.
    """
    os.set_inheritable(fd, False)
    if cpus < 1 or not internals.can_start_workers():
        return os.close(fd)
    if cpus <= MOST:
        # One waits for each CPU, so Ray's own would only be in the way; on a larger node drivers need those as well.
        os.environ.setdefault(internals.PRESTART_AT_FIRST_DRIVER, "0")
    threading.Thread(target=_serve, args=(fd, gcs, logs, min(cpus, MOST)), daemon=True).start()


def _serve(fd: int, gcs: str, logs: str, workers: int) -> None:
    try:
        raylet: Any = None
        with open(fd, "rb", buffering=0) as requests:
            while requests.read(4096):
                missing = workers - len(idle_workers(logs))
                if missing < 1:
                    continue
                raylet = internals.connect_raylet(gcs) if raylet is None else raylet
                before = len(_worker_logs(logs))
                internals.start_workers(raylet, missing)
                if not _wait_for_logs(logs, before + missing):
                    return  # Workers cannot be counted here, so each further request would add some.
    except Exception as error:  # Ray's errors have no common public base, and other versions other modules.
        print("rayslurm: no workers are kept ready: %s: %s" % (type(error).__name__, error), file=sys.stderr)


def _wait_for_logs(logs: str, number: int) -> bool:
    """Wait until this many workers have written a log, ended ones included; False after a timeout."""
    until = time.monotonic() + _START_TIMEOUT
    while len(_worker_logs(logs)) < number:
        if time.monotonic() > until:
            return False
        time.sleep(_POLL)
    return True


def _worker_logs(logs: str) -> Dict[str, int]:
    """Process ids by name of log."""
    try:
        matches = [_LOG.fullmatch(name) for name in os.listdir(logs)]
    except OSError:
        return {}
    return {match.group(0): int(match.group(1)) for match in matches if match is not None}


def _is_worker(pid: int) -> bool:
    """Whether a process is a worker of Ray; all of them change their command line."""
    return processes.command_line(pid).startswith(b"ray::")


def _has_job(log: str) -> bool:
    try:
        with open(log, "rb") as file:
            return file.read(len(_HAS_JOB)) == _HAS_JOB
    except OSError:
        return False
