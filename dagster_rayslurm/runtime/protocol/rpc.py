"""Messages between the runtimes of an allocation: JSON lines over TCP, after both ends have proved that they know the key.

The key is in the start record, which only this user can read. The proof is an HMAC over both ends' challenges, so
neither a stranger who connects nor a stranger who listens on the port can repeat it elsewhere. One who stands between
both ends can pass the proofs on; so each line after them has an HMAC of its own, by a key that the proofs' challenges
and the direction make, over its number and its text. Whoever passes lines on can read them, as nothing secret is in
them, or withhold them from some point on, but can neither add, alter, repeat, reorder nor reflect any.
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
from typing import Any, Callable, Dict, Optional

from ..process.loop import Loop
from .record import split_lines

Message = Dict[str, Any]

MAX_LINE = 2**22
"""Bytes of the longest message; usage samples and tails of logs are far below."""
_UNPROVED = 4096
"""Bytes that a stranger may send."""
_CHALLENGE = re.compile("[0-9a-f]{32}")
_PROOF = re.compile("[0-9a-f]{64}")
_SEND_TIMEOUT = 2.0


def derive(key: str, purpose: str) -> str:
    """A secret of its own for each purpose, as hex."""
    return hmac.new(bytes.fromhex(key), purpose.encode("utf-8"), hashlib.sha256).hexdigest()


def proof(key: str, role: str, theirs: str, ours: str) -> str:
    """What the end in a role answers to the other one's challenge, given its own."""
    return derive(key, "%s:%s:%s" % (role, theirs, ours))


class Seal:
    """The HMACs of the lines that go in one direction of one connection, one after the other.

    Args:
        key: the shared secret, hex.
        sender: the role of the end that the lines come from.
        worker: the worker's challenge.
        head: the head's challenge.
    """

    def __init__(self, key: str, sender: str, worker: str, head: str) -> None:
        self._key = bytes.fromhex(derive(derive(key, "session:%s:%s" % (worker, head)), "from:" + sender))
        self._count = 0

    def next(self, body: bytes) -> bytes:
        """The HMAC of the next line."""
        self._count += 1
        return hmac.new(self._key, b"%d:%s" % (self._count, body), hashlib.sha256).hexdigest().encode("ascii")


class Channel:
    """One connection. Nothing is handed on before the other end has proved that it knows the key.

    A line that the other end cannot have sent, or whose message cannot be dealt with, ends the connection, and nothing else.

    Args:
        loop: where it is read.
        sock: a connected socket; the channel owns it.
        key: the shared secret, hex.
        role: "head" or "worker".
        on_proved: called once, when both ends know each other.
        take: called with each message.
        gone: called once, when the connection has ended by itself; not after `close`.
    """

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        key: str,
        role: str,
        on_proved: Callable[[], None],
        take: Callable[[Message], None],
        gone: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._socket: Optional[socket.socket] = sock
        self._key = key
        self._role = role
        self._on_proved = on_proved
        self._deliver = take
        self._gone = gone
        self._partial = b""
        self._challenge = os.urandom(16).hex()
        self._their_challenge: Optional[str] = None
        self._sent: Optional[Seal] = None
        self._received: Optional[Seal] = None
        self.proved = False
        sock.settimeout(_SEND_TIMEOUT)  # Only sending can wait: reading follows readiness.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        loop.on_readable(sock.fileno(), self._read)
        self._send_line(json.dumps({"challenge": self._challenge}).encode("utf-8"))

    def send(self, **message: Any) -> None:
        """Send a message, once both ends know each other; a connection that takes none ends."""
        assert self._sent is not None
        body = json.dumps(message).encode("utf-8")
        self._send_line(self._sent.next(body) + b" " + body)

    def _send_line(self, line: bytes) -> None:
        if self._socket is None:
            return
        try:
            self._socket.sendall(line + b"\n")
        except OSError:
            self._loop.call_later(0.0, self._end)  # Not from within the caller's own turn.

    def on_gone(self, gone: Callable[[], None]) -> None:
        """Have something else called when the connection ends by itself."""
        self._gone = gone

    def on_message(self, take: Callable[[Message], None]) -> None:
        """Have something else called with each message from the next one on."""
        self._deliver = take

    def wait_end(self, deadline: float) -> None:
        """Wait until the other end closes the connection, or `time.monotonic()` is at the deadline; then close it.

        For the end of a runtime, when its loop no longer runs.
        """
        with contextlib.suppress(OSError):  # It is gone, one way or another, or too late.
            while self._socket is not None:
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._socket.settimeout(left)
                if not self._socket.recv(65536):
                    break
        self.close()

    def close(self) -> None:
        if self._socket is not None:
            self._loop.forget(self._socket.fileno())
            self._socket.close()
            self._socket = None

    def _end(self) -> None:
        if self._socket is not None:
            self.close()
            self._gone()

    def _read(self) -> None:
        assert self._socket is not None
        try:
            data = self._socket.recv(65536)
        except OSError:
            data = b""
        if not data or len(self._partial) + len(data) > (MAX_LINE if self.proved else _UNPROVED):
            return self._end()
        lines, self._partial = split_lines(self._partial + data)
        for line in lines:
            if self.proved:
                message = self._open(line)
                if message is None:
                    return self._end()
                try:
                    self._deliver(message)
                except Exception:  # Nor does what one says who belongs here end the others' work.
                    traceback.print_exc()
                    return self._end()
            else:
                try:
                    self._prove(line)
                except Exception:  # Whatever a stranger thinks of, it is the end of its own connection only.
                    return self._end()
                if self.proved:
                    self._on_proved()
            if self._socket is None:
                return

    def _open(self, line: bytes) -> Optional[Message]:
        """The message of a line; None if the other end did not send it, or not as the next one."""
        assert self._received is not None
        seal, _, body = line.partition(b" ")
        if not hmac.compare_digest(seal, self._received.next(body)):
            return None
        try:
            message = json.loads(body.decode("utf-8"))
        except (ValueError, RecursionError):
            return None
        return message if isinstance(message, dict) else None

    def _prove(self, line: bytes) -> None:
        """Challenges first, then the proofs: the worker's, and once that has convinced the head, the head's.

        Raises:
            Exception: this is neither a challenge nor the proof; of any kind, for a stranger may send anything.
        """
        message = json.loads(line.decode("utf-8"))
        if self._their_challenge is None:
            self._their_challenge = theirs = _field(message, "challenge", _CHALLENGE)
            if self._role == "worker":
                self._send_proof(theirs)
            return
        theirs, other = self._their_challenge, "head" if self._role == "worker" else "worker"
        if not hmac.compare_digest(proof(self._key, other, self._challenge, theirs), _field(message, "proof", _PROOF)):
            raise ValueError("the proof is wrong")
        if self._role == "head":
            self._send_proof(theirs)
        challenges = (self._challenge, theirs) if self._role == "worker" else (theirs, self._challenge)
        self._sent, self._received = Seal(self._key, self._role, *challenges), Seal(self._key, other, *challenges)
        self.proved = True

    def _send_proof(self, theirs: str) -> None:
        self._send_line(json.dumps({"proof": proof(self._key, self._role, theirs, self._challenge)}).encode("utf-8"))


def _field(message: Message, name: str, form: "re.Pattern[str]") -> str:
    value = message[name]
    if form.fullmatch(value) is None:
        raise ValueError("this is no %s" % name)
    return str(value)
