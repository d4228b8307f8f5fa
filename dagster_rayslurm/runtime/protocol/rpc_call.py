"""One question to a session, from outside of any loop: the other end of what `requests` serves."""

from __future__ import annotations

import hmac
import json
import os
import socket
import sys
import time
from typing import Any, Callable, Dict

from .record import SESSION
from .rpc import MAX_LINE, Seal, proof

ANSWER = "rayslurm-answer "
"""What the line with the answer begins with, where others may print as well."""
SENT = "rayslurm-sent"
"""The line from which on the question may have been heard."""

_CONNECT_TIMEOUT = 10.0
ANSWER_TIMEOUT = 60.0
"""Seconds in which a session answers; its file system may be slow."""


class NobodyThere(OSError):
    """The session cannot be reached there, or does not prove to be one; nothing was asked."""


class AnswerLost(OSError):
    """The question was sent and may have been heard, but there is no answer."""


def ask(
    sock: socket.socket,
    key: str,
    request: Dict[str, Any],
    prove_within: float = _CONNECT_TIMEOUT,
    sending: Callable[[], None] = lambda: None,
) -> Dict[str, Any]:
    """Ask a session something.

    Args:
        sock: a connection to it; the caller closes it.
        key: the session's key, hex.
        request: the question.
        prove_within: seconds in which the other end must prove that it is the session.
        sending: called just before the question is sent.

    Raises:
        NobodyThere: the other end does not prove that it knows the key; nothing was asked.
        AnswerLost: the connection ended, or nothing came, after the question was sent.
    """
    line = _Lines(sock, prove_within)
    ours = os.urandom(16).hex()
    try:
        line.send({"challenge": ours})
        theirs = str(line.receive()["challenge"])
        line.send({"proof": proof(key, "worker", theirs, ours)})
        if not hmac.compare_digest(proof(key, "head", ours, theirs), str(line.receive()["proof"])):
            raise ValueError("its proof is wrong")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NobodyThere("no session answers there: %s" % error) from None
    # Who connects is the worker of the handshake, whatever it wants.
    sent, received = Seal(key, "worker", ours, theirs), Seal(key, "head", ours, theirs)
    body = json.dumps(request).encode("utf-8")
    sending()
    line.until(ANSWER_TIMEOUT)
    try:
        sock.sendall(sent.next(body) + b" " + body + b"\n")
        seal, _, answer = line.read().partition(b" ")
        if not hmac.compare_digest(seal, received.next(answer)):
            raise ValueError("the answer is not the session's")
        message = json.loads(answer.decode("utf-8"))
    except (OSError, ValueError) as error:
        raise AnswerLost("the session was asked, but its answer is lost: %s" % error) from None
    return dict(message)


class _Lines:
    """Lines of a socket, before a deadline."""

    def __init__(self, sock: socket.socket, timeout: float) -> None:
        self._sock = sock
        self._partial = b""
        self._deadline = 0.0
        self.until(timeout)

    def until(self, timeout: float) -> None:
        self._deadline = time.monotonic() + timeout

    def send(self, message: Dict[str, Any]) -> None:
        self._sock.settimeout(max(0.01, self._deadline - time.monotonic()))
        self._sock.sendall(json.dumps(message).encode("utf-8") + b"\n")

    def receive(self) -> Dict[str, Any]:
        return dict(json.loads(self.read().decode("utf-8")))

    def read(self) -> bytes:
        while b"\n" not in self._partial:
            self._sock.settimeout(max(0.01, self._deadline - time.monotonic()))
            data = self._sock.recv(65536)
            if not data or len(self._partial) > MAX_LINE:
                raise ConnectionError("the connection ended")
            self._partial += data
        line, _, self._partial = self._partial.partition(b"\n")
        return line


def main(session_dir: str) -> int:
    """Pass the question on standard input to the session of this node, and print its answer."""
    request = json.load(sys.stdin)
    try:
        with open(os.path.join(session_dir, SESSION), encoding="utf-8") as file:
            announced = json.load(file)
        with socket.create_connection(("localhost", int(announced["port"])), _CONNECT_TIMEOUT) as sock:
            answer = ask(sock, announced["key"], request, sending=lambda: print(SENT, flush=True))
    except (OSError, ValueError, KeyError, TypeError) as error:
        print("rayslurm: %s" % error, file=sys.stderr)
        return 75  # EX_TEMPFAIL of sysexits(3).
    print(ANSWER + json.dumps(answer), flush=True)
    return 0
