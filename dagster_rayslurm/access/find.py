"""Find a Ray cluster by what a user calls it: run, asset, session or Slurm job."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..backends.sessions.registry import MOST_BYTES, Generation, list_generations, parse_announcement
from ..edge.clusters import payloads
from ..runtime.protocol.record import CLUSTER, SESSION, STATUS
from ..runtime.protocol.spec import ClusterAccess, SpecError, from_fields
from ..slurm.shared_queue import fetch_queue
from ..slurm.states import TERMINAL
from ..ssh.base import Connection
from .head import ClusterEnded

_SHORTEST_RUN = 4  # Characters of a run's id that name it.
_MOST_NAMES = 8


Place = tuple[str | None, int]  # Slurm's job, or the process of a runtime on this machine.


class NoCluster(ValueError):
    """Raised when no running Ray cluster, or several, have the name that was given; the text is one sentence."""


@dataclass(frozen=True)
class Found:
    """A payload or a session, and the way to its Ray cluster, which is None while there is none."""

    title: str  # For messages, such as "the run 1a2b3c4d-train-0123456789ab".
    name: str  # Names it and nothing else.
    words: frozenset[str]  # Other names that it goes by.
    path: str  # The file that says how to reach the cluster.
    access: ClusterAccess | None
    state: str = ""  # In words; "" if not known.
    at: float = 0.0

    def goes_by(self, word: str) -> bool:
        """Whether a word names it: one of its names, or how its own name begins."""
        return word in self.words or (len(word) >= _SHORTEST_RUN and self.name.startswith(word))


def candidates(connection: Connection, base: str) -> list[Found]:
    """All payloads and sessions below a base directory. Raises OSError if they cannot be read."""
    found = [_of_payload(base, each) for each in connection.call(payloads, base, repeat=True, timeout=120.0)]
    found += [_of_session(each) for each in list_generations(connection, base)]
    ways = [each.access for each in found if each.access is not None]
    dead = _ended(connection, ways) if ways else set()
    gone = "its runtime was killed"
    return [replace(each, access=None, state=gone) if each.access and _place(each.access) in dead else each for each in found]


def _ended(connection: Connection, ways: Iterable[ClusterAccess]) -> set[Place]:
    """Where no runtime lives any more, although a file says how to reach it: the job is over, or the process was killed."""
    places = {_place(each) for each in ways}
    jobs = {job for job, _ in places if job is not None}
    over: set[Place] = {(None, pid) for job, pid in places if job is None and not is_running(pid)}
    if not jobs:
        return over
    snapshot = fetch_queue(connection)
    alive = {job for job in jobs if (row := snapshot.job(int(job))) is not None and row.state not in TERMINAL}
    return over | {(job, pid) for job, pid in places if job in jobs - alive}


def _place(access: ClusterAccess) -> Place:
    return access.job_id, 0 if access.job_id is not None else access.pid


def is_running(pid: int) -> bool:
    """Whether a process of this machine lives."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def choose(word: str, found: Sequence[Found], place: str) -> Found:
    """The one that a word names and that has a Ray cluster with dashboard; NoCluster says why there is none. Pure."""
    named = sorted((each for each in found if each.goes_by(word)), key=lambda each: each.at)
    exact = [each for each in named if each.name == word]
    live = [each for each in exact or named if each.access is not None]
    clusters = {(each.access.cluster_id, each.access.dashboard_port): each for each in live if each.access is not None}
    if not named:
        names = [each.name for each in found if each.access is not None]
        there = f"; running there: {_listed(names)}" if names else "; none runs there"
        raise NoCluster(f"no run, asset, session or Slurm job on {place} is called {word!r}{there}")
    if not clusters:
        last = named[-1]
        raise NoCluster(f"{last.title} has no Ray cluster now" + (f": {last.state}" if last.state else ""))
    if len(clusters) > 1:
        raise NoCluster(f"{word!r} names several Ray clusters; say which: {_listed([each.name for each in live])}")
    (one,) = clusters.values()
    if one.access is not None and one.access.dashboard_port is None:
        raise NoCluster(f"the Ray cluster of {one.title} has no dashboard: RayLauncher(dashboard=False)")
    return one


def look_again(connection: Connection, found: Found) -> Callable[[bool], ClusterAccess]:
    """A function that reads again how to reach a cluster; it raises ClusterEnded if the cluster has ended, or OSError.

    If its argument is True, the head did not answer, and Slurm is asked whether the job is still there.
    """

    def read(unreachable: bool) -> ClusterAccess:
        access, state = parse_access(connection.read(found.path, 0, MOST_BYTES), found.path), ""
        if access is not None and found.access is not None and access.dashboard_port == found.access.dashboard_port:
            if unreachable and _ended(connection, [access]):
                raise ClusterEnded(f"the Ray cluster of {found.title} has ended (its runtime was killed)")
            return access
        if os.path.basename(found.path) == CLUSTER:
            text = connection.read(os.path.join(os.path.dirname(found.path), STATUS), 0, MOST_BYTES)
            state = _state(_object(text))
        raise ClusterEnded(f"the Ray cluster of {found.title} has ended" + (f" ({state})" if state else ""))

    return read


def session_of(connection: Connection, found: Found) -> Generation | None:
    """The session that keeps a cluster or runs its payload; None if there is none."""
    if found.access is None:
        return None
    base = os.path.dirname(os.path.dirname(os.path.dirname(found.path)))
    if os.path.basename(found.path) == SESSION:
        base = os.path.dirname(base)
    for each in list_generations(connection, base):
        if each.announcement is not None and each.announcement.cluster_id == found.access.cluster_id:
            return each
    return None


def parse_access(text: bytes, path: str) -> ClusterAccess | None:
    """How to reach a cluster, from the content of a `cluster.json` or `session.json`; None if there is none."""
    if os.path.basename(path) == SESSION:
        announcement = parse_announcement(text)
        return announcement.access if announcement is not None else None
    return _access(_object(text))


def _access(found: Any) -> ClusterAccess | None:
    try:
        return from_fields(ClusterAccess, found) if found else None
    except SpecError:  # It is damaged, or of another version.
        return None


def _object(text: bytes) -> Mapping[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _state(status: Mapping[str, Any] | None) -> str:
    return ": ".join(str(status[key]) for key in ("state", "message") if status.get(key)) if status else ""


def _of_payload(base: str, row: Mapping[str, Any]) -> Found:
    name, run_id = str(row["name"]), str(row["run_id"])
    words = {run_id, row["step"], row["job_id"], *row["assets"]}
    if len(run_id) > _SHORTEST_RUN:
        words.update(run_id[:length] for length in range(_SHORTEST_RUN, len(run_id)))
    path = os.path.join(base, "runs", name, CLUSTER)
    access = _access(row["access"])
    return Found(f"the run {name}", name, frozenset(words - {""}), path, access, _state(row["status"]), float(row["at"]))


def _of_session(generation: Generation) -> Found:
    said = generation.announcement
    name = f"{generation.key}/{generation.number}"
    words = {generation.key, str(generation.job_id or ""), said.cluster_id if said is not None else ""}
    over = generation.ended or generation.abandoned or said is None
    state = "it has ended" if generation.ended else "it has not started" if said is None else "no payload keeps a cluster warm"
    access = said.access if said is not None and not over else None
    path = os.path.join(generation.directory, SESSION)
    return Found(f"the session {name}", name, frozenset(words - {""}), path, access, state, float(generation.number))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_MOST_NAMES]) + (", …" if len(names) > _MOST_NAMES else "")
