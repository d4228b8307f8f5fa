"""Authenticated TCP connections between runtimes, and from the Dagster host to a session: each line is a message in JSON.

This module holds what all sides share, the handshake and the format of messages. `rpc_server` accepts connections, `rpc_client`
keeps one connection and reconnects, and `rpc_call` makes one call without an event loop.

The two ends authenticate each other before the first message:

1. Each end sends `{"challenge": C}` with 32 random hex digits.
2. The client sends `{"proof": P}`, P = HMAC-SHA256(key, "client:<server's challenge>:<client's challenge>").
3. The server checks it and sends its own proof, with "server" and the challenges the other way round.
4. From then on each line is one message, a JSON object.

The key comes from the start record, which only the user of the job can read. The handshake keeps out everybody who can connect to
the port, or listen on it, without knowing the key. A proof cannot be used for a second connection, because each connection has
new challenges. Messages after the handshake are neither signed nor encrypted, and neither is Ray's own traffic on the same
network: the runtime does not protect against attackers who can alter the traffic between nodes.

The client's side of the connections between runtimes: connects with retries, answers pings, and reconnects after a loss.

Nothing here blocks, except the lookup of a host name, which succeeds once.

The server's side of the authenticated connections between runtimes.

A connection whose handshake is not done is called a stranger here. The server keeps few strangers at a time, and none for long,
so that they cannot keep clients out.

Sends one request to a warm session and waits for the answer, without an event loop.

The Dagster host uses `call` over a TCP connection. If it cannot connect to the node, it starts `main` there by `srun --overlap`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import os
import re
import socket
import sys
import time
import traceback
from enum import Enum
from typing import Any, Callable, Dict, List, Optional, Sequence, Set, Tuple

from ..process.loop import Loop, Timer
from .record import SESSION

Message = Dict[str, Any]
"""One message: the JSON object of a line."""

MAX_LINE = 2**22
"""Bytes that a message may have at most; usage samples and tails of logs are far shorter."""
_MAX_HANDSHAKE = 4096
"""Bytes that a line may have at most until the other end has authenticated itself."""
_HEX_CHALLENGE = re.compile("[0-9a-f]{32}")
_HEX_PROOF = re.compile("[0-9a-f]{64}")
_SEND_TIMEOUT = 2.0
"""Seconds that sending may block before the connection counts as broken."""

HEARTBEAT_INTERVAL = 5.0
"""Seconds between two pings of a server to its clients; several must fit into HEARTBEAT_TIMEOUT."""
HEARTBEAT_TIMEOUT = 30.0
"""Seconds of silence after which the other end of a connection counts as lost."""
RECONNECT_GRACE = 10.0
"""Seconds after the loss of a connection in which the two ends may connect again, before one gives up the other.

Worker nodes and the head use it, and so do the components of the separate topology. Clients try to reconnect ten times a second.
"""


class Role(str, Enum):
    """Which of the two ends of a connection a process has: the client connects, the server accepts."""

    CLIENT = "client"
    SERVER = "server"

    def __str__(self) -> str:
        return self.value


def derive_key(key: str, purpose: str) -> str:
    """Returns a key for one purpose, made from another key; both are hex."""
    return hmac.new(bytes.fromhex(key), purpose.encode("utf-8"), hashlib.sha256).hexdigest()


def encode_message(message: Message) -> bytes:
    """The line for a message, with its newline."""
    return json.dumps(message).encode("utf-8") + b"\n"


def decode_message(line: bytes) -> Message:
    """The message in a line.

    Raises:
        ValueError: the line is not a JSON object.
    """
    try:
        message = json.loads(line.decode("utf-8"))
    except RecursionError:
        raise ValueError("the message is nested too deeply") from None
    if not isinstance(message, dict):
        raise ValueError("the message is not a JSON object")
    return message


class LineBuffer:
    """Splits the bytes that arrive on a connection into lines.

    Attributes:
        limit: bytes that may be buffered, and so the length of the longest line.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._partial = b""

    def feed(self, data: bytes) -> List[bytes]:
        """Take in received bytes, and return the lines that are complete now, without their newlines.

        Raises:
            ValueError: a line is longer than the limit.
        """
        if len(self._partial) + len(data) > self.limit:
            raise ValueError("the line is longer than %d bytes" % self.limit)
        *lines, self._partial = (self._partial + data).split(b"\n")
        return lines


