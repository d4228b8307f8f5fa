"""The agent of the edge node over a pipe, without SSH, and the functions that it calls."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_rayslurm import SSHConnectionResource
from dagster_rayslurm.edge import agent, files, processes
from dagster_rayslurm.ssh.base import ConnectionFailed, ConnectionGone, ConnectionLost
from dagster_rayslurm.ssh.connection import AgentClient, SSHConnection, agent_command
from dagster_rayslurm.ssh.local import LocalConnection

from ..conftest import marked_processes, open_files, wait_until

SHELLS = [shell for shell in ("dash", "bash", "busybox", "zsh", "tcsh", "fish") if shutil.which(shell)]


def sleeps(mark: str) -> bool:
    for process in marked_processes(mark):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.name() == "sleep":
                return True
    return False


class Pipe:
    """A command of this machine as the stream of an SSH client."""

    def __init__(self, *command: str, **options: Any) -> None:
        self._socket, other = socket.socketpair()
        with other:
            self.process = subprocess.Popen(command, stdin=other, stdout=other, stderr=other, start_new_session=True, **options)
        self.sendall, self.recv = self._socket.sendall, self._socket.recv

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)

    def failure(self, noise: str) -> Exception:
        return ConnectionFailed(noise, temporary=not noise)


class Transport:
    """A login that starts each agent in a shell of this machine."""

    def __init__(self, before: str = "", shell: str = "sh") -> None:
        self.streams: list[Pipe] = []
        self._before, self._shell = before, shell

    def alive(self) -> bool:
        return True

    def start(self, command: str) -> Iterator[Pipe]:
        words = (self._shell, "sh") if self._shell == "busybox" else (self._shell,)
        self.streams.append(Pipe(*words, "-c", self._before + command))
        yield self.streams[-1]

    def close(self) -> None: ...


SSH = SSHConnectionResource(host="edge", user="dev", connect_timeout=10, python=sys.executable)


@pytest.fixture
def connect() -> Iterator[Callable[..., tuple[SSHConnection, Transport]]]:
    transports: list[Transport] = []

    def make(*arguments: str, **fields: Any) -> tuple[SSHConnection, Transport]:
        transports.append(Transport(*arguments))
        return SSHConnection(SSH.model_copy(update=fields), lambda _: transports[-1]), transports[-1]  # type: ignore[arg-type, return-value]

    yield make
    for transport in transports:
        for stream in transport.streams:
            stream.close()
            stream.process.wait(30)


# -- the agent -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", SHELLS)
def test_each_login_shell_starts_the_agent(shell: str, connect: Any) -> None:
    connection, _ = connect("", shell)
    assert connection.run(["printf", "%s", "a'b\n!! $x"]).stdout == b"a'b\n!! $x"


def test_output_of_start_up_files_is_skipped(connect: Any) -> None:
    noise = "set -xv; head -c 300000 /dev/urandom; echo Welcome; echo maintenance >&2; "
    connection, _ = connect(noise, "bash")
    assert connection.run(["echo", "x"]).stdout == b"x\n"


def test_a_shell_that_ends_at_once(connect: Any) -> None:
    with pytest.raises(ConnectionFailed, match="has expired"):
        connect("echo your account has expired; exit 3; ")[0].run(["true"])


def test_a_start_up_file_that_hangs(connect: Any) -> None:
    with pytest.raises(ConnectionFailed, match="no answer within 1 s") as caught:
        connect("sleep 3; ", connect_timeout=1)[0].run(["true"])
    assert caught.value.temporary


def test_an_old_python_is_named() -> None:
    word = agent_command(SSH)[1].decode()
    with pytest.raises(ConnectionFailed, match=r"python3 does not run there \(it is Python 2.7\)"):
        AgentClient(SSH.model_copy(update={"python": "python3"}), Pipe("printf", f"{word}2.7\\n"), word.encode())


class Stopped(BaseException):
    """What the handler of a signal raises."""


@pytest.mark.parametrize("moment", ["the login", "a message"])
def test_an_interrupt_leaves_the_connection_whole(moment: str, connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raised inside the SSH client, it would leave half a message, or a lock that nobody releases."""
    connection, transport = connect()
    came = threading.Event()

    def stop(*_: Any) -> None:
        came.set()
        raise Stopped

    def interrupting(method: Any) -> Any:
        def interrupted(*arguments: Any) -> Any:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert came.wait(30)
            return method(*arguments)

        return interrupted

    before = signal.signal(signal.SIGUSR1, stop)
    try:
        with monkeypatch.context() as patch, pytest.raises(Stopped):
            if moment == "the login":
                patch.setattr(AgentClient, "_skip_noise", interrupting(AgentClient._skip_noise))
            else:
                connection.home()
                patch.setattr(connection._agent._sender, "_write", interrupting(transport.streams[0].sendall))
            connection.run(["sleep", "56"])
        assert connection.run(["echo", "x"]).stdout == b"x\n"
        assert len(transport.streams) == 1
        mark = os.environ["PYTEST_OF_RAYSLURM"]
        assert wait_until(lambda: not sleeps(mark))
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_many_requests_at_once(connect: Any) -> None:
    connection, transport = connect()
    with ThreadPoolExecutor(40) as pool:
        began = time.monotonic()
        slow = pool.submit(connection.run, ["sleep", "1"])
        outputs = list(pool.map(lambda index: connection.run(["echo", str(index)]).stdout, range(80)))
        assert time.monotonic() - began < 30 and slow.result().returncode == 0
    assert outputs == [b"%d\n" % index for index in range(80)]
    assert len(transport.streams) == 1


