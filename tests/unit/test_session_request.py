"""The run request of a payload: it is accepted at most once, whatever gets lost on the way."""

import json
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dagster_rayslurm.backends.base import Step
from dagster_rayslurm.backends.sessions import backend as session_backend
from dagster_rayslurm.backends.sessions import request as session_request
from dagster_rayslurm.backends.sessions.backend import SlurmSite
from dagster_rayslurm.backends.sessions.matching import Requirements
from dagster_rayslurm.backends.sessions.registry import LiveSession, SessionManifest
from dagster_rayslurm.backends.sessions.request import RunRequest, Unreachable
from dagster_rayslurm.errors import StartError
from dagster_rayslurm.runtime.protocol.record import encode
from dagster_rayslurm.runtime.protocol.rpc import AnswerLost
from dagster_rayslurm.runtime.protocol.spec import Announcement
from dagster_rayslurm.slurm.shared_queue import QueueRow, QueueSnapshot
from dagster_rayslurm.ssh.base import ConnectionLost
from dagster_rayslurm.ssh.local import LocalConnection

from .lines import Log

OK = {"ok": True, "cluster_id": "x"}
DUPLICATE = {"ok": False, "error": "duplicate"}
CLOSING = {"ok": False, "error": "closing", "message": "it ends"}
LOST = AnswerLost("the answer is lost")
NOBODY = Unreachable("nobody is there")


