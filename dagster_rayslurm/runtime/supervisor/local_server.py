"""Run and cancel payloads for Dagster processes that use a pipe, a Unix socket or a file instead of the network.

Over a pipe to the parent process or the Unix socket of a local session, requests are JSON lines, and the payload is cancelled
when the requester closes its end. A batch job must outlive its requester's connection, so there the requester cancels a
payload by a file in the run directory.
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
from ..protocol.messages import Answer, Operation, Refusal, answer_safely, refuse
from ..protocol.record import CANCEL, SESSION, split_lines, write_atomically
from ..protocol.rpc import Acceptor
from ..protocol.spec import SpecError
from .queue import Closing
from .supervisor import Supervisor

_MAX_REQUEST = 2**21
"""Most bytes of one request; the longest kind contains an environment, for which execve(2) allows 2 MiB."""
_CANCEL_POLL = 0.5
"""Seconds between two reads of the file in a run directory that may cancel its payload."""

ORPHANED = End(EndReason.CANCEL, "the Dagster process that asked for the run is gone")
"""How a payload ends whose requester has closed its end of the pipe or socket."""
CANCELLED = End(EndReason.CANCEL, "cancelled from Dagster")
"""How a payload ends whose requester asks for that."""


class _LineReader:
    """Reads JSON lines from a pipe or socket: calls `handle` with each object, and `closed` when the other end is closed.

    Args:
        fd: the descriptor to read.
        handle: gets an empty dictionary for a line that is no JSON object.
        closed: also called after a line that is too long.
    """

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
    """Queue the payload of a run directory for the parent process, which cancels it by a request over `fd`, or by closing it.

    Args:
        fd: the reading end of a pipe from the parent process.

    Returns:
        The queued payload.
    """
    payload = supervisor.submit(run_dir)
    _LineReader(supervisor.loop, fd, lambda request: _cancel(payload, request), lambda: payload.end_early(ORPHANED))
    return payload


def serve_run_dir(supervisor: Supervisor, run_dir: str) -> Payload:
    """Queue the payload of a run directory, and cancel it if a cancel request appears in the directory's file `cancel.json`.

    Returns:
        The queued payload.
    """
    payload = supervisor.submit(run_dir)
    path = os.path.join(run_dir, CANCEL)
    handled = [b""]

    def poll() -> None:
        with contextlib.suppress(OSError, ValueError, RecursionError):  # The file cannot be read now, or is just being replaced.
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
    """Cancel a payload if `request` asks for that; `request` may be any JSON value, for the payload can write to the file too."""
    if isinstance(request, dict) and request.get("op") == Operation.CANCEL:
        gone = request.get("gone")
        end = CANCELLED if gone is None else End(EndReason.OTHER_COMPONENT, "component %r: its runtime is gone" % (gone,))
        payload.end_early(end, grace=0 if request.get("now") else None)


class LocalSessionServer:
    """Serves clients of a session on this machine, without Slurm: runs payloads, describes the session and ends it.

    Clients connect to a Unix socket, whose path the server writes to `session.json` in the session directory (the
    announcement).

    Args:
        supervisor: runs the payloads.
        session_dir: the directory for the announcement.
        socket_path: where to make the socket: in a directory with mode 0700, so that only this user reaches it.
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
        """Take no more connections, and remove the announcement, unless a later session has already written its own."""
        self._listener.close()
        try:
            with open(self._announcement, encoding="utf-8") as file:
                announced = json.load(file)
            if announced.get("pid") == os.getpid():
                os.unlink(self._announcement)
        except (OSError, ValueError):
            return  # The file is gone or damaged.

    def admit(self, request: Dict[str, Any]) -> Tuple[Answer, Optional[Payload]]:
        """Queue the payload of a `run` request, unless a request with the same id was accepted before.

        Returns:
            The answer for the client, and the queued payload; None for the payload if the request is refused.
        """
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
    """Answers one client's requests. Each client runs at most one payload, which is cancelled if the client hangs up first."""

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
                # The server hangs up when the payload's end is recorded, or cannot be. The client waits for that.
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
