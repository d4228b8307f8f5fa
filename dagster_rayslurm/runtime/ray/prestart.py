"""Keep idle Ray worker processes ready on the head, so that the next payload's first tasks need not wait for Ray to start some.

A worker of Ray belongs to one job and ends with the job. An idle worker has no job yet, and takes the first one that needs a
worker. Without the RPC that starts idle workers, or without `grpcio`, Ray starts workers only when a job needs them. Tried on
Ray 2.60.
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
"""Most idle workers; each takes some 60 MB of memory."""

_START_TIMEOUT = 60.0
"""Seconds in which a new worker must have begun to write its log."""
_POLL = 0.1
"""Seconds between two looks for the logs of new workers."""

_LOG = re.compile(r"worker-[0-9a-f]+-f+-([0-9]+)\.out")
"""Log of a worker that had no job when it was started; the group is its process id."""
_HAS_JOB = b":job_id:"
"""The first bytes in the log of a worker that has got a job."""


def logs_of(ray_temp_dir: str) -> str:
    """The directory in which Ray writes its logs."""
    return os.path.join(ray_temp_dir, "session_latest", "logs")


def idle_workers(logs: str) -> Set[int]:
    """Process ids of this node's Ray workers that have no job yet, found by their logs."""
    return {pid for name, pid in _worker_logs(logs).items() if _is_worker(pid) and not _has_job(os.path.join(logs, name))}


def serve(fd: int, gcs: str, logs: str, cpus: int) -> None:
    """Start a thread that brings the number of idle Ray workers up to the wanted one whenever bytes arrive over `fd`.

    Args:
        fd: the reading end of a pipe; this function closes it or keeps it.
        gcs: "HOST:PORT" of Ray's control service.
        logs: the directory in which Ray writes its logs.
        cpus: number of CPUs that Ray schedules on this node; no more workers are kept idle.
    """
    os.set_inheritable(fd, False)
    if cpus < 1 or not internals.can_start_workers():
        return os.close(fd)
    if cpus <= MOST:
        # An idle worker waits for each CPU already, so Ray need not start more for each driver. On a larger node it should.
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
                    return  # New workers have no logs to count them by, so each further request would start too many.
    except Exception as error:  # Ray's errors have no common public base class, and their modules change.
        print("rayslurm: no workers are kept ready: %s: %s" % (type(error).__name__, error), file=sys.stderr)


def _wait_for_logs(logs: str, number: int) -> bool:
    """Wait until there are logs of this many workers, ended ones included. Returns False after a timeout."""
    until = time.monotonic() + _START_TIMEOUT
    while len(_worker_logs(logs)) < number:
        if time.monotonic() > until:
            return False
        time.sleep(_POLL)
    return True


def _worker_logs(logs: str) -> Dict[str, int]:
    """Process ids of the workers that were started without a job, by name of their log."""
    try:
        matches = [_LOG.fullmatch(name) for name in os.listdir(logs)]
    except OSError:
        return {}
    return {match.group(0): int(match.group(1)) for match in matches if match is not None}


def _is_worker(pid: int) -> bool:
    """Whether a process is a worker of Ray; every worker changes its command line to say so."""
    return processes.command_line(pid).startswith(b"ray::")


def _has_job(log: str) -> bool:
    try:
        with open(log, "rb") as file:
            return file.read(len(_HAS_JOB)) == _HAS_JOB
    except OSError:
        return False
