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
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import re
import socket
import time
import traceback
from enum import Enum
from typing import Any, Dict, List, Optional

from ..process.loop import Loop

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
