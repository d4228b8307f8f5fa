"""A payload's request: whatever gets lost on the way, it is accepted once, and it is known by whom."""

import json
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dagster_rayslurm import BashLauncher, SlurmQueueConfig
from dagster_rayslurm.backends import session_request
from dagster_rayslurm.backends.session_client import Announcement, AnswerLost, Unreachable
from dagster_rayslurm.backends.session_registry import Charter, Found
from dagster_rayslurm.backends.session_request import Request
from dagster_rayslurm.connections.base import ConnectionLost
from dagster_rayslurm.connections.local import LocalConnection
from dagster_rayslurm.errors import StartError
from dagster_rayslurm.fit import make_offer
from dagster_rayslurm.interrupts import delayed_interrupts
from dagster_rayslurm.runtime.record import encode
from dagster_rayslurm.slurm.request import make_request
from dagster_rayslurm.slurm.snapshot import QueueRow, QueueSnapshot

OK = {"ok": True, "cluster_id": "x"}
DUPLICATE = {"ok": False, "error": "duplicate"}
CLOSING = {"ok": False, "error": "closing", "message": "it ends"}
LOST = AnswerLost("the answer is lost")
NOBODY = Unreachable("nobody is there")


class Log:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def __getattr__(self, name: str) -> Callable[[str], None]:
        return self.lines.append


