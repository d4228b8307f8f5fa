"""A Ray that a payload starts itself, instead of its launcher's cluster or without one: the user is told what it takes."""

from __future__ import annotations

import contextlib
import os
from typing import Dict, List, Optional

from ..node.resources import Machine
from ..process import processes
from ..process.loop import Loop
from .payload import Payload

PHASE = "own-ray"

_FIRST, _LONGEST, _GROWTH = 1.0, 15.0, 1.5
"""Seconds until the first look, and between the late ones."""
_RESOURCES = b"--static_resource_list="
"""The raylet's argument that names its resources: "CPU,2,memory,1024" (Ray 2.60)."""


class OwnRay:
    """Looks for a raylet of the payload's own while the payload runs, and tells the user once.

    Args:
        loop: where the timers run.
        payload: the payload.
        machine: what this node grants.
    """

    def __init__(self, loop: Loop, payload: Payload, machine: Machine) -> None:
        self._loop = loop
        self._payload = payload
        self._machine = machine
        self._pause = _FIRST
        loop.call_later(self._pause, self._look)

    def _look(self) -> None:
        if self._payload.pid is None:
            return  # It has ended.
        with contextlib.suppress(OSError):  # Out of file descriptors, perhaps; the next look may succeed.
            for command in raylets(self._payload.run_dir):
                said = remark(resources_of(command), self._machine, self._payload.spec.uses_ray)
                if said is not None:
                    return self._payload.phase(PHASE, said)
        self._pause = min(self._pause * _GROWTH, _LONGEST)
        self._loop.call_later(self._pause, self._look)


def raylets(run_dir: str) -> List[bytes]:
    """The command lines of the raylets below this process whose environment names a run: those of its own clusters."""
    mark = "RAYSLURM_RUN_DIR=" + run_dir
    below = [each for each in processes.descendants(os.getpid()) if each.name == "raylet"]
    return [processes.command_line(each.pid) for each in below if processes.has_environment(each.pid, mark)]


def resources_of(command: bytes) -> Dict[str, float]:
    """What a raylet counts as resources, by its command line; arguments are separated by NUL."""
    listed = next((word for word in command.split(b"\0") if word.startswith(_RESOURCES)), _RESOURCES)
    words = listed[len(_RESOURCES) :].decode("utf-8", "replace").split(",")
    try:
        return {name: float(amount) for name, amount in zip(words[::2], words[1::2])}
    except ValueError:
        return {}


def remark(resources: Dict[str, float], machine: Machine, has_cluster: bool) -> Optional[str]:
    """What the user is told of a Ray of the payload's own; None if it takes no more than is granted and no cluster idles.

    Args:
        resources: what it counts as its own.
        machine: what this node grants.
        has_cluster: whether the payload's launcher gave it a cluster.
    """
    excess = []
    if resources.get("CPU", 0.0) > machine.num_cpus:
        excess.append("it counts %g CPUs and node %s grants %d (num_cpus)" % (resources["CPU"], machine.name, machine.num_cpus))
    memory = resources.get("memory", 0.0) + resources.get("object_store_memory", 0.0)
    if machine.memory_limit is not None and memory > machine.memory_limit:
        told = (memory / 2**30, machine.name, machine.memory_limit / 2**30)
        excess.append("it counts %.1f GiB of memory and node %s grants %.1f (object_store_memory)" % told)
    if has_cluster:
        idle = "the payload has started a Ray of its own, so its launcher's cluster idles; call ray.init() without an address"
        return "; ".join([idle, *excess])
    if excess:
        return "the payload's own Ray takes more than is granted: %s; set the arguments of ray.init or `ray start`" % (
            " and ".join(excess)
        )
    return None
