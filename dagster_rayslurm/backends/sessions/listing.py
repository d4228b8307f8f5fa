"""List the sessions of a user below a base directory, and end them: on demand, with a Dagster run, or when idle."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ...edge import sessions
from ...edge.sessions import ABANDONED, CREATOR, JOB_ID, MANIFEST
from ...errors import FailureKind, StartError
from ...runtime.protocol.messages import Operation, Refusal
from ...runtime.protocol.record import EXIT, SESSION
from ...slurm.script import parse_exit
from ...slurm.shared_queue import QueueRow, QueueSnapshot, fetch_queue
from ...slurm.states import TERMINAL, WAITING
from ...slurm.submit import cancel_named, wait_until_gone
from ...ssh.base import Connection
from ..slurm_job import MakeWay
from .matching import run_suffix
from .registry import MOST_BYTES, Announcement, check_owner, parse_announcement, parse_manifest
from .request import AnswerLost, Unreachable, send_request

_TIMEOUT = 120.0
"""Seconds for the command that lists sessions."""
_END_TIMEOUT = 45.0
"""Seconds in which a session ends after a stop request; its payloads and Ray have grace periods. Then its job is cancelled."""

_WAITS_FOR_NODES = ("Resources", "Priority")
"""Slurm's pending reasons for a job that starts as soon as other jobs end."""
_SESSION_JOBS = "rayslurm-session-"
"""Prefix of the job names of sessions, see `job_name`."""
_INTERVAL = 3.0
"""Seconds between two checks for an idle session; each check is one small read per session."""
_START_TIMEOUT = 20.0
"""Seconds in which the waiting job may start after one session has yielded, before the next session is asked."""
_log = logging.getLogger("rayslurm")


class SessionState(str, Enum):
    """The state of a session, derived from its files, Slurm's queue, and the session's own description."""

    PENDING = "pending"
    STARTING = "starting"
    UP = "up"
    """The session announces itself; only its own description says whether it is ready."""
    READY = "ready"
    DRAINING = "draining"
    """The session runs its payloads to their end, and accepts no more."""
    SILENT = "silent"
    """The session announces itself but does not answer."""
    ENDED = "ended"
    DEAD = "dead"
    """The session's job ended without withdrawing the announcement."""

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Generation:
    """One allocation of a session, as its directory shows it; what is not written yet is None or empty.

    Attributes:
        key: the name of the session's directory.
        exit_code: exit code of the job's script; None before its end.
        ask_command: the command that hands a request to the session from within its allocation; the directory is appended.
        components: names of the allocation's components, the head's first; empty where all nodes are alike.
    """

    key: str
    number: int
    directory: str
    job_id: int | None
    job_name: str
    exit_code: int | None
    announcement: Announcement | None
    ask_command: tuple[str, ...]
    components: tuple[str, ...] = ()


def list_generations(connection: Connection, base: str, key: str = "*") -> list[Generation]:
    """All generations of sessions below a base directory, sorted by session and number; one command.

    `key` is the name of a session's directory, or a pattern of names. Raises OSError if the cluster cannot be reached, or the
    directory is another user's.
    """
    directory = os.path.join(base, "sessions")
    try:
        check_owner(connection, base, directory)
    except StartError as error:
        raise PermissionError(str(error)) from None
    found = connection.call(sessions.listing, directory, key, repeat=True, timeout=_TIMEOUT)
    generations = [_generation(base, *os.path.split(which), files) for which, files in found.items()]
    return sorted(generations, key=lambda each: (each.key, each.number))


def _generation(base: str, key: str, number: str, files: Mapping[str, str]) -> Generation:
    text = files[JOB_ID].strip()
    job_id = int(text) if text.isascii() and text.isdecimal() and len(text) < 19 else None
    announcement = parse_announcement(files[SESSION])
    if job_id is None and announcement is not None:
        job_id = int(announcement.job_id)
    manifest = parse_manifest(files[MANIFEST])
    return Generation(
        key=key,
        number=int(number),
        directory=os.path.join(base, "sessions", key, number),
        job_id=job_id,
        job_name=files[CREATOR].strip(),
        exit_code=None if job_id is None else parse_exit(files[EXIT].encode(), job_id),
        announcement=announcement,
        ask_command=manifest.ask_command if manifest is not None else (),
        components=tuple(manifest.capacity.components) if manifest is not None else (),
    )


def job_of(generation: Generation, snapshot: QueueSnapshot) -> QueueRow | None:
    """The row of a generation's job (its first component) in the queue; None if the job has ended or is not in the queue."""
    if generation.exit_code is not None:
        return None
    if generation.job_id is not None:
        row = snapshot.job(generation.job_id)
    else:
        named = [row for row in snapshot.rows if row.name == generation.job_name and row.is_leader]
        row = named[-1] if generation.job_name and named else None
    return None if row is None or row.state in TERMINAL else row


def state_of(generation: Generation, row: QueueRow | None) -> SessionState:
    """The state of a session, derived from its files and the row of its job in the queue (see `job_of`)."""
    announcement = generation.announcement
    if row is None:
        dead = generation.exit_code is None and announcement is not None and announcement.closing is None
        return SessionState.DEAD if dead else SessionState.ENDED
    if row.state in WAITING:
        return SessionState.PENDING
    if announcement is None:
        return SessionState.STARTING
    return SessionState.DRAINING if announcement.closing else SessionState.UP


