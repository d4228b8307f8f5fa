"""The authenticated connections between runtimes, over real sockets: what peers with and without the key can do."""

from __future__ import annotations

import contextlib
import io
import json
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dagster_rayslurm.runtime.node.network import control_ports
from dagster_rayslurm.runtime.process.loop import Loop
from dagster_rayslurm.runtime.protocol import rpc
from dagster_rayslurm.runtime.protocol.rpc import Channel, Handshake, Listener, Role, RpcClient, RpcServer

KEY, OTHER_KEY = "aa" * 32, "bb" * 32
ROLES = [Role.SERVER, Role.CLIENT]
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


class Events(Listener):
    """Keeps the events of its channels, by name, and their messages."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.messages: list[dict[str, Any]] = []
        self.channels: list[Channel] = []

    def authenticated(self, channel: Channel) -> None:
        self.names.append("authenticated")
        self.channels.append(channel)

    def received(self, channel: Channel, message: dict[str, Any]) -> None:
        self.names.append("received")
        self.messages.append(message)
        if message.get("op") == "raise":
            raise KeyError("op")

    def closed(self, channel: Channel, why: str) -> None:
        self.names.append("closed")


@pytest.mark.parametrize("role", ROLES)
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
def test_bytes_of_a_stranger_end_its_own_connection_only(loop: Loop, role: Role, lines: list[bytes], well_begun: bool) -> None:
    theirs, ours = connected()
    events = Events()
    channel = Channel(loop, ours, KEY, role, events)
    for line in [CHALLENGE, *lines] if well_begun else lines:
        theirs.sendall(line + b"\n")
    theirs.shutdown(socket.SHUT_WR)
    assert turn(loop, lambda: events.names)  # And nothing was raised out of the loop.
    assert events.names == ["closed"]
    channel.close()
    theirs.close()


@pytest.mark.parametrize("data", [b"x" * 5000, CHALLENGE + b"\n" + b"x" * 5000, b'{"challenge": 1}\n', CHALLENGE + b"\n{}\n"])
def test_a_handshake_that_goes_wrong_or_on_is_ended(loop: Loop, data: bytes) -> None:
    """The stranger keeps its end open; a line without an end is not buffered."""
    theirs, ours = connected()
    events = Events()
    Channel(loop, ours, KEY, Role.SERVER, events)
    theirs.sendall(data)
    assert turn(loop, lambda: events.names == ["closed"])
    theirs.close()


class Pair:
    """A server's and a client's channel, connected to each other."""

    def __init__(self, loop: Loop, server_key: str = KEY, client_key: str = KEY) -> None:
        self.loop = loop
        self.events = {role: Events() for role in ROLES}
        self.sockets = dict(zip(ROLES, connected(), strict=True))
        keys = {Role.SERVER: server_key, Role.CLIENT: client_key}
        self.channels = {role: Channel(loop, self.sockets[role], keys[role], role, self.events[role]) for role in ROLES}

    def authenticate(self) -> None:
        assert turn(self.loop, lambda: all(events.names == ["authenticated"] for events in self.events.values()))

    def close(self) -> None:
        for channel in self.channels.values():
            channel.close()


@pytest.fixture
def pair(loop: Loop) -> Iterator[Pair]:
    made = Pair(loop)
    made.authenticate()
    yield made
    made.close()


@pytest.mark.parametrize("sender", ROLES)
def test_messages_arrive_in_order(pair: Pair, sender: Role) -> None:
    receiver = pair.events[Role.CLIENT if sender == Role.SERVER else Role.SERVER]
    sent = [{"op": "a", "number": number, "text": "é\ud800\n"} for number in range(3)] + [{"text": "x" * 100_000}]
    for message in sent:
        pair.channels[sender].send(**message)
    assert turn(pair.loop, lambda: len(receiver.messages) == len(sent)) and receiver.messages == sent


@pytest.mark.parametrize("client_key", [OTHER_KEY, "00" * 32])
def test_both_ends_need_the_same_key(loop: Loop, client_key: str) -> None:
    pair = Pair(loop, client_key=client_key)
    assert turn(loop, lambda: all(events.names for events in pair.events.values()))
    assert [events.names for events in pair.events.values()] == [["closed"], ["closed"]]


@pytest.mark.parametrize("role", ROLES)
def test_a_proof_of_another_connection_is_refused(role: Role) -> None:
    """Each handshake has challenges of its own, and a proof names its role."""
    peer_role = Role.CLIENT if role == Role.SERVER else Role.SERVER

    def exchange(handshake: Handshake, peer: Handshake) -> bytes:
        """The line by which the peer proves itself."""
        server, client = (handshake, peer) if role == Role.SERVER else (peer, handshake)
        server.receive(client.opening)
        proof = client.receive(server.opening)
        return proof if peer is client else server.receive(proof)

    first = Handshake(KEY, role)
    proof = exchange(first, Handshake(KEY, peer_role))
    first.receive(proof)
    assert first.done
    second = Handshake(KEY, role)
    exchange(second, Handshake(KEY, peer_role))
    with pytest.raises(ValueError, match="its proof is wrong"):
        second.receive(proof)
    third, fourth = Handshake(KEY, role), Handshake(KEY, role)  # Reflection: both ends have the same role.
    own_proof = third.receive(fourth.opening)
    if own_proof:
        fourth.receive(third.opening)
        with pytest.raises(ValueError, match="its proof is wrong"):
            fourth.receive(own_proof)
    assert not second.done and not third.done and not fourth.done


@pytest.mark.parametrize("receiver", ROLES)
@pytest.mark.parametrize("line", [b"", b"\xff", b"[]", b"3", b'{"op": ', b"[" * 100_000, b'{"op": "raise"}'])
def test_a_bad_message_or_a_handler_error_closes_the_channel_only(pair: Pair, receiver: Role, line: bytes) -> None:
    sender = Role.CLIENT if receiver == Role.SERVER else Role.SERVER
    pair.sockets[sender].sendall(line + b"\n" + b'{"op": "late"}\n')
    assert turn(pair.loop, lambda: "closed" in pair.events[receiver].names)
    assert {"op": "late"} not in pair.events[receiver].messages
    assert turn(pair.loop, lambda: pair.events[sender].names[-1] == "closed")


def test_a_silent_client_is_closed_and_one_with_heartbeat_stays(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "HEARTBEAT_INTERVAL", 0.05)
    monkeypatch.setattr(rpc, "HEARTBEAT_TIMEOUT", 0.3)
    events, beating, silent = Events(), Events(), Events()
    server = RpcServer(loop, KEY, control_ports(None, 1), events, loopback=True, heartbeat=True)
    clients = [
        Channel(loop, socket.create_connection(("127.0.0.1", server.port)), KEY, Role.CLIENT, each, heartbeat=each is beating)
        for each in (beating, silent)
    ]
    assert turn(loop, lambda: silent.names[-1:] == ["closed"])
    turn(loop, lambda: False, 0.4)
    assert beating.names == ["authenticated"] and events.names == ["authenticated", "authenticated", "closed"]
    server.close()
    for each in clients:
        each.close()


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The sum of these seconds is what the clock of the loop is ahead, as after a stop of this process."""
    seconds = [0.0]
    monkeypatch.setattr(Loop, "now", staticmethod(lambda: time.monotonic() + sum(seconds)))
    return seconds


