"""The table of faults names tests that there are, and every test of a fault stands in it."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
TABLE = (TESTS.parent / "docs" / "faults.md").read_text()
NAMED = set(re.findall(r"`([a-z]+/test_\w+\.py::test_\w+)`", TABLE))
ELSEWHERE = {
    "faults/test_injection.py",  # Each kind of text has a test there; the table tells what holds for all of them.
    "faults/test_doctor.py",  # Its faults are defects of a site, each with the line that names it.
    "faults/test_jobs.py",
    "faults/test_sessions.py",
}
"""Rooms with tests that are of no fault, too."""


def _tests_in(path: Path) -> set[str]:
    functions = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    return {f"{path.relative_to(TESTS)}::{each.name}" for each in functions if each.name.startswith("test_")}


def test_the_tests_that_are_named_exist() -> None:
    assert len(NAMED) > 60
    there = set().union(*(_tests_in(TESTS / each.partition("::")[0]) for each in NAMED))
    assert not NAMED - there, NAMED - there


def test_no_fault_is_left_out() -> None:
    rooms = [path for path in (TESTS / "faults").glob("test_*.py") if str(path.relative_to(TESTS)) not in ELSEWHERE]
    assert len(rooms) > 9
    there = set().union(*map(_tests_in, rooms))
    assert not there - NAMED, there - NAMED
