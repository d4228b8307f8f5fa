"""A payload in a session: its cancel request is repeated until delivered, and an end without a record is detected."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dagster_rayslurm.backends import base as backends_base
from dagster_rayslurm.backends.base import Step
from dagster_rayslurm.backends.sessions import payload as session_payload
from dagster_rayslurm.backends.sessions.payload import SessionPayload
from dagster_rayslurm.follow import Evidence
from dagster_rayslurm.outcome.verdict import judge, needs_job_facts
from dagster_rayslurm.runtime.protocol.record import encode
from dagster_rayslurm.ssh.base import ConnectionLost
from dagster_rayslurm.ssh.local import LocalConnection

from .lines import Log


class Clock:
    """Time that passes only in `sleep`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Job:
    """The running job of a session."""

    def __init__(self) -> None:
        self.status = self
        self.over = False
        self.job_id = "7"
        self.how: str | None = None

    def observe(self, *_: Any, **__: Any) -> bool:
        return True

    def end_description(self, started: bool) -> str | None:
        return self.how


class Owner:
    """Whether this attempt owns the payload."""

    def __init__(self) -> None:
        self.owns: bool | OSError = True
        self.new_owner = None

    def confirm(self) -> bool:
        if isinstance(self.owns, OSError):
            raise self.owns
        return self.owns

    def confirm_or_assume(self) -> bool:
        return self.owns is not False


class Scene:
    def __init__(self, path: Path) -> None:
        self.path = path / "run dir"
        self.path.mkdir()
        self.run_dir = str(self.path)
        self.plan = SimpleNamespace(payload=SimpleNamespace(nonce="n"))
        self.end_command = "scancel"
        self.connection = LocalConnection()
        self.job, self.log = Job(), Log()
        self.answers: list[Any] = []
        self.asked = 0
        self.owner = Owner()
        self.step = Step("run", "step", None, self.log, owner=self.owner)  # type: ignore[arg-type]
        announcement = SimpleNamespace(cluster_id="slurm-1", job_id="7")
        session: Any = SimpleNamespace(directory="/base/sessions/default-1/1", announcement=announcement)
        self.payload = SessionPayload(self, session, self.job, 30.0, True, 0.0)  # type: ignore[arg-type]

    def send(self, _: Any, request: Any) -> dict[str, Any]:
        assert request == {"op": "describe"}
        return self.describe()

    def describe(self) -> dict[str, Any]:
        self.asked += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, OSError):
            raise answer
        return {"ok": True, "payloads": [{"run_dir": path} for path in answer]}

    @property
    def cancel(self) -> Any:
        try:
            return json.loads((self.path / "cancel.json").read_text())
        except FileNotFoundError:
            return None

    def end(self) -> None:
        (self.path / "journal.jsonl").write_bytes(encode({"type": "end", "nonce": "n"}))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (session_payload, backends_base):
        monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def scene(tmp_path: Path, clock: Clock) -> Iterator[Scene]:
    yield Scene(tmp_path)


def failing(scene: Scene, monkeypatch: pytest.MonkeyPatch, times: int, then: Callable[[], None] = lambda: None) -> list[int]:
    """Let some writes fail; returns the times of all tries."""
    write, tries = scene.connection.write, [0]

    def fail(*words: Any) -> None:
        tries[0] += 1
        if tries[0] <= times:
            raise ConnectionLost("no way")
        write(*words)
        then()

    monkeypatch.setattr(scene.connection, "write", fail)
    return tries


