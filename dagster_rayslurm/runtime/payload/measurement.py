"""What one payload uses: on this node and, where there are any, on the others."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Dict, Iterable, List, Optional

from ..node.usage import Gauges, RayJobs, Sampler, merge
from ..node.worker_node import WorkerNodes
from ..process.loop import Loop
from ..protocol.record import Record
from ..ray.prestart import logs_of

_LONGER, _LARGER = 1.1, 1.05
"""Growth of the time and of the peak memory after which figures are written."""


class Measurement:
    """Measures from now on.

    Args:
        loop: where everything happens.
        nonce: the payload's.
        spill_dir: Ray's temporary directory, or None.
        others: processes that, with all below them, are other payloads' own.
        team: the other nodes, which measure as well, or None.
        gauges: what is read once on this node.
        shared_ray: tells the process of a Ray cluster that payloads share; None for a cluster of the payload's own.
        keep: writes records, so that a job that Slurm kills leaves its figures.
    """

    def __init__(
        self,
        loop: Loop,
        nonce: str,
        spill_dir: Optional[str],
        others: Callable[[], Iterable[int]],
        team: Optional[WorkerNodes],
        gauges: Gauges,
        shared_ray: Optional[Callable[[], Optional[int]]],
        keep: Callable[[Record], None],
    ) -> None:
        self.usage: Dict[str, Any] = {}
        """The figures, once there are any."""
        self._nonce = nonce
        jobs = None
        if shared_ray is not None and spill_dir is not None:
            jobs = RayJobs(logs_of(spill_dir), shared_ray, self._have_measured)
        self._team = team
        self._keep = keep
        self._kept = (0.0, 0)
        self._sampler = Sampler(loop, gauges, spill_dir, others, jobs=jobs, sampled=self._keep_sample)
        self._have_measured(None if jobs is None else [])

    def end(self, pid: int, rusage: Any, hostname: str, done: Callable[[], None]) -> bool:
        """Take the last figures.

        Args:
            pid: the payload's process, which has ended.
            rusage: what the kernel says of it.
            hostname: what this node calls itself.
            done: called once the figures of the other nodes are there too, or do not come.

        Returns:
            Whether other nodes are asked for theirs.
        """
        self.usage = self._sampler.stop(pid, rusage)

        def taken(others: Dict[str, Dict[str, Any]]) -> None:
            with contextlib.suppress(Exception):  # Figures that no node of this version tells are worth no payload.
                self.usage = merge({hostname: self.usage, **others})
            done()

        return self._collect(taken)

    def give_up(self) -> None:
        """Measure no longer, on any node."""
        self._sampler.cancel()
        self._collect(lambda _: None)

    def so_far(self) -> Dict[str, Any]:
        """The figures, or those of this node as long as there are no others; empty before the first sample."""
        usage = self.usage or self._sampler.meter.summary()
        return usage if usage["elapsed"] else {}

    def _keep_sample(self) -> None:
        """Write the figures of this node if they have grown enough; a long run has some hundred of them."""
        usage = self._sampler.meter.summary()
        points = usage.pop("points")
        elapsed, peak = self._kept
        if points and (usage["elapsed"] > _LONGER * elapsed or usage["peak_memory"] > _LARGER * peak):
            self._kept = usage["elapsed"], usage["peak_memory"]
            self._keep({"type": "usage", "usage": usage, "memory": points[-1][2]})

    def _have_measured(self, jobs: Optional[List[str]]) -> None:
        """Have the other nodes measure the payload, which has these jobs in a cluster that is shared."""
        if self._team is not None:
            self._team.measure(self._nonce, jobs)

    def _collect(self, take: Callable[[Dict[str, Dict[str, Any]]], None]) -> bool:
        """Have the other nodes measure no longer, if they do, and hand over their figures."""
        team, self._team = self._team, None
        if team is not None:
            team.collect(self._nonce, take)
        return team is not None
