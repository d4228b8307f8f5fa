"""Requests that cannot be met: one clear sentence each, and nothing is left behind."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dagster_rayslurm import BashLauncher, ComputeResource, RayLauncher, RunFailure, SSHConnectionResource

from ..conftest import pipes_script, run_asset, small_ray
from .fixtures import NODES, Site


def refused(compute: ComputeResource, payload: Any, **arguments: Any) -> RunFailure:
    return run_asset(compute, payload, **arguments).failure


@pytest.mark.parametrize(
    ("queue", "words"),
    [
        ({"partition": "nope"}, ["nope", "partition", "`sinfo -s`"]),
        ({"partition": 'it\'s $HOME; "x" é'}, ["partition"]),
        ({"account": "nobody"}, ["nobody", "account"]),
        ({"qos": "gold"}, ["gold", "qos"]),
        ({"constraint": "a100"}, ["a100", "constraint"]),
        ({"reservation": "monday"}, ["monday", "reservation"]),
        ({"nodelist": "x99"}, ["x99", "nodelist"]),
        ({"num_nodes": 5}, ["num_nodes"]),
        ({"cpus_per_node": 64}, ["cpus_per_node"]),
        ({"partition": "gpu", "gpus_per_node": 9}, ["gpus_per_node"]),
        ({"gpus_per_node": 1}, ["gpus_per_node"]),
        ({"mem": "900G"}, ["mem"]),
        ({"time_limit": "30-00:00:00"}, ["time_limit"]),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, (dict, list)) else None,
)
def test_what_the_cluster_does_not_have(
    queue: dict[str, Any], words: list[str], slurm_compute: Callable[..., ComputeResource], script: Any, site: Site
) -> None:
    if not site.stack.accounting and ("account" in queue or "qos" in queue):
        pytest.skip("without accounting Slurm takes any account and QOS")
    failure = refused(slurm_compute(queue=queue), script(pipes_script("pass")))
    assert failure.kind == "submission" and not failure.allow_retries
    sentence = failure.description or ""
    assert all(word in sentence for word in words), sentence
    assert len(sentence.splitlines()) == 1


def test_a_launcher_that_wants_more_than_the_queue_grants(slurm_compute: Callable[..., ComputeResource], script: Any) -> None:
    compute = slurm_compute(queue={"cpus_per_node": 1}, default_launcher=RayLauncher(num_cpus_per_node=2))
    failure = refused(compute, script("pass"))
    assert failure.kind == "configuration"
    assert all(word in (failure.description or "") for word in ("num_cpus_per_node=2", "cpus_per_node=1"))


def test_a_base_that_cannot_be_written(slurm_compute: Callable[..., ComputeResource], script: Any) -> None:
    compute = slurm_compute(slurm={"remote_base": "/usr/rayslurm"})
    failure = refused(compute, script(pipes_script("pass")))
    assert failure.kind == "configuration"
    assert "/usr/rayslurm" in (failure.description or "") and "remote_base" in (failure.description or "")


def test_a_base_that_is_not_shared(slurm_compute: Callable[..., ComputeResource], script: Any, site: Site) -> None:
    """/tmp of the edge is not that of the nodes: Slurm finds no directory there."""
    base = f"/tmp/{os.path.basename(site.base)}"
    try:
        failure = refused(slurm_compute(slurm={"remote_base": base}), script(pipes_script("pass")))
    finally:
        site.sh('chmod -R u+w "$1"; rm -rf "$1"', base)
        for node in NODES:  # Slurm 24.11 makes the directory for the output of the job.
            site.stack.exec(node, ["rm", "-rf", base])
    assert failure.kind == "allocation"
    assert "remote_base" in (failure.description or "") and "share" in (failure.description or "")


def test_a_relative_base(slurm_compute: Callable[..., ComputeResource], script: Any) -> None:
    failure = refused(slurm_compute(slurm={"remote_base": "runs"}), script(pipes_script("pass")))
    assert failure.kind == "configuration" and "remote_base" in (failure.description or "")


def test_an_environment_that_is_not_there(slurm_compute: Callable[..., ComputeResource], script: Any) -> None:
    failure = refused(slurm_compute(pre_deployed_env_path="/opt/nothing"), script(pipes_script("pass")))
    assert failure.kind == "environment" and "/opt/nothing" in (failure.description or "")


def test_an_environment_without_ray(slurm_compute: Callable[..., ComputeResource], script: Any, site: Site) -> None:
    site.sh('mkdir -p "$1/env/bin" && ln -s /usr/bin/python3 "$1/env/bin/python"', site.base)
    compute = slurm_compute(pre_deployed_env_path=f"{site.base}/env", default_launcher=small_ray())
    failure = refused(compute, script("pass"), uses_pipes=False)
    assert failure.kind == "environment" and "has no Ray" in (failure.description or "")
    failure = refused(compute, script("pass"), launcher=BashLauncher())
    assert failure.kind == "environment" and "Dagster Pipes" in (failure.description or "")


def test_another_version_of_ray(slurm_compute: Callable[..., ComputeResource], script: Any) -> None:
    failure = refused(slurm_compute(default_launcher=small_ray(ray_version="2.59.9")), script(pipes_script("pass")))
    assert failure.kind == "environment" and "2.59.9" in (failure.description or "")


def test_a_wrong_host(slurm_compute: Callable[..., ComputeResource], script: Any, site: Site) -> None:
    ssh = SSHConnectionResource(**{**site.ssh.model_dump(), "host": "nowhere.invalid"})
    failure = refused(slurm_compute(slurm={"ssh": ssh}), script(pipes_script("pass")))
    assert failure.kind == "connection" and "nowhere.invalid" in (failure.description or "")


def test_a_script_that_is_not_there(slurm_compute: Callable[..., ComputeResource], tmp_path: Path) -> None:
    failure = refused(slurm_compute(), tmp_path / "missing.py")
    assert failure.kind == "configuration" and "missing.py" in (failure.description or "")


def test_a_module_beside_the_script_is_not_sent(slurm_compute: Callable[..., ComputeResource], script: Any) -> None:
    """The failure says what to do, and the directory that is named is sent."""
    path = Path(script(pipes_script("import helpers_of_mine")))
    (path.parent / "helpers_of_mine.py").write_text("")
    failure = refused(slurm_compute(), str(path))
    assert failure.kind == "payload" and "helpers_of_mine" in str(failure.metadata["Last output"].value)
    assert "name the directory that has it in the launcher's working_dir" in str(failure.description)
    assert not run_asset(slurm_compute(), str(path), launcher=BashLauncher(working_dir=str(path.parent))).failures
