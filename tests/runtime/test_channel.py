"""What strangers and go-betweens can do to the control channel, over real sockets: nothing but end it."""

from __future__ import annotations

import json
import resource
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dagster_rayslurm.runtime.node.ports import control_ports
from dagster_rayslurm.runtime.node.resources import NodeResources
from dagster_rayslurm.runtime.nodes.head import ConnectedWorkers
from dagster_rayslurm.runtime.process.loop import Loop
from dagster_rayslurm.runtime.protocol.record import split_lines
from dagster_rayslurm.runtime.protocol.rpc import Channel

KEY = "aa" * 32
FACTS = NodeResources("n2", 1, 0, 2**30, None).facts()
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda one: st.lists(one, max_size=3), max_leaves=4
)
GARBAGE = st.one_of(
    st.binary(max_size=200),
    st.dictionaries(st.sampled_from(["challenge", "proof", "op"]), ANY_JSON, max_size=3).map(
        lambda value: json.dumps(value).encode()
    ),
    ANY_JSON.map(lambda value: json.dumps(value).encode()),
)
CHALLENGE = b'{"challenge": "' + b"0" * 32 + b'"}'


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    before = signal.getsignal(signal.SIGCHLD)
    yield Loop()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, before)


def turn(loop: Loop, until: Callable[[], Any], timeout: float = 5.0) -> bool:
    """Have the loop run until something holds; whether it came to hold."""
    deadline = loop.now() + timeout

    def look() -> None:
        if until() or loop.now() > deadline:
            return loop.stop()
        loop.call_later(0.001, look)

    loop._stopping = False
    look()
    loop.run()
    return bool(until())


@pytest.mark.parametrize("role", ["head", "worker"])
@settings(deadline=None)
@given(lines=st.lists(GARBAGE, min_size=1, max_size=3), well_begun=st.booleans())
@example(lines=['{"proof": "é"}'.encode()], well_begun=True)
@example(lines=[b'{"challenge": "\\ud800"}'], well_begun=False)
@example(lines=[b'{"challenge": "' + b"\xff" * 32 + b'"}'], well_begun=False)
@example(lines=[b"[" * 4000], well_begun=True)
@example(lines=[b"[" * 60000], well_begun=False)
@example(lines=[b"[" * 60000], well_begun=True)
@example(lines=[b'{"challenge": ["' + b"0" * 32 + b'"]}'], well_begun=False)
@example(lines=[b'{"challenge": "' + b"0" * 32 + b'\\n"}'], well_begun=False)
@example(lines=[b'{"proof": "' + "٣".encode() * 64 + b'"}'], well_begun=True)
@example(lines=[b'{"proof": "' + b"0" * 64 + b'"}'], well_begun=True)
def test_a_strangers_bytes_end_its_own_connection_only(loop: Loop, role: str, lines: list[bytes], well_begun: bool) -> None:
    theirs, ours = connected()
    happened: list[Any] = []
    channel = Channel(loop, ours, KEY, role, lambda: happened.append("proved"), happened.append, lambda: happened.append("gone"))
    for line in [CHALLENGE, *lines] if well_begun else lines:
        theirs.sendall(line + b"\n")
    theirs.shutdown(socket.SHUT_WR)
    assert turn(loop, lambda: happened)  # And nothing was raised out of the loop.
    assert happened == ["gone"]
    channel.close()
    theirs.close()


@pytest.mark.parametrize("data", [b"x" * 5000, CHALLENGE + b"\n" + b"x" * 5000, b'{"challenge": 1}\n', CHALLENGE + b"\n{}\n"])
def test_a_stranger_that_goes_on_is_not_heard_out(loop: Loop, data: bytes) -> None:
    """It does not end by itself; a line that never ends is not kept either."""
    theirs, ours = connected()
    gone: list[bool] = []
    Channel(loop, ours, KEY, "head", lambda: None, lambda _: None, lambda: gone.append(True))
    theirs.sendall(data)
    assert turn(loop, lambda: gone)
    theirs.close()


