"""The GPUs of this node: which are granted to this job, and how busy those are."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
from typing import Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from ..process.loop import Loop, Timer
from ..process.processes import query_program

GPU_VARIABLES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "GPU_DEVICE_ORDINAL")
"""Variables that say which GPUs a process sees, by vendor; Slurm sets the last one together with the first (gres.conf(5))."""

_LIST_TIMEOUT = 20.0
"""Seconds in which `nvidia-smi` must answer; without its persistence daemon, a node of many GPUs is slow."""
_FIRST_MISSING_DEVICE = 1000
"""No machine has so many GPUs."""
_INTERVAL = 5.0
_TIMEOUT = 20.0
_NVIDIA = ("nvidia-smi", "--query-gpu=index,uuid,utilization.gpu,memory.used", "--format=csv,noheader,nounits")
_AMD = ("rocm-smi", "--showuniqueid", "--showuse", "--showmeminfo", "vram", "--json")
_CARD = "card"


def count_gpus(environ: Mapping[str, str]) -> int:
    """Number of GPUs granted to this process.

    Slurm sets `CUDA_VISIBLE_DEVICES`, `ROCR_VISIBLE_DEVICES` or `ZE_AFFINITY_MASK`, by vendor (gres.conf(5)), and always
    `SLURM_GPUS_ON_NODE` and `SLURM_STEP_GPUS` (srun(1), Slurm 22.05). Without any of these, the GPUs that the driver lists
    may belong to other jobs. They count only if the job has the whole node, as at sites whose Slurm does not manage GPUs.
    """
    if "CUDA_VISIBLE_DEVICES" in environ:
        return len(_devices(environ["CUDA_VISIBLE_DEVICES"]))
    # HIP numbers the devices that ROCr leaves visible.
    amd = [len(_devices(environ[name])) for name in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES") if name in environ]
    if amd:
        return min(amd)
    if "ZE_AFFINITY_MASK" in environ:  # "0.1" is a tile of device 0.
        return len({device.partition(".")[0] for device in _devices(environ["ZE_AFFINITY_MASK"])})
    granted = environ.get("SLURM_GPUS_ON_NODE", "")
    if granted.isdigit():
        return int(granted)
    if "SLURM_STEP_GPUS" in environ:
        return len(_devices(environ["SLURM_STEP_GPUS"]))
    return len(list_gpus()) if _owns_unmanaged_gpus(environ) else 0


def granted_gpus(environ: Mapping[str, str]) -> Optional[List[str]]:
    """Indices or UUIDs of the granted GPUs; None for all that the driver lists."""
    if any(name in environ for name in GPU_VARIABLES[:-1]):
        return visible_gpus(environ, count_gpus(environ))[1]
    if "SLURM_STEP_GPUS" in environ:
        return _devices(environ["SLURM_STEP_GPUS"])
    return None if _owns_unmanaged_gpus(environ) else []


def _owns_unmanaged_gpus(environ: Mapping[str, str]) -> bool:
    """Whether no other job runs here; no variable tells of `--exclusive`, so a Slurm job must have all CPUs of the node."""
    granted = environ.get("SLURM_CPUS_ON_NODE", "")
    return "SLURM_JOB_ID" not in environ or (granted.isdigit() and int(granted) >= (os.cpu_count() or 1))


def visible_gpus(environ: Mapping[str, str], count: int) -> Tuple[str, List[str]]:
    """The variable that restricts a process to some GPUs, and the names of the first `count` that it leaves visible.

    Several tiles of one Intel device count as one GPU.
    """
    variable = next((name for name in GPU_VARIABLES[:-1] if name in environ), None)
    if variable is None:
        return GPU_VARIABLES[0], [str(index) for index in range(count)]
    names = _devices(environ[variable])
    if variable == "ROCR_VISIBLE_DEVICES" and "HIP_VISIBLE_DEVICES" in environ:
        chosen = [int(name) for name in _devices(environ["HIP_VISIBLE_DEVICES"]) if name.isdigit()]
        names = [names[index] for index in chosen if index < len(names)]
    elif variable == "ZE_AFFINITY_MASK":
        tiles: Dict[str, List[str]] = {}
        for name in names:
            tiles.setdefault(name.partition(".")[0], []).append(name)
        names = [",".join(each) for each in tiles.values()]
    return variable, names[:count]


def gpu_environment(variable: str, devices: Sequence[str]) -> Dict[str, Optional[str]]:
    """Variables that show a process these GPUs and no others, named as by `visible_gpus`; None for one that must be unset."""
    changes: Dict[str, Optional[str]] = {variable: ",".join(devices)}
    if variable == "ROCR_VISIBLE_DEVICES":
        changes["HIP_VISIBLE_DEVICES"] = None  # Its numbers refer to the devices that were visible before.
    return changes


def missing_gpus(count: int) -> List[str]:
    """Names of GPUs that no machine has: CUDA ignores such an index, so the process sees no device."""
    return [str(_FIRST_MISSING_DEVICE + index) for index in range(count)]


def _devices(visible: str) -> List[str]:
    names = [name.strip() for name in visible.split(",")]
    return [name for name in names if name and name not in ("NoDevFiles", "-1", "none", "void")]


def list_gpus() -> List[str]:
    """The names of the GPUs that `nvidia-smi` lists; empty if it does not answer."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except OSError:
        return []
    try:
        output, _ = process.communicate(timeout=_LIST_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()  # Not waited for: if the driver hangs, no signal ends a process that has called it.
        if process.stdout is not None:
            process.stdout.close()
        return []
    return output.decode("utf-8", "replace").splitlines() if process.returncode == 0 else []


class Gpu(NamedTuple):
    """How busy one GPU is."""

    number: str
    uuid: str
    percent_busy: float
    memory: int
    """Bytes in use."""


Subscriber = Callable[[List[Gpu]], None]
Parse = Callable[[str], List[Gpu]]


class GpuMonitor:
    """Queries `nvidia-smi` or `rocm-smi` for the granted GPUs of this node, once for all subscribers.

    Intel has no such program.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._subscribers: List[Subscriber] = []
        self._querying = False
        self._timer: Optional[Timer] = None

    def subscribe(self, subscriber: Subscriber) -> None:
        """Call `subscriber` with the figures, soon and then every few seconds."""
        self._subscribers.append(subscriber)
        self._query_after(0.0)

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """End these calls."""
        if subscriber in self._subscribers:
            self._subscribers.remove(subscriber)
        if not self._subscribers and self._timer is not None:
            self._timer.cancel()

    def _query_after(self, delay: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(delay, self._query)

    def _query(self) -> None:
        granted = granted_gpus(os.environ)
        if self._querying or granted == []:
            return

        def answered(parse: Parse, text: Optional[str]) -> None:
            self._querying = False
            if text is None or not self._subscribers:
                return  # A program that fails is tried again when the next payload starts.
            gpus = select_granted(granted, parse(text))
            for subscriber in list(self._subscribers):
                subscriber(gpus)
            self._query_after(_INTERVAL)

        for command, parse in _programs(os.environ):
            with contextlib.suppress(OSError):  # It is not installed.
                query_program(self._loop, command, _TIMEOUT, functools.partial(answered, parse))
                self._querying = True
                return


def select_granted(granted: Optional[Sequence[str]], gpus: List[Gpu]) -> List[Gpu]:
    """The GPUs that are granted; None grants all. A slice of a GPU (MIG) has no figures of its own and selects none.

    UUIDs may be abbreviated (CUDA_VISIBLE_DEVICES in the CUDA C++ Programming Guide).
    """
    if granted is None:
        return gpus
    uuids = tuple(name.lower() for name in granted if name.startswith("GPU-"))
    return [gpu for gpu in gpus if gpu.number in granted or gpu.uuid.lower().startswith(uuids)]


def parse_nvidia(text: str) -> List[Gpu]:
    """Parse the output of `nvidia-smi`; a line with "[N/A]", as for a GPU that is cut in slices, is left out."""
    gpus = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            index, uuid, busy, memory = (field.strip() for field in line.split(","))
            gpus.append(Gpu(index, uuid, float(busy), int(float(memory) * 2**20)))
    return gpus


def parse_amd(text: str) -> List[Gpu]:
    """Parse the output of `rocm-smi --json`, which may begin with warnings (ROCm 5 to 7)."""
    cards: Dict[str, Dict[str, str]] = {}
    with contextlib.suppress(ValueError):
        cards = json.loads(text[text.index("{") :])
    gpus = []
    for card, values in cards.items():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            uuid = "GPU-" + values.get("Unique ID", "").replace("0x", "", 1)  # As in ROCR_VISIBLE_DEVICES.
            busy, memory = float(values["GPU use (%)"]), int(values["VRAM Total Used Memory (B)"])
            gpus.append(Gpu(card[len(_CARD) :], uuid, busy, memory))
    return gpus


def _programs(environ: Mapping[str, str]) -> List[Tuple[Sequence[str], Parse]]:
    """Programs to try, in this order, each with its parser."""
    if "ZE_AFFINITY_MASK" in environ:
        return []
    amd = "CUDA_VISIBLE_DEVICES" not in environ and any(
        name in environ for name in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
    )
    return [(_AMD, parse_amd)] if amd else [(_NVIDIA, parse_nvidia), (_AMD, parse_amd)]
