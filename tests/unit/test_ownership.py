"""Exactly one attempt owns a payload that outlives its Dagster process."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from dagster_rayslurm.backends import ownership
from dagster_rayslurm.backends.base import Step
from dagster_rayslurm.backends.ownership import FIRST_OWNER, Ownership, owner_file, owner_in_words
from dagster_rayslurm.backends.slurm_job import BatchJob
from dagster_rayslurm.follow import Evidence
from dagster_rayslurm.slurm.states import JobPhase
from dagster_rayslurm.ssh.local import LocalConnection

from .lines import Log


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "run dir"
    path.mkdir()
    (path / FIRST_OWNER).write_bytes(b"")
    return path


class AnswersLost(LocalConnection):
    """Does the first rename twice, as a connection does that breaks meanwhile."""

    def __init__(self) -> None:
        self.renamed = False

    def rename(self, old: str, new: str) -> None:
        if not self.renamed:
            self.renamed = True
            super().rename(old, new)
        super().rename(old, new)


class Clock:
    """The clock of the module, which sleeps by going on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(ownership.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(ownership.time, "sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def first(run_dir: Path, successor: str | None = None, connection: LocalConnection | None = None) -> Ownership:
    return Ownership(connection or LocalConnection(), str(run_dir), FIRST_OWNER, lambda: successor)


def later(run_dir: Path, run_id: str = "run-b", connection: LocalConnection | None = None) -> Ownership:
    return Ownership(connection or LocalConnection(), str(run_dir), owner_file(run_id), lambda: None)


def test_the_owner_steps_back_once_another_attempt_has_taken_the_payload_over(run_dir: Path) -> None:
    a, b = first(run_dir), later(run_dir)
    assert b.take_over() and not a.confirm() and not a.confirm_or_assume() and not a.confirm()
    assert a.new_owner is not None and a.new_owner.startswith("run run-b (process ")
    assert run_dir.exists() and b.confirm() and b.confirm_or_assume() and b.new_owner is None


def test_a_confirmed_payload_cannot_be_taken_over(run_dir: Path) -> None:
    a, b = first(run_dir), later(run_dir)
    assert a.confirm() and not b.take_over() and a.confirm() and a.new_owner is None


def test_the_last_of_several_attempts_owns_the_payload(run_dir: Path) -> None:
    a, b, c = first(run_dir), later(run_dir), later(run_dir, "run-c")
    assert b.take_over() and c.take_over() and not a.confirm() and not b.confirm() and c.confirm()
    assert b.new_owner is not None and b.new_owner.startswith("run run-c ")


def test_a_payload_whose_owner_removed_the_run_directory_cannot_be_taken_over(run_dir: Path) -> None:
    a, b = first(run_dir), later(run_dir)
    assert a.confirm()
    shutil.rmtree(run_dir)
    assert a.confirm() and not b.take_over()


@pytest.mark.parametrize(("successor", "new_owner"), [("run-b", "run run-b"), (None, None)])
def test_a_run_directory_that_is_gone_was_removed_by_a_successor_or_by_hand(
    run_dir: Path, successor: str | None, new_owner: str | None
) -> None:
    a = first(run_dir, successor)
    shutil.rmtree(run_dir)
    assert a.confirm() is (new_owner is None) and a.new_owner == new_owner


def test_a_lost_answer_changes_nothing(run_dir: Path) -> None:
    assert first(run_dir, connection=AnswersLost()).confirm()


def test_a_takeover_with_a_lost_answer_succeeds(run_dir: Path) -> None:
    b = later(run_dir, connection=AnswersLost())
    assert b.take_over() and b.take_over() and b.confirm()


@pytest.mark.parametrize("judged", [False, True])
def test_only_the_owner_writes_results(run_dir: Path, judged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    a, b = first(run_dir), later(run_dir)
    assert a.holds() and (not judged or (a.confirm() and not b.take_over()))
    b.displace()
    assert clock.now >= 2
    assert not a.holds() and a.new_owner is not None and a.new_owner.startswith("run run-b ")
    assert a.confirm() is judged


def test_the_owner_is_looked_at_twice_a_second(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, a = Clock(monkeypatch), first(run_dir)
    assert a.holds()
    assert later(run_dir).take_over()
    clock.now += 0.4
    assert a.holds()
    clock.now += 0.2
    assert not a.holds()


def test_where_no_attempt_was_nobody_waits(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, a, b = Clock(monkeypatch), first(run_dir), later(run_dir)
    shutil.rmtree(run_dir)
    b.displace()
    assert clock.now == 0 and a.holds()  # A person has removed the directory.


def test_an_unknown_owner_is_assumed_to_be_this_attempt(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a = first(run_dir)

    def denied(*_: Any) -> None:
        raise PermissionError("Permission denied")

    monkeypatch.setattr(LocalConnection, "rename", denied)
    with pytest.raises(OSError, match="Permission denied"):
        a.confirm()
    assert a.confirm_or_assume() and a.new_owner is None


def test_the_owner_file_in_words() -> None:
    assert owner_in_words("owner.0-1-2.77.node.example.org.abcd.judged") == "run 0-1-2 (process 77 on node.example.org)"


class Job:
    """A Slurm job that runs."""

    def __init__(self, directory: str) -> None:
        self.log, self.directory, self.job_id, self.commands = Log(), directory, "7", LocalConnection()
        self.status = self
        self.phase, self.over, self.cancelled = JobPhase.RUNNING, False, False
        self.confirmed, self.requeue = 0, False

    def cancel_until_gone(self, *_: Any) -> None:
        self.confirmed += 1

    def observe(self, *_: Any) -> bool:
        return False


@pytest.mark.parametrize("started", [True, False])
def test_a_job_that_another_attempt_has_taken_over_is_not_ended(run_dir: Path, started: bool) -> None:
    job = Job(str(run_dir))
    step = Step("run", "step", None, job.log, owner=first(run_dir))
    attempt = BatchJob(job, "c", str(run_dir), step)  # type: ignore[arg-type]
    assert later(run_dir).take_over()
    evidence = Evidence(started_at=1.0 if started else None)
    attempt.poll(evidence)
    attempt.cancel()
    attempt.cancel(now=True)
    attempt.kill()
    attempt.release(evidence)
    assert not job.confirmed and not job.cancelled and not (run_dir / "cancel.json").exists()
    assert step.owner.new_owner is not None
