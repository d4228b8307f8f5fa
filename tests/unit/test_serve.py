"""Tests: the commands that use a running Ray cluster reach it, by no detour, and say in one sentence why they do not."""

import asyncio
import contextlib
import gc
import json
import os
import pty
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dagster_rayslurm.access import head, serve
from dagster_rayslurm.access.find import choose
from dagster_rayslurm.access.head import ClusterEnded
from dagster_rayslurm.backends.listing import list_here
from dagster_rayslurm.cli import main
from dagster_rayslurm.cli.top import Watch

from ..conftest import wait_until
from .test_access import HERE, access, run_dir


class Dashboard(BaseHTTPRequestHandler):
    """Sends the summary of no nodes, or only its beginning."""

    body = b'{"data": {"summary": []}}'
    length = len(body)

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(self.length))
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Dashboard)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_stream_that_ends_at_once_is_not_opened_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []

    def end_at_once(*_: Any) -> tuple[socket.socket, bool]:
        ours, theirs = socket.socketpair()
        theirs.close()
        opened.append(ours)
        return ours, False

    monkeypatch.setattr(head, "open_relay", end_at_once)
    run_dir(tmp_path, "1a2b3c4d-train-aa", access(job_id="17", hosts=["n1"]))
    found = choose("train", list_here(str(tmp_path)))

    async def run() -> None:
        keeper = head.Head(HERE, found.access, lambda _: found.access, print, 1)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(keeper.run(), 1.0)

    asyncio.run(run())
    assert 1 < len(opened) < 20


def test_a_link_that_breaks_in_an_answer_is_a_problem_and_top_goes_on(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Dashboard, "length", 1000)
    watch = Watch(url, None)
    watch.ask("nodes")
    assert watch.problem.startswith("nodes: IncompleteRead")
    monkeypatch.undo()
    watch.ask("nodes")
    assert not watch.problem


