"""One way to ask for an allocation in each mode that has one, so that a fault is tested in all to which it applies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dagster_rayslurm import ComputeResource, HetComponent, SlurmQueueConfig

HETJOB = pytest.param("slurm-hetjob", marks=[pytest.mark.stack, pytest.mark.thorough])
"""For a fault that hits a heterogeneous job as it does any other; what is its own is tested in any case."""

MODES = (pytest.param("slurm", marks=pytest.mark.stack), pytest.param("slurm-session", marks=pytest.mark.stack), HETJOB)


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make(mode: str, request: pytest.FixtureRequest) -> Callable[..., ComputeResource]:
    """Makes resources of a mode whose allocation has one node, or two: `queue` is the footprint of each of them."""
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
