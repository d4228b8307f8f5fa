"""Between the submission and the first word of the runtime: slow sites, broken nodes, interrupts."""

import time
from collections.abc import Callable
from typing import Any

import dagster as dg
import pytest

from dagster_rayslurm import BashLauncher, ComputeResource
from dagster_rayslurm.backends import batch
from dagster_rayslurm.slurm.shared_queue import fetch_queue

from ..conftest import pipes_script, run_asset, small_ray
from .fixtures import Running, Site

Make = Callable[..., ComputeResource]


def environment(site: Site, activate: str) -> str:
    """An environment of the stack's Python, with lines of shell that run on each node before it starts."""
    script = f"{activate}\nexport PATH=/opt/ray/bin:$PATH\n"
    site.sh('mkdir -p "$1/env" && printf %s "$2" >"$1/env/activate.sh"', site.base, script)
    return f"{site.base}/env"


ON_NODES = '[ "$(uname -n)" = edge ] || '


def test_a_job_that_has_started_waits_no_longer(slurm_compute: Make, script: Any, site: Site) -> None:
    """`queue_timeout` is about the queue; a slow start is something else."""
    compute = slurm_compute(queue_timeout=3, pre_deployed_env_path=environment(site, ON_NODES + "sleep 8"))
    assert run_asset(compute, script(pipes_script("pass"))).result.success


def test_a_runtime_that_does_not_come(slurm_compute: Make, script: Any, site: Site) -> None:
    path = environment(site, ON_NODES + "{ echo waiting for the licence server; sleep 100; }")
    compute = slurm_compute(runtime_start_timeout=4, pre_deployed_env_path=path)
    began = time.monotonic()
    failure = run_asset(compute, script("pass"), uses_pipes=False).failure
    assert failure.kind == "runtime" and time.monotonic() - began < 60
    sentence = failure.description or ""
    assert "did not start within runtime_start_timeout=4 s" in sentence and "licence server" in sentence


@pytest.mark.parametrize("launcher", [BashLauncher(), small_ray()], ids=["bash", "ray"])
def test_a_node_that_cannot_start_the_runtime(launcher: Any, slurm_compute: Make, script: Any, site: Site) -> None:
    """The failure names the node and shows what was said there."""
    path = environment(site, '[ "$(uname -n)" != c2 ] || { echo "no module cuda/12" >&2; exit 3; }')
    queue = {"num_nodes": 2, "mem": "2500M", "cpus_per_node": 2}
    compute = slurm_compute(queue=queue, pre_deployed_env_path=path, default_launcher=launcher)
    failure = run_asset(compute, script("import time; time.sleep(60)"), uses_pipes=False).failure
    sentence = failure.description or ""
    assert failure.kind == "runtime", sentence
    assert "node c2" in sentence and "exit code 3" in sentence and "no module cuda/12" in sentence


def test_an_interrupt_right_after_the_submission(
    slurm_compute: Make, script: Any, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(**_: Any) -> None:
        raise dg.DagsterExecutionInterruptedError

    monkeypatch.setattr(batch, "BatchJob", interrupted)
    with pytest.raises(BaseException):  # noqa: B017 - whichever way Dagster passes an interrupt on
        result = run_asset(slurm_compute(), script("import time; time.sleep(60)"), uses_pipes=False).result
        raise RuntimeError(result)
    assert not site.jobs()


def test_a_cluster_is_ended_by_its_name(slurm_compute: Make, start: Callable[..., Running], script: Any, site: Site) -> None:
    compute = slurm_compute()
    up = 'import os, pathlib, time; pathlib.Path(os.environ["RAYSLURM_DATA_DIR"], "up").write_text("x"); time.sleep(60)'
    running = start(compute, script(up), uses_pipes=False)
    job_id = running.up()
    name = next(row.name for row in fetch_queue(site.connection).rows if row.job_id == int(job_id))
    assert not compute.cleanup_cluster("slurm-000000000000") and not compute.cleanup_cluster("")
    assert compute.cleanup_cluster("slurm-" + name.rpartition("-")[2])
    assert running.result().failure.kind == "cancelled"
    assert not compute.cleanup_cluster("slurm-" + name.rpartition("-")[2])
