"""Usage of one payload on all its nodes."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Dict, Optional, Set

from ..node.ray_jobs import RayJobs
from ..node.usage import UsageSampler, merge_usage
from ..process.loop import Loop
from ..protocol.record import Record
from ..ray.prestart import logs_of
from .environment import LaunchContext

_TIME_GROWTH, _MEMORY_GROWTH = 1.1, 1.05
"""Factors by which the time or the peak memory must grow before usage is recorded again; a long run has some hundred records."""


class UsageMeasurement:
    """Measures the usage of a payload from now on, on this node and on the workers.

    `note` writes records of the usage so far, so that a job that Slurm kills leaves its figures.
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
        """Take the last figures, after the payload's process has ended with the kernel's figures `rusage`.

        Returns:
            Whether `done` will be called, when the workers' figures have come or will not come.
        """
        own = self._total = self._sampler.stop(pid, rusage)
        self._announce_jobs()

        def collected(others: Dict[str, Dict[str, Any]]) -> None:
            with contextlib.suppress(Exception):  # Unknown figures of a worker must not fail the payload.
                self._total = merge_usage({hostname: own, **others})
            done()

        return self._collect(collected)

    def cancel(self) -> None:
        """Stop measuring on all nodes."""
        self._sampler.cancel()
        self._collect(lambda _: None)

    def current(self) -> Dict[str, Any]:
        """The usage of all nodes, or of this one while there is no other figure; empty before the first sample."""
        usage = self._total or self._sampler.meter.summary()
        return usage if usage["elapsed"] else {}

    def _sampled(self) -> None:
        self._announce_jobs()
        usage = self._sampler.meter.summary()
        points = usage.pop("points")
        elapsed, peak = self._noted
        if points and (usage["elapsed"] > _TIME_GROWTH * elapsed or usage["peak_memory"] > _MEMORY_GROWTH * peak):
            self._noted = usage["elapsed"], usage["peak_memory"]
            self._note({"type": "usage", "usage": usage, "memory": points[-1][2]})

    def _announce_jobs(self) -> None:
        """Tell the workers to measure, and the payload's new jobs in a shared cluster."""
        jobs = set() if self._jobs is None else self._jobs.job_ids
        if self._workers is not None and jobs != self._announced:
            self._announced = set(jobs)
            self._workers.measure(self._nonce, None if self._jobs is None else sorted(jobs))

    def _collect(self, done: Callable[[Dict[str, Dict[str, Any]]], None]) -> bool:
        """Have the workers stop measuring and pass their figures to `done`; returns whether there are workers."""
        workers, self._workers = self._workers, None
        if workers is not None:
            workers.collect(self._nonce, done)
        return workers is not None
