"""What one payload uses on all its nodes: CPU time, memory and GPUs; and whether it has started Ray itself."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Set

from ..node.ray_jobs import RayJobs, logs_of
from ..node.resources import NodeResources
from ..node.usage import UsageSampler, merge_usage
from ..process import processes
from ..process.loop import Loop
from ..process.processes import recent_table
from ..protocol.record import Record
from .environment import LaunchContext

if TYPE_CHECKING:
    from .payload import Payload

# Usage is recorded again when the elapsed time or the peak memory has grown by such a factor; a long run has some hundred
# usage records.
_TIME_GROWTH, _MEMORY_GROWTH = 1.1, 1.05
# Seconds until the first look for the payload's own Ray, most seconds between two, and the growth of each pause.
_FIRST, _LONGEST, _GROWTH = 1.0, 15.0, 1.5
# What a raylet's argument with its resources begins with; amounts follow as in "CPU,2,memory,1024" (Ray 2.60).
_RESOURCES = b"--static_resource_list="


@dataclass
class UsageMeasurement:
    """Measures the usage of a payload on this node and on the worker nodes, from its construction to `finish` or `cancel`.

    `note` writes a record of the usage so far, so that a run leaves its figures even if Slurm kills the job.
    """

    loop: Loop
    nonce: str
    launch: LaunchContext
    note: Callable[[Record], None]

    def __post_init__(self) -> None:
        launch = self.launch
        self._workers = launch.workers
        self._noted = (0.0, 0)
        self._total: Dict[str, Any] = {}
        self._jobs: Optional[RayJobs] = None
        if launch.shared_ray_pid is not None and launch.ray_temp_dir is not None:
            self._jobs = RayJobs(logs_of(launch.ray_temp_dir), launch.shared_ray_pid)
        self._announced: Optional[Set[str]] = None
        self._sampler = UsageSampler(
            self.loop, launch.gpus, launch.ray_temp_dir, launch.foreign_pids, jobs=self._jobs, sampled=self._sampled
        )
        self._announce_jobs()

    def finish(self, pid: int, rusage: Any, hostname: str, done: Callable[[], None]) -> bool:
        """Take the last figures after the payload's process `pid` has ended; `rusage` are the kernel's (getrusage(2)).

        Returns whether there are worker nodes; then `done` is called when they have sent their figures or the time for that is
        over. In their usage this node is called `hostname`.
        """
        own = self._total = self._sampler.stop(pid, rusage)
        self._announce_jobs()

        def collected(others: Dict[str, Dict[str, Any]]) -> None:
            with contextlib.suppress(Exception):  # Malformed figures of a worker node must not fail the payload.
                self._total = merge_usage({hostname: own, **others})
            done()

        return self._collect(collected)

    def cancel(self) -> None:
        """Stop measuring on all nodes."""
        self._sampler.cancel()
        self._collect(lambda _: None)

    def current(self) -> Dict[str, Any]:
        """The usage of all nodes, or of this node alone until the other nodes have sent theirs; empty before the first sample."""
        usage = self._total or self._sampler.meter.summary()
        return usage if usage["elapsed"] else {}

    def _sampled(self) -> None:
        self._announce_jobs()
        usage = self._sampler.meter.summary()
        points = usage.pop("points")
        elapsed, peak = self._noted
        if points and (usage["elapsed"] > _TIME_GROWTH * elapsed or usage["peak_memory"] > _MEMORY_GROWTH * peak):
            self._noted = usage["elapsed"], usage["peak_memory"]
            self.note({"type": "usage", "usage": usage, "memory": points[-1][2]})

    def _announce_jobs(self) -> None:
        """Have the worker nodes measure usage too, and tell them of new Ray jobs of the payload in a shared Ray cluster."""
        jobs = set() if self._jobs is None else self._jobs.job_ids
        if self._workers is not None and jobs != self._announced:
            self._announced = set(jobs)
            self._workers.measure(self.nonce, None if self._jobs is None else sorted(jobs))

    def _collect(self, done: Callable[[Dict[str, Dict[str, Any]]], None]) -> bool:
        """Have the worker nodes stop measuring and pass their figures to `done`; returns whether there are worker nodes."""
        workers, self._workers = self._workers, None
        if workers is not None:
            workers.collect(self.nonce, done)
        return workers is not None


def watch_own_ray(loop: Loop, payload: Payload, node: NodeResources) -> None:
    """Check, while a payload runs, whether it has started Ray itself; writes at most one warning to the Dagster log."""

    def check(pause: float) -> None:
        if payload.ended or payload.ending.exit is not None:
            return
        with contextlib.suppress(OSError):  # Out of file descriptors, perhaps; the next check may succeed.
            for command in _raylet_commands(payload.run_dir, pause / 2):
                message = own_ray_warning(raylet_resources(command), node, payload.spec.uses_ray)
                if message is not None:
                    return payload.phase("own-ray", message)
        later = min(pause * _GROWTH, _LONGEST)
        loop.call_later(later, lambda: check(later))

    loop.call_later(_FIRST, lambda: check(_FIRST))


def _raylet_commands(run_dir: str, max_age: float) -> List[bytes]:
    """Command lines of the raylets (Ray's daemon on each node) whose environment names the run directory."""
    entry = "RAYSLURM_RUN_DIR=" + run_dir
    _, table = recent_table(max_age)
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
    """The warning about Ray that a payload has started itself with these resources; None if there is no reason for one.

    With `has_cluster` the launcher gave the payload a Ray cluster, which idles now.
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
    limits = "the payload's own Ray takes more than is granted: %s; set the arguments of ray.init or `ray start`"
    return limits % " and ".join(excess) if excess else None
