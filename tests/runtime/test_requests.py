"""The request server of a session, without Slurm and Ray: requests, queue, and faults that affect only their own payload."""

import fcntl
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import psutil
import pytest

from dagster_rayslurm.backends.base import Layout, write_run_dir
from dagster_rayslurm.backends.local import runtime_command
from dagster_rayslurm.backends.sessions import local as local_sessions
from dagster_rayslurm.backends.sessions import request as session_request
from dagster_rayslurm.backends.sessions.matching import Capacity
from dagster_rayslurm.backends.sessions.registry import LiveSession, SessionManifest, list_generations, parse_announcement
from dagster_rayslurm.backends.sessions.request import Unreachable, send_request
from dagster_rayslurm.environments import InheritedEnvironment, resolve_environment
from dagster_rayslurm.runtime.node.network import control_ports
from dagster_rayslurm.runtime.protocol.record import CANCEL, JOURNAL, PAYLOAD, SECRETS, SESSION, LineReader
from dagster_rayslurm.runtime.protocol.rpc import ANSWER, AnswerLost, NotConnected, call, derive_key
from dagster_rayslurm.runtime.protocol.spec import Announcement, PayloadSpec, RaySpec, RuntimeSpec, to_json
from dagster_rayslurm.ssh.base import Completed
from dagster_rayslurm.ssh.local import LocalConnection

from ..conftest import small_disk, wait_until

KEY = "ab" * 32
REQUESTS_KEY = derive_key(KEY, "requests")


class Session:
    """A session's runtime on a node that calls itself the only one of job 12; with `local`, one on this machine without Slurm."""

    def __init__(self, path: Path, left: int | None = None, local: bool = False, **spec: Any) -> None:
        self.path = path
        self.directory = path / "sessions" / "default-0" / "1"
        fields = {"idle_timeout": 30.0, "control_key": KEY, "control_ports": control_ports(None), **spec}
        spec = RuntimeSpec("slurm-1", **fields)
        write_run_dir(LocalConnection(), str(self.directory), {"runtime.json": to_json(spec).encode()})
        role = "serve" if local else "session"
        self.command = runtime_command(Layout(path), resolve_environment(InheritedEnvironment()), role, str(self.directory))
        tools = path / "bin"
        tools.mkdir()
        at = "UNLIMITED" if left is None else f"$(printf 0:%02d $(({int(time.time()) + left} - $(date +%s))))"
        (tools / "squeue").write_text(f"#!/bin/sh\necho {at}\n")
        (tools / "squeue").chmod(0o755)
        slurm = {"SLURM_JOB_ID": "12", "SLURM_NODEID": "0", "SLURM_JOB_NODELIST": "localhost"}
        env = {**os.environ, **({} if local else slurm), "PATH": f"{tools}:{os.environ['PATH']}"}
        self.log = path / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self.command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        assert wait_until(lambda: self.announced() is not None, 60), self.log.read_text()

    @property
    def file(self) -> Path:
        return self.directory / SESSION

    def announced(self) -> Announcement | None:
        return parse_announcement(self.file.read_bytes()) if self.file.exists() else None

    def port(self) -> int:
        announced = self.announced()
        assert announced is not None
        return announced.port

    def ask(self, **request: Any) -> dict[str, Any]:
        with socket.create_connection(("localhost", self.port())) as sock:
            return call(sock, REQUESTS_KEY, request)

    def ask_raw(self, body: bytes) -> None:
        """Send a line that no client of ours would, under its seal."""
        with socket.create_connection(("localhost", self.port())) as sock, pytest.MonkeyPatch.context() as patch:
            dumps = json.dumps
            patch.setattr(json, "dumps", lambda value: body.decode() if "raw" in value else dumps(value))
            call(sock, REQUESTS_KEY, {"raw": None})

    def run_dir(self, name: str) -> Path:
        return self.path / "runs" / name

    def request(self, name: str, code: str, needs: tuple[str, ...] = (), **fields: Any) -> dict[str, Any]:
        spec = PayloadSpec(argv=["python", "-c", code], nonce=name, **{"grace_period": 1.0, **fields})
        files = {PAYLOAD: to_json(spec), JOURNAL: "", "stdio.jsonl": "", CANCEL: ""}
        return {"op": "run", "request_id": name, "run_dir": str(self.run_dir(name)), "files": files, "needs": list(needs)}

    def run(self, name: str, code: str, needs: tuple[str, ...] = (), **fields: Any) -> dict[str, Any]:
        return self.ask(**self.request(name, code, needs, **fields))

    def run_locked(self, name: str, code: str, **more: Any) -> BinaryIO:
        """Run a payload that ends when the file that is returned is closed."""
        file = (self.path / f"{name}.lock").open("wb")
        fcntl.flock(file, fcntl.LOCK_EX)
        assert self.ask(**self.request(name, code), lock=file.name, **more)["ok"]
        return file

    def records(self, name: str) -> list[dict[str, Any]]:
        return LineReader().feed((self.run_dir(name) / JOURNAL).read_bytes())

    def end_of(self, name: str) -> dict[str, Any]:
        def ends() -> list[dict[str, Any]]:
            return [record for record in self.records(name) if record["type"] == "end"]

        assert wait_until(ends, 60), self.log.read_text()
        assert len(ends()) == 1
        return ends()[0]


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Callable[..., Session]]:
    started: list[Session] = []

    def start(**spec: Any) -> Session:
        started.append(Session(tmp_path, **spec))
        return started[-1]

    yield start
    for each in started:
        if each.process.poll() is None:
            each.process.terminate()
        each.process.wait(20)


