"""The server over which Dagster processes use a session in a Slurm allocation: they send payloads to run, and ask for its state.

A payload belongs to the allocation, so it goes on when the client's connection ends. Each request has the id of its payload,
so a client whose answer was lost may repeat the request, to this session or a later one, and the payload still runs once.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any, Dict, List, Mapping, Optional, Set

from ..node.allocation import Allocation
from ..protocol.end import End, EndReason
from ..protocol.messages import Operation, Refusal, answer_safely, refuse
from ..protocol.record import JOURNAL, SECRETS, SESSION, write_atomically
from ..protocol.rpc import Channel, ChannelListener, Message, RpcServer
from ..protocol.spec import PROTOCOL_VERSION, SpecError, is_passable
from .local_server import serve_run_dir
from .queue import Closing, Misfit
from .supervisor import Supervisor

_POLL_INTERVAL = 1.0
"""Seconds between two checks that the session's announcement file is there and up to date."""

_ENDED = End(EndReason.CANCEL, "its session was ended by cleanup_cluster")
"""How payloads end when a client asks the session to stop."""


class SessionServer(ChannelListener):
    """Serves clients of a session in a Slurm allocation: runs, withdraws and describes payloads, and ends the session.

    The server writes its host names, port and key to `session.json` in the session's directory (the announcement), where
    clients find them.

    Args:
        supervisor: runs the payloads.
        session_dir: the directory for the announcement.
        allocation: the Slurm allocation in which the session runs.
        key: the secret that clients must know, hexadecimal.
        ports: candidates for the port, in order; if none of them is free, the kernel chooses one.
    """

    def __init__(self, supervisor: Supervisor, session_dir: str, allocation: Allocation, key: str, ports: List[int]) -> None:
        self._supervisor = supervisor
        self._path = os.path.join(session_dir, SESSION)
        self._accepted_ids: Set[str] = set()
        self._withdrawn: Set[str] = set()
        # 0 lets the kernel choose a port. A firewall may close that port to other nodes, but clients on this node reach it.
        self._server = RpcServer(supervisor.loop, key, [*ports, 0], self)
        self._announcement: Dict[str, Any] = {
            "protocol": PROTOCOL_VERSION,
            "cluster_id": supervisor.spec.cluster_id,
            "job_id": allocation.job_id,
            "hosts": list(dict.fromkeys([allocation.nodes[0], *allocation.head_addresses])),
            "port": self._server.port,
            "key": key,
            "pid": os.getpid(),
            "hostname": supervisor.machine.hostname,
            "heterogeneous": len(allocation.components) > 1,
            "closing": None,
            "served": 0,
            "idle": False,
        }
        self._announce()
        self._poll()

    def close(self) -> None:
        """Take no more requests, and say so in the announcement, unless another session has announced itself there since."""
        self._server.close()
        self._update(self._supervisor.closing or self._announcement["closing"] or "it has ended")
        with contextlib.suppress(OSError):  # Clients also learn from Slurm that the job has ended.
            if not self._is_displaced():
                self._announce()

    def _update(self, closing: Optional[str]) -> bool:
        """Update the announcement in memory, and log why the session closes. Returns whether the announcement has changed."""
        before = dict(self._announcement)
        self._announcement.update(closing=closing, served=self._supervisor.queue.served, idle=self._is_idle())
        if closing != before["closing"]:
            said = "rayslurm: the session takes no more payloads, %d were here: %s" % (self._supervisor.queue.served, closing)
            print(said, file=sys.stderr, flush=True)
        return self._announcement != before

    def _is_idle(self) -> bool:
        return self._supervisor.queue.served > 0 and not self._supervisor.payloads

    def _announce(self) -> None:
        write_atomically(self._path, json.dumps(self._announcement).encode("utf-8"))

    def _poll(self) -> None:
        """Keep the announcement file up to date; take no more payloads if it is gone or belongs to another session."""
        changed = self._update(self._supervisor.closing)
        try:
            if self._is_displaced():
                self._supervisor.drain("another session stands in its place in %s" % os.path.dirname(self._path))
            elif changed or self._read() != self._announcement:
                self._announce()
        except FileNotFoundError:
            self._supervisor.drain("nobody can find it: %s is gone" % os.path.dirname(self._path))
        except OSError:
            pass  # A full disk, or a file system that does not answer: the next poll may succeed.
        self._supervisor.loop.call_later(_POLL_INTERVAL, self._poll)

    def _is_displaced(self) -> bool:
        """Whether another session has announced itself in this directory, as may happen after a user removed directories."""
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
        """Called when a client sent a request: answer it."""
        channel.send(**self.answer(message))

    def answer(self, request: Message) -> Message:
        """The answer to a client's request; a refusal if the request makes no sense."""
        return dict(answer_safely(lambda: self._answer(request)))

    def _answer(self, request: Message) -> Message:
        op = request.get("op")
        if op in (Operation.RUN, Operation.WITHDRAW):
            problem = _problem(request)
            if problem is not None:
                return refuse(Refusal.REFUSED, "the request cannot be understood: %s" % problem)
            if request["request_id"] in self._accepted_ids or _has_started(request["run_dir"]):
                return refuse(Refusal.DUPLICATE)
            return self._admit(request) if op == Operation.RUN else self._withdraw(request)
        if op == Operation.DESCRIBE:
            return {**self._supervisor.describe(), "ok": True}
        if op == Operation.STOP:
            self._supervisor.close(_ENDED)
            return {"ok": True}
        if op == Operation.YIELD:
            if not self._supervisor.spec.yield_when_idle:
                return refuse(Refusal.KEPT, "SessionConfig.yield_when_idle is False")
            return {"ok": True} if self._supervisor.give_way() else refuse(Refusal.BUSY)
        return refuse(Refusal.UNKNOWN, "this session does not know %.80r" % (op,))

    def _withdraw(self, request: Message) -> Message:
        """Promise the client that its payload will never run here, even if a delayed `run` request for it arrives later."""
        self._withdrawn.add(request["request_id"])
        return refuse(Refusal.WITHDRAWN, "the request was withdrawn")

    def _admit(self, request: Message) -> Message:
        request_id, run_dir = request["request_id"], request["run_dir"]
        if request_id in self._withdrawn:
            return self._withdraw(request)
        if self._supervisor.closing is not None:
            return refuse(Refusal.CLOSING, self._supervisor.closing)
        missing = [path for path in request.get("needs", []) if not _use(path)]
        if missing:
            return refuse(Refusal.MISSING, missing=missing)
        if request.get("secrets") and not _use(os.path.join(run_dir, SECRETS)):
            return refuse(Refusal.MISSING_SECRETS, "%s has no %s" % (run_dir, SECRETS))
        try:
            lay_out(run_dir, request.get("files", {}))
            serve_run_dir(self._supervisor, run_dir)
        except Closing as error:
            return refuse(Refusal.CLOSING, error)
        except Misfit as error:
            return refuse(Refusal.MISFIT, error)
        except SpecError as error:
            return refuse(Refusal.REFUSED, error)
        except OSError as error:
            return refuse(Refusal.RECORD, "the run directory %s cannot be written: %s" % (run_dir, error))
        self._accepted_ids.add(request_id)
        return {"ok": True, "cluster_id": self._supervisor.spec.cluster_id}