class Handshake:
    """One end's part of the mutual authentication; it says which lines to send, and the caller sends them.

    Attributes:
        opening: the line to send first, with this end's challenge.
        done: whether the other end has proved that it knows the key.
    """

    def __init__(self, key: str, role: Role) -> None:
        self._key = key
        self._role = role
        self._peer = Role.SERVER if role == Role.CLIENT else Role.CLIENT
        self._challenge = os.urandom(16).hex()
        self._peer_challenge: Optional[str] = None
        self.opening = encode_message({"challenge": self._challenge})
        self.done = False

    def receive(self, line: bytes) -> bytes:
        """Take in a line from the other end, and return the line to answer with; b"" for no answer.

        Raises:
            ValueError: the other end does not know the key, or does not speak this protocol.
        """
        message = decode_message(line)
        if self._peer_challenge is None:
            self._peer_challenge = _hex_field(message, "challenge", _HEX_CHALLENGE)
            return self._own_proof() if self._role == Role.CLIENT else b""
        expected = _proof(self._key, self._peer, self._challenge, self._peer_challenge)
        if not hmac.compare_digest(expected, _hex_field(message, "proof", _HEX_PROOF)):
            raise ValueError("its proof is wrong")
        self.done = True
        return self._own_proof() if self._role == Role.SERVER else b""

    def _own_proof(self) -> bytes:
        assert self._peer_challenge is not None
        return encode_message({"proof": _proof(self._key, self._role, self._peer_challenge, self._challenge)})


def _proof(key: str, prover: Role, verifier_challenge: str, own_challenge: str) -> str:
    """The proof that the prover knows the key; `own_challenge` is the prover's."""
    return derive_key(key, "%s:%s:%s" % (prover, verifier_challenge, own_challenge))


def _hex_field(message: Message, name: str, form: "re.Pattern[str]") -> str:
    """The value of a message's field; raises ValueError if it does not have this form."""
    value = message.get(name)
    if not isinstance(value, str) or form.fullmatch(value) is None:
        raise ValueError("it sent no %s" % name)
    return value


class ChannelListener:
    """The callbacks of channels, for subclasses to override; the methods here do nothing."""

    def authenticated(self, channel: "Channel") -> None:
        """Called when both ends have proved that they know the key."""

    def received(self, channel: "Channel", message: Message) -> None:
        """Called when a message has arrived. An exception raised here ends this channel only."""

    def closed(self, channel: "Channel", why: str) -> None:
        """Called once when the channel has ended, except after `Channel.close`."""


