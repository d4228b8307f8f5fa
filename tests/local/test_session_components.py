"""Warm clusters of several simulated components on this machine, shared by all payloads that fit."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dagster_rayslurm import ComputeResource, HetComponent, RayLauncher, SessionConfig, SlurmQueueConfig
from dagster_rayslurm.backends.base import Layout
from dagster_rayslurm.backends.sessions import local as local_session
from dagster_rayslurm.backends.sessions.request import send_request
from dagster_rayslurm.runtime.protocol.messages import Operation
from dagster_rayslurm.ssh.local import LocalConnection

from ..conftest import Ran, end_sessions, pipes_script, run_asset, small_ray

pytestmark = pytest.mark.ray

WHERE = pipes_script("""
import ray
ray.init()
labels = {node["NodeID"]: node["Labels"]["component"] for node in ray.nodes()}
pipes.report_asset_materialization(metadata={"driver": labels[ray.get_runtime_context().get_node_id()], "nodes": len(labels)})
""")


def component(name: str, launcher: RayLauncher | None = None, **queue: Any) -> HetComponent:
    asked = SlurmQueueConfig(**{"partition": name, "cpus_per_node": 1, **queue})
    return HetComponent(component_id=name, queue=asked, launcher=launcher or RayLauncher())


BOTH = [component("cpu"), component("gpu", gpus_per_node=2)]


@pytest.fixture
def warm(base: Path) -> Iterator[Callable[..., ComputeResource]]:
    """Makes resources with a warm cluster of two components."""

    def make(**fields: Any) -> ComputeResource:
        session = SessionConfig(**{"idle_timeout": 300, **fields.pop("session", {})})
        defaults: dict[str, Any] = {"components": BOTH, "default_launcher": small_ray(), "enable_cluster_reuse": True}
        return ComputeResource(local_base=str(base), session=session, **{**defaults, **fields})

    yield make
    end_sessions(base)


def cluster_of(ran: Ran) -> str:
    assert not ran.failures, ran.failures[0].description
    return ran.completed[0].cluster_id


def test_payloads_with_other_requirements(warm: Callable[..., ComputeResource], script: Any, base: Path) -> None:
    """A payload that requires less shares the cluster; one that requires more, or another head, gets its own or fails."""
    compute = warm()
    payload = script("import ray; ray.init()")
    first = cluster_of(run_asset(compute, payload, uses_pipes=False))
    (session,) = local_session.list_sessions(Layout(base))
    nodes: Any = send_request(LocalConnection(), session, {"op": Operation.DESCRIBE})["nodes"]
    assert [(node["component"], node["cpus"], node["gpus"]) for node in nodes] == [("cpu", 1, 0), ("gpu", 1, 2)]
    less = [component("gpu", gpus_per_node=1)]
    assert cluster_of(run_asset(compute, payload, uses_pipes=False, components=less)) == first
    strict = warm(session={"on_misfit": "error"})
    more = [component("cpu"), component("gpu", gpus_per_node=3)]
    for wanted, says in (
        ({"components": more}, "component 'gpu': RayLauncher.num_gpus_per_node=3"),
        ({"launcher": small_ray(component_id="gpu")}, "component_id='gpu'"),
    ):
        failure = run_asset(strict, payload, uses_pipes=False, **wanted).failure
        assert failure.kind == "configuration" and says in (failure.description or ""), failure.description
    moved = run_asset(compute, script(WHERE), launcher=small_ray(component_id="gpu"))
    assert cluster_of(moved) != first and (moved.metadata["driver"], moved.metadata["nodes"]) == ("gpu", 2)
