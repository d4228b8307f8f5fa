"""Receives requests from Dagster processes: from the file `cancel.json` of a payload, and for sessions over TCP.

A request to run a payload has an id. So a client whose answer was lost may repeat the request, to this session or a later
session, and the payload still runs only once. A session writes the address and the key of its TCP server into a file, its
announcement.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import sys
from dataclasses import asdict, replace
from typing import Any, Callable, Dict, List, Mapping, Optional, Set

from ..node.allocation import Allocation
from ..payload.payload import Payload
from ..protocol.messages import End, EndReason, Operation, Refusal, answer_safely, refuse
from ..protocol.record import CANCEL, JOURNAL, SESSION, write_atomically
from ..protocol.rpc import Channel, Listener, Message, RpcServer
from ..protocol.spec import PROTOCOL_VERSION, Announcement, SpecError
from .facts import describe
from .queue import Closing, Misfit
from .supervisor import Supervisor

_CANCEL_POLL = 0.5  # Seconds between two reads of the file in a run directory that may cancel its payload.
_ANNOUNCEMENT_POLL = 1.0  # Seconds between two checks that the session's announcement file is there and up to date.

# The end of a payload whose Dagster process has closed its end of the pipe, or has released its lock.
ORPHANED = End(EndReason.CANCEL, "the Dagster process that asked for the run is gone")
CANCELLED = End(EndReason.CANCEL, "cancelled from Dagster")
_STOPPED = End(EndReason.CANCEL, "its session was stopped, by `rayslurm session stop` or `cleanup_cluster`")


def serve_run_dir(
    supervisor: Supervisor, run_dir: str, environ: Optional[Dict[str, str]] = None, orphaned: Callable[[], bool] = lambda: False
) -> Payload:
    """Queue the payload of a run directory and return it; from now on watch its file `cancel.json`, and end it on request.

    The payload's environment is based on `environ`; None stands for the environment of this process. The payload is also ended
    once `orphaned` returns True, which means that its Dagster process is gone. Raises what `Supervisor.submit` raises.
    """
    payload = supervisor.submit(run_dir, environ)
    handled = [b""]

    def poll() -> None:
        with contextlib.suppress(OSError):  # The file cannot be read now, or is just being replaced.
            with open(os.path.join(run_dir, CANCEL), "rb") as file:
                text = file.read()
            if text != handled[0]:
                handled[0] = text
                _cancel(payload, text)
        if not payload.ended:
            if orphaned():
                payload.end_early(ORPHANED)
            supervisor.loop.call_later(_CANCEL_POLL, poll)

    supervisor.loop.call_later(_CANCEL_POLL, poll)
    return payload


def parent_is_gone() -> bool:
    """Whether the parent process has ended, or has closed its end of the pipe that is this process's standard input.

    Does not block.
    """
    return bool(select.select([0], [], [], 0.0)[0])


def _is_free(lock: str) -> bool:
    """Whether no process holds an exclusive lock on the file `lock`; also False if the file cannot be read.

    Does not keep a lock.
    """
    with contextlib.suppress(OSError), open(lock, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return True
    return False


def _cancel(payload: Payload, text: bytes) -> None:
    """End a payload if `text`, the content of its file `cancel.json`, is a request such as `{"op": "cancel", "now": true}`.

    With a true `now`, the payload gets no grace period. Any other text is ignored, because the payload can write to the file too.
    """
    try:
        request = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError):
        return
    if isinstance(request, dict) and request.get("op") == Operation.CANCEL:
        payload.end_early(CANCELLED, grace=0 if request.get("now") else None)


class RequestServer(Listener):
    """Serves the clients of a session over TCP: runs, withdraws and describes payloads, and ends the session.

    The server keeps the announcement, the file `session.json` in `session_dir`, up to date: its hosts, port and key let clients
    connect. `key` is the secret, in hex. The server listens on the first free port of `ports`, or on any port if none of these is
    free. Without an `allocation` (no Slurm), only this machine can connect.
    """

    def __init__(
        self, supervisor: Supervisor, session_dir: str, key: str, ports: List[int], allocation: Optional[Allocation] = None
    ) -> None:
        self._supervisor = supervisor
        self._path = os.path.join(session_dir, SESSION)
        place = os.stat(session_dir)
        self._directory = place.st_dev, place.st_ino
        self._closed = False
        self._accepted_ids: Set[str] = set()
        self._withdrawn: Set[str] = set()
        # 0 lets the kernel choose a port. A firewall may close that port to other nodes, but clients on this node reach it.
        self._server = RpcServer(supervisor.loop, key, [*ports, 0], self, loopback=allocation is None)
        hosts = ["127.0.0.1"] if allocation is None else [allocation.nodes[0], *allocation.head_addresses]
        self._announcement = Announcement(
            cluster_id=supervisor.spec.cluster_id,
            job_id=allocation.job_id if allocation is not None else str(os.getpid()),
            hosts=list(dict.fromkeys(hosts)),
            port=self._server.port,
            key=key,
            protocol=PROTOCOL_VERSION,
            closing=None,
            hostname=supervisor.machine.hostname,
            heterogeneous=allocation is not None and len(allocation.components) > 1,
            pid=os.getpid(),
        )
        self._announce({})
        supervisor.on_ready = self._update  # Whoever sees the end of a payload can then also reach the cluster.
        self._poll()

    def close(self) -> None:
        """Accept no more requests, and write into the announcement that the session has ended.

        An OSError of the file is ignored.
        """
        self._server.close()
        self._closed = True
        with contextlib.suppress(OSError):  # Clients also learn the end of the session from Slurm or the kernel.
            self._check_directory()
            self._announce(self._read(), self._announcement.closing or "it has ended")

    def _poll(self) -> None:
        """Update the announcement file, and schedule the next call of this method in the event loop."""
        self._update()
        self._supervisor.loop.call_later(_ANNOUNCEMENT_POLL, self._poll)

    def _update(self) -> None:
        """Update the announcement file.

        If the session's directory is gone or another one stands in its place, or if the file belongs to another session, accept
        no more payloads.
        """
        try:
            self._check_directory()
            self._announce(self._read())
        except FileNotFoundError:
            self._supervisor.drain("nobody can find it: %s is gone" % os.path.dirname(self._path))
        except OSError:
            pass  # A full disk, or a file system that does not answer: the next poll may succeed.

    def _check_directory(self) -> None:
        """Raise FileNotFoundError if the session's directory is gone, or if a new one with the same name stands in its place.

        A new directory is that of the next session, whose announcement this session must not write.
        """
        place = os.stat(os.path.dirname(self._path))
        if (place.st_dev, place.st_ino) != self._directory:
            raise FileNotFoundError

    def _announce(self, found: Dict[str, Any], closing: Optional[str] = None) -> None:
        """Update the announcement, and write it to its file if it differs from `found`, the present content of the file.

        If `found` belongs to another session, accept no more payloads, and leave the file as it is. `closing` says why the
        session accepts no more payloads. If the supervisor knows a reason, the announcement has the supervisor's reason instead.
        """
        closing, served = self._supervisor.queue.closing or closing, self._supervisor.queue.served
        if closing != self._announcement.closing:
            said = "rayslurm: the session takes no more payloads, %d were here: %s" % (served, closing)
            print(said, file=sys.stderr, flush=True)
        idle = served > 0 and not self._supervisor.payloads
        cluster = self._supervisor.cluster
        up = cluster is not None and cluster.ready and not self._closed
        access = self._supervisor.relays.access(cluster) if up and cluster is not None else None
        unhealthy = list(self._supervisor.unhealthy)
        self._announcement = said_now = replace(
            self._announcement, closing=closing, served=served, idle=idle, unhealthy=unhealthy, access=access
        )
        if found.get("cluster_id", said_now.cluster_id) != said_now.cluster_id:
            self._supervisor.drain("another session stands in its place in %s" % os.path.dirname(self._path))
        elif found != asdict(said_now):
            write_atomically(self._path, json.dumps(asdict(said_now)).encode("utf-8"))

    def _read(self) -> Dict[str, Any]:
        """Returns the fields of the announcement in the file; an empty dict if the file is missing or damaged."""
        with contextlib.suppress(FileNotFoundError, ValueError, RecursionError):
            with open(self._path, encoding="utf-8") as file:
                found = json.load(file)
            return found if isinstance(found, dict) else {}
        return {}

    def received(self, channel: Channel, message: Message) -> None:
        """Carry out the request `message` of a client, and send the answer on `channel`; an exception becomes a refusal."""
        channel.send(**answer_safely(lambda: self._answer(message)))

    def _answer(self, request: Message) -> Message:
        op = request.get("op")
        if op in (Operation.RUN, Operation.WITHDRAW):
            request_id = request["request_id"]
            if request_id in self._accepted_ids or _was_accepted(request["run_dir"]):
                return refuse(Refusal.DUPLICATE)
            if op == Operation.WITHDRAW:
                self._withdrawn.add(request_id)
            if request_id in self._withdrawn:  # A `run` request may arrive later than the one that withdrew it.
                return refuse(Refusal.WITHDRAWN, "the request was withdrawn")
            return self._admit(request)
        if op == Operation.DESCRIBE:
            return {**describe(self._supervisor), "ok": True}
        if op == Operation.STOP:
            grace = max((each.spec.grace_period for each in self._supervisor.payloads), default=0.0)
            self._supervisor.close(_STOPPED)
            return {"ok": True, "grace_period": grace}
        if op == Operation.YIELD:
            if not self._supervisor.spec.yield_when_idle:
                return refuse(Refusal.KEPT, "SessionConfig.yield_when_idle is False")
            return {"ok": True} if self._supervisor.give_way() else refuse(Refusal.BUSY)
        return refuse(Refusal.UNKNOWN, "this session does not know %.80r" % (op,))

    def _admit(self, request: Message) -> Message:
        run_dir = request["run_dir"]
        if self._supervisor.queue.closing is not None:
            return refuse(Refusal.CLOSING, self._supervisor.queue.closing, unhealthy=self._supervisor.unhealthy)
        missing = [path for path in request["needs"] if not _use(path)]
        if missing:
            return refuse(Refusal.MISSING, missing=missing)
        try:
            lay_out(run_dir, request["files"])
            lock = request.get("lock")  # A file that the Dagster process has locked as long as it follows the payload.
            serve_run_dir(self._supervisor, run_dir, request.get("environ"), lambda: lock is not None and _is_free(lock))
        except Closing as error:
            return refuse(Refusal.CLOSING, error)
        except Misfit as error:
            return refuse(Refusal.MISFIT, error)
        except SpecError as error:
            return refuse(Refusal.REFUSED, error)
        except OSError as error:
            return refuse(Refusal.RECORD, "the run directory %s cannot be written: %s" % (run_dir, error))
        self._accepted_ids.add(request["request_id"])
        return {"ok": True, "cluster_id": self._supervisor.spec.cluster_id}


def lay_out(run_dir: str, files: Mapping[str, str]) -> None:
    """Create a run directory that only this user can read, and write `files` into it: the text of each file by its name.

    A directory part of a name is ignored. The directory may exist; its files of the same names are overwritten. Raises OSError if
    a file cannot be written.
    """
    os.makedirs(run_dir, 0o700, exist_ok=True)
    for name, text in files.items():
        fd = os.open(os.path.join(run_dir, os.path.basename(name)), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(text.encode("utf-8"))


def _was_accepted(run_dir: str) -> bool:
    """Whether this or another session has already accepted the payload of `run_dir`.

    The runtime that accepts a payload writes into its journal, so the result is True if the journal is not empty. It is False
    if the journal cannot be read.
    """
    with contextlib.suppress(OSError):
        return os.path.getsize(os.path.join(run_dir, JOURNAL)) > 0
    return False


def _use(path: str) -> bool:
    """Returns whether the file `path` exists and belongs to this user.

    If so, sets its modification time to now, so that cleanup keeps the file for the payload that needs it.
    """
    try:  # An NFS client remembers for up to a minute that a name was missing, so the directory is listed.
        found = os.path.basename(path) in os.listdir(os.path.dirname(path)) and os.lstat(path).st_uid == os.geteuid()
    except OSError:
        return False
    if found:
        with contextlib.suppress(OSError):
            os.utime(path)
    return found
