"""What Dagster shows of a Slurm job: tags by which runs are found, and an event with the way in. Whole runs on the fake Slurm."""

import base64
import re
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from dagster_rayslurm import BashLauncher, ComputeResource, SessionConfig, SlurmResource

from ..fake_slurm import FakeSlurm

pytestmark = pytest.mark.timeout(120)


def materialize(compute: ComputeResource, payload: str, names: list[str], instance: dg.DagsterInstance) -> Any:
    def of(name: str) -> dg.AssetsDefinition:
        @dg.asset(name=name)
        def asset(context: dg.AssetExecutionContext, compute: ComputeResource) -> Any:
            return compute.run(context=context, payload_path=payload, uses_pipes=False).get_materialize_result()

        return asset

    return dg.materialize([of(name) for name in names], resources={"compute": compute}, instance=instance)


@pytest.mark.parametrize("mode", ["slurm", "slurm-session"])
def test_runs_are_found_by_their_jobs(mode: str, fake_slurm: FakeSlurm, script: Any, tmp_path: Path) -> None:
    slurm = SlurmResource(remote_base=str(tmp_path / "base"), poll_interval=1)
    session = SessionConfig(idle_timeout=1)
    compute = ComputeResource(mode=mode, slurm=slurm, default_launcher=BashLauncher(), session=session)
    with dg.instance_for_test() as instance:
        both = materialize(compute, script("import time; time.sleep(0.5)"), ["a", "b"], instance)
        jobs = ("1", "2") if mode == "slurm" else ("1", "1")
        assert both.success
        found = instance.get_runs(dg.RunsFilter(tags={"dagster-rayslurm/job_id": jobs[1]}))
        assert [run.run_id for run in found] == [both.run_id]
        tags = {key: value for key, value in instance.get_run_by_id(both.run_id).tags.items() if "rayslurm" in key}
        named = {f"dagster-rayslurm/job_id.{step}": job for step, job in zip("ab", jobs, strict=True)}
        host = tags.pop("dagster-rayslurm/cluster")
        assert tags == {"dagster-rayslurm/job_id": jobs[1], **named} and host
        for step, job in zip("ab", jobs, strict=True):
            by_step = instance.get_runs(dg.RunsFilter(tags={f"dagster-rayslurm/job_id.{step}": job}))
            assert [run.run_id for run in by_step] == [both.run_id]
        logged = [entry.dagster_event for entry in instance.all_logs(both.run_id) if entry.dagster_event]
        events = [each for each in logged if each.is_engine_event and (each.message or "").startswith("[rayslurm] Slurm job")]
        said = [(each.step_key, {key: value.value for key, value in each.engine_event_data.metadata.items()}) for each in events]
        assert said == [(step, {"Slurm job ID": job, "Slurm cluster": host}) for step, job in zip("ab", jobs, strict=True)]
        figures = both.asset_materializations_for_node("b")[0].metadata
        svg = base64.b64decode(str(figures["Timeline"].value).rpartition("base64,")[2][:-1]).decode()
        phases = {name: float(seconds) for name, seconds in re.findall(r">([^<>]+): ([\d.]+) s<", svg)}
        assert 0.5 <= phases["payload runs"] <= float(figures["Elapsed (s)"].value) + 0.5
        if mode == "slurm":
            assert phases["waits for Slurm"] == round(float(figures["Queue wait (s)"].value), 1)
