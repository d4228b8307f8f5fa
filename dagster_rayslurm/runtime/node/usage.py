"""CPU time, memory and GPU use of payloads on this node, sampled from /proc and from `nvidia-smi` or `rocm-smi`.

CPU time is the sum over all processes seen. Memory is the private memory of all processes plus the largest shared mapping
once, because all of Ray's processes map the same object store. If payloads share a Ray cluster, a payload's own usage is
that of its driver and of the workers of its Ray jobs, without shared mappings. The rest of the Ray cluster counts as shared.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
from dataclasses import asdict, dataclass, field
from typing import Any, Callable, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from ..process import processes
from ..process.loop import Loop
from ..process.processes import Process, query_program, recent_table, resident_and_shared
from .ray_jobs import Attribution, RayJobs
from .resources import granted_gpus

# Seconds until the first sample, the most seconds between two samples, and the factor by which each pause is longer than the
# last: short payloads are seen, and long ones cost little. What Ray's workers use after the last sample is lost, because they
# end with their Ray job; for a short payload that is a seventh at most.
_FIRST, _LONGEST, _GROWTH = 0.2, 5.0, 1.15
_MAX_POINTS = 240  # Most points in the course of usage; when there are more, every second one is dropped.
# Least seconds between two queries of how busy the GPUs are, and after a query that failed.
_GPU_INTERVAL, _GPU_RETRY = 5.0, 60.0
_GPU_TIMEOUT = 20.0  # Seconds in which a query must answer.
_NVIDIA = ("nvidia-smi", "--query-gpu=index,uuid,utilization.gpu,memory.used", "--format=csv,noheader,nounits")
_AMD = ("rocm-smi", "--showuniqueid", "--showuse", "--showmeminfo", "vram", "--json")


class Gpu(NamedTuple):
    """How busy one GPU is."""

    number: str  # The index that the vendor's program gives the GPU.
    uuid: str
    percent_busy: float
    memory: int  # Bytes of GPU memory in use.


Parse = Callable[[str], List[Gpu]]  # Reads the figures of all GPUs from the output of a vendor's program.


class GpuMonitor:
    """How busy the granted GPUs of this node are; one query of `nvidia-smi` or `rocm-smi` serves all payloads."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._due = 0.0  # When the next query may begin; infinite while one is under way.
        # The time of the last answer (`time.monotonic`), and its figures of the granted GPUs.
        self.figures: Tuple[float, List[Gpu]] = (0.0, [])

    def query_if_due(self) -> None:
        """Begin the next query, if the figures are old; to be called again and again."""
        if self._loop.now() >= self._due:
            self._due = float("inf")
            granted = granted_gpus(os.environ)
            for command, parse in _programs(os.environ) if granted != [] else []:
                with contextlib.suppress(OSError):  # The program is not installed.
                    query_program(self._loop, command, _GPU_TIMEOUT, functools.partial(self._answered, granted, parse))
                    break

    def _answered(self, granted: Optional[Sequence[str]], parse: Parse, text: Optional[str]) -> None:
        now = self._loop.now()
        self._due = now + (_GPU_RETRY if text is None else _GPU_INTERVAL)
        if text is not None:
            self.figures = now, select_granted(granted, parse(text))


def select_granted(granted: Optional[Sequence[str]], gpus: List[Gpu]) -> List[Gpu]:
    """Those of `gpus` that are granted, by index or UUID, which may be abbreviated; `granted` is None if all are.

    A granted slice of a GPU (MIG) selects no GPU, because a slice has no figures of its own.
    """
    if granted is None:
        return gpus
    uuids = tuple(name.lower() for name in granted if name.startswith("GPU-"))
    return [gpu for gpu in gpus if gpu.number in granted or gpu.uuid.lower().startswith(uuids)]


def parse_nvidia(text: str) -> List[Gpu]:
    """The GPUs in the output of `nvidia-smi`, without those whose figures are "[N/A]", such as a GPU that is cut in slices."""
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


