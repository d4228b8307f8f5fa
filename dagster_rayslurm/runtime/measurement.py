"""What one payload uses: on this node and, where there are any, on the others."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Dict, Iterable, List, Optional

from .gauges import Gauges
from .loop import Loop
from .prestart import logs_of
from .ray_jobs import RayJobs
from .team import Others
from .usage import Sampler, merge


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
    """

    def __init__(
        self,
        loop: Loop,
        nonce: str,
        spill_dir: Optional[str],
        others: Callable[[], Iterable[int]],
        team: Optional[Others],
        gauges: Gauges,
        shared_ray: Optional[Callable[[], Optional[int]]],
    ) -> None:
        self.usage: Dict[str, Any] = {}
        """The figures, once there are any."""
        self._nonce = nonce
        jobs = None
        if shared_ray is not None and spill_dir is not None:
            jobs = RayJobs(logs_of(spill_dir), shared_ray, self._have_measured)
        self._team = team
        self._sampler = Sampler(loop, gauges, spill_dir, others, jobs=jobs)
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