def test_the_time_in_which_this_end_was_stopped_is_no_silence(
    loop: Loop, ahead: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other end was stopped at the same time, and sends nothing yet."""
    monkeypatch.setattr(rpc, "HEARTBEAT_INTERVAL", 0.01)
    events, silent = Events(), Events()
    server = RpcServer(loop, KEY, [0], events, loopback=True, heartbeat=True)
    client = Channel(loop, socket.create_connection(("127.0.0.1", server.port)), KEY, Role.CLIENT, silent)
    assert turn(loop, lambda: silent.names == events.names == ["authenticated"])
    ahead.append(3600.0)
    pings = {client.last_received}

    def pinged() -> bool:
        pings.add(client.last_received)
        return len(pings) > 3

    assert turn(loop, pinged) and events.names == ["authenticated"]
    client.close()
    server.close()


def test_a_client_counts_silence_but_not_while_it_was_stopped(loop: Loop, ahead: list[float]) -> None:
    server = RpcServer(loop, KEY, [0], Events(), loopback=True, heartbeat=True)
    own = Events()
    client = RpcClient(loop, KEY, [("127.0.0.1", server.port)], own)
    client.connect()
    assert turn(loop, lambda: own.names == ["authenticated"]) and client.measure_silence() < 10
    ahead.append(3600.0)
    assert client.measure_silence() == pytest.approx(0, abs=10)
    for _ in range(10):
        ahead.append(rpc.HEARTBEAT_INTERVAL)
        silent = client.measure_silence()
    assert silent == pytest.approx(50, abs=10)
    client.close()
    server.close()


def test_connecting_does_not_block(loop: Loop) -> None:
    """The server answers nothing at all, because its queue of connections is full."""
    turns: list[bool] = []
    with socket.socket() as mute, contextlib.ExitStack() as queued:
        mute.bind(("127.0.0.1", 0))
        mute.listen(0)
        for _ in range(4):
            waiting = queued.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(mute.getsockname())
        client = RpcClient(loop, KEY, [mute.getsockname()], Events())

        def tick() -> None:
            turns.append(not client.problem)
            loop.call_later(0.01, tick)

        tick()
        client.connect()
        assert turn(loop, lambda: client.problem) and client.problem.endswith(": timed out")
        assert sum(turns) > 10  # During the first attempt.
        client.close()
        client.problem = ""
        assert not turn(loop, lambda: client.problem, 0.3)


def test_a_client_finds_the_server_and_reconnects_at_once(loop: Loop) -> None:
    events, own = Events(), Events()
    nowhere = control_ports(None)[:3]
    server = RpcServer(loop, KEY, [0], events, loopback=True, heartbeat=True)
    client = RpcClient(loop, KEY, [("127.0.0.1", port) for port in [*nowhere, server.port]], own)
    client.send(op="lost")
    client.connect()
    assert turn(loop, lambda: own.names == ["authenticated"]) and client.is_connected
    assert client.problem == f"127.0.0.1:{nowhere[0]}: Connection refused" and 0 <= client.measure_silence() < 30
    client.problem = ""
    events.channels[0].close()
    assert turn(loop, lambda: own.names == ["authenticated", "closed", "authenticated"])
    assert client.problem == ""  # The address that worked was tried first.
    client.send(op="a")
    assert turn(loop, lambda: events.messages == [{"op": "a"}])
    client.close()
    server.close()


def test_without_file_descriptors_the_server_waits_instead_of_spinning() -> None:
    program = textwrap.dedent("""
        import os, resource, socket
        from dagster_rayslurm.runtime.process.loop import Loop
        from dagster_rayslurm.runtime.protocol import rpc
        loop, asked, accepted = Loop(), [], []
        rpc.Channel = lambda *arguments, **options: accepted.append(1)
        server = rpc.RpcServer(loop, "", [0], rpc.Listener())
        forget = loop.forget
        loop.forget = lambda fd: (asked.append(1), forget(fd))
        client = socket.create_connection(("127.0.0.1", server.port))
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))), 4096))
        hogs = []
        try:
            while True:
                hogs.append(os.dup(0))
        except OSError:
            pass
        loop.resume(0.5)
        print(0 < len(asked) < 5, len(accepted))
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 4096))
        loop.resume(1.0)
        print(len(accepted))
    """)
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=30).stdout
    assert said.split() == ["True", "0", "1"]


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


def test_a_request_that_srun_cut_off_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO('{"op": '))
    assert rpc.main(str(tmp_path)) == 75
    said = capsys.readouterr()
    assert said.err.startswith("rayslurm: ") and said.err.count("\n") == 1 and not said.out