def test_a_payload_outlives_the_connection_that_asked_for_it(session: Callable[..., Session]) -> None:
    one = session()
    assert one.run("a", "import time; time.sleep(1); print('done')") == {"ok": True, "cluster_id": "slurm-1"}
    assert one.end_of("a")["exit_code"] == 0
    assert one.run_dir("a").stat().st_mode & 0o777 == 0o700 and (one.run_dir("a") / PAYLOAD).stat().st_mode & 0o777 == 0o600


def test_a_request_that_is_repeated_runs_nothing_twice(session: Callable[..., Session], tmp_path: Path) -> None:
    one, marks = session(), tmp_path / "marks"
    code = f"open({str(marks)!r}, 'a').write('x')"
    answers = [one.run("a", code) for _ in range(3)]
    assert [answer.get("error") for answer in answers] == [None, "duplicate", "duplicate"]
    one.end_of("a")
    assert one.run("a", code)["error"] == "duplicate" and marks.read_text() == "x"


def test_a_request_that_was_withdrawn_is_not_run_when_it_arrives_late(session: Callable[..., Session]) -> None:
    one = session()
    for _ in range(2):  # The answer to the first one may have been lost.
        assert one.ask(op="withdraw", request_id="a", run_dir=str(one.run_dir("a")))["error"] == "withdrawn"
    assert one.run("a", "pass")["error"] == "withdrawn" and not one.run_dir("a").exists()


def test_a_payload_that_was_accepted_cannot_be_withdrawn(session: Callable[..., Session]) -> None:
    one = session()
    assert one.run("a", "pass")["ok"]
    assert one.ask(op="withdraw", request_id="a", run_dir=str(one.run_dir("a")))["error"] == "duplicate"
    assert one.end_of("a")["exit_code"] == 0


def test_what_another_session_has_accepted_is_not_run_again(session: Callable[..., Session]) -> None:
    one = session()
    one.run_dir("a").mkdir(parents=True)
    (one.run_dir("a") / JOURNAL).write_text('{"type":"start"}\n')
    assert one.run("a", "pass")["error"] == "duplicate"


