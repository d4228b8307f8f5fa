"""The tags of a run with its Slurm jobs, which several processes write at the same time."""

import subprocess
import sys
from pathlib import Path

import dagster as dg

from dagster_rayslurm.execution.announce import JOB_ID

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