def test_a_failed_cancel_request_is_sent_again(scene: Scene, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = failing(scene, monkeypatch, 3)
    scene.payload.cancel()
    evidence = Evidence(started_at=1.0, last_growth=clock.now)
    for _ in range(100):
        clock.sleep(0.1)
        scene.payload.poll(evidence)
    assert scene.cancel == {"op": "cancel", "now": False} and tries == [4]
    assert len([line for line in scene.log.lines if "tried again: no way" in line]) == 1


def test_kill_repeats_the_cancel_request(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(scene, monkeypatch, 20, then=scene.end)
    scene.payload.kill()
    assert scene.cancel == {"op": "cancel", "now": True} and not any("may still run" in line for line in scene.log.lines)


def test_kill_reports_an_undelivered_cancel_request(scene: Scene, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    began, tries = clock.now, failing(scene, monkeypatch, 1000)
    scene.payload.kill()
    assert 60 <= clock.now - began < 65 and tries[0] >= 30
    said = scene.log.lines[-1]
    assert f"told to end by {scene.run_dir}/cancel.json (no way)" in said and "run `scancel 7` on this machine" in said


def test_kill_reports_a_payload_that_does_not_end(scene: Scene, clock: Clock) -> None:
    began = clock.now
    scene.payload.kill()
    assert 10 <= clock.now - began < 12
    assert "does not say that it has ended" in scene.log.lines[-1] and "scancel 7" in scene.log.lines[-1]


def silent_for(scene: Scene, clock: Clock, evidence: Evidence, seconds: float) -> str | None:
    """How the payload ended, if the record stays silent for some seconds."""
    until = clock.now + seconds
    while clock.now < until:
        clock.sleep(1.0)
        how = scene.payload.poll(evidence)
        if how is not None:
            return how
    return None


def test_a_silent_payload_is_looked_up_less_and_less_often(scene: Scene, clock: Clock) -> None:
    scene.answers = [[str(scene.run_dir)]]
    evidence = Evidence(started_at=1.0, last_growth=clock.now)
    assert silent_for(scene, clock, evidence, 59) is None and scene.asked == 0
    assert silent_for(scene, clock, evidence, 4 * 3600) is None and 10 < scene.asked < 25


@pytest.mark.parametrize("answer", [OSError("nobody is there"), "no list"])
def test_an_answer_without_payloads_is_ignored(scene: Scene, clock: Clock, answer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.answers = [answer]
    if answer == "no list":
        scene.describe = lambda: {"ok": False, "error": "unknown request"}
    assert silent_for(scene, clock, Evidence(started_at=1.0, last_growth=clock.now), 3600) is None


def test_a_payload_that_ended_without_a_record(scene: Scene, clock: Clock) -> None:
    """The runtime serves other payloads, and no one knows whether this one succeeded."""
    scene.answers = [[str(scene.run_dir)], ["/another"], ["/another"]]
    evidence = Evidence(started_at=1.0, last_growth=clock.now)
    began = clock.now
    evidence.runtime_exit = silent_for(scene, clock, evidence, 3600)
    assert evidence.runtime_exit is not None and 239 <= clock.now - began < 250 and scene.asked == 3
    assert not needs_job_facts(evidence)
    verdict = judge(evidence, uses_pipes=True, require_messages=True)
    assert verdict.kind == "record" and not verdict.retry
    assert str(scene.run_dir) in verdict.sentence and "may have succeeded" in verdict.sentence


def test_an_end_record_that_appears_later(scene: Scene, clock: Clock) -> None:
    scene.answers = [[]]
    evidence = Evidence(started_at=1.0, last_growth=clock.now)
    assert silent_for(scene, clock, evidence, 80) is None and scene.asked == 1
    evidence.last_growth = clock.now  # What follows the record reads on.
    assert silent_for(scene, clock, evidence, 59) is None and evidence.ended_unrecorded is None


def test_the_end_of_the_job_is_seen_without_a_request(scene: Scene, clock: Clock) -> None:
    scene.job.over, scene.job.how = True, "Slurm calls the job TIMEOUT"
    assert silent_for(scene, clock, Evidence(started_at=1.0, last_growth=clock.now), 600) == "Slurm calls the job TIMEOUT"
    assert scene.asked == 0


def test_a_payload_with_a_new_owner_is_not_ended(scene: Scene) -> None:
    scene.owner.owns = False
    scene.payload.cancel()
    scene.payload.cancel(now=True)
    scene.payload.kill()
    scene.payload.release(Evidence())
    assert scene.cancel is None


def test_a_cancel_request_waits_until_the_owner_is_known(scene: Scene, clock: Clock) -> None:
    scene.owner.owns = ConnectionLost("cut")
    scene.payload.cancel()
    assert scene.cancel is None
    scene.owner.owns = True
    clock.now += 2
    scene.payload.poll(Evidence(last_growth=clock.now))
    assert scene.cancel == {"op": "cancel", "now": False}