def test_top_asks_at_most_once_a_second_while_no_nodes_are_known(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    monkeypatch.setattr(Dashboard, "log_request", lambda *_: asked.append(time.monotonic()))
    watch = Watch(url, None)
    thread = threading.Thread(target=watch.run)
    thread.start()
    assert wait_until(lambda: len(asked) == 3)
    watch.over.set()
    thread.join(10)
    assert asked[2] - asked[0] > 1.5


@pytest.mark.timeout(30)
@pytest.mark.filterwarnings("ignore:coroutine")
def test_without_an_event_loop_the_error_comes_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError("Too many open files")

    run_dir(tmp_path, "1a2b3c4d-train-aa", access())
    found = choose("train", list_here(str(tmp_path)))
    monkeypatch.setattr(asyncio.events, "new_event_loop", fail)
    with pytest.raises(OSError, match="Too many open files"), serve.served(found, lambda _: None):
        pass


@pytest.fixture
def site_proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """Where the variables of a site send HTTP requests."""
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        monkeypatch.setattr(urllib.request, "_opener", None)  # It has read the variables already, if it was used.
        proxy.setblocking(False)
        yield proxy


def test_a_secret_url_does_not_go_to_the_proxy_of_a_site(url: str, site_proxy: socket.socket) -> None:
    watch = Watch(url, None)
    watch.ask("nodes")
    assert not watch.problem
    with pytest.raises(BlockingIOError):
        site_proxy.accept()


def test_a_job_client_does_not_use_the_proxy_of_a_site(
    tmp_path: Path, site_proxy: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program in the place of Ray's client says whether its requests would take the detour."""
    package = tmp_path / "modules" / "ray" / "scripts"
    package.mkdir(parents=True)
    for directory in (package, package.parent):
        (directory / "__init__.py").touch()
    (package / "scripts.py").write_text(
        "import os, sys, requests.utils\n"
        "sys.exit(7 if requests.utils.get_environ_proxies(os.environ['RAY_API_SERVER_ADDRESS']) else 0)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(package.parents[1]), prepend=os.pathsep)
    run_dir(tmp_path, "1a2b3c4d-train-aa", access())
    for others in (None, "example.org"):
        if others:
            monkeypatch.setenv("no_proxy", others)
        done = CliRunner().invoke(main, ["--base", str(tmp_path), "job", "list", "train"])
        assert done.exit_code == 0, done.output


def test_a_head_that_does_not_answer_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise OSError("srun did not start a relay")

    monkeypatch.setattr(head, "open_relay", refused)
    monkeypatch.setattr(serve, "_FIRST_TIMEOUT", 0.3)
    run_dir(tmp_path, "1a2b3c4d-train-aa", access(job_id="17", hosts=["n1"]))
    found = choose("train", list_here(str(tmp_path)))
    with pytest.raises(ClusterEnded, match="on n1 could not be reached within"), serve.served(found, lambda _: None):
        pass
    for command in ("dashboard", "top"):
        done = CliRunner().invoke(main, ["--base", str(tmp_path), command, "train"])
        lines = done.stderr.splitlines()
        assert done.exit_code == 1 and done.stdout == "" and "could not be reached" in lines[-1], (done.exception, lines)
        assert len(lines) == 2 and "srun did not start a relay" in lines[0]


def test_the_output_of_top_for_a_program_is_not_cut(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in `rayslurm top --once train | grep …`."""
    command = "python " + "/".join(["evaluation"] * 12) + "/everything.py"
    counts = {"result": {"node_id_to_summary": {"cluster": {"summary": {}}}}}
    answers = {
        **{f"/api/v0/{each}/summarize": {"data": {"result": counts}} for each in ("tasks", "actors")},
        **{f"/api/v0/{each}": {"data": {"result": {"result": []}}} for each in ("tasks", "placement_groups")},
        "/api/jobs/": [{"submission_id": "raysubmit_2yBharXnNh75kcje", "status": "RUNNING", "entrypoint": command}],
        "/nodes": {"data": {"summary": []}},
    }

    def answer(handler: Dashboard) -> None:
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(json.dumps(answers[handler.path.partition("?")[0]]).encode())

    monkeypatch.setattr(Dashboard, "do_GET", answer)
    run_dir(tmp_path, "1a2b3c4d-train-aa", access(int(url.rpartition(":")[2])))
    program = [sys.executable, "-m", "dagster_rayslurm.cli", "--base", str(tmp_path), "top", "--once", "train"]
    env = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    done = subprocess.run(program, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert command in done.stdout, done


@pytest.mark.timeout(60)
def test_top_ends_when_the_head_stays_out_of_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    ours, theirs = socket.socketpair()
    streams = [ours]

    def open_once(*_: Any) -> tuple[socket.socket, bool]:
        if not streams:
            raise OSError("no route to n1")
        return streams.pop(), False

    monkeypatch.setattr(head, "open_relay", open_once)
    monkeypatch.setattr(head, "_UNREACHABLE", -1.0)
    monkeypatch.setattr(Watch, "run", lambda _: theirs.close())  # The screen is there, and the stream ends.
    run_dir(tmp_path, "1a2b3c4d-train-aa", access(job_id="17", hosts=["n1"]))
    screen, terminal = pty.openpty()
    threading.Thread(target=drain, args=[screen], daemon=True).start()
    with open(terminal, closefd=False) as stdin, open(terminal, "w") as stdout:
        monkeypatch.setattr(sys, "stdin", stdin)
        monkeypatch.setattr(sys, "stdout", stdout)
        main(["--base", str(tmp_path), "top", "train"], standalone_mode=False)
        monkeypatch.undo()
    assert "the head node n1 cannot be reached: no route to n1" in capsys.readouterr().err


def drain(screen: int) -> None:
    with open(screen, "rb", 0) as file, contextlib.suppress(OSError):  # EIO: the terminal is closed.
        while file.read(4096):
            pass


@pytest.mark.parametrize(("method", "body", "times"), [("POST", "", 1), ("PUT", "x", 1), ("GET", "", 3), ("GET", "x", 1)])
def test_only_a_request_without_effects_and_body_is_sent_again(tmp_path: Path, method: str, body: str, times: int) -> None:
    received: list[bytes] = []

    def lose(dashboard: socket.socket) -> None:
        while True:
            try:
                connection, _ = dashboard.accept()
            except OSError:
                return
            data = connection.recv(65536)
            while data and not data.endswith(b"\r\n\r\n" + body.encode()):
                data += connection.recv(65536)
            received.append(data)
            connection.close()

    with socket.create_server(("127.0.0.1", 0)) as dashboard:
        threading.Thread(target=lose, args=[dashboard], daemon=True).start()
        run_dir(tmp_path, "1a2b3c4d-train-aa", access(dashboard.getsockname()[1]))
        with (
            serve.served(choose("train", list_here(str(tmp_path))), print) as url,
            client_of(url, f"{method} /PATH/x HTTP/1.1\r\nContent-Length: {len(body)}", body) as client,
            client.makefile("rb") as file,
        ):
            answer = file.read()
        dashboard.shutdown(socket.SHUT_RDWR)
    assert len(received) == times and answer.startswith(b"HTTP/1.1 502")
    assert (b"It is not sent again" in answer) == (times == 1)


@pytest.mark.parametrize("found", [True, False])
def test_the_browser_gets_a_link_that_works_once(tmp_path: Path, url: str, found: bool) -> None:
    """A program in the place of the browser follows its link, and tries it again; or there is no browser."""
    program = tmp_path / "browser"
    program.write_text(
        f"#!{sys.executable}\nimport sys, urllib.error, urllib.request\n"
        f"open({str(tmp_path / 'link')!r}, 'w').write(sys.argv[1])\n"
        "first = urllib.request.urlopen(sys.argv[1]).status\n"
        "try: urllib.request.urlopen(sys.argv[1])\n"
        f"except urllib.error.HTTPError as error: print(first, error.code, file=open({str(tmp_path / 'said')!r}, 'w'))\n"
    )
    program.chmod(0o755)
    run_dir(tmp_path, "1a2b3c4d-train-aa", access(int(url.rpartition(":")[2])))
    command = [sys.executable, "-m", "dagster_rayslurm.cli", "--base", str(tmp_path), "dashboard", "--open", "train"]
    browser = f"{program if found else tmp_path / 'none'} %s"
    environ = {**os.environ, "BROWSER": browser, "PATH": str(tmp_path)}
    environ.pop("DISPLAY", None)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ) as process:
        assert process.stdout is not None and process.stderr is not None
        secret = process.stdout.readline().split("/")[3]
        process.stderr.readline()
        if found:
            assert wait_until((tmp_path / "said").exists) and wait_until((tmp_path / "said").read_text)
            assert (tmp_path / "said").read_text() == "200 403\n" and secret not in (tmp_path / "link").read_text()
        else:
            assert "no browser can be opened here" in process.stderr.readline()
        process.terminate()


def client_of(url: str, request: str, body: str = "") -> socket.socket:
    """A connection to a proxy, on which a request was sent with the path of the URL in place of PATH, and then `body`."""
    host, _, path = url.removeprefix("http://").partition("/")
    address, _, port = host.partition(":")
    client = socket.create_connection((address, int(port)), timeout=20)
    client.sendall((request.replace("PATH", path) + "\r\n\r\n").encode())
    client.sendall(body.encode())
    return client


def test_a_client_that_leaves_ends_its_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "_CLIENT_CHECK", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as dashboard:
        run_dir(tmp_path, "1a2b3c4d-train-aa", access(dashboard.getsockname()[1]))
        with serve.served(choose("train", list_here(str(tmp_path))), print) as url:
            client = client_of(url, "GET /PATH/slow HTTP/1.1")
            server, _ = dashboard.accept()
            assert server.recv(1000).startswith(b"GET /slow")
            client.close()
            server.settimeout(20)
            assert server.recv(100) == b""
            server.close()


def test_the_end_of_a_command_breaks_off_open_connections_without_a_word(tmp_path: Path, caplog: Any) -> None:
    """As those of a browser, which keeps websockets open."""
    with socket.create_server(("127.0.0.1", 0)) as dashboard:
        run_dir(tmp_path, "1a2b3c4d-train-aa", access(dashboard.getsockname()[1]))
        with serve.served(choose("train", list_here(str(tmp_path))), print) as url:
            client = client_of(url, "GET /PATH/ws HTTP/1.1\r\nUpgrade: websocket")
            server, _ = dashboard.accept()
            server.recv(1000)
            server.sendall(b"HTTP/1.1 101 Switching Protocols\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 101")
            waiting = client_of(url, "GET /PATH/slow HTTP/1.1")
            slow, _ = dashboard.accept()
            slow.recv(1000)
        assert client.recv(100) == b""
        server.settimeout(10)
        assert server.recv(100) == b""
        for each in (client, server, waiting, slow):
            each.close()
    gc.collect()
    assert not caplog.records
