"""The local session server, without Ray: requests, queue, and faults that affect only their own payload."""

import json
import os
import resource
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from dagster_rayslurm.backends.local_process import runtime_command, start_process
from dagster_rayslurm.backends.run_dir import Layout, write_runtime_spec
from dagster_rayslurm.backends.sessions.local import SessionClient
from dagster_rayslurm.environments import InheritedEnvironment, resolve_environment
from dagster_rayslurm.runtime.protocol.record import JOURNAL, PAYLOAD, SECRETS, SESSION, LineReader
from dagster_rayslurm.runtime.protocol.spec import PayloadSpec, RuntimeSpec, to_json
from dagster_rayslurm.ssh.local import LocalConnection

from ..conftest import small_disk, wait_until


class Session:
    """A session's runtime, and what a test asks of it."""

    def __init__(self, path: Path, **spec: Any) -> None:
        self.path = path
        self.clients: list[SessionClient] = []
        self.directory = path / "session"
        write_runtime_spec(LocalConnection(), str(self.directory), RuntimeSpec("c1", **{"idle_timeout": 30.0, **spec}))
        command = runtime_command(Layout(path), resolve_environment(InheritedEnvironment()), "serve", str(self.directory))
        self.process = start_process(command, str(self.directory), subprocess.DEVNULL)
        assert wait_until((self.directory / SESSION).exists, 10)
        self.announced = json.loads((self.directory / SESSION).read_text())

    def client(self) -> SessionClient:
        return SessionClient(self.announced["socket"])

    def run_dir(self, name: str, code: str, parent: Path | None = None, **fields: Any) -> Path:
        directory = (parent or self.path) / name
        directory.mkdir(mode=0o700)
        spec = PayloadSpec(argv=["python", "-c", code], nonce=name, **{"grace_period": 1.0, **fields})
        (directory / PAYLOAD).write_text(to_json(spec))
        (directory / SECRETS).write_text('{"SECRET": "s"}')
        return directory

    def ask(self, run_dir: Path, **request: Any) -> tuple[SessionClient, dict[str, Any]]:
        client = self.client()
        self.clients.append(client)  # A connection that is collected as garbage cancels its payload.
        return client, client.ask(op="run", run_dir=str(run_dir), **{"request_id": run_dir.name, **request})


def records(run_dir: Path) -> list[dict[str, Any]]:
    return LineReader().feed((run_dir / JOURNAL).read_bytes())


def end_of(run_dir: Path) -> dict[str, Any]:
    found = wait_until(lambda: [record for record in records(run_dir) if record["type"] == "end"], 15)
    assert len(found) == 1
    return found[0]


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


def test_the_end_of_a_payload_ends_its_connection(session: Callable[..., Session]) -> None:
    one = session()
    run_dir = one.run_dir("a", "import os; print(os.environ['SECRET'])")
    client, answer = one.ask(run_dir)
    assert answer == {"ok": True}
    assert wait_until(client.at_end, 10) and end_of(run_dir)["exit_code"] == 0
    assert not (run_dir / SECRETS).exists()
    assert not list(Path(one.announced["socket"]).parent.glob("messages-*"))


def test_a_request_is_accepted_once_and_a_record_written_once(session: Callable[..., Session]) -> None:
    one = session()
    run_dir = one.run_dir("a", "pass")
    client, _ = one.ask(run_dir)
    assert one.ask(run_dir)[1]["error"] == "duplicate"
    assert wait_until(client.at_end, 10)
    refused = one.ask(run_dir, request_id="another")[1]
    assert refused["error"] == "refused" and "there is a record already" in refused["message"]
    assert len([record for record in records(run_dir) if record["type"] == "start"]) == 1


