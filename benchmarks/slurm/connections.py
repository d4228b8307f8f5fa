"""`connections`: what commands, reads and writes cost, beside `ssh` and `sftp` by hand on the same server."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from dagster_rayslurm import SSHConnectionResource
from dagster_rayslurm.ssh.base import Connection
from dagster_rayslurm.ssh.local import LocalConnection
from dagster_rayslurm.ssh.pool import new_connection

from ..figures import Figure, Options, Sample
from ..parties.edge import ByHand, Edge
from ..steps import alternate, base_dir

_ROUND_TRIPS = (0.0, 0.08)
_THREADS = 16
_SIZE = 4096
_READERS, _CADENCE, _IDLE_SECONDS = 100, 5.0, 20.0

# Beside a multiplexed `ssh` and a running `sftp`: a command is framed and watched over, a write is fsynced and renamed
# in place, which costs a round trip more than `put`.
_BARS = {"run": 2.0, "read": 1.3, "write": 2.0, "local": 4.0}
_IDLE_BAR = 10.0


def connections(options: Options) -> list[Figure]:
    """Latency and rate of `run`, `read` and `write` of each connection, without and with 80 ms round trips."""
    edge = Edge()
    figures: list[Figure] = []
    with base_dir() as scratch:
        for round_trip in _ROUND_TRIPS:
            with edge.link(round_trip) as link, edge.by_hand(scratch, link.port) as by_hand:
                for client in ("paramiko", "openssh"):
                    before = edge.logins()
                    with _connected(edge.resource(link.port, client)) as connection:
                        logins = edge.logins() - before
                        name = f"{client}, {round_trip * 1000:.0f} ms"
                        figures += _compare(options, name, connection, connection.home(), by_hand)
                        if not round_trip:
                            figures.append(_logins(client, logins, edge.logins() - before))
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


def _compare(options: Options, name: str, connection: Connection, directory: str, by_hand: ByHand) -> list[Figure]:
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
    edge = Edge()
    figures = []
    with edge.link() as link:
        for client in ("paramiko", "openssh"):
            with _connected(edge.resource(link.port, client)) as connection:
                path = f"{connection.home()}/idle-{os.getpid()}"
                connection.write(path, bytes(100_000))
                here, there = _measure_idle(edge, connection, path)
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


def _measure_idle(edge: Edge, connection: Connection, path: str) -> tuple[float, float]:
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
    here, there, started = time.process_time(), edge.cpu_seconds(), time.perf_counter()
    time.sleep(_IDLE_SECONDS)
    here, there = time.process_time() - here, edge.cpu_seconds() - there
    elapsed = time.perf_counter() - started
    stop.set()
    for reader in readers:
        reader.join()
    return 100 * here / elapsed, 100 * there / elapsed


def _timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
