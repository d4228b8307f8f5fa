"""Faults that once made histories break a promise: each is run again with several seeds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .history import Fault, Outcome
from .scenarios import SCENARIOS

SEEDS = range(10)


@dataclass(frozen=True)
class Kept:
    """A history to repeat: what was wrong, the scenario, what holds for it, and its faults."""

    defect: str
    scenario: str
    faults: tuple[Fault, ...]
    fixed: dict[str, Any] = field(default_factory=dict)


KEPT = [
    Kept(
        "a retry ran the payload beside a requeued job, because the record had an end of the run before",
        "slurm",
        (Fault(50.0, "requeue_jobs"), Fault(99.0, "kill_dagster", 5.0)),
        {"requeue": True, "seconds": 400.0, "lag": 0.0, "starts": True},
    ),
    Kept(
        "a retry ran the payload beside a job that waited to run again after a requeue",
        "slurm",
        (Fault(50.0, "requeue_jobs"), Fault(51.5, "kill_dagster", 0.1)),
        {"requeue": True, "seconds": 400.0, "lag": 0.0, "starts": False},
    ),
    Kept(
        "a retry while slurmctld was down failed with the kind `record`",
        "slurm",
        (Fault(3.0, "kill_dagster", 5.0), Fault(4.0, "stop_slurmctld", 60.0)),
        {"seconds": 30.0, "lag": 0.0},
    ),
    Kept(
        "a retry ran the payload beside one that an attempt had begun to end when it was killed",
        "slurm",
        (Fault(60.0, "interrupt"), Fault(60.1, "kill_dagster", 5.0)),
        {"seconds": 400.0, "lag": 0.0, "starts": True},
    ),
    Kept(
        "a retry submitted a job beside a waiting one that an attempt had begun to cancel when it was killed",
        "slurm",
        (Fault(6.0, "interrupt"), Fault(6.05, "kill_dagster", 5.0)),
        {"seconds": 400.0, "lag": 0.0, "starts": False},
    ),
]


def run_kept() -> Iterator[tuple[Kept, Outcome]]:
    """Run all kept histories; yields those that break a promise."""
    for kept in KEPT:
        for seed in SEEDS:
            history = SCENARIOS[kept.scenario](seed, faults=kept.faults, fixed=kept.fixed)
            outcome = history.run()
            if outcome.problem:
                yield kept, outcome
