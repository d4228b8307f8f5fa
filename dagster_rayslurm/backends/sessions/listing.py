"""Ends sessions: on demand, at the end of a Dagster run, or when a session is idle on nodes that a job waits for."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...edge.sessions import ABANDONED
from ...errors import FailureKind, StartError
from ...runtime.protocol.messages import Operation, Refusal
from ...runtime.protocol.rpc import AnswerLost
from ...slurm.shared_queue import QueueRow, QueueSnapshot, fetch_queue
from ...slurm.submit import end_named, wait_until_gone
from ...ssh.base import Connection
from .matching import run_suffix
from .registry import Generation, list_generations
from .request import Unreachable, grace_period, send_request
from .state import job_of

# Seconds beyond the grace period of its payloads in which a session ends after a stop request. Then its job is cancelled.
_END_MARGIN = 45.0

_WAITS_FOR_NODES = ("Resources", "Priority")  # Slurm's pending reasons for a job that starts as soon as other jobs end.
_SESSION_JOBS = "rayslurm-session-"  # Prefix of the job names of sessions, see `job_name`.
_INTERVAL = 3.0  # Seconds between two checks for an idle session; each check reads the files of all sessions.
# Seconds in which the waiting job may start after one session has yielded, before the next session is asked.
_START_TIMEOUT = 20.0
# Most requests to yield that a session leaves without an answer; the pause before each one is twice as long as the last.
_MOST_UNANSWERED = 6
_STOP = {"op": Operation.STOP}


def stop_sessions_of_run(connection: Connection, base: str, run_id: str) -> None:
    """Ask the sessions that belong to a Dagster run to end; does not wait for their ends.

    A session that does not answer is left out, and ends after its idle timeout. Raises OSError if the cluster is out of reach.
    """
    for each in list_generations(connection, base, f"*{run_suffix(run_id)}"):
        if each.announcement is not None and each.announcement.closing is None and not each.ended:
            with contextlib.suppress(Unreachable, AnswerLost):
                send_request(connection, each, _STOP)


def end_generations(connection: Connection, generations: Iterable[Generation]) -> bool:
    """End the Slurm jobs of generations of sessions, and wait for their ends; returns False if all had ended before.

    A session that answers has the grace period of its payloads, and `_END_MARGIN` seconds, to end by itself. Then, or if it does
    not answer, Slurm cancels its job.

    Raises StartError if Slurm does not confirm the end of a job, and OSError if the cluster is out of reach.
    """
    snapshot = fetch_queue(connection)
    ended = False
    for each in generations:
        row = job_of(each, snapshot)
        if row is not None:
            ended, patience = True, 0.0
            with contextlib.suppress(Unreachable, AnswerLost):
                answer = send_request(connection, each, _STOP) if each.announcement is not None else {}
                patience = grace_period(answer) + _END_MARGIN if answer.get("ok") else 0.0
            if not wait_until_gone(connection, row.job_id, patience):
                sentence = f"Slurm does not confirm the end of job {row.job_id}; run `scancel {row.job_id}`"
                raise StartError(FailureKind.RUNTIME, sentence)
        elif each.job_id is None and each.job_name:
            # The submission was cut off or is under way. If it succeeds, the creator finds this mark and cancels the job.
            ended = ended or not each.abandoned
            connection.make_dir(os.path.join(each.directory, ABANDONED))
            if problem := end_named(connection, each.job_name):
                raise StartError(FailureKind.RUNTIME, problem)
    return ended


@dataclass(eq=False)
class IdleSessions:
    """Asks idle sessions to end if a waiting Slurm job of the same user could use their nodes.

    A session is a Slurm job that keeps running between payloads. The sessions are those below the base directory `base` on the
    cluster. The object is a `MakeWay` function: while a Slurm job waits, its `SlurmJob` object calls this function again and
    again.
    """

    connection: Connection
    base: str
    log: Any
    _next_check: float = 0.0
    _keep: set[int | None] = field(default_factory=set, init=False)  # Job ids of sessions that are no longer asked.
    # For sessions that have not answered, by job id: the number of requests, and when the next one is due. They are asked last.
    _silent: dict[int | None, tuple[int, float]] = field(default_factory=dict, init=False)

    def __call__(self, snapshot: QueueSnapshot, waiting: Sequence[QueueRow]) -> None:
        """Ask one idle session to end if a waiting Slurm job could use the session's nodes.

        `snapshot` shows the user's jobs in Slurm's queue, and `waiting` are the rows of the waiting job in `snapshot`. The job
        could use the nodes if it waits for nodes in the session's partition. If a session refuses or cannot be reached, the
        next one is asked. A session that does not answer is asked `_MOST_UNANSWERED` times at most. Raises OSError if the
        cluster is out of reach.

        The function searches at most every `_INTERVAL` seconds. After a session has agreed to end, the function pauses for
        `_START_TIMEOUT` seconds, so that the waiting job can start. Calls in between do nothing.
        """
        now = time.monotonic()
        wanted = {name for row in waiting if row.reason in _WAITS_FOR_NODES for name in row.partition.split(",")}
        if not wanted or now < self._next_check:
            return
        self._next_check = now + _INTERVAL
        nodes: dict[str, list[str]] = {}
        for row in snapshot.rows:
            if row.name.startswith(_SESSION_JOBS) and row.state == "RUNNING" and row.partition in wanted:
                nodes.setdefault(row.leader_label, []).append(row.nodes)
        found = list_generations(self.connection, self.base) if nodes else ()
        for each in sorted(found, key=lambda each: each.job_id in self._silent):
            said, held = each.announcement, nodes.get(str(each.job_id))
            idle = said is not None and said.idle and said.closing is None
            due = each.job_id not in self._keep and self._silent.get(each.job_id, (0, now))[1] <= now
            if held and idle and due and self._yields(each, ",".join(held)):
                self._next_check = now + _START_TIMEOUT
                return

    def _yields(self, generation: Generation, nodes: str) -> bool:
        """Ask an idle session to end; returns True if it agrees, and False if it refuses.

        A session refuses, for instance, if a payload has come in the meantime. If the session's answer is lost, the result is
        True, because the session may end. If the session cannot be reached, the result is False. `nodes` names the nodes of the
        session, for messages. Raises OSError if the cluster is out of reach.
        """
        try:
            answer = send_request(self.connection, generation, {"op": Operation.YIELD})
        except (Unreachable, AnswerLost) as error:
            tries = self._silent.get(generation.job_id, (0, 0.0))[0] + 1
            self._silent[generation.job_id] = tries, time.monotonic() + _INTERVAL * 2**tries
            if tries == _MOST_UNANSWERED:
                self._leave(generation, nodes, f" It does not answer: {error}")
            return isinstance(error, AnswerLost)
        self._silent.pop(generation.job_id, None)
        if answer.get("ok"):
            self.log.info(f"[rayslurm] session {generation.key} was idle and held {nodes}: it ends, so that this job can start")
            return True
        if answer.get("error") != Refusal.BUSY:
            self._leave(generation, nodes)
        return False

    def _leave(self, generation: Generation, nodes: str, why: str = "") -> None:
        """Never ask this session again to end, and log a warning that it holds `nodes`. `why` is the end of the warning."""
        self._keep.add(generation.job_id)
        self.log.warning(
            f"[rayslurm] session {generation.key} is idle and holds {nodes}, while this job waits; "
            f"`rayslurm session stop {generation.key}` ends it.{why}"
        )
