"""CPU time, memory and GPU use of payloads on this node, sampled from /proc and from `nvidia-smi` or `rocm-smi`.

CPU time is the sum over all processes seen. Memory is the private memory of all processes plus the largest shared mapping once,
because all of Ray's processes map the same object store. If payloads share a Ray cluster, a payload's own usage is the usage of
its driver and of the workers of its Ray jobs, without shared mappings. The usage of processes that belong to no payload, such as
Ray's daemons, is counted separately, as shared usage.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import json
import os
import re
import time
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, Callable, Collection, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from ..process import processes
from ..process.loop import Loop
from ..process.processes import Process, command_line, descendants, query_program, recent_table
from .resources import granted_gpus

# Seconds until the first sample, the most seconds between two samples, and the factor by which each pause is longer than the
# last: short payloads are seen, and long ones cost little. What Ray's workers use after the last sample is lost, because they
# end with their Ray job; for a short payload that is a seventh at most.
_FIRST, _LONGEST, _GROWTH = 0.2, 5.0, 1.15
_SPILLED = os.path.join("session_latest", "ray_spilled_objects*", "*")  # Where Ray 2.60 moves objects from memory to disk.
_MAX_POINTS = 240  # Most points in the course of usage; when there are more, every second one is dropped.

# ---- GPUs

# Least seconds between two queries of how busy the GPUs are, and after a query that failed.
_GPU_INTERVAL, _GPU_RETRY = 5.0, 60.0
_GPU_TIMEOUT = 20.0  # Seconds in which a query must answer.
_NVIDIA = ("nvidia-smi", "--query-gpu=index,uuid,utilization.gpu,memory.used", "--format=csv,noheader,nounits")
_AMD = ("rocm-smi", "--showuniqueid", "--showuse", "--showmeminfo", "vram", "--json")


class Gpu(NamedTuple):
    """One GPU of this node, with its utilization and memory at the time of a query."""

    number: str  # The index that the vendor's program gives the GPU.
    uuid: str
    percent_busy: float
    memory: int  # Bytes of GPU memory in use.


class GpuMonitor:
    """Measures how busy the granted GPUs of this node are, by queries of `nvidia-smi` or `rocm-smi` in the background.

    The attribute `figures` has the time and the GPUs of the last answer. All payloads on this node share one monitor.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._due = 0.0  # When the next query may begin; infinite while one is under way.
        # The time of the last answer (`time.monotonic`), and its figures of the granted GPUs.
        self.figures: Tuple[float, List[Gpu]] = (0.0, [])

    def query_if_due(self) -> None:
        """Start a query of the GPUs, unless a query is under way or the last query ended a short time ago.

        To be called periodically; `figures` gets the answer later. No query is started for Intel GPUs, or if no GPU is granted.
        """
        if self._loop.now() >= self._due:
            self._due = float("inf")
            amd = not {"ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"}.isdisjoint(os.environ)
            only_amd = amd and "CUDA_VISIBLE_DEVICES" not in os.environ
            granted = granted_gpus(os.environ)
            none = granted == [] or "ZE_AFFINITY_MASK" in os.environ
            for command in () if none else (_AMD,) if only_amd else (_NVIDIA, _AMD):
                with contextlib.suppress(OSError):  # The program is not installed.
                    query_program(self._loop, command, _GPU_TIMEOUT, functools.partial(self._answered, granted, command))
                    break

    def _answered(self, granted: Optional[Sequence[str]], command: Sequence[str], text: Optional[str]) -> None:
        now = self._loop.now()
        self._due = now + (_GPU_RETRY if text is None else _GPU_INTERVAL)
        if text is not None:
            self.figures = now, select_granted(granted, (parse_amd if command is _AMD else parse_nvidia)(text))


