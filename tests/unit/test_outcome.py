"""Any evidence has one verdict; only complete evidence is success."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_rayslurm.errors import FailureKind
from dagster_rayslurm.failures import RunFailure
from dagster_rayslurm.follow import Evidence
from dagster_rayslurm.outcome.verdict import exit_in_words, judge, signal_name
from dagster_rayslurm.slurm.accounting import JobFacts


def end(reason: str = "exit", exit_code: int | None = 0, signal: int | None = None, message: str | None = None) -> dict[str, Any]:
    return {"type": "end", "reason": reason, "exit_code": exit_code, "signal": signal, "message": message}


GOOD = {"end": end(), "opened": 1, "closed": 1}


def test_complete_evidence_is_success() -> None:
    assert judge(Evidence(**GOOD), True, True).kind is None


@pytest.mark.parametrize(
    "change",
    [
        {"end": None},
        {"end": None, "runtime_exit": "exit code 1", "runtime_log": "Traceback\nMemoryError"},
        {"end": None, "interrupted": True},
        {"end": end(exit_code=1)},
        {"end": end(exit_code=137)},
        {"end": end(exit_code=None, signal=9)},
        *(
            {"end": end(reason=reason)}
            for reason in ("cancel", "cluster-start", "cluster-lost", "record", "runtime", "spawn", "new")
        ),
        {"opened": 0, "closed": 0},
        {"closed": 0},
        {"opened": 2},
        {"end": None, "unreachable": "Stale file handle"},
        {"exception": {"name": "ValueError", "message": "ValueError: x\n", "stack": []}},
        {"exception": {"name": "RError", "message": 5}},  # Not every Pipes client is Python's.
        {"message_error": "no such check"},
        {"damaged_lines": 1},
    ],
    ids=str,
)
def test_incomplete_evidence_is_a_failure_with_a_sentence(change: dict[str, Any]) -> None:
    verdict = judge(Evidence(**{**GOOD, **change}), True, True)
    assert isinstance(verdict.kind, FailureKind) and verdict.sentence and "\n" not in verdict.sentence


@given(
    st.sampled_from(["exit", "cancel", "cluster-start", "cluster-lost", "environment", "record", "runtime", "spawn", "?"]),
    st.integers(0, 255),
    st.one_of(st.none(), st.integers(1, 70)),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_success_needs_exit_code_0_and_both_messages(
    reason: str, code: int, signum: int | None, opened: bool, closed: bool, required: bool
) -> None:
    evidence = Evidence(end=end(reason, None if signum else code, signum), opened=opened, closed=closed)
    verdict = judge(evidence, True, required)
    good = reason == "exit" and code == 0 and signum is None and (not required or (opened and closed))
    assert (verdict.kind is None) == good


def test_signals_and_logs_are_explained() -> None:
    assert "memory runs out" in judge(Evidence(**{**GOOD, "end": end(exit_code=None, signal=9)}), True, True).sentence
    assert "SIGTERM" in judge(Evidence(**{**GOOD, "end": end(exit_code=143)}), True, True).sentence
    assert "MemoryError" in judge(Evidence(runtime_exit="exit code 1", runtime_log="x\nMemoryError\n"), True, True).sentence


def test_exit_codes_in_words() -> None:
    assert [exit_in_words(code) for code in (3, -9, 143)] == ["exit code 3", "signal 9 (SIGKILL)", "signal 15 (SIGTERM)"]
    assert signal_name(99) == "signal 99"


def test_only_infrastructure_and_payload_failures_may_be_retried() -> None:
    retried = {kind for kind in FailureKind if RunFailure(kind, "x").allow_retries}
    assert {"configuration", "environment", "cancelled", "submission"}.isdisjoint(retried)
    assert {"cluster-lost", "runtime", "connection", "payload"} <= retried


def test_a_returned_payload_may_be_retried_and_a_timeout_may_not() -> None:
    returned = judge(Evidence(end=end(reason="returned", message="its time limit comes")), True, True)
    assert (returned.kind, returned.retry) == ("allocation", True) and "never started: its time limit" in returned.sentence
    timeout = judge(Evidence(end=end(reason="timeout", message="it may take 3 s")), True, True)
    assert (timeout.kind, timeout.retry) == ("allocation", False) and "out of time: it may take 3 s" in timeout.sentence


@pytest.mark.parametrize(
    ("state", "kind"), [("OUT_OF_MEMORY", "allocation"), ("TIMEOUT", "allocation"), ("CANCELLED", "cancelled")]
)
def test_a_queued_payload_is_not_blamed_for_its_sessions_end(state: str, kind: str) -> None:
    job = JobFacts(7, state, nodes=("c1",), num_nodes=1)
    blamed = judge(Evidence(runtime_exit="exit code 1", started_at=1.0, job=job), True, True)
    queued = judge(Evidence(runtime_exit="exit code 1", started_at=1.0, job=job, queued=True), True, True)
    assert blamed.kind == queued.kind == kind
    assert ("never started" in queued.sentence) == (state != "CANCELLED") and "never started" not in blamed.sentence
    assert queued.retry is (True if state != "CANCELLED" else None) and not blamed.retry
