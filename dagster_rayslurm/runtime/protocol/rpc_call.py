"""Sends one request to a warm session and waits for the answer, without an event loop.

The Dagster host uses `call` over a TCP connection. If it cannot connect to the node, it starts `main` there by `srun --overlap`.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from typing import Any, Callable, Dict, List

from .record import SESSION
from .rpc import MAX_LINE, Handshake, LineBuffer, Role, decode_message, encode_message

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
