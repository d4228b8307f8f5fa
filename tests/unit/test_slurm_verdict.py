"""The verdict from the end of a Slurm job; the end in the record comes first."""

import dataclasses
from typing import Any

import pytest

from dagster_rayslurm.errors import FailureKind
from dagster_rayslurm.follow import Evidence
from dagster_rayslurm.outcome.verdict import judge, needs_job_facts
from dagster_rayslurm.slurm.accounting import JobFacts, combine

END: dict[str, Any] = {"type": "end", "reason": "exit", "exit_code": 0, "signal": None, "message": None}
TERMINATED = {**END, "reason": "terminated", "exit_code": None, "message": "the runtime received SIGTERM"}
KILLED = {**END, "exit_code": None, "signal": 9}
OOM_LINE = "slurmstepd: error: Detected 1 oom_kill event in StepId=12.0. Some of the step tasks have been OOM Killed."


def job(state: str, **fields: Any) -> JobFacts:
    return JobFacts(job_id=12, state=state, nodes=("n1", "n2"), num_nodes=2, **fields)


@pytest.mark.parametrize(
    ("facts", "log", "kind", "retry", "words"),
    [
        (job("TIMEOUT", time_limit=90061, elapsed=90070), "", "allocation", False, ["TIMEOUT", "1-01:01:01", "time_limit"]),
        (job("DEADLINE"), "", "allocation", False, ["DEADLINE"]),
        (job("NODE_FAIL", reason="NodeDown"), "", "allocation", True, ["NODE_FAIL", "n1, n2", "NodeDown"]),
        (job("BOOT_FAIL"), "", "allocation", True, ["BOOT_FAIL"]),
        (job("PREEMPTED"), "", "allocation", True, ["PREEMPTED", "another job"]),
        (job("CANCELLED", cancelled_by=1001), "", "cancelled", None, ["cancelled by user id 1001"]),
        (
            job("CANCELLED", cancelled_by=1001, reason="DependencyNeverSatisfied"),
            "",
            "cancelled",
            None,
            ["cancelled by user id 1001 (DependencyNeverSatisfied)"],
        ),
        (job("OUT_OF_MEMORY", memory=2 * 2**30), "", "allocation", False, ["OUT_OF_MEMORY", "1024 MiB on each node"]),
        (job("FAILED", signal=125), "", "allocation", False, ["OUT_OF_MEMORY"]),
        (job("FAILED", step_out_of_memory=True), "", "allocation", False, ["OUT_OF_MEMORY"]),
        (job("FAILED"), OOM_LINE, "allocation", False, ["OUT_OF_MEMORY", "oom_kill event"]),
        (job("COMPLETING", reason="TimeLimit", time_limit=60), "", "allocation", False, ["TIMEOUT", "00:01:00", "time_limit"]),
        (job("COMPLETING", reason="NodeDown"), "", "allocation", True, ["NODE_FAIL", "n1, n2"]),
        (job("COMPLETING", reason="OutOfMemory"), "", "allocation", False, ["OUT_OF_MEMORY"]),
        (job("REVOKED"), "", "allocation", True, ["REVOKED", "another cluster"]),
    ],
    ids=lambda value: value.state if isinstance(value, JobFacts) else None,
)
@pytest.mark.parametrize("end", [None, TERMINATED], ids=["no end", "terminated"])
def test_the_end_of_a_job_decides_kind_and_sentence(
    end: Any, facts: JobFacts, log: str, kind: str, retry: bool | None, words: list[str]
) -> None:
    evidence = Evidence(end=end, job=facts, runtime_log=log, runtime_exit="Slurm calls the job so", started_at=1.0)
    assert needs_job_facts(evidence)
    verdict = judge(evidence, True, True)
    assert (verdict.kind, verdict.retry) == (kind, retry) and isinstance(verdict.kind, FailureKind)
    assert all(word in verdict.sentence for word in words), verdict.sentence
    assert "payload got" not in verdict.sentence and "\n" not in verdict.sentence


def test_a_job_that_wrote_nothing_points_at_the_file_system() -> None:
    verdict = judge(Evidence(job=job("FAILED"), runtime_exit="Slurm calls the job FAILED"), True, True)
    assert verdict.kind == "allocation" and "remote_base" in verdict.sentence


