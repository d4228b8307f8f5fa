"""CPU, memory and GPU use of payloads on this node, sampled from /proc.

What is read once on a node, however many payloads are measured there.

Whose process is whose on a node where payloads share a Ray cluster: by Ray's jobs, which its logs name (Ray 2.60).

Every driver is a job of its own, and every worker belongs to one job from its first task to its end. A log of a driver
or a worker has the job and the process in its name; a worker that was started ahead of its job writes it down later.

What the payload and its Ray cluster use on this node, sampled from /proc.

CPU time is the sum of what every process seen has used; memory is the private memory of all processes plus the
largest shared mapping once, because all of Ray's processes map the same object store. Where payloads share a Ray
cluster, each has its driver, and the workers of its jobs without what they map; the rest is counted as shared.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from dataclasses import asdict, dataclass, field
from typing import Any, Callable, Collection, Dict, Iterable, List, Mapping, NamedTuple, Optional, Set, Tuple

from ..process import processes
from ..process.loop import Loop
from ..process.processes import Process, descendants
from .gpus import Gpu, Gpus

Table = Tuple[float, Dict[int, Process]]
"""All processes of this machine, and when they were looked at (`time.monotonic`)."""


class Gauges:
    """The table of processes and the figures of the GPUs.

    Args:
        loop: where everything happens.
    """

    def __init__(self, loop: Loop) -> None:
        self.gpus = Gpus(loop)
        self._table: Table = (float("-inf"), {})

    def processes(self, age: float = 0.0) -> Table:
        """All processes of this machine.

        Args:
            age: seconds that the last look may be old.
        """
        now = time.monotonic()
        if now - self._table[0] >= age:
            self._table = (now, processes.table())
        return self._table


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


_PAGE = os.sysconf("SC_PAGE_SIZE")
_FIRST, _LONGEST, _GROWTH = 0.2, 5.0, 1.15
"""Seconds until the first sample and between the late ones: short payloads are seen, long ones cost nothing. What Ray's
workers use after the last sample is lost, as they end with their job: a seventh of a short payload at most."""
_MAX_POINTS = 240


@dataclass
class Usage:
    """Usage over a payload's window. `points` are (seconds since start, CPUs busy, bytes of memory)."""

    elapsed: float = 0.0
    cpu_seconds: float = 0.0
    peak_memory: int = 0
    gpu_utilization_mean: Optional[float] = None
    gpu_utilization_max: Optional[float] = None
    gpu_memory_max: Optional[int] = None
    spilled_bytes: int = 0
    shared_cpu_seconds: Optional[float] = None
    """Of Ray's processes that belong to no payload; None where the cluster is this payload's own."""
    shared_peak_memory: Optional[int] = None
    points: List[List[float]] = field(default_factory=list)


