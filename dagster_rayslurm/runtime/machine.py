"""What this node grants to the runtime: CPUs by affinity, GPUs by what is visible, memory by its limits."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from dataclasses import dataclass
from typing import List, Mapping, Optional


@dataclass(frozen=True)
class Machine:
    """Resources granted on this node. `memory_limit` is bytes, None if nothing is stricter than the hardware."""

    hostname: str
    num_cpus: int
    num_gpus: int
    memory: int
    memory_limit: Optional[int]


def detect(environ: Optional[Mapping[str, str]] = None, with_gpus: bool = True) -> Machine:
    """Detect the resources granted to this process.

    Args:
        environ: the environment to look at; None for this process's own.
        with_gpus: False if nobody will ask for GPUs, since `nvidia-smi` takes its time.
    """
    environ = os.environ if environ is None else environ
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [limit for limit in (_slurm_memory(environ), _cgroup_memory()) if limit is not None and limit < memory]
    return Machine(
        hostname=socket.gethostname(),
        num_cpus=_cpus(),
        num_gpus=count_gpus(environ) if with_gpus else 0,
        memory=memory,
        memory_limit=min(limits) if limits else None,
    )


def _cpus() -> int:
    """CPUs this process may run on; the machine's count can be far more than Slurm granted."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def count_gpus(environ: Mapping[str, str]) -> int:
    """GPUs visible to this process: `CUDA_VISIBLE_DEVICES` if set, else what the driver lists.

    "NoDevFiles" and "-1" mean none; Slurm and CUDA use them.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",")]
        return len([name for name in names if name and name not in ("NoDevFiles", "-1", "none", "void")])
    return len(list_gpus())


def list_gpus() -> List[str]:
    """The names of the GPUs that `nvidia-smi` lists; empty where it does not answer."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return found.stdout.decode("utf-8", "replace").splitlines()


def _slurm_memory(environ: Mapping[str, str]) -> Optional[int]:
    """The step's memory limit in bytes (srun(1): both variables are in megabytes; 0 is all of the node)."""
    if environ.get("SLURM_MEM_PER_NODE", "0").isdigit() and int(environ.get("SLURM_MEM_PER_NODE", "0")):
        return int(environ["SLURM_MEM_PER_NODE"]) * 2**20
    per_cpu = environ.get("SLURM_MEM_PER_CPU", "")
    if per_cpu.isdigit() and int(per_cpu):
        return int(per_cpu) * 2**20 * _cpus()
    return None


def _cgroup_memory() -> Optional[int]:
    """The tightest memory limit of this process's cgroup and those above it (cgroups(7), version 1 and 2)."""
    try:
        with open("/proc/self/cgroup") as file:
            entries = [line.rstrip("\n").split(":", 2) for line in file]
    except OSError:
        return None
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
            limits.append(_read_limit(os.path.join(root, *parts[:depth], name)))
    known = [limit for limit in limits if limit is not None]
    return min(known) if known else None


def _read_limit(path: str) -> Optional[int]:
    try:
        with open(path) as file:
            text = file.read().strip()
    except OSError:
        return None
    return int(text) if re.match(r"^\d+$", text) else None
