"""Lists and finds a user's runs, sessions and other Slurm jobs on a cluster, and the runs and sessions on this machine."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..edge import runs as edge_runs
from ..runtime.protocol.messages import TextEnum
from ..runtime.protocol.record import JOURNAL, SESSION, STATUS, decode
from ..runtime.protocol.spec import ClusterAccess, SpecError, from_fields
from ..slurm.arrays import count_jobs
from ..slurm.pending import most_informative_row, waiting_text
from ..slurm.shared_queue import QueueRow, QueueSnapshot, listed_snapshot, squeue_command
from ..slurm.states import ACTIVE, TERMINAL, WAITING
from ..slurm.steps import parse_exit
from ..ssh.base import Connection
from ..ssh.local import LocalConnection
from .layout import Layout, nonce_of
from .sessions.here import list_sessions
from .sessions.registry import Generation, generation_of
from .sessions.state import SessionState, job_of, state_of

_TIMEOUT = 120.0  # Seconds for squeue.
_SHORTEST = 4  # Fewest characters of the beginning of a name that find an entry.


class Kind(TextEnum):
    """The kinds of entries in a listing."""

    RUN = "run"  # One payload: of a Dagster step, or of `rayslurm submit`.
    SESSION = "session"
    JOB = "job"  # A Slurm job that belongs to no run or session below the base directory.


@dataclass(frozen=True)
class Entry:
    """One run, session or Slurm job in a listing."""

    kind: Kind
    name: str  # Name of the run directory, the session or the job.
    state: str
    connection: Connection
    directory: str = ""  # "" for a job.
    says: str = ""  # The last message of a run, or why a job waits.
    job_id: str | None = None
    cluster_id: str | None = None
    node: str | None = None  # The head node, or all nodes of a job in Slurm's notation.
    partition: str | None = None
    at: float | None = None  # When the state began, or else when the entry last changed.
    exit_code: int | None = None  # Exit code of the srun in a run's batch script; None if none is known.
    generation: Generation | None = field(default=None, repr=False)  # The allocation of a session; None for a run or job.
    run_id: str = ""  # Id of the Dagster run.
    words: frozenset[str] = frozenset()  # Other names of a run: its step and its assets.
    heterogeneous: bool = False  # Whether an entry of the kind JOB has several components; always False for other kinds.
    # How to reach the Ray clusters of a run or session, by the path of the file that describes the cluster.
    clusters: Mapping[str, ClusterAccess] = field(default_factory=dict, repr=False)
    # The names of the components of a run if each component has a payload and a directory of its own; otherwise empty.
    components: tuple[str, ...] = ()
    has_arrays: bool = False  # Whether the run has job arrays, whose elements each have a payload and a directory of their own.

    @property
    def title(self) -> str:
        """The kind and the name of the entry, for messages."""
        return f"the {self.kind.value} {self.name}"

    @property
    def over(self) -> bool:
        """Whether the run, session or job has ended, or was never submitted."""
        return self.state in (*_OVER, *map(str, (SessionState.ENDED, SessionState.DEAD)))

    def row(self) -> dict[str, Any]:
        """Returns the fields that `rayslurm ps --json` shows, such as kind, name, state and job id, as a dictionary for JSON."""
        names = ("name", "says", "job_id", "cluster_id", "node", "partition", "at", "exit_code", "directory")
        shown = {"kind": self.kind.value, **{name: getattr(self, name) for name in names}}
        return {**shown, "state": str(self.state), "place": self.connection.place}


_STARTING, _ENDED, _LOST, _UNKNOWN = "starting", "ended", "lost", "unknown"
_OVER = (_ENDED, _LOST, _UNKNOWN)  # A run that has no job and no started runtime is "unknown": it was not submitted.


def list_all(connection: Connection, base: str) -> list[Entry]:
    """Returns the runs and sessions below a base directory, and the user's other jobs in Slurm's queue. Makes one remote call.

    Raises OSError if the cluster or Slurm does not answer.
    """
    found = connection.call(edge_runs.listing, base, list(squeue_command()), _TIMEOUT, repeat=True, timeout=_TIMEOUT)
    snapshot = listed_snapshot(connection.place, *found["queue"])
    runs = [_run(connection, base, each, snapshot) for each in found["runs"]]
    sessions = [_session(connection, generation_of(base, each), snapshot) for each in found["sessions"]]
    known = {each.job_id for each in (*runs, *sessions)}
    for run in runs:
        known |= {row.leader_label.partition("_")[0] for row in _elements(run.name, snapshot)} if run.has_arrays else set()
    jobs = [_job(connection, row) for row in snapshot.rows if row.is_leader and row.state not in TERMINAL]
    return [*runs, *sessions, *(each for each in jobs if (each.job_id or "").partition("_")[0] not in known)]


def list_here(base: str) -> list[Entry]:
    """Returns the runs and the live sessions of local mode on this machine, below the base directory of local mode."""
    here = LocalConnection()
    runs = [_run(here, base, each, None) for each in edge_runs.runs(os.path.join(base, "runs"))]
    return [*runs, *(_session(here, each, None) for each in list_sessions(Layout.here(base)))]


def named(ident: str, entries: Sequence[Entry]) -> list[Entry]:
    """Returns the entries whose name, job id or cluster id is `ident`.

    If there are no such entries, returns the entries whose Dagster run, step or asset is `ident`. If these are missing, too, and
    `ident` has at least `_SHORTEST` characters, returns the entries whose name or Dagster run id begins with `ident`.
    """
    exact = [each for each in entries if ident and ident in (each.name, each.job_id, each.cluster_id)]
    exact = exact or [each for each in entries if ident and (ident == each.run_id or ident in each.words)]
    if exact or len(ident) < _SHORTEST:
        return exact
    return [each for each in entries if each.name.startswith(ident) or each.run_id.startswith(ident)]


def find(ident: str, entries: Sequence[Entry]) -> Entry:
    """Returns the single entry to which `ident` refers (see `named`).

    If several entries match, the first rule that applies selects one of the matching entries:

    1. If `ident` is the name, job id or cluster id of a session, the entry of the session's newest allocation is returned.
    2. If only one entry has not ended, this entry is returned.
    3. If `ident` is a step or an asset, the newest run is returned.

    Raises ValueError if no entry matches, or if several entries match and no rule applies. `entries` are in the order of
    `list_all`.
    """
    matching = named(ident, entries)
    # A session and its payloads share a job. Of several generations of a session the newest is meant.
    sessions = [each for each in matching if each.kind == Kind.SESSION and ident in (each.name, each.job_id, each.cluster_id)]
    alive = [each for each in matching if not each.over]
    matching = sessions[-1:] or (alive if len(alive) == 1 else matching)
    if matching and all(ident in each.words for each in matching):
        matching = matching[-1:]
    # Several jobs may have one name.
    shown = {f"{each.name} (job {each.job_id})" if each.kind == Kind.JOB else each.name for each in matching}
    if len(shown) == 1 and len({each.kind for each in matching}) == 1:
        return matching[-1]
    if not matching:
        raise ValueError(f"no run, session or job is called {ident!r}, or begins so; `rayslurm ps --all` lists them")
    names = ", ".join(sorted(shown)[:5])
    raise ValueError(f"{len(matching)} runs, sessions or jobs are called {ident!r}, or begin so: {names}; name one of them")


# ---- One entry. Pure


def _run(connection: Connection, base: str, found: dict[str, Any], snapshot: QueueSnapshot | None) -> Entry:
    files, name = found["files"], found["name"]
    start = decode(files[JOURNAL].partition("\n")[0].encode()) or {}
    allocation = start.get("allocation") or {}
    job_id = files["job_id"].strip() or str(allocation.get("job_id") or "") or None
    number = int(job_id) if job_id is not None and job_id.isdecimal() else None
    row = snapshot.job(number) if snapshot is not None and number is not None else None
    status = _status(found, isinstance(connection, LocalConnection) and (snapshot is None or number is None))
    state, says = str(status.get("state") or _UNKNOWN), str(status.get("message") or "")
    own = _elements(name, snapshot) if found["has_arrays"] and snapshot is not None else []
    if own and state != _ENDED:
        state, says = _array(own)
    elif state != _ENDED and number is not None and snapshot is not None:
        if row is None or row.state in TERMINAL:
            state, says = _LOST, says or "Slurm no longer knows its job" if row is None else f"Slurm calls its job {row.state}"
        elif row.state in WAITING:
            told = most_informative_row(snapshot.components(row.job_id)) or row
            state, says = "pending", waiting_text(told.reason, told.start, time.time())
        elif not status:
            state = _STARTING
    ways = {path: access_in(json_object(text)) for path, text in found["clusters"].items()}
    clusters = {path: way for path, way in ways.items() if way is not None and state not in _OVER}
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
        run_id=found["run_id"],
        words=frozenset(filter(None, [found["step"], *found["assets"]])),
        clusters=clusters,
        components=tuple(found["components"]),
        has_arrays=found["has_arrays"],
    )


def _status(found: dict[str, Any], here: bool) -> dict[str, Any]:
    """Returns the content of a run's file `status.json`, such as the state and the last message; {} if there is no such file.

    If the components of the run have such files instead, the result combines these files. `found` is an element of the list that
    `edge.runs.runs` returned. If `here` is True, the runtimes are processes of this machine. A run or component whose process was
    killed then has the state "lost".
    """
    whole = json_object(found["files"][STATUS])
    parts = {name: json_object(text) for name, text in found["components"].items()}
    for status in (whole, *parts.values()):
        if here and status and status.get("state") != _ENDED and not is_running(status.get("runtime_pid")):
            status.update(state=_LOST, message="its runtime was killed")
    return whole if whole or not any(parts.values()) else _combined(parts, _UNKNOWN if here else _STARTING)


def _combined(statuses: Mapping[str, Mapping[str, Any]], missing: str) -> dict[str, Any]:
    """Returns the state, message and time (`at`) of a run whose components have the given statuses, by the component's name.

    The run has ended when all its components have ended. Until then, the run has the state that a component entered last.
    `missing` is the state of a component without a status.
    """
    states = {name: str(status.get("state") or missing) for name, status in statuses.items()}
    live = [name for name, state in states.items() if state not in _OVER]
    last = max(live or states, key=lambda name: statuses[name].get("at") or 0.0)
    state = states[last] if live else _ENDED if {*states.values()} == {_ENDED} else _LOST
    messages = [
        f"{name}{'' if own == state else f' ({own})'}: {statuses[name].get('message') or own}" for name, own in states.items()
    ]
    return {"state": state, "message": "; ".join(messages), "at": statuses[last].get("at")}


def _elements(run: str, snapshot: QueueSnapshot) -> list[QueueRow]:
    """Returns the rows of the elements of all job arrays of a run; `run` is the name of the run directory."""
    # The test of `slurm.request.is_job_of`, whose import would take as long as all the rest of `rayslurm ps`.
    return [row for row in snapshot.rows if "_" in row.label and row.name.endswith(f"-{nonce_of(run)}")]


def _array(rows: Sequence[QueueRow]) -> tuple[str, str]:
    """Returns the state of a run that has job arrays, and a text such as "3 elements run, 5 wait".

    The state is "running", "pending" or "ended". `rows` are the rows of the arrays' elements in the queue.
    """
    running = sum(row.state in ACTIVE for row in rows)
    waiting = count_jobs(row for row in rows if row.state in WAITING)
    return "running" if running else "pending" if waiting else _ENDED, f"{running:,} elements run, {waiting:,} wait"


def access_in(content: Any) -> ClusterAccess | None:
    """Returns how to reach a Ray cluster (host, port, token), from `content`, the parsed JSON of the cluster's file.

    Returns None if the content is empty, damaged or of another version.
    """
    try:
        return from_fields(ClusterAccess, content) if content else None
    except SpecError:
        return None


def is_running(pid: object) -> bool:
    """Returns whether the process `pid` of this machine lives. Returns True also if `pid` is not an integer."""
    if not isinstance(pid, int):
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _session(connection: Connection, generation: Generation, snapshot: QueueSnapshot | None) -> Entry:
    said = generation.announcement
    if snapshot is None:  # On this machine only live sessions are listed.
        row, state = None, SessionState.UP
    else:
        row = job_of(generation, snapshot)
        state = state_of(generation, row)
    says = (said.closing if said else None) or ""
    if state == SessionState.PENDING and row is not None and snapshot is not None:
        told = most_informative_row(snapshot.components(row.job_id)) or row
        says = waiting_text(told.reason, told.start, time.time())
    job_id = None if snapshot is None else str(generation.job_id or (row.job_id if row else "")) or None
    alive = state in (SessionState.UP, SessionState.DRAINING)
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
        clusters={f"{generation.directory}/{SESSION}": said.access} if alive and said and said.access else {},
    )


def _job(connection: Connection, row: QueueRow) -> Entry:
    waiting = row.state in WAITING
    says = waiting_text(row.reason, row.start, time.time()) if waiting else ""
    at = row.submit if waiting else row.start
    names = (row.name, row.state.lower(), connection, "", says, row.leader_label, None, row.nodes or None, row.partition, at)
    return Entry(Kind.JOB, *names, heterogeneous="+" in row.label)


def json_object(text: str | bytes) -> dict[str, Any]:
    """Returns the JSON object in a text as a dictionary; an empty dictionary if the text is damaged or holds no object."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