class Between:
    """A head and a worker, and a listener between them that passes on what it is told to, proofs and all."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.taken: dict[str, list[Any]] = {"head": [], "worker": []}
        self.gone: list[str] = []
        self.proved: list[str] = []
        self.passed: dict[str, list[bytes]] = {"head": [], "worker": []}
        self.alter: Callable[[str, bytes], list[bytes]] = lambda _, line: [line]
        self._sockets: dict[str, socket.socket] = {}
        self._partial = {"head": b"", "worker": b""}
        self.channels = {role: self._end(role) for role in ("head", "worker")}
        for role in self._sockets:
            self._watch(role)
        assert turn(loop, lambda: len(self.proved) == 2)  # Passing on is all that it takes.
        assert not self.gone

    def _end(self, role: str) -> Channel:
        self._sockets[role], end = connected()
        proved, gone = (lambda: self.proved.append(role)), (lambda: self.gone.append(role))
        return Channel(self.loop, end, KEY, role, proved, self.taken[role].append, gone)

    def _watch(self, sender: str) -> None:
        source, target = self._sockets[sender], self._sockets["worker" if sender == "head" else "head"]

        def read() -> None:
            data = source.recv(65536)
            if not data:
                return self.loop.forget(source.fileno())
            lines, self._partial[sender] = split_lines(self._partial[sender] + data)
            for line in lines:
                self.passed[sender].append(line)
                for altered in self.alter(sender, line):
                    target.sendall(altered + b"\n")

        self.loop.on_readable(source.fileno(), read)

    def inject(self, to: str, line: bytes) -> None:
        self._sockets[to].sendall(line + b"\n")

    def close(self) -> None:
        for channel in self.channels.values():
            channel.close()
        for sock in self._sockets.values():
            self.loop.forget(sock.fileno())
            sock.close()


@pytest.fixture
def between(loop: Loop) -> Iterator[Between]:
    made = Between(loop)
    yield made
    made.close()


def test_lines_arrive_in_both_directions(between: Between) -> None:
    """The go-between is one of the network's, as it were: what it leaves alone is taken."""
    for number in range(3):
        between.channels["head"].send(op="a", number=number, text="é\ud800\n")
        between.channels["worker"].send(event="b", number=number)
    assert turn(between.loop, lambda: len(between.taken["head"]) == len(between.taken["worker"]) == 3)
    assert between.taken["worker"] == [{"op": "a", "number": number, "text": "é\ud800\n"} for number in range(3)]
    between.channels["head"].send(text="x" * 100_000)
    assert turn(between.loop, lambda: len(between.taken["worker"]) == 4)


@pytest.mark.parametrize("to", ["head", "worker"])
def test_injected_lines_are_not_taken(between: Between, to: str) -> None:
    for line in (b'{"op": "stop", "event": "failed"}', b"0" * 64 + b' {"op": "stop"}', b"", b"\xff \xff"):
        between.inject(to, line)
    assert turn(between.loop, lambda: between.gone)
    assert between.gone == [to] and between.taken[to] == []


@pytest.mark.parametrize("sender", ["head", "worker"])
@pytest.mark.parametrize(
    "alter",
    [
        lambda line: [line.replace(b"lawful", b"unfair")],
        lambda line: [line + b" "],
        lambda line: [line.upper()],
        lambda line: [line[65:]],
    ],
)
def test_altered_lines_are_not_taken(between: Between, sender: str, alter: Callable[[bytes], list[bytes]]) -> None:
    to = "worker" if sender == "head" else "head"
    between.alter = lambda who, line: alter(line) if who == sender else [line]
    between.channels[sender].send(op="lawful")
    assert turn(between.loop, lambda: between.gone)
    assert between.gone == [to] and between.taken[to] == []


@pytest.mark.parametrize("sender", ["head", "worker"])
def test_repeated_reordered_and_omitted_lines_are_not_taken(loop: Loop, sender: str) -> None:
    def third_line(then: Callable[[list[bytes]], list[bytes]]) -> list[int]:
        """What is taken when the go-between sends on something else for the third line."""
        seen: list[bytes] = []

        def alter(who: str, line: bytes) -> list[bytes]:
            if who == sender:
                seen.append(line)
            return then(seen) if who == sender and len(seen) == 3 else [line]

        between = Between(loop)
        between.alter = alter
        for number in range(1, 5):
            between.channels[sender].send(number=number)
        to = "worker" if sender == "head" else "head"
        try:
            assert turn(loop, lambda: to in between.gone)
            return [message["number"] for message in between.taken[to]]
        finally:
            between.close()

    assert third_line(lambda seen: [seen[0]]) == [1, 2]
    assert third_line(lambda seen: [seen[1]]) == [1, 2]
    assert third_line(lambda seen: [seen[2], seen[2]]) == [1, 2, 3]
    assert third_line(lambda seen: []) == [1, 2]