def select_granted(granted: Optional[Sequence[str]], gpus: List[Gpu]) -> List[Gpu]:
    """Returns the members of `gpus` that `granted` names by index or UUID; all members if `granted` is None.

    `granted` may contain abbreviated UUIDs. A slice of a GPU (MIG) in `granted` selects no GPU, because no figures exist for a
    slice.
    """
    if granted is None:
        return gpus
    uuids = tuple(name.lower() for name in granted if name.startswith("GPU-"))
    return [gpu for gpu in gpus if gpu.number in granted or gpu.uuid.lower().startswith(uuids)]


def parse_nvidia(text: str) -> List[Gpu]:
    """Returns the GPUs in `text`, the CSV output of `nvidia-smi`.

    GPUs without figures ("[N/A]"), such as a GPU that is cut in slices, are left out.
    """
    gpus = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            index, uuid, busy, memory = (field.strip() for field in line.split(","))
            gpus.append(Gpu(index, uuid, float(busy), int(float(memory) * 2**20)))
    return gpus


def parse_amd(text: str) -> List[Gpu]:
    """The GPUs in the output of `rocm-smi --json` (ROCm 5 to 7); warnings before the JSON are skipped."""
    cards: Dict[str, Dict[str, str]] = {}
    with contextlib.suppress(ValueError):
        cards = json.loads(text[text.index("{") :])
    gpus = []
    for card, values in cards.items():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            uuid = "GPU-" + values.get("Unique ID", "").replace("0x", "", 1)  # As in ROCR_VISIBLE_DEVICES.
            busy, memory = float(values["GPU use (%)"]), int(values["VRAM Total Used Memory (B)"])
            gpus.append(Gpu(card[len("card") :], uuid, busy, memory))
    return gpus


# ---- Memory


class Shared(Enum):
    """How often a sum counts memory that several processes share: for each process, once, or not at all."""

    EACH = "in each process"
    ONCE = "the largest share of a process, once: all of Ray's processes map the same object store"
    NEVER = "not at all"


def memory_of(pids: Iterable[int], shared: Shared = Shared.ONCE) -> int:
    """Returns the bytes of resident memory that the processes `pids` use together; processes that have ended count as 0.

    `shared` says how often memory that several processes share is counted. With `Shared.NEVER`, the result is the number of bytes
    that become free when the processes end.
    """
    sizes = [processes.resident_and_shared(pid) for pid in pids]
    mapped = [size for _, size in sizes]
    counted = {Shared.EACH: sum(mapped), Shared.ONCE: max(mapped, default=0), Shared.NEVER: 0}
    return sum(resident for resident, _ in sizes) - sum(mapped) + counted[shared]


# ---- Which processes of a shared Ray cluster belong to which payload, as the names of Ray's log files tell
#
# In Ray 2.60, every driver is a job of its own, and every worker belongs to one job from its first task to its end. The log of a
# driver or a worker has the job id and the process id in its name. Ray also starts workers ahead, without a job; such a worker
# writes the job id into its log once it gets a job.

_DRIVER_LOG = re.compile(r"python-core-driver-([0-9a-f]{8})f+_([0-9]+)\.log")
_WORKER_LOG = re.compile(r"worker-[0-9a-f]+-([0-9a-f]{8})-([0-9]+)\.out")
_NO_JOB = "ffffffff"  # The job id in the log name of a worker that was started ahead of its job.
_JOB_LINE = re.compile(rb":job_id:([0-9a-f]{8})")  # The first line of its log, once it has a job.


def logs_of(ray_temp_dir: str) -> str:
    """Returns the directory in which Ray writes its logs, below `ray_temp_dir`, Ray's temporary directory."""
    return os.path.join(ray_temp_dir, "session_latest", "logs")


def started_ahead(log_dir: str) -> Tuple[int, Set[int]]:
    """Returns how many workers Ray has started on this node before a job needed them, and which of them still wait for a job.

    The number also counts workers that have since ended or got a job. The waiting workers are given as process ids. `log_dir` is
    the directory of Ray's logs on this node.
    """
    ahead = [(pid, path) for pid, job, path in _logs(log_dir, _WORKER_LOG) if job == _NO_JOB]
    return len(ahead), {pid for pid, path in ahead if command_line(pid).startswith(b"ray::") and not _logged_job(path)}


