"""Ask idle sessions to end, so that a waiting job of the same user gets their nodes."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...runtime.protocol.messages import Operation, Refusal
from ...runtime.protocol.record import SESSION
from ...slurm.shared_queue import QueueRow, QueueSnapshot
from ...ssh.base import Connection
from ..slurm_job import MakeWay
from .client import parse_announcement
from .listing import Generation, ask_session, list_generations

_WAITS_FOR_NODES = ("Resources", "Priority")
"""Slurm's pending reasons for a job that starts as soon as other jobs end."""
_SESSION_JOBS = "rayslurm-session-"
"""Prefix of the job names of sessions, see `job_name`."""
_INTERVAL = 3.0
"""Seconds between two checks for an idle session; each check is one small read per session."""
_START_TIMEOUT = 20.0
"""Seconds in which the waiting job may start after one session has yielded, before the next session is asked."""
_MOST_BYTES = 1024 * 1024
"""Most bytes of an announcement that are read."""


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

    Args:
        connection: reaches the sessions.
        base: the base directory on the cluster, absolute.
        log: the log of the step whose job waits.
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
        """Ask one idle session to end if it holds nodes for which the job waits; to be called again while the job waits.

        Args:
            snapshot: the queue.
            waiting: the rows of the job, one for each component.

        Raises:
            OSError: the cluster, or a session, cannot be reached.
        """
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
        announcement = parse_announcement(self._connection.read(path, 0, _MOST_BYTES))
        return announcement is not None and announcement.idle and announcement.closing is None

    def _yields(self, holder: _Holder) -> bool:
        """Ask a session to yield, and return whether it does; it refuses if another payload has come meanwhile."""
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