class Channel:
    """One connection, as its server or its client holds it: authenticates the other end, then sends and receives messages.

    Args:
        loop: the event loop, which reads the socket.
        sock: a connected socket; the channel owns it.
        key: the shared secret, hex.
        role: this end's role.
        listener: its methods are called with what happens; may be replaced later.

    Attributes:
        last_received: the time on the loop's clock when data arrived last.
    """

    def __init__(self, loop: Loop, sock: socket.socket, key: str, role: Role, listener: ChannelListener) -> None:
        self.listener = listener
        self.last_received = loop.now()
        self._loop = loop
        self._socket: Optional[socket.socket] = sock
        self._handshake = Handshake(key, role)
        self._lines = LineBuffer(_MAX_HANDSHAKE)
        sock.settimeout(_SEND_TIMEOUT)  # Only sending can block: the loop reads only when there is data.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        loop.on_readable(sock.fileno(), self._read)
        self._send_line(self._handshake.opening)

    @property
    def is_authenticated(self) -> bool:
        return self._handshake.done

    @property
    def is_open(self) -> bool:
        return self._socket is not None

    def send(self, **message: Any) -> None:
        """Send a message; the channel must be authenticated. If sending fails, the channel ends."""
        assert self.is_authenticated
        self._send_line(encode_message(message))

    def wait_closed(self, deadline: float) -> None:
        """Block until the other end closes the connection, or until the deadline; then close this end.

        To be called at the end of a runtime, when its loop no longer runs. The deadline is a time of `time.monotonic`.
        """
        with contextlib.suppress(OSError):  # The connection is broken, or the deadline has come: either way it is closed now.
            while self._socket is not None and time.monotonic() < deadline:
                self._socket.settimeout(max(0.001, deadline - time.monotonic()))
                if not self._socket.recv(65536):
                    break
        self.close()

    def close(self) -> None:
        """Close the connection without telling the listener."""
        if self._socket is not None:
            self._loop.forget(self._socket.fileno())
            self._socket.close()
            self._socket = None

    def fail(self, why: str) -> None:
        """Close the connection and tell the listener why."""
        if self._socket is not None:
            self.close()
            self.listener.closed(self, why)

    def _send_line(self, line: bytes) -> None:
        if self._socket is None:
            return
        try:
            self._socket.sendall(line)
        except OSError:
            self._loop.call_later(0.0, lambda: self.fail("its connection ended"))  # The caller must not be interrupted by this.

    def _read(self) -> None:
        assert self._socket is not None
        try:
            data = self._socket.recv(65536)
        except OSError:
            data = b""
        if not data:
            return self.fail("its connection ended")
        self.last_received = self._loop.now()
        try:
            for line in self._lines.feed(data):
                self._handle_line(line)
                if self._socket is None:
                    return
        except ValueError as error:
            self.fail("its connection ended: %s" % error)

    def _handle_line(self, line: bytes) -> None:
        if not self._handshake.done:
            reply = self._handshake.receive(line)
            if reply:
                self._send_line(reply)
            if self._handshake.done:
                self._lines.limit = MAX_LINE
                self.listener.authenticated(self)
            return
        message = decode_message(line)
        try:
            self.listener.received(self, message)
        except Exception:  # A handler error closes this connection only; other clients keep working.
            traceback.print_exc()
            self.fail("its connection ended")


Address = Tuple[str, int]
"""Host and port."""

_CLIENT_CONNECT_TIMEOUT = 1.0
"""Seconds for connecting to one address."""
_CLIENT_HANDSHAKE_TIMEOUT = 3.0
"""Seconds for the handshake, after which the next address is tried: another service may listen on the port."""
_RETRY_PAUSE = 0.1
"""Seconds after a failure until the next address is tried."""
_MAX_LOOKUP_PAUSE = 5.0
"""Longest pause in seconds after a host name could not be resolved. The pause is ten times as long as the lookup blocked."""


class ClientListener:
    """The callbacks of an `RpcClient`, for subclasses to override; the methods here do nothing."""

    def connected(self) -> None:
        """Called each time that the client has connected and both ends have authenticated themselves."""

    def received(self, message: Message) -> None:
        """Called when a message has arrived from the server."""

    def disconnected(self) -> None:
        """Called when an authenticated connection was lost; the client reconnects by itself."""

    def unreachable(self, address: Address, why: str) -> None:
        """Called when an attempt to connect has failed; the client tries the next address by itself."""