def _programs(environ: Mapping[str, str]) -> List[Tuple[Sequence[str], Parse]]:
    """Commands that may tell how busy the GPUs are, in the order to try them, each with the parser of its output."""
    if "ZE_AFFINITY_MASK" in environ:
        return []
    only_amd = "CUDA_VISIBLE_DEVICES" not in environ and not {"ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"}.isdisjoint(environ)
    return [(_AMD, parse_amd)] if only_amd else [(_NVIDIA, parse_nvidia), (_AMD, parse_amd)]


@dataclass
class Usage:
    """What one payload used from its start to its last sample, in seconds, bytes and, for GPU utilization, percent."""

    elapsed: float = 0.0
    cpu_seconds: float = 0.0
    peak_memory: int = 0
    gpu_utilization_mean: Optional[float] = None
    gpu_utilization_max: Optional[float] = None
    gpu_memory_max: Optional[int] = None
    spilled_bytes: int = 0
    # CPU time and peak memory of Ray's processes that belong to no payload; None if the Ray cluster is this payload's own.
    shared_cpu_seconds: Optional[float] = None
    shared_peak_memory: Optional[int] = None
    points: List[List[float]] = field(default_factory=list)  # [seconds since the start, CPUs busy, bytes of memory]


class UsageMeter:
    """Adds up the samples of one payload's processes to its usage. Pure arithmetic: the caller reads /proc.

    `baseline` are the processes that run before the payload starts; the CPU time that they have used by now does not count.
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
        """Add a sample that was taken at a time (`time.monotonic`).

        `memory` is that of the payload's own processes, and `shared_memory` that of the processes of no payload; None if the Ray
        cluster is this payload's own.
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
        """Add the CPU time that the kernel reports for a process that has ended, with the children that it waited for."""
        self._cpu[pid] = max(cpu_seconds, self._cpu.get(pid, 0.0))
        self._add_point(at, 0)

    def add_gpus(self, gpus: List[Gpu]) -> None:
        """Add one sample of how busy the granted GPUs are."""
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
        """Update the totals, and add a point to the course of usage unless the last one is very recent."""
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
    """Measures what a payload uses while it runs: takes samples of its processes and adds them to a `UsageMeter`."""

    loop: Loop
    gpus: GpuMonitor
    ray_temp_dir: Optional[str] = None  # Ray's temporary directory, whose spilled objects are counted.
    excluded: Callable[[], Iterable[int]] = lambda: ()  # Processes that, with all below them, belong to other payloads.
    # Processes that count, with all below them; None counts everything below this process, and the GPUs as well.
    roots: Optional[Callable[[], Iterable[int]]] = None
    jobs: Optional[RayJobs] = None  # Attributes the processes of a shared Ray cluster; None if the cluster is the payload's own.
    sampled: Callable[[], None] = lambda: None  # Called after each sample.

    def __post_init__(self) -> None:
        # The baseline has all processes of this runtime: one that is excluded now may count later, but not for its past.
        self._gpus_read, table = recent_table()
        self.meter = UsageMeter(processes.descendants(os.getpid(), table), self._gpus_read)
        if self.roots is None:
            self.gpus.query_if_due()
        self._pause = _FIRST
        self._timer = self.loop.call_later(self._pause, self._sample_and_repeat)

    def stop(self, pid: Optional[int] = None, rusage: Any = None) -> Dict[str, Any]:
        """Take the last sample and return the usage, as a dictionary with the fields of `Usage`.

        `pid` is the payload's ended process, None if it ran on another node, and `rusage` what getrusage(2) says of it.
        """
        self.cancel()
        self._sample()
        usage = self.meter.usage
        if pid is not None:
            self.meter.add_ended(time.monotonic(), pid, rusage.ru_utime + rusage.ru_stime)
            if self.jobs is None or not usage.peak_memory:
                # In KiB (getrusage(2)), mapped memory included; the only figure of a payload that ended before any sample.
                usage.peak_memory = max(usage.peak_memory, rusage.ru_maxrss * 1024)
        return self.meter.summary()

    def cancel(self) -> None:
        """Stop sampling."""
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
        if self.jobs is None:
            self.meter.add(at, Attribution(candidates, [], set()), memory_of(candidates))
        else:
            sample = self.jobs.attribute(candidates, table)
            self.meter.add(at, sample, memory_of(sample.own, mapped=False), memory_of(sample.shared))
        if self.ray_temp_dir:
            self.meter.usage.spilled_bytes = max(self.meter.usage.spilled_bytes, _spilled_bytes(self.ray_temp_dir))
        read, gpus = self.gpus.figures
        if self.roots is None and read > self._gpus_read:
            self._gpus_read = read
            self.meter.add_gpus(gpus)

    def _candidates(self, table: Dict[int, Process]) -> List[Process]:
        """The processes below the roots, without those that belong to other payloads."""
        excluded = set(self.excluded())
        for root in list(excluded):
            excluded.update(process.pid for process in processes.descendants(root, table))
        roots = [os.getpid()] if self.roots is None else self.roots()
        below = [process for root in roots for process in processes.descendants(root, table)]
        return [process for process in below if process.pid not in excluded]