def test_a_small_read_does_not_wait_for_a_large_output(connect: Any, tmp_path: Path) -> None:
    connection, _ = connect()
    (tmp_path / "small").write_bytes(b"x")
    with ThreadPoolExecutor(1) as pool:
        large = pool.submit(connection.run, ["head", "-c", "100000000", "/dev/zero"])
        reads = 0
        while not large.done():
            assert connection.read(str(tmp_path / "small"), 0, 1) == b"x"
            reads += 1
        assert len(large.result().stdout) == 100_000_000 and reads > 3


def test_the_end_of_the_connection_kills_commands_that_are_just_beginning(connect: Any) -> None:
    """`nothing_is_left` fails this test if one command goes on."""
    for _ in range(3):
        connection, transport = connect()
        connection.home()
        with ThreadPoolExecutor(20) as pool:
            running = [pool.submit(connection.run, ["sleep", "57"]) for _ in range(20)]
            assert wait_until(lambda: sleeps(os.environ["PYTEST_OF_RAYSLURM"]))
            transport.streams[0].close()
            assert all(isinstance(each.exception(), ConnectionLost) for each in running)


def test_the_end_of_the_connection_kills_all_commands(connect: Any) -> None:
    connection, transport = connect()
    command = ["sh", "-c", "(trap '' TERM; sleep 77) & timeout 99 sleep 77 & sleep 77"]
    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(connection.run, command) for _ in range(3)]
        mark = os.environ["PYTEST_OF_RAYSLURM"]
        assert wait_until(lambda: sum("sleep" in p.name() for p in marked_processes(mark)) == 9)
        transport.streams[0].close()
        for each in running:
            with pytest.raises(ConnectionLost):
                each.result()
    assert wait_until(lambda: not marked_processes(mark))
    assert transport.streams[0].process.wait(5) == 0


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_agent_with_its_commands(signum: signal.Signals, connect: Any) -> None:
    connection, transport = connect()
    assert connection.run(["true"]).returncode == 0
    threading.Timer(0.3, transport.streams[0].process.send_signal, [signum]).start()
    with pytest.raises(ConnectionLost):
        connection.run(["sleep", "66"])
    assert wait_until(lambda: not marked_processes(os.environ["PYTEST_OF_RAYSLURM"]))


