"""A payload's request: whatever gets lost on the way, it is accepted once, and it is known by whom."""

import json
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dagster_rayslurm.backends.sessions import request as session_request
from dagster_rayslurm.backends.sessions.client import Announcement, AnswerLost, Unreachable
from dagster_rayslurm.backends.sessions.matching import Requirements
from dagster_rayslurm.backends.sessions.registry import Found, SessionManifest
from dagster_rayslurm.backends.sessions.request import Request
from dagster_rayslurm.errors import StartError
from dagster_rayslurm.runtime.protocol.record import encode
from dagster_rayslurm.slurm.snapshot import QueueRow, QueueSnapshot
from dagster_rayslurm.ssh.base import ConnectionLost
from dagster_rayslurm.ssh.local import LocalConnection

from .lines import Log

OK = {"ok": True, "cluster_id": "x"}
DUPLICATE = {"ok": False, "error": "duplicate"}
CLOSING = {"ok": False, "error": "closing", "message": "it ends"}
LOST = AnswerLost("the answer is lost")
NOBODY = Unreachable("nobody is there")


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
        monkeypatch.setattr(session_request, "fetch_queue", lambda _: self._ask_queue())
        monkeypatch.setattr(session_request, "_PAUSES", (0.01,))
        connection = self.connection = LocalConnection()
        self.clock = self
        self.error: str | None = None
        self.known = True
        self.questions = 0
        """How often Slurm was asked for this payload alone."""
        self.request = Request(
            connection=connection,
            commands=connection,
            queue=self,  # type: ignore[arg-type]
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

    def now(self) -> float:
        return 0.0

    def latest(self, _: float) -> QueueSnapshot | None:
        """The queue, as others have asked for it."""
        return self._queue() if self.known else QueueSnapshot(0.0, ())

    def _ask_queue(self) -> QueueSnapshot:
        self.questions += 1
        return self._queue()

    def _queue(self) -> QueueSnapshot:
        rows = [QueueRow(number, "", self.state, "", None, None, 1, "", "p", "x") for number in (1, 2)]
        return QueueSnapshot(0.0, tuple(rows) if self.state else ())

    def found(self, number: int = 1) -> Found:
        directory = self.path / "sessions" / str(number)
        directory.mkdir(parents=True, exist_ok=True)
        capacity = Requirements(None, ()).capacity(reuse=False)
        announcement = Announcement(f"slurm-{number}", str(number), ("n",), 1, "00", 1, None, "n")
        return Found(str(directory), SessionManifest(number, capacity, ("ask",)), announcement)

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


@pytest.mark.parametrize("state", ["RUNNING", "", "unknown"])
def test_one_that_never_answers(way: Way, monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    """It is said to run only if that is Slurm's word."""
    monkeypatch.setattr(session_request, "_SILENT_FOR", 0.1)
    way.events = [NOBODY]
    if state == "unknown":
        way.error = "slurmctld is away"
    else:
        way.state = state
    if not state:
        assert way.put()["error"] == "gone" and way.questions == 1
        return
    with pytest.raises(StartError) as caught:
        way.put()
    said = str(caught.value)
    assert caught.value.kind == "cluster-start" and way.questions == 0
    assert ("run `scancel 1` on this machine" in said) is (state == "RUNNING")
    assert ("cannot be found out" in said) is (state == "unknown")


def test_slurm_is_asked_for_this_payload_alone_only_where_the_shared_word_is_too_old(way: Way) -> None:
    way.known = False
    way.events = [NOBODY, OK]
    assert way.put()["ok"] and way.questions == 1
    way.events, way.state = [NOBODY], ""
    assert way.put(2)["error"] == "gone" and way.questions == 2


@pytest.mark.parametrize("error", [NOBODY, LOST], ids=["nobody there", "lost"])
def test_a_session_behind_an_edge_node_that_is_gone(way: Way, monkeypatch: pytest.MonkeyPatch, error: OSError) -> None:
    """TCP sees nobody there, whoever is gone; nothing is known of the session then, and nothing said of it."""
    monkeypatch.setattr(session_request, "_SILENT_FOR", 0.1)

    def read(*_: Any) -> bytes:
        raise ConnectionLost("no way")

    monkeypatch.setattr(way.connection, "read", read)
    way.events = [error]
    began = time.monotonic()
    if error is NOBODY:
        with pytest.raises(ConnectionLost):
            way.put()
    else:
        with pytest.raises(StartError, match="edge node was out of reach for 1 s: no way") as caught:
            way.put()
        assert caught.value.kind == "connection" and caught.value.retry is False and time.monotonic() - began > 1.0


def test_one_that_hangs_once_it_was_asked(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in reach: nobody waits for it as long as for an edge node."""
    monkeypatch.setattr(session_request, "_SILENT_FOR", 0.1)
    way.events = [LOST]
    with pytest.raises(
        StartError, match=r"which may run, and has not answered for 0\.1 s.*`scancel 1` ends the session"
    ) as caught:
        way.put()
    assert caught.value.kind == "runtime" and caught.value.retry is False and way.request.unsettled


def test_the_record_tells_what_the_answer_would_have_said(way: Way) -> None:
    def lost() -> dict[str, Any]:
        way.began("slurm-1")
        raise LOST

    way.events = [lost]
    assert way.put()["ok"] and way.accepted == ["slurm-1"] and len(way.asked) == 1 and way.questions == 0


def test_a_session_that_died_is_no_reason_to_run_it_again_while_its_record_cannot_be_read(
    way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    way.began("slurm-1")
    way.events, way.state = [LOST, NOBODY], ""
    _stumble(way, monkeypatch, times=3)
    assert way.put()["ok"] and way.accepted == ["slurm-1"]


def test_who_was_faster_is_read_again_until_it_is_known(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    way.events, way.state = [NOBODY], ""
    assert way.put(1)["error"] == "gone"
    way.began("slurm-1")
    way.events = [DUPLICATE]
    _stumble(way, monkeypatch, times=3)
    assert way.put(2)["ok"] and way.accepted == ["slurm-1"]


def _stumble(way: Way, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """Let the next reads of the record fail."""
    read, left = way.connection.read, [OSError(116, "Stale file handle")] * times

    def stumble(path: str, offset: int, limit: int) -> bytes:
        if path.endswith("journal.jsonl") and left:
            raise left.pop()
        return read(path, offset, limit)

    monkeypatch.setattr(way.connection, "read", stumble)


def with_secrets(way: Way) -> Path:
    way.request._secrets = b"{}"
    return way.path / "run" / "secrets.json"


def test_secrets_are_written_when_they_are_needed(way: Way) -> None:
    """Right before it is asked, for each session; and again if that one does not find them."""
    path = with_secrets(way)
    assert not path.exists()

    def take(answer: dict[str, Any]) -> Callable[[], dict[str, Any]]:
        def took() -> dict[str, Any]:
            assert path.read_bytes() == b"{}" and path.stat().st_mode & 0o777 == 0o600
            path.unlink()
            return answer

        return took

    missing = {"ok": False, "error": "missing-secrets", "message": "there are none"}
    way.events = [take(CLOSING)]
    assert way.put(1) == CLOSING
    way.events = [take(missing), take(missing), take(OK)]
    assert way.put(2)["ok"] and way.accepted == ["slurm-2"]
    assert all(request["secrets"] is True for _, request in way.asked)


def test_secrets_that_a_session_never_sees(way: Way) -> None:
    with_secrets(way)
    way.events = [{"ok": False, "error": "missing-secrets", "message": "there are none"}]
    with pytest.raises(StartError, match="there are none") as caught:
        way.put()
    assert caught.value.kind == "record" and not way.accepted and not way.request.unsettled


def test_a_run_directory_that_cannot_be_written(way: Way) -> None:
    way.events = [{"ok": False, "error": "record", "message": "the run directory /x cannot be written: No space left"}]
    with pytest.raises(StartError, match="Slurm job 1, this machine: the run directory /x cannot be written: No space") as caught:
        way.put()
    assert caught.value.kind == "record"


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
    way.events = [{"ok": False, "error": "withdrawn"}]
    way.request.withdraw()
    assert not way.accepted and not way.request.unsettled and way.asked[-1][1]["op"] == "withdraw"


def test_one_that_had_been_accepted_is_known_when_it_is_called_back(way: Way) -> None:
    way.events = [LOST, KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        way.put()
    way.events = [LOST, DUPLICATE]
    way.request.withdraw()
    assert way.accepted == ["slurm-1"]


@pytest.mark.parametrize("accepted", [True, False])
def test_an_interrupt_need_not_wait_for_the_answer(way: Way, accepted: bool) -> None:
    """It comes at once; who takes it finds out what became of the question."""

    def slow() -> dict[str, Any]:
        main = threading.get_ident()
        threading.Timer(0.2, lambda: signal.pthread_kill(main, signal.SIGINT)).start()
        time.sleep(20)
        return OK

    way.events = [slow]
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        way.put()
    assert time.monotonic() - began < 10 and way.request.unsettled and not way.accepted
    way.events = [DUPLICATE if accepted else {"ok": False, "error": "withdrawn"}]
    way.request.withdraw()
    assert way.accepted == (["slurm-1"] if accepted else []) and not way.request.unsettled


def test_an_interrupt_between_the_answer_and_its_being_known(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    def accept(found: Found) -> None:
        signal.raise_signal(signal.SIGINT)
        way.accepted.append(found.announcement.cluster_id)

    monkeypatch.setattr(way.request, "_accept", accept)
    way.events = [OK]
    with pytest.raises(KeyboardInterrupt):
        way.put()
    assert way.accepted == ["slurm-1"] and not way.request.unsettled


def test_one_that_is_called_back_from_a_session_that_is_over(way: Way) -> None:
    way.events = [LOST, KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        way.put()
    way.events, way.state = [NOBODY], ""
    way.request.withdraw()
    assert not way.request.unsettled and not way.accepted and not any("may run" in line for line in way.log.lines)


def test_one_that_is_called_back_and_nobody_knows(way: Way) -> None:
    way.events = [LOST]
    way.request._asked["slurm-1"] = way.found()
    way.request.withdraw()
    assert way.request.unsettled and "which may run now: see " + str(way.path / "run") in way.log.lines[-1]


def test_nothing_was_asked_of_a_session_that_cannot_be_reached(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_request, "_SILENT_FOR", 0.05)
    way.events = [NOBODY]
    with pytest.raises(StartError):
        way.put()
    assert not way.request.unsettled
