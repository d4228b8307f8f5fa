"""All runs, sessions and other Slurm jobs of a user on a cluster, and the runs on this machine, whatever started them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..edge import runs as edge_runs
from ..plan import nonce_of
from ..runtime.protocol.messages import TextEnum
from ..runtime.protocol.record import JOURNAL, STATUS, decode
from ..slurm.refusals import most_informative_row, waiting_text
from ..slurm.request import parse_exit
from ..slurm.shared_queue import QueueRow, QueueSnapshot, SlurmUnanswered, parse_squeue, squeue_command
from ..slurm.states import TERMINAL, WAITING
from ..ssh.base import Connection
from ..ssh.local import LocalConnection
from .sessions.listing import SessionState, job_of, state_of
from .sessions.registry import Generation, generation_of

_TIMEOUT = 120.0  # Seconds for squeue.


class Kind(TextEnum):
    """What an entry is."""

    RUN = "run"  # One payload: of a Dagster step, or of `rayslurm submit`.
    SESSION = "session"
    JOB = "job"  # A Slurm job that belongs to no run or session below the base directory.


@dataclass(frozen=True)
class Entry:
    """One run, session or job."""

    kind: Kind
    name: str  # Of the run directory, the session or the job.
    state: str
    connection: Connection
    directory: str = ""  # "" for a job.
    says: str = ""  # The last word of a run, or why a job waits.
    job_id: str | None = None
    cluster_id: str | None = None
    node: str | None = None
    partition: str | None = None
    at: float | None = None  # When the state began, or else when the entry last changed.
    exit_code: int | None = None
    generation: Generation | None = field(default=None, repr=False)

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self.state in (*_OVER, *map(str, (SessionState.ENDED, SessionState.DEAD)))

    @property
    def step(self) -> str:
        """The step of a run, such as its asset's name; "" for others."""
        return self.name.partition("-")[2].rpartition("-")[0] if self.kind == Kind.RUN else ""

    def row(self) -> dict[str, Any]:
        """The entry as JSON."""
        names = ("name", "says", "job_id", "cluster_id", "node", "partition", "at", "exit_code", "directory")
        shown = {"kind": self.kind.value, **{name: getattr(self, name) for name in names}}
        return {**shown, "state": str(self.state), "place": self.connection.place}


_ENDED, _LOST = "ended", "lost"
_OVER = (_ENDED, _LOST)


def list_all(connection: Connection, base: str) -> list[Entry]:
    """What is below a base directory and in Slurm's queue, by one call; on this machine's own base without Slurm.

    Raises OSError if the cluster or Slurm does not answer.
    """
    found = connection.call(edge_runs.listing, base, list(squeue_command()), _TIMEOUT, repeat=True, timeout=_TIMEOUT)
    code, out, error = found["queue"]
    if code != 0:
        said = " ".join(error.split())[-300:] or "it said nothing"
        raise SlurmUnanswered(f"{connection.place}: squeue did not answer (exit code {code}): {said}")
    try:
        snapshot = QueueSnapshot(0.0, parse_squeue(out))
    except ValueError as problem:
        raise SlurmUnanswered(f"{connection.place}: {problem}") from None
    runs = [_run(connection, base, each, snapshot) for each in found["runs"]]
    sessions = [_session(connection, generation_of(base, each), snapshot) for each in found["sessions"]]
    known = {each.job_id for each in (*runs, *sessions)}
    jobs = [_job(connection, row) for row in snapshot.rows if row.is_leader and row.state not in TERMINAL]
    return [*runs, *sessions, *(each for each in jobs if each.job_id not in known)]


def list_runs_here(base: str) -> list[Entry]:
    """The runs of the local mode."""
    here = LocalConnection()
    return [_run(here, base, each, None) for each in edge_runs.runs(os.path.join(base, "runs"))]


