"""The tags of a run with its Slurm jobs, which several processes write at the same time."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
from dagster._core.definitions.job_base import InMemoryJob
from dagster._core.execution.api import execute_run

from dagster_rayslurm import BashLauncher, ComputeResource
from dagster_rayslurm.execution.announce import CLUSTER, JOB_ID, announce
from dagster_rayslurm.ssh.local import LocalConnection

COUNT = 15
WRITER = """
import pathlib, sys, time
import dagster as dg
from dagster_rayslurm.execution.announce import job_tags, write_tags

directory, run_id, name = sys.argv[1:]
base = pathlib.Path(directory, "base")
with dg.DagsterInstance.local_temp(directory) as instance:
    pathlib.Path(directory, "ready " + name).touch()
    until = time.monotonic() + 60
    while len(list(pathlib.Path(directory).glob("ready *"))) < 2 and time.monotonic() < until:
        time.sleep(0.001)
    for number in range({count}):
        write_tags(instance, run_id, job_tags(str(number), "edge", name + str(number)), base)
"""


def test_two_processes_that_tag_a_run_lose_no_job(tmp_path: Path) -> None:
    with dg.DagsterInstance.local_temp(str(tmp_path), overrides={"telemetry": {"enabled": False}}) as instance:
        run_id = dg.materialize([dg.asset(name="scores")(lambda: None)], instance=instance).run_id
        command = [sys.executable, "-c", WRITER.format(count=COUNT), str(tmp_path), run_id]
        writers = [subprocess.Popen([*command, name]) for name in "ab"]
        assert [each.wait(120) for each in writers] == [0, 0]
        run = instance.get_run_by_id(run_id)
        assert run is not None
        found = {key: value for key, value in run.tags.items() if key.startswith(f"{JOB_ID}.")}
        assert found == {f"{JOB_ID}.{name}{number}": str(number) for name in "ab" for number in range(COUNT)}
        assert run.tags[JOB_ID] == str(COUNT - 1)


def test_the_event_of_a_job_says_how_its_dashboard_is_found(tmp_path: Path) -> None:
    ray: Any = SimpleNamespace(dashboard=True)

    @dg.asset
    def scores(context: dg.AssetExecutionContext) -> None:
        announce(context.op_execution_context, tmp_path, "17", "slurm-abcd", ray, "0000aaaa-scores-0001", LocalConnection())

    with dg.DagsterInstance.local_temp(str(tmp_path), overrides={"telemetry": {"enabled": False}}) as instance:
        run_id = dg.materialize([scores], instance=instance).run_id
        events = [each.dagster_event for each in instance.all_logs(run_id) if each.dagster_event is not None]
    (event,) = [each for each in events if "Slurm job 17" in (each.message or "")]
    said = event.engine_event_data.metadata["Ray dashboard"].value
    assert "rayslurm dashboard --wait 0000aaaa-scores-0001" in str(said) and "--from MODULE:RESOURCE" in str(said)


def test_a_re_executed_run_is_not_found_by_the_job_of_its_parent(tmp_path: Path) -> None:
    """Its step fails before it has a job."""

    @dg.asset
    def scores(context: dg.AssetExecutionContext, compute: ComputeResource) -> None:
        if not context.run.parent_run_id:
            announce(context.op_execution_context, tmp_path, "17", "slurm-abcd", None, "0000aaaa-scores-0001", LocalConnection())
        compute.run(context=context, payload_path=tmp_path / "missing.py")

    compute = ComputeResource(local_base=str(tmp_path), default_launcher=BashLauncher())
    defs = dg.Definitions([scores], resources={"compute": compute}, executor=dg.in_process_executor)
    job = defs.resolve_implicit_global_asset_job_def()
    with dg.DagsterInstance.local_temp(str(tmp_path), overrides={"telemetry": {"enabled": False}}) as instance:

        def tags(run_id: str) -> dict[str, str]:
            run = instance.get_run_by_id(run_id)
            assert run is not None
            return dict(run.tags)

        first = job.execute_in_process(instance=instance, raise_on_error=False).run_id
        made = instance.create_run_for_job(job, tags=tags(first), parent_run_id=first, root_run_id=first)
        assert tags(made.run_id)[JOB_ID] == "17"
        assert not execute_run(InMemoryJob(job), made, instance).success
        assert tags(made.run_id)[JOB_ID] == tags(made.run_id)[CLUSTER] == "none" and tags(first)[JOB_ID] == "17"
