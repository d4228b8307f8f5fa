"""Authenticated TCP connections between runtimes, and from the Dagster host to a session: each line is a message in JSON.

`RpcServer` accepts connections, `RpcClient` keeps a connection and reconnects, and `call` sends one request without an event
loop. First each end sends `{"challenge": C}`, where C is 32 random hex digits. Then the client sends `{"proof": P}`, where P is
HMAC-SHA256(key, "client:<server's challenge>:<client's challenge>"). The server checks this proof, and sends a proof of its own:
HMAC-SHA256(key, "server:<client's challenge>:<server's challenge>"). The key is in the start record (`protocol.spec`), a file
that only its owner can read. Later messages are neither signed nor encrypted.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import re
import socket
import sys
import time
import traceback
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from ..process.loop import Loop, Timer
from .messages import TextEnum
from .record import SESSION, split_lines

Message = Dict[str, Any]  # One message: the JSON object of a line.
Address = Tuple[str, int]  # Host and port.

_MAX_LINE = 2**22  # Bytes that a message may have at most; usage samples and tails of logs are far shorter.
_MAX_HANDSHAKE = 4096  # Bytes that a line may have at most until the other end has authenticated itself.
_HEX = {"challenge": re.compile("[0-9a-f]{32}"), "proof": re.compile("[0-9a-f]{64}")}
_HANDSHAKE_TIMEOUT = 10.0  # Seconds for connecting and the handshake.
_SEND_TIMEOUT = 2.0  # Seconds that sending may block before the connection counts as broken.

HEARTBEAT_INTERVAL = 5.0  # Seconds between two pings; several must fit into HEARTBEAT_TIMEOUT.
HEARTBEAT_TIMEOUT = 30.0  # Seconds of silence after which the other end of a connection counts as lost.
# Seconds between two checks of the silence after which this process counts as having been stopped: `scontrol suspend` and
# PreemptMode=SUSPEND stop all processes of a job, and the clock goes on. The silence then starts anew.
_STOPPED = 3 * HEARTBEAT_INTERVAL
# Seconds after the loss of a connection in which the two ends may connect again, before one gives up the other; clients try ten
# times a second.
RECONNECT_GRACE = 10.0


class Role(TextEnum):
    """The role of a process in a connection: the client opens the connection, the server accepts the connection."""

    CLIENT = "client"
    SERVER = "server"


def derive_key(key: str, purpose: str) -> str:
    """Returns a key that is derived from `key` for one purpose, such as "relays"; both keys are strings of hex digits."""
    return hmac.new(bytes.fromhex(key), purpose.encode("utf-8"), hashlib.sha256).hexdigest()


def _encode(message: Message) -> bytes:
    return json.dumps(message).encode("utf-8") + b"\n"


def _decode(line: bytes) -> Message:
    """Returns the message in a line; raises ValueError or RecursionError if the line is not a JSON object."""
    message = json.loads(line.decode("utf-8"))
    if not isinstance(message, dict):
        raise ValueError("the message is not a JSON object")
    return message


class Handshake:
    """One end's part of the handshake: proves that this end knows the key, and checks the proof of the other end.

    The caller sends the line `opening`, and then passes each line of the other end to `receive`, and sends what `receive`
    returns. `done` is True once the other end has proved that it knows the key.
    """

    def __init__(self, key: str, role: Role) -> None:
        self._key, self._role = key, role
        self._challenge = os.urandom(16).hex()
        self._peer_challenge = ""
        self.opening = _encode({"challenge": self._challenge})
        self.done = False

    def receive(self, line: bytes) -> bytes:
        """Check a line that the other end has sent; returns the next line to send, or b"" if there is nothing to send now.

        Raises ValueError if the line shows that the other end does not know the key or this protocol. Raises RecursionError for
        deeply nested JSON.
        """
        name = "proof" if self._peer_challenge else "challenge"
        value = _decode(line).get(name)
        if not isinstance(value, str) or _HEX[name].fullmatch(value) is None:
            raise ValueError("it sent no %s" % name)
        if name == "challenge":
            self._peer_challenge = value
            return self._own_proof() if self._role == Role.CLIENT else b""
        peer = Role.SERVER if self._role == Role.CLIENT else Role.CLIENT
        if not hmac.compare_digest(self._proof(peer, self._challenge, self._peer_challenge), value):
            raise ValueError("its proof is wrong")
        self.done = True
        return self._own_proof() if self._role == Role.SERVER else b""

    def _own_proof(self) -> bytes:
        return _encode({"proof": self._proof(self._role, self._peer_challenge, self._challenge)})

    def _proof(self, prover: Role, verifier_challenge: str, prover_challenge: str) -> str:
        return derive_key(self._key, "%s:%s:%s" % (prover, verifier_challenge, prover_challenge))


class Listener:
    """The callbacks of a `Channel`, which subclasses override; the methods of this class do nothing."""

    def authenticated(self, channel: "Channel") -> None:
        """Called when the other end has proved that it knows the key; from now on, `channel.send` may be used."""

    def received(self, channel: "Channel", message: Message) -> None:
        """Called for each message of the other end.

        If this method raises an exception, the traceback is printed, only this channel ends, and `closed` is called.
        """

    def closed(self, channel: "Channel", why: str) -> None:
        """Called once when the channel has ended, with the reason `why`; not called if this end has called `Channel.close`."""


@dataclass(eq=False, repr=False)
class Channel:
    """One end of a connection over the socket `sock`: authenticates the other end, then sends and receives messages.

    The connection and the authentication must be complete within `timeout` seconds. If `heartbeat` is True, the channel sends
    `{"op": "ping"}` every few seconds, and ends when the other end has been silent for `HEARTBEAT_TIMEOUT` seconds. The time in
    which this process was stopped does not count. Both ends must have the same value of `heartbeat`.
    """

    loop: Loop
    sock: socket.socket
    key: str
    role: Role
    listener: Listener
    timeout: float = _HANDSHAKE_TIMEOUT
    heartbeat: bool = False

    def __post_init__(self) -> None:
        self.last_received = self._last_beat = self.loop.now()
        self._open = True
        self._handshake = Handshake(self.key, self.role)
        self._limit, self._partial = _MAX_HANDSHAKE, b""  # Bytes that a line may have at most, and a line that is not complete.
        self._timer: Timer = self.loop.call_later(self.timeout, lambda: self.fail("timed out"))
        self.loop.on_writable(self.sock.fileno(), self._connected)

    @property
    def is_authenticated(self) -> bool:
        return self._handshake.done

    def send(self, **message: Any) -> None:
        """Send a message with the given keys, such as `send(op="stop")`; only allowed once the channel is authenticated.

        Blocks for at most some seconds. If sending fails, no exception is raised; the channel ends soon, and the listener's
        `closed` is called.
        """
        assert self.is_authenticated
        self._send_line(_encode(message))

    def wait_closed(self, deadline: float) -> None:
        """Block until the other end closes the connection, or until `deadline`; then close this end. Received data is dropped.

        `deadline` is a time of `time.monotonic`. This method is for the end of the process, when the event loop no longer runs.
        """
        with contextlib.suppress(OSError):  # The connection is broken, or the deadline has come: either way it is closed now.
            while self._open and time.monotonic() < deadline:
                self.sock.settimeout(max(0.001, deadline - time.monotonic()))
                if not self.sock.recv(65536):
                    break
        self.close()

    def close(self) -> None:
        """Close the connection without calling the listener's `closed`; does nothing if the connection is closed already."""
        self._timer.cancel()
        if self._open:
            self._open = False
            self.loop.forget(self.sock.fileno())
            self.sock.close()

    def fail(self, why: str) -> None:
        """Close the connection and call the listener's `closed` with the reason `why`.

        Does nothing if the connection is closed.
        """
        if self._open:
            self.close()
            self.listener.closed(self, why)

    def _connected(self) -> None:
        error = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            return self.fail(os.strerror(error))
        self.loop.forget(self.sock.fileno())
        self.loop.on_readable(self.sock.fileno(), self._read)
        self.sock.settimeout(_SEND_TIMEOUT)  # Only sending can block: the loop reads only when there is data.
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._send_line(self._handshake.opening)

    def _send_line(self, line: bytes) -> None:
        try:
            if self._open:
                self.sock.sendall(line)
        except OSError:
            self.loop.call_later(0.0, lambda: self.fail("its connection ended"))  # The caller must not be interrupted by this.

    def _read(self) -> None:
        try:
            data = self.sock.recv(65536)
        except OSError:
            data = b""
        if not data:
            return self.fail("its connection ended")
        self.last_received = self.loop.now()
        try:
            if len(self._partial) + len(data) > self._limit:
                raise ValueError("the line is longer than %d bytes" % self._limit)
            lines, self._partial = split_lines(self._partial + data)
            for line in lines:
                if self._open:
                    self._handle_line(line)
        except (ValueError, RecursionError) as error:
            self.fail("its connection ended: %s" % error)

    def _handle_line(self, line: bytes) -> None:
        if not self._handshake.done:
            self._send_line(self._handshake.receive(line))
            if self._handshake.done:
                self._timer.cancel()
                self._limit = _MAX_LINE
                if self.heartbeat:
                    self._beat()
                self.listener.authenticated(self)
            return
        message = _decode(line)
        if message.get("op") == "ping":
            return
        try:
            self.listener.received(self, message)
        except Exception:  # A handler error closes this connection only; other clients keep working.
            traceback.print_exc()
            self.fail("its connection ended")

    def _beat(self) -> None:
        before, self._last_beat = self._last_beat, self.loop.now()
        if self._last_beat - before > _STOPPED:
            self.last_received = self._last_beat
        if self._last_beat - self.last_received > HEARTBEAT_TIMEOUT:
            return self.fail("it has been silent for %g s" % HEARTBEAT_TIMEOUT)
        self.send(op="ping")
        self._timer = self.loop.call_later(HEARTBEAT_INTERVAL, self._beat)


