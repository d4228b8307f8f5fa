"""The fake Slurm answers as real clusters did, as far as this project reads the answers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dagster_rayslurm.slurm.accounting import SACCT_FIELDS, JobFacts, fetch_job_facts, merge_facts, parse_sacct, parse_scontrol
from dagster_rayslurm.slurm.refusals import explain
from dagster_rayslurm.slurm.request import render_script
from dagster_rayslurm.slurm.shared_queue import ClusterClock, fetch_queue, run_slurm
from dagster_rayslurm.slurm.steps import parse_exit
from dagster_rayslurm.slurm.submit import SubmissionRefused, submit, wait_until_gone

from ..conftest import wait_until
from ..fake_slurm import FakeSlurm, job_request
from .slurm_said import VERSIONS, said


def send(slurm: FakeSlurm, run_dir: Path, command: list[str], **fields: Any) -> int:
    request = job_request("rayslurm-test", "a comment", **fields)
    script = render_script(request, command, str(run_dir), {}).encode()
    warnings: list[str] = []
    sent = submit(slurm.connection, str(run_dir), {"job.sh": script}, request, ClusterClock(slurm.connection), warnings.append)
    return int(sent.job_id)


def test_directories_of_components_are_made(fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    run_dir, request = tmp_path / "base" / "runs" / "one", job_request("rayslurm-test", "a comment")
    files = {"job.sh": render_script(request, ["true"], str(run_dir), {}).encode(), "components/a/payload.json": b"{}"}
    assert submit(fake_slurm.connection, str(run_dir), files, request, ClusterClock(fake_slurm.connection), print).job_id
    assert (run_dir / "components/a/payload.json").read_bytes() == b"{}"


def facts_once(slurm: FakeSlurm, job_id: int) -> JobFacts:
    def final() -> JobFacts | None:
        facts = fetch_job_facts(slurm.connection, job_id)
        return facts if facts is not None and facts.state == facts.final_state else None

    facts = wait_until(final)
    assert facts, (slurm.base / "state.json").read_text()
    return facts


def recorded(version: str, name: str) -> JobFacts:
    job_id, controller = said(version, name, "scontrol")
    facts = merge_facts(parse_scontrol(controller), parse_sacct(said(version, name, "sacct")[1], job_id))
    assert facts is not None
    return facts


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("name", "command", "fate"),
    [
        ("ok", ["true"], None),
        ("bad", ["sh", "-c", "exit 3"], None),
        ("can", ["sleep", "30"], lambda slurm, job_id: slurm.end(job_id, "CANCELLED")),
        ("tim", ["sleep", "30"], lambda slurm, job_id: slurm.end(job_id, "TIMEOUT", "TimeLimit")),
    ],
)
def test_a_job_ends_as_on_a_real_cluster(
    version: str,
    name: str,
    command: list[str],
    fate: Callable[[FakeSlurm, int], None] | None,
    fake_slurm: FakeSlurm,
    tmp_path: Path,
) -> None:
    job_id = send(fake_slurm, tmp_path / "run", command)
    if fate is not None:
        assert wait_until(lambda: "RUNNING" in fake_slurm.state(job_id))
        fate(fake_slurm, job_id)
    facts, real = facts_once(fake_slurm, job_id), recorded(version, name)
    assert (facts.state, facts.final_state, facts.reason) == (real.state, real.final_state, real.reason)
    assert facts.nodes == ("c1",)
    if fate is None:
        assert (facts.exit_code, facts.signal) == (real.exit_code, real.signal)
        assert parse_exit((tmp_path / "run" / "exit").read_bytes(), job_id) == facts.exit_code


@pytest.mark.parametrize("version", VERSIONS)
def test_it_prints_the_fields_that_real_programs_print(version: str, fake_slurm: FakeSlurm) -> None:
    fake_slurm.job(7, state="PENDING", reason="BeginTime")
    run = lambda *words: run_slurm(fake_slurm.connection, words).stdout.decode()  # noqa: E731
    shown = run("scontrol", "--all", "show", "job", "7")
    keys = lambda text: {word.partition("=")[0] for word in text.split() if "=" in word}  # noqa: E731
    assert keys(shown) <= keys(said(version, "pen", "scontrol")[1]) | keys(said(version, "ok", "scontrol")[1]) | {"AllocTRES"}
    listed = run("sacct", "--jobs=7", "--noheader", "--parsable2", f"--format={','.join(SACCT_FIELDS)}")
    assert listed.count("|") == said(version, "pen", "sacct")[1].splitlines()[0].count("|")
    waits = recorded(version, "pen")
    facts = fetch_job_facts(fake_slurm.connection, 7)
    assert facts is not None and (facts.state, facts.exit_code, facts.nodes) == (waits.state, waits.exit_code, ())
    assert facts.reason == "BeginTime"
    gone = fake_slurm.connection.run(["scontrol", "show", "job", "99"])
    assert gone.returncode == 1 and gone.stderr.decode().strip() in said(version, "none", "scontrol")[1]
    assert fetch_job_facts(fake_slurm.connection, 99) is None


def test_components_of_a_job(fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    code = 'echo "$SLURM_NODEID $SLURMD_NODENAME $SLURM_JOB_PARTITION"'
    other = job_request("", "", partition="gpu", num_nodes=2, component_id="b")
    first = {"partition": "compute", "component_id": "a", "further": (other,)}
    job_id = send(fake_slurm, tmp_path / "run", ["sh", "-c", code], **first)
    facts = facts_once(fake_slurm, job_id)
    assert facts.state == "COMPLETED" and facts.nodes == ("c1", "g1", "g2") and len(facts.components) == 2
    rows = fetch_queue(fake_slurm.connection).components(job_id)
    assert [row.label for row in rows] == [f"{job_id}+0", f"{job_id}+1"] and {row.name for row in rows} == {"rayslurm-test"}
    logs = [(tmp_path / "run" / f"node-{number}.log").read_text() for number in range(3)]
    assert logs == ["0 c1 compute\n", "1 g1 gpu\n", "2 g2 gpu\n"]


def test_what_cannot_be_granted_is_refused_in_slurms_words(fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    for number, (fields, advice) in enumerate(
        [
            ({"partition": "nowhere"}, "set SlurmQueueConfig.partition to one that `sinfo -s` lists"),
            ({"cpus_per_node": 99}, "no node of the partition has"),
            ({"gpus_per_node": 1}, "gpus_per_node=1"),
        ]
    ):
        with pytest.raises(SubmissionRefused, match=advice):
            send(fake_slurm, tmp_path / str(number), ["true"], **fields)
    assert fake_slurm.jobs() == []
    send(fake_slurm, tmp_path / "large", ["true"], num_nodes=3)
    assert [row.reason for row in fetch_queue(fake_slurm.connection).rows] == ["PartitionNodeLimit"]


def test_a_requeued_job_runs_again_under_its_id(fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    job_id = send(fake_slurm, tmp_path / "run", ["sh", "-c", "[ -e again ] || { touch again; exec sleep 30; }"], requeue=True)
    assert wait_until((tmp_path / "run" / "again").exists)
    fake_slurm.end(job_id, "REQUEUED")
    facts = wait_until(lambda: fake_slurm.state(job_id) == "COMPLETED" and fetch_job_facts(fake_slurm.connection, job_id))
    assert facts and facts.restarts == 1
    assert parse_exit((tmp_path / "run" / "exit").read_bytes(), job_id) == 0


def test_jobs_that_wait_are_released_or_cancelled(fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    fake_slurm.set(starts=False, reason="Priority")
    first, second = (send(fake_slurm, tmp_path / name, ["true"]) for name in "ab")
    assert [(row.state, row.reason) for row in fetch_queue(fake_slurm.connection).rows] == [("PENDING", "Priority")] * 2
    fake_slurm.release(first)
    assert facts_once(fake_slurm, first).state == "COMPLETED"
    assert wait_until_gone(fake_slurm.connection, second) and fake_slurm.state(second) == "CANCELLED"
    assert fake_slurm.cancelled == [str(second)]


def test_a_job_is_cancelled_while_squeue_does_not_answer(fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    fake_slurm.set(starts=False)
    job_id = send(fake_slurm, tmp_path / "run", ["true"])
    fake_slurm.fault("squeue", "slurmctld is away")
    assert wait_until_gone(fake_slurm.connection, job_id) and fake_slurm.cancelled == [str(job_id)]
    assert len(fake_slurm.calls("squeue")) == 2


def test_programs_fail_late_or_after_their_work(fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    lost = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
    fake_slurm.set(starts=False)
    fake_slurm.fault("sbatch", lost, works=True)
    job_id = send(fake_slurm, tmp_path / "run", ["true"])
    assert fake_slurm.jobs() == [job_id] and len(fake_slurm.calls("sbatch")) == 1
    fake_slurm.fault("squeue", "slurm_load_jobs error: Unable to contact slurm controller", times=2)
    for _ in range(2):
        with pytest.raises(OSError, match="Unable to contact"):
            fetch_queue(fake_slurm.connection)
    assert len(fetch_queue(fake_slurm.connection).rows) == 1
    assert "try again later" in explain(lost)
