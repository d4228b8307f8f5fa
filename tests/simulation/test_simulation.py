"""The simulator, on a fixed list of seeds, and on those that once broke a promise."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("greenlet")

from .__main__ import fixed_hashes

BUDGET = 60
"""Most seconds for the fixed seeds; on a slow machine fewer of them run."""
KEPT = {
    "a retry ran the payload beside a requeued job: the record had an end of the run before": [
        ("slurm", 34, ""),
        ("slurm", 2015, ""),
        ("slurm", 2312, ""),
    ],
    "a retry failed with the kind `record` while slurmctld was down": [("slurm", 2619, "")],
}
"""Scenario, seed and left-out faults of histories that broke a promise once, by the defect."""


def simulate(*arguments: str) -> str:
    command = [sys.executable, "-m", "tests.simulation", *arguments]
    done = subprocess.run(command, env=fixed_hashes(), capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, f"{' '.join(command[1:])}\n{done.stdout}{done.stderr}"
    return done.stdout


def test_promises_hold_in_histories_with_faults() -> None:
    print(simulate("--count", "1500", "--seconds", str(BUDGET)))


@pytest.mark.parametrize("defect", KEPT)
def test_histories_that_broke_a_promise_keep_it(defect: str) -> None:
    for scenario, seed, without in KEPT[defect]:
        simulate("--scenario", scenario, "--seed", str(seed), *(["--without", without] if without else []))


def test_a_seed_repeats_its_history() -> None:
    assert simulate("--seed", "7", "--trace") == simulate("--seed", "7", "--trace")
