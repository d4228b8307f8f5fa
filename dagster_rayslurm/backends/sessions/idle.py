"""Idle sessions that hold nodes for which another job of their user waits: they are named, and asked to end."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...runtime.protocol.record import SESSION
from ...slurm.snapshot import QueueRow, QueueSnapshot
from ...ssh.base import Connection
from .client import parse_announcement
from .listing import Generation, ask_session, list_generations

_WAITS_FOR_NODES = ("Resources", "Priority")
"""Slurm's reasons of a job that starts as soon as others end."""
_SESSION_JOBS = "rayslurm-session-"
"""What the names of sessions' jobs begin with, see `job_name`."""
_INTERVAL = 3.0
"""Seconds between two looks at whether a session is idle; one small read for each."""
_BETWEEN = 20.0
"""Seconds in which the waiting job may start, after one session has ended for it, before another one is asked."""
_MOST_BYTES = 1024 * 1024


@dataclass(frozen=True)
class _Holder:
    """A session that holds nodes of a partition that a job waits for."""

    generation: Generation
    nodes: str


class IdleSessions:
    """Sessions of the same user and base directory that may be in the way of a waiting job.

    Nothing is asked of Slurm: which sessions hold nodes stands in the shared snapshot of the queue.

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
        self._holders_of = 0.0
        """When the snapshot began by which the holders are known."""
        self._next_look = 0.0
        self._kept: set[int | None] = set()
        """Jobs of sessions that do not give way."""

    def make_way(self, snapshot: QueueSnapshot, waiting: Sequence[QueueRow]) -> None:
        """Ask an idle session to end that holds nodes for which a job waits; to be called again while it does.

        Args:
            snapshot: the queue.
            waiting: the rows of the job, or of its components.

        Raises:
            OSError: the cluster, or a session, cannot be reached.
        """
        now = time.monotonic()
        wanted = {name for row in waiting if row.reason in _WAITS_FOR_NODES for name in row.partition.split(",")}
        if not wanted or now < self._next_look:
            return
        self._next_look = now + _INTERVAL
        if snapshot.began != self._holders_of:
            self._holders, self._holders_of = self._find(snapshot, wanted), snapshot.began
        for holder in self._holders:
            if holder.generation.job_id not in self._kept and self._is_idle(holder) and self._ends(holder):
                self._next_look = now + _BETWEEN
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
        said = parse_announcement(self._connection.read(path, 0, _MOST_BYTES))
        return said is not None and said.idle and said.closing is None

    def _ends(self, holder: _Holder) -> bool:
        """Ask a session to end; it decides, as another payload may have come meanwhile."""
        key = holder.generation.key
        answer = ask_session(self._connection, holder.generation, {"op": "yield"})
        if answer.get("ok"):
            self._log.info(f"[rayslurm] session {key} was idle and held {holder.nodes}: it ends, so that this job can start")
            return True
        if answer.get("error") != "busy":
            self._kept.add(holder.generation.job_id)
            self._log.warning(
                f"[rayslurm] session {key} is idle and holds {holder.nodes}, while this job waits; "
                f"`rayslurm session stop {key}` ends it"
            )
        return False
