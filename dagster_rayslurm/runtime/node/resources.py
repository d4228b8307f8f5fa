"""CPUs, GPUs and memory that Slurm grants on this node: detects them, and compares them with the configured requirements.

In local mode, this module also divides the CPUs, GPUs and memory of the machine among simulated nodes.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

from ..protocol.spec import NodeSpec, PayloadSpec, RaySpec, RuntimeSpec, node_spec

# Share of a node's memory that Ray may use, its object store included; the runtime and Ray's daemons use the rest.
SHARE_FOR_RAY = 0.9


class Requirement(NamedTuple):
    """How many CPUs, how many GPUs or how much memory one setting of the user requires of each node.

    `amount` is None if the user has not set it.
    """

    field: str  # Name of the user's setting in error messages.
    amount: Optional[float]
    unit: str  # "CPUs", "GPUs" or "GiB".


Footprint = Tuple[Requirement, ...]  # Everything that a payload or a Ray cluster requires of each of its nodes.


def node_footprint(spec: Union[RaySpec, NodeSpec]) -> Footprint:
    """Returns the CPUs, GPUs and memory that a Ray cluster needs on each of its nodes, or on each node of one component."""
    store = spec.object_store_memory
    return (
        Requirement("RayLauncher.num_cpus_per_node", spec.num_cpus, "CPUs"),
        Requirement("RayLauncher.num_gpus_per_node", spec.num_gpus, "GPUs"),
        Requirement("RayLauncher.object_store_memory_gb", None if store is None else store / 2**30, "GiB"),
    )


def payload_footprint(spec: PayloadSpec) -> Footprint:
    """Returns what a payload requires of each of its nodes.

    If the payload has a Ray cluster of its own, the requirements of this Ray cluster come first. The payload's settings
    `num_cpus` and `num_gpus` follow. `num_cpus` is left out if the Ray cluster already requires a number of CPUs, and `num_gpus`
    is left out if it requires a number of GPUs.
    """
    own = node_footprint(spec.ray) if spec.ray is not None else ()
    units = {requirement.unit for requirement in own if requirement.amount is not None}
    claims = (Requirement("num_cpus", spec.want_cpus, "CPUs"), Requirement("num_gpus", spec.want_gpus, "GPUs"))
    return own + tuple(claim for claim in claims if claim.unit not in units)


def runtime_footprint(spec: RuntimeSpec, component_id: Optional[str] = None) -> Footprint:
    """Returns what a runtime requires of each node: what was requested of Slurm, and what the runtime's Ray cluster requires.

    `component_id` is the component whose nodes are meant; None in a runtime without components.
    """
    asked = next((each for each in spec.components if each.component_id == component_id), spec)
    return (
        Requirement("SlurmQueueConfig.cpus_per_node", asked.asked_cpus, "CPUs"),
        Requirement("SlurmQueueConfig.gpus_per_node", asked.asked_gpus, "GPUs"),
        *(node_footprint(node_spec(spec.ray, component_id)) if spec.ray is not None else ()),
    )


def named(hostname: str, component: Optional[str]) -> str:
    """A node's name for messages: the host name, such as "g1", or with a component "g1 (component gpu)"."""
    return hostname if component is None else "%s (component %s)" % (hostname, component)


@dataclass(frozen=True)
class NodeResources:
    """The CPUs, GPUs and memory that this job may use on a node."""

    hostname: str
    num_cpus: int
    num_gpus: int
    memory: int  # Bytes that the hardware has.
    memory_limit: Optional[int]  # Bytes that Slurm or a cgroup allows; None if that is no less than the hardware has.
    component: Optional[str] = None  # Name of the node's component; None without components.

    @property
    def name(self) -> str:
        """The node's name for messages: the host name, and the component if the node has one."""
        return named(self.hostname, self.component)

    def facts(self) -> Dict[str, Any]:
        """The resources as a dictionary for JSON."""
        return asdict(self)


def usable_memory(node: NodeResources) -> int:
    """Bytes of memory that Ray may use on a node: the share `SHARE_FOR_RAY` of the memory that is granted on the node."""
    return int((node.memory if node.memory_limit is None else node.memory_limit) * SHARE_FOR_RAY)


def footprint_error(footprint: Footprint, node: NodeResources) -> Optional[str]:
    """An error message about the first requirement that a node does not meet; None if the node meets all requirements."""
    granted = {"CPUs": node.num_cpus, "GPUs": node.num_gpus, "GiB": round(usable_memory(node) / 2**30, 2)}
    for field, amount, unit in footprint:
        if amount is not None and amount > granted[unit]:
            return "%s=%g asks for more than node %s grants: %g %s" % (field, amount, node.name, granted[unit], unit)
    return None


