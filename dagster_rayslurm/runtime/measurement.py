"""What one payload uses: on this node and, where there are any, on the others."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Dict, Iterable, Optional

from .gpus import Gpus
from .loop import Loop
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
        gpus: tells how busy the GPUs of this node are.
    """

    def __init__(
        self,
        loop: Loop,
        nonce: str,
        spill_dir: Optional[str],
        others: Callable[[], Iterable[int]],
        team: Optional[Others],
        gpus: Gpus,
    ) -> None:
        self.usage: Dict[str, Any] = {}
        """The figures, once there are any."""
        self._nonce = nonce
        self._sampler = Sampler(loop, spill_dir, others, gpus=gpus)
        self._team = team
        if team is not None:
            team.measure(nonce)

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

    def _collect(self, take: Callable[[Dict[str, Dict[str, Any]]], None]) -> bool:
        """Have the other nodes measure no longer, if they do, and hand over their figures."""
        team, self._team = self._team, None
        if team is not None:
            team.collect(self._nonce, take)
        return team is not None