class Attribution(NamedTuple):
    """The processes on a node in three groups: those of one payload, those of no payload, and those of other payloads."""

    own: List[Process]  # The payload's driver and the workers of its jobs, with all processes below them.
    shared: List[Process]  # Ray's daemons, and workers that wait for a job.
    foreign: Set[int]  # Process ids of the workers of other payloads' jobs, with all processes below them.


@dataclass
class RayJobs:
    """Finds the processes on this node that belong to one payload, if several payloads share a Ray cluster.

    Ray's log files, in `log_dir`, tell which process belongs to which Ray job.
    """

    log_dir: str
    ray_pid: Callable[[], Optional[int]]  # The process below which all of Ray's processes run; None while Ray does not run.
    job_ids: Set[str] = field(default_factory=set)  # The payload's Ray jobs that are known so far.

    def attribute(self, candidates: Iterable[Process], table: Mapping[int, Process]) -> Attribution:
        """Divides `candidates` into processes of this payload, of no payload, and of other payloads.

        `candidates` contains no driver of another payload, and no process below such a driver. `table` has all processes of this
        machine by id. If a candidate is a new Ray driver, the method also adds its job to `job_ids`.
        """
        root = self.ray_pid()
        ray = set() if root is None else {root, *(process.pid for process in descendants(root, dict(table)))}
        candidates = list(candidates)
        outside = {process.pid for process in candidates} - ray
        self.job_ids.update(job for pid, job, _ in _logs(self.log_dir, _DRIVER_LOG) if pid in outside)
        jobs = self._jobs_of_workers(ray)
        result = Attribution([], [], set())
        for process in candidates:
            pid = process.pid
            while pid in table and pid not in jobs:
                pid = table[pid].parent
            job = jobs.get(pid) if process.pid in ray else None
            if process.pid in outside or job in self.job_ids:
                result.own.append(process)
            elif job is None:
                result.shared.append(process)
            else:
                result.foreign.add(process.pid)
        return result

    def _jobs_of_workers(self, ray: Collection[int]) -> Dict[int, str]:
        """Returns the Ray job id of each Ray worker on this node that has a job, by the worker's process id.

        `ray` has the ids of the processes of Ray that run now; log files of other processes are ignored.
        """
        jobs: Dict[int, str] = {}
        for pid, named, path in _logs(self.log_dir, _WORKER_LOG):
            job = (named if named != _NO_JOB else _logged_job(path)) if pid in ray else None
            if job is not None:
                jobs[pid] = max(job, jobs.get(pid, job), key=_age)  # The system may reuse a process id.
        return jobs


def _logs(log_dir: str, pattern: "re.Pattern[str]") -> Iterator[Tuple[int, str, str]]:
    """Yields the logs in `log_dir` whose names match `pattern`, each as process id, job id and path.

    In `pattern`, the first group must match the job id, and the second group the process id. Yields nothing if the directory does
    not exist yet.
    """
    with contextlib.suppress(OSError):
        for name in os.listdir(log_dir):
            match = pattern.fullmatch(name)
            if match is not None:
                yield int(match.group(2)), match.group(1), os.path.join(log_dir, name)


def _logged_job(path: str) -> Optional[str]:
    """The job id in the first line of the worker's log `path`.

    The result is None if the worker still waits for a job, or the log is unreadable.
    """
    with contextlib.suppress(OSError), open(path, "rb") as file:
        match = _JOB_LINE.match(file.read(32))
        return match.group(1).decode() if match is not None else None
    return None


def _age(job: str) -> int:
    """The number in a Ray job id; newer jobs have larger numbers. Ray writes the lowest byte of the number first."""
    return int.from_bytes(bytes.fromhex(job), "little")


# ---- The usage of one payload


