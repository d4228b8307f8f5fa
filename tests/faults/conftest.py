"""Fixtures `mode` and `make`, which run a test of a fault in every mode that has an allocation; and each test in a container."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dagster_rayslurm import ComputeResource, HetComponent, SlurmQueueConfig

from ..slurm.container import repeat_inside
from ..slurm.fixtures import Site

HETJOB = pytest.param("slurm-hetjob", marks=[pytest.mark.stack, pytest.mark.thorough])
"""Heterogeneous jobs, only in the thorough tests: these faults hit them as other jobs. Other tests cover what differs."""

MODES = (pytest.param("slurm", marks=pytest.mark.stack), pytest.param("slurm-session", marks=pytest.mark.stack), HETJOB)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Called by pytest for each test function."""
    repeat_inside(metafunc)


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make(mode: str, site: Site, request: pytest.FixtureRequest) -> Callable[..., ComputeResource]:
    """A function that makes a resource of the current mode, for an allocation of one or two nodes.

    Its argument `queue` has fields of the queue configuration for each node.
    """
    fixture = "session_compute" if mode == "slurm-session" else "slurm_compute"
    compute = request.getfixturevalue(fixture)

    def made(nodes: int = 1, queue: dict[str, Any] | None = None, **fields: Any) -> ComputeResource:
        footprint = {"time_limit": "00:05:00", "mem": "2500M" if nodes > 1 else "500M", "cpus_per_node": 2, **(queue or {})}
        if mode != "slurm-hetjob":
            return compute({"num_nodes": nodes, **footprint}, **fields)
        queues = [SlurmQueueConfig(**{"partition": partition, **footprint}) for partition in ("compute", "gpu")]
        components = [HetComponent(component_id=name, queue=each) for name, each in zip(("first", "other"), queues, strict=True)]
        return compute(mode=mode, components=components, **fields)

    return made