def ask_session(connection: Connection, generation: Generation, request: Mapping[str, object]) -> dict[str, object]:
    """Send a request to a session and return the session's answer; raises what `send_request` raises."""
    if generation.announcement is None:
        raise Unreachable(f"the session {generation.key} does not say where it is")
    command, directory = generation.ask_command, generation.directory
    return send_request(connection, generation.announcement, request, "auto" if command else "direct", directory, command)


def stop_sessions_of_run(connection: Connection, base: str, run_id: str) -> None:
    """Ask the sessions that belong to a Dagster run to end; one that cannot be asked ends by its idle timeout."""
    for each in list_generations(connection, base, f"*{run_suffix(run_id)}"):
        if each.announcement is not None and each.announcement.closing is None and each.exit_code is None:
            with contextlib.suppress(Unreachable, AnswerLost):
                ask_session(connection, each, {"op": Operation.STOP})


def end_generations(connection: Connection, generations: Iterable[Generation]) -> bool:
    """End the given generations and wait until Slurm confirms their end; False if none was alive.

    Raises:
        StartError: Slurm does not confirm the end.
        OSError: the cluster or Slurm does not answer.
    """
    snapshot = fetch_queue(connection)
    ended = False
    for generation in generations:
        row = job_of(generation, snapshot)
        if row is not None:
            _end(connection, generation, row)
            ended = True
        elif generation.job_id is None and generation.job_name:
            # The submission was cut off or is under way. If it succeeds, the creator finds this mark and cancels the job.
            connection.make_dir(os.path.join(generation.directory, ABANDONED))
            cancel_named(connection, generation.job_name, _log)
    return ended


def _end(connection: Connection, generation: Generation, row: QueueRow) -> None:
    stopping = False
    if generation.announcement is not None:
        with contextlib.suppress(Unreachable, AnswerLost):
            stopping = bool(ask_session(connection, generation, {"op": Operation.STOP}).get("ok"))
    if not wait_until_gone(connection, row.job_id, _END_TIMEOUT if stopping else 0.0):
        raise StartError(FailureKind.RUNTIME, f"Slurm does not confirm the end of job {row.job_id}; run `scancel {row.job_id}`")


@dataclass(frozen=True)
class _Holder:
    """A running session and the nodes that it holds."""

    generation: Generation
    nodes: str


def make_way_for(connection: Connection, base: str, log: Any) -> MakeWay:
    """The function that ends idle sessions for one waiting job, see `IdleSessions`."""
    return IdleSessions(connection, base, log).make_way


class IdleSessions:
    """The sessions of the same user and base directory that can give up their nodes to one waiting job.

    The shared snapshot of the queue tells which sessions hold nodes, so no request goes to Slurm.
    """

    def __init__(self, connection: Connection, base: str, log: Any) -> None:
        self._connection = connection
        self._base = base
        self._log = log
        self._holders: list[_Holder] = []
        self._snapshot_began = 0.0
        """When the snapshot of the queue began from which `_holders` was made."""
        self._next_check = 0.0
        self._keep: set[int | None] = set()
        """Job ids of sessions that have refused to yield."""

    def make_way(self, snapshot: QueueSnapshot, waiting: Sequence[QueueRow]) -> None:
        """Ask one idle session to end if it holds nodes for which the job waits; to be called again while the job waits."""
        now = time.monotonic()
        wanted = {name for row in waiting if row.reason in _WAITS_FOR_NODES for name in row.partition.split(",")}
        if not wanted or now < self._next_check:
            return
        self._next_check = now + _INTERVAL
        if snapshot.began != self._snapshot_began:
            self._holders, self._snapshot_began = self._find(snapshot, wanted), snapshot.began
        for holder in self._holders:
            if holder.generation.job_id not in self._keep and self._is_idle(holder) and self._yields(holder):
                self._next_check = now + _START_TIMEOUT
                return

    def _find(self, snapshot: QueueSnapshot, partitions: set[str]) -> list[_Holder]:
        nodes: dict[str, list[str]] = {}
        for row in snapshot.rows:
            if row.name.startswith(_SESSION_JOBS) and row.state == "RUNNING" and row.partition in partitions:
                nodes.setdefault(row.leader_label, []).append(row.nodes)
        if not nodes:
            return []
        found = [each for each in list_generations(self._connection, self._base) if str(each.job_id) in nodes]
        return [_Holder(each, ",".join(nodes[str(each.job_id)])) for each in found if each.announcement is not None]

    def _is_idle(self, holder: _Holder) -> bool:
        path = os.path.join(holder.generation.directory, SESSION)
        announcement = parse_announcement(self._connection.read(path, 0, MOST_BYTES))
        return announcement is not None and announcement.idle and announcement.closing is None

    def _yields(self, holder: _Holder) -> bool:
        """Ask an idle session to end for this job; returns whether it will. It refuses if a payload has come meanwhile."""
        key = holder.generation.key
        answer = ask_session(self._connection, holder.generation, {"op": Operation.YIELD})
        if answer.get("ok"):
            self._log.info(f"[rayslurm] session {key} was idle and held {holder.nodes}: it ends, so that this job can start")
            return True
        if answer.get("error") != Refusal.BUSY:
            self._keep.add(holder.generation.job_id)
            self._log.warning(
                f"[rayslurm] session {key} is idle and holds {holder.nodes}, while this job waits; "
                f"`rayslurm session stop {key}` ends it"
            )
        return False