@dataclass
class Usage:
    """The resources that one payload used until the payload's last sample: seconds, bytes and, for GPU utilization, percent."""

    elapsed: float = 0.0
    cpu_seconds: float = 0.0
    peak_memory: int = 0
    # Figures of the granted GPUs; None if there are no figures, for example because no GPU is granted.
    gpu_utilization_mean: Optional[float] = None
    gpu_utilization_max: Optional[float] = None
    gpu_memory_max: Optional[int] = None
    spilled_bytes: int = 0
    # CPU time and peak memory of Ray's processes that belong to no payload; None if the Ray cluster is this payload's own.
    shared_cpu_seconds: Optional[float] = None
    shared_peak_memory: Optional[int] = None
    points: List[List[float]] = field(default_factory=list)  # [seconds since the start, CPUs busy, bytes of memory]


class UsageMeter:
    """Computes the `Usage` of one payload on this node; the caller takes samples of the payload's processes, and adds them.

    `baseline` are the processes that run before the payload starts; CPU time that they have used until then does not count.
    `started` is the payload's start, a time of `time.monotonic`. The attribute `usage` has the result so far.
    """

    def __init__(self, baseline: Iterable[Process], started: float) -> None:
        self._baseline = {process.pid: process.cpu_seconds for process in baseline}
        self._cpu: Dict[int, float] = {}
        self._shared: Set[int] = set()  # Those of the process ids in `_cpu` that belong to no payload.
        self._started = started
        self._last_point = (started, 0.0)
        self._gpu_utilization: List[float] = []
        self.usage = Usage()

    def add(self, at: float, sample: Attribution, memory: int, shared_memory: Optional[int] = None) -> None:
        """Add one sample of the payload's processes, taken at the time `at` (of `time.monotonic`).

        `memory` is the number of bytes that the payload's own processes use. `shared_memory` is that of processes that belong to
        no payload; None if the Ray cluster is this payload's alone.
        """
        for process in [*sample.shared, *sample.own]:
            used = process.cpu_seconds - self._baseline.get(process.pid, 0.0)
            self._cpu[process.pid] = max(used, self._cpu.get(process.pid, 0.0))
        self._shared.update(process.pid for process in sample.shared)
        self._shared.difference_update(process.pid for process in sample.own)
        for pid in sample.foreign:  # A worker that waited for a job may by now work for another payload.
            self._cpu.pop(pid, None)
        if shared_memory is not None:
            self._shared.intersection_update(self._cpu)
            self.usage.shared_cpu_seconds = sum(self._cpu[pid] for pid in self._shared)
            self.usage.shared_peak_memory = max(shared_memory, self.usage.shared_peak_memory or 0)
        self._add_point(at, memory)

    def add_ended(self, at: float, pid: int, cpu_seconds: float) -> None:
        """Add the exact CPU time of the payload's process `pid`, which has ended at `at` (a time of `time.monotonic`).

        `cpu_seconds` is the kernel's figure, with the CPU time of the children that the process waited for. The elapsed time of
        the payload ends at `at`.
        """
        self._cpu[pid] = max(cpu_seconds, self._cpu.get(pid, 0.0))
        self._add_point(at, 0)

    def add_gpus(self, gpus: List[Gpu]) -> None:
        """Add one sample of the utilization and memory of the granted GPUs; an empty list changes nothing."""
        if not gpus:
            return
        usage = self.usage
        self._gpu_utilization.append(sum(gpu.percent_busy for gpu in gpus) / len(gpus))
        usage.gpu_memory_max = max(sum(gpu.memory for gpu in gpus), usage.gpu_memory_max or 0)
        usage.gpu_utilization_max = max(max(gpu.percent_busy for gpu in gpus), usage.gpu_utilization_max or 0.0)
        usage.gpu_utilization_mean = sum(self._gpu_utilization) / len(self._gpu_utilization)

    def summary(self) -> Dict[str, Any]:
        """The usage so far, as a dictionary with the fields of `Usage`."""
        return asdict(self.usage)

    def _add_point(self, at: float, memory: int) -> None:
        """Update elapsed time, CPU time and peak memory of `usage`, and append a point to its course (`usage.points`).

        `at` is the time of the sample (`time.monotonic`), and `memory` is the number of bytes in use then. No point is appended
        if the last point is very recent. If there are too many points, every second one is dropped.
        """
        usage = self.usage
        usage.cpu_seconds = sum(used for pid, used in self._cpu.items() if pid not in self._shared)
        usage.peak_memory = max(usage.peak_memory, memory)
        usage.elapsed = at - self._started
        last, cpu_before = self._last_point
        if at - last >= _FIRST / 2:
            busy = (usage.cpu_seconds - cpu_before) / (at - last)
            usage.points.append([round(usage.elapsed, 2), round(busy, 2), float(memory)])
            self._last_point = (at, usage.cpu_seconds)
        if len(usage.points) > _MAX_POINTS:
            del usage.points[1::2]


