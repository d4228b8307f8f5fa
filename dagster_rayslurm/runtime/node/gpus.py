"""The GPUs of this node: which GPUs are granted to this job, and how busy they are."""

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
"""Environment variables of several vendors that say which GPUs a process sees. Slurm sets the last one whenever it sets the
first (gres.conf(5))."""

_LIST_TIMEOUT = 20.0
"""Seconds in which `nvidia-smi` must list the GPUs; it is slow on a node of many GPUs without NVIDIA's persistence daemon."""
_FIRST_MISSING_DEVICE = 1000
"""The first of the GPU indices that stand for missing GPUs: no machine has so many GPUs."""
_INTERVAL = 5.0
"""Seconds between two queries of how busy the GPUs are."""
_TIMEOUT = 20.0
"""Seconds in which a query must answer."""
_NVIDIA = ("nvidia-smi", "--query-gpu=index,uuid,utilization.gpu,memory.used", "--format=csv,noheader,nounits")
_AMD = ("rocm-smi", "--showuniqueid", "--showuse", "--showmeminfo", "vram", "--json")
_CARD = "card"
"""What `rocm-smi` writes before the index of a GPU."""


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
    """Indices or UUIDs of the GPUs granted to this process; None if all GPUs that the driver lists are granted."""
    if any(name in environ for name in GPU_VARIABLES[:-1]):
        return visible_gpus(environ, count_gpus(environ))[1]
    if "SLURM_STEP_GPUS" in environ:
        return _devices(environ["SLURM_STEP_GPUS"])
    return None if _owns_unmanaged_gpus(environ) else []


def _owns_unmanaged_gpus(environ: Mapping[str, str]) -> bool:
    """Whether all GPUs of this node are this process's, because no other Slurm job runs here.

    No variable tells of `--exclusive`, so a Slurm job must have all CPUs of the node.
    """
    granted = environ.get("SLURM_CPUS_ON_NODE", "")
    return "SLURM_JOB_ID" not in environ or (granted.isdigit() and int(granted) >= (os.cpu_count() or 1))


def visible_gpus(environ: Mapping[str, str], count: int) -> Tuple[str, List[str]]:
    """The variable that says which GPUs this process sees, and the names of the first `count` of these GPUs.

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
    """The environment variables with which a process sees only the given GPUs; None for a variable that must be unset.

    Args:
        variable: the variable that `visible_gpus` returns.
        devices: names of GPUs that `visible_gpus` returns.
    """
    changes: Dict[str, Optional[str]] = {variable: ",".join(devices)}
    if variable == "ROCR_VISIBLE_DEVICES":
        changes["HIP_VISIBLE_DEVICES"] = None  # It numbers the devices that were visible before.
    return changes


def missing_gpus(count: int) -> List[str]:
    """Names of `count` GPUs that no machine has; CUDA ignores such an index, so a process that gets these names sees no GPU."""
    return [str(_FIRST_MISSING_DEVICE + index) for index in range(count)]


def _devices(visible: str) -> List[str]:
    """The GPU names in the value of a variable; empty if the value stands for no GPU."""
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
        process.kill()  # Without a wait: if the GPU driver hangs, no signal ends a process that has called it.
        if process.stdout is not None:
            process.stdout.close()
        return []
    return output.decode("utf-8", "replace").splitlines() if process.returncode == 0 else []


class Gpu(NamedTuple):
    """How busy one GPU is."""

    number: str
    """The index that the vendor's program gives the GPU."""
    uuid: str
    percent_busy: float
    memory: int
    """Bytes of GPU memory in use."""


Subscriber = Callable[[List[Gpu]], None]
"""Called with the figures of the granted GPUs after each query."""
Parse = Callable[[str], List[Gpu]]
"""Reads the figures of all GPUs from the output of a vendor's program."""


class GpuMonitor:
    """Tells subscribers every few seconds how busy the granted GPUs of this node are.

    One query of `nvidia-smi` or `rocm-smi` serves all subscribers. For Intel there is no such program and no query.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._subscribers: List[Subscriber] = []
        self._querying = False
        self._timer: Optional[Timer] = None

    def subscribe(self, subscriber: Subscriber) -> None:
        """Call `subscriber` with the figures of the granted GPUs, soon and then every few seconds."""
        self._subscribers.append(subscriber)
        self._query_after(0.0)

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """Stop calling `subscriber`; without any subscriber, the queries end."""
        if subscriber in self._subscribers:
            self._subscribers.remove(subscriber)
        if not self._subscribers and self._timer is not None:
            self._timer.cancel()

    def _query_after(self, delay: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(delay, self._query)

    def _query(self) -> None:
        """Start the first program that is installed; its answer goes to the subscribers and schedules the next query."""
        granted = granted_gpus(os.environ)
        if self._querying or granted == []:
            return

        def answered(parse: Parse, text: Optional[str]) -> None:
            self._querying = False
            if text is None or not self._subscribers:
                return  # After a failure, the next query comes with the next subscriber.
            gpus = select_granted(granted, parse(text))
            for subscriber in list(self._subscribers):
                subscriber(gpus)
            self._query_after(_INTERVAL)

        for command, parse in _programs(os.environ):
            with contextlib.suppress(OSError):  # The program is not installed.
                query_program(self._loop, command, _TIMEOUT, functools.partial(answered, parse))
                self._querying = True
                return


def select_granted(granted: Optional[Sequence[str]], gpus: List[Gpu]) -> List[Gpu]:
    """Those of `gpus` that are granted; `granted` is None if all are.

    A granted slice of a GPU (MIG) selects no GPU, because a slice has no figures of its own.

    UUIDs may be abbreviated (CUDA_VISIBLE_DEVICES in the CUDA C++ Programming Guide).
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
            gpus.append(Gpu(card[len(_CARD) :], uuid, busy, memory))
    return gpus


def _programs(environ: Mapping[str, str]) -> List[Tuple[Sequence[str], Parse]]:
    """Commands that may tell how busy the GPUs are, in the order to try them, each with the parser of its output."""
    if "ZE_AFFINITY_MASK" in environ:
        return []
    amd = "CUDA_VISIBLE_DEVICES" not in environ and any(
        name in environ for name in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
    )
    return [(_AMD, parse_amd)] if amd else [(_NVIDIA, parse_nvidia), (_AMD, parse_amd)]
