"""What `make test-stack` runs is there."""

from ..core import CORE, is_core, unknown_entries


def test_an_entry_without_a_test_is_named() -> None:
    """A run of all tests ends at once if there is such an entry."""
    path, [first, *others] = next((path, entries) for path, entries in CORE.items() if len(entries) > 1)
    found = unknown_entries([f"tests/{path}::{first}[a case]"])
    assert f"tests/{path}::{first}" not in found and f"tests/{path}::{others[0]}" in found


def test_an_entry_is_a_test_or_one_case_of_it() -> None:
    assert is_core("tests/slurm/test_starting.py::test_a_runtime_that_does_not_come")
    assert is_core("tests/slurm/test_bad_input.py::test_what_the_cluster_does_not_have[partition]")
    assert is_core("tests/faults/test_nodes.py::test_a_job_is_preempted[slurm]")
    assert not is_core("tests/faults/test_nodes.py::test_a_job_is_preempted[slurm-session]")
    assert not is_core("tests/slurm/test_starting.py::test_a_runtime_that_does_not_come", stack=False)
    assert is_core("tests/local/test_session_components.py::test_payloads_with_other_requirements", stack=False)
    assert not is_core("tests/unit/test_plan.py::test_anything")