@dataclass(eq=False)
class UsageSampler:
    """Takes samples of a payload's processes at intervals, from the creation of this object until `stop` or `cancel` is called.

    The attribute `meter` (`UsageMeter`) computes the usage from the samples.
    """

    loop: Loop
    gpus: GpuMonitor
    ray_temp_dir: Optional[str] = None  # Ray's temporary directory, whose spilled objects are counted; None to count none.
    # Returns the ids of processes that do not count, because they and all processes below them belong to other payloads.
    excluded: Callable[[], Iterable[int]] = lambda: ()
    # Returns the ids of processes: only the processes below these count, and not these processes themselves. GPUs do not count.
    # If `roots` is None, all processes below this process count, and so do the GPUs of this node.
    roots: Optional[Callable[[], Iterable[int]]] = None
    jobs: Optional[RayJobs] = None  # Attributes the processes of a shared Ray cluster; None if the cluster is the payload's own.
    sampled: Callable[[], None] = lambda: None  # Called after each sample.

    def __post_init__(self) -> None:
        # The baseline has all processes of this runtime: one that is excluded now may count later, but not for its past.
        self._gpus_read, table = recent_table()
        self.meter = UsageMeter(descendants(os.getpid(), table), self._gpus_read)
        if self.roots is None:
            self.gpus.query_if_due()
        self._pause = _FIRST
        self._timer = self.loop.call_later(self._pause, self._sample_and_repeat)

    def stop(self, pid: Optional[int] = None, rusage: Any = None) -> Dict[str, Any]:
        """Stop sampling: take the last sample, and return the usage as a dictionary with the fields of `Usage`.

        `pid` is the id of the payload's process, which has ended, and `rusage` is its `resource.struct_rusage`, which has its
        exact CPU time. Both are None if the process ran on another node.
        """
        self.cancel()
        with contextlib.suppress(OSError):  # Without the last sample, the usage is that of the sample before.
            self._sample()
        usage = self.meter.usage
        if pid is not None:
            self.meter.add_ended(time.monotonic(), pid, rusage.ru_utime + rusage.ru_stime)
            if self.jobs is None or not usage.peak_memory:
                # In KiB (getrusage(2)), mapped memory included; the only figure of a payload that ended before any sample.
                usage.peak_memory = max(usage.peak_memory, rusage.ru_maxrss * 1024)
        return self.meter.summary()

    def cancel(self) -> None:
        """Stop sampling, without a last sample."""
        self._timer.cancel()

    def _sample_and_repeat(self) -> None:
        with contextlib.suppress(OSError):  # Out of file descriptors, perhaps; the next sample may succeed.
            if self.roots is None:
                self.gpus.query_if_due()
            self._sample(self._pause / 2)
            self.sampled()
        self._pause = min(self._pause * _GROWTH, _LONGEST)
        self._timer = self.loop.call_later(self._pause, self._sample_and_repeat)

    def _sample(self, max_age: float = 0.0) -> None:
        at, table = recent_table(max_age)
        candidates = self._candidates(table)
        sample = Attribution(candidates, [], set()) if self.jobs is None else self.jobs.attribute(candidates, table)
        own, shared = ([process.pid for process in group] for group in (sample.own, sample.shared))
        if self.jobs is None:
            self.meter.add(at, sample, memory_of(own))
        else:
            self.meter.add(at, sample, memory_of(own, Shared.NEVER), memory_of(shared))
        if self.ray_temp_dir:
            self.meter.usage.spilled_bytes = max(self.meter.usage.spilled_bytes, _spilled_bytes(self.ray_temp_dir))
        read, gpus = self.gpus.figures
        if self.roots is None and read > self._gpus_read:
            self._gpus_read = read
            self.meter.add_gpus(gpus)

    def _candidates(self, table: Dict[int, Process]) -> List[Process]:
        """Returns the processes in `table` that are below the processes that `self.roots` returns, without these themselves.

        If `self.roots` is None, the result has the processes below this process. The processes that `self.excluded` returns, and
        all processes below them, are left out.
        """
        others = list(self.excluded())
        excluded = {*others, *(process.pid for root in others for process in descendants(root, table))}
        roots = [os.getpid()] if self.roots is None else self.roots()
        return [each for root in roots for each in descendants(root, table) if each.pid not in excluded]


