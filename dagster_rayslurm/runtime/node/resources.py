"""CPUs, GPUs and memory that this node grants, and whether they suffice for a payload or a Ray cluster."""

from __future__ import annotations

import os
import re
import socket
import sys
from dataclasses import asdict, dataclass
from typing import Any, Dict, List, Mapping, Optional, Tuple

from ..protocol.spec import RuntimeSpec
from .footprint import SHARE_FOR_RAY, Footprint
from .gpus import count_gpus
from .worker_node import named


@dataclass(frozen=True)
class NodeResources:
    """The CPUs, GPUs and memory that this job may use on a node.

    Attributes:
        memory: bytes of memory that the hardware has.
        memory_limit: bytes of memory that Slurm or a cgroup allows; None if that is no less than the hardware has.
        component: name of the component of a heterogeneous job that the node belongs to; None without components.
    """

    hostname: str
    num_cpus: int
    num_gpus: int
    memory: int
    memory_limit: Optional[int]
    component: Optional[str] = None

    @property
    def name(self) -> str:
        """The node's name for messages, with its component if it has one."""
        return named(self.hostname, self.component)

    def facts(self) -> Dict[str, Any]:
        """The resources as a dictionary for JSON; `from_facts` reads it."""
        return asdict(self)


def from_facts(facts: Mapping[str, Any]) -> NodeResources:
    """The resources of another node, read from its `NodeResources.facts`."""
    return NodeResources(**facts)


def usable_memory(node: NodeResources) -> int:
    """Bytes of a node's memory that Ray may use: the share `SHARE_FOR_RAY` of what the node grants."""
    return int((node.memory if node.memory_limit is None else node.memory_limit) * SHARE_FOR_RAY)


def detect(environ: Optional[Mapping[str, str]] = None, with_gpus: bool = True) -> NodeResources:
    """The resources granted to this process on this node.

    Args:
        environ: the environment variables; None for this process's own.
        with_gpus: whether to count GPUs, which takes some time; without it, `num_gpus` is 0.
    """
    environ = os.environ if environ is None else environ
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [slurm_memory(environ), *(limit for _, limit in cgroup_limits())]
    return NodeResources(
        hostname=socket.gethostname(),
        num_cpus=count_cpus(environ),
        num_gpus=count_gpus(environ) if with_gpus else 0,
        memory=memory,
        memory_limit=min((limit for limit in limits if limit is not None and limit < memory), default=None),
    )


def count_cpus(environ: Mapping[str, str]) -> int:
    """Number of CPUs granted to this process.

    Where Slurm confines tasks to CPUs, the CPU affinity of the process gives the number. Where Slurm does not
    (`TaskPlugin=task/none`), a process may run on all CPUs of the machine, and only `SLURM_CPUS_ON_NODE` says how many were
    granted (srun(1)).
    """
    machine = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if sys.platform == "linux" else machine
    granted = environ.get("SLURM_CPUS_ON_NODE", "")
    if not granted.isdigit() or int(granted) == 0:
        return usable
    return int(granted) if usable == machine else min(usable, int(granted))


def slurm_memory(environ: Mapping[str, str]) -> Optional[int]:
    """Bytes of memory that Slurm grants the step on this node; None if Slurm sets no limit.

    Both variables are in megabytes, and 0 is all memory of the node (srun(1)).
    """
    per_node, per_cpu = environ.get("SLURM_MEM_PER_NODE", ""), environ.get("SLURM_MEM_PER_CPU", "")
    if per_node.isdigit() and int(per_node):
        return int(per_node) * 2**20
    if per_cpu.isdigit() and int(per_cpu):
        return int(per_cpu) * 2**20 * count_cpus(environ)
    return None


def cgroup_limits() -> List[Tuple[str, int]]:
    """Memory limits in bytes of this process's cgroup and of its ancestors, as pairs (cgroup directory, limit).

    Reads cgroups of version 1 and 2 (cgroups(7)).
    """
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
    """The number in a limit file of a cgroup; None if there is no file or no number, such as "max"."""
    try:
        with open(path) as file:
            text = file.read().strip()
    except OSError:
        return None
    return int(text) if re.match(r"^\d+$", text) else None


def footprint_error(footprint: Footprint, node: NodeResources) -> Optional[str]:
    """An error message about the first requirement that a node does not meet; None if the node meets all."""
    granted = {"CPUs": node.num_cpus, "GPUs": node.num_gpus, "GiB": round(usable_memory(node) / 2**30, 2)}
    for field, amount, unit in footprint:
        if amount is not None and amount > granted[unit]:
            return "%s=%g asks for more than node %s grants: %g %s" % (field, amount, node.name, granted[unit], unit)
    return None


def may_need_gpus(spec: RuntimeSpec) -> bool:
    """Whether payloads of this runtime may need GPUs; if not, the runtime need not count them, which takes some time."""
    asked = any([spec.asked_gpus, *(component.asked_gpus for component in spec.components)])
    return spec.ray is not None or asked or (spec.idle_timeout is not None and spec.control_key is not None)
