"""Who hands payloads to the runtime and may cancel them: the parent's pipe, clients of a session's socket, or a file.

The first two speak JSON lines, and both are lifelines: a payload whose requester is gone is cancelled. A batch job
outlives a lost connection, so there a file in the run directory says that the run is cancelled.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import traceback
from typing import Any, Callable, Dict, Optional, Set, Tuple

from ..payload.payload import Payload
from ..process.loop import Loop
from ..protocol.end import End, EndReason
from ..protocol.record import CANCEL, SESSION, split_lines, write_atomically
from ..protocol.rpc_server import Acceptor
from ..protocol.spec import SpecError
from .queue import Closing
from .supervisor import Supervisor

_MAX_REQUEST = 2**21
"""Bytes of a request; the longest carries an environment (execve(2) allows 2 MiB for it)."""

_CANCEL_POLL = 0.5
"""Seconds between two looks at the file that cancels a run; one small read each."""

ORPHANED = End(EndReason.CANCEL, "the Dagster process that asked for the run is gone")
CANCELLED = End(EndReason.CANCEL, "cancelled from Dagster")


class _Lines:
    """Calls back with each JSON object that a descriptor delivers, and with its end."""

    def __init__(self, loop: Loop, fd: int, take: Callable[[Dict[str, Any]], None], gone: Callable[[], None]) -> None:
        self._loop = loop
        self._fd = fd
        self._take = take
        self._gone = gone
        self._partial = b""
        loop.on_readable(fd, self._read)

    def _read(self) -> None:
        try:
            data = os.read(self._fd, 65536)
        except ConnectionResetError:
            data = b""
        if not data or len(self._partial) > _MAX_REQUEST:
            self._loop.forget(self._fd)
            return self._gone()
        lines, self._partial = split_lines(self._partial + data)
        for line in lines:
            try:
                request = json.loads(line.decode("utf-8"))
            except (ValueError, RecursionError):
                request = {}
            self._take(request if isinstance(request, dict) else {})


def serve_parent(supervisor: Supervisor, run_dir: str, fd: int = 0) -> Payload:
    """Run one payload for the parent process, which holds the other end of `fd`."""
    payload = supervisor.submit(run_dir)
    _Lines(supervisor.loop, fd, lambda request: _cancel(payload, request), lambda: payload.end_early(ORPHANED))
    return payload


def serve_run_dir(supervisor: Supervisor, run_dir: str) -> Payload:
    """Run the payload of a run directory; the file `cancel.json` in it, empty at first, may cancel it."""
    payload = supervisor.submit(run_dir)
    path = os.path.join(run_dir, CANCEL)
    taken = [b""]

    def look() -> None:
        with contextlib.suppress(OSError, ValueError, RecursionError):  # Unreadable for now, or replaced while it was read.
            with open(path, "rb") as file:
                text = file.read()
            if text != taken[0]:
                taken[0] = text
                _cancel(payload, json.loads(text.decode("utf-8")))
        if not payload.ended:
            supervisor.loop.call_later(_CANCEL_POLL, look)

    supervisor.loop.call_later(_CANCEL_POLL, look)
    return payload


def _cancel(payload: Payload, request: Any) -> None:
    """Cancel a payload, if that is what is asked for: the payload itself can write such a file, with anything in it."""
    if isinstance(request, dict) and request.get("op") == "cancel":
        gone = request.get("gone")
        end = CANCELLED if gone is None else End(EndReason.OTHER_COMPONENT, "component %r: its runtime is gone" % (gone,))
        payload.end_early(end, grace=0 if request.get("now") else None)


class SessionServer:
    """Listens on a Unix socket in the private scratch directory and announces it in the session directory.

    Args:
        supervisor: who runs the payloads.
        session_dir: where `session.json` says how to reach this session.
        socket_path: the socket; only this user reaches it, because its directory is 0700.
    """

    def __init__(self, supervisor: Supervisor, session_dir: str, socket_path: str) -> None:
        self._supervisor = supervisor
        self._announcement = os.path.join(session_dir, SESSION)
        self._seen: Set[str] = set()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind(socket_path)
        sock.listen(64)
        self._listener = Acceptor(supervisor.loop, sock, self._accepted)
        announcement = dict(supervisor.describe(), socket=socket_path)
        write_atomically(self._announcement, json.dumps(announcement).encode("utf-8"))

    def close(self) -> None:
        """Take the announcement back, unless a successor already wrote its own."""
        self._listener.close()
        try:
            with open(self._announcement, encoding="utf-8") as file:
                announced = json.load(file)
            if announced.get("pid") == os.getpid():
                os.unlink(self._announcement)
        except (OSError, ValueError):
            return  # Gone or replaced: nothing of ours is left.

    def _accepted(self, connection: socket.socket) -> None:
        _Client(self, self._supervisor, connection)

    def admit(self, request: Dict[str, Any]) -> Tuple[Dict[str, Any], Optional[Payload]]:
        """Answer a `run` request; its id is accepted once."""
        request_id, run_dir, environ = str(request.get("request_id")), str(request.get("run_dir")), request.get("environ")
        if request_id in self._seen:
            return {"ok": False, "error": "duplicate"}, None
        try:
            payload = self._supervisor.submit(run_dir, environ)
        except Closing:
            return {"ok": False, "error": "closing"}, None
        except (OSError, SpecError) as error:
            return {"ok": False, "error": "refused", "message": str(error)}, None
        self._seen.add(request_id)
        return {"ok": True}, payload


class _Client:
    """One connection: at most one payload, which is cancelled when the connection ends first."""

    def __init__(self, server: SessionServer, supervisor: Supervisor, connection: socket.socket) -> None:
        self._server = server
        self._supervisor = supervisor
        self._connection = connection
        self._payload: Optional[Payload] = None
        connection.setblocking(False)
        _Lines(supervisor.loop, connection.fileno(), self._take, self._gone)

    def _take(self, request: Dict[str, Any]) -> None:
        try:
            answer = self._answer(request)
        except Exception as error:  # Who asks must not end what others have here.
            traceback.print_exc()
            answer = {"ok": False, "error": "refused", "message": "%s: %s" % (type(error).__name__, error)}
        if answer is None:
            return
        try:
            self._connection.sendall(json.dumps(answer).encode("utf-8") + b"\n")
        except OSError:
            self._hang_up()  # Gone, or it does not read what it asks for.

    def _answer(self, request: Dict[str, Any]) -> Optional[Dict[str, Any]]:
        """What a request is answered, if it is."""
        op = request.get("op")
        if op == "run" and self._payload is None:
            if self._hung_up():
                return None  # It gave up while this session was stopped; what it asked for may run elsewhere by now.
            answer, self._payload = self._server.admit(request)
            if self._payload is not None:
                # The end of the connection tells a client that waits for an `end` that it has been written, or never will.
                if self._payload.ended:
                    self._supervisor.loop.call_later(0.0, self._hang_up)
                else:
                    self._payload.on_ended.append(self._hang_up)
            return answer
        if op == "cancel" and self._payload is not None:
            _cancel(self._payload, request)
            return None
        if op == "stop":
            self._supervisor.close(End(EndReason.CANCEL, "the Ray cluster was ended by cleanup_cluster"))
            return {"ok": True}
        if op == "describe":
            return dict(self._supervisor.describe(), ok=True)
        return {"ok": False, "error": "unknown request"}

    def _hung_up(self) -> bool:
        try:
            return self._connection.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):  # The other end may have gone first.
            self._connection.shutdown(socket.SHUT_RDWR)

    def _gone(self) -> None:
        self._connection.close()
        if self._payload is not None:
            self._payload.end_early(ORPHANED)