class Meter:
    """Adds up usage of changing sets of processes over one window. Pure arithmetic: the caller reads /proc."""

    def __init__(self, baseline: Dict[int, Process], started: float) -> None:
        self._baseline = {pid: process.cpu_seconds for pid, process in baseline.items()}
        self._cpu: Dict[int, float] = {}
        self._shared: Set[int] = set()
        """Those of `_cpu` that belong to no payload."""
        self._started = started
        self._last = (started, 0.0)
        self._gpu: List[float] = []
        self.usage = Usage()

    def add(self, at: float, seen: Iterable[Process], memory: int) -> None:
        for process in seen:
            self._count(process)
            self._shared.discard(process.pid)
        self._point(at, memory)

    def add_shared(self, parts: Parts, memory: int) -> None:
        """Add what belongs to no payload. A worker that another payload has taken since then is no longer part of it."""
        for process in parts.shared:
            self._count(process)
            self._shared.add(process.pid)
        for pid in parts.foreign:
            self._cpu.pop(pid, None)
        self._shared.intersection_update(self._cpu)
        self.usage.shared_cpu_seconds = sum(self._cpu[pid] for pid in self._shared)
        self.usage.shared_peak_memory = max(memory, self.usage.shared_peak_memory or 0)

    def _count(self, process: Process) -> None:
        used = process.cpu_seconds - self._baseline.get(process.pid, 0.0)
        self._cpu[process.pid] = max(used, self._cpu.get(process.pid, 0.0))

    def settle(self, at: float, pid: int, cpu_seconds: float) -> None:
        """Take the kernel's own figure for a process that ended, with the children it waited for."""
        self._cpu[pid] = max(cpu_seconds, self._cpu.get(pid, 0.0))
        self._point(at, 0)

    def add_gpus(self, gpus: List[Gpu]) -> None:
        """Add one look at the granted GPUs."""
        if not gpus:
            return
        self._gpu.append(sum(gpu.percent_busy for gpu in gpus) / len(gpus))
        used = sum(gpu.memory for gpu in gpus)
        self.usage.gpu_memory_max = max(used, self.usage.gpu_memory_max or 0)
        self.usage.gpu_utilization_max = max(max(gpu.percent_busy for gpu in gpus), self.usage.gpu_utilization_max or 0.0)
        self.usage.gpu_utilization_mean = sum(self._gpu) / len(self._gpu)

    def summary(self) -> Dict[str, Any]:
        return asdict(self.usage)

    def _point(self, at: float, memory: int) -> None:
        usage = self.usage
        usage.cpu_seconds = sum(used for pid, used in self._cpu.items() if pid not in self._shared)
        usage.peak_memory = max(usage.peak_memory, memory)
        usage.elapsed = at - self._started
        since, before = self._last
        if at - since >= _FIRST / 2:
            busy = (usage.cpu_seconds - before) / (at - since)
            usage.points.append([round(usage.elapsed, 2), round(busy, 2), float(memory)])
            self._last = (at, usage.cpu_seconds)
        if len(usage.points) > _MAX_POINTS:
            del usage.points[1::2]


class Sampler:
    """Feeds a `Meter` while a payload runs.

    Args:
        loop: where the timers run.
        gauges: what is read once on this node.
        spill_dir: Ray's temporary directory, whose spilled objects are counted; None without Ray.
        others: the processes that, with all below them, are other payloads' own.
        roots: the processes that count with all below them; None for this one, whose GPUs are measured too.
        jobs: tells payloads apart in a Ray cluster that they share; None for a cluster of the payload's own.
        sampled: called after each sample.
    """

    def __init__(
        self,
        loop: Loop,
        gauges: Gauges,
        spill_dir: Optional[str] = None,
        others: Callable[[], Iterable[int]] = lambda: (),
        roots: Optional[Callable[[], Iterable[int]]] = None,
        jobs: Optional[RayJobs] = None,
        sampled: Callable[[], None] = lambda: None,
    ) -> None:
        self._loop = loop
        self._sampled = sampled
        self._gauges = gauges
        self.jobs = jobs
        self._spill_dir = spill_dir
        self._others = others
        self._roots: Callable[[], Iterable[int]] = roots or (lambda: [os.getpid()])
        # Those that do not count yet may do so later, but not for what they did before.
        started, everything = gauges.processes()
        self.meter = Meter({process.pid: process for process in processes.descendants(os.getpid(), everything)}, started)
        self._pause = _FIRST
        self._timer = loop.call_later(self._pause, self._sample)
        if roots is None:
            gauges.gpus.listen(self.meter.add_gpus)

    def stop(self, pid: Optional[int] = None, rusage: Any = None) -> Dict[str, Any]:
        """Take the last sample, and the ended payload's own figures on the node where it ran."""
        self.cancel()
        self._look(0.0)
        if pid is not None:
            self.meter.settle(time.monotonic(), pid, rusage.ru_utime + rusage.ru_stime)
            if self.jobs is None or not self.meter.usage.peak_memory:
                # In KiB (getrusage(2)), with what it maps; the only witness of a payload that ended before a sample.
                self.meter.usage.peak_memory = max(self.meter.usage.peak_memory, rusage.ru_maxrss * 1024)
        self._count_spilled()
        return self.meter.summary()

    def cancel(self) -> None:
        self._timer.cancel()
        self._gauges.gpus.leave(self.meter.add_gpus)

    def _sample(self) -> None:
        with contextlib.suppress(OSError):  # Out of file descriptors, say: what lacks is one sample.
            self._look(self._pause / 2)  # Other payloads' samples will do.
            self._count_spilled()
            self._sampled()
        self._pause = min(self._pause * _GROWTH, _LONGEST)
        self._timer = self._loop.call_later(self._pause, self._sample)

    def _look(self, age: float) -> None:
        """Add what there is now, or was at most so many seconds ago."""
        at, everything = self._gauges.processes(age)
        seen = self._seen(everything)
        if self.jobs is None:
            return self.meter.add(at, seen, memory_of(seen))
        parts = self.jobs.tell_apart(seen, everything)
        self.meter.add_shared(parts, memory_of(parts.shared))
        self.meter.add(at, parts.own, memory_of(parts.own, mapped=False))

    def _seen(self, everything: Dict[int, Process]) -> List[Process]:
        """The processes that count."""
        skipped = set(self._others())
        for root in list(skipped):
            skipped.update(process.pid for process in processes.descendants(root, everything))
        seen = [process for root in self._roots() for process in processes.descendants(root, everything)]
        return [process for process in seen if process.pid not in skipped]

    def _count_spilled(self) -> None:
        if self._spill_dir:
            spilled = _spilled_bytes(self._spill_dir)
            self.meter.usage.spilled_bytes = max(self.meter.usage.spilled_bytes, spilled)


