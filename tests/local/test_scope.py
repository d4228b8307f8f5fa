"""`SessionConfig(scope="run")` on this machine: the warm cluster ends with the run."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from dagster_rayslurm import ComputeResource, SessionConfig

from ..conftest import marked_processes, small_ray, wait_until

pytestmark = [pytest.mark.timeout(240), pytest.mark.ray]

PAYLOAD = """
import os, pathlib, sys, time, ray
ray.init()
here = pathlib.Path({here!r})
with (here / "clusters").open("a") as file:
    file.write(ray.get_runtime_context().gcs_address + "\\n")
if (here / "wait").exists():
    (here / "up").touch()
    time.sleep(120)
"""

JOB = """
import os, sys
import dagster as dg
from dagster_rayslurm import ComputeResource, RayLauncher, SessionConfig

@dg.asset
def first(context: dg.AssetExecutionContext, compute: ComputeResource):
    return compute.run(context=context, payload_path={payload!r}, uses_pipes=False).get_materialize_result()

@dg.asset(deps=[first])
def second(context: dg.AssetExecutionContext, compute: ComputeResource):
    return compute.run(context=context, payload_path={payload!r}, uses_pipes=False).get_materialize_result()

launcher = RayLauncher(object_store_memory_gb=0.1, dashboard=False, startup_timeout=120, grace_period=2)
compute = ComputeResource(local_base={base!r}, enable_cluster_reuse=True, default_launcher=launcher,
    session=SessionConfig(scope="run", idle_timeout={idle}))
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


@pytest.fixture
def job(tmp_path: Path, base: Path, script: Any) -> Any:
    """Starts the job in a process of its own."""
    home = tmp_path / "home"
    home.mkdir()
    payload = str(script(PAYLOAD.format(here=str(tmp_path))))

    def start(executor: str, idle_timeout: int = 600) -> subprocess.Popen[bytes]:
        text = textwrap.dedent(JOB).format(payload=payload, base=str(base), home=str(home), idle=idle_timeout)
        (tmp_path / "scoped.py").write_text(text)
        env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}", "DAGSTER_DISABLE_TELEMETRY": "yes"}
        with (tmp_path / "log").open("wb") as log:
            return subprocess.Popen([sys.executable, str(tmp_path / "scoped.py"), executor], env=env, stdout=log, stderr=log)

    return start


def clusters(tmp_path: Path) -> list[str]:
    return (tmp_path / "clusters").read_text().split()


def nothing_runs() -> bool:
    return not marked_processes(os.environ["PYTEST_OF_RAYSLURM"])


@pytest.mark.parametrize("executor", [pytest.param("in_process", marks=pytest.mark.thorough), "multiprocess"])
def test_the_cluster_lives_as_long_as_the_run(job: Any, tmp_path: Path, executor: str) -> None:
    process = job(executor)
    assert process.wait(120) == 0, (tmp_path / "log").read_text()[-3000:]
    first, second = clusters(tmp_path)
    assert first == second, "both steps found the same cluster"
    assert wait_until(nothing_runs), "within seconds"


def test_the_cluster_of_a_killed_run_ends_by_its_idle_timeout(job: Any, tmp_path: Path) -> None:
    (tmp_path / "wait").touch()
    process = job("in_process", idle_timeout=2)
    assert wait_until(lambda: (tmp_path / "up").exists() or process.poll() is not None, 90) and process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert wait_until(nothing_runs)


@pytest.mark.thorough
def test_a_notebook_outlives_its_runs(base: Path, tmp_path: Path, script: Any) -> None:
    """The process goes on, and each run has a cluster of its own."""
    compute = ComputeResource(
        local_base=str(base), enable_cluster_reuse=True, default_launcher=small_ray(), session=SessionConfig(scope="run")
    )
    payload = script(PAYLOAD.format(here=str(tmp_path)))

    @dg.asset
    def one(context: dg.AssetExecutionContext, compute: ComputeResource) -> Any:
        return compute.run(context=context, payload_path=payload, uses_pipes=False).get_materialize_result()

    for _ in range(2):
        assert dg.materialize([one], resources={"compute": compute}).success
        assert wait_until(nothing_runs)
    assert len(set(clusters(tmp_path))) == 2
