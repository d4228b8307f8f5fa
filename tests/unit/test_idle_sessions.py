"""Idle sessions yield to a job of the same user that waits for their nodes."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dagster_rayslurm.backends.sessions import listing as idle
from dagster_rayslurm.backends.sessions.listing import IdleSessions
from dagster_rayslurm.backends.sessions.request import Unreachable
from dagster_rayslurm.runtime.protocol.rpc import AnswerLost
from dagster_rayslurm.slurm.shared_queue import QueueRow, QueueSnapshot
from dagster_rayslurm.ssh.local import LocalConnection

from .lines import Log

KEY = "default-0123456789ab"
ANNOUNCED = {
    "protocol": 1,
    "cluster_id": "slurm-0123456789ab",
    "job_id": "12",
    "hosts": ["c1"],
    "port": 1,
    "key": "00",
    "hostname": "c1",
    "closing": None,
    "idle": True,
}


def row(job_id: int, state: str, **fields: Any) -> QueueRow:
    usual: dict[str, Any] = {
        "reason": "None",
        "partition": "compute",
        "nodes": "",
        "name": "rayslurm-train-aaaaaaaaaaaa",
        **fields,
    }
    return QueueRow(job_id=job_id, label=str(job_id), state=state, start=None, submit=None, num_nodes=2, **usual)


SESSION = row(12, "RUNNING", nodes="c[1-2]", name="rayslurm-session-default-0123456789ab")


class Scene:
    """Idle sessions below a base directory, and the requests that they get."""

    def __init__(self, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log, self.requests = Log(), list[Any]()
        self.answer: dict[str, Any] = {"ok": True}
        self.directory = base / "sessions" / KEY / "1"
        self.directory.mkdir(parents=True)
        (self.directory / "job_id").write_text("12\n")
        self.announce()
        self.sessions = IdleSessions(LocalConnection(), str(base), self.log)
        monkeypatch.setattr(idle, "_INTERVAL", 0.0)
        monkeypatch.setattr(idle, "send_request", self.ask)

    def announce(self, **fields: Any) -> None:
        (self.directory / "session.json").write_text(json.dumps({**ANNOUNCED, **fields}))

    def ask(self, _: Any, generation: Any, request: Any) -> Any:
        self.requests.append((generation.key, request["op"]))
        return self.answer

    def wait(self, reason: str = "Resources", *others: QueueRow, **fields: Any) -> None:
        waiting = row(20, "PENDING", reason=reason, **fields)
        self.sessions(QueueSnapshot(1.0, (waiting, *others)), [waiting])


@pytest.fixture
def scene(base: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(base, monkeypatch)


@pytest.mark.parametrize("reason", ["Resources", "Priority"])
def test_an_idle_session_yields_to_a_job_that_waits_for_its_nodes(scene: Scene, reason: str) -> None:
    scene.wait(reason, SESSION, partition="gpu,compute")
    assert scene.requests == [(KEY, "yield")]
    assert scene.log.lines == [f"[rayslurm] session {KEY} was idle and held c[1-2]: it ends, so that this job can start"]
    # The job has a while to start before another session ends for it.
    scene.wait(reason, SESSION)
    assert len(scene.requests) == 1


@pytest.mark.parametrize(
    ("reason", "session", "said"),
    [
        ("Dependency", SESSION, {}),
        ("Resources", row(12, "RUNNING", name="my-session-default"), {}),
        ("Resources", row(12, "PENDING", name=SESSION.name), {}),
        ("Resources", row(12, "RUNNING", name=SESSION.name, partition="gpu"), {}),
        ("Resources", row(13, "RUNNING", name=SESSION.name), {}),
        ("Resources", SESSION, {"idle": False}),
        ("Resources", SESSION, {"closing": "it ends"}),
    ],
    ids=["another reason", "no session", "waits itself", "other nodes", "another base directory", "busy", "ends already"],
)
def test_other_sessions_are_left_alone(scene: Scene, reason: str, session: QueueRow, said: dict[str, Any]) -> None:
    scene.announce(**said)
    scene.wait(reason, session)
    assert scene.requests == [] and scene.log.lines == []


def test_a_session_that_got_a_payload_meanwhile_is_asked_again_later(scene: Scene) -> None:
    scene.answer = {"ok": False, "error": "busy"}
    for _ in range(2):
        scene.wait("Resources", SESSION)
    assert len(scene.requests) == 2 and scene.log.lines == []


@pytest.mark.parametrize("lost", [Unreachable("it is away"), AnswerLost("it may have been asked")])
def test_a_session_that_does_not_answer_keeps_no_other_from_being_asked(
    lost: OSError, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = scene.directory.parents[1] / "second-0123456789ab" / "1"
    second.mkdir(parents=True)
    (second / "job_id").write_text("13\n")
    (second / "session.json").write_text(json.dumps({**ANNOUNCED, "job_id": "13"}))
    monkeypatch.setattr(idle, "_START_TIMEOUT", 0.0)
    asked: list[str] = []

    def ask(_: Any, generation: Any, request: Any) -> Any:
        asked.append(generation.key)
        if generation.key == KEY:
            raise lost
        return {"ok": True}

    monkeypatch.setattr(idle, "send_request", ask)
    for _ in range(2):
        scene.wait("Resources", SESSION, row(13, "RUNNING", nodes="c[3-4]", name=SESSION.name))
    assert asked[:2] == [KEY, "second-0123456789ab"] and KEY not in asked[2:]


@pytest.mark.parametrize("lost", [Unreachable("it is away"), AnswerLost("it may have been asked")])
def test_a_session_that_never_answers_is_given_up(lost: OSError, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    now, asked = 1000.0, list[float]()

    def ask(*_: Any) -> Any:
        asked.append(now)
        raise lost

    monkeypatch.setattr(idle, "send_request", ask)
    monkeypatch.setattr(idle, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(idle, "_INTERVAL", 3.0)
    while now < 4600.0:
        scene.wait("Resources", SESSION)
        now += 1.0
    assert len(asked) == 6 and asked[-1] - asked[0] > 60, "a short outage is no reason to give up"
    (line,) = scene.log.lines
    assert f"`rayslurm session stop {KEY}` ends it. It does not answer: {lost}" in line


def test_a_session_that_does_not_yield_is_reported_once(scene: Scene) -> None:
    scene.answer = {"ok": False, "error": "kept"}
    for _ in range(2):
        scene.wait("Resources", SESSION)
    assert len(scene.requests) == 1
    (line,) = scene.log.lines
    assert f"session {KEY} is idle and holds c[1-2], while this job waits; `rayslurm session stop {KEY}` ends it" in line
