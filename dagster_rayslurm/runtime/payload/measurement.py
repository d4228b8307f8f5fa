"""Measures what one payload uses on all its nodes: CPU time, memory and GPUs."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Dict, Optional, Set

from ..node.ray_jobs import RayJobs, logs_of
from ..node.usage import UsageSampler, merge_usage
from ..process.loop import Loop
from ..protocol.record import Record
from .environment import LaunchContext

_TIME_GROWTH, _MEMORY_GROWTH = 1.1, 1.05
"""Usage is recorded again when the elapsed time or the peak memory has grown by such a factor; a long run has some hundred
usage records."""


class UsageMeasurement:
    """Measures the usage of a payload on this node and on the worker nodes, from its construction to `finish` or `cancel`.

    Args:
        nonce: the random id of the payload.
        context: what measures the usage.
        note: writes a record of the usage so far, so that a run leaves its figures even if Slurm kills the job.
    """

    def __init__(self, loop: Loop, nonce: str, context: LaunchContext, note: Callable[[Record], None]) -> None:
        self._nonce = nonce
        self._workers = context.workers
        self._note = note
        self._noted = (0.0, 0)
        self._total: Dict[str, Any] = {}
        self._jobs: Optional[RayJobs] = None
        if context.shared_ray_pid is not None and context.ray_temp_dir is not None:
            self._jobs = RayJobs(logs_of(context.ray_temp_dir), context.shared_ray_pid)
        self._announced: Optional[Set[str]] = None
        self._sampler = UsageSampler(
            loop, context.gpus, context.ray_temp_dir, context.foreign_pids, jobs=self._jobs, sampled=self._sampled
        )
        self._announce_jobs()

    def finish(self, pid: int, rusage: Any, hostname: str, done: Callable[[], None]) -> bool:
        """Take the last figures after the payload's process has ended.

        Args:
            pid: the payload's process.
            rusage: the kernel's figures for that process (getrusage(2)).
            hostname: the name of this node in the usage of several nodes.
            done: called when the worker nodes have sent their figures or the time for that is over.

        Returns:
            Whether `done` will be called; False if there are no worker nodes.
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
        """Called after each sample on this node: writes a usage record if the figures have grown enough."""
        self._announce_jobs()
        usage = self._sampler.meter.summary()
        points = usage.pop("points")
        elapsed, peak = self._noted
        if points and (usage["elapsed"] > _TIME_GROWTH * elapsed or usage["peak_memory"] > _MEMORY_GROWTH * peak):
            self._noted = usage["elapsed"], usage["peak_memory"]
            self._note({"type": "usage", "usage": usage, "memory": points[-1][2]})

    def _announce_jobs(self) -> None:
        """Have the worker nodes measure usage too, and tell them of new Ray jobs of the payload in a shared Ray cluster."""
        jobs = set() if self._jobs is None else self._jobs.job_ids
        if self._workers is not None and jobs != self._announced:
            self._announced = set(jobs)
            self._workers.measure(self._nonce, None if self._jobs is None else sorted(jobs))

    def _collect(self, done: Callable[[Dict[str, Dict[str, Any]]], None]) -> bool:
        """Have the worker nodes stop measuring and pass their figures to `done`; returns whether there are worker nodes."""
        workers, self._workers = self._workers, None
        if workers is not None:
            workers.collect(self._nonce, done)
        return workers is not None
