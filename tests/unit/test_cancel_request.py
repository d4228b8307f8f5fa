"""A cancel request is repeated until it is delivered."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dagster_rayslurm.backends import base, slurm_job
from dagster_rayslurm.backends.base import CancelRequest, Step
from dagster_rayslurm.backends.slurm_job import BatchJob, SlurmJob
from dagster_rayslurm.follow import Evidence
from dagster_rayslurm.separate.backend import ComponentJob
from dagster_rayslurm.slurm.states import JobPhase, JobStatus
from dagster_rayslurm.ssh.base import Completed, ConnectionLost
from dagster_rayslurm.ssh.local import LocalConnection

from .lines import Log

STEP = Step("run", "step", None, Log())


class Scene:
    """A cancel request that is delivered after some attempts have failed."""

    def __init__(self, failing: int) -> None:
        self.now, self.failing = 1000.0, failing
        self.log, self.sent = Log(), list[bool]()
        self.evidence = Evidence()
        self.request = CancelRequest(self._deliver, self.log)

    def _deliver(self, now: bool) -> None:
        self.sent.append(now)
        if len(self.sent) <= self.failing:
            raise ConnectionLost("no way")

    def wait(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += 0.1
            self.request.resend_for(self.evidence)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Scene]:
    def make(failing: int) -> Scene:
        made = Scene(failing)
        monkeypatch.setattr(base, "time", SimpleNamespace(monotonic=lambda: made.now))
        return made

    return make


def test_nothing_is_sent_before_a_request(scene: Callable[[int], Scene]) -> None:
    there = scene(0)
    there.wait(5)
    assert there.sent == [] and there.request.now is None and not there.request.delivered


def test_a_request_is_resent_each_second_until_delivered(scene: Callable[[int], Scene]) -> None:
    there = scene(4)
    there.request.send(False)
    there.wait(3)
    assert 3 <= len(there.sent) <= 4 and not there.request.delivered and there.evidence.unreachable is None
    there.wait(10)
    assert there.sent == 5 * [False] and there.request.delivered and there.request.error is None
    assert there.log.lines == ["[rayslurm] the payload cannot be told to end, which is tried again: no way"]


def test_an_immediate_request_replaces_one_with_grace_period(scene: Callable[[int], Scene]) -> None:
    there = scene(0)
    for now in (False, False, True, True, False):
        there.request.send(now)
        there.wait(2)
    assert there.sent == [False, True] and there.request.now


def test_an_undeliverable_immediate_request_makes_the_payload_unreachable(scene: Callable[[int], Scene]) -> None:
    there = scene(1000)
    there.request.send(False)
    there.wait(60)
    assert there.evidence.unreachable is None
    there.request.send(True)
    there.wait(0.1)
    assert there.evidence.unreachable == "no way" and len(there.log.lines) == 1


class Job:
    """A job whose end Slurm does not confirm."""

    job_id, number, cancelled = "7", 7, False
    status = JobStatus(JobPhase.RUNNING)

    def __init__(self, directory: Path) -> None:
        self.directory, self.log = str(directory), Log()
        self._cancel_tried, self.requeue, self.commands = False, False, LocalConnection()

    def observe(self, *_: Any) -> bool:
        return True

    def end_description(self, started: bool) -> None:
        return None

    def now(self) -> float:
        return 0.0

    cancel_until_gone = SlurmJob.cancel_until_gone


@pytest.mark.parametrize("parts", [1, 2])
def test_an_unconfirmed_cancel_is_waited_for_once(parts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In `kill` and `release` of one payload or of several components."""
    job, shared = Job(tmp_path), Evidence()
    waits: list[int] = []
    monkeypatch.setattr(slurm_job, "wait_until_gone", lambda _, job_id, patience: waits.append(job_id))
    attempts: list[BatchJob] = [BatchJob(job, "c", str(tmp_path), STEP)]  # type: ignore[arg-type]
    if parts > 1:
        attempts = [ComponentJob(job, "c", f"{tmp_path}/{name}", STEP, shared=shared) for name in "ab"]  # type: ignore[arg-type]
    for attempt in attempts:
        attempt.kill()
    for attempt in attempts:
        attempt.release(Evidence())
    assert waits == [7] and len(job.log.lines) == 1 and "may still be there" in job.log.lines[0]


def test_slurm_cancels_a_waiting_job_and_the_runtime_a_running_payload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`scancel` is repeated until it works or the runtime has started; then the runtime gets the request by its file."""
    job, order, commands = Job(tmp_path), tmp_path / "cancel.json", LocalConnection()
    asked: list[str] = []
    clock = [1000.0]
    monkeypatch.setattr(base, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def run(command: list[str], *_: Any) -> Completed:
        asked.append(" ".join(command[-2:]))
        return Completed(0, b"", b"scancel: error: Unable to contact slurm controller\n")

    monkeypatch.setattr(commands, "run", run)
    job.commands = commands
    attempt = BatchJob(job, "c", str(tmp_path), STEP)  # type: ignore[arg-type]
    attempt.cancel()
    for _ in range(2):
        clock[0] += 1.0
        attempt.poll(Evidence())
    assert asked == 3 * ["scancel 7"] and not order.exists() and job.cancelled
    for _ in range(2):
        clock[0] += 1.0
        attempt.poll(Evidence(started_at=1.0))
    assert len(asked) == 3 and order.read_text() == '{"op": "cancel", "now": false}'
    assert len(job.log.lines) == 1 and "Unable to contact" in job.log.lines[0]
