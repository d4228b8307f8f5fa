"""Detects the platform for which an environment is built. `srun` runs a command on a compute node to find the node's platform."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..edge import environment as edge
from ..edge import files
from ..slurm.config import SlurmQueueConfig
from ..slurm.request import srun_command
from ..ssh.base import Connection

_FORMAT = "rayslurm platform 2"
# Seconds for which this machine's cache of a platform is valid: for an existing prefix, and for a prefix that is to be made.
PLATFORM_AGE, FRESH_AGE = 86400.0, 600.0
# Seconds in which Slurm must grant a node, because an environment must not wait in the queue before the job does.
_PATIENCE = 20
_LOOK_TIMEOUT = 60.0
# The flags of /proc/cpuinfo that each level has in addition to the one before (psABI of x86-64, "Micro-Architecture Levels").
_LEVELS = {
    "x86-64-v2": "cx16 lahf_lm popcnt pni sse4_1 sse4_2 ssse3",
    "x86-64-v3": "abm avx avx2 bmi1 bmi2 f16c fma movbe xsave",
    "x86-64-v4": "avx512bw avx512cd avx512dq avx512f avx512vl",
}


@dataclass(frozen=True)
class Python:
    """An interpreter on the cluster, outside any virtual environment."""

    path: str
    version: tuple[int, ...]
    implementation: str  # Such as "cpython".
    machine: str  # Architecture, such as "x86_64".


@dataclass(frozen=True)
class Platform:
    """The kind of machine that an environment is made for: architecture, C library, CPUs and Pythons."""

    place: str  # The machines of this kind, in words, for messages.
    machine: str  # Architecture, such as "x86_64".
    glibc: tuple[int, ...]  # Version, such as (2, 35); empty if the machines have another C library.
    pythons: tuple[Python, ...]
    level: str  # Level of the CPUs, such as "x86-64-v3"; `machine` for an architecture without levels.
    # For a platform of compute nodes: the architecture and the Pythons of the edge node, and the `srun` words that run a command
    # on a compute node. Empty for the platform of the edge node itself.
    edge_machine: str = ""
    edge_pythons: tuple[Python, ...] = ()
    on_node: tuple[str, ...] = ()

    def runner(self, python: Python | None) -> tuple[str, ...]:
        """Return the `srun` words to put before a command that builds an environment, so that it runs on a compute node.

        `python` is the Python of the cluster that the command needs; None if the command needs no such Python. Returns () if the
        command can run on the edge node.
        """
        here = not self.on_node or (self.edge_machine == self.machine and (python is None or python in self.edge_pythons))
        return () if here else self.on_node


def look_at(connection: Connection, wanted: str, queues: Sequence[SlurmQueueConfig], age: float, log: Any) -> Platform:
    """Return the common platform of the nodes that `queues` ask for; without queues, the platform of the edge node.

    Args:
        connection: the connection to the edge node.
        wanted: the Python to look for, as a command or path; "" for all Pythons with a usual name.
        queues: the queue configurations of the jobs that will use the environment.
        age: seconds for which an earlier answer of a machine is used again.
        log: a logger.

    If no node is free, an older answer is used. If there is no older answer, the function logs a warning and returns the platform
    of the edge node. Raises `ValueError` if the nodes of the queues have different architectures, or if the platform of the edge
    node cannot be found.
    """
    found = _found(connection, wanted, [], age)
    if "problem" in found:
        raise ValueError(f"the platform of the edge node {connection.place} cannot be found: {found['problem']}")
    here = _platform(f"the edge node {connection.place}" if queues else connection.place, found)
    nodes = []
    for queue in {tuple(srun_command(each, None)): each for each in queues}.values():
        place = f"partition {queue.partition} of {connection.place}" if queue.partition else f"a node of {connection.place}"
        found = _found(connection, wanted, srun_command(queue, _PATIENCE), age)
        if "problem" in found:
            log.warning(
                f"[rayslurm] environment: it is made for the platform of the edge node, as that of {place} is not known: "
                f"{found['problem']}; auto_detect_platform=False does not look at it"
            )
            return here
        nodes.append(_platform(place, found, here, tuple(srun_command(queue, None))))
    return common(nodes) if nodes else here


def common(platforms: Sequence[Platform]) -> Platform:
    """Return a platform whose programs run on all the given platforms; raises `ValueError` if the architectures differ."""
    first, *others = platforms
    for other in others:
        if other.machine != first.machine:
            what = f"{first.place} has {first.machine}, and {other.place} has {other.machine}"
            raise ValueError(f"{what}, so that no environment runs on both; use an environment for each that is there already")
        first = replace(
            first,
            place=f"{first.place} and {other.place}",
            glibc=min(first.glibc, other.glibc),
            pythons=tuple(each for each in first.pythons if each in other.pythons),
            level=min(first.level, other.level),
        )
    return first


def cached(*names: str) -> str:
    """Return a path in this machine's cache directory, made of the given names, and create the parent directories of the path."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    path = os.path.join(cache if os.path.isabs(cache) else os.path.expanduser("~/.cache"), "dagster-rayslurm", *names)
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    return path


def _found(connection: Connection, wanted: str, runner: list[str], age: float) -> dict[str, Any]:
    """Return the dict by which `edge.environment.platform` describes a machine of the cluster; this machine caches the dict.

    `wanted` is the Python to look for, as a command or path; "" for all Pythons with a usual name. `runner` has the `srun` words
    that run a command on the machine; [] for the edge node. A cached dict is returned if the dict is at most `age` seconds old.
    Otherwise the cluster is asked. If the cluster gives no answer, a cached dict of any age is returned; without a cached dict,
    the result is a dict with a `problem`.
    """
    key = json.dumps([connection.place, wanted, runner, _FORMAT])
    path = cached("platforms", hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:32] + ".json")
    known: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError), open(path, encoding="utf-8") as file:
        known = json.load(file)
        if os.stat(path).st_mtime > time.time() - age:
            return known
    timeout = _LOOK_TIMEOUT + (_PATIENCE if runner else 0)
    found: dict[str, Any] = connection.call(edge.platform, wanted, runner, timeout, repeat=True, timeout=timeout + 10)
    if "problem" in found:
        return known or found
    files.write(path, json.dumps(found).encode(), 0o600)
    return found


def _platform(place: str, found: dict[str, Any], here: Platform | None = None, on_node: tuple[str, ...] = ()) -> Platform:
    pythons = tuple(Python(path, tuple(version), name, machine) for path, version, name, machine in found["pythons"])
    glibc = tuple(map(int, filter(None, found["glibc"].split("."))))
    level = cpu_level(found["machine"], found["cpu"].split())
    edge_machine, edge_pythons = (here.machine, here.pythons) if here else ("", ())
    return Platform(place, found["machine"], glibc, pythons, level, edge_machine, edge_pythons, on_node)


def cpu_level(machine: str, flags: Sequence[str]) -> str:
    """Return the level of a CPU, such as "x86-64-v3". If the architecture `machine` has no levels, return `machine`.

    `flags` are the CPU's flags in /proc/cpuinfo.
    """
    if machine != "x86_64":
        return machine
    reached = "x86-64-v1"
    for level, needed in _LEVELS.items():
        if not set(needed.split()) <= set(flags):
            break
        reached = level
    return reached
