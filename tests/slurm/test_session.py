"""Sessions on the stack: one allocation for many payloads, in one process and in several, and what becomes of it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from dagster_rayslurm import BashLauncher, ComputeResource, RunFailure, SessionConfig, SlurmQueueConfig, SlurmResource

from ..conftest import pipes_script, run_asset, small_ray, wait_until
from .conftest import Running, Site

RAY_QUEUE = {"mem": "2500M", "cpus_per_node": 2}

WHERE = pipes_script("""
import os
pipes.report_asset_materialization(metadata={"job": os.environ["SLURM_JOB_ID"], "value": os.environ.get("VALUE", "")})
""")

ON_RAY = pipes_script("""
import os, ray
ray.init()
seen = ray.get(ray.remote(lambda: os.environ["RAYSLURM_DATA_DIR"]).remote())
pipes.report_asset_materialization(metadata={
    "job": os.environ["SLURM_JOB_ID"], "address": ray.get_runtime_context().gcs_address, "data": seen,
    "nodes": len(ray.nodes()),
})
""")

Make = Callable[..., ComputeResource]


@pytest.fixture
def session_compute(slurm_compute: Make, site: Site) -> Iterator[Make]:
    """Makes resources for mode "slurm-session", whose sessions end with the test."""

    def make(session: dict[str, Any] | None = None, **fields: Any) -> ComputeResource:
        config = SessionConfig(**{"idle_timeout": 60, **(session or {})})
        return slurm_compute(**{"mode": "slurm-session", "session": config, **fields})

    yield make
    site.sh("scancel --quiet --me")


def metadata_of(failure: RunFailure) -> str:
    return str({key: value.value for key, value in failure.metadata.items()})


def test_two_assets_of_one_run_share_a_job(session_compute: Make, script: Any, site: Site) -> None:
    compute, payload = session_compute(), str(script(WHERE))

    def made(name: str, deps: list[Any]) -> Any:
        @dg.asset(name=name, deps=deps)
        def asset(context: dg.AssetExecutionContext, compute: ComputeResource) -> Any:
            return compute.run(context=context, payload_path=payload, secret_env={"VALUE": name}).get_materialize_result()

        return asset

    one = made("one", [])
    two = made("two", [one])
    result = dg.materialize([one, two], resources={"compute": compute})
    seen = [result.asset_materializations_for_node(name)[0].metadata for name in ("one", "two")]
    assert seen[0]["job"].value == seen[1]["job"].value == seen[0]["Slurm job ID"].value
    assert [each["value"].value for each in seen] == ["one", "two"]
    assert [each["Session reused"].value for each in seen] == [False, True]
    assert seen[0]["Slurm session"].value == seen[1]["Slurm session"].value and seen[0]["Slurm nodes"].value in ("c1", "c2")
    job = seen[0]["job"].value
    assert site.jobs() == [job] and "rayslurm-session-default-" in site.sh(f"squeue --me --noheader --format=%j -j {job}")
    # Nothing of a success stays but the session.
    assert site.sh('ls "$1/runs"', site.base).split() == []
    name = site.sh(f"squeue --me --noheader --format=%j -j {job}").strip()
    assert compute.cleanup_cluster("slurm-" + name.rpartition("-")[2])
    assert not compute.cleanup_cluster("slurm-" + name.rpartition("-")[2]) and not site.jobs()