@pytest.mark.parametrize("sender", ["head", "worker"])
def test_a_line_is_not_taken_by_its_own_sender_or_another_connection(loop: Loop, sender: str) -> None:
    first, second = Between(loop), Between(loop)
    try:
        to = "worker" if sender == "head" else "head"
        first.channels[sender].send(number=1)
        assert turn(loop, lambda: first.taken[to])
        line = first.passed[sender][-1]
        first.inject(sender, line)
        second.inject(to, line)
        assert turn(loop, lambda: first.gone and second.gone)
        assert first.gone == [sender] and second.gone == [to]
        assert first.taken[sender] == [] and second.taken[to] == []
    finally:
        first.close()
        second.close()


# ---- Too many strangers


def head_of(loop: Loop, heard: list[str]) -> tuple[ConnectedWorkers, int]:
    port = control_ports(None, 1)[0]
    return ConnectedWorkers(loop, KEY, [port], ["n1", "n2"], str, lambda _, message: heard.append(message["event"])), port


def test_strangers_are_few_at_once_and_keep_nobody_out(loop: Loop) -> None:
    heard: list[str] = []
    team, port = head_of(loop, heard)
    crowd = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
    try:
        most = [0]

        def few() -> bool:
            most[0] = max(most[0], len(team._door._strangers))
            return "joined" in heard

        sock = socket.create_connection(("127.0.0.1", port))
        worker = Channel(loop, sock, KEY, "worker", lambda: worker.send(node_id=1, machine=FACTS), lambda _: None, lambda: None)
        assert turn(loop, few, 8)
        assert most[0] == 64
        crowd[0].settimeout(2)
        assert b"challenge" in crowd[0].recv(4096) and crowd[0].recv(4096) == b""  # The oldest had to give way.
        worker.close()
    finally:
        for stranger in crowd:
            stranger.close()
        team.dismiss()
        for member in team.members.values():
            if member.channel is not None:
                member.channel.close()


def test_without_file_descriptors_the_head_waits_instead_of_spinning() -> None:
    program = textwrap.dedent("""
        import os, resource, socket, time
        from dagster_rayslurm.runtime.nodes import head as team
        from dagster_rayslurm.runtime.process.loop import Loop
        from dagster_rayslurm.runtime.node.ports import control_ports
        loop, port = Loop(), control_ports(None, 1)[0]
        head = team.ConnectedWorkers(loop, "aa" * 32, [port], ["n1", "n2"], str, lambda *_: None)
        client = socket.create_connection(("127.0.0.1", port))
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))), 4096))
        hogs = []
        try:
            while True:
                hogs.append(os.dup(0))
        except OSError:
            pass
        listener = head._door._listener
        calls, accept = [], listener._accept
        def counted():
            calls.append(1)
            accept()
        listener._accept = counted
        loop.forget(listener._socket.fileno())
        loop.on_readable(listener._socket.fileno(), counted)
        loop.call_later(0.5, loop.stop)
        loop.run()
        print(len(calls), len(head._door._strangers))
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 4096))
        loop._stopping = False
        loop.call_later(1.0, loop.stop)
        loop.run()
        print(len(head._door._strangers))
    """)
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=30).stdout
    assert said.split() == ["1", "0", "1"]


def test_the_runtime_may_open_many_files() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    code = (
        "import resource; from dagster_rayslurm.runtime.process.processes import raise_file_limit\n"
        f"for low in (64, {min(hard, 65535) if hard > 0 else 65535}):\n"
        f"    resource.setrlimit(resource.RLIMIT_NOFILE, (low, {hard})); raise_file_limit()\n"
        "    print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    expected = f"{65535 if hard < 0 else min(65535, hard)} {hard}"
    assert said.splitlines() == [expected, expected]


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    return one, other
