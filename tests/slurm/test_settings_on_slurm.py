"""Settings of an asset, and demand that can never be met, on two nodes of a real Slurm."""

import time
from collections.abc import Callable
from typing import Any

import dagster as dg
import pytest

from dagster_rayslurm import ComputeResource, RunFailure
from dagster_rayslurm.settings import KEY

from ..conftest import run_asset, small_ray

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

WAITS = """
import ray
ray.init()
ray.get([ray.remote(num_gpus=1)(lambda: None).remote() for _ in range(4)])
"""


def test_an_asset_has_its_own_nodes_and_never_waits_for_what_they_lack(
    slurm_compute: Callable[..., ComputeResource], script: Any
) -> None:
    compute = slurm_compute({"mem": "1500M"}, on_infeasible="fail", default_launcher=small_ray())
    failures: list[RunFailure] = []

    @dg.asset(op_tags={KEY: {"queue": {"num_nodes": 2}, "launcher": {"labels": {"zone": "a"}}}})
    def waits(context: dg.AssetExecutionContext, compute: ComputeResource) -> Any:
        requires = {"STRICT_SPREAD": [{"CPU": 1, "labels": {"zone": "a"}}] * 2}
        try:
            return compute.run(context=context, payload_path=script(WAITS), uses_pipes=False, requires=requires)
        except RunFailure as failure:
            failures.append(failure)
            raise

    began = time.monotonic()
    assert not dg.materialize([waits], resources={"compute": compute}, raise_on_error=False).success
    [failure] = failures
    text = str(failure.description)
    assert (
        failure.kind == "configuration" and "4 tasks or actors wait for CPU: 1, GPU: 1 each, and the cluster has no GPU" in text
    )
    assert "c1 has CPU: " in text and "c2 has CPU: " in text and time.monotonic() - began < 200


def test_demand_that_the_last_node_does_not_meet_either_fails(slurm_compute: Callable[..., ComputeResource], script: Any) -> None:
    """With `min_nodes`, the payload starts before all nodes have joined; a demand only fails it once they all have."""
    late = small_ray(min_nodes=1, health_check='[ "$(uname -n)" = c1 ] || sleep 25')
    compute = slurm_compute({"num_nodes": 2, "mem": "1500M"}, on_infeasible="fail", default_launcher=late)
    with dg.DagsterInstance.ephemeral() as instance:
        ran = run_asset(compute, script(WAITS), instance=instance, uses_pipes=False)
        said = [str(event.user_message) for event in instance.all_logs(ran.result.run_id)]
    first, second = [line for line in said if "unschedulable: " in line]
    assert "c2 has" not in first and "c2 has CPU: " in second
    assert ran.failure.kind == "configuration" and "c2 has CPU: " in str(ran.failure.description)
