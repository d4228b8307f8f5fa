"""CPUs, GPUs and memory that this node grants, and whether they suffice for a payload.

What this node grants to the runtime: CPUs by affinity, GPUs by what is visible, memory by its limits.

What a payload asks of a node, held against what the node grants. Pure.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

from ..protocol.spec import NodeSpec, PayloadSpec, RaySpec, RuntimeSpec, node_spec
from .worker_node import named

SHARE_FOR_RAY = 0.9
"""Share of a node's memory that Ray may use, its object store included; the runtime and Ray's daemons live on the rest."""
_NVIDIA_SMI = 20.0
"""Seconds in which `nvidia-smi` answers; without its persistence daemon a node of many GPUs takes some."""

_NO_DEVICE = 1000
"""No machine has so many GPUs."""

GPU_VARIABLES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "GPU_DEVICE_ORDINAL")
"""Variables that say which GPUs a process sees, by their makers; Slurm sets the last one beside the first (gres.conf(5))."""


@dataclass(frozen=True)
class Machine:
    """Resources granted on this node. `memory_limit` is bytes, None if nothing is stricter than the hardware.

    `component` is that of the allocation which the node belongs to; None where there are none.
    """

    hostname: str
    num_cpus: int
    num_gpus: int
    memory: int
    memory_limit: Optional[int]
    component: Optional[str] = None

    @property
    def name(self) -> str:
        """The node in words."""
        return named(self.hostname, self.component)

    def facts(self) -> Dict[str, Any]:
        """As JSON can carry it."""
        return asdict(self)


def usable_memory(machine: Machine) -> int:
    """Bytes of a node's memory that Ray may use."""
    return int((machine.memory if machine.memory_limit is None else machine.memory_limit) * SHARE_FOR_RAY)


def from_facts(facts: Mapping[str, Any]) -> Machine:
    """What `Machine.facts` told on another node."""
    return Machine(**facts)


def detect(environ: Optional[Mapping[str, str]] = None, with_gpus: bool = True) -> Machine:
    """Detect the resources granted to this process.

    Args:
        environ: the environment to look at; None for this process's own.
        with_gpus: False if nobody will ask for GPUs, since `nvidia-smi` takes its time.
    """
    environ = os.environ if environ is None else environ
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    granted = slurm_memory(environ)
    limits = [limit for limit in (granted, *(each for _, each in cgroup_limits())) if limit is not None and limit < memory]
    return Machine(
        hostname=socket.gethostname(),
        num_cpus=count_cpus(environ),
        num_gpus=count_gpus(environ) if with_gpus else 0,
        memory=memory,
        memory_limit=min(limits) if limits else None,
    )


def count_cpus(environ: Mapping[str, str]) -> int:
    """CPUs granted to this process.

    Where Slurm confines tasks, affinity says so. Where it does not (`TaskPlugin=task/none`), a process may run on all of
    the machine, and `SLURM_CPUS_ON_NODE` alone says what it was granted (srun(1)).
    """
    machine = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if sys.platform == "linux" else machine
    granted = environ.get("SLURM_CPUS_ON_NODE", "")
    if not granted.isdigit() or int(granted) == 0:
        return usable
    return int(granted) if usable == machine else min(usable, int(granted))