def merge_usage(usages: Mapping[str, Dict[str, Any]]) -> Dict[str, Any]:
    """The usage of one payload on several nodes, by node name, merged to one, with CPU time and peak memory by node in `nodes`.

    The first node is the head, whose elapsed time and points count. CPU time and spilled bytes are sums; peak memory is that of
    the node that used most, because `--mem` applies to each node; GPU utilization is the mean of the nodes that have GPUs.
    """
    head, *others = usages.values()

    def values(name: str) -> List[Any]:
        return [usage[name] for usage in usages.values() if usage[name] is not None]

    gpu_utilization = values("gpu_utilization_mean")
    return dict(
        head,
        cpu_seconds=sum(values("cpu_seconds")),
        peak_memory=max(values("peak_memory")),
        gpu_utilization_mean=sum(gpu_utilization) / len(gpu_utilization) if gpu_utilization else None,
        gpu_utilization_max=max(values("gpu_utilization_max"), default=None),
        gpu_memory_max=max(values("gpu_memory_max"), default=None),
        spilled_bytes=sum(values("spilled_bytes")),
        shared_cpu_seconds=None if head["shared_cpu_seconds"] is None else sum(values("shared_cpu_seconds")),
        shared_peak_memory=max(values("shared_peak_memory"), default=None),
        points=[_merge_point(point, [usage["points"] for usage in others]) for point in head["points"]],
        nodes={name: {key: usage[key] for key in ("cpu_seconds", "peak_memory")} for name, usage in usages.items()},
    )


def _merge_point(point: List[float], others: List[List[List[float]]]) -> List[float]:
    """A point of the head merged with the latest earlier point of each other node: the CPUs of all, the memory of the fullest."""
    at, busy, memory = point
    for points in others:
        before = [other for other in points if other[0] <= at]
        if before:
            busy, memory = busy + before[-1][1], max(memory, before[-1][2])
    return [at, round(busy, 2), memory]


def memory_of(group: Iterable[Process], mapped: bool = True) -> int:
    """Bytes of private memory of a group of processes and, if `mapped`, the largest shared memory of one of them, once."""
    sizes = [resident_and_shared(process.pid) for process in group]
    largest_shared = max((shared for _, shared in sizes), default=0)
    return sum(resident - shared for resident, shared in sizes) + (largest_shared if mapped else 0)


def _spilled_bytes(ray_temp_dir: str) -> int:
    """Bytes of objects that Ray has moved from memory to disk (Ray 2.60: `session_*/ray_spilled_objects*`)."""
    total = 0
    session = os.path.join(ray_temp_dir, "session_latest")
    with contextlib.suppress(OSError):  # Ray has not made the directory yet, or has removed an object meanwhile.
        for name in os.listdir(session):
            if name.startswith("ray_spilled_objects"):
                with os.scandir(os.path.join(session, name)) as entries:
                    total += sum(entry.stat().st_size for entry in entries)
    return total
