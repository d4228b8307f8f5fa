"""The reducer of a job's state: only positive evidence ends a job; late and repeated observations change nothing."""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dagster_rayslurm.backends.slurm_job import settling_time
from dagster_rayslurm.slurm.shared_queue import QueueRow, QueueSnapshot, parse_squeue
from dagster_rayslurm.slurm.states import (
    ACTIVE,
    MAY_REQUEUE,
    TERMINAL,
    WAITING,
    JobPhase,
    JobStatus,
    JobWatch,
)

from .slurm_said import VERSIONS, said

JOB = 7
SUBMITTED = 1000.0
STATES = sorted(TERMINAL | WAITING | ACTIVE | {"REVOKED", "EXPEDITING", "?", "UPDATE_DB"})
ONCE = JobWatch(SUBMITTED)
AGAIN = JobWatch(SUBMITTED, requeue=True)


class Seen(NamedTuple):
    at: float
    row: QueueRow | None

    def add(self, watch: JobWatch) -> JobWatch:
        return watch.seen(self.at, self.row)


class Started(NamedTuple):
    at: float

    def add(self, watch: JobWatch) -> JobWatch:
        return watch.started(self.at)


class Exited(NamedTuple):
    at: float
    exit_code: int

    def add(self, watch: JobWatch) -> JobWatch:
        return watch.exited(self.exit_code)


Observation = Seen | Started | Exited


def row(state: str, reason: str = "None", start: float | None = None, nodes: str = "") -> QueueRow:
    return QueueRow(JOB, str(JOB), state, reason, start, SUBMITTED, 1, nodes, "compute", "a job")


def present(at: float, state: str, **fields: Any) -> Seen:
    return Seen(SUBMITTED + at, row(state, **fields))


def absent(at: float) -> Seen:
    return Seen(SUBMITTED + at, None)


def watched(submission: JobWatch, observations: Iterable[Observation]) -> JobStatus:
    """What a job is after observations, in the order in which they are given."""
    watch = submission
    for observation in observations:
        watch = observation.add(watch)
    return watch.view


def view(*observations: Observation, requeue: bool = False) -> JobStatus:
    return watched(AGAIN if requeue else ONCE, observations)


stamps = st.integers(-3, 40).map(lambda step: SUBMITTED + 15.0 * step)
rows = st.sampled_from(STATES).map(row)
snapshots = st.builds(Seen, stamps, st.none() | rows)
observations = st.one_of(
    snapshots, snapshots, st.builds(Started, stamps), st.builds(Exited, stamps, st.sampled_from([0, 1, 137]))
)
submissions = st.sampled_from([ONCE, AGAIN])


def test_a_job_without_observations_is_unknown() -> None:
    assert view() == JobStatus(JobPhase.UNKNOWN)
    assert not view().over


def test_a_pending_job_has_a_reason_and_an_expected_start() -> None:
    waits = view(present(1, "PENDING", reason="Priority", start=2000.0))
    assert waits == JobStatus(JobPhase.PENDING, "PENDING", "Priority", 2000.0)
    assert view(present(1, "PENDING")).reason == ""
    assert view(present(1, "RUNNING", start=1001.0, nodes="c[1-2]")) == JobStatus(JobPhase.RUNNING, "RUNNING")


@pytest.mark.parametrize("state", sorted(TERMINAL))
def test_a_terminal_row_ends_a_job_that_is_not_requeued(state: str) -> None:
    assert view(present(1, "RUNNING"), present(30, state, reason="x")) == JobStatus(JobPhase.ENDED, state, "x")


@pytest.mark.parametrize("state", sorted(set(STATES) - TERMINAL))
@pytest.mark.parametrize("requeue", [False, True])
def test_no_other_state_ends_a_job_however_long_it_lasts(state: str, requeue: bool) -> None:
    shown = view(*(present(30 * step, state) for step in range(100)), requeue=requeue)
    assert not shown.over and shown.state == state
    assert shown.phase == ("pending" if state in WAITING else "running" if state in ACTIVE else "unknown")
    assert view(Started(1050), *(present(30 * step, state) for step in range(100)), requeue=requeue).phase != JobPhase.UNKNOWN


def test_a_job_is_lost_after_an_absence() -> None:
    assert view(absent(10)).phase == view(absent(10), absent(69)).phase == JobPhase.UNKNOWN
    assert view(absent(10), absent(70)) == JobStatus(JobPhase.LOST)
    assert view(present(1, "RUNNING"), absent(10), absent(40)).phase == JobPhase.RUNNING
    assert view(present(1, "RUNNING"), absent(10), absent(40), absent(70)) == JobStatus(JobPhase.LOST, "RUNNING")
    assert view(absent(10), absent(310), requeue=True).phase == JobPhase.LOST
    assert not view(absent(10), absent(309), requeue=True).over


def test_one_snapshot_without_the_job_does_not_lose_it() -> None:
    assert not view(absent(100_000)).over
    assert not view(present(1, "RUNNING"), absent(100_000)).over


