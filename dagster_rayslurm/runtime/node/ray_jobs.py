"""What the names of Ray's log files tell: which processes of a Ray cluster belong to which payload, and which workers are idle.

In Ray 2.60, every driver is a job of its own, and every worker belongs to one job from its first task to its end. The log file of
a driver or a worker has the job id and the process id in its name. Ray also starts workers ahead, without a job; such a worker
writes the job id into its log once it gets a job.
"""

from __future__ import annotations

import os
import re
from typing import Callable, Collection, Dict, Iterable, List, Mapping, NamedTuple, Optional, Set

from ..process.processes import Process, command_line, descendants

_DRIVER_LOG = re.compile(r"python-core-driver-([0-9a-f]{8})f+_([0-9]+)\.log")
_WORKER_LOG = re.compile(r"worker-[0-9a-f]+-([0-9a-f]{8})-([0-9]+)\.out")
_NO_JOB = "ffffffff"
"""The job id in the log name of a worker that was started ahead of its job."""
_JOB_LINE = re.compile(rb":job_id:([0-9a-f]{8})")
"""The first line of the log of a worker that was started ahead of its job, once it has one."""


def logs_of(ray_temp_dir: str) -> str:
    """The directory in which Ray writes its logs."""
    return os.path.join(ray_temp_dir, "session_latest", "logs")


class StartedAhead(NamedTuple):
    """The workers of this node that Ray started without a job."""

    ever: int
    """How many there were, ended ones included."""
    idle: Set[int]
    """Process ids of those that still wait for a job."""


def started_ahead(log_dir: str) -> StartedAhead:
    """The workers that Ray started ahead of their jobs. Every worker of Ray changes its command line to say that it is one."""
    names = {name: int(match.group(2)) for name, match in _worker_logs(log_dir).items() if match.group(1) == _NO_JOB}
    idle = {pid for name, pid in names.items() if command_line(pid).startswith(b"ray::") and not _logged_job(log_dir, name)}
    return StartedAhead(len(names), idle)


class Attribution(NamedTuple):
    """The processes of a node, sorted by whether they belong to one payload, to no payload or to other payloads."""

    own: List[Process]
    """The payload's processes: its driver and the workers of its jobs, with all processes below them."""
    shared: List[Process]
    """Processes that belong to no payload: Ray's daemons, and workers that wait for a job."""
    foreign: Set[int]
    """Process ids of the workers of other payloads' jobs, with all processes below them."""


class RayJobs:
    """Finds the processes of one payload among those of a shared Ray cluster on this node.

    `ray_pid` returns the id of the process below which all of Ray's processes run; None while Ray does not run.
    """

    def __init__(self, log_dir: str, ray_pid: Callable[[], Optional[int]]) -> None:
        self.job_ids: Set[str] = set()
        """Ids of the payload's Ray jobs that are known so far."""
        self._log_dir = log_dir
        self._ray_pid = ray_pid

    def attribute(self, candidates: Iterable[Process], table: Mapping[int, Process]) -> Attribution:
        """Sort processes that are not known to belong to other payloads; `table` has all processes of this machine by id.

        The Ray job of a new driver among the processes is added to `job_ids`.
        """
        root = self._ray_pid()
        ray = set() if root is None else {root, *(process.pid for process in descendants(root, dict(table)))}
        candidates = list(candidates)
        jobs = self._jobs_of_workers({process.pid for process in candidates if process.pid not in ray}, ray)
        result = Attribution([], [], set())
        for process in candidates:
            job = _job_of(process.pid, jobs, table) if process.pid in ray else None
            if process.pid not in ray or job in self.job_ids:
                result.own.append(process)
            elif job is None:
                result.shared.append(process)
            else:
                result.foreign.add(process.pid)
        return result

    def _jobs_of_workers(self, outside: Collection[int], ray: Collection[int]) -> Dict[int, str]:
        """The job ids of Ray's workers by process id; adds the jobs of new drivers, which are `outside` Ray, to `job_ids`."""
        for name in _names(self._log_dir):
            driver = _DRIVER_LOG.fullmatch(name)
            if driver is not None and int(driver.group(2)) in outside:
                self.job_ids.add(driver.group(1))
        workers: Dict[int, str] = {}
        for name, match in _worker_logs(self._log_dir).items():
            pid = int(match.group(2))
            if pid in ray:
                job = match.group(1) if match.group(1) != _NO_JOB else _logged_job(self._log_dir, name)
                if job is not None:
                    workers[pid] = max(job, workers.get(pid, job), key=_age)  # The system may reuse a process id.
        return workers


def _names(log_dir: str) -> List[str]:
    try:
        return os.listdir(log_dir)
    except OSError:
        return []  # Ray has not made the directory yet.


def _worker_logs(log_dir: str) -> "Dict[str, re.Match[str]]":
    matches = {name: _WORKER_LOG.fullmatch(name) for name in _names(log_dir)}
    return {name: match for name, match in matches.items() if match is not None}


def _logged_job(log_dir: str, name: str) -> Optional[str]:
    """The job id that a worker has written into its log file; None if the worker still waits for a job."""
    try:
        with open(os.path.join(log_dir, name), "rb") as file:
            match = _JOB_LINE.match(file.read(32))
    except OSError:
        return None
    return match.group(1).decode() if match is not None else None


def _age(job: str) -> int:
    """The number of a job: Ray numbers its jobs in order and writes the lowest byte first, so a newer job has a larger number."""
    return int.from_bytes(bytes.fromhex(job), "little")


def _job_of(pid: int, workers: Mapping[int, str], table: Mapping[int, Process]) -> Optional[str]:
    """The job id of a worker or of a process below a worker; None for any other process."""
    while pid in table:
        if pid in workers:
            return workers[pid]
        pid = table[pid].parent
    return None
