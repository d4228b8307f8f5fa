"""Which nodes jobs avoid after failed health checks, how they are remembered, and what follows from a failure."""

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dagster_rayslurm import RayLauncher, SlurmResource
from dagster_rayslurm.backends.base import Layout, Step
from dagster_rayslurm.backends.batch import BatchBackend
from dagster_rayslurm.edge import unhealthy
from dagster_rayslurm.edge.base_directory import sweep
from dagster_rayslurm.environments import InheritedEnvironment
from dagster_rayslurm.errors import FailureKind, UnhealthyNode
from dagster_rayslurm.execution.reattach import Launch
from dagster_rayslurm.failures import RunFailure
from dagster_rayslurm.plan import make_plan
from dagster_rayslurm.slurm.config import SlurmQueueConfig
from dagster_rayslurm.slurm.exclusion import Exclusion, choose, excluding, parse_partitions
from dagster_rayslurm.slurm.request import JobRequest, render_script

from ..fake_slurm import FakeSlurm, job_request
from .lines import Log

SINFO = """\
c1|compute*|idle
c2|compute*|mixed
c3|compute*|allocated
c4|compute*|drained
g1|gpu|idle
g2|gpu|idle
g3|gpu|down*
c1|all|idle
g1|all|idle
g2|all|idle
"""


def node(name: str) -> UnhealthyNode:
    return UnhealthyNode(name, "gpu-count", "1 of 2 GPUs are there")


def het(*parts: dict[str, Any]) -> JobRequest:
    first, *others = (job_request("job", "why", f"part{number}", **part) for number, part in enumerate(parts))
    return JobRequest(first.job_name, first.comment, first.queue, first.component_id, tuple(others))


def test_partitions_have_the_nodes_that_take_jobs() -> None:
    assert parse_partitions(SINFO) == {
        "compute": ["c1", "c2", "c3"],
        "": ["c1", "c2", "c3"],
        "gpu": ["g1", "g2"],
        "all": ["c1", "g1", "g2"],
    }


@pytest.mark.parametrize(
    ("request_", "bad", "excluded", "problem"),
    [
        pytest.param(job_request("j", "c"), ["c1"], ["c1"], None, id="the default partition"),
        pytest.param(job_request("j", "c", partition="compute", num_nodes=2), ["c1"], ["c1"], None, id="just enough are left"),
        pytest.param(
            job_request("j", "c", partition="gpu", num_nodes=2),
            ["g1"],
            [],
            "partition gpu would have 1 usable node left, and the job needs 2",
            id="too few are left",
        ),
        pytest.param(
            job_request("j", "c", partition="gpu", exclude="g[2-3]"),
            ["g1"],
            [],
            "partition gpu would have 0 usable nodes left, and the job needs 1",
            id="the user excludes the others",
        ),
        pytest.param(job_request("j", "c", partition="gpu"), ["c1"], [], None, id="it is in another partition"),
        pytest.param(job_request("j", "c", partition="gpu,all", num_nodes=2), ["g1"], ["g1"], None, id="one of two partitions"),
        pytest.param(
            job_request("j", "c", partition="compute", nodelist="c[1-2]"),
            ["c1"],
            [],
            "SlurmQueueConfig.nodelist asks for it",
            id="the user wants it",
        ),
        pytest.param(
            job_request("j", "c", num_nodes=2), ["c2", "c1"], ["c2"], "the default partition", id="the first counts more"
        ),
        pytest.param(
            het({"partition": "gpu"}, {"partition": "gpu"}),
            ["g1"],
            [],
            "partition gpu would have 1 usable node left, and the job needs 2",
            id="components need nodes of their own",
        ),
        pytest.param(het({"partition": "compute"}, {"partition": "gpu"}), ["g1", "c1"], ["g1", "c1"], None, id="two components"),
    ],
)
def test_which_nodes_are_excluded(request_: JobRequest, bad: list[str], excluded: list[str], problem: str | None) -> None:
    found = choose(request_, [node(name) for name in bad], parse_partitions(SINFO))
    assert [each.node for each in found.nodes] == excluded
    assert [why.startswith(problem or "?") for _, why in found.kept] == ([True] if problem else [])


def test_whether_a_new_job_may_get_a_node_again() -> None:
    found = Exclusion((node("g1"),), ((node("g2"), "too few are left"),))
    assert found.problem([node("g1")]) is None
    assert found.problem([node("g1"), node("g2")]) == "g2 is not excluded, because too few are left"
    assert found.problem([node("x")]) == "x is not excluded, because it is in no partition of the job"


def test_the_users_own_exclusion_stays() -> None:
    request = excluding(het({"exclude": "c[1-2]"}, {}), ["c2", "g1"])
    assert [part.queue.exclude for part in request.components] == ["c[1-2],g1", "c2,g1"]
    script = render_script(request, ["true"], "/run", {})
    assert "#SBATCH --exclude='c[1-2],g1'" in script and "#SBATCH --exclude=c2,g1" in script