def test_payloads_queue_in_order_and_show_their_place(session: Callable[..., Session], tmp_path: Path) -> None:
    one = session()
    code = f"open({str(tmp_path / 'order')!r}, 'a').write(%r + ' '); import time; time.sleep(0.4)"
    asked = [one.ask(one.run_dir(name, code % name))[0] for name in "abc"]
    assert all(wait_until(client.at_end, 15) for client in asked)
    assert (tmp_path / "order").read_text().split() == ["a", "b", "c"]
    places = [record["message"] for record in records(tmp_path / "c") if record.get("phase") == "queued"]
    assert [place.partition(" in ")[0] for place in places] == ["place 2", "place 1"]


def test_a_payload_can_be_cancelled_in_the_queue(session: Callable[..., Session]) -> None:
    one = session()
    first, _ = one.ask(one.run_dir("a", "import time; time.sleep(1.5)"))
    waiting = one.run_dir("b", "pass")
    client, _ = one.ask(waiting)
    client.send(op="cancel")
    assert end_of(waiting)["reason"] == "cancel" and wait_until(client.at_end, 5)
    assert wait_until(first.at_end, 10) and one.process.poll() is None


def test_a_payload_gets_the_environment_of_its_client(session: Callable[..., Session], tmp_path: Path) -> None:
    one = session()
    run_dir = one.run_dir("a", f"import os; open({str(tmp_path / 'who')!r}, 'w').write(os.environ['WHO'])")
    client, _ = one.ask(run_dir, environ={**os.environ, "WHO": "second"})
    assert wait_until(client.at_end, 10) and (tmp_path / "who").read_text() == "second"


def test_a_removed_run_directory_ends_only_its_own_payload(session: Callable[..., Session]) -> None:
    one = session(max_concurrent_payloads=2)
    lost = one.run_dir("a", "import time; time.sleep(0.5)")
    client, _ = one.ask(lost)
    assert wait_until(lambda: len(records(lost)) >= 2, 10)
    subprocess.run(["rm", "-rf", str(lost)], check=True)
    assert wait_until(client.at_end, 10)
    other = one.run_dir("b", "pass")
    one.ask(other)
    assert end_of(other)["exit_code"] == 0


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "full", "128k") as disk:
        yield disk


def test_a_full_disk_affects_only_its_payload(session: Callable[..., Session], full_disk: Path) -> None:
    """Full before the record is made, while queued, and while running."""
    one = session()
    running, _ = one.ask(one.run_dir("a", "import time; time.sleep(2)"))
    queued = one.run_dir("b", "pass", parent=full_disk)
    waiting, answer = one.ask(queued)
    assert answer["ok"]
    late = full_disk / "c"
    late.mkdir()
    with open(full_disk / "filler", "ab", buffering=0) as filler, pytest.raises(OSError):
        while True:
            filler.write(b"x" * 4096)
    refused = one.ask(late)[1]
    assert refused["error"] == "refused"
    after = one.run_dir("d", "pass")
    client, _ = one.ask(after)
    assert wait_until(running.at_end, 15) and wait_until(waiting.at_end, 15) and wait_until(client.at_end, 15)
    assert end_of(after)["exit_code"] == 0 and one.process.poll() is None
    os.unlink(full_disk / "filler")


def test_a_payload_that_cannot_be_laid_out_leaves_the_queue(session: Callable[..., Session]) -> None:
    one = session()
    broken = one.run_dir("a", "pass", working_dir="/no/such/directory")
    client, _ = one.ask(broken)
    assert end_of(broken)["reason"] == "record" and wait_until(client.at_end, 5)
    fine = one.run_dir("b", "pass")
    one.ask(fine)
    assert end_of(fine)["exit_code"] == 0


def test_a_request_whose_client_hung_up_is_not_run(session: Callable[..., Session], tmp_path: Path) -> None:
    """The session was stopped for a while; the client went away, and its payload may run elsewhere by now."""
    one = session()
    os.kill(one.announced["pid"], signal.SIGSTOP)
    client = one.client()
    client.send(op="run", run_dir=str(one.run_dir("a", "pass")), request_id="a")
    client.close()
    os.kill(one.announced["pid"], signal.SIGCONT)
    fine = one.run_dir("b", "pass")
    one.ask(fine)
    assert end_of(fine)["exit_code"] == 0 and not (tmp_path / "a" / JOURNAL).exists()