class Route(SlurmSite):
    """The route to sessions, with scripted events."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = path
        self.accepted: list[str] = []
        self.events: list[Any] = []
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.state = "RUNNING"
        self.log = Log()
        monkeypatch.setattr(session_backend, "fetch_queue", lambda _: self._ask_queue())
        monkeypatch.setattr(session_request, "_PAUSES", (0.01,))
        self.connection = LocalConnection()
        self.clock = self
        self._queue = self  # type: ignore[assignment]
        self.error: str | None = None
        self.known = True
        self.questions = 0
        """Queries of the queue beside the shared snapshot."""
        self.run_dir, self.patience, self.members, self.needs = str(path / "run"), 1.0, {}, []
        self.plan: Any = SimpleNamespace(payload=SimpleNamespace(nonce="n"))
        self.step = Step("run", "step", None, self.log)
        self.delivered = 0
        self.request = RunRequest(self, lambda session: self.accepted.append(session.announcement.cluster_id))

    def deliver(self) -> None:
        self.delivered += 1

    def send(self, session: LiveSession, request: Any) -> dict[str, Any]:
        self.asked.append((session.announcement.cluster_id, request))
        event = self.events.pop(0) if len(self.events) > 1 else self.events[0]
        if isinstance(event, BaseException):
            raise event
        if callable(event):
            return dict(event())
        return dict(event)

    def now(self) -> float:
        return 0.0

    def latest(self, _: float) -> QueueSnapshot | None:
        """The shared snapshot."""
        return self._rows() if self.known else QueueSnapshot(0.0, ())

    def _ask_queue(self) -> QueueSnapshot:
        self.questions += 1
        return self._rows()

    def _rows(self) -> QueueSnapshot:
        rows = [QueueRow(number, "", self.state, "", None, None, 1, "", "p", "x") for number in (1, 2)]
        return QueueSnapshot(0.0, tuple(rows) if self.state else ())

    def session(self, number: int = 1) -> LiveSession:
        directory = self.path / "sessions" / str(number)
        directory.mkdir(parents=True, exist_ok=True)
        capacity = Requirements(None, ()).capacity(reuse=False)
        announcement = Announcement(f"slurm-{number}", str(number), ["n"], 1, "00", 1, None, "n")
        return LiveSession(str(directory), SessionManifest(number, capacity, ("ask",)), announcement)

    def submit(self, number: int = 1) -> dict[str, Any]:
        return self.request.submit(self.session(number), {"payload.json": "{}"})

    def begin_record(self, cluster_id: str) -> None:
        (self.path / "run").mkdir(exist_ok=True)
        (self.path / "run" / "journal.jsonl").write_bytes(encode({"type": "start", "cluster_id": cluster_id, "at": 1.0}))


@pytest.fixture
def route(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Route:
    return Route(tmp_path, monkeypatch)


def test_an_accepted_request(route: Route) -> None:
    route.events = [OK]
    assert route.submit()["ok"] and route.accepted == ["slurm-1"] and len(route.asked) == 1
    request = route.asked[0][1]
    assert request["op"] == "run" and request["request_id"] == "n" and request["files"] == {"payload.json": "{}"}


@pytest.mark.parametrize("second", [OK, DUPLICATE], ids=["it never came there", "it was accepted"])
def test_a_lost_answer_repeats_the_same_request(route: Route, second: Any) -> None:
    route.events = [LOST, LOST, ConnectionLost("gone"), second]
    assert route.submit()["ok"] and not route.request.unsettled
    assert len(route.asked) == 4 and len({json.dumps(request) for _, request in route.asked}) == 1
    assert route.accepted == ["slurm-1"]


def test_a_refusal_after_a_lost_answer_settles_it(route: Route) -> None:
    route.events = [LOST, CLOSING]
    assert route.submit() == CLOSING and not route.accepted and not route.request.unsettled


@pytest.mark.parametrize("began", [True, False])
def test_a_session_that_died_with_its_answer(route: Route, began: bool) -> None:
    """The record says whether it had accepted the payload."""
    route.events = [LOST, NOBODY]
    route.state = "NODE_FAIL"
    if began:
        route.begin_record("slurm-1")
    assert route.submit().get("error") == (None if began else "gone")
    assert route.accepted == (["slurm-1"] if began else []) and not route.request.unsettled


def test_the_next_session_reports_a_duplicate(route: Route) -> None:
    """The record appears only after the first session was taken for ended without accepting."""
    route.events = [LOST, NOBODY]
    route.state = "NODE_FAIL"
    assert route.submit(1)["error"] == "gone"
    route.begin_record("slurm-1")
    route.events = [DUPLICATE]
    assert route.submit(2)["ok"] and route.accepted == ["slurm-1"]


@pytest.mark.parametrize("sign", ["exit", "closing", "queue"])
def test_an_ended_session_is_not_asked_again(route: Route, sign: str) -> None:
    directory = Path(route.session().directory)
    if sign == "exit":
        (directory / "exit").write_text("1 0 0\n")
    elif sign == "closing":
        said = {"cluster_id": "x", "job_id": "1", "hosts": [], "port": 1, "key": "00", "protocol": 1, "hostname": "n"}
        (directory / "session.json").write_text(json.dumps({**said, "closing": "it has ended"}))
    else:
        route.state = "TIMEOUT"
    route.events = [NOBODY]
    assert route.submit()["error"] == "gone" and len(route.asked) == 1


def test_a_session_that_lives_is_asked_again(route: Route) -> None:
    route.events = [NOBODY, NOBODY, OK]
    assert route.submit()["ok"] and len(route.asked) == 3
    assert len([line for line in route.log.lines if "asking again" in line]) == 1


@pytest.mark.parametrize("state", ["RUNNING", "", "unknown"])
def test_a_session_that_never_answers(route: Route, monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    monkeypatch.setattr(session_request, "_ANSWER_DEADLINE", 0.1)
    route.events = [NOBODY]
    if state == "unknown":
        route.error = "slurmctld is away"
    else:
        route.state = state
    if not state:
        assert route.submit()["error"] == "gone" and route.questions == 1
        return
    with pytest.raises(StartError) as caught:
        route.submit()
    said = str(caught.value)
    assert caught.value.kind == "cluster-start" and route.questions == 0
    assert "if it still runs, run `scancel 1` on this machine" in said


def test_only_an_old_snapshot_causes_a_query_of_its_own(route: Route) -> None:
    route.known = False
    route.events = [NOBODY, OK]
    assert route.submit()["ok"] and route.questions == 1
    route.events, route.state = [NOBODY], ""
    assert route.submit(2)["error"] == "gone" and route.questions == 2


@pytest.mark.parametrize("error", [NOBODY, LOST], ids=["nobody there", "lost"])
def test_an_edge_node_that_is_lost_during_a_request(route: Route, monkeypatch: pytest.MonkeyPatch, error: OSError) -> None:
    """TCP fails whichever host is gone, so nothing is known of the session."""
    monkeypatch.setattr(session_request, "_ANSWER_DEADLINE", 0.1)

    def read(*_: Any) -> bytes:
        raise ConnectionLost("no way")

    monkeypatch.setattr(route.connection, "read", read)
    route.events = [error]
    began = time.monotonic()
    if error is NOBODY:
        with pytest.raises(ConnectionLost):
            route.submit()
    else:
        with pytest.raises(StartError, match="edge node was out of reach for 1 s: no way") as caught:
            route.submit()
        assert caught.value.kind == "connection" and caught.value.retry is False and time.monotonic() - began > 1.0


def test_a_session_that_hangs_after_a_request(route: Route, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session in reach has a shorter deadline than an edge node out of reach."""
    monkeypatch.setattr(session_request, "_ANSWER_DEADLINE", 0.1)
    route.events = [LOST]
    with pytest.raises(
        StartError, match=r"which may run, and has not answered for 0\.1 s.*`scancel 1` ends the session"
    ) as caught:
        route.submit()
    assert caught.value.kind == "runtime" and caught.value.retry is False and route.request.unsettled


def test_the_record_replaces_a_lost_answer(route: Route) -> None:
    def lost() -> dict[str, Any]:
        route.begin_record("slurm-1")
        raise LOST

    route.events = [lost]
    assert route.submit()["ok"] and route.accepted == ["slurm-1"] and len(route.asked) == 1 and route.questions == 0


def test_an_unreadable_record_never_runs_a_payload_twice(route: Route, monkeypatch: pytest.MonkeyPatch) -> None:
    route.begin_record("slurm-1")
    route.events, route.state = [LOST, NOBODY], ""
    _stumble(route, monkeypatch, times=3)
    assert route.submit()["ok"] and route.accepted == ["slurm-1"]


