"""The benchmarks' command on the stack: what it measures in a hurry is complete, kept and rendered."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.report import render
from benchmarks.results import read
from benchmarks.slurm.phases import PHASES
from stack.settings import ROOT

from ..stack.access import Stack


def test_a_hurried_run_measures_a_job_and_the_phases_of_a_cold_one(stack: Stack, tmp_path: Path) -> None:
    into = tmp_path / "results.json"
    command = [sys.executable, "-m", "benchmarks", "run", "slurm.bash", "phases", "--quick", "--no-peer", "--into", str(into)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    found = read(into)
    phases, bash = found.measured  # In the order of the report.
    whole = phases.figures[0]
    assert [sample.label for sample in whole.also] == [label for _, label in PHASES]
    assert sum(sample.median for sample in whole.also) == pytest.approx(whole.ours.median, abs=1.0)
    assert all(sample.median > 0 for sample in phases.figures[1].also)
    (only,) = bash.figures  # Its ratio may be small or large: by chance, Slurm starts either job a second later.
    assert only.by_hand is not None and only.ratio is not None and only.ratio > 0
    assert {"slurm", "ray", "dagster", "cpus"} <= found.parts[0].machine.keys()
    assert "phases.svg" in render(found, "results.json").charts
