"""`connections`: what commands, reads and writes cost, beside `ssh` and `sftp` by hand on the same server."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from dagster_rayslurm import SSHConnectionResource
from dagster_rayslurm.connections.base import Connection
from dagster_rayslurm.connections.local import LocalConnection
from dagster_rayslurm.connections.shared import new_connection
from stack.access import read_environment
from stack.cluster import Cluster
from stack.link import Link
from stack.settings import Settings

from .figures import Figure, Options, Sample
from .steps import alternate, base_dir

_ROUND_TRIPS = (0.0, 0.08)
_THREADS = 16
_SIZE = 4096
_READERS, _CADENCE, _IDLE_SECONDS = 100, 5.0, 20.0
_BATCH = 4
"""Transfers of one `sftp` by hand."""

# Beside a multiplexed `ssh` and a running `sftp`: a command is framed and watched over, a write is fsynced and renamed
# in place, which costs a round trip more than `put`.
_BARS = {"run": 2.0, "read": 1.3, "write": 2.0, "local": 4.0}
_IDLE_BAR = 10.0


@dataclass(frozen=True)
class _ByHand:
    """The clients of OpenSSH, on a master connection of their own."""

    options: list[str]
    target: str
    scratch: str

    def ssh(self) -> None:
        subprocess.run(["ssh", *self.options, self.target, "true"], check=True, capture_output=True)

    def sftp(self, command: str) -> float:
        """Seconds per transfer, of several in one process, without those of an empty one."""
        full, empty = (self._batch(command, count) for count in (_BATCH, 0))
        return max(0.0, full - empty) / _BATCH

    def _batch(self, command: str, count: int) -> float:
        started = time.perf_counter()
        batch = f"{command}\n" * count
        subprocess.run(
            ["sftp", "-q", *self.options, "-b", "-", self.target], input=batch.encode(), check=True, capture_output=True
        )
        return time.perf_counter() - started


class _Server:
    """The edge node of the stack, straight or over a slow link, and what its sshd says."""

    def __init__(self) -> None:
        settings = Settings.from_environment()
        self._env = read_environment(settings)
        self._cluster = Cluster(settings)
        self._edge = self._cluster.container("edge").id

    def resource(self, port: int, client: str) -> SSHConnectionResource:
        return SSHConnectionResource(
            host="127.0.0.1",
            port=port,
            user=self._env["SLURM_EDGE_NODE_USER"],
            key_path=self._env["SLURM_EDGE_NODE_KEY_PATH"],
            host_key_checking="off",
            client=client,
        )

    @contextlib.contextmanager
    def reached(self, round_trip: float) -> Iterator[int]:
        """A port that leads there."""
        with Link("127.0.0.1", int(self._env["SLURM_EDGE_NODE_PORT"]), round_trip / 2) as link:
            yield link.port

    @contextlib.contextmanager
    def by_hand(self, port: int, scratch: str) -> Iterator[_ByHand]:
        """A master opened by hand."""
        ssh = self.resource(port, "openssh")
        control = os.path.join(scratch, f"m{port}")
        known = ["-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR"]
        login = ["-i", str(ssh.key_path), "-o", f"Port={port}", "-o", f"User={ssh.user}"]
        subprocess.run(["ssh", "-M", "-S", control, "-fN", *known, *login, ssh.host], check=True, stderr=subprocess.DEVNULL)
        try:
            yield _ByHand(["-o", f"ControlPath={control}", *known, *login], ssh.host, scratch)
        finally:
            subprocess.run(["ssh", "-S", control, "-O", "exit", ssh.host], capture_output=True)

    def logins(self) -> int:
        done = subprocess.run(["docker", "logs", self._edge], capture_output=True, text=True, check=True)
        return (done.stdout + done.stderr).count("Accepted publickey for")

    def cpu_seconds(self) -> float:
        """CPU time that the SSH and SFTP servers on the edge have had."""
        script = (
            "import os,glob\nt=0\nfor p in glob.glob('/proc/[0-9]*/stat'):\n  try: s=open(p).read()\n  except OSError: continue\n"
        )
        script += "  if '(sshd' in s or '(sftp-server' in s: f=s.rpartition(')')[2].split(); t+=int(f[11])+int(f[12])\n"
        script += "print(t/os.sysconf('SC_CLK_TCK'))"
        return float(self._cluster.exec("edge", ["python3", "-c", script]).stdout)


def connections(options: Options) -> list[Figure]:
    """Latency and rate of `run`, `read` and `write` of each connection, without and with 80 ms round trips."""
    server = _Server()
    figures: list[Figure] = []
    with base_dir() as scratch:
        for round_trip in _ROUND_TRIPS:
            with server.reached(round_trip) as port, server.by_hand(port, scratch) as by_hand:
                for client in ("paramiko", "openssh"):
                    before = server.logins()
                    with _connected(server.resource(port, client)) as connection:
                        logins = server.logins() - before
                        name = f"{client}, {round_trip * 1000:.0f} ms"
                        figures += _compare(options, name, connection, connection.home(), by_hand)
                        if not round_trip:
                            figures.append(_logins(client, logins, server.logins() - before))
        figures += _local(options, scratch)
    return figures


@contextlib.contextmanager
def _connected(ssh: SSHConnectionResource) -> Iterator[Connection]:
    connection = new_connection(ssh)
    try:
        connection.run(["true"])
        yield connection
    finally:
        connection.close()


def _compare(options: Options, name: str, connection: Connection, directory: str, by_hand: _ByHand) -> list[Figure]:
    here, there = os.path.join(by_hand.scratch, "here"), f"{directory}/bench-{os.getpid()}"
    data = os.urandom(_SIZE)
    with open(here, "wb") as file:
        file.write(data)
    connection.write(there, data)
    figures = [
        _figure(options, f"run, {name}", "multiplexed ssh", lambda: _timed(by_hand.ssh), lambda: connection.run(["true"]), "run"),
        _figure(
            options,
            f"read, {name}",
            "sftp get",
            lambda: by_hand.sftp(f"get {there} {here}.got"),
            lambda: connection.read(there, 0, 1024 * 1024),
            "read",
        ),
        _figure(
            options,
            f"write, {name}",
            "sftp put",
            lambda: by_hand.sftp(f"put {here} {there}"),
            lambda: connection.write(there, data),
            "write",
        ),
    ]
    connection.remove(there)
    return figures


def _local(options: Options, scratch: str) -> list[Figure]:
    connection, path, data = LocalConnection(), os.path.join(scratch, "file"), os.urandom(_SIZE)
    connection.write(path, data)

    def spawn() -> None:
        subprocess.run(["true"], check=True, capture_output=True)

    def read() -> bytes:
        with open(path, "rb") as file:
            return file.read()

    def write() -> None:
        with tempfile.NamedTemporaryFile(dir=scratch, delete=False) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(file.name, path)

    return [
        _figure(options, "run, local", "subprocess.run", lambda: _timed(spawn), lambda: connection.run(["true"]), "local"),
        _figure(
            options, "read, local", "open and read", lambda: _timed(read), lambda: connection.read(path, 0, 1 << 20), "local"
        ),
        _figure(
            options, "write, local", "write, fsync, rename", lambda: _timed(write), lambda: connection.write(path, data), "local"
        ),
    ]


def _figure(
    options: Options, name: str, what: str, by_hand: Callable[[], float], ours: Callable[[], object], kind: str
) -> Figure:
    hand: list[float] = []
    own: list[float] = []
    alternate(options.repeat(9) + 1, lambda: hand.append(by_hand() * 1000), lambda: own.append(_timed(ours) * 1000))
    theirs, mine = Sample.of(what, hand[1:], "ms"), Sample.of("ours", own[1:], "ms")
    rate = Sample.of(f"{_THREADS} threads", [_rate(ours)], "per s")
    ratio = Sample.of("ratio of medians", [mine.median / max(theirs.median, 1e-6)], "x")
    return Figure(f"connections: {name}", theirs, mine, ratio, _BARS[kind], also=(rate,))


def _rate(operation: Callable[[], object]) -> float:
    count = _THREADS * 8
    with ThreadPoolExecutor(_THREADS) as pool:
        started = time.perf_counter()
        list(pool.map(lambda _: operation(), range(count)))
        return count / (time.perf_counter() - started)


def _logins(client: str, first: int, all_of_them: int) -> Figure:
    return Figure(
        name=f"connections: logins, {client}",
        by_hand=Sample.of("of the first command", [first], "logins"),
        ours=Sample.of("of all that was measured", [all_of_them], "logins"),
        result=Sample.of("logins by sshd's log", [all_of_them], "logins"),
        bar=1,
    )


def idle_readers(options: Options) -> list[Figure]:  # noqa: ARG001 - one long measurement
    """CPU that 100 followers cost while nothing happens, on this machine and on the edge node."""
    server = _Server()
    figures = []
    with server.reached(0.0) as port:
        for client in ("paramiko", "openssh"):
            with _connected(server.resource(port, client)) as connection:
                path = f"{connection.home()}/idle-{os.getpid()}"
                connection.write(path, bytes(100_000))
                here, there = _measure_idle(server, connection, path)
                connection.remove(path)
            figures.append(
                Figure(
                    name=f"connections: {_READERS} idle readers, {client}",
                    by_hand=Sample.of("edge node", [there], "% of a core"),
                    ours=Sample.of("this machine", [here], "% of a core"),
                    result=Sample.of("the busier end", [max(here, there)], "% of a core"),
                    bar=_IDLE_BAR,
                )
            )
    return figures


def _measure_idle(server: _Server, connection: Connection, path: str) -> tuple[float, float]:
    stop = threading.Event()

    def follow(index: int) -> None:
        stop.wait(_CADENCE * index / _READERS)
        while not stop.is_set():
            for _ in range(2):  # A follower looks at two files.
                connection.read(path, 100_000, 1024 * 1024)
            stop.wait(_CADENCE)

    readers = [threading.Thread(target=follow, args=(index,), daemon=True) for index in range(_READERS)]
    for reader in readers:
        reader.start()
    time.sleep(_CADENCE)
    here, there, started = time.process_time(), server.cpu_seconds(), time.perf_counter()
    time.sleep(_IDLE_SECONDS)
    here, there = time.process_time() - here, server.cpu_seconds() - there
    elapsed = time.perf_counter() - started
    stop.set()
    for reader in readers:
        reader.join()
    return 100 * here / elapsed, 100 * there / elapsed


def _timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def available() -> bool:
    """Whether the stack and the programs to compare with are there."""
    return bool(read_environment(Settings.from_environment())) and all(map(shutil.which, ("ssh", "sftp", "docker")))