class RpcClient(ChannelListener):
    """Keeps one connection to a server, which listens on one of several addresses.

    Args:
        loop: the event loop.
        key: the shared secret, hex.
        addresses: where the server may listen, the likeliest first.
        listener: its methods are called with what happens.
    """

    def __init__(self, loop: Loop, key: str, addresses: Sequence[Address], listener: ClientListener) -> None:
        self._loop = loop
        self._key = key
        self._addresses = list(addresses)
        self._listener = listener
        self._resolved: Dict[Address, List[Any]] = {}
        self._channel: Optional[Channel] = None
        self._connecting: Optional[socket.socket] = None
        self._retry: Optional[Timer] = None
        self._closed = False
        self._last_received = loop.now()

    @property
    def is_connected(self) -> bool:
        return self._channel is not None and self._channel.is_authenticated

    @property
    def silent_for(self) -> float:
        """Seconds since anything arrived from the server; before the first connection, since this client was made."""
        return self._loop.now() - self._last_received

    def send(self, **message: Any) -> None:
        """Send a message to the server; without a connection the message is dropped."""
        if self._channel is not None and self._channel.is_authenticated:
            self._channel.send(**message)

    def connect(self) -> None:
        """Try to connect to the address whose turn it is, unless the client is connected or closed."""
        self._retry = None
        if self._closed or self._channel is not None or self._connecting is not None:
            return
        address = self._addresses.pop(0)
        self._addresses.append(address)
        began = self._loop.now()
        try:
            if address not in self._resolved:
                self._resolved[address] = socket.getaddrinfo(address[0], address[1], 0, socket.SOCK_STREAM)
        except OSError as error:
            took = self._loop.now() - began
            return self._failed(address, str(error), max(_RETRY_PAUSE, min(_MAX_LOOKUP_PAUSE, 10 * took)))
        self._try(address, self._resolved[address])

    def reconnect(self) -> None:
        """Drop the present connection, if there is one, and connect again."""
        if self._channel is not None:
            self._channel.fail("")

    def close(self) -> None:
        """Disconnect, and do not reconnect."""
        self._closed = True
        if self._retry is not None:
            self._retry.cancel()
        self._stop_connecting()
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def authenticated(self, channel: Channel) -> None:  # noqa: ARG002
        self._last_received = self._loop.now()
        self._addresses.insert(0, self._addresses.pop())  # A later reconnect begins with this address.
        self._listener.connected()

    def received(self, channel: Channel, message: Message) -> None:
        self._last_received = self._loop.now()
        if message.get("op") == "ping":
            return channel.send(event="pong")
        self._listener.received(message)

    def closed(self, channel: Channel, why: str) -> None:  # noqa: ARG002
        self._channel = None
        if channel.is_authenticated:
            self._listener.disconnected()
        self._retry_after(_RETRY_PAUSE)

    def _try(self, address: Address, resolved: List[Any]) -> None:
        """Connect to the first of an address's IP addresses; if that fails, to the next one."""
        family, kind, protocol, _, sockaddr = resolved[0]

        def failed(why: str) -> None:
            if resolved[1:]:
                return self._try(address, resolved[1:])
            self._failed(address, why, _RETRY_PAUSE)

        try:
            sock = socket.socket(family, kind, protocol)
        except OSError as error:
            return failed(str(error))
        sock.setblocking(False)
        code = sock.connect_ex(sockaddr)
        if code not in (0, errno.EINPROGRESS):
            sock.close()
            return failed(os.strerror(code))
        self._connecting = sock

        def finished() -> None:
            if self._connecting is not sock:
                return
            timeout.cancel()
            self._loop.forget(sock.fileno())
            self._connecting = None
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code == 0:
                return self._start_handshake(sock)
            sock.close()
            failed(os.strerror(code))

        def timed_out() -> None:
            if self._connecting is sock:
                self._stop_connecting()
                failed("timed out")

        timeout = self._loop.call_later(_CLIENT_CONNECT_TIMEOUT, timed_out)
        self._loop.on_writable(sock.fileno(), finished)

    def _stop_connecting(self) -> None:
        if self._connecting is not None:
            self._loop.forget(self._connecting.fileno())
            self._connecting.close()
            self._connecting = None

    def _failed(self, address: Address, why: str, pause: float) -> None:
        self._listener.unreachable(address, why)
        self._retry_after(pause)

    def _retry_after(self, seconds: float) -> None:
        if not self._closed and self._retry is None:
            self._retry = self._loop.call_later(seconds, self.connect)

    def _start_handshake(self, sock: socket.socket) -> None:
        self._channel = channel = Channel(self._loop, sock, self._key, Role.CLIENT, self)

        def check() -> None:
            if self._channel is channel and not channel.is_authenticated:
                channel.fail("its handshake took too long")

        self._loop.call_later(_CLIENT_HANDSHAKE_TIMEOUT, check)