def count_gpus(environ: Mapping[str, str]) -> int:
    """GPUs visible to this process: by the variables of the vendors, else those that Slurm granted, else what the driver lists.

    Slurm sets `CUDA_VISIBLE_DEVICES`, `ROCR_VISIBLE_DEVICES` or `ZE_AFFINITY_MASK`, by the maker of the GPUs (gres.conf(5)),
    and `SLURM_GPUS_ON_NODE` and `SLURM_STEP_GPUS` in any case (srun(1), Slurm 22.05). "NoDevFiles" and "-1" mean none;
    Slurm and CUDA use them. Where Slurm sets none of these, the GPUs that the driver lists may be those of other jobs, unless
    the job holds the whole node, as it does at sites whose Slurm does not know of GPUs.
    """
    if "CUDA_VISIBLE_DEVICES" in environ:
        return len(_devices(environ["CUDA_VISIBLE_DEVICES"]))
    # HIP counts among the devices that ROCr leaves visible.
    amd = [len(_devices(environ[name])) for name in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES") if name in environ]
    if amd:
        return min(amd)
    if "ZE_AFFINITY_MASK" in environ:  # "0.1" is a tile of device 0.
        return len({device.partition(".")[0] for device in _devices(environ["ZE_AFFINITY_MASK"])})
    granted = environ.get("SLURM_GPUS_ON_NODE", "")
    if re.match("^[0-9]+$", granted):
        return int(granted)
    if "SLURM_STEP_GPUS" in environ:
        return len(_devices(environ["SLURM_STEP_GPUS"]))
    if "SLURM_JOB_ID" in environ and not _holds_all_cpus(environ):
        return 0
    return len(list_gpus())


def granted_gpus(environ: Mapping[str, str]) -> Optional[List[str]]:
    """The granted GPUs, by what their driver calls them, which is an index or a UUID; None for all that it lists."""
    if any(name in environ for name in GPU_VARIABLES[:-1]):
        return visible_gpus(environ, count_gpus(environ))[1]
    if "SLURM_STEP_GPUS" in environ:
        return _devices(environ["SLURM_STEP_GPUS"])
    return None if "SLURM_JOB_ID" not in environ or _holds_all_cpus(environ) else []


def _holds_all_cpus(environ: Mapping[str, str]) -> bool:
    """Whether a Slurm job has every CPU of this node, so that no other job runs here; no variable says `--exclusive`."""
    granted = environ.get("SLURM_CPUS_ON_NODE", "")
    return granted.isdigit() and int(granted) >= (os.cpu_count() or 1)


def visible_gpus(environ: Mapping[str, str], count: int) -> Tuple[str, List[str]]:
    """The variable that says which GPUs a process sees, and what it calls those that this one sees; several tiles are one.

    Args:
        environ: the environment of this process.
        count: how many it sees (`count_gpus`).
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


def shown_gpus(variable: str, devices: Sequence[str]) -> Dict[str, Optional[str]]:
    """The variables by which a process sees some GPUs and no others; None for one that must not be set.

    Args:
        variable: by which they are shown.
        devices: what `visible_gpus` calls them.
    """
    shown: Dict[str, Optional[str]] = {variable: ",".join(devices)}
    if variable == "ROCR_VISIBLE_DEVICES":
        shown["HIP_VISIBLE_DEVICES"] = None  # It would count among those, which are fewer now.
    return shown


def placeholders(count: int) -> List[str]:
    """Names of GPUs that no machine has: CUDA ignores such an index, so a process that is shown one sees no device."""
    return [str(_NO_DEVICE + index) for index in range(count)]


def _devices(visible: str) -> List[str]:
    names = [name.strip() for name in visible.split(",")]
    return [name for name in names if name and name not in ("NoDevFiles", "-1", "none", "void")]


def list_gpus() -> List[str]:
    """The names of the GPUs that `nvidia-smi` lists; empty where it does not answer."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        asked = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except OSError:
        return []
    try:
        found, _ = asked.communicate(timeout=_NVIDIA_SMI)
    except subprocess.TimeoutExpired:
        # Its end is not waited for: where a driver hangs, no signal ends what has called it.
        asked.kill()
        if asked.stdout is not None:
            asked.stdout.close()
        return []
    return found.decode("utf-8", "replace").splitlines() if asked.returncode == 0 else []


def slurm_memory(environ: Mapping[str, str]) -> Optional[int]:
    """The step's memory limit in bytes (srun(1): both variables are in megabytes; 0 is all of the node)."""
    if environ.get("SLURM_MEM_PER_NODE", "0").isdigit() and int(environ.get("SLURM_MEM_PER_NODE", "0")):
        return int(environ["SLURM_MEM_PER_NODE"]) * 2**20
    per_cpu = environ.get("SLURM_MEM_PER_CPU", "")
    if per_cpu.isdigit() and int(per_cpu):
        return int(per_cpu) * 2**20 * count_cpus(environ)
    return None


def cgroup_limits() -> List[Tuple[str, int]]:
    """Directories of this process's cgroup and those above it that limit memory, with the limit (cgroups(7), version 1 and 2)."""
    try:
        with open("/proc/self/cgroup") as file:
            entries = [line.rstrip("\n").split(":", 2) for line in file]
    except OSError:
        return []
    limits = []
    for _, controllers, path in entries:
        if controllers == "":
            root, name = "/sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            root, name = "/sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        parts = [part for part in path.split("/") if part]
        for depth in range(len(parts) + 1):
            directory = os.path.join(root, *parts[:depth])
            limit = _read_limit(os.path.join(directory, name))
            if limit is not None:
                limits.append((directory, limit))
    return limits


def _read_limit(path: str) -> Optional[int]:
    try:
        with open(path) as file:
            text = file.read().strip()
    except OSError:
        return None
    return int(text) if re.match(r"^\d+$", text) else None


class Want(NamedTuple):
    """An amount that a field of a launcher asks of a node; None if it does not say. Units are CPUs, GPUs and GiB."""

    field: str
    amount: Optional[float]
    unit: str


Footprint = Tuple[Want, ...]


def footprint_error(footprint: Footprint, machine: Machine) -> Optional[str]:
    """What a payload asks of this node and does not get, as a sentence that names the field; or None."""
    granted = {"CPUs": machine.num_cpus, "GPUs": machine.num_gpus, "GiB": round(usable_memory(machine) / 2**30, 2)}
    for wanted in footprint:
        if wanted.amount is not None and wanted.amount > granted[wanted.unit]:
            return "%s=%g asks for more than node %s grants: %g %s" % (
                wanted.field,
                wanted.amount,
                machine.name,
                granted[wanted.unit],
                wanted.unit,
            )
    return None


def node_footprint(spec: Union[RaySpec, NodeSpec]) -> Footprint:
    """What a cluster asks of each node, or of each of a component."""
    store = spec.object_store_memory
    return (
        Want("RayLauncher.num_cpus_per_node", spec.num_cpus, "CPUs"),
        Want("RayLauncher.num_gpus_per_node", spec.num_gpus, "GPUs"),
        Want("RayLauncher.object_store_memory_gb", None if store is None else store / 2**30, "GiB"),
    )


def payload_footprint(spec: PayloadSpec) -> Footprint:
    """What a payload among others asks of each node: what it claims, and what a cluster of its own is to have."""
    own = node_footprint(spec.ray) if spec.ray is not None else ()
    named = {want.unit for want in own if want.amount is not None}
    claims = (Want("num_cpus", spec.want_cpus, "CPUs"), Want("num_gpus", spec.want_gpus, "GPUs"))
    return own + tuple(claim for claim in claims if claim.unit not in named)


def runtime_footprint(spec: RuntimeSpec, component_id: Optional[str] = None) -> Footprint:
    """What every node of a runtime or of a component must grant: what Slurm was asked for, and what the cluster is to have."""
    own = next((each for each in spec.components if each.component_id == component_id), None)
    asked = (
        Want("SlurmQueueConfig.cpus_per_node", spec.asked_cpus if own is None else own.asked_cpus, "CPUs"),
        Want("SlurmQueueConfig.gpus_per_node", spec.asked_gpus if own is None else own.asked_gpus, "GPUs"),
    )
    return asked + (node_footprint(node_spec(spec.ray, component_id)) if spec.ray is not None else ())


def asks_for_gpus(spec: RuntimeSpec) -> bool:
    """Whether payloads of this runtime may want GPUs: it takes its time to look for them."""
    asked = any([spec.asked_gpus, *(component.asked_gpus for component in spec.components)])
    return spec.ray is not None or asked or (spec.idle_timeout is not None and spec.control_key is not None)
