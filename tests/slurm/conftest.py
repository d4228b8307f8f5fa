"""Tests of this directory that docs/faults.md names are repeated in containers, as all of tests/faults."""

from pathlib import Path

import pytest

from .container import repeat_inside

TABLE = (Path(__file__).parents[2] / "docs" / "faults.md").read_text()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Called by pytest for each test function."""
    if f"`slurm/{metafunc.definition.path.name}::{metafunc.function.__name__}`" in TABLE:
        repeat_inside(metafunc)
