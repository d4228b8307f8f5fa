"""Finds the running Ray cluster of a run, session or Slurm job by name, and checks later whether the cluster still runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..backends.listing import Entry, Kind, access_in, is_running, json_object, named
from ..backends.sessions.registry import MOST_BYTES, Generation, parse_announcement
from ..runtime.protocol.record import SESSION, STATUS
from ..runtime.protocol.spec import ClusterAccess
from ..slurm.shared_queue import fetch_queue
from ..slurm.states import TERMINAL
from ..ssh.base import Connection
from .head import ClusterEnded

_MOST_NAMES = 8


class NoCluster(ValueError):
    """Raised when no running Ray cluster or more than one has the given name, or when the cluster has no dashboard.

    The message is one sentence.
    """


class NoClusterNow(NoCluster):
    """Raised when the run, session or job with the given name has no running Ray cluster now.

    A run, session or job that has not ended may get a cluster later.
    """


@dataclass(frozen=True)
class Found:
    """A running Ray cluster, and the run, session or job (`entry`) that owns the cluster."""

    entry: Entry
    path: str  # The file that says how to reach the cluster.
    access: ClusterAccess  # What this file says: for instance hosts, port and token.
    session: Generation | None = None  # The session that owns the cluster; None for the cluster of a run.

    @property
    def title(self) -> str:
        """The run, session or job as a phrase for sentences, such as "the run 1a2b3c4d-train-0123456789ab"."""
        return self.entry.title

    @property
    def connection(self) -> Connection:
        """The connection to the edge node of the cluster; for a cluster in local mode, the connection to this machine."""
        return self.entry.connection


def choose(ident: str, entries: Sequence[Entry]) -> Found:
    """Returns the only running Ray cluster to which the user's text `ident` refers. Pure.

    `entries` are runs, sessions and Slurm jobs, some with a running cluster. `ident` is one of these texts. The function looks
    for each kind of text in turn, until an entry matches:

    1. The name of the run directory, session or job, the job id, or the cluster id.
    2. The Dagster run id, the step or an asset of a run.
    3. The beginning of such a name or of a Dagster run id, with at least 4 characters.
    4. RUN/COMPONENT, for one component of a run whose components each have a cluster; RUN is a text as in 1 to 3.

    Raises NoClusterNow if entries match, and none of them has a running cluster. Raises NoCluster if no entry matches, if several
    clusters match, or if the cluster has no dashboard.
    """
    matching, component = matching_entries(ident, entries)
    if not matching:
        names = [each.name for each in entries if each.clusters]
        there = f"; running there: {_listed(names)}" if names else "; none runs there"
        raise NoCluster(f"no run, asset, session or Slurm job is called {ident!r}{there}")
    sessions = {each.cluster_id: each.generation for each in entries if each.kind == Kind.SESSION}
    live = {
        (way.cluster_id, way.dashboard_port): (Found(each, path, way, sessions.get(way.cluster_id)), cluster_name(each, path))
        for each in matching
        for path, way in each.clusters.items()
        if not component or cluster_name(each, path).endswith(f"/{component}")
    }
    if not live:
        last = matching[-1]
        raise NoClusterNow(f"{last.title} has no Ray cluster now: {': '.join(filter(None, (str(last.state), last.says)))}")
    if len(live) > 1:
        raise NoCluster(f"{ident!r} names several Ray clusters; say which: {_listed([name for _, name in live.values()])}")
    ((one, _),) = live.values()
    if one.access.dashboard_port is None:
        raise NoCluster(f"the Ray cluster of {one.title} has no dashboard: RayLauncher(dashboard=False)")
    return one


def matching_entries(ident: str, entries: Sequence[Entry]) -> tuple[list[Entry], str]:
    """Returns the entries that `ident` names, and the name of the component if `ident` is RUN/COMPONENT, otherwise "". Pure."""
    if found := named(ident, entries):
        return found, ""
    run, _, component = ident.rpartition("/")
    return named(run, entries), component


def cluster_name(entry: Entry, path: str) -> str:
    """Returns the name of a cluster of `entry`: the entry's name, or ENTRY/COMPONENT for the cluster of one component of a run.

    `path` is the path of the file that says how to reach the cluster. The directory of this file is named after the component.
    """
    directory = os.path.dirname(path)
    return entry.name if directory == entry.directory else f"{entry.name}/{os.path.basename(directory)}"


def look_again(found: Found) -> Callable[[bool], ClusterAccess]:
    """Returns a function that reads again how to reach the cluster `found`, from the file `found.path`.

    The function returns what the file says, and raises ClusterEnded if the file shows that the cluster has ended. The argument of
    the function is True if the head node does not answer. In this case the function also raises ClusterEnded if the Slurm job of
    the cluster is over or, without a Slurm job, if the process of the cluster's runtime is gone.
    """
    connection = found.connection

    def read(unreachable: bool) -> ClusterAccess:
        text, state = connection.read(found.path, 0, MOST_BYTES), ""
        if os.path.basename(found.path) == SESSION:
            announcement = parse_announcement(text)
            access = announcement.access if announcement is not None else None
        else:
            access = access_in(json_object(text))
        if access is not None and access.dashboard_port == found.access.dashboard_port:
            if unreachable and _is_gone(connection, access):
                raise ClusterEnded(f"the Ray cluster of {found.title} has ended (its runtime was killed)")
            return access
        if os.path.basename(found.path) != SESSION:
            status = json_object(connection.read(os.path.join(os.path.dirname(found.path), STATUS), 0, MOST_BYTES))
            state = ": ".join(str(status[key]) for key in ("state", "message") if status.get(key))
        raise ClusterEnded(f"the Ray cluster of {found.title} has ended" + (f" ({state})" if state else ""))

    return read


def _is_gone(connection: Connection, access: ClusterAccess) -> bool:
    """Returns True if a cluster's Slurm job is over or, without a Slurm job, if the process of the cluster's runtime is gone."""
    if access.job_id is None:
        return not is_running(access.pid)
    row = fetch_queue(connection).job(int(access.job_id))
    return row is None or row.state in TERMINAL


def _listed(names: Sequence[str]) -> str:
    """Returns the first `_MOST_NAMES` names, separated by commas, with "…" at the end if there are more names."""
    return ", ".join(names[:_MOST_NAMES]) + (", …" if len(names) > _MOST_NAMES else "")