def _stumble(route: Route, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    read, left = route.connection.read, [OSError(116, "Stale file handle")] * times

    def stumble(path: str, offset: int, limit: int) -> bytes:
        if path.endswith("journal.jsonl") and left:
            raise left.pop()
        return read(path, offset, limit)

    monkeypatch.setattr(route.connection, "read", stumble)


def with_secrets(route: Route) -> Path:
    route.request.secrets = b"{}"
    return route.path / "run" / "secrets.json"


def test_secrets_are_written_before_each_request(route: Route) -> None:
    """They are also written again if the session does not see them."""
    path = with_secrets(route)
    assert not path.exists()

    def take(answer: dict[str, Any]) -> Callable[[], dict[str, Any]]:
        def took() -> dict[str, Any]:
            assert path.read_bytes() == b"{}" and path.stat().st_mode & 0o777 == 0o600
            path.unlink()
            return answer

        return took

    missing = {"ok": False, "error": "missing", "missing": [str(path)]}
    route.events = [take(CLOSING)]
    assert route.submit(1) == CLOSING
    route.events = [take(missing), take(missing), take(OK)]
    assert route.submit(2)["ok"] and route.accepted == ["slurm-2"]
    assert all(request["needs"] == [str(path)] for _, request in route.asked) and route.delivered == 2


def test_files_that_stay_invisible_fail_the_request(route: Route, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_request, "_VISIBILITY_TIMEOUT", 0.1)
    route.events = [{"ok": False, "error": "missing", "missing": ["/bundles/a"]}]
    with pytest.raises(StartError, match="the session in Slurm job 1 does not see /bundles/a") as caught:
        route.submit()
    assert caught.value.kind == "runtime" and not route.accepted and not route.request.unsettled
    assert route.delivered == 3


def test_an_unwritable_run_directory_fails_the_request(route: Route) -> None:
    route.events = [{"ok": False, "error": "record", "message": "the run directory /x cannot be written: No space left"}]
    with pytest.raises(StartError, match="Slurm job 1, this machine: the run directory /x cannot be written: No space") as caught:
        route.submit()
    assert caught.value.kind == "record"


def test_an_edge_node_out_of_reach_before_and_after_a_request(route: Route) -> None:
    """Before a request the step may be retried. After a lost answer the payload may run, so it must not."""
    route.events = [ConnectionLost("no way")]
    with pytest.raises(ConnectionLost):
        route.submit()
    route.events = [LOST, ConnectionLost("no way")]
    with pytest.raises(StartError) as caught:
        route.submit()
    assert caught.value.kind == "connection" and caught.value.retry is False


@pytest.mark.parametrize(
    ("events", "state", "accepted"),
    [
        ([{"ok": False, "error": "withdrawn"}], "RUNNING", []),
        ([LOST, DUPLICATE], "RUNNING", ["slurm-1"]),
        ([NOBODY], "", []),
    ],
    ids=["withdrawn", "accepted before", "session ended"],
)
def test_withdraw_a_request(route: Route, events: list[Any], state: str, accepted: list[str]) -> None:
    route.events = [LOST, KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        route.submit()
    route.events, route.state = events, state
    route.request.withdraw()
    assert route.accepted == accepted and not route.request.unsettled and route.asked[-1][1]["op"] == "withdraw"
    assert not any("may run" in line for line in route.log.lines)


@pytest.mark.parametrize("accepted", [True, False])
def test_an_interrupt_does_not_wait_for_the_answer(route: Route, accepted: bool) -> None:
    """The caller finds out afterwards whether the payload was accepted."""

    def slow() -> dict[str, Any]:
        main = threading.get_ident()
        threading.Timer(0.2, lambda: signal.pthread_kill(main, signal.SIGINT)).start()
        time.sleep(20)
        return OK

    route.events = [slow]
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        route.submit()
    assert time.monotonic() - began < 10 and route.request.unsettled and not route.accepted
    route.events = [DUPLICATE if accepted else {"ok": False, "error": "withdrawn"}]
    route.request.withdraw()
    assert route.accepted == (["slurm-1"] if accepted else []) and not route.request.unsettled


def test_no_interrupt_loses_an_accepted_payload(route: Route, monkeypatch: pytest.MonkeyPatch) -> None:
    def accept(session: LiveSession) -> None:
        signal.raise_signal(signal.SIGINT)
        route.accepted.append(session.announcement.cluster_id)

    monkeypatch.setattr(route.request, "on_accepted", accept)
    route.events = [OK]
    with pytest.raises(KeyboardInterrupt):
        route.submit()
    assert route.accepted == ["slurm-1"] and not route.request.unsettled


def test_withdraw_without_an_answer(route: Route) -> None:
    route.events = [LOST]
    route.request._tried["slurm-1"] = route.session()
    route.request.withdraw()
    assert route.request.unsettled and "which may run now: see " + str(route.path / "run") in route.log.lines[-1]


def test_an_unreachable_session_leaves_the_request_settled(route: Route, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_request, "_ANSWER_DEADLINE", 0.05)
    route.events = [NOBODY]
    with pytest.raises(StartError):
        route.submit()
    assert not route.request.unsettled
