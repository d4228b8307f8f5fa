"""Which sessions are asked to end when a job of the same user waits for nodes, and what its log says of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from dagster_rayslurm.backends.sessions import idle
from dagster_rayslurm.backends.sessions.idle import IdleSessions
from dagster_rayslurm.slurm.snapshot import QueueRow, QueueSnapshot
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


class RunArguments:
    """Idle sessions below a base directory, and what they are asked."""

    def __init__(self, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log, self.requests = Log(), list[Any]()
        self.answer: dict[str, Any] = {"ok": True}
        self.directory = base / "sessions" / KEY / "1"
        self.directory.mkdir(parents=True)
        (self.directory / "job_id").write_text("12\n")
        self.announce()
        self.sessions = IdleSessions(LocalConnection(), str(base), self.log)
        monkeypatch.setattr(idle, "_INTERVAL", 0.0)
        monkeypatch.setattr(idle, "ask_session", self.ask)

    def announce(self, **fields: Any) -> None:
        (self.directory / "session.json").write_text(json.dumps({**ANNOUNCED, **fields}))

    def ask(self, _: Any, generation: Any, request: Any) -> Any:
        self.requests.append((generation.key, request["op"]))
        return self.answer

    def wait(self, reason: str = "Resources", *others: QueueRow, **fields: Any) -> None:
        waiting = row(20, "PENDING", reason=reason, **fields)
        self.sessions.make_way(QueueSnapshot(1.0, (waiting, *others)), [waiting])


@pytest.fixture
def asked(base: Path, monkeypatch: pytest.MonkeyPatch) -> RunArguments:
    return RunArguments(base, monkeypatch)


@pytest.mark.parametrize("reason", ["Resources", "Priority"])
def test_an_idle_session_ends_for_a_job_that_waits_for_its_nodes(asked: RunArguments, reason: str) -> None:
    asked.wait(reason, SESSION, partition="gpu,compute")
    assert asked.requests == [(KEY, "yield")]
    assert asked.log.lines == [f"[rayslurm] session {KEY} was idle and held c[1-2]: it ends, so that this job can start"]
    # The job has a while to start before another session ends for it.
    asked.wait(reason, SESSION)
    assert len(asked.requests) == 1


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
def test_no_other_session_is_asked(asked: RunArguments, reason: str, session: QueueRow, said: dict[str, Any]) -> None:
    asked.announce(**said)
    asked.wait(reason, session)
    assert asked.requests == [] and asked.log.lines == []


def test_a_session_that_got_a_payload_meanwhile_is_asked_again_later(asked: RunArguments) -> None:
    asked.answer = {"ok": False, "error": "busy"}
    for _ in range(2):
        asked.wait("Resources", SESSION)
    assert len(asked.requests) == 2 and asked.log.lines == []


def test_a_session_that_stays_is_named_once_with_the_command_that_ends_it(asked: RunArguments) -> None:
    asked.answer = {"ok": False, "error": "kept"}
    for _ in range(2):
        asked.wait("Resources", SESSION)
    assert len(asked.requests) == 1
    (line,) = asked.log.lines
    assert f"session {KEY} is idle and holds c[1-2], while this job waits; `rayslurm session stop {KEY}` ends it" in line