def all_addresses(hosts: Sequence[str], ports: Sequence[int]) -> List[Address]:
    """The addresses at which to look for a server that listens on the first free one of its ports, the likeliest first."""
    return [(host, port) for port in ports for host in dict.fromkeys(hosts)]


_OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_OUT_OF_RESOURCES_PAUSE = 1.0
"""Seconds after one of the errors `_OUT_OF_RESOURCES` until the server accepts connections again."""
_HANDSHAKE_TIMEOUT = 10.0
"""Seconds after which a stranger is closed."""
_MAX_STRANGERS = 64
"""Strangers that the server keeps at a time; more connections wait in the kernel's queue."""
_MIN_HANDSHAKE_TIME = 1.0
"""Seconds after which the oldest stranger is closed if there are `_MAX_STRANGERS`; a handshake takes milliseconds."""

_ALL_ADDRESSES = ((socket.AF_INET6, "::"), (socket.AF_INET, ""))
_LOOPBACK = ((socket.AF_INET, "127.0.0.1"),)


class RpcServerError(OSError):
    """Raised when none of the ports is free to listen on."""


def listen(ports: List[int], loopback: bool = False) -> socket.socket:
    """Returns a socket that listens on the first free port.

    Args:
        ports: the ports to try, in this order.
        loopback: whether only this machine may connect; otherwise any host may.

    Raises:
        RpcServerError: no port is free.
    """
    problem = ""
    for port in ports:
        for family, address in _LOOPBACK if loopback else _ALL_ADDRESSES:
            try:
                listener = socket.socket(family, socket.SOCK_STREAM)
            except OSError:
                continue  # A host without IPv6.
            try:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
                listener.bind((address, port))
                listener.listen(256)
                listener.setblocking(False)
                return listener
            except OSError as error:
                listener.close()
                problem = str(error)
    raise RpcServerError("the head cannot listen on any of the ports %s: %s" % (", ".join(map(str, ports)), problem))


class Acceptor:
    """Accepts the connections that come in on a listening socket, of this server or of another one.

    Args:
        loop: the event loop.
        sock: the listening socket; the acceptor closes it.
        on_connection: called with each new connection.
        pause: called before each connection is accepted; returns the seconds to wait before it, 0 for none.
    """

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        on_connection: Callable[[socket.socket], None],
        pause: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._loop = loop
        self._socket = sock
        self._on_connection = on_connection
        self._pause = pause
        sock.setblocking(False)
        loop.on_readable(sock.fileno(), self._accept)

    def close(self) -> None:
        """Stop accepting connections, and close the listening socket."""
        self._loop.forget(self._socket.fileno())
        self._socket.close()

    def _accept(self) -> None:
        seconds = self._pause()
        if seconds > 0:
            return self._stop_for(seconds)
        try:
            connection, _ = self._socket.accept()
        except OSError as error:
            if error.errno in _OUT_OF_RESOURCES:
                self._stop_for(_OUT_OF_RESOURCES_PAUSE)
            return  # For other errors: the client went away before its connection was accepted.
        self._on_connection(connection)

    def _stop_for(self, seconds: float) -> None:
        """Stop watching the socket for a while: it stays readable, so the loop would call again and again."""
        self._loop.forget(self._socket.fileno())

        def resume() -> None:
            if self._socket.fileno() >= 0:  # The acceptor was closed otherwise.
                self._loop.on_readable(self._socket.fileno(), self._accept)

        self._loop.call_later(seconds, resume)


