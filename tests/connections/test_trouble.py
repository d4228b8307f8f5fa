"""Troubles of login nodes and networks: full servers, restarts, cuts and slow links."""

import contextlib
import hashlib
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dagster_rayslurm.ssh.base import ConnectionFailed, ConnectionLost
from dagster_rayslurm.ssh.openssh import control_path
from stack.link import Link

from ..conftest import wait_until
from .fixtures import CLIENTS, Connect
from .sshd import Sshd

CUT = 60.0


def new_path(connection: Any, name: str) -> str:
    return f"{connection.home()}/{name}-{os.getpid()}-{time.monotonic_ns()}"


# -- sessions and logins that the server allows --------------------------------------------------------------------------


@pytest.mark.parametrize("allowed", [1, 2, 10])
def test_max_sessions(allowed: int, connect: Connect, sshd: Callable[..., Sshd], client: str) -> None:
    """Files and commands of 16 threads share the sessions of one login."""
    server = sshd(f"MaxSessions {allowed}")
    connection = connect(server, client)
    path = new_path(connection, "sessions")
    connection.make_dir(path)

    def work(index: int) -> None:
        file = f"{path}/{index}"
        for turn in range(3):
            connection.write(file, b"%d" % turn)
            assert connection.run(["cat", file]).stdout == b"%d" % turn
            assert connection.read(file, 0, 10) == b"%d" % turn

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(work, range(16)))
    connection.remove(path)
    assert server.logins() == 1


def test_no_session_at_all(connect: Connect, sshd: Callable[..., Sshd], client: str) -> None:
    with pytest.raises(ConnectionFailed, match=r"opens no session on this connection \(MaxSessions"):
        connect(sshd("MaxSessions 0"), client, connect_timeout=3).run(["true"])


def test_many_processes_on_one_master_get_a_second_one(connect: Connect, sshd: Callable[..., Sshd], openssh_there: None) -> None:
    server = sshd("MaxSessions 3")
    connections = [connect(server, "openssh") for _ in range(8)]
    for connection in connections:  # Each keeps a session for its files, as each step's process does.
        assert connection.read("/etc/hostname", 0, 4) == b"edge"
    with ThreadPoolExecutor(8) as pool:
        assert {done.stdout for done in pool.map(lambda connection: connection.run(["echo", "x"]), connections)} == {b"x\n"}
    assert 2 <= server.logins() <= 6


def test_sixty_simultaneous_logins(connect: Connect, sshd: Callable[..., Sshd], client: str) -> None:
    """With the default MaxStartups of 10:30:100 sshd refuses some of more than ten simultaneous logins."""
    server = sshd()
    connections = [connect(server, client) for _ in range(60)]
    if client == "openssh":  # Sixty Dagster hosts, as it were: processes of one host share a master.
        connections = [connect(server, client, known_hosts_file=f"/tmp/known-{os.getpid()}-{index}") for index in range(60)]
    with ThreadPoolExecutor(60) as pool:
        done = list(pool.map(lambda connection: connection.run(["echo", "x"]).stdout, connections))
    assert done == [b"x\n"] * 60
    assert server.logins() == 60 and "drop connection" not in server.log()


def test_a_server_that_turns_logins_away_for_a_while(connect: Connect, sshd: Callable[..., Sshd], client: str) -> None:
    """A login is repeated while other hosts use up MaxStartups."""
    server = sshd("MaxStartups 2:100:2", "LoginGraceTime 60")
    with contextlib.ExitStack() as others:
        for _ in range(2):
            other = others.enter_context(socket.create_connection((server.host, server.port)))
            assert other.recv(3) == b"SSH"
        release = threading.Timer(5, others.close)
        release.start()
        began = time.monotonic()
        assert connect(server, client).run(["echo", "x"]).stdout == b"x\n"
        assert 4 < time.monotonic() - began < 40
        release.join()


# -- restarts ------------------------------------------------------------------------------------------------------------


def restart(server: Sshd, down: float = 0.5) -> None:
    server.stop()
    time.sleep(down)
    server.start()


class RestartsAt:
    """A progress callback that restarts the server once, after some bytes, and then runs a script there."""

    def __init__(self, bytes_done: int, server: Sshd, script: str = "true") -> None:
        self.reports: list[int] = []
        self.restarted = False
        self._at = bytes_done
        self._server = server
        self._script = script

    def __call__(self, done: int, size: int) -> None:
        self.reports.append(done)
        if done > self._at and not self.restarted:
            self.restarted = True
            restart(self._server, 0)
            self._server.shell(self._script)