@pytest.mark.parametrize(
    "log",
    [
        "slurmstepd: error: execve(): /tmp/an env/bin/python: No such file or directory",
        "slurmstepd-c1: error: execve(): /tmp/an env/bin/python: Exec format error\nsrun: error: c1: task 0: Exited",
        "rayslurm: line 1: /tmp/an env/activate.sh: No such file or directory",
    ],
)
def test_an_environment_that_the_nodes_cannot_start_is_named(log: str) -> None:
    evidence = Evidence(job=job("FAILED", exit_code=2), runtime_log=log, runtime_exit="srun ended with exit code 2")
    verdict = judge(evidence, True, True)
    assert verdict.kind == "environment" and "/tmp/an env/" in verdict.sentence and "the compute nodes see" in verdict.sentence


def test_a_job_that_ended_after_its_runtime_died() -> None:
    evidence = Evidence(job=job("FAILED", exit_code=1), started_at=1.0, runtime_exit="srun ended with exit code 1")
    evidence.runtime_log = "Traceback\nOSError: disk"
    verdict = judge(evidence, True, True)
    assert verdict.kind == "runtime" and "OSError: disk" in verdict.sentence


def test_a_signal_that_slurm_did_not_send_is_a_runtime_failure() -> None:
    verdict = judge(Evidence(end=TERMINATED, job=job("FAILED"), started_at=1.0), True, True)
    assert verdict.kind == "runtime" and "signal from outside" in verdict.sentence


@pytest.mark.parametrize(
    ("state", "kind"), [("COMPLETING", "cancelled"), ("RUNNING", "runtime"), ("STOPPED", "runtime"), ("NEW_STATE", "runtime")]
)
def test_a_job_without_a_final_state_may_still_have_been_cancelled(state: str, kind: str) -> None:
    verdict = judge(Evidence(end=TERMINATED, job=job(state, exit_code=143), started_at=1.0), True, True)
    assert verdict.kind == kind and f"is {state}, exit code 143" in verdict.sentence and "sacct -j 12" in verdict.sentence
    assert "cancelled nothing" not in verdict.sentence


def test_the_record_decides_if_slurm_does_not_answer() -> None:
    verdict = judge(Evidence(end=TERMINATED, started_at=1.0), True, True)
    assert verdict.kind == "cancelled" and "SIGTERM" in verdict.sentence


def test_a_killed_payload_in_a_job_that_came_to_its_end() -> None:
    for state in ("FAILED", "COMPLETED", "RUNNING", "CANCELLED"):
        evidence = Evidence(end=KILLED, job=job(state), started_at=1.0)
        assert needs_job_facts(evidence) and judge(evidence, True, True).kind == "payload"
    assert judge(Evidence(end=KILLED, job=job("OUT_OF_MEMORY"), started_at=1.0), True, True).kind == "allocation"


@pytest.mark.parametrize("state", ["FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"])
def test_success_is_final(state: str) -> None:
    """What happens to the job after the `end` is nobody's business, and nobody asks."""
    evidence = Evidence(end=END, opened=1, closed=1, job=job(state), started_at=1.0)
    assert not needs_job_facts(evidence) and judge(evidence, True, True).kind is None


@pytest.mark.parametrize("state", ["COMPLETED", "RUNNING", "COMPLETING", "NEW_STATE_OF_2030"])
def test_no_state_of_slurm_is_success(state: str) -> None:
    for evidence in (Evidence(job=job(state)), Evidence(job=job(state), started_at=1.0, runtime_exit="x")):
        assert isinstance(judge(evidence, True, True).kind, FailureKind)


def het(*components: JobFacts) -> JobFacts:
    return combine(components)


def part(number: int, name: str, state: str, **fields: Any) -> JobFacts:
    nodes = (f"n{number + 1}",)
    return JobFacts(12 + number, state, nodes=nodes, num_nodes=1, memory=2**30, component_id=name, **fields)


CANCELLED = het(part(0, "cpu", "FAILED", exit_code=143), part(1, "gpu", "CANCELLED", cancelled_by=0))
EATEN = het(part(0, "cpu", "FAILED"), part(1, "gpu", "OUT_OF_MEMORY"))
LOST = het(part(0, "cpu", "NODE_FAIL"), part(1, "gpu", "NODE_FAIL"))
LATE = het(part(0, "cpu", "TIMEOUT"), part(1, "gpu", "TIMEOUT"))
KILLED_THERE = "slurmstepd: error: Detected 1 oom_kill event in StepId=13.0. Some of the step tasks have been OOM Killed."