def _problem(request: Message) -> Optional[str]:
    """What is wrong with the fields of a `run` or `withdraw` request, as a sentence; None if they are valid."""
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
    """Whether the last part of `name` can be a file name, and `text` can be written in UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return is_passable(name) and os.path.basename(name) not in ("", ".", "..")


def lay_out(run_dir: str, files: Mapping[str, str]) -> None:
    """Make a run directory that only this user can read, with these files.

    Args:
        files: texts by file name; directories in a name are ignored.

    Raises:
        OSError: the directory or a file cannot be written.
    """
    os.makedirs(run_dir, 0o700, exist_ok=True)
    for name, text in files.items():
        fd = os.open(os.path.join(run_dir, os.path.basename(name)), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(text.encode("utf-8"))


def _has_started(run_dir: str) -> bool:
    """Whether a session has accepted this payload before; if so, its journal is not empty."""
    with contextlib.suppress(OSError):
        return os.path.getsize(os.path.join(run_dir, JOURNAL)) > 0
    return False


def _use(path: str) -> bool:
    """Whether a file exists and belongs to this user; if so, its time is set to now, so that no clean-up removes the file.

    The function lists the directory instead of looking up the name: an NFS client remembers for up to a minute that a name
    was missing.
    """
    try:
        found = os.path.basename(path) in os.listdir(os.path.dirname(path)) and os.lstat(path).st_uid == os.geteuid()
    except OSError:
        return False
    if found:
        with contextlib.suppress(OSError):
            os.utime(path)
    return found
