"""Tests of submitted and awaited runs on a real Slurm: one job for each key, and no job after a cancelled task."""

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg

from dagster_rayslurm import BashLauncher, ComputeResource, RunHandle

from ..conftest import pipes_script, wait_until
from .fixtures import Site

REPORTS = pipes_script("pipes.report_asset_materialization(metadata={'rows': 3}); open('model.txt', 'w').write('x')")
SUBMIT = """
import os, sys
from dagster_rayslurm import *
slurm = SlurmResource(
    ssh=SSHConnectionResource.from_env(),
    remote_base=os.environ["RAYSLURM_REMOTE_BASE"],
    queue=SlurmQueueConfig(partition="compute", time_limit="00:05:00"),
)
environment = PreDeployedEnvironment(path=os.environ["RAYSLURM_ENV_PATH"])
compute = ComputeResource(mode="slurm", slurm=slurm, environment=environment, default_launcher=BashLauncher())
print(compute.submit(payload_path=sys.argv[1], asset_key="model", key="2026-11-01", outputs=["model.txt"]).to_json())
"""
UNTIL_GO = """
import os, pathlib, time
while not pathlib.Path(os.environ["RAYSLURM_DATA_DIR"], "go").exists():
    time.sleep(0.1)
"""


def named(site: Site, name: str) -> list[str]:
    """Ids of the jobs with a name, over or not: Slurm remembers them for minutes."""
    return site.sh('squeue --states=all --noheader --format=%A --name="$1"', name).split()


def test_five_processes_with_one_key_submit_one_job(
    site: Site, slurm_compute: Callable[..., ComputeResource], script: Callable[[str], Any]
) -> None:
    command = [sys.executable, "-c", SUBMIT, str(script(REPORTS))]
    processes = [subprocess.Popen(command, env=site.environment, stdout=subprocess.PIPE, text=True) for _ in range(5)]
    handles = [RunHandle.from_json(each.communicate(timeout=120)[0]) for each in processes]
    assert len({each.run for each in handles}) == 1 and named(site, handles[0].job_name) == [handles[0].job_id]

    @dg.asset
    def model(context: dg.AssetExecutionContext, compute: ComputeResource) -> Any:
        run = compute.reattach(handles[0], context=context)
        assert [path.read_text() for path in run.outputs] == ["x"]
        return run.get_materialize_result()

    result = dg.materialize([model], resources={"compute": slurm_compute(default_launcher=BashLauncher())})
    assert result.asset_materializations_for_node("model")[0].metadata["rows"].value == 3


def test_a_submitted_job_that_waits_is_cancelled_with_its_secrets(
    site: Site, slurm_compute: Callable[..., ComputeResource], script: Callable[[str], Any]
) -> None:
    compute = slurm_compute(default_launcher=BashLauncher())
    handle = compute.submit(
        payload_path=script(REPORTS), asset_key="model", secret_env={"TOKEN": "x"}, queue={"extra_sbatch": ["--hold"]}
    )
    secrets = f"{site.base}/runs/{handle.run}/secrets.json"
    assert b"TOKEN" in site.connection.read(secrets, 0, 1000)
    done = site.rayslurm("cancel", handle.run)
    assert done.returncode == 0, done
    assert handle.job_id not in site.jobs() and not site.connection.read(secrets, 0, 1000)


def test_a_cancelled_task_ends_its_job_and_no_other(
    site: Site, slurm_compute: Callable[..., ComputeResource], script: Callable[[str], Any], tmp_path: Path
) -> None:
    payload = script(UNTIL_GO)
    results: list[Any] = []

    @dg.asset
    async def several(context: dg.AssetExecutionContext, compute: ComputeResource) -> Any:
        runs = [compute.run_async(context=context, payload_path=payload, uses_pipes=False) for _ in range(4)]
        tasks = [asyncio.ensure_future(each) for each in runs]
        assert await asyncio.to_thread(wait_until, lambda: len(site.jobs()) == 4, 60), site.jobs()
        tasks[0].cancel()
        assert await asyncio.to_thread(wait_until, lambda: len(site.jobs()) == 3, 60), site.jobs()
        site.sh('mkdir -p "$1/data" && touch "$1/data/go"', site.base)
        results.extend(await asyncio.gather(*tasks, return_exceptions=True))
        return dg.MaterializeResult()

    resources = {"compute": slurm_compute(default_launcher=BashLauncher(grace_period=2))}
    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
        assert dg.materialize([several], resources=resources, instance=instance).success
    assert isinstance(results[0], asyncio.CancelledError) and [each.job_id is not None for each in results[1:]] == [True] * 3
    assert site.jobs() == []
