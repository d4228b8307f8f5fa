"""How long the record of a job that is over is awaited, and when the queue is queried first."""

import logging
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest

from dagster_rayslurm import RunFailure, SlurmQueueConfig
from dagster_rayslurm.backends import slurm_job
from dagster_rayslurm.backends.base import Step
from dagster_rayslurm.backends.slurm_job import BatchJob, SlurmJob, settling_time
from dagster_rayslurm.follow import Evidence
from dagster_rayslurm.follow.follower import VISIBILITY_TIMEOUT
from dagster_rayslurm.slurm.request import make_request
from dagster_rayslurm.slurm.shared_queue import ClusterClock, SharedQueue
from dagster_rayslurm.slurm.states import JobPhase, JobStatus
from dagster_rayslurm.slurm.submit import SubmittedJob
from dagster_rayslurm.ssh.local import LocalConnection

from ..fake_slurm import FakeSlurm
from .lines import Log

LOST = JobStatus(JobPhase.LOST)


def over(state: str = "", exit_code: int | None = None) -> JobStatus:
    return JobStatus(JobPhase.ENDED, state, exit_code=exit_code)


@pytest.mark.parametrize("view", [over(exit_code=3), over(exit_code=0), over("FAILED", 3), over("FAILED"), over("COMPLETED")])
def test_the_record_of_a_runtime_that_exited_is_awaited(view: JobStatus) -> None:
    """It is waited for as long as a network file system may hide it, whether some of it was seen or nothing."""
    assert (
        settling_time(view, started=True, recorded=True)
        == settling_time(view, started=True, recorded=False)
        == VISIBILITY_TIMEOUT
    )
    assert settling_time(view, started=False, recorded=True) == VISIBILITY_TIMEOUT


TASK_FAILED = "srun: error: c1: task 0: Exited with exit code 9"
FAILED, EXITED = over("FAILED"), over(exit_code=9)


@pytest.mark.parametrize(
    ("view", "started", "log", "waits"),
    [
        *((view, False, "no such module: ray", False) for view in (FAILED, EXITED)),
        *((view, False, "", True) for view in (FAILED, EXITED)),
        (replace(FAILED, reason="JobLaunchFailure"), False, "", False),
        *((view, True, "no such module: ray", True) for view in (FAILED, EXITED)),
        *((view, False, "Welcome to c1", True) for view in (over("COMPLETED"), over("COMPLETED", 0), over(exit_code=0))),
    ],
)
def test_a_log_that_explains_the_missing_record_shortens_the_wait(
    view: JobStatus, started: bool, log: str, waits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not if some of it was seen, nor of a success: a runtime tells of that in its record alone."""
    connection = LocalConnection()
    job = SlurmJob(
        commands=connection,
        queue=SharedQueue(connection, str(tmp_path), 1.0),
        request=make_request(SlurmQueueConfig(), (), job_name="x", comment=""),
        submitted=SubmittedJob("1", 0.0),
        directory=str(tmp_path),
        queue_timeout=None,
        log=logging.getLogger("job"),
    )
    job._watch = replace(job._watch, final=view)
    (tmp_path / "slurm.log").write_text(f"{TASK_FAILED}\nsrun: Terminating StepId=1.0\n")
    (tmp_path / "node-0.log").write_text(log)
    assert job.end_description(started) is None, "it may just not be there yet"
    monkeypatch.setattr(slurm_job, "_UNSEEN_TIMEOUT", 0.0)
    assert (job.end_description(started) is None) == waits
    monkeypatch.setattr(slurm_job, "VISIBILITY_TIMEOUT", 0.0)
    assert job.end_description(started) is not None


@pytest.mark.parametrize("view", [over(exit_code=137), over("CANCELLED", 3), over("NODE_FAIL"), over("TIMEOUT", 143), LOST])
@pytest.mark.parametrize("recorded", [False, True])
def test_the_record_of_a_killed_runtime_is_awaited_briefly(view: JobStatus, recorded: bool) -> None:
    assert settling_time(view, started=True, recorded=recorded) < 5
    assert settling_time(view, started=False, recorded=recorded) < 5


def test_a_record_without_reader_is_not_awaited() -> None:
    assert settling_time(over("FAILED"), started=False, recorded=False) == 0
    assert settling_time(over(exit_code=1), started=False, recorded=False) < 5


class Clock(ClusterClock):
    """The clock of this machine, put forward by a test."""

    ahead = 0.0

    def now(self) -> float:
        return time.time() + self.ahead


def test_the_queue_wait_of_a_payload_that_ends_between_two_polls(tmp_path: Path) -> None:
    connection, now = LocalConnection(), time.time()
    job = SlurmJob(
        commands=connection,
        queue=SharedQueue(connection, str(tmp_path), 1.0, lambda work: work(), Clock(connection)),
        request=make_request(SlurmQueueConfig(), (), job_name="x", comment=""),
        submitted=SubmittedJob("7", now - 5),
        directory=str(tmp_path),
        queue_timeout=None,
        log=Log(),
    )
    running = BatchJob(job, "c", str(tmp_path), Step("run", "step", None, Log()))
    assert running.metadata(Evidence(started_at=now - 2))["Queue wait (s)"] == 3.0


def test_the_first_query_waits_until_slurm_knows_the_pending_reason(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    """An earlier one shows a job without a reason, and the next one is half a minute later."""
    slurm, log = fake_slurm, Log()
    clock = Clock(slurm.connection)
    queue = SharedQueue(slurm.connection, str(tmp_path / "queue-of-us"), 30.0, lambda work: work(), clock)
    job = SlurmJob(
        commands=slurm.connection,
        queue=queue,
        request=make_request(SlurmQueueConfig(), (), job_name="x", comment=""),
        submitted=SubmittedJob("7", time.time()),
        directory=str(tmp_path),
        queue_timeout=None,
        log=log,
    )

    def look(reason: str, ahead: float) -> tuple[int, list[str]]:
        slurm.job(7, "x", "PENDING", reason=reason, start=clock.now() + 60)
        clock.ahead = ahead
        assert job.observe()
        job.report_waiting()
        return len(slurm.calls("squeue")), log.lines

    assert look("None", 0.0) == (0, [])
    assert look("None", 1.5) == (0, [])
    asked, lines = look("Resources", 2.5)
    assert asked == 1 and len(lines) == 1
    assert re.fullmatch(
        r"\[rayslurm\] Slurm job 7 is waiting for Resources; Slurm expects a start at ..:.. UTC at the latest", lines[0]
    )
    assert look("Resources", 20.0)[0] == 1


def test_a_requeued_job_waits_anew(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    """It ran for hours before the requeue."""
    slurm, now = fake_slurm, time.time()
    clock = Clock(slurm.connection)
    job = SlurmJob(
        commands=slurm.connection,
        queue=SharedQueue(slurm.connection, str(tmp_path / "queue-of-us"), 1.0, lambda work: work(), clock),
        request=make_request(SlurmQueueConfig(requeue=True), (), job_name="x", comment=""),
        submitted=SubmittedJob("7", now - 7200),
        directory=str(tmp_path),
        queue_timeout=600,
        log=Log(),
    )
    running = BatchJob(job, "c", str(tmp_path), Step("run", "step", None, Log()))
    slurm.job(7, "x", "PENDING", reason="Priority", submit=now - 5)
    evidence = Evidence(started_at=now - 7000)
    assert running.poll(evidence) is None and job.status.phase is JobPhase.PENDING
    clock.ahead = 700.0
    with pytest.raises(RunFailure, match="queue_timeout=600 s: Priority"):
        running.poll(evidence)