def test_a_command_may_not_be_repeated_and_a_read_may(connect: Any, tmp_path: Path) -> None:
    connection, transport = connect()
    (tmp_path / "file").write_bytes(b"content")
    with pytest.raises(ConnectionLost):
        connection.run(["sh", "-c", f"echo x >> {tmp_path}/times; kill -9 $PPID"])
    assert (tmp_path / "times").read_text() == "x\n"
    transport.streams[-1].process.wait()
    stopped, reads = threading.Event(), 0

    def kill() -> None:
        before = 0
        while not stopped.wait(0.02):
            if reads > before:  # On a busy machine, an agent may need longer than this to start.
                before = reads
                transport.streams[-1].process.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    for reads in range(1, 301):  # noqa: B007
        assert connection.read(str(tmp_path / "file"), 0, 9) == b"content"
    stopped.set()
    killer.join()
    assert len(transport.streams) > 2  # One of them was lost to the command.


def test_an_agent_that_is_gone_raises_before_a_command(connect: Any) -> None:
    stream = Pipe("sh", "-c", (command := agent_command(SSH))[0])
    client = AgentClient(SSH, stream, command[1])
    stream.close()
    assert wait_until(lambda: client.lost)
    with pytest.raises(ConnectionGone):
        client.submit(None, files.home)
    stream.process.wait(30)


