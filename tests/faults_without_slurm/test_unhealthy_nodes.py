"""Nodes that fail a health check: they are named, excluded and remembered, and the run is started once more without them.

Each test is a whole run: the real submission, batch script, runtime and run record, on the fake Slurm.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dagster_rayslurm import ComputeResource, HetComponent, SessionConfig, SlurmQueueConfig, SlurmResource

from ..conftest import pipes_script, run_asset, small_ray, wait_until
from ..fake_slurm import FakeSlurm
from ..local.test_partitions import KEYS, Scene

pytestmark = pytest.mark.timeout(120)

Make = Callable[..., ComputeResource]
BAD = 'echo "$SLURMD_NODENAME is bad"; case $SLURMD_NODENAME in {}) exit 3;; esac'
"""A health check that fails on some nodes."""


@pytest.fixture
def make(tmp_path: Path, request: pytest.FixtureRequest) -> Make:
    """Makes resources; `bad` is a shell pattern of the nodes that fail the health check."""

    def of(mode: str = "slurm", bad: str = "c1", queue: dict[str, Any] | None = None, **fields: Any) -> ComputeResource:
        launcher = small_ray(health_check=BAD.format(bad), **fields.pop("launcher", {}))
        slurm = SlurmResource(remote_base=str(tmp_path / "base"), poll_interval=1, queue=SlurmQueueConfig(**(queue or {})))
        fields = {"on_unhealthy": "exclude-and-retry", "session": SessionConfig(idle_timeout=1), **fields}
        return ComputeResource(mode=mode, slurm=slurm, default_launcher=launcher, **fields)

    return of


def scripts(slurm: FakeSlurm) -> list[list[str]]:
    """The nodes that each job excluded, job by job and component by component."""
    texts = [
        (slurm.base / f"job-{job_id}.sh").read_text() for job_id in slurm.jobs() if (slurm.base / f"job-{job_id}.sh").exists()
    ]
    return [re.findall(r"^#SBATCH --exclude=(\S+)$", text, re.MULTILINE) for text in texts]


def remembered(base: Path) -> dict[str, str]:
    directory = base / "unhealthy"
    found = [json.loads(path.read_text()) for path in sorted(directory.iterdir())] if directory.exists() else []
    return {each["node"]: f"{each['check']}: {each['found']}" for each in found}


def test_the_failure_names_node_check_and_finding(make: Make, fake_slurm: FakeSlurm, script: Any, tmp_path: Path) -> None:
    failure = run_asset(make(on_unhealthy="fail"), script("pass"), uses_pipes=False).failure
    assert failure.kind == "cluster-start" and failure.allow_retries
    assert re.search(r"the health check failed with exit code 3 on node \S+: c1 is bad", failure.description or "")
    assert failure.metadata["Unhealthy nodes"].value == "c1 (command: exit code 3: c1 is bad)"
    assert scripts(fake_slurm) == [[]] and remembered(tmp_path / "base") == {"c1": "command: exit code 3: c1 is bad"}


def test_a_built_in_check_names_node_check_and_finding(make: Make, fake_slurm: FakeSlurm, script: Any) -> None:
    compute = make(on_unhealthy="fail", bad="nothing")
    failure = run_asset(
        compute, script("pass"), uses_pipes=False, launcher=small_ray(health_check=["clock", "interface=nope0", "exit 3"])
    ).failure
    said = failure.description or ""
    assert re.search(r"node \S+ failed its health check interface=nope0: there is no interface nope0; there are: ", said), said
    assert str(failure.metadata["Unhealthy nodes"].value).startswith("c1 (interface=nope0: there is no interface nope0")


@pytest.mark.ray
@pytest.mark.parametrize(
    ("mode", "fields"),
    [
        pytest.param("slurm", {}, id="slurm"),
        pytest.param("slurm-session", {}, id="fresh-clusters", marks=pytest.mark.thorough),
        pytest.param("slurm-session", {"enable_cluster_reuse": True}, id="warm-cluster", marks=pytest.mark.thorough),
    ],
)
def test_the_run_succeeds_without_the_node(
    mode: str, fields: dict[str, Any], make: Make, fake_slurm: FakeSlurm, script: Any, tmp_path: Path, capfd: Any
) -> None:
    payload = script(
        pipes_script("""
        import os
        pipes.report_asset_materialization(metadata={"node": os.environ["SLURMD_NODENAME"]})
        """)
    )
    ran, said = run_asset(make(mode, **fields), payload), capfd.readouterr().err
    assert not ran.failures, ran.failures
    assert ran.metadata["node"] == "c2" and ran.metadata["Unhealthy nodes"] == "c1 (command: exit code 3: c1 is bad)"
    assert ran.metadata["Slurm job ID"] == "2" and scripts(fake_slurm) == [[], ["c1"]]
    assert "the run is started once more without c1" in said
    assert "excluded for a failed health check: c1 (command: exit code 3: c1 is bad; 0 min ago)" in said
    assert wait_until(lambda: not fake_slurm.processes()), "processes of the jobs go on"
    if mode == "slurm":  # Another run knows it, with another check, until an hour is over.
        again = run_asset(make(bad="nothing"), payload)
        assert (
            again.metadata["node"] == "c2" and again.metadata["Slurm job ID"] == "3" and "Unhealthy nodes" not in again.metadata
        )


@pytest.mark.parametrize(
    "mode", ["slurm", *(pytest.param(each, marks=pytest.mark.thorough) for each in ("slurm-session", "warm"))]
)
def test_there_is_one_second_try(mode: str, make: Make, fake_slurm: FakeSlurm, script: Any, tmp_path: Path) -> None:
    """The other node is as bad: both are remembered, and a later run excludes only as many as can be spared."""
    warm = {"enable_cluster_reuse": True} if mode == "warm" else {}
    compute = make("slurm" if mode == "slurm" else "slurm-session", bad="c*", **warm)
    failure = run_asset(compute, script("pass"), uses_pipes=False).failure
    assert failure.kind == "cluster-start" and "c2 is bad" in (failure.description or ""), failure.description
    assert scripts(fake_slurm) == [[], ["c1"]] and set(remembered(tmp_path / "base")) == {"c1", "c2"}
    assert wait_until(lambda: not fake_slurm.processes()), "processes of the jobs go on"


def test_too_few_nodes_would_be_left(make: Make, fake_slurm: FakeSlurm, script: Any, capfd: Any, tmp_path: Path) -> None:
    fake_slurm.set(node_states={"c2": "drained"})
    failure = run_asset(make(), script("pass"), uses_pipes=False).failure
    assert failure.kind == "cluster-start" and "c1 is bad" in (failure.description or "")
    why = "the default partition would have 0 usable nodes left, and the job needs 1"
    assert (failure.description or "").endswith(f"; the run is not started again: c1 is not excluded, because {why}")
    assert scripts(fake_slurm) == [[]]
    run_asset(make(), script("pass"), uses_pipes=False)
    said = capfd.readouterr().err
    assert f"c1 (command: exit code 3: c1 is bad; 0 min ago) failed a health check and is not excluded: {why}" in said


def test_the_users_own_exclusion_is_kept(make: Make, fake_slurm: FakeSlurm, script: Any) -> None:
    fake_slurm.set(partitions={"compute": ["c1", "c2", "c3"]})
    failure = run_asset(make(bad="c*", queue={"exclude": "c1"}), script("pass"), uses_pipes=False).failure
    assert "c3 is bad" in (failure.description or "") and scripts(fake_slurm) == [["c1"], ["c1,c2"]]


@pytest.mark.ray
def test_later_job_arrays_avoid_the_node(make: Make, fake_slurm: FakeSlurm, script: Any, tmp_path: Path) -> None:
    payload = script(
        pipes_script("""
        import os
        pipes.report_asset_materialization(metadata={"node": os.environ["SLURMD_NODENAME"]})
        """)
    )
    scene = Scene(make())
    tags = {"dagster/asset_partition_range_start": KEYS[0], "dagster/asset_partition_range_end": KEYS[1]}
    assert scene.run(str(payload), tags=tags, retries=1, max_concurrent=1, allocation="each").success, scene.failures
    [failure] = scene.failures
    assert failure.kind == "cluster-start" and "c1 is bad" in str(failure.description)
    assert remembered(tmp_path / "base") == {"c1": "command: exit code 3: c1 is bad"}
    assert scripts(fake_slurm) == [[], [], ["c1"], ["c1"]]  # The fake keeps the script of an array for each element.
    assert [found["node"] for [found] in scene.materializations().values()] == ["c2", "c2"]


@pytest.mark.parametrize("topology", ["spanning", "separate"])
def test_components(topology: str, make: Make, fake_slurm: FakeSlurm, script: Any, tmp_path: Path) -> None:
    """No component gets the node again; in both topologies the second try meets the other one."""
    queues = {"cpu": SlurmQueueConfig(partition="compute"), "gpu": SlurmQueueConfig(partition="gpu")}
    base = make("slurm-hetjob", bad="c*", launcher={"head_node_address": "127.0.0.1"})  # All nodes are this machine.
    launcher = {"launcher": base.default_launcher} if topology == "separate" else {}
    components = [HetComponent(component_id=name, queue=queue, **launcher) for name, queue in queues.items()]
    fields: dict[str, Any] = {"slurm": base.slurm, "on_unhealthy": base.on_unhealthy}
    if topology == "spanning":
        fields["default_launcher"] = base.default_launcher
    compute = ComputeResource(mode="slurm-hetjob", components=components, topology=topology, **fields)
    failure = run_asset(compute, script("pass"), uses_pipes=False).failure
    assert failure.kind == "cluster-start" and "c2 is bad" in (failure.description or ""), failure.description
    assert scripts(fake_slurm) == [[], ["c1", "c1"]] and set(remembered(tmp_path / "base")) == {"c1", "c2"}
    assert wait_until(lambda: not fake_slurm.processes()), "processes of the jobs go on"


def test_the_memory_cannot_be_written(make: Make, fake_slurm: FakeSlurm, script: Any, tmp_path: Path, capfd: Any) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "unhealthy").write_text("")
    failure = run_asset(make(), script("pass"), uses_pipes=False).failure
    assert failure.kind == "cluster-start" and "c1 is bad" in (failure.description or ""), failure.description
    why = "nodes that failed a health check cannot be noted: "
    assert f"; the run is not started again: {why}" in (failure.description or "") and why in capfd.readouterr().err
    assert len(fake_slurm.jobs()) == 1