def test_a_job_that_reappears_resets_its_absence() -> None:
    steps = [absent(0), absent(50), present(55, "RUNNING"), absent(60), absent(110)]
    assert view(*steps).phase == JobPhase.RUNNING
    assert view(*steps, absent(120)).phase == JobPhase.LOST


def test_snapshots_from_before_the_submission_are_ignored() -> None:
    assert view(absent(-100), absent(-1), absent(1), absent(59)).phase == JobPhase.UNKNOWN
    assert view(present(-1, "COMPLETED")) == JobStatus(JobPhase.UNKNOWN)


@pytest.mark.parametrize("state", sorted(MAY_REQUEUE))
def test_a_job_that_may_be_requeued_is_not_over(state: str) -> None:
    steps: list[Observation] = [present(1, "RUNNING"), *(present(10 + 30 * step, state) for step in range(10))]
    assert view(*steps, requeue=True) == JobStatus(JobPhase.UNKNOWN, state)
    assert view(*steps, present(309, "PENDING", reason="BeginTime"), requeue=True).phase == JobPhase.PENDING
    assert view(*steps, present(309, "REQUEUED"), requeue=True).phase == JobPhase.PENDING
    assert view(*steps, absent(310), requeue=True) == JobStatus(JobPhase.ENDED, state)
    lost = view(present(1, "RUNNING"), present(20, state), absent(30), absent(330), requeue=True)
    assert lost == JobStatus(JobPhase.ENDED, state)


def test_a_requeued_job_is_pending_after_its_record_started() -> None:
    assert view(present(1, "PENDING"), Started(1010)).phase == JobPhase.RUNNING
    assert view(Started(1010), present(5, "PENDING")).phase == JobPhase.RUNNING
    again = view(Started(1010), present(20, "RUNNING"), present(40, "PENDING", reason="BeginTime"), requeue=True)
    assert (again.phase, again.reason) == (JobPhase.PENDING, "BeginTime")
    assert view(Started(1010)) == JobStatus(JobPhase.RUNNING)


def test_the_exit_of_the_batch_script_ends_a_job() -> None:
    assert view(present(1, "RUNNING", nodes="c1"), Exited(1010, 3)) == JobStatus(JobPhase.ENDED, exit_code=3)
    assert view(Exited(1010, 0)) == JobStatus(JobPhase.ENDED, exit_code=0)
    assert view(absent(1), absent(61), Exited(1062, 0)).phase == JobPhase.LOST, "what came first is final"


def test_a_late_exit_code_completes_the_final_status() -> None:
    """A runtime that a signal ended has no more to write, though Slurm calls its job no more than failed."""
    seen_first = [present(1, "RUNNING", nodes="c1"), present(9, "FAILED", reason="NonZeroExitCode", nodes="c1")]
    ended = view(*seen_first, Exited(1010, 137))
    assert ended == replace(view(*seen_first), exit_code=137) == view(*seen_first, Exited(1010, 137), Exited(1011, 0))
    assert (
        settling_time(view(*seen_first), started=True, recorded=True) > 30 > 5 > settling_time(ended, started=True, recorded=True)
    )


@pytest.mark.parametrize("code", [0, 143])
def test_an_exit_code_does_not_end_a_job_that_may_be_requeued(code: int) -> None:
    steps: list[Observation] = [present(1, "RUNNING"), Exited(1010, code)]
    assert view(*steps, requeue=True).phase == JobPhase.RUNNING
    assert view(*steps, present(30, "PENDING"), requeue=True).phase == JobPhase.PENDING
    assert view(*steps, present(30, "FAILED"), requeue=True) == JobStatus(JobPhase.ENDED, "FAILED", exit_code=code)
    assert view(*steps, absent(30), absent(330), requeue=True) == JobStatus(JobPhase.LOST, "RUNNING", exit_code=code)


def test_the_exit_code_is_that_of_the_last_run() -> None:
    """With that of the run before, which a signal ended, the record of a success would hardly be waited for."""
    steps = [present(1, "RUNNING"), Exited(1010, 143), present(30, "PENDING"), present(40, "RUNNING"), present(50, "COMPLETED")]
    assert view(*steps, Exited(1051, 0), requeue=True) == JobStatus(JobPhase.ENDED, "COMPLETED", exit_code=0)


@given(submissions, st.lists(snapshots, max_size=15), st.lists(observations, max_size=25), st.data())
def test_repeated_observations_count_once(
    submission: JobWatch, before: list[Seen], given_observations: list[Observation], data: st.DataObject
) -> None:
    """Snapshots are shown again at every look; the record and the exit code are found again after a lost connection."""
    given_observations = in_order([*before, *given_observations])
    again: list[Observation] = []
    for number, observation in enumerate(given_observations):
        again.append(observation)
        again += data.draw(st.lists(st.sampled_from([observation, *filter(is_seen, given_observations[:number])]), max_size=2))
    assert watched(submission, again) == watched(submission, given_observations)


def is_seen(observation: Observation) -> bool:
    return isinstance(observation, Seen)


def in_order(given_observations: list[Observation]) -> list[Observation]:
    return sorted(given_observations, key=lambda each: (each.at, repr(each)))


