"""What `make test-stack` runs is there."""

import subprocess
import sys
from pathlib import Path

from ..core import CORE, SLOW, is_core

ROOT = Path(__file__).resolve().parents[2]


def test_each_entry_names_a_test() -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-m", "core"]
    listed = subprocess.run(
        [*command, *(f"tests/{path}" for path in {**CORE, **SLOW})], cwd=ROOT, capture_output=True, text=True
    ).stdout
    cases = [line for line in listed.splitlines() if line.startswith("tests/")]
    named = {f"tests/{path}::{entry}" for path, entries in (*CORE.items(), *SLOW.items()) for entry in entries}
    assert named - {*cases, *(case.partition("[")[0] for case in cases)} == set(), "tests/core.py names tests that are not there"


def test_an_entry_is_a_test_or_one_case_of_it() -> None:
    assert is_core("tests/slurm/test_starting.py::test_a_runtime_that_does_not_come")
    assert is_core("tests/slurm/test_bad_input.py::test_what_the_cluster_does_not_have[partition]")
    assert is_core("tests/faults/test_nodes.py::test_a_job_is_preempted[slurm]")
    assert not is_core("tests/faults/test_nodes.py::test_a_job_is_preempted[slurm-session]")
    assert not is_core("tests/slurm/test_starting.py::test_a_runtime_that_does_not_come", stack=False)
    assert is_core("tests/local/test_session_components.py::test_payloads_with_other_requirements", stack=False)
    assert not is_core("tests/unit/test_plan.py::test_anything")