def test_a_restart_between_operations(connect: Connect, server: Sshd, client: str) -> None:
    connection = connect(server, client)
    assert connection.read("/etc/hostname", 0, 4) == b"edge"
    restart(server)
    assert connection.read("/etc/hostname", 0, 4) == b"edge"
    restart(server)
    assert connection.run(["echo", "x"]).stdout == b"x\n"


def test_reads_continue_after_a_restart(connect: Connect, server: Sshd, client: str) -> None:
    connection = connect(server, client)
    path, data = new_path(connection, "read"), os.urandom(3_000_000)
    connection.write(path, data)
    stop = threading.Event()
    wrong: list[Any] = []
    turns = [0]

    def read_all() -> None:
        while not stop.is_set():
            got = b""
            while part := connection.read(path, len(got), 1024 * 1024):
                got += part
            if got != data:
                wrong.append(len(got))
            turns[0] += 1

    readers = [threading.Thread(target=read_all) for _ in range(3)]
    for reader in readers:
        reader.start()
    for _ in range(3):
        before = turns[0]
        assert wait_until(lambda before=before: turns[0] > before + 3)
        restart(server)
    before = turns[0]
    assert wait_until(lambda: turns[0] > before + 3)
    stop.set()
    for reader in readers:
        reader.join()
    assert not wrong
    connection.remove(path)


def test_an_upload_resumes_after_a_restart(connect: Connect, server: Sshd, client: str, tmp_path: Path) -> None:
    here = tmp_path / "big"
    here.write_bytes(os.urandom(200_000_000))
    connection = connect(server, client)
    path = new_path(connection, "upload")
    progress = RestartsAt(60_000_000, server)

    connection.upload(str(here), path, progress)
    assert progress.restarted and progress.reports[-1] == 200_000_000
    assert progress.reports == sorted(progress.reports)  # It never began again.
    digest = connection.run(["sha256sum", path]).stdout.decode().split()[0]
    assert digest == hashlib.sha256(here.read_bytes()).hexdigest()
    assert b".rs-" not in connection.run(["ls", "-A", connection.home()]).stdout
    connection.remove(path)


def test_a_download_resumes_after_a_restart(connect: Connect, server: Sshd, client: str, tmp_path: Path) -> None:
    connection = connect(server, client)
    path = new_path(connection, "download")
    data = os.urandom(100_000_000)
    connection.write(path, data)
    progress = RestartsAt(30_000_000, server)

    connection.download(path, str(tmp_path / "back"), progress)
    assert (tmp_path / "back").read_bytes() == data and len(list(tmp_path.glob("*.tmp"))) == 0
    connection.remove(path)


def test_a_restart_during_a_command_is_an_error_and_kills_the_command(connect: Connect, server: Sshd, client: str) -> None:
    """The command may have done its work, so it is not run again. The caller gets an error at once."""
    connection = connect(server, client)
    mark = f"4{os.getpid()}.{time.monotonic_ns()}"
    path = new_path(connection, "times")
    threading.Timer(1.5, server.stop).start()
    began = time.monotonic()
    with pytest.raises(ConnectionLost, match="the connection was lost"):
        connection.run(["sh", "-c", f"echo x >> {path}; sleep {mark}"])
    assert time.monotonic() - began < 30
    server.start()
    assert connection.read(path, 0, 10) == b"x\n"
    list_sleeping = ["sh", "-c", f"ps -eo args= | grep '^sleep {mark[:-1]}[{mark[-1]}]'"]
    assert wait_until(lambda: not connection.run(list_sleeping).stdout)
    connection.remove(path)


def test_a_command_that_ends_the_agent_is_not_repeated(connect: Connect, server: Sshd, client: str) -> None:
    """The error says that it may have run, whatever it printed."""
    connection = connect(server, client)
    path = new_path(connection, "once")
    with pytest.raises(ConnectionLost, match="was lost"):
        connection.run(["sh", "-c", f"echo x >> {path}; echo 'Session open refused by peer' >&2; kill -9 $PPID"])
    assert connection.read(path, 0, 10) == b"x\n"
    assert server.logins() == 1
    connection.remove(path)