_SUMS = ("cpu_seconds", "spilled_bytes", "shared_cpu_seconds")
_PEAKS = ("peak_memory", "gpu_utilization_max", "gpu_memory_max", "shared_peak_memory")


def merge_usage(usages: Mapping[str, Dict[str, Any]]) -> Dict[str, Any]:
    """Merge the usage of one payload on several nodes into one dictionary.

    `usages` has the usage of each node by name, the head first. Each usage is a dictionary with the fields of `Usage`, and so is
    the result. Elapsed time and the times of the points come from the head. CPU times and spilled bytes are sums. A peak is the
    largest value of any node, and mean GPU utilization is the mean of the nodes with GPUs. The key `nodes` is added: CPU time and
    peak memory of each node, by name.
    """
    head, *others = usages.values()

    def values(name: str) -> List[Any]:
        return [usage[name] for usage in usages.values() if usage[name] is not None]

    sums = {name: sum(values(name)) for name in _SUMS if head[name] is not None}
    peaks = {name: max(values(name), default=None) for name in _PEAKS}
    gpu_utilization = values("gpu_utilization_mean")
    return {
        **head,
        **sums,
        **peaks,
        "gpu_utilization_mean": sum(gpu_utilization) / len(gpu_utilization) if gpu_utilization else None,
        "points": [_merge_point(point, [usage["points"] for usage in others]) for point in head["points"]],
        "nodes": {name: {key: usage[key] for key in ("cpu_seconds", "peak_memory")} for name, usage in usages.items()},
    }


def _merge_point(point: List[float], others: List[List[List[float]]]) -> List[float]:
    """Returns a point of the usage chart for all nodes: `point`, which is the head's, combined with points of the other nodes.

    A point has seconds since the start, busy CPUs and bytes of memory. `others` has the points of each other node, in the order
    of time. Each other node counts with its latest point that is not newer than `point`. The busy CPUs are summed, and the memory
    is that of the node that uses most.
    """
    at = point[0]
    latest = [point, *(other for points in others for other in [each for each in points if each[0] <= at][-1:])]
    return [at, round(sum(each[1] for each in latest), 2), max(each[2] for each in latest)]


def _spilled_bytes(ray_temp_dir: str) -> int:
    """Bytes of objects that Ray has moved from memory to disk; 0 if the files of the objects cannot be read."""
    with contextlib.suppress(OSError):  # Ray has removed an object meanwhile.
        return sum(map(os.path.getsize, glob.iglob(os.path.join(glob.escape(ray_temp_dir), _SPILLED))))
    return 0