def find(ident: str, entries: Sequence[Entry]) -> Entry:
    """The entry that a name means: a job id, a cluster id, or a name or how it begins; or else the newest run of a step.

    Raises ValueError if there is none, or several.
    """
    exact = [each for each in entries if ident in (each.name, each.job_id, each.cluster_id)]
    # A session and its payloads share a job. Of several generations of a session the newest is meant.
    sessions = [each for each in exact if each.kind == Kind.SESSION]
    matching = sessions[-1:] or exact or [each for each in entries if ident and each.name.startswith(ident)]
    matching = matching or [each for each in entries if each.step == ident][-1:]
    alive = [each for each in matching if not each.over]
    matching = alive if len(alive) == 1 else matching
    if len(matching) == 1 or (matching and len({(each.name, each.kind) for each in matching}) == 1):
        return matching[-1]
    if not matching:
        raise ValueError(f"no run, session or job is called {ident!r}, or begins so; `rayslurm ps --all` lists them")
    names = ", ".join(sorted(each.name for each in matching)[:5])
    raise ValueError(
        f"{len(matching)} runs, sessions or jobs begin with {ident!r}: {names}; write more of it, as in `rayslurm ps`"
    )


# ---- One entry. Pure


def _run(connection: Connection, base: str, found: dict[str, Any], snapshot: QueueSnapshot | None) -> Entry:
    files, name = found["files"], found["name"]
    status = _json(files[STATUS])
    start = decode(files[JOURNAL].partition("\n")[0].encode()) or {}
    allocation = start.get("allocation") or {}
    job_id = files["job_id"].strip() or str(allocation.get("job_id") or "") or None
    number = int(job_id) if job_id is not None and job_id.isdecimal() else None
    row = snapshot.job(number) if snapshot is not None and number is not None else None
    state, says = str(status.get("state") or "unknown"), str(status.get("message") or "")
    if snapshot is not None and state != _ENDED:
        if row is None or row.state in TERMINAL:
            state, says = _LOST, says or "Slurm no longer knows its job" if row is None else f"Slurm calls its job {row.state}"
        elif row.state in WAITING:
            told = most_informative_row(snapshot.components(row.job_id)) or row
            state, says = "pending", waiting_text(told.reason, told.start, time.time())
        elif not status:
            state = "starting"
    elif snapshot is None and state != _ENDED and not _lives(status.get("runtime_pid")):
        state = _LOST if status else state
    exit_code = None if number is None else parse_exit(files["exit"].encode(), number)
    return Entry(
        Kind.RUN,
        name,
        state,
        connection,
        os.path.join(base, "runs", name),
        says,
        job_id,
        start.get("cluster_id") or (f"slurm-{nonce_of(name)}" if files["job_id"] else None),
        start.get("hostname") or (row.nodes if row is not None else "") or None,
        row.partition if row is not None else None,
        status.get("at") or found["modified"],
        exit_code,
    )


def _lives(pid: object) -> bool:
    """Whether a process of this machine lives."""
    if not isinstance(pid, int):
        return True
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def _session(connection: Connection, generation: Generation, snapshot: QueueSnapshot) -> Entry:
    row, said = job_of(generation, snapshot), generation.announcement
    state = state_of(generation, row)
    says = (said.closing if said else None) or ""
    if state == SessionState.PENDING and row is not None:
        told = most_informative_row(snapshot.components(row.job_id)) or row
        says = waiting_text(told.reason, told.start, time.time())
    job_id = str(generation.job_id or (row.job_id if row else "")) or None
    return Entry(
        Kind.SESSION,
        generation.key,
        state,
        connection,
        generation.directory,
        says,
        job_id,
        said.cluster_id if said else None,
        (said.hostname if said else row.nodes if row else "") or None,
        row.partition if row else None,
        row.start if row else None,
        generation=generation,
    )


def _job(connection: Connection, row: QueueRow) -> Entry:
    waiting = row.state in WAITING
    says = waiting_text(row.reason, row.start, time.time()) if waiting else ""
    at = row.submit if waiting else row.start
    return Entry(
        Kind.JOB, row.name, row.state.lower(), connection, "", says, row.leader_label, None, row.nodes or None, row.partition, at
    )


def _json(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
