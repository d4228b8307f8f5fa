"""What is read once on a node, however many payloads are measured there."""

from __future__ import annotations

import time
from typing import Dict, Tuple

from . import processes
from .gpus import Gpus
from .loop import Loop
from .processes import Process

Table = Tuple[float, Dict[int, Process]]
"""All processes of this machine, and when they were looked at (`time.monotonic`)."""


class Gauges:
    """The table of processes and the figures of the GPUs.

    Args:
        loop: where everything happens.
    """

    def __init__(self, loop: Loop) -> None:
        self.gpus = Gpus(loop)
        self._table: Table = (float("-inf"), {})

    def processes(self, age: float = 0.0) -> Table:
        """All processes of this machine.

        Args:
            age: seconds that the last look may be old.
        """
        now = time.monotonic()
        if now - self._table[0] >= age:
            self._table = (now, processes.table())
        return self._table