class RpcServer(ChannelListener):
    """Listens for connections, authenticates the clients, and passes their messages to a listener.

    Args:
        loop: the event loop.
        key: the shared secret, hex.
        ports: the ports to try; the server listens on the first free one.
        listener: its methods are called with what happens on authenticated connections.
        loopback: whether only this machine may connect; otherwise any host may.
        heartbeat: whether to send `{"op": "ping"}` to all clients, and to close connections that are silent for too long.

    Attributes:
        port: the port that the server listens on.
    """

    def __init__(
        self,
        loop: Loop,
        key: str,
        ports: List[int],
        listener: ChannelListener,
        loopback: bool = False,
        heartbeat: bool = False,
    ) -> None:
        self._loop = loop
        self._key = key
        self._listener = listener
        self._strangers: Dict[Channel, float] = {}
        self._clients: Set[Channel] = set()
        sock = listen(ports, loopback)
        self.port = int(sock.getsockname()[1])
        self._acceptor = Acceptor(loop, sock, self._connected, self._pause)
        self._heartbeat: Optional[Timer] = loop.call_later(HEARTBEAT_INTERVAL, self._beat) if heartbeat else None

    def stop_heartbeat(self) -> None:
        """Send no more pings, and no longer close silent connections."""
        if self._heartbeat is not None:
            self._heartbeat.cancel()

    def close(self) -> None:
        """Accept no more connections, and close the strangers; authenticated connections stay open."""
        self.stop_heartbeat()
        for channel in self._strangers:
            channel.close()
        self._strangers.clear()
        self._acceptor.close()

    def authenticated(self, channel: Channel) -> None:
        del self._strangers[channel]
        self._clients.add(channel)
        self._listener.authenticated(channel)

    def received(self, channel: Channel, message: Dict[str, Any]) -> None:
        if message.get("event") != "pong":
            self._listener.received(channel, message)

    def closed(self, channel: Channel, why: str) -> None:
        self._strangers.pop(channel, None)
        if channel in self._clients:
            self._clients.remove(channel)
            self._listener.closed(channel, why)

    def _connected(self, sock: socket.socket) -> None:
        channel = Channel(self._loop, sock, self._key, Role.SERVER, self)
        self._strangers[channel] = self._loop.now()

        def check() -> None:
            if channel in self._strangers:
                channel.fail("its handshake took too long")

        self._loop.call_later(_HANDSHAKE_TIMEOUT, check)

    def _pause(self) -> float:
        """Seconds until there is room for another stranger; closes the oldest one if it had enough time for its handshake."""
        if len(self._strangers) < _MAX_STRANGERS:
            return 0.0
        oldest, since = next(iter(self._strangers.items()))
        left = since + _MIN_HANDSHAKE_TIME - self._loop.now()
        if left <= 0:
            oldest.fail("too many connections")
        return left

    def _beat(self) -> None:
        """Close the connections that are silent for too long, and send a ping over the others."""
        self._clients = {channel for channel in self._clients if channel.is_open}
        for channel in list(self._clients):
            if self._loop.now() - channel.last_received > HEARTBEAT_TIMEOUT:
                channel.fail("it has been silent for %g s" % HEARTBEAT_TIMEOUT)
            else:
                channel.send(op="ping")
        self._heartbeat = self._loop.call_later(HEARTBEAT_INTERVAL, self._beat)


class Peer:
    """One client as the server sees it, over all its reconnections; holds the newest connection.

    Attributes:
        channel: that connection; None while the client is not connected.
    """

    def __init__(self) -> None:
        self.channel: Optional[Channel] = None

    @property
    def here(self) -> bool:
        """Whether the client is connected."""
        return self.channel is not None

    def attach(self, channel: Channel) -> None:
        """Take a new connection of the client in place of the one before."""
        if self.channel is not None:
            self.channel.close()  # The client reconnected before its loss was noticed here.
        self.channel = channel

    def detach(self, channel: Channel) -> bool:
        """Drop a connection that has ended. Returns whether the client is not connected now, that is, has no newer connection."""
        if self.channel is not channel:
            return False
        self.channel = None
        return True

    def send(self, **message: Any) -> None:
        """Send a message to the client; without a connection the message is dropped."""
        if self.channel is not None:
            self.channel.send(**message)