def may_need_gpus(spec: RuntimeSpec) -> bool:
    """Returns whether payloads of this runtime may need GPUs; if not, the runtime does not count the GPUs, which saves time."""
    asked = any([spec.asked_gpus, *(component.asked_gpus for component in spec.components)])
    return spec.ray is not None or asked or (spec.idle_timeout is not None and spec.control_key is not None)


def detect(environ: Optional[Mapping[str, str]] = None, with_gpus: bool = True) -> NodeResources:
    """Returns the resources granted to this process on this node, according to the variables `environ` and the kernel.

    `environ` is `os.environ` by default. If `with_gpus` is False, GPUs are not counted, and the result has 0 GPUs.
    """
    environ = os.environ if environ is None else environ
    memory = hardware_memory()
    limits = [slurm_memory(environ), *(limit for _, limit in cgroup_limits())]
    return NodeResources(
        hostname=socket.gethostname(),
        num_cpus=count_cpus(environ),
        num_gpus=count_gpus(environ) if with_gpus else 0,
        memory=memory,
        memory_limit=min((limit for limit in limits if limit is not None and limit < memory), default=None),
    )


def hardware_memory() -> int:
    """Bytes of memory that this machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def count_cpus(environ: Mapping[str, str]) -> int:
    """Number of CPUs granted to this process.

    Where Slurm confines tasks to CPUs, the result is the size of the CPU affinity, at most `SLURM_CPUS_ON_NODE`. Where Slurm does
    not confine tasks (`TaskPlugin=task/none`), the result is `SLURM_CPUS_ON_NODE` (srun(1)). Outside of Slurm, the result is the
    size of the CPU affinity.
    """
    machine = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if sys.platform == "linux" else machine
    granted = _number(environ, "SLURM_CPUS_ON_NODE")
    if not granted:
        return usable
    return granted if usable == machine else min(usable, granted)


def slurm_memory(environ: Mapping[str, str]) -> Optional[int]:
    """Bytes of memory that Slurm grants the job step on this node; None if Slurm sets no limit.

    Slurm's variables are in megabytes, and 0 means all memory (srun(1)).
    """
    per_node, per_cpu = _number(environ, "SLURM_MEM_PER_NODE"), _number(environ, "SLURM_MEM_PER_CPU")
    return (per_node or (per_cpu or 0) * count_cpus(environ)) * 2**20 or None


def _number(environ: Mapping[str, str], name: str) -> Optional[int]:
    value = environ.get(name, "")
    return int(value) if value.isdigit() else None


def cgroup_limits() -> List[Tuple[str, int]]:
    """Returns the memory limits of this process's cgroup and of the cgroups above it, each as directory and bytes.

    Cgroups without a limit are left out. Versions 1 and 2 of cgroups(7) are read.
    """
    entries: List[List[str]] = []
    with contextlib.suppress(OSError), open("/proc/self/cgroup") as file:
        entries = [line.rstrip("\n").split(":", 2) for line in file]
    limits = []
    for _, controllers, path in entries:
        if controllers == "":
            root, name = "/sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            root, name = "/sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        parts = [part for part in path.split("/") if part]
        for directory in [os.path.join(root, *parts[:depth]) for depth in range(len(parts) + 1)]:
            # There may be no such file, or "max" in it.
            with contextlib.suppress(OSError, ValueError), open(os.path.join(directory, name)) as file:
                limits.append((directory, int(file.read())))
    return limits


# ---- GPUs

# Environment variables of several vendors that say which GPUs a process sees. Slurm sets the last one whenever it sets the
# first (gres.conf(5)).
GPU_VARIABLES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "GPU_DEVICE_ORDINAL")
# Seconds in which `nvidia-smi` must list the GPUs; it is slow on a node of many GPUs without NVIDIA's persistence daemon.
_LIST_TIMEOUT = 20.0


def count_gpus(environ: Mapping[str, str]) -> int:
    """Returns the number of GPUs granted to this process.

    The number comes from the first variable that is set in `environ`, in this order: a variable for visible GPUs, such as
    `CUDA_VISIBLE_DEVICES` (gres.conf(5)); `SLURM_GPUS_ON_NODE`; `SLURM_STEP_GPUS` (srun(1), Slurm 22.05). If none is set, the
    result is the number of GPUs that the driver lists. In a Slurm job that does not have all CPUs of the node, the result is then
    0, because the GPUs may belong to other jobs.
    """
    visible, number = _visible(environ), _number(environ, "SLURM_GPUS_ON_NODE")
    if visible is None and number is not None:
        return number
    granted = granted_gpus(environ)
    return len(list_gpus() if granted is None else granted)


def granted_gpus(environ: Mapping[str, str]) -> Optional[List[str]]:
    """Returns the indices or UUIDs of the GPUs granted to this process, according to the environment variables `environ`.

    The list is empty if no GPU is granted. None means: all GPUs that the driver lists.
    """
    visible = _visible(environ)
    if visible is not None:
        return visible[1]
    if "SLURM_STEP_GPUS" in environ:
        return _devices(environ["SLURM_STEP_GPUS"])
    # No variable tells of `--exclusive`, so a Slurm job must have all CPUs of the node to have all its GPUs.
    alone = "SLURM_JOB_ID" not in environ or (_number(environ, "SLURM_CPUS_ON_NODE") or 0) >= (os.cpu_count() or 1)
    return None if alone else []


def visible_gpus(environ: Mapping[str, str], count: int) -> Tuple[str, List[str]]:
    """Returns the name of the environment variable that limits the visible GPUs, and the first `count` GPUs in its value.

    If no such variable is set in `environ`, the result is CUDA_VISIBLE_DEVICES and the indices from 0 to `count` - 1. Several
    tiles of one Intel device count as one GPU.
    """
    variable, names = _visible(environ) or (GPU_VARIABLES[0], [str(index) for index in range(count)])
    return variable, names[:count]


def _visible(environ: Mapping[str, str]) -> Optional[Tuple[str, List[str]]]:
    """Returns the name of the environment variable that limits the visible GPUs, and the GPUs in its value.

    The result is None if no such variable is set in `environ`.
    """
    variable = next((name for name in GPU_VARIABLES[:-1] if name in environ), None)
    if variable is None:
        return None
    names = _devices(environ[variable])
    if variable == "ROCR_VISIBLE_DEVICES" and "HIP_VISIBLE_DEVICES" in environ:
        # HIP numbers the devices that ROCr leaves visible.
        chosen = [int(name) for name in _devices(environ["HIP_VISIBLE_DEVICES"]) if name.isdigit()]
        names = [names[index] for index in chosen if index < len(names)]
    elif variable == "ZE_AFFINITY_MASK":  # "0.1" is a tile of device 0.
        tiles: Dict[str, List[str]] = {}
        for name in names:
            tiles.setdefault(name.partition(".")[0], []).append(name)
        names = [",".join(each) for each in tiles.values()]
    return variable, names


def _devices(visible: str) -> List[str]:
    """Returns the GPUs (indices or UUIDs) in the value of a variable such as CUDA_VISIBLE_DEVICES.

    The list is empty if the value stands for no GPU, such as "NoDevFiles" or "".
    """
    names = [name.strip() for name in visible.split(",")]
    return [name for name in names if name and name not in ("NoDevFiles", "-1", "none", "void")]


def list_gpus() -> List[str]:
    """Returns the product names of the GPUs that `nvidia-smi` lists, one for each GPU. Blocks until `nvidia-smi` has ended.

    The list is empty if `nvidia-smi` is missing, fails, or runs longer than `_LIST_TIMEOUT` seconds.
    """
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


# ---- Simulated nodes, in local mode

Variables = Dict[str, Optional[str]]  # Environment variables; a variable with the value None must not be set.
_FIRST_MISSING_DEVICE = 1000  # The first of the GPU indices that stand for missing GPUs; CUDA ignores an index that is too high.


class Share(NamedTuple):
    """The part of this machine that one simulated node gets: what Ray on this node counts, and the GPUs that it may use."""

    # The CPUs, GPUs and memory that Ray counts on the simulated node. Ray may count CPUs and GPUs that this machine lacks.
    machine: NodeResources
    environ: Variables  # Environment variables for Ray on the simulated node, which limit the GPUs that Ray sees.
    remark: str  # A sentence for the Dagster log about what is simulated; "" if nothing is.


def simulated_shares(spec: RuntimeSpec, here: NodeResources) -> List[Share]:
    """Returns the share of this machine that each component of a runtime gets in local mode, in the order of the components.

    The list has a single share if the runtime has no components. `here` has the resources of this machine.
    """
    visible = visible_gpus(os.environ, here.num_gpus)
    return component_shares(spec, here, visible) if spec.components else [single_node_share(spec, here, visible)]


def component_shares(spec: RuntimeSpec, here: NodeResources, visible: Tuple[str, Sequence[str]]) -> List[Share]:
    """Returns the share of this machine that each component gets, in the order of `spec.components`. A pure function.

    Each component gets all CPUs unless it requests another number, because simulated components are rarely busy at the same time.
    GPUs are assigned to one component after another. If too few GPUs are left for a component, its missing GPUs are simulated:
    Ray counts GPUs that do not exist. `here` has the resources of this machine, and `visible` is the result of `visible_gpus`.
    """
    variable, left = visible[0], list(visible[1])
    nodes = {each.component_id: each for each in spec.ray.components} if spec.ray is not None else {}
    # Without a limit, each Ray node would count the memory of the whole machine.
    memory = (here.memory if here.memory_limit is None else here.memory_limit) // max(1, len(spec.components))
    shares = []
    for component in spec.components:
        name = component.component_id
        asked = nodes.get(name, NodeSpec(name))
        # Ray's settings for the component go before what was requested of Slurm.
        cpus = min(component.asked_cpus or here.num_cpus, here.num_cpus) if asked.num_cpus is None else asked.num_cpus
        gpus = (component.asked_gpus or 0) if asked.num_gpus is None else asked.num_gpus
        remark = _remark(cpus, gpus, here.num_cpus, len(left))
        own, left = left[:gpus], left[gpus:]
        environ = _gpu_environment(variable, own, gpus) if visible[1] or gpus else {}
        machine = replace(here, num_cpus=cpus, num_gpus=gpus, memory_limit=memory, component=name)
        shares.append(Share(machine, environ, remark and "component %s: %s" % (name, remark)))
    return shares


def single_node_share(spec: RuntimeSpec, here: NodeResources, visible: Tuple[str, Sequence[str]]) -> Share:
    """The share of this machine for the only node of a runtime without components. A pure function.

    If the Ray cluster requests more CPUs or GPUs than this machine has, the missing CPUs or GPUs are simulated. `here` has the
    resources of this machine, and `visible` is the result of `visible_gpus`.
    """
    if spec.ray is None:
        return Share(here, {}, "")
    cpus, gpus = max(here.num_cpus, spec.ray.num_cpus or 0), max(here.num_gpus, spec.ray.num_gpus or 0)
    environ = _gpu_environment(visible[0], visible[1], gpus) if gpus > here.num_gpus else {}
    return Share(replace(here, num_cpus=cpus, num_gpus=gpus), environ, _remark(cpus, gpus, here.num_cpus, here.num_gpus))


def _gpu_environment(variable: str, own: Sequence[str], gpus: int) -> Variables:
    """Returns the environment variables that limit Ray on a simulated node to the GPUs `own` (indices or UUIDs).

    `variable` is the name of the variable for visible GPUs. `gpus` is the number of GPUs that Ray counts; if `own` has fewer,
    indices of devices that do not exist stand for the others. A variable with the value None must be unset.
    """
    missing = [str(_FIRST_MISSING_DEVICE + index) for index in range(gpus - len(own))]
    # Ray refuses a number of GPUs that contradicts any of these variables. HIP's would number the devices visible before.
    others = GPU_VARIABLES if missing else ("HIP_VISIBLE_DEVICES",) if variable == "ROCR_VISIBLE_DEVICES" else ()
    return {**dict.fromkeys(others), variable: ",".join([*own, *missing])}


def _remark(cpus: int, gpus: int, has_cpus: int, has_gpus: int) -> str:
    """A sentence for the Dagster log about CPUs and GPUs that Ray counts but this machine lacks; "" if there are none.

    Ray counts `cpus` and `gpus`; this machine has `has_cpus` and `has_gpus`.
    """
    units = [("CPU", cpus, has_cpus), ("GPU", gpus, has_gpus)]
    short = [(_count(counted, unit), _count(has, unit)) for unit, counted, has in units if counted > has]
    if not short:
        return ""
    counted, has = (" and ".join(words) for words in zip(*short))
    return "Ray counts %s, but this machine has %s for it: the others are simulated, no device is behind them" % (counted, has)


def _count(number: int, unit: str) -> str:
    return "%s %s%s" % (number or "no", unit, "" if number == 1 else "s")
