"""Messages between the runtimes of an allocation: JSON lines over TCP, after both ends have proved that they know the key.

The key is in the start record, which only this user can read. The proof is an HMAC over both ends' challenges, so
neither a stranger who connects nor a stranger who listens on the port learns or can repeat anything.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import socket
import time
from typing import Any, Callable, Dict, Optional

from .loop import Loop
from .record import split_lines

Message = Dict[str, Any]

MAX_LINE = 2**22
"""Bytes of the longest message; usage samples and tails of logs are far below."""
_UNPROVED = 4096
"""Bytes that a stranger may send."""
_SEND_TIMEOUT = 2.0


def derive(key: str, purpose: str) -> str:
    """A secret of its own for each purpose, as hex."""
    return hmac.new(bytes.fromhex(key), purpose.encode("utf-8"), hashlib.sha256).hexdigest()


def _proof(key: str, role: str, theirs: str, ours: str) -> str:
    return derive(key, "%s:%s:%s" % (role, theirs, ours))


class Channel:
    """One connection. Nothing is handed on before the other end has proved that it knows the key.

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
        self.proved = False
        sock.settimeout(_SEND_TIMEOUT)  # Only sending can wait: reading follows readiness.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        loop.on_readable(sock.fileno(), self._read)
        self.send(challenge=self._challenge)

    def send(self, **message: Any) -> None:
        """Send a message; a connection that takes none ends."""
        if self._socket is None:
            return
        try:
            self._socket.sendall(json.dumps(message).encode("utf-8") + b"\n")
        except OSError:
            self._loop.call_later(0.0, self._end)  # Not from within the caller's own turn.

    def on_gone(self, gone: Callable[[], None]) -> None:
        """Have something else called when the connection ends by itself."""
        self._gone = gone

    def own_address(self) -> str:
        """This end's address, as the other one sees it unless it is translated."""
        assert self._socket is not None
        return str(self._socket.getsockname()[0])

    def wait_end(self, deadline: float) -> None:
        """Wait until the other end closes the connection, or `time.monotonic()` is at the deadline; then close it.

        For the end of a runtime, when its loop no longer runs.
        """
        try:
            while self._socket is not None:
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._socket.settimeout(left)
                if not self._socket.recv(65536):
                    break
        except OSError:
            pass  # It is gone, one way or another, or too late.
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
        if not data or len(self._partial) > (MAX_LINE if self.proved else _UNPROVED):
            return self._end()
        lines, self._partial = split_lines(self._partial + data)
        for line in lines:
            try:
                message = json.loads(line.decode("utf-8"))
            except ValueError:
                return self._end()
            if not isinstance(message, dict):
                return self._end()
            if self.proved:
                self._deliver(message)
            else:
                self._prove(message)
            if self._socket is None:
                return

    def _prove(self, message: Message) -> None:
        """Challenges first, then the proofs: the worker's, and once that has convinced the head, the head's."""
        if self._their_challenge is None:
            self._their_challenge = str(message.get("challenge"))
            if self._role == "worker":
                self.send(proof=_proof(self._key, "worker", self._their_challenge, self._challenge))
            return
        other = "head" if self._role == "worker" else "worker"
        expected = _proof(self._key, other, self._challenge, self._their_challenge)
        if not hmac.compare_digest(expected, str(message.get("proof"))):
            return self._end()
        if self._role == "head":
            self.send(proof=_proof(self._key, "head", self._their_challenge, self._challenge))
        self.proved = True
        self._on_proved()