def test_commands_see_the_environment_of_the_login_and_nothing_else(connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LANG", "LC_ALL", "LC_CTYPE"):
        monkeypatch.delenv(name, raising=False)
    connection, _ = connect("export MINE='a\nb'; umask 027; ")
    shown = connection.run(["sh", "-c", "umask; ls -l /proc/self/fd | grep -c 'pipe:'; env -0"]).stdout
    umask, pipes, environ = shown.split(b"\n", 2)
    names = {line.partition(b"=")[0] for line in environ.split(b"\0")}
    assert umask == b"0027" and pipes == b"3" and b"MINE=a\nb\0" in environ
    assert not {b"LC_CTYPE", b"PYTHONUTF8"} & names


def test_any_name_in_any_locale(connect: Any, tmp_path: Path) -> None:
    connection, _ = connect("unset LANG LC_CTYPE; LC_ALL=C; export LC_ALL; ")
    path = f"{tmp_path}/é\udcff"
    connection.write(path, b"x")
    assert connection.read(path, 0, 1) == b"x" and connection.run(["cat", path]).stdout == b"x"


def test_errors_keep_their_number_and_name_the_place(connect: Any, tmp_path: Path) -> None:
    connection, _ = connect()
    with pytest.raises(FileNotFoundError, match=r"dev@edge:22: writing .*: No such file") as caught:
        connection.write(str(tmp_path / "no" / "file"), b"")
    assert caught.value.errno == 2
    with pytest.raises(NotADirectoryError, match=r"dev@edge:22: .*/etc/passwd"):
        connection.call(files.make_dir, "/etc/passwd/x")
    with pytest.raises(RuntimeError, match="TypeError"):
        connection.call(files.read, "/etc/passwd")


def test_a_call_that_nobody_waits_for_any_more_is_ended(connect: Any) -> None:
    connection, _ = connect()
    connection.run(["true"])
    threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        connection.run(["sleep", "55"])
    mark = os.environ["PYTEST_OF_RAYSLURM"]
    assert wait_until(lambda: not sleeps(mark))
    assert connection.run(["echo", "x"]).stdout == b"x\n"


@given(values=st.lists(st.one_of(st.binary(max_size=2000), st.integers(), st.text(), st.none(), st.lists(st.text()))))
def test_messages_come_out_as_they_went_in(values: list[Any]) -> None:
    part, agent.PART = agent.PART, 100
    try:
        data = b"".join(agent.frames({"id": 7, "call": "x"}, values))
    finally:
        agent.PART = part
    stream = [memoryview(data)]

    def read(size: int) -> bytes:
        got, stream[0] = bytes(stream[0][:size]), stream[0][size:]
        return got

    assert [(header["call"], found) for header, found in agent.messages(read)] == [("x", values)]
    for cut in {1, len(data) // 2, len(data) - 1}:
        stream[0] = memoryview(data)[:cut]
        assert list(agent.messages(read)) == []


def test_a_stream_ends_with_its_command(connect: Any) -> None:
    """Also if the thread that sends to the command still waits for data: the pause gives the thread time to begin its wait."""
    connection, _ = connect()
    with connection.stream(["sh", "-c", "read line; sleep 0.2; echo $line: no such job"]) as stream:
        stream.settimeout(10)
        stream.sendall(b"7\n")
        assert b"".join(iter(lambda: stream.recv(100), b"")) == b"7: no such job\n"


# -- functions -----------------------------------------------------------------------------------------------------------


def test_a_deadline_kills_the_session_of_a_command() -> None:
    began = time.monotonic()
    code, out, _ = processes.run(["sh", "-c", "echo x; trap '' TERM; timeout 44 sleep 44 & sleep 44; sleep 44"], b"", 0.5)
    assert (code, out) == (None, b"x\n") and 2 < time.monotonic() - began < 30
    assert wait_until(lambda: not marked_processes(os.environ["PYTEST_OF_RAYSLURM"]))


def test_a_command_that_closes_its_streams_is_waited_for() -> None:
    began = time.monotonic()
    assert processes.run(["sh", "-c", "exec <&- >&- 2>&-; sleep 0.5; exit 4"], b"x" * 200_000) == (4, b"", b"")
    assert time.monotonic() - began > 0.4


def test_the_environment_of_a_command() -> None:
    assert processes.run(["/usr/bin/env"], b"", None, {"A": "b"}) == (0, b"A=b\n", b"")


def test_an_upload_goes_on_where_it_ended(tmp_path: Path) -> None:
    path = str(tmp_path / "file")
    fd, start = files.open_write(path, 0)
    files.write_at(fd, 0, b"abc")
    files.close(fd)
    fd, start = files.open_write(path, 2)
    assert start == 2
    files.write_at(fd, 2, b"xyz")
    files.finish(fd, path, path + "2", 0o640)
    assert Path(path + "2").read_bytes() == b"abxyz" and os.stat(path + "2").st_mode & 0o777 == 0o640
    fd, start = files.open_write(path, 2)  # It is gone: from the beginning.
    files.close(fd)
    assert start == 0


class TwoAgents(LocalConnection):
    """A connection that breaks while the agent finishes an upload; this agent is done just before the next one finishes it."""

    def __init__(self) -> None:
        self.left: list[Callable[[], None]] = []

    def attempt(self, doing: str, operation: Callable[[Any], Any], repeat: bool, deadline: float | None = None) -> Any:
        def submit(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
            if function is files.finish:
                self.left.append(lambda: function(*arguments))
                if len(self.left) == 1:
                    raise ConnectionLost("the connection broke")
                self.left[0]()
            result = function(*arguments)
            return lambda: result

        try:
            return operation(submit)
        except ConnectionLost:
            return operation(submit)


def test_an_upload_that_two_agents_finish(tmp_path: Path) -> None:
    data = os.urandom(agent.PART + 1)
    (tmp_path / "here").write_bytes(data)
    TwoAgents().upload(str(tmp_path / "here"), str(tmp_path / "there"))
    assert (tmp_path / "there").read_bytes() == data


def test_an_upload_whose_file_was_removed(tmp_path: Path) -> None:
    path = str(tmp_path / "file")
    for _ in range(2):  # The second time, another file is there.
        fd, _ = files.open_write(path + "2", 0)
        os.unlink(path + "2")
        with pytest.raises(FileNotFoundError):
            files.finish(fd, path + "2", path, 0o600)
        Path(path).write_bytes(b"")


def test_a_download_goes_on_in_the_same_version_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abcdef")
    fd, version, start, data = files.open_read(str(tmp_path / "file"), [], 2, 3)
    assert (version[0], start, data, files.read_at(fd, 3, 10)) == (6, 0, b"abc", b"def")
    files.close(fd)
    fd, _, start, data = files.open_read(str(tmp_path / "file"), version, 2, 3)
    assert (start, data) == (2, b"cde")
    files.close(fd)
    with pytest.raises(IsADirectoryError):
        files.open_read(str(tmp_path), [], 0, 2)
    assert not open_files(tmp_path)