# Seconds until a server that could not accept a connection, perhaps for want of file descriptors, tries again.
_ACCEPT_PAUSE = 0.2


def listen(ports: Sequence[int], loopback: bool = False) -> socket.socket:
    """Returns a new TCP socket that listens on the first free port of `ports`; the port 0 stands for any free port.

    The socket accepts connections from all hosts or, if `loopback` is True, from this machine only. Raises OSError if no port is
    free.
    """
    problem: Optional[OSError] = None
    for port in ports:
        try:
            if loopback or not socket.has_dualstack_ipv6():
                return socket.create_server(("127.0.0.1" if loopback else "", port), backlog=256)
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=256, dualstack_ipv6=True)
        except OSError as error:
            problem = error
    raise OSError("the head cannot listen on any of the ports %s: %s" % (", ".join(map(str, ports)), problem))


@dataclass(eq=False, repr=False)
class RpcServer:
    """Listens for connections, and creates a `Channel` for each connection; the channels call the methods of `listener`.

    The server listens on the first free port of `ports`, and stores its number in the attribute `port`; the constructor raises
    OSError if no port is free. `key` is the secret that both ends know, in hex. If `loopback` is True, only this machine can
    connect. `heartbeat` is passed to the channels.
    """

    loop: Loop
    key: str
    ports: Sequence[int]
    listener: Listener
    loopback: bool = False
    heartbeat: bool = False

    def __post_init__(self) -> None:
        self._sock = listen(self.ports, self.loopback)
        self._sock.setblocking(False)
        self.port = int(self._sock.getsockname()[1])
        self._watch()

    def close(self) -> None:
        """Stop listening: accept no more connections. Channels that are open stay open."""
        self.loop.forget(self._sock.fileno())
        self._sock.close()

    def _watch(self) -> None:
        if self._sock.fileno() >= 0:  # The server was closed otherwise.
            self.loop.on_readable(self._sock.fileno(), self._accept)

    def _accept(self) -> None:
        try:
            connection, _ = self._sock.accept()
        except OSError:
            self.loop.forget(self._sock.fileno())  # The socket stays readable, so the loop would call again and again.
            self.loop.call_later(_ACCEPT_PAUSE, self._watch)
        else:
            Channel(self.loop, connection, self.key, Role.SERVER, self.listener, heartbeat=self.heartbeat)


