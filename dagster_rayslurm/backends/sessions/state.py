"""The state of a session, according to the session's files and Slurm's queue.

A generation is one allocation (Slurm job) of a session. An announcement is the file in which a running session says how to reach
it, and later that it is closing.
"""

from __future__ import annotations

from ...runtime.protocol.messages import TextEnum
from ...slurm.shared_queue import QueueRow, QueueSnapshot
from ...slurm.states import TERMINAL, WAITING
from .registry import Generation


class SessionState(TextEnum):
    """The state of a session, derived from the session's files, Slurm's queue, and the session's answer to a describe request.

    A describe request asks a session about itself. Only after such a request can the state be READY or SILENT.
    """

    PENDING = "pending"  # The session's job waits in Slurm's queue.
    STARTING = "starting"  # The job runs, but there is no announcement yet, or the session answers that it is not ready.
    UP = "up"  # The session has announced itself, and may not be ready yet.
    READY = "ready"  # The session answers that it is ready to run payloads.
    DRAINING = "draining"  # The session runs its payloads to their end, and accepts no more.
    SILENT = "silent"  # The session has announced itself, but does not answer.
    # The session has no job any more; its files say that it is closing or has ended, or it never announced itself.
    ENDED = "ended"
    # The session has no job any more, although its files say neither that it is closing nor that it has ended.
    DEAD = "dead"


def job_of(generation: Generation, snapshot: QueueSnapshot) -> QueueRow | None:
    """Returns the row of a generation's job in the queue `snapshot`; None if the job has ended or has no row.

    If the job has several components, the function returns the row of the first component.
    """
    if generation.ended:
        return None
    if generation.job_id is not None:
        row = snapshot.job(generation.job_id)
    else:
        named = [row for row in snapshot.rows if row.name == generation.job_name and row.is_leader]
        row = named[-1] if generation.job_name and named else None
    return None if row is None or row.state in TERMINAL else row


def state_of(generation: Generation, row: QueueRow | None) -> SessionState:
    """Returns the state of a session, from the session's files in `generation`, and from `row`, the result of `job_of`.

    The session itself is not asked, so the result is never READY or SILENT.
    """
    announcement = generation.announcement
    if row is None:
        dead = not generation.ended and announcement is not None and announcement.closing is None
        return SessionState.DEAD if dead else SessionState.ENDED
    if row.state in WAITING:
        return SessionState.PENDING
    if announcement is None:
        return SessionState.STARTING
    return SessionState.DRAINING if announcement.closing else SessionState.UP