def test_concurrent_requests_run_each_payload_once(session: Callable[..., Session], tmp_path: Path) -> None:
    one, marks = session(max_concurrent_payloads=4), tmp_path / "marks"
    code = f"open({str(marks)!r}, 'a').write('x')"
    answers: list[dict[str, Any]] = []
    threads = [threading.Thread(target=lambda n=n: answers.append(one.run(f"p{n % 10}", code))) for n in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(answer["ok"] for answer in answers) == 10
    for n in range(10):
        assert one.end_of(f"p{n}")["exit_code"] == 0
    assert marks.read_text() == "x" * 10


def test_a_client_without_the_key_gets_no_answer(session: Callable[..., Session]) -> None:
    one = session()
    with socket.create_connection(("localhost", one.port())) as sock, pytest.raises(NotConnected):
        call(sock, "cd" * 32, {"op": "stop"}, handshake_timeout=2.0)
    for data in (b"\0\n", b"[]\n", b'{"challenge": 1}\n', b"x" * 10000):
        with socket.create_connection(("localhost", one.port())) as sock:
            sock.sendall(data)
    assert one.ask(op="describe")["ok"] is True


def test_a_server_without_the_key_gets_no_request() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def pretend() -> None:
            client, _ = server.accept()
            with client:
                client.sendall(b'{"challenge": "%s"}\n{"proof": "%s"}\n' % (b"a" * 32, b"b" * 64))
                client.recv(65536)

        thread = threading.Thread(target=pretend)
        thread.start()
        with socket.create_connection(server.getsockname()) as sock, pytest.raises(NotConnected, match="proof is wrong"):
            call(sock, KEY, {"op": "run", "files": {"secret": "s"}}, handshake_timeout=5.0)
        thread.join()


def test_an_answer_that_does_not_come(session: Callable[..., Session]) -> None:
    class Cut(socket.socket):
        """Ends for its reader once the request is on its way; after a shutdown, Linux still delivers what arrives in time."""

        cut = False

        def recv_into(self, *args: Any) -> int:
            return 0 if self.cut else super().recv_into(*args)

    one = session()
    with Cut() as sock, pytest.raises(AnswerLost):
        sock.connect(("localhost", one.port()))
        call(sock, REQUESTS_KEY, {"op": "describe"}, before_send=lambda: setattr(sock, "cut", True))


def test_missing_files_are_named(session: Callable[..., Session], tmp_path: Path) -> None:
    one = session()
    there, gone = tmp_path / "there", str(tmp_path / "bundles" / "gone")
    there.mkdir()
    os.utime(there, (1, 1))
    assert one.run("a", "pass", needs=(str(there), gone)) == {"ok": False, "error": "missing", "missing": [gone]}
    assert there.stat().st_mtime > 1 and not one.run_dir("a").exists()
    Path(gone).mkdir(parents=True)
    assert one.run("a", "pass", needs=(str(there), gone))["ok"] is True


def test_a_run_directory_that_cannot_be_made(session: Callable[..., Session], tmp_path: Path) -> None:
    one = session()
    (tmp_path / "runs").write_text("")
    answer = one.run("a", "pass")
    assert answer["error"] == "record" and str(one.run_dir("a")) in answer["message"]
    assert one.ask(op="describe")["ok"] is True


def test_files_stay_within_the_run_directory(session: Callable[..., Session], tmp_path: Path) -> None:
    one = session()
    spec = to_json(PayloadSpec(argv=["true"], nonce="a"))
    files = {PAYLOAD: spec, JOURNAL: "", "../../escaped": "x"}
    one.ask(op="run", request_id="a", run_dir=str(one.run_dir("a")), files=files, needs=[])
    assert not (tmp_path / "escaped").exists()


def test_a_cancel_request_file_cancels_only_its_payload(session: Callable[..., Session]) -> None:
    one = session(max_concurrent_payloads=2)
    for name in "ab":
        assert one.run(name, f"import time; time.sleep({20 if name == 'a' else 3})")["ok"]
    (one.run_dir("a") / CANCEL).write_text('{"op": "cancel"}')
    assert one.end_of("a")["reason"] == "cancel" and one.end_of("b")["exit_code"] == 0


def test_stop_ends_payloads_and_the_session(session: Callable[..., Session]) -> None:
    one = session()
    one.run("a", "import time; time.sleep(60)")
    one.run("b", "pass")
    assert one.ask(op="stop") == {"ok": True, "grace_period": 1.0}
    assert [one.end_of(name)["reason"] for name in "ab"] == ["cancel", "cancel"]
    assert one.process.wait(20) == 0
    announced = one.announced()
    assert announced is not None and announced.closing


def test_a_stopped_session_is_waited_for_as_long_as_its_payloads_may_take(
    session: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = session(local=True)
    code = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: (time.sleep(3), sys.exit(7)))"
    one.run("a", f"{code}; print('begun', flush=True); time.sleep(60)", grace_period=60.0)
    assert wait_until(lambda: b"begun" in (one.run_dir("a") / "stdio.jsonl").read_bytes(), 60)
    monkeypatch.setattr(local_sessions, "_END_MARGIN", 1.0)
    (generation,) = list_generations(LocalConnection(), str(one.path))
    local_sessions.end_session(generation)
    assert one.end_of("a")["exit_code"] == 7 and one.process.wait(20) == 0


def test_an_idle_session_ends(session: Callable[..., Session]) -> None:
    one = session(idle_timeout=1.0)
    one.run("a", "pass")
    assert one.process.wait(20) == 0
    with pytest.raises(OSError):
        one.ask(op="describe")


def test_a_session_refuses_payloads_close_to_its_time_limit(session: Callable[..., Session]) -> None:
    one = session(left=50, drain_margin=60.0)
    assert wait_until(lambda: one.ask(op="describe")["time_left"] is not None)
    # A limit that is shorter than the margin itself is no reason to serve nobody.
    assert one.run("a", "pass")["ok"] and one.end_of("a")["exit_code"] == 0
    assert one.run("b", "pass")["ok"] and one.end_of("b")["exit_code"] == 0
    answer = one.run("c", "pass", time_limit=100.0)
    assert answer["error"] == "closing" and "time limit" in answer["message"]


def test_the_time_limit_ends_a_payload_with_that_reason(session: Callable[..., Session]) -> None:
    one = session(left=27, drain_margin=1.0)
    one.run("a", "import time; time.sleep(60)")
    end = one.end_of("a")
    assert end["reason"] == "timeout" and "time limit" in end["message"]
    assert one.process.wait(20) == 0


@pytest.mark.parametrize("damage", [b"", b"{", b"null", b'{"port": 1}'])
def test_a_damaged_announcement_is_rewritten(session: Callable[..., Session], damage: bytes) -> None:
    one = session()
    before = one.announced()
    one.file.write_bytes(damage)
    assert parse_announcement(damage) is None
    assert wait_until(lambda: one.announced() == before)
    one.file.unlink()
    assert wait_until(lambda: one.announced() == before)


def test_a_session_whose_directory_is_gone_drains(session: Callable[..., Session], tmp_path: Path) -> None:
    one = session()
    one.run("a", "import time; time.sleep(2)")
    one.directory.rename(tmp_path / "away")
    assert one.end_of("a")["exit_code"] == 0
    assert one.process.wait(20) == 0 and not one.directory.exists()


def test_a_session_writes_nothing_into_a_new_directory_in_the_place_of_its_own(session: Callable[..., Session]) -> None:
    """A client has removed the directory, and makes one for the next session, whose announcement is still empty."""
    one = session()
    port = one.port()
    one.directory.rename(one.directory.with_name("removed"))
    one.directory.mkdir()
    one.file.touch()

    def draining() -> Any:
        with socket.create_connection(("localhost", port)) as sock:
            return call(sock, REQUESTS_KEY, {"op": "describe"})["draining"]

    assert wait_until(draining) and "is gone" in draining()
    with socket.create_connection(("localhost", port)) as sock:
        call(sock, REQUESTS_KEY, {"op": "stop"})
    assert one.process.wait(30) == 0 and one.file.read_bytes() == b""


def test_a_session_drains_when_another_one_announces_itself_in_its_directory(session: Callable[..., Session]) -> None:
    one = session()
    other = {**json.loads(one.file.read_text()), "cluster_id": "slurm-2"}
    one.file.write_text(json.dumps(other))
    assert one.process.wait(20) == 0 and json.loads(one.file.read_text()) == other


def test_a_session_survives_a_killed_payload(session: Callable[..., Session]) -> None:
    one = session()
    one.run("a", "import os; os.kill(os.getpid(), 9)")
    assert one.end_of("a")["signal"] == signal.SIGKILL
    one.run("b", "pass")
    assert one.end_of("b")["exit_code"] == 0


def test_secrets_reach_the_payload_and_leave_the_disk(session: Callable[..., Session]) -> None:
    one = session()
    one.run_dir("a").mkdir(parents=True, mode=0o700)
    (one.run_dir("a") / SECRETS).write_text('{"SECRET": "s"}')
    one.run("a", "import os, sys; sys.exit(os.environ['SECRET'] != 's')")
    assert one.end_of("a")["exit_code"] == 0 and not (one.run_dir("a") / SECRETS).exists()


def test_only_an_idle_session_yields(session: Callable[..., Session]) -> None:
    """One that nobody has used yet, whose maker is about to ask, one with a payload, and one that has just had one go on."""
    one = session(yield_when_idle=True)
    assert one.ask(op="yield")["error"] == "busy"
    one.run("a", "import time; time.sleep(2)")
    assert one.ask(op="yield")["error"] == "busy"
    announced = one.announced()
    assert announced is not None and not announced.idle
    one.end_of("a")
    ended = time.monotonic()
    assert one.ask(op="yield")["error"] == "busy" and one.process.poll() is None
    assert wait_until(lambda: getattr(one.announced(), "idle", False))
    assert wait_until(lambda: one.ask(op="yield")["ok"]) and time.monotonic() - ended > 4
    assert one.process.wait(20) == 0
    announced = one.announced()
    assert announced is not None and "another job of its user waits for its nodes" in str(announced.closing)


def test_a_session_may_be_configured_not_to_yield(session: Callable[..., Session]) -> None:
    one = session()
    one.run("a", "pass")
    one.end_of("a")
    assert one.ask(op="yield")["error"] == "kept" and one.ask(op="describe")["ok"]


def live(announced: Announcement, directory: Path, ask: list[str]) -> LiveSession:
    return LiveSession(str(directory), SessionManifest(1, Capacity(None, True), tuple(ask)), announced)


class Srun:
    """Commands of an edge node on which `srun` runs its program right there, or something else happens."""

    def __init__(self, instead: Callable[[], Completed] | None = None) -> None:
        self.commands: list[list[str]] = []
        self._instead = instead

    def run(self, command: list[str], stdin: bytes = b"", timeout: float | None = None) -> Completed:
        self.commands.append(command)
        if self._instead is not None:
            return self._instead()
        program = command[command.index("--chdir=/") + 1 :]
        return LocalConnection().run(program, stdin, timeout)


def test_a_step_in_the_allocation_hands_the_request_over(
    session: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, srun = session(), Srun()
    start = [*one.command[:-2], "ask"]
    announced = one.announced()
    assert announced is not None
    monkeypatch.setattr(session_request, "run_slurm", lambda _, *words, **more: srun.run(*words, **more))
    answer = send_request(LocalConnection(), live(announced, one.directory, start), {"op": "describe"}, "srun")
    assert answer["ok"] is True and "--overlap" in srun.commands[0] and KEY not in " ".join(srun.commands[0])


def test_a_process_uses_srun_alone_after_a_failure_of_tcp(
    session: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, srun = session(), Srun()
    monkeypatch.setattr(session_request, "run_slurm", lambda _, *words, **more: srun.run(*words, **more))
    start = [*one.command[:-2], "ask"]
    found = one.announced()
    assert found is not None
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    walled = Announcement(**{**vars(found), "port": port})

    def steps(where: Announcement, carrier: str = "auto") -> int:
        """How many steps one more request takes."""
        before = len(srun.commands)
        answer = send_request(LocalConnection(), live(where, one.directory, start), {"op": "describe"}, carrier)
        assert answer["ok"] is True
        return len(srun.commands) - before

    # TCP is left alone, even once it would work, until the decision has grown old.
    assert [steps(found), steps(walled), steps(walled), steps(found)] == [0, 1, 1, 1]
    monkeypatch.setattr(session_request, "_TCP_RETRY_AFTER", 0.0)
    assert [steps(walled), steps(found)] == [1, 0]
    with pytest.raises(Unreachable, match="by TCP"):
        steps(walled, "direct")


@pytest.mark.parametrize(
    ("done", "error"),
    [
        (Completed(1, b"", b"srun: error: Invalid job id specified"), Unreachable),
        (Completed(75, b"motd\n", b"rayslurm: refused"), Unreachable),
        (Completed(137, b"rayslurm-sent\n", b""), AnswerLost),
        (Completed(0, b"rayslurm-sent\n" + ANSWER.encode() + b"{torn", b""), AnswerLost),
    ],
)
def test_what_a_step_leaves_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, done: Completed, error: type[Exception]
) -> None:
    monkeypatch.setattr(session_request, "run_slurm", lambda *_, **__: done)
    announced = Announcement("slurm-1", "12", ["c1"], 1, KEY, 1, None, "c1")
    with pytest.raises(error):
        send_request(LocalConnection(), live(announced, tmp_path, ["true"]), {"op": "run"}, "srun")


@pytest.mark.parametrize("heterogeneous", [False, True])
def test_a_step_is_told_which_component(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heterogeneous: bool) -> None:
    """srun starts nothing in a heterogeneous job otherwise, and nothing in any other job if it is told so."""
    announced = Announcement("slurm-1", "12", ["c1"], 1, KEY, 1, None, "c1", heterogeneous)
    srun = Srun(lambda: Completed(0, ANSWER.encode() + b"{}", b""))
    monkeypatch.setattr(session_request, "run_slurm", lambda _, *words, **more: srun.run(*words, **more))
    assert send_request(LocalConnection(), live(announced, tmp_path, ["true"]), {"op": "run"}, "srun") == {}
    assert ("--het-group=0" in srun.commands[0]) == heterogeneous


def test_announcements_of_other_kinds_are_none() -> None:
    for data in (b"", b"[]", b'{"cluster_id": 1}', b"\xff"):
        assert parse_announcement(data) is None


def test_a_session_leaves_no_process(session: Callable[..., Session]) -> None:
    one = session()
    one.run("a", "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(97.25)'])")
    one.end_of("a")
    one.process.terminate()
    one.process.wait(20)
    time.sleep(0.1)
    assert not [each for each in psutil.process_iter(["cmdline"]) if "time.sleep(97.25)" in " ".join(each.info["cmdline"] or ())]


# ---- The queue, and payloads that end with their client


def test_payloads_queue_in_order_and_show_their_place(session: Callable[..., Session], tmp_path: Path) -> None:
    one = session(local=True)
    for name in "abc":
        one.run(name, f"open({str(tmp_path / 'order')!r}, 'a').write('{name} '); import time; time.sleep(0.4)")
    assert [one.end_of(name)["exit_code"] for name in "abc"] == [0, 0, 0]
    assert (tmp_path / "order").read_text().split() == ["a", "b", "c"]
    places = [record["message"] for record in one.records("c") if record.get("phase") == "queued"]
    assert [place.partition(" in ")[0] for place in places] == ["place 2", "place 1"]


def test_a_payload_ends_with_the_lock_of_its_client(session: Callable[..., Session]) -> None:
    one = session(local=True, max_concurrent_payloads=2)
    orphan = one.run_locked("orphan", "import time; time.sleep(60)")
    code = "import os, sys, time; time.sleep(1.5); sys.exit(os.environ['WHO'] != 'me')"
    with one.run_locked("short", code, environ={**os.environ, "WHO": "me"}):
        orphan.close()
        end = one.end_of("orphan")
        assert end["reason"] == "cancel" and "is gone" in end["message"] and one.end_of("short")["exit_code"] == 0


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "runs", "128k") as disk:
        yield disk


def test_a_full_disk_affects_only_its_payload(session: Callable[..., Session], full_disk: Path) -> None:
    one = session(local=True)
    elsewhere = {"run_dir": str(one.path / "elsewhere")}
    assert one.ask(**{**one.request("a", "import time; time.sleep(1.5)"), **elsewhere})["ok"]
    assert one.run("b", "pass")["ok"]
    with open(full_disk / "filler", "ab", buffering=0) as filler, pytest.raises(OSError):
        while True:
            filler.write(b"x" * 4096)
    assert one.run("c", "pass")["error"] == "record"
    assert wait_until(lambda: one.ask(op="describe")["payloads"] == [])
    os.unlink(full_disk / "filler")
    assert one.run("d", "pass")["ok"] and one.end_of("d")["exit_code"] == 0


def test_a_payload_that_cannot_be_laid_out_leaves_the_queue(session: Callable[..., Session]) -> None:
    one = session(local=True)
    one.run("a", "pass", working_dir="/no/such/directory")
    assert one.end_of("a")["reason"] == "record"
    one.run("b", "pass")
    assert one.end_of("b")["exit_code"] == 0


def test_stray_processes_without_the_payloads_environment_are_ended(session: Callable[..., Session], tmp_path: Path) -> None:
    one, child = session(local=True), tmp_path / "child"
    command = ["env", "-i", "setsid", "sh", "-c", f"echo $$ > {child}; sleep 300"]
    one.run("a", f"import subprocess; subprocess.Popen({command}, stdout=-3, stderr=-3); import time; time.sleep(0.5)")
    one.end_of("a")
    pid = int(child.read_text())
    assert wait_until(lambda: not os.path.exists(f"/proc/{pid}"))


def test_only_this_machine_reaches_a_local_session(session: Callable[..., Session]) -> None:
    one = session(local=True)
    announced = one.announced()
    assert announced is not None and announced.hosts == ["127.0.0.1"] and announced.job_id != "12"
    listening = {each.laddr.ip for each in psutil.net_connections("tcp") if each.laddr.port == one.port() and not each.raddr}
    assert listening == {"127.0.0.1"}


# ---- What goes wrong


def exit_code_of(one: Session) -> int:
    return one.process.wait(25)


def test_a_worker_cannot_connect_to_the_request_server(session: Callable[..., Session]) -> None:
    one = session()
    with socket.create_connection(("localhost", one.port())) as sock, pytest.raises(NotConnected):
        call(sock, KEY, {"op": "describe"}, handshake_timeout=2.0)
    announced = one.announced()
    assert announced is not None and announced.key == REQUESTS_KEY != KEY


@pytest.mark.parametrize("fields", [{"asked_cpus": 4096}, {"ray": RaySpec(num_cpus=4096)}])
def test_a_session_that_cannot_serve_announces_why(session: Callable[..., Session], fields: dict[str, Any]) -> None:
    one = session(**fields)
    answer = one.run("a", "pass")
    assert answer["error"] == "closing" and "4096" in answer["message"]
    assert exit_code_of(one) == 1
    said = json.loads(one.file.read_text())
    assert said["served"] == 0 and said["closing"] == answer["message"] and said["closing"] in one.log.read_text()


def test_a_session_announces_how_many_payloads_it_served(session: Callable[..., Session]) -> None:
    one = session(idle_timeout=1.0)
    one.run("a", "pass")
    assert exit_code_of(one) == 0
    said = json.loads(one.file.read_text())
    assert said["served"] == 1 and "idle" in said["closing"]


NESTED = "[" * 100_000 + "]" * 100_000
WRONG_FIELDS: list[dict[str, Any]] = [
    {"argv": 5},
    {"argv": []},
    {"argv": [5]},
    {"argv": [""]},
    {"env": [1]},
    {"env": {"A": 5}},
    {"want_cpus": "1"},
    {"want_cpus": True},
    {"time_limit": "x"},
    {"time_limit": 10**400},
    {"run_id": []},
    {"step": {}},
    {"outputs": 5},
    {"extra_files": [5]},
    {"data_dir": []},
    {"working_dir": "a\0b"},
    {"preload": [[]]},
    {"ray": []},
    {"ray": {"startup_timeout": "x"}},
    {"ray": {"num_cpus": "x"}},
    {"ray": {"resources": {"a": None}}},
    {"ray": {"labels": "x"}},
]


def test_malformed_requests_do_not_end_the_session(session: Callable[..., Session], tmp_path: Path) -> None:
    one = session()
    good: dict[str, Any] = {"op": "run", "request_id": "a", "run_dir": str(tmp_path / "runs" / "a"), "files": {}, "needs": []}
    wrong: list[dict[str, Any]] = [
        {},
        {"op": []},
        {**good, "files": {PAYLOAD: "5"}},
        {**good, "files": {PAYLOAD: NESTED}},
        {**good, "files": {PAYLOAD: "{}"}},
    ]
    plain = {"argv": ["true"], "nonce": "a"}
    wrong += [{**good, "files": {PAYLOAD: json.dumps({**plain, **fields})}} for fields in WRONG_FIELDS]
    for request in wrong:
        answer = one.ask(**request)
        assert answer["ok"] is False and answer["error"] in ("refused", "unknown request"), (request, answer)
    with pytest.raises(AnswerLost):
        one.ask_raw(('{"op": %s}' % NESTED).encode())
    assert one.run("a", "pass")["ok"] and one.end_of("a")["exit_code"] == 0
    assert "Traceback" not in one.log.read_text()


@pytest.mark.parametrize("text", ["[]", "5", "null", '{"op": []}', NESTED])
def test_a_malformed_cancel_request_file_does_not_end_the_session(session: Callable[..., Session], text: str) -> None:
    one = session()
    code = f"import time; open({str(one.run_dir('a') / CANCEL)!r}, 'w').write({text[:10]!r}); time.sleep(1.5)"
    one.run("a", code if text != NESTED else "import time; time.sleep(1.5)")
    if text == NESTED:
        (one.run_dir("a") / CANCEL).write_text(text)
    assert one.end_of("a")["exit_code"] == 0


@pytest.mark.parametrize("secrets", ["[]", "{", '{"A": 5}', '{"A": "a\\u0000b"}', NESTED])
def test_a_request_that_was_refused_may_be_repeated(session: Callable[..., Session], secrets: str) -> None:
    one = session()
    pid = json.loads(one.file.read_text())["pid"]
    one.run_dir("a").mkdir(parents=True, mode=0o700)
    (one.run_dir("a") / SECRETS).write_text(secrets)
    before = len(os.listdir(f"/proc/{pid}/fd"))
    for _ in range(3):
        answer = one.run("a", "pass")
        assert answer["error"] == "refused" and SECRETS in answer["message"]
    assert wait_until(lambda: len(os.listdir(f"/proc/{pid}/fd")) <= before)
    assert not (one.run_dir("a") / "journal.reserve").exists()
    (one.run_dir("a") / SECRETS).write_text('{"A": "1"}')
    assert one.run("a", "import os; os._exit(int(os.environ['A']))")["ok"] and one.end_of("a")["exit_code"] == 1


def test_a_payload_does_not_run_without_its_secrets(session: Callable[..., Session]) -> None:
    one = session()
    spec = to_json(PayloadSpec(argv=["python", "-c", "import os, sys; sys.exit(int(os.environ['A']))"], nonce="a"))
    run_dir = one.run_dir("a")
    secrets = str(run_dir / SECRETS)
    request = {"request_id": "a", "run_dir": str(run_dir), "files": {PAYLOAD: spec, JOURNAL: ""}, "needs": [secrets]}
    assert one.ask(op="run", **request) == {"ok": False, "error": "missing", "missing": [secrets]} and not run_dir.exists()
    run_dir.mkdir(parents=True, mode=0o700)
    (run_dir / SECRETS).write_text('{"A": "3"}')
    assert one.ask(op="run", **request)["ok"] and one.end_of("a")["exit_code"] == 3