# ---- The memory


def test_nodes_are_remembered_for_a_time(tmp_path: Path) -> None:
    base = str(tmp_path)
    assert unhealthy.known(base, 3600) == []
    unhealthy.note(base, [node("g1")._asdict(), node("g2")._asdict()])
    unhealthy.note(base, [UnhealthyNode("g1", "clock", "it is off")._asdict(), {**node("x")._asdict(), "node": "../x"}])
    os.utime(tmp_path / "unhealthy" / "g2", (0, time.time() - 1800))
    (tmp_path / "unhealthy" / "broken").write_text("{")
    (tmp_path / "unhealthy" / ".rs-0123456789abcdef.tmp").write_text("half")
    found = unhealthy.known(base, 3600)
    assert [(each["node"], each["check"], round(each["age"] / 1800)) for each in found] == [
        ("g1", "clock", 0),
        ("g2", "gpu-count", 1),
    ]
    assert [each["node"] for each in unhealthy.known(base, 900)] == ["g1"]
    assert [each["node"] for each in unhealthy.known(base, 3600)] == ["g1"], "what is too old is forgotten"
    assert (tmp_path / "unhealthy").stat().st_mode & 0o777 == 0o700


def test_the_sweep_removes_old_entries(tmp_path: Path) -> None:
    unhealthy.note(str(tmp_path), [node("g1")._asdict(), node("g2")._asdict()])
    os.utime(tmp_path / "unhealthy" / "g2", (0, 0))
    assert sweep(str(tmp_path), 86400.0, 0.0, []) == ["unhealthy/g2"]


# ---- A submission


def backend(base: Path, avoids: bool = True, **queue: Any) -> BatchBackend:
    return BatchBackend(
        slurm=SlurmResource(remote_base=str(base)),
        queue=SlurmQueueConfig(**queue),
        environment=InheritedEnvironment(),
        patience=0.0,
        avoids_unhealthy=avoids,
    )


@pytest.fixture
def step() -> Step:
    return Step("r", "s", None, Log())


def test_a_job_avoids_nodes_that_failed_elsewhere(tmp_path: Path, fake_slurm: FakeSlurm, step: Step) -> None:
    one, request = backend(tmp_path), job_request("j", "c", partition="gpu")
    assert one.placed(request, step) == request and fake_slurm.calls("sinfo") == []
    one.remember_unhealthy([node("g1")])
    assert one.placed(request, step).queue.exclude == "g1"
    said = "[rayslurm] excluded for a failed health check: g1 (gpu-count: 1 of 2 GPUs are there; 0 min ago)"
    assert step.log.lines == [said]
    assert backend(tmp_path, avoids=False).placed(request, step) == request


def test_a_job_that_would_have_too_few_nodes_excludes_none(tmp_path: Path, fake_slurm: FakeSlurm, step: Step) -> None:
    one, request = backend(tmp_path), job_request("j", "c", partition="gpu")
    one.remember_unhealthy([node("g1")])
    fake_slurm.set(node_states={"g2": "drained"})
    assert one.placed(request, step) == request
    assert "failed a health check and is not excluded: partition gpu would have 0 usable nodes left" in step.log.lines[0]


def test_a_controller_that_is_away_excludes_none(tmp_path: Path, fake_slurm: FakeSlurm, step: Step) -> None:
    one, request = backend(tmp_path), job_request("j", "c", partition="gpu")
    one.remember_unhealthy([node("g1")])
    fake_slurm.fault("sinfo", "slurm_load_partitions: Unable to contact slurm controller (connect failure)")
    assert one.placed(request, step) == request
    assert "no node is excluded for a failed health check: " in step.log.lines[0] and "Unable to contact" in step.log.lines[0]


def test_a_failure_carries_its_nodes() -> None:
    failure = RunFailure(FailureKind.CLUSTER_START, "it did not start", unhealthy=[node("g1")])
    assert failure.unhealthy == (node("g1"),)
    assert failure.metadata["Unhealthy nodes"].value == "g1 (gpu-count: 1 of 2 GPUs are there)"
    assert json.loads(json.dumps(node("g1")._asdict()))["node"] == "g1"


def test_a_later_attempt_finds_the_second_job(tmp_path: Path) -> None:
    """The second try takes the place of the first one in the history of the step."""
    noted: list[str] = []
    history: Any = SimpleNamespace(note=noted.append, successor=lambda: None)
    plan = make_plan(payload_path=["true"], launcher=RayLauncher(), nonce="1" * 12, max_output_bytes=1, max_stdio_bytes=1)
    first = Launch(Step("run", "step", None, Log(), reattached=True), plan, "run-step-111111111111", history=history)
    second = first.again("2" * 12, backend(tmp_path / "base"), Layout(tmp_path))
    assert second.name == "run-step-222222222222" and noted == [second.name]
    assert second.plan.payload.nonce == "2" * 12 and not second.step.reattached
    assert second.history is history