def test_an_upload_starts_again_if_its_temporary_file_is_gone(
    connect: Connect, server: Sshd, client: str, tmp_path: Path
) -> None:
    here = tmp_path / "big"
    here.write_bytes(os.urandom(60_000_000))
    connection = connect(server, client)
    path = new_path(connection, "gone")
    progress = RestartsAt(20_000_000, server, "rm /home/dev/.rs-*.tmp")

    connection.upload(str(here), path, progress)
    digest = connection.run(["sha256sum", path]).stdout.decode().split()[0]
    assert progress.restarted and digest == hashlib.sha256(here.read_bytes()).hexdigest()
    connection.remove(path)


def test_a_download_starts_again_if_the_file_was_replaced(connect: Connect, server: Sshd, client: str, tmp_path: Path) -> None:
    connection = connect(server, client)
    path = new_path(connection, "replaced")
    connection.write(path, b"A" * 40_000_000)
    progress = RestartsAt(10_000_000, server, f"head -c 45000000 /dev/zero | tr '\\0' B > {path}")

    connection.download(path, str(tmp_path / "back"), progress)
    assert progress.restarted and (tmp_path / "back").read_bytes() == b"B" * 45_000_000
    connection.remove(path)


def test_a_master_that_is_killed_is_opened_again(connect: Connect, server: Sshd, openssh_there: None) -> None:
    connection = connect(server, "openssh")
    path = control_path(connection.ssh)
    for use in (lambda: connection.run(["true"]), lambda: connection.read("/etc/hostname", 0, 1)):
        connection.run(["true"])
        pid = subprocess.run(["ssh", "-S", path, "-O", "check", "host"], capture_output=True, text=True).stderr
        os.kill(int(pid.split("pid=")[1].split(")")[0]), 9)
        time.sleep(0.5)  # A command that is sent before this end notices may have run.
        use()
    pid = subprocess.run(["ssh", "-S", path, "-O", "check", "host"], capture_output=True, text=True).stderr
    os.kill(int(pid.split("pid=")[1].split(")")[0]), 9)
    with connection.connect("127.0.0.1", server.port, 20) as through:
        assert through.recv(3) == b"SSH"


def test_a_lost_agent_costs_no_login(connect: Connect, server: Sshd, client: str) -> None:
    connection = connect(server, client)
    for _ in range(3):
        assert connection.read("/etc/hostname", 0, 4) == b"edge"
        server.end_agents()
    assert connection.read("/etc/hostname", 0, 4) == b"edge"
    assert server.logins() == 1


def test_a_command_never_takes_truncated_input_as_complete(connect: Connect, server: Sshd, client: str) -> None:
    """A command like sbatch must not act on the first half of its input."""
    with Link(server.host, server.port, 0.05) as link:
        connection = connect(server, client, host="127.0.0.1", port=link.port)
        path = new_path(connection, "half")
        data = bytes(30_000_000)
        threading.Timer(0.4, server.stop).start()
        with pytest.raises(ConnectionLost):
            # timeout(1) makes a process group of its own, as many wrappers do.
            connection.run(["timeout", "99", "sh", "-c", f"cat > {path}.part; mv {path}.part {path}"], stdin=data)
        server.start()
        connection.run(["sleep", "3"])
        assert connection.run(["ls", path]).returncode != 0
        connection.remove(f"{path}.part")


def test_an_unreachable_server_is_reported_within_connect_timeout(connect: Connect, server: Sshd, client: str) -> None:
    connection = connect(server, client, connect_timeout=4)
    connection.run(["true"])
    server.stop()
    began = time.monotonic()
    with pytest.raises(ConnectionFailed, match="nothing listens") as caught:
        connection.read("/etc/hostname", 0, 1)
    assert caught.value.temporary and 2 < time.monotonic() - began < 30
    server.start()
    assert connection.read("/etc/hostname", 0, 4) == b"edge"


# -- cuts and slow links -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def cut_by_proxy(server: Sshd) -> Iterator[tuple[str, int, Callable[[], None], Callable[[], None]]]:
    """Open connections hang for ever, new ones are refused, as when a NAT router restarts."""
    with Link(server.host, server.port) as link:
        yield "127.0.0.1", link.port, link.cut, link.mend