@given(submissions, st.lists(snapshots, max_size=25, unique_by=lambda each: each.at), st.data())
def test_old_snapshots_change_nothing(submission: JobWatch, shown: list[Seen], data: st.DataObject) -> None:
    watch = submission
    shown.sort(key=lambda each: each.at)
    for number, snapshot in enumerate(shown):
        watch = snapshot.add(watch)
        for old in data.draw(st.lists(st.sampled_from(shown[: number + 1]), max_size=3)):
            assert old.add(watch) == watch
    assert watch.view == watched(submission, shown)


@given(submissions, st.lists(observations, max_size=30))
def test_a_final_status_never_changes(submission: JobWatch, given_observations: list[Observation]) -> None:
    watch, final = submission, None
    for observation in in_order(given_observations):
        watch = observation.add(watch)
        if final is not None:
            exit_code = watch.view.exit_code if final.exit_code is None or submission.requeue else final.exit_code
            assert watch.view == replace(final, exit_code=exit_code)
        final = watch.view if watch.view.over else None


@given(submissions, st.lists(observations, max_size=30))
def test_a_job_ends_only_on_positive_evidence(submission: JobWatch, given_observations: list[Observation]) -> None:
    result = watched(submission, in_order(given_observations))
    states = {each.row.state for each in given_observations if isinstance(each, Seen) and each.row}
    exits = {each.exit_code for each in given_observations if isinstance(each, Exited)}
    if result.phase == JobPhase.ENDED:
        assert states & TERMINAL or exits
        assert result.state in states & TERMINAL or (result.state == "" and result.exit_code in exits)
    if result.phase == JobPhase.LOST:
        missing = [each.at for each in given_observations if isinstance(each, Seen) and each.row is None]
        assert max(missing) - min(missing) >= (300 if submission.requeue else 60)


@settings(max_examples=300)
@given(submissions, st.lists(snapshots, min_size=2, max_size=30, unique_by=lambda each: each.at), st.floats(0, 1e5), st.data())
@example(ONCE, [absent(0), absent(30), absent(60)], 0.0, None)
def test_missing_snapshots_only_delay_a_loss(submission: JobWatch, shown: list[Seen], outage: float, data: Any) -> None:
    """Leaving snapshots out may only delay the loss of a job, never bring it about."""
    shown.sort(key=lambda each: each.at)
    without = [each for each in shown if data is None or data.draw(st.booleans()) or each.row is not None]
    if watched(submission, without).phase == JobPhase.LOST:
        assert watched(submission, shown).over


@given(submissions, st.lists(snapshots, max_size=25))
def test_a_job_is_lost_only_by_an_unbroken_absence(submission: JobWatch, shown: list[Seen]) -> None:
    """A second way to say it: the longest run of snapshots without the job, among the unique ones in order."""
    unique: dict[float, Seen] = {}
    for each in sorted(shown, key=repr):
        unique.setdefault(each.at, each)
    since, count, lost = math.inf, 0, False
    ends = TERMINAL - MAY_REQUEUE if submission.requeue else TERMINAL
    for at, each in sorted(unique.items()):
        if at < SUBMITTED:
            continue
        if each.row is not None and each.row.state in ends:
            break
        if each.row is not None and each.row.state not in TERMINAL:
            since, count = math.inf, 0
            continue
        since, count = min(since, at), count + 1
        if count >= 2 and at - since >= (300 if submission.requeue else 60):
            lost = True
            break
    result = watched(submission, sorted(unique.values(), key=lambda each: each.at))
    assert (
        result.phase == JobPhase.LOST or (result.phase == JobPhase.ENDED and result.state in MAY_REQUEUE and submission.requeue)
    ) == lost


@pytest.mark.parametrize("version", VERSIONS)
def test_rows_of_real_clusters(version: str) -> None:
    rows_shown = parse_squeue(said(version, "squeue", "squeue")[1].replace("MARK\x1f", "\x1e\x1f"))
    waiting = next(each for each in rows_shown if each.name == "JobState=X Reason=y")
    snapshot = QueueSnapshot(SUBMITTED, rows_shown)
    assert watched(JobWatch(SUBMITTED), [Seen(SUBMITTED, snapshot.job(waiting.job_id))]).reason == "BeginTime"
    assert snapshot.job(1) is None


def test_a_node_that_failed_on_a_real_cluster() -> None:
    """Slurm 24.11: the controller was silent for a minute, then the job was back in the queue under its id."""
    submission = JobWatch(1795282192, requeue=True)
    between = [Seen(1795282193, row("RUNNING", nodes="c2")), Seen(1795282260, row("NODE_FAIL", nodes="c2"))]
    assert watched(submission, between) == JobStatus(JobPhase.UNKNOWN, "NODE_FAIL")
    rows_shown = parse_squeue(said("24.11", "squeue", "squeue")[1].replace("MARK\x1f", "\x1e\x1f"))
    back = watched(submission, [*between, Seen(1795282303, QueueSnapshot(1795282303, rows_shown).job(15))])
    assert (back.phase, back.reason) == (JobPhase.PENDING, "ReqNodeNotAvail, UnavailableNodes:c2")
