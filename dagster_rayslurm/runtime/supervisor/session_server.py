"""What a session is asked for, by whoever knows its key: to run a payload, to describe itself, to end, now or if it is idle.

The allocation owns the payload: that the connection ends means nothing. The request's id is the payload's own, so that a
request whose answer was lost may be repeated, here or at a session that came after this one.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from typing import Any, Dict, List, Mapping, Optional, Set

from ..node.allocation import Allocation
from ..protocol.end import End, EndReason
from ..protocol.record import JOURNAL, SECRETS, SESSION, write_atomically
from ..protocol.rpc import Channel, ChannelListener, Message
from ..protocol.rpc_server import RpcServer
from ..protocol.spec import PROTOCOL_VERSION, SpecError, is_passable
from .local_server import serve_run_dir
from .queue import Closing, Misfit
from .supervisor import Supervisor

_LOOK_INTERVAL = 1.0
"""Seconds between two looks at whether the session takes payloads, and its announcement stands."""

_ENDED = End(EndReason.CANCEL, "its session was ended by cleanup_cluster")


class RequestServer(ChannelListener):
    """Takes requests and says in the session's directory where it does so.

    Args:
        supervisor: who runs the payloads.
        session_dir: the session's directory.
        allocation: the allocation it holds.
        key: the secret of the session, hex.
        ports: where to listen, the first free one; another one if none of them is.
    """

    def __init__(self, supervisor: Supervisor, session_dir: str, allocation: Allocation, key: str, ports: List[int]) -> None:
        self._supervisor = supervisor
        self._path = os.path.join(session_dir, SESSION)
        self._seen: Set[str] = set()
        self._withdrawn: Set[str] = set()
        # A port of the kernel's choice is better than none: on this node it can be reached in any case.
        self._rpc = RpcServer(supervisor.loop, key, [*ports, 0], self)
        self._announcement: Dict[str, Any] = {
            "protocol": PROTOCOL_VERSION,
            "cluster_id": supervisor.spec.cluster_id,
            "job_id": allocation.job_id,
            "hosts": list(dict.fromkeys([allocation.nodes[0], *allocation.head_addresses])),
            "port": self._rpc.port,
            "key": key,
            "pid": os.getpid(),
            "hostname": supervisor.nodes.machine.hostname,
            "heterogeneous": bool(allocation.groups),
            "closing": None,
            "served": 0,
            "idle": False,
        }
        self._announce()
        self._look()

    def close(self) -> None:
        """Take no more requests, and say so, unless the directory is another session's by now."""
        self._rpc.close()
        self._update(self._supervisor.closing or self._announcement["closing"] or "it has ended")
        with contextlib.suppress(OSError):  # The job's end tells the same.
            if not self._displaced():
                self._announce()

    def _update(self, closing: Optional[str]) -> bool:
        """Note what has changed, the end also in this node's log; whether anything has."""
        before = dict(self._announcement)
        self._announcement.update(closing=closing, served=self._supervisor.served, idle=self._is_idle())
        if closing != before["closing"]:
            said = "rayslurm: the session takes no more payloads, %d were here: %s" % (self._supervisor.served, closing)
            print(said, file=sys.stderr, flush=True)
        return self._announcement != before

    def _is_idle(self) -> bool:
        return self._supervisor.served > 0 and self._supervisor.lifetime.idle_for is not None

    def _announce(self) -> None:
        write_atomically(self._path, json.dumps(self._announcement).encode("utf-8"))

    def _look(self) -> None:
        """Keep the announcement true, and whole: files get lost."""
        changed = self._update(self._supervisor.closing)
        try:
            if self._displaced():
                self._supervisor.drain("another session stands in its place in %s" % os.path.dirname(self._path))
            elif changed or self._read() != self._announcement:
                self._announce()
        except FileNotFoundError:
            self._supervisor.drain("nobody can find it: %s is gone" % os.path.dirname(self._path))
        except OSError:
            pass  # A full disk, or a file system that does not answer: the next look may succeed.
        self._supervisor.loop.call_later(_LOOK_INTERVAL, self._look)

    def _displaced(self) -> bool:
        """Whether another session announces itself here, as may happen once somebody has removed directories."""
        found = self._read()
        return found is not None and found.get("cluster_id") not in (None, self._announcement["cluster_id"])

    def _read(self) -> Optional[Dict[str, Any]]:
        try:
            with open(self._path, encoding="utf-8") as file:
                found = json.load(file)
            return found if isinstance(found, dict) else None
        except (FileNotFoundError, ValueError, RecursionError):
            return None

    def received(self, channel: Channel, message: Message) -> None:
        channel.send(**self.answer(message))

    def answer(self, request: Message) -> Message:
        """The answer to a request, whatever that is: who asks must not end what others have here."""
        try:
            return self._take(request)
        except Exception as error:
            traceback.print_exc()
            return {"ok": False, "error": "refused", "message": "%s: %s" % (type(error).__name__, error)}

    def _take(self, request: Message) -> Message:
        op = request.get("op")
        if op in ("run", "withdraw"):
            problem = _problem(request)
            if problem is not None:
                return {"ok": False, "error": "refused", "message": "the request cannot be understood: %s" % problem}
            if request["request_id"] in self._seen or _has_started(request["run_dir"]):
                return {"ok": False, "error": "duplicate"}
            return self._admit(request) if op == "run" else self._withdraw(request)
        if op == "describe":
            return {**self._supervisor.describe(), "ok": True}
        if op == "stop":
            self._supervisor.close(_ENDED)
            return {"ok": True}
        if op == "yield":
            if not self._supervisor.spec.yield_when_idle:
                return {"ok": False, "error": "kept", "message": "SessionConfig.yield_when_idle is False"}
            return {"ok": True} if self._supervisor.lifetime.give_way() else {"ok": False, "error": "busy"}
        return {"ok": False, "error": "unknown request", "message": "this session does not know %.80r" % (op,)}

    def _withdraw(self, request: Message) -> Message:
        """Never run a payload that has not been accepted: its request may have been delayed, and arrive later."""
        self._withdrawn.add(request["request_id"])
        return {"ok": False, "error": "withdrawn", "message": "the request was withdrawn"}

    def _admit(self, request: Message) -> Message:
        request_id, run_dir = request["request_id"], request["run_dir"]
        if request_id in self._withdrawn:
            return self._withdraw(request)
        if self._supervisor.closing is not None:
            return {"ok": False, "error": "closing", "message": self._supervisor.closing}
        missing = [path for path in request.get("needs", []) if not _use(path)]
        if missing:
            return {"ok": False, "error": "missing", "missing": missing}
        if request.get("secrets") and not _use(os.path.join(run_dir, SECRETS)):
            return {"ok": False, "error": "missing-secrets", "message": "%s has no %s" % (run_dir, SECRETS)}
        try:
            lay_out(run_dir, request.get("files", {}))
            serve_run_dir(self._supervisor, run_dir)
        except Closing as error:
            return {"ok": False, "error": "closing", "message": str(error)}
        except Misfit as error:
            return {"ok": False, "error": "misfit", "message": str(error)}
        except SpecError as error:
            return {"ok": False, "error": "refused", "message": str(error)}
        except OSError as error:
            return {"ok": False, "error": "record", "message": "the run directory %s cannot be written: %s" % (run_dir, error)}
        self._seen.add(request_id)
        return {"ok": True, "cluster_id": self._supervisor.spec.cluster_id}


