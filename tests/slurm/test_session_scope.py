"""`SessionConfig(scope="run")` on the stack: the job of a run's session ends with the run."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from dagster_rayslurm import ComputeResource, SessionConfig

from ..conftest import marked_processes, wait_until
from .fixtures import Site

pytestmark = pytest.mark.timeout(280)

PAYLOAD = """
import os, pathlib
data = pathlib.Path(os.environ["RAYSLURM_DATA_DIR"])
with (data / "jobs").open("a") as file:
    file.write(os.environ["SLURM_JOB_ID"] + "\\n")
"""

JOB = """
import sys
import dagster as dg
from dagster_rayslurm import *

def asset(name, deps):
    @dg.asset(name=name, deps=deps)
    def made(context: dg.AssetExecutionContext, compute: ComputeResource):
        return compute.run(context=context, payload_path={payload!r}, uses_pipes=False).get_materialize_result()
    return made

first = asset("first", [])
second = asset("second", [first])
slurm = SlurmResource(
    ssh=SSHConnectionResource.from_env(), remote_base={remote!r}, poll_interval=1,
    queue=SlurmQueueConfig(partition="compute", time_limit="00:05:00", {queue}),
)
compute = ComputeResource(
    mode="slurm-session", slurm=slurm, pre_deployed_env_path={env!r}, default_launcher=BashLauncher(grace_period=2),
    session=SessionConfig(scope="run", idle_timeout=250), local_base={base!r},
)
defs = dg.Definitions([first, second], jobs=[dg.define_asset_job("job", [first, second])], resources={{"compute": compute}})

def job():
    return defs.resolve_job_def("job")

if __name__ == "__main__":
    import scoped
    config = {{"execution": {{"config": {{sys.argv[1]: {{}}}}}}}}
    with dg.DagsterInstance.local_temp({home!r}) as instance:
        result = dg.execute_job(dg.reconstructable(scoped.job), instance=instance, run_config=config)
    sys.exit(0 if result.success else 1)
"""


class Job:
    """Starts the job in a process of its own."""

    def __init__(self, site: Site, directory: Path, payload: Path) -> None:
        self._site = site
        self._directory = directory
        self._payload = payload
        (directory / "home").mkdir()

    def start(self, executor: str, queue: str = "") -> subprocess.Popen[bytes]:
        where = {"remote": self._site.base, "env": self._site.env_path, "base": str(self._directory / "base")}
        text = textwrap.dedent(JOB).format(payload=str(self._payload), home=str(self._directory / "home"), queue=queue, **where)
        (self._directory / "scoped.py").write_text(text)
        env = {**os.environ, **self._site.stack.env, "PYTHONPATH": f"{self._directory}:{Path(__file__).parents[2]}"}
        with (self._directory / "log").open("wb") as log:
            command = [sys.executable, str(self._directory / "scoped.py"), executor]
            return subprocess.Popen(command, env=env, stdout=log, stderr=log)

    @property
    def log(self) -> str:
        return (self._directory / "log").read_text()[-3000:]


@pytest.fixture
def job(site: Site, tmp_path: Path, script: Callable[..., Path]) -> Job:
    site.sh('mkdir -p "$1/data"', site.base)
    return Job(site, tmp_path, script(PAYLOAD))


def jobs_seen(site: Site) -> list[str]:
    return site.sh('cat "$1/data/jobs"', site.base).split()


def over(site: Site) -> bool:
    return not site.jobs() and not marked_processes(os.environ["PYTEST_OF_RAYSLURM"])


EXECUTORS = ["in_process", pytest.param("multiprocess", marks=pytest.mark.thorough)]
"""With processes of steps it is tested on this machine."""


@pytest.mark.parametrize("executor", EXECUTORS)
def test_the_session_lives_as_long_as_the_run(job: Job, site: Site, executor: str) -> None:
    process = job.start(executor)
    assert process.wait(150) == 0, job.log
    first, second = jobs_seen(site)
    assert first == second, "both steps found the same session"
    assert wait_until(lambda: over(site)), site.sh("squeue --me")


def test_a_notebook_outlives_its_runs(
    slurm_compute: Callable[..., ComputeResource], site: Site, script: Callable[..., Path]
) -> None:
    """The process goes on; each run has a session of its own, and nobody stands in for the end of another's."""
    compute = slurm_compute(mode="slurm-session", session=SessionConfig(name="mine", scope="run", idle_timeout=250))
    payload = script(PAYLOAD)

    @dg.asset
    def one(context: dg.AssetExecutionContext, compute: ComputeResource) -> Any:
        return compute.run(context=context, payload_path=payload, uses_pipes=False).get_materialize_result()

    for _ in range(2):
        assert dg.materialize([one], resources={"compute": compute}).success
        assert wait_until(lambda: over(site)), site.sh("squeue --me")
    assert len(set(jobs_seen(site))) == 2
