"""The scenarios by name, and which one a seed runs."""

from __future__ import annotations

import random

from .cores import BarrierOfComponents, MembershipOfNodes, QueueOfPayloads
from .history import History
from .sessions import Sessions
from .slurm_mode import SlurmMode

SCENARIOS: dict[str, type[History]] = {
    each.name: each for each in (SlurmMode, Sessions, QueueOfPayloads, BarrierOfComponents, MembershipOfNodes)
}
SHARES = {"slurm": 6, "session": 3, "queue": 1, "barrier": 1, "membership": 1}
"""How often a seed chooses each scenario."""


def scenario_of(seed: int) -> str:
    """The name of the scenario that a seed runs."""
    return random.Random(f"scenario of {seed}").choices(list(SHARES), list(SHARES.values()))[0]