ANSWER = "rayslurm-answer "
"""The beginning of the output line of `main` that holds the answer: srun may print other lines."""
SENT = "rayslurm-sent"
"""The line that `main` prints just before it sends the request: from then on the session may have received the request."""

_CONNECT_TIMEOUT = 10.0
"""Seconds for connecting, and again for the handshake."""
ANSWER_TIMEOUT = 60.0
"""Seconds in which a session must answer a request; the session's file system may be slow."""


class NotConnected(OSError):
    """Raised when no session was reached, so that the request was not sent."""


class AnswerLost(OSError):
    """Raised when the request was sent, so that the session may have received it, but no answer came."""


def call(
    sock: socket.socket,
    key: str,
    request: Dict[str, Any],
    handshake_timeout: float = _CONNECT_TIMEOUT,
    before_send: Callable[[], None] = lambda: None,
) -> Dict[str, Any]:
    """Send a request to a session and return its answer.

    Args:
        sock: a connection to the session; the caller closes it.
        key: the session's key, hex.
        request: the request, with its operation in `op`.
        handshake_timeout: seconds for the mutual authentication.
        before_send: called just before the request is sent.

    Raises:
        NotConnected: the other end does not prove that it knows the key, so the request was not sent.
        AnswerLost: the connection ended or timed out after the request was sent.
    """
    handshake, lines = Handshake(key, Role.CLIENT), _Lines(sock, handshake_timeout)
    try:
        lines.send(handshake.opening)
        while not handshake.done:
            lines.send(handshake.receive(lines.read()))
    except (OSError, ValueError) as error:
        raise NotConnected("no session answers there: %s" % error) from None
    before_send()
    lines.set_timeout(ANSWER_TIMEOUT)
    try:
        lines.send(encode_message(request))
        return decode_message(lines.read())
    except (OSError, ValueError) as error:
        raise AnswerLost("the session was asked, but its answer is lost: %s" % error) from None


class _Lines:
    """Sends and reads lines on a blocking socket until a deadline, after which `TimeoutError` is raised."""

    def __init__(self, sock: socket.socket, timeout: float) -> None:
        self._sock = sock
        self._buffer = LineBuffer(MAX_LINE)
        self._ready: List[bytes] = []
        self.set_timeout(timeout)

    def set_timeout(self, seconds: float) -> None:
        """Set the deadline to some seconds from now."""
        self._deadline = time.monotonic() + seconds

    def send(self, line: bytes) -> None:
        self._apply_timeout()
        self._sock.sendall(line)

    def read(self) -> bytes:
        while not self._ready:
            self._apply_timeout()
            data = self._sock.recv(65536)
            if not data:
                raise ConnectionError("the connection ended")
            self._ready += self._buffer.feed(data)
        return self._ready.pop(0)

    def _apply_timeout(self) -> None:
        self._sock.settimeout(max(0.01, self._deadline - time.monotonic()))


def main(session_dir: str) -> int:
    """Send the request on standard input to the session whose head is this node, and print the answer.

    Returns:
        The exit code: 0, or 75 if there is no answer.
    """
    request = json.load(sys.stdin)
    try:
        with open(os.path.join(session_dir, SESSION), encoding="utf-8") as file:
            announcement = json.load(file)
        with socket.create_connection(("localhost", int(announcement["port"])), _CONNECT_TIMEOUT) as sock:
            answer = call(sock, announcement["key"], request, before_send=lambda: print(SENT, flush=True))
    except (OSError, ValueError, KeyError, TypeError) as error:
        print("rayslurm: %s" % error, file=sys.stderr)
        return 75  # EX_TEMPFAIL of sysexits(3).
    print(ANSWER + json.dumps(answer), flush=True)
    return 0