def _problem(request: Message) -> Optional[str]:
    """What is wrong with a request to run something, or None."""
    texts = [request.get("request_id"), request.get("run_dir")]
    if not all(isinstance(text, str) and text and is_passable(text) for text in texts):
        return "request_id and run_dir must be text"
    if not os.path.isabs(request["run_dir"]):
        return "run_dir must be absolute"
    files, needs = request.get("files", {}), request.get("needs", [])
    if not isinstance(files, dict) or not all(isinstance(text, str) and _is_text(name, text) for name, text in files.items()):
        return "files must be texts by name"
    if not isinstance(needs, list) or not all(isinstance(path, str) and is_passable(path) for path in needs):
        return "needs must be a list of paths"
    if not isinstance(request.get("secrets", False), bool):
        return "secrets must be true or false"
    return None


def _is_text(name: str, text: str) -> bool:
    """Whether a file can have this name, less its directories, and UTF-8 this text."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return is_passable(name) and os.path.basename(name) not in ("", ".", "..")


def lay_out(run_dir: str, files: Mapping[str, str]) -> None:
    """Make a run directory for this user alone.

    Raises:
        OSError: it cannot be written.
    """
    os.makedirs(run_dir, 0o700, exist_ok=True)
    for name, text in files.items():
        fd = os.open(os.path.join(run_dir, os.path.basename(name)), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(text.encode("utf-8"))


def _has_started(run_dir: str) -> bool:
    """Whether some session has accepted this payload: the start stands in its journal."""
    with contextlib.suppress(OSError):
        return os.path.getsize(os.path.join(run_dir, JOURNAL)) > 0
    return False


def _use(path: str) -> bool:
    """Whether something is there that this user owns; it is marked as in use then.

    The directory is read, not the name looked up: on NFS a name that was missing once stays so for up to a minute.
    """
    try:
        found = os.path.basename(path) in os.listdir(os.path.dirname(path)) and os.lstat(path).st_uid == os.geteuid()
    except OSError:
        return False
    if found:
        with contextlib.suppress(OSError):
            os.utime(path)
    return found
