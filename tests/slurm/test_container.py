"""Payloads in containers of Charliecloud. The faults of tests/faults run in containers too, in the thorough tests."""

from collections.abc import Callable
from typing import Any

import pytest

from dagster_rayslurm import ComputeResource

from ..conftest import pipes_script, run_asset, small_ray
from .container import charliecloud, make_image
from .fixtures import HEARS_USR1, Site

Make = Callable[..., ComputeResource]

WHERE = pipes_script("""
import os, subprocess, ray
ray.init()

@ray.remote
def where():
    return [os.uname().nodename, "CH_RUNNING" in os.environ, os.path.exists("/usr/bin/squeue"), os.environ["RAYSLURM_DATA_DIR"]]

jobs = subprocess.run(["squeue", "--noheader", "--me", "--format=%A"], capture_output=True, text=True)
pipes.report_asset_materialization(metadata={
    "where": [str(ray.get(where.options(resources={"node:" + node["NodeManagerAddress"]: 1}).remote())) for node in ray.nodes()],
    "driver": "CH_RUNNING" in os.environ, "jobs": jobs.stdout.split(), "job": os.environ["SLURM_JOB_ID"],
})
""")


@pytest.fixture
def in_container(site: Site) -> dict[str, Any]:
    """The fields of a resource whose payloads run in the stack's image."""
    make_image(site.connection)
    return {"pre_deployed_env_path": None, "environment": charliecloud()}


def test_the_runtime_ray_and_the_payload_are_inside(
    slurm_compute: Make, in_container: dict[str, Any], script: Any, site: Site
) -> None:
    data = f"/scratch/{site.base.rpartition('/')[2]}"
    site.sh('mkdir "$1"', data)
    queue = {"num_nodes": 2, "mem": "2500M", "cpus_per_node": 2}
    compute = slurm_compute(queue, default_launcher=small_ray(), data_dir=data, **in_container)
    ran = run_asset(compute, script(WHERE))
    assert sorted(ran.metadata["where"]) == [str([node, True, False, data]) for node in ("c1", "c2")]
    assert ran.metadata["driver"] and ran.metadata["jobs"] == [ran.metadata["job"]]
    assert float(ran.completed[0].metadata["Peak memory (MiB)"].value) > 100
    site.sh('rm -r "$1"', data)


@pytest.mark.parametrize("carrier", ["direct", "srun"])
def test_a_session_inside(session_compute: Make, in_container: dict[str, Any], script: Any, site: Site, carrier: str) -> None:
    compute = session_compute(session={"carrier": carrier}, **in_container)
    payload = script(pipes_script("import os\npipes.report_asset_materialization(metadata={'in': 'CH_RUNNING' in os.environ})"))
    assert [run_asset(compute, payload).metadata["in"] for _ in range(2)] == [True, True]
    assert len(site.submitted()) == 1


def test_the_warning_before_the_time_limit_comes_inside(slurm_compute: Make, in_container: dict[str, Any], script: Any) -> None:
    """Slurm 22.05 tells a job its limit by squeue only, which runs outside."""
    compute = slurm_compute({"time_limit": "00:01:00", "signal_before_timeout": "USR1@50"}, **in_container)
    ran = run_asset(compute, script(HEARS_USR1))
    assert 0 < ran.metadata["after"] < 20


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"image": "/scratch/nothing.sqfs"}, "there is no image /scratch/nothing.sqfs on edge"),
        ({"image": "/home/dev/.profile"}, "ch-run cannot use an image of this kind"),
        ({"mounts": [], "python": None}, "the image /home/dev/image has no Ray; have it installed when the image is made"),
        (
            {"mounts": ["/opt/ray:/opt/study"]},  # A newer ch-run makes the directory, and then the usual Python is missing.
            "the image (/home/dev/image has no directory /opt/study to mount at; make it: mkdir -p|has no /opt/ray/bin/python)",
        ),
        ({"image": "./nothing.tar"}, "the image .*/nothing.tar cannot be read on this machine"),
        ({"runtime": "apptainer"}, "there is no program apptainer on edge; load its module"),
        ({"runtime": "pyxis"}, "srun knows no --container-image, so Pyxis is not installed"),
    ],
)
def test_what_cannot_run_is_one_sentence(
    slurm_compute: Make, in_container: dict[str, Any], script: Any, site: Site, fields: dict[str, Any], says: str
) -> None:
    environment = charliecloud(**fields)
    compute = slurm_compute(default_launcher=small_ray(), **{**in_container, "environment": environment})
    failure = run_asset(compute, script(pipes_script("pass"))).failure
    assert failure.kind in ("environment", "configuration")
    with pytest.raises(AssertionError, match=says):
        raise AssertionError(failure.description)
    assert not site.jobs() and not site.sh('ls "$1/runs" 2>/dev/null || true', site.base)
