"""`partition="auto"` on a real Slurm, whose default partition `compute` has no GPUs, and `gpu` has."""

from collections.abc import Callable
from typing import Any

import pytest

from dagster_rayslurm import ComputeResource, HetComponent, SlurmQueueConfig

from ..conftest import pipes_script, run_asset, wait_until
from .fixtures import Site

pytestmark = pytest.mark.timeout(300)

TELL = """
import os
from dagster_pipes import open_dagster_pipes

with open_dagster_pipes() as pipes:
    pipes.report_asset_materialization(metadata={"partition": os.environ["SLURM_JOB_PARTITION"]})
"""


@pytest.fixture
def auto(slurm_compute: Callable[..., ComputeResource]) -> ComputeResource:
    return slurm_compute({"partition": "auto", "mem": "500M"})


def where(compute: ComputeResource, script: Any, **arguments: Any) -> str:
    """The partition of the job in which a payload ran."""
    return str(run_asset(compute, script(TELL), **arguments).metadata["partition"])


def test_a_job_runs_where_it_fits_and_nodes_are_free(
    auto: ComputeResource, site: Site, script: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    assert where(auto, script) == "compute"
    assert where(auto, script, queue={"gpus_per_node": 1}) == "gpu"
    assert 'partition="auto" is gpu, the first that fits and is free' in capfd.readouterr().err
    blocker = site.sh("sbatch --parsable -p compute -N 2 --exclusive -t 5 -o /dev/null --wrap='sleep 200'").strip()
    assert wait_until(lambda: site.sh(f"squeue --noheader --states=RUNNING --jobs={blocker} --format=%A"))
    assert where(auto, script) == "gpu"
    assert "passed over compute: 0 of 2 nodes free" in capfd.readouterr().err
    assert wait_until(lambda: site.jobs() == [blocker])
    failure = run_asset(auto, script(TELL), queue={"cpus_per_node": 1000}).failure
    assert failure.kind == "configuration" and 'partition="auto": no partition fits (' in str(failure.description)
    assert site.jobs() == [blocker]
    site.sh('scancel "$1"', blocker)


def test_a_session_is_where_its_nodes_were_free(session_compute: Callable[..., ComputeResource], site: Site, script: Any) -> None:
    compute = session_compute({"partition": "auto", "mem": "500M", "gpus_per_node": 1})
    assert where(compute, script) == where(compute, script) == "gpu"
    assert len(site.submitted()) == 1


def test_each_component_gets_a_partition(
    slurm_compute: Callable[..., ComputeResource], script: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    parts = [
        HetComponent(component_id=name, queue=SlurmQueueConfig(partition="auto", mem="500M", **fields))
        for name, fields in (("cpu", {}), ("gpu", {"gpus_per_node": 1}))
    ]
    compute = slurm_compute(mode="slurm-hetjob", components=parts)
    assert run_asset(compute, script(pipes_script("pipes.report_asset_materialization()"))).completed
    said = capfd.readouterr().err
    assert 'component cpu: partition="auto" is compute' in said and 'component gpu: partition="auto" is gpu' in said