# Seconds for connecting to one address and the handshake with it: another service may listen there, or nothing answer.
_CONNECT_TIMEOUT = 2.0
_RETRY_PAUSE = 0.1  # Seconds after a failure until the next address is tried.


@dataclass(eq=False, repr=False)
class RpcClient(Listener):
    """Keeps a connection with heartbeat to a server, which is at one of several addresses.

    After `connect` was called once, the client tries the `addresses` in turn, the likeliest first, until one succeeds, and
    reconnects after each loss, until `close`. The client calls the methods of `listener` after each authentication, message and
    loss. `key` is the secret that both ends know, in hex.
    """

    loop: Loop
    key: str
    addresses: Sequence[Address]
    listener: Listener
    problem: str = ""  # Why the last attempt to reach the likeliest address failed.

    def __post_init__(self) -> None:
        # Addresses, each with its result of `getaddrinfo`, None before the query; the next one to try comes first.
        self._targets: List[Tuple[Address, Optional[Tuple[Any, ...]]]] = [(address, None) for address in self.addresses]
        self._channel: Optional[Channel] = None
        self._closed = False
        self._last_received = self._last_look = self.loop.now()

    @property
    def is_connected(self) -> bool:
        return self._channel is not None and self._channel.is_authenticated

    def measure_silence(self) -> float:
        """Returns the seconds since the server last sent anything; without a connection so far, since this client was created.

        To be called every `HEARTBEAT_INTERVAL` seconds: if a call comes much later, this process was stopped, and the silence
        starts anew.
        """
        before, self._last_look = self._last_look, self.loop.now()
        if self._channel is not None and self._channel.is_authenticated:
            self._last_received = max(self._last_received, self._channel.last_received)
        if self._last_look - before > _STOPPED:
            self._last_received = self._last_look
        return self._last_look - self._last_received

    def send(self, **message: Any) -> None:
        """Send a message with the given keys to the server; if there is no connection now, the message is dropped."""
        if self._channel is not None and self._channel.is_authenticated:
            self._channel.send(**message)

    def connect(self) -> None:
        """Begin to connect to the next address, in the background; after a failure, the client itself tries the next address.

        Does nothing after `close`. Only the name look-up of an address blocks.
        """
        if self._closed:
            return
        (address, info), sock = self._targets.pop(0), None
        try:
            if info is None:
                info, *others = socket.getaddrinfo(address[0], address[1], 0, socket.SOCK_STREAM)
                self._targets[:0] = [(address, other) for other in others]
            sock = socket.socket(*info[:3])
            sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):  # Connecting goes on.
                sock.connect(info[4])
        except OSError as error:
            if sock is not None:
                sock.close()
            self._failed(address, error.strerror or str(error))
        else:
            self._channel = Channel(self.loop, sock, self.key, Role.CLIENT, self, _CONNECT_TIMEOUT, heartbeat=True)
        self._targets.append((address, info))

    def close(self) -> None:
        """Close the connection, if any, without calling the listener, and do not reconnect."""
        self._closed = True
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def authenticated(self, channel: Channel) -> None:
        self._targets.insert(0, self._targets.pop())  # A later reconnect begins with this address.
        self.listener.authenticated(channel)

    def received(self, channel: Channel, message: Message) -> None:
        self.listener.received(channel, message)

    def closed(self, channel: Channel, why: str) -> None:
        address = self._targets[0 if channel.is_authenticated else -1][0]
        if channel.is_authenticated:
            self._last_received = max(self._last_received, channel.last_received)
            self.listener.closed(channel, why)
        self._channel = None
        self._failed(address, why)

    def _failed(self, address: Address, why: str) -> None:
        if address == self.addresses[0]:
            self.problem = "%s:%d: %s" % (*address, why)
        self.loop.call_later(_RETRY_PAUSE, self.connect)