def merge(usages: Mapping[str, Dict[str, Any]]) -> Dict[str, Any]:
    """The usage of several nodes as one.

    CPU time and spilled bytes are sums; peak memory is that of the node that used most, which is what `--mem` has to
    allow for; GPU utilization is the mean of the nodes that have GPUs.

    Args:
        usages: usage by node name, the first of them the head's, whose window counts.

    Returns:
        A usage with `nodes` besides: CPU time and peak memory of each.
    """
    head, *others = usages.values()
    busy = [usage["gpu_utilization_mean"] for usage in usages.values() if usage["gpu_utilization_mean"] is not None]
    return dict(
        head,
        cpu_seconds=sum(usage["cpu_seconds"] for usage in usages.values()),
        peak_memory=max(usage["peak_memory"] for usage in usages.values()),
        gpu_utilization_mean=sum(busy) / len(busy) if busy else None,
        gpu_utilization_max=_highest(usage["gpu_utilization_max"] for usage in usages.values()),
        gpu_memory_max=_highest(usage["gpu_memory_max"] for usage in usages.values()),
        spilled_bytes=sum(usage["spilled_bytes"] for usage in usages.values()),
        shared_cpu_seconds=None
        if head["shared_cpu_seconds"] is None
        else sum(u["shared_cpu_seconds"] or 0 for u in usages.values()),
        shared_peak_memory=_highest(usage["shared_peak_memory"] for usage in usages.values()),
        points=[_all_at(point, [usage["points"] for usage in others]) for point in head["points"]],
        nodes={
            name: {"cpu_seconds": usage["cpu_seconds"], "peak_memory": usage["peak_memory"]} for name, usage in usages.items()
        },
    )


def _highest(values: Iterable[Optional[float]]) -> Optional[float]:
    return max((value for value in values if value is not None), default=None)


def _all_at(point: List[float], others: List[List[List[float]]]) -> List[float]:
    """A point of the head with the latest of each other node: the sum of the CPUs and the memory of the largest node."""
    at, busy, memory = point
    for points in others:
        before = [other for other in points if other[0] <= at]
        if before:
            busy, memory = busy + before[-1][1], max(memory, before[-1][2])
    return [at, round(busy, 2), memory]


def memory_of(seen: Iterable[Process], mapped: bool = True) -> int:
    """Bytes of memory of a set of processes: private pages of each, and, if `mapped`, the largest shared part once."""
    private, shared = 0, 0
    for process in seen:
        try:
            with open("/proc/%d/statm" % process.pid) as file:
                fields = file.read().split()
        except OSError:
            continue
        private += (int(fields[1]) - int(fields[2])) * _PAGE
        shared = max(shared, int(fields[2]) * _PAGE)
    return private + shared if mapped else private


def _spilled_bytes(ray_temp_dir: str) -> int:
    """Bytes in Ray's spill directories (Ray 2.60: `session_*/ray_spilled_objects*`)."""
    total = 0
    session = os.path.join(ray_temp_dir, "session_latest")
    try:
        names = [name for name in os.listdir(session) if name.startswith("ray_spilled_objects")]
        for name in names:
            with os.scandir(os.path.join(session, name)) as entries:
                total += sum(entry.stat().st_size for entry in entries)
    except OSError:
        return total  # Not made yet, or an object went away while we looked.
    return total
