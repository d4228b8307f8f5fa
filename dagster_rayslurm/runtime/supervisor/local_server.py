"""Where requests come from on the runtime's own machine: the parent's pipe, a session's Unix socket, or a file.

The first two carry JSON lines and are lifelines: a payload is cancelled when its requester is gone. A batch job outlives a
lost connection, so there a file in the run directory says that the payload is cancelled.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from typing import Any, Callable, Dict, Optional, Set, Tuple

from ..payload.payload import Payload
from ..process.loop import Loop
from ..protocol.end import End, EndReason
from ..protocol.record import CANCEL, SESSION, split_lines, write_atomically
from ..protocol.requests import Answer, Operation, Refusal, answer_safely, refuse
from ..protocol.rpc_server import Acceptor
from ..protocol.spec import SpecError
from .admission import Closing
from .supervisor import Supervisor

_MAX_REQUEST = 2**21
"""Bytes of a request; the longest carries an environment (execve(2) allows 2 MiB for it)."""
_CANCEL_POLL = 0.5
"""Seconds between two reads of the cancel request of a run directory."""

ORPHANED = End(EndReason.CANCEL, "the Dagster process that asked for the run is gone")
CANCELLED = End(EndReason.CANCEL, "cancelled from Dagster")


class _LineReader:
    """Calls `handle` with each JSON object that a descriptor delivers, and `closed` at its end."""

    def __init__(self, loop: Loop, fd: int, handle: Callable[[Dict[str, Any]], None], closed: Callable[[], None]) -> None:
        self._loop = loop
        self._fd = fd
        self._handle = handle
        self._closed = closed
        self._partial = b""
        loop.on_readable(fd, self._read)

    def _read(self) -> None:
        try:
            data = os.read(self._fd, 65536)
        except ConnectionResetError:
            data = b""
        if not data or len(self._partial) > _MAX_REQUEST:
            self._loop.forget(self._fd)
            return self._closed()
        lines, self._partial = split_lines(self._partial + data)
        for line in lines:
            try:
                request = json.loads(line.decode("utf-8"))
            except (ValueError, RecursionError):
                request = {}
            self._handle(request if isinstance(request, dict) else {})


def serve_parent(supervisor: Supervisor, run_dir: str, fd: int = 0) -> Payload:
    """Run one payload for the parent process, which holds the other end of `fd`."""
    payload = supervisor.submit(run_dir)
    _LineReader(supervisor.loop, fd, lambda request: _cancel(payload, request), lambda: payload.end_early(ORPHANED))
    return payload


def serve_run_dir(supervisor: Supervisor, run_dir: str) -> Payload:
    """Run the payload of a run directory; the file `cancel.json` in it, empty at first, may cancel it."""
    payload = supervisor.submit(run_dir)
    path = os.path.join(run_dir, CANCEL)
    handled = [b""]

    def poll() -> None:
        with contextlib.suppress(OSError, ValueError, RecursionError):  # Unreadable for now, or just being replaced.
            with open(path, "rb") as file:
                text = file.read()
            if text != handled[0]:
                handled[0] = text
                _cancel(payload, json.loads(text.decode("utf-8")))
        if not payload.ended:
            supervisor.loop.call_later(_CANCEL_POLL, poll)

    supervisor.loop.call_later(_CANCEL_POLL, poll)
    return payload


def _cancel(payload: Payload, request: Any) -> None:
    """Cancel a payload if the request says so; the payload itself may have written anything into the file."""
    if isinstance(request, dict) and request.get("op") == Operation.CANCEL:
        gone = request.get("gone")
        end = CANCELLED if gone is None else End(EndReason.OTHER_COMPONENT, "component %r: its runtime is gone" % (gone,))
        payload.end_early(end, grace=0 if request.get("now") else None)


class LocalSessionServer:
    """Listens on a Unix socket in the private scratch directory and announces it in the session directory.

    Args:
        supervisor: runs the payloads.
        session_dir: the directory for `session.json`, which says how to reach this session.
        socket_path: the socket; only this user reaches it, because its directory is 0700.
    """

    def __init__(self, supervisor: Supervisor, session_dir: str, socket_path: str) -> None:
        self._supervisor = supervisor
        self._announcement = os.path.join(session_dir, SESSION)
        self._accepted_ids: Set[str] = set()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind(socket_path)
        sock.listen(64)
        self._listener = Acceptor(supervisor.loop, sock, self._accepted)
        announcement = dict(supervisor.describe(), socket=socket_path)
        write_atomically(self._announcement, json.dumps(announcement).encode("utf-8"))

    def _accepted(self, connection: socket.socket) -> None:
        _Client(self, self._supervisor, connection)

    def close(self) -> None:
        """Remove the announcement, unless a successor already wrote its own."""
        self._listener.close()
        try:
            with open(self._announcement, encoding="utf-8") as file:
                announced = json.load(file)
            if announced.get("pid") == os.getpid():
                os.unlink(self._announcement)
        except (OSError, ValueError):
            return  # Gone or replaced.

    def admit(self, request: Dict[str, Any]) -> Tuple[Answer, Optional[Payload]]:
        """Answer a `run` request; each id is accepted once."""
        request_id, run_dir, environ = str(request.get("request_id")), str(request.get("run_dir")), request.get("environ")
        if request_id in self._accepted_ids:
            return refuse(Refusal.DUPLICATE), None
        try:
            payload = self._supervisor.submit(run_dir, environ)
        except Closing:
            return refuse(Refusal.CLOSING), None
        except (OSError, SpecError) as error:
            return refuse(Refusal.REFUSED, error), None
        self._accepted_ids.add(request_id)
        return {"ok": True}, payload


class _Client:
    """One connection with at most one payload, which is cancelled when the connection ends first."""

    def __init__(self, server: LocalSessionServer, supervisor: Supervisor, connection: socket.socket) -> None:
        self._server = server
        self._supervisor = supervisor
        self._connection = connection
        self._payload: Optional[Payload] = None
        connection.setblocking(False)
        _LineReader(supervisor.loop, connection.fileno(), self._handle, self._closed)

    def _handle(self, request: Dict[str, Any]) -> None:
        answer = answer_safely(lambda: self._answer(request))
        if answer is None:
            return
        try:
            self._connection.sendall(json.dumps(answer).encode("utf-8") + b"\n")
        except OSError:
            self._hang_up()  # The client is gone, or does not read its answers.

    def _answer(self, request: Dict[str, Any]) -> Optional[Answer]:
        op = request.get("op")
        if op == Operation.RUN and self._payload is None:
            if self._hung_up():
                return None  # The client gave up while this process was stopped; its payload may run elsewhere by now.
            answer, self._payload = self._server.admit(request)
            if self._payload is not None:
                # The connection ends once the `end` is written, or never will be; clients wait for that.
                if self._payload.ended:
                    self._supervisor.loop.call_later(0.0, self._hang_up)
                else:
                    self._payload.on_ended.append(self._hang_up)
            return answer
        if op == Operation.CANCEL and self._payload is not None:
            _cancel(self._payload, request)
            return None
        if op == Operation.STOP:
            self._supervisor.close(End(EndReason.CANCEL, "the Ray cluster was ended by cleanup_cluster"))
            return {"ok": True}
        if op == Operation.DESCRIBE:
            return dict(self._supervisor.describe(), ok=True)
        return refuse(Refusal.UNKNOWN)

    def _hung_up(self) -> bool:
        try:
            return self._connection.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):  # The other end may have hung up first.
            self._connection.shutdown(socket.SHUT_RDWR)

    def _closed(self) -> None:
        self._connection.close()
        if self._payload is not None:
            self._payload.end_early(ORPHANED)
