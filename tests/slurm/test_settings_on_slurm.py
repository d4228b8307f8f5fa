"""Settings of an asset, and demand that can never be met, on two nodes of a real Slurm."""

import time
from collections.abc import Callable
from typing import Any

import dagster as dg
import pytest

from dagster_rayslurm import ComputeResource, RunFailure
from dagster_rayslurm.settings import KEY

from ..conftest import small_ray

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
