"""Warns if a payload starts Ray itself and that Ray takes more than is granted, or leaves the launcher's Ray cluster idle."""

from __future__ import annotations

import contextlib
import os
from typing import Dict, List, Optional

from ..node.resources import NodeResources
from ..process import processes
from ..process.loop import Loop
from ..process.processes import PROCESS_TABLE
from .payload import Payload

PHASE = "own-ray"
"""Name of the phase record that carries the warning."""

_FIRST, _LONGEST, _GROWTH = 1.0, 15.0, 1.5
"""Seconds until the first check, most seconds between two checks, and the factor by which each pause exceeds the last."""
_RESOURCES = b"--static_resource_list="
"""What a raylet's argument with its resources begins with; amounts follow as in "CPU,2,memory,1024" (Ray 2.60)."""


class OwnRayWatch:
    """Checks, while a payload runs, whether the payload has started Ray itself; writes at most one warning to the Dagster log."""

    def __init__(self, loop: Loop, payload: Payload, node: NodeResources) -> None:
        self._loop = loop
        self._payload = payload
        self._node = node
        self._pause = _FIRST
        loop.call_later(self._pause, self._check)

    def _check(self) -> None:
        if self._payload.pid is None:
            return  # The payload has ended.
        with contextlib.suppress(OSError):  # Out of file descriptors, perhaps; the next check may succeed.
            for command in raylet_commands(self._payload.run_dir, self._pause / 2):
                message = own_ray_warning(raylet_resources(command), self._node, self._payload.spec.uses_ray)
                if message is not None:
                    return self._payload.phase(PHASE, message)
        self._pause = min(self._pause * _GROWTH, _LONGEST)
        self._loop.call_later(self._pause, self._check)


def raylet_commands(run_dir: str, max_age: float) -> List[bytes]:
    """Command lines of the raylets (Ray's daemon on each node) that the payload of a run directory has started itself.

    Their environment names the run directory. Process tables older than `max_age` seconds are read anew.
    """
    entry = "RAYSLURM_RUN_DIR=" + run_dir
    _, table = PROCESS_TABLE.read(max_age)
    raylets = [process.pid for process in processes.descendants(os.getpid(), table) if process.name == "raylet"]
    return [processes.command_line(pid) for pid in raylets if processes.has_environment(pid, entry)]


def raylet_resources(command: bytes) -> Dict[str, float]:
    """The amounts by resource name that a raylet's command line gives; empty if it gives none. NUL separates the arguments."""
    listed = next((word for word in command.split(b"\0") if word.startswith(_RESOURCES)), _RESOURCES)
    words = listed[len(_RESOURCES) :].decode("utf-8", "replace").split(",")
    try:
        return {name: float(amount) for name, amount in zip(words[::2], words[1::2])}
    except ValueError:
        return {}


def own_ray_warning(resources: Dict[str, float], node: NodeResources, has_cluster: bool) -> Optional[str]:
    """The warning about Ray that a payload has started itself; None if there is no reason for one.

    Args:
        resources: the resources of the raylet that the payload has started.
        node: the resources granted on this node.
        has_cluster: whether the launcher gave the payload a Ray cluster, which idles now.
    """
    excess = []
    if resources.get("CPU", 0.0) > node.num_cpus:
        excess.append("it counts %g CPUs and node %s grants %d (num_cpus)" % (resources["CPU"], node.name, node.num_cpus))
    memory = resources.get("memory", 0.0) + resources.get("object_store_memory", 0.0)
    if node.memory_limit is not None and memory > node.memory_limit:
        figures = (memory / 2**30, node.name, node.memory_limit / 2**30)
        excess.append("it counts %.1f GiB of memory and node %s grants %.1f (object_store_memory)" % figures)
    if has_cluster:
        idle = "the payload has started a Ray of its own, so its launcher's cluster idles; call ray.init() without an address"
        return "; ".join([idle, *excess])
    if excess:
        return "the payload's own Ray takes more than is granted: %s; set the arguments of ray.init or `ray start`" % (
            " and ".join(excess)
        )
    return None
