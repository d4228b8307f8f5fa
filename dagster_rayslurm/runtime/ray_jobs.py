"""Whose process is whose on a node where payloads share a Ray cluster: by Ray's jobs, which its logs name (Ray 2.60).

Every driver is a job of its own, and every worker belongs to one job from its first task to its end. A log of a driver
or a worker has the job and the process in its name; a worker that was started ahead of its job writes it down later.
"""

from __future__ import annotations

import os
import re
from typing import Callable, Collection, Dict, Iterable, List, Mapping, NamedTuple, Optional, Set

from .processes import Process, descendants

_DRIVER = re.compile(r"python-core-driver-([0-9a-f]{8})f+_([0-9]+)\.log")
_WORKER = re.compile(r"worker-[0-9a-f]+-([0-9a-f]{8})-([0-9]+)\.out")
_NO_JOB = "ffffffff"
_LINE = re.compile(rb":job_id:([0-9a-f]{8})")
"""The first line of the log of a worker that was started ahead of its job."""


class Parts(NamedTuple):
    """The processes of a node, told apart."""

    own: List[Process]
    shared: List[Process]
    """What belongs to no payload: Ray's daemons, and workers that wait for a job."""
    foreign: Set[int]
    """Workers of other jobs, with all below them."""


class RayJobs:
    """Tells the processes of one payload from those of others on this node.

    Args:
        logs: Ray's directory of logs.
        ray: the process below which all of Ray is, or None.
        on_job: called when a driver of the payload turns up, with all its jobs.
    """

    def __init__(self, logs: str, ray: Callable[[], Optional[int]], on_job: Callable[[List[str]], None] = lambda _: None) -> None:
        self.jobs: Set[str] = set()
        """The payload's."""
        self._logs = logs
        self._ray = ray
        self._on_job = on_job

    def tell_apart(self, seen: Iterable[Process], everything: Dict[int, Process]) -> Parts:
        """Tell apart the processes that are not known to be others'.

        Args:
            seen: those.
            everything: all processes of this machine.
        """
        root = self._ray()
        ray = set() if root is None else {root, *(process.pid for process in descendants(root, everything))}
        parts = Parts([], [], set())
        workers = self._find_jobs({process.pid for process in seen if process.pid not in ray}, ray)
        for process in seen:
            job = _job_of(process.pid, workers, everything) if process.pid in ray else None
            if process.pid not in ray or job in self.jobs:
                parts.own.append(process)
            elif job is None:
                parts.shared.append(process)
            else:
                parts.foreign.add(process.pid)
        return parts

    def _find_jobs(self, outside: Collection[int], ray: Collection[int]) -> Dict[int, str]:
        """The jobs of Ray's workers, by process; the payload's own are noted."""
        try:
            names = os.listdir(self._logs)
        except OSError:
            return {}  # Not made yet.
        workers: Dict[int, str] = {}
        known = len(self.jobs)
        for name in names:
            driver, worker = _DRIVER.fullmatch(name), _WORKER.fullmatch(name)
            if driver is not None and int(driver.group(2)) in outside:
                self.jobs.add(driver.group(1))
            elif worker is not None and int(worker.group(2)) in ray:
                job = worker.group(1) if worker.group(1) != _NO_JOB else self._written_job(name)
                pid = int(worker.group(2))
                if job is not None:
                    workers[pid] = max(job, workers.get(pid, job), key=_age)  # The system may use a number again.
        if len(self.jobs) > known:
            self._on_job(sorted(self.jobs))
        return workers

    def _written_job(self, name: str) -> Optional[str]:
        try:
            with open(os.path.join(self._logs, name), "rb") as file:
                found = _LINE.match(file.read(32))
        except OSError:
            return None
        return found.group(1).decode() if found is not None else None


def _age(job: str) -> int:
    """Ray counts its jobs, the lowest byte first."""
    return int.from_bytes(bytes.fromhex(job), "little")


def _job_of(pid: int, workers: Mapping[int, str], everything: Mapping[int, Process]) -> Optional[str]:
    """The job of a process, which is a worker or below one; None for any other."""
    while pid in everything:
        if pid in workers:
            return workers[pid]
        pid = everything[pid].parent
    return None