def all_addresses(hosts: Sequence[str], ports: Sequence[int]) -> List[Address]:
    """Returns the addresses (host, port) at which a client looks for a server, the likeliest first.

    The server runs on one of the `hosts`, and listens on the first port of `ports` that is free there. So all hosts with the
    first port come first, then all hosts with the second port, and so on.
    """
    return [(host, port) for port in ports for host in dict.fromkeys(hosts)]


ANSWER = "rayslurm-answer "  # The beginning of the output line of `main` that holds the answer: srun may print other lines.
# The line that `main` prints just before it sends the request: from then on the session may have received the request.
SENT = "rayslurm-sent"
ANSWER_TIMEOUT = 60.0  # Seconds in which a session must answer a request; the session's file system may be slow.


class NotConnected(OSError):
    """Raised when no session could be reached and authenticated; the request was not sent, so it may be sent elsewhere."""


class AnswerLost(OSError):
    """Raised when the request was sent but no valid answer came; the session may or may not have carried out the request."""


def call(
    sock: socket.socket,
    key: str,
    request: Message,
    handshake_timeout: float = _HANDSHAKE_TIMEOUT,
    before_send: Callable[[], None] = lambda: None,
) -> Message:
    """Authenticate with a session over the connected socket `sock`, send it `request`, and return its answer. Blocks.

    `key` is the session's secret, in hex. `before_send` is called after the authentication, just before the request is sent.
    Raises NotConnected if the request was not sent, and AnswerLost if it was sent but no answer came within `ANSWER_TIMEOUT`
    seconds.
    """

    def exchange(line: bytes, limit: int) -> bytes:
        """Send one line to the session, and return the next line that the session sends, which has at most `limit` bytes."""
        sock.sendall(line)
        answer = lines.readline(limit)
        if not answer.endswith(b"\n"):
            raise ConnectionError("the connection ended")
        return answer[:-1]

    handshake = Handshake(key, Role.CLIENT)
    with sock.makefile("rb") as lines:
        try:
            sock.settimeout(handshake_timeout)
            line = handshake.opening
            while not handshake.done:
                line = handshake.receive(exchange(line, _MAX_HANDSHAKE))
        except (OSError, ValueError, RecursionError) as error:
            raise NotConnected("no session answers there: %s" % error) from None
        before_send()
        try:
            sock.settimeout(ANSWER_TIMEOUT)
            return _decode(exchange(_encode(request), _MAX_LINE))
        except (OSError, ValueError, RecursionError) as error:
            raise AnswerLost("the session was asked, but its answer is lost: %s" % error) from None


def main(session_dir: str) -> int:
    """Read a request (JSON) from standard input, send it to the session that runs on this node, and print the answer.

    `session_dir` is the directory of the session, with the announcement `session.json`. Prints the line `SENT` just before
    sending, and the answer as JSON after the prefix `ANSWER`. Returns the exit code: 0, or 75 if there was no answer. Dagster's
    side starts this program on the node with `srun --overlap`.
    """
    try:
        request = json.load(sys.stdin)
        with open(os.path.join(session_dir, SESSION), encoding="utf-8") as file:
            announcement = json.load(file)
        with socket.create_connection(("localhost", int(announcement["port"])), _HANDSHAKE_TIMEOUT) as sock:
            answer = call(sock, announcement["key"], request, before_send=lambda: print(SENT, flush=True))
    except (OSError, ValueError, KeyError, TypeError) as error:
        print("rayslurm: %s" % error, file=sys.stderr)
        return 75  # EX_TEMPFAIL of sysexits(3).
    print(ANSWER + json.dumps(answer), flush=True)
    return 0
