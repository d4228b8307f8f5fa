"""The tags of a run with its Slurm jobs, which several processes write at the same time."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg

from dagster_rayslurm.execution.announce import JOB_ID, announce
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
    running: Any = SimpleNamespace(job_id="17", cluster_id="slurm-abcd")
    plan: Any = SimpleNamespace(ray=SimpleNamespace(dashboard=True))

    @dg.asset
    def scores(context: dg.AssetExecutionContext) -> None:
        announce(context.op_execution_context, tmp_path, running, plan, "0000aaaa-scores-0001", LocalConnection())

    with dg.DagsterInstance.local_temp(str(tmp_path), overrides={"telemetry": {"enabled": False}}) as instance:
        run_id = dg.materialize([scores], instance=instance).run_id
        events = [each.dagster_event for each in instance.all_logs(run_id) if each.dagster_event is not None]
    (event,) = [each for each in events if "Slurm job 17" in (each.message or "")]
    said = event.engine_event_data.metadata["Ray dashboard"].value
    assert "rayslurm dashboard --wait 0000aaaa-scores-0001" in str(said) and "--from MODULE:RESOURCE" in str(said)