@pytest.mark.parametrize(
    ("facts", "log", "kind", "says"),
    [
        (CANCELLED, "", "cancelled", "component 'gpu' of Slurm job 12 was cancelled by user id 0"),
        (EATEN, "", "allocation", "OUT_OF_MEMORY: component 'gpu' of Slurm job 12 on n2 used more memory"),
        (
            het(part(0, "cpu", "FAILED"), part(1, "gpu", "FAILED")),
            KILLED_THERE,
            "allocation",
            "component 'gpu' of Slurm job 12 on n2",
        ),
        (LOST, "", "allocation", "NODE_FAIL: Slurm job 12 on n1, n2 is lost"),
        (LATE, "", "allocation", "TIMEOUT: Slurm job 12 was ended at its time limit"),
        (het(part(0, "cpu", "RUNNING"), part(1, "gpu", "CANCELLED")), "", "cancelled", "component 'gpu' of Slurm job 12"),
    ],
)
@pytest.mark.parametrize("end", [None, TERMINATED], ids=["no end", "terminated"])
def test_the_component_that_explains_the_end_is_named(end: Any, facts: JobFacts, log: str, kind: str, says: str) -> None:
    evidence = Evidence(end=end, job=facts, runtime_log=log, runtime_exit="Slurm calls the job so", started_at=1.0)
    verdict = judge(evidence, True, True)
    assert verdict.kind == kind and says in verdict.sentence, verdict.sentence


def test_a_cluster_that_lost_a_component_may_have_lost_it_to_slurm() -> None:
    end = {**END, "reason": "cluster-lost", "exit_code": None, "message": "n2 is gone"}
    two = {"allocation": {"components": [{"component": "cpu"}, {"component": "gpu"}]}}
    assert not needs_job_facts(Evidence(end=end)) and needs_job_facts(Evidence(end={**end, "context": two}))
    lost = judge(Evidence(end={**end, "context": two}, job=CANCELLED, started_at=1.0), True, True)
    assert lost.kind == "cancelled" and "'gpu'" in lost.sentence
    plain = judge(Evidence(end={**end, "context": two}, job=job("FAILED"), started_at=1.0), True, True)
    assert plain.kind == "cluster-lost" and "n2 is gone" in plain.sentence


@pytest.mark.parametrize(
    "line",
    [
        "rayslurm: 1: exec: /tmp/an env/bin/python: not found",
        "rayslurm: 1: exec: /tmp/an env/bin/python: Permission denied",
        "rayslurm: line 1: /tmp/an env/bin/python: No such file or directory",
        "rayslurm: line 1: exec: /tmp/an env/bin/python: cannot execute: Permission denied",
    ],
)
def test_messages_of_shells_that_cannot_start_the_environment(line: str) -> None:
    verdict = judge(Evidence(job=job("FAILED", exit_code=127), runtime_log=line, runtime_exit="x"), True, True)
    assert verdict.kind == "environment" and "cannot start /tmp/an env/bin/python: " in verdict.sentence
    # The first node was ended before it came to that.
    srun = "srun: error: g2: task 0: Exited with exit code 127"
    elsewhere = Evidence(job=job("FAILED", exit_code=127), runtime_log=srun, tails={"runtime on g2": line}, runtime_exit="x")
    elsewhere.culprit = "the runtime on node g2 ended"
    assert judge(elsewhere, True, True).kind == "environment"


@pytest.mark.parametrize(("states", "settled"), [(("FAILED", "RUNNING"), False), (("FAILED", "CANCELLED"), True)])
def test_a_heterogeneous_job_is_final_once_all_components_are(states: tuple[str, ...], settled: bool) -> None:
    components = tuple(map(job, states))
    assert dataclasses.replace(components[0], components=components).is_final == settled
    assert job("FAILED").is_final and not job("RUNNING").is_final


@pytest.mark.parametrize("reason", ["Priority", "Resources", "JobHeldUser"])
def test_the_pending_reason_of_a_cancelled_job_is_left_out(reason: str) -> None:
    verdict = judge(Evidence(job=job("CANCELLED", cancelled_by=1001, reason=reason), runtime_exit="x"), True, True)
    assert verdict.kind == "cancelled" and reason not in verdict.sentence