class Way:
    """A way to sessions on which what is scripted happens."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = path
        self.accepted: list[str] = []
        self.events: list[Any] = []
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.state = "RUNNING"
        self.log = Log()
        monkeypatch.setattr(session_request, "ask", self._ask)
        monkeypatch.setattr(session_request, "ask_queue", lambda _: self._queue())
        monkeypatch.setattr(session_request, "_PAUSES", (0.01,))
        connection = LocalConnection()
        self.request = Request(
            connection=connection,
            commands=connection,
            run_dir=str(path / "run"),
            nonce="n",
            carrier="auto",
            patience=1.0,
            accept=lambda found: self.accepted.append(found.announcement.cluster_id),
            log=self.log,
        )

    def _ask(self, _: Any, __: Any, announcement: Announcement, request: dict[str, Any], *___: Any) -> dict[str, Any]:
        self.asked.append((announcement.cluster_id, request))
        event = self.events.pop(0) if len(self.events) > 1 else self.events[0]
        if isinstance(event, BaseException):
            raise event
        if callable(event):
            return dict(event())
        return dict(event)

    def _queue(self) -> QueueSnapshot:
        rows = [QueueRow(number, "", self.state, "", None, None, 1, "", "p", "x") for number in (1, 2)]
        return QueueSnapshot(0.0, tuple(rows))

    def found(self, number: int = 1) -> Found:
        directory = self.path / "sessions" / str(number)
        directory.mkdir(parents=True, exist_ok=True)
        queue = SlurmQueueConfig()
        offer = make_offer(None, False, queue, make_request(queue, BashLauncher().footprint(), job_name="x", comment=""))
        announcement = Announcement(f"slurm-{number}", str(number), ("n",), 1, "00", 1, None, "n")
        return Found(str(directory), Charter(number, offer, ("ask",)), announcement)

    def put(self, number: int = 1) -> dict[str, Any]:
        return self.request.put(self.found(number), {"payload.json": "{}"}, [])

    def began(self, cluster_id: str) -> None:
        (self.path / "run").mkdir(exist_ok=True)
        (self.path / "run" / "journal.jsonl").write_bytes(encode({"type": "start", "cluster_id": cluster_id, "at": 1.0}))


@pytest.fixture
def way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Way:
    return Way(tmp_path, monkeypatch)


def test_one_that_is_accepted(way: Way) -> None:
    way.events = [OK]
    assert way.put()["ok"] and way.accepted == ["slurm-1"] and len(way.asked) == 1
    request = way.asked[0][1]
    assert request["op"] == "run" and request["request_id"] == "n" and request["files"] == {"payload.json": "{}"}


@pytest.mark.parametrize("second", [OK, DUPLICATE], ids=["it never came there", "it was accepted"])
def test_an_answer_that_is_lost(way: Way, second: Any) -> None:
    way.events = [LOST, LOST, ConnectionLost("gone"), second]
    assert way.put()["ok"] and not way.request.unsettled
    assert len(way.asked) == 4 and len({json.dumps(request) for _, request in way.asked}) == 1
    assert way.accepted == ["slurm-1"]


def test_a_refusal_after_a_lost_answer_settles_it(way: Way) -> None:
    way.events = [LOST, CLOSING]
    assert way.put() == CLOSING and not way.accepted and not way.request.unsettled


def test_a_session_that_died_after_it_had_accepted(way: Way) -> None:
    """Its answer never came, but the record has begun: the payload is its own, whatever became of it."""
    way.events = [LOST, NOBODY]
    way.state = "NODE_FAIL"
    way.began("slurm-1")
    assert way.put()["ok"] and way.accepted == ["slurm-1"]


def test_a_session_that_died_before_it_had_accepted(way: Way) -> None:
    way.events = [LOST, NOBODY]
    way.state = "NODE_FAIL"
    assert way.put() == {"ok": False, "error": "gone"} and not way.accepted and not way.request.unsettled


def test_the_next_session_says_who_was_faster(way: Way) -> None:
    """The record came into sight only after the one that had begun it was taken for one that had not."""
    way.events = [LOST, NOBODY]
    way.state = "NODE_FAIL"
    assert way.put(1)["error"] == "gone"
    way.began("slurm-1")
    way.events = [DUPLICATE]
    assert way.put(2)["ok"] and way.accepted == ["slurm-1"]


@pytest.mark.parametrize("sign", ["exit", "closing", "queue"])
def test_signs_that_nobody_will_answer(way: Way, sign: str) -> None:
    directory = Path(way.found().directory)
    if sign == "exit":
        (directory / "exit").write_text("1 0 0\n")
    elif sign == "closing":
        said = {"cluster_id": "x", "job_id": "1", "hosts": [], "port": 1, "key": "00", "protocol": 1, "hostname": "n"}
        (directory / "session.json").write_text(json.dumps({**said, "closing": "it has ended"}))
    else:
        way.state = "TIMEOUT"
    way.events = [NOBODY]
    assert way.put()["error"] == "gone" and len(way.asked) == 1


def test_a_session_that_lives_is_asked_again(way: Way) -> None:
    way.events = [NOBODY, NOBODY, OK]
    assert way.put()["ok"] and len(way.asked) == 3
    assert len([line for line in way.log.lines if "asking again" in line]) == 1


def test_one_that_never_answers(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_request, "_SILENT_FOR", 0.1)
    way.events = [NOBODY]
    with pytest.raises(StartError, match="run `scancel 1` on this machine") as caught:
        way.put()
    assert caught.value.kind == "cluster-start"


def test_an_edge_node_out_of_reach(way: Way) -> None:
    """Nothing was asked: so it may be tried again. After a lost answer it may run, and must not be run again."""
    way.events = [ConnectionLost("no way")]
    with pytest.raises(ConnectionLost):
        way.put()
    way.events = [LOST, ConnectionLost("no way")]
    with pytest.raises(StartError) as caught:
        way.put()
    assert caught.value.kind == "connection" and caught.value.retry is False


def test_a_payload_that_is_called_back(way: Way) -> None:
    way.events = [LOST, KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        way.put()
    way.events = [{"ok": False, "error": "missing", "missing": [""]}]
    way.request.withdraw()
    assert not way.accepted and not way.request.unsettled and way.asked[-1][1]["needs"] == [""]


def test_one_that_had_been_accepted_is_known_when_it_is_called_back(way: Way) -> None:
    way.events = [LOST, KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        way.put()
    way.events = [LOST, DUPLICATE]
    way.request.withdraw()
    assert way.accepted == ["slurm-1"]


def test_an_interrupt_waits_for_the_answer(way: Way) -> None:
    """There is no moment in which a payload was accepted and nobody knows it."""

    def slow() -> dict[str, Any]:
        threading.Timer(0.2, lambda: signal.raise_signal(signal.SIGINT)).start()
        time.sleep(0.6)
        return OK

    way.events = [slow]
    with pytest.raises(KeyboardInterrupt):
        way.put()
    assert way.accepted == ["slurm-1"]


def test_interrupts_are_as_before_afterwards() -> None:
    before = signal.getsignal(signal.SIGINT)
    with delayed_interrupts():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before