def test_a_client_that_does_not_read_does_not_block_others(session: Callable[..., Session]) -> None:
    one = session()
    rude = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    rude.connect(one.announced["socket"])
    rude.setblocking(False)
    try:
        for _ in range(200):
            rude.send(b'{"op": "describe"}\n' * 500)
    except (BlockingIOError, BrokenPipeError, ConnectionResetError):
        time.sleep(0.2)
    started = time.monotonic()
    assert one.client().ask(op="describe")["ok"] and time.monotonic() - started < 5
    rude.close()


def test_malformed_requests_are_refused(session: Callable[..., Session]) -> None:
    one = session()
    client = one.client()
    assert client.ask(op="dance")["error"] == "unknown request"
    client.send(op="run", run_dir="/no/such", request_id="x")
    assert client.ask(op="describe")["error"] == "refused"
    raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    raw.connect(one.announced["socket"])
    raw.sendall(b"\xff\xfe not json\n[1]\n")
    assert b"unknown request" in raw.recv(1000)
    raw.close()


def test_an_idle_session_ends(session: Callable[..., Session]) -> None:
    one = session(idle_timeout=1.0)
    client, _ = one.ask(one.run_dir("a", "pass"))
    assert wait_until(client.at_end, 10) and one.process.poll() is None
    assert one.process.wait(10) == 0 and not (one.directory / SESSION).exists()


def test_stray_processes_without_the_payloads_environment_are_ended(session: Callable[..., Session], tmp_path: Path) -> None:
    one = session()
    child = tmp_path / "child"
    command = ["env", "-i", "setsid", "sh", "-c", f"echo $$ > {child}; sleep 300"]
    code = f"import subprocess; subprocess.Popen({command}, stdout=-3, stderr=-3)"
    client, _ = one.ask(one.run_dir("a", code + "; import time; time.sleep(0.5)"))
    assert wait_until(client.at_end, 10)
    pid = int(child.read_text())
    assert wait_until(lambda: not os.path.exists(f"/proc/{pid}"), 5)


def test_payloads_of_a_stopped_session_end_with_that_reason(session: Callable[..., Session]) -> None:
    one = session()
    run_dir = one.run_dir("a", "import time; time.sleep(60)")
    one.ask(run_dir)
    assert wait_until(lambda: len(records(run_dir)) >= 2, 10)
    assert one.client().ask(op="stop")["ok"]
    assert "cleanup_cluster" in end_of(run_dir)["message"] and one.process.wait(10) == 0


def test_a_session_survives_running_out_of_file_descriptors(session: Callable[..., Session]) -> None:
    """New clients wait until there are some again."""
    one = session()
    run_dir = one.run_dir("one", "import time; time.sleep(3)")
    one.ask(run_dir)
    pid = one.announced["pid"]
    assert wait_until(lambda: psutil.Process(pid).children(), 10)
    _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (max(map(int, os.listdir(f"/proc/{pid}/fd"))) + 1, hard))
    taken = set(os.listdir(f"/proc/{pid}/fd"))
    crowd = [socket.socket(socket.AF_UNIX) for _ in range(40)]  # There may be gaps in the numbers.
    for each in crowd:
        each.connect(one.announced["socket"])
    assert not wait_until(lambda: one.process.poll() is not None, 1.5)
    assert len(os.listdir(f"/proc/{pid}/fd")) < len(taken) + len(crowd)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (hard, hard))
    for each in crowd:
        each.close()
    assert one.client().ask(op="describe")["ok"]
    assert wait_until(lambda: end_of(run_dir)["exit_code"] == 0, 20)


def test_an_exception_while_handling_a_request_refuses_it(session: Callable[..., Session]) -> None:
    one = session()
    answer = one.client().ask(op="run", run_dir="/no\0where", request_id="1")
    assert answer["error"] == "refused" and "null" in answer["message"]
    assert one.client().ask(op="describe")["ok"]