@contextlib.contextmanager
def cut_by_firewall(server: Sshd) -> Iterator[tuple[str, int, Callable[[], None], Callable[[], None]]]:
    """Packets of the port are dropped in both directions for a while, as when a cable is pulled."""
    rules = [["OUTPUT", "-p", "tcp", "-d", server.host, "--dport", str(server.port), "-j", "DROP"]]
    rules += [["INPUT", "-p", "tcp", "-s", server.host, "--sport", str(server.port), "-j", "DROP"]]

    def change(action: str) -> None:
        for rule in rules:
            subprocess.run(["iptables", "-w", action, *rule], check=True, capture_output=True)

    try:
        change("-A")
        change("-D")
    except (OSError, subprocess.CalledProcessError) as error:
        if os.environ.get("CI"):
            pytest.fail(f"packets cannot be dropped here: {error}")
        pytest.skip("dropping packets needs root and iptables")
    yield server.host, server.port, lambda: change("-A"), lambda: change("-D")


@pytest.mark.timeout(240)
@pytest.mark.thorough
def test_a_cut_of_a_minute(connect: Connect, sshd: Callable[..., Sshd], openssh_there: None) -> None:
    """A reader continues within 5 s after the cut, with both clients and both kinds of cut."""
    resumed: dict[str, float] = {}
    failures: list[str] = []

    def follow(name: str, client: str, way: Any) -> None:
        host, port, cut, mend = way
        connection = connect(SimpleNamespace(host=host, port=port), client)
        connection.run(["true"])
        assert connection.read("/etc/hostname", 0, 4) == b"edge"
        timers = [threading.Timer(0.1, cut), threading.Timer(0.1 + CUT, mend)]
        for timer in timers:
            timer.start()
        end_of_cut = time.monotonic() + 0.1 + CUT
        time.sleep(0.5)
        while name not in resumed and time.monotonic() < end_of_cut + 30:
            with contextlib.suppress(ConnectionFailed):
                assert connection.read("/etc/hostname", 0, 4) == b"edge"
                resumed[name] = time.monotonic() - end_of_cut
                break
            time.sleep(0.5)
        else:
            failures.append(name)
        for timer in timers:
            timer.join()

    with contextlib.ExitStack() as ways:
        threads = [
            threading.Thread(target=follow, args=(f"{client}, {kind.__name__}", client, ways.enter_context(kind(sshd()))))
            for client in CLIENTS
            for kind in (cut_by_proxy, cut_by_firewall)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(resumed) == 4, (resumed, failures)
    assert all(-0.2 < seconds <= 30 for seconds in resumed.values()), resumed


def test_a_link_of_80_ms(connect: Connect, server: Sshd, client: str, tmp_path: Path) -> None:
    """Requests of 40 threads are in flight together: their reads take a few round trips, not hundreds."""
    with Link(server.host, server.port, 0.04) as link:
        connection = connect(server, client, host="127.0.0.1", port=link.port)
        assert connection.run(["cat"], stdin=b"x" * 100_000).stdout == b"x" * 100_000
        path = new_path(connection, "far")
        data = os.urandom(1_000_000)
        connection.write(path, data)
        assert connection.read(path, 0, 2_000_000) == data
        began = time.monotonic()
        with ThreadPoolExecutor(40) as pool:
            assert all(part == data[:100] for part in pool.map(lambda _: connection.read(path, 0, 100), range(200)))
        assert time.monotonic() - began < 200 * 0.08 / 2
        (tmp_path / "up").write_bytes(data * 20)
        connection.upload(str(tmp_path / "up"), path)
        connection.download(path, str(tmp_path / "down"))
        assert (tmp_path / "down").read_bytes() == data * 20
        connection.remove(path)


def test_a_forked_child_makes_its_own_connection(connect: Connect, server: Sshd) -> None:
    from dagster_rayslurm.ssh.pool import close_connections, connection_to

    ssh = connect.fields(server)
    try:
        connection_to(ssh).run(["true"])
        pid = os.fork()
        if pid == 0:
            code = 1
            with contextlib.suppress(BaseException):
                code = 0 if connection_to(ssh).run(["echo", "child"]).stdout == b"child\n" else 2
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert connection_to(ssh).run(["echo", "parent"]).stdout == b"parent\n"
        assert server.logins() == 2
    finally:
        close_connections()
