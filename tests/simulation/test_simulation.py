"""The simulator, on a fixed list of seeds, and on the faults that once broke a promise."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("greenlet")

from .__main__ import fixed_hashes

BUDGET = 60
"""Most seconds for the fixed seeds; on a slow machine fewer of them run."""


def simulate(*arguments: str) -> str:
    command = [sys.executable, "-m", "tests.simulation", *arguments]
    done = subprocess.run(command, env=fixed_hashes(), capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, f"{' '.join(command[1:])}\n{done.stdout}{done.stderr}"
    return done.stdout


def test_promises_hold_in_histories_with_faults() -> None:
    print(simulate("--count", "2000", "--seconds", str(BUDGET)))


def test_histories_that_broke_a_promise_keep_it() -> None:
    print(simulate("--kept"))


def test_a_seed_repeats_its_history() -> None:
    assert simulate("--seed", "7", "--trace") == simulate("--seed", "7", "--trace")
