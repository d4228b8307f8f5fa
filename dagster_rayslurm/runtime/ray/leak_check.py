"""Find what payloads leave alive in a warm Ray cluster: detached actors, placement groups, submitted jobs, used resources.

The process that runs `ray start` reads the tables of Ray's control service, the GCS (`serve`). The runtime asks that process
at the end of each payload, and again when no payload runs (`LeakCheck`).
"""

from __future__ import annotations

import json
import os
import threading
import time
from typing import TYPE_CHECKING, Any, Callable, Dict, List, NamedTuple, Optional, Tuple

from ..process.loop import Loop, Timer
from . import internals
from .reports import Report

if TYPE_CHECKING:
    from .cluster import RayCluster

Tables = Dict[str, Any]
"""The answer of `internals.living_things`."""

_TIMEOUT = 0.3
"""Seconds that the end of a payload may wait for the tables, which usually take some milliseconds."""
_IDLE = 10.0
"""Seconds from the last payload's end to the check of the idle cluster; Ray frees some resources late."""
_IDLE_TIMEOUT = 5.0
"""Seconds that the check of the idle cluster may wait for the tables."""
_COUNTED_IN_BYTES = ("memory", "object_store_memory")
"""Resources that the check ignores, because idle workers and cached objects use them until others need them."""


def serve(fd: int, gcs: str, report: Callable[..., None]) -> None:
    """Start a thread that answers each query of the leak check with a report of Ray's tables, or of the error.

    Args:
        fd: the pipe from which queries come as JSON lines with an `id`.
        gcs: "HOST:PORT" of Ray's control service.
        report: sends a report to the runtime.
    """
    os.set_inheritable(fd, False)

    def answer() -> None:
        accessor: Any = None
        with os.fdopen(fd, encoding="utf-8") as queries:
            for line in queries:
                query = json.loads(line)["id"]
                try:
                    accessor = internals.connect_state(gcs) if accessor is None else accessor
                    report(event=Report.TABLES, id=query, tables=internals.living_things(accessor))
                except Exception as error:  # Ray's errors have no common public base class, and their modules change.
                    accessor = None
                    report(event=Report.TABLES, id=query, tables=None, message="%s: %s" % (type(error).__name__, error))

    threading.Thread(target=answer, daemon=True).start()


class Leak(NamedTuple):
    """One actor, placement group, submitted job or used resource that is left in the Ray cluster."""

    key: Tuple[str, ...]
    """Identifies the leak in later tables."""
    message: str
    """Says in a sentence what is left and how to end it."""
    nonce: Optional[str] = None
    """The nonce of the payload that made it; None for submitted jobs and resources, for which Ray does not tell."""
    since: float = 0.0
    """When a submitted job began, in seconds since the epoch; 0 for everything else."""


def living(tables: Tables) -> List[Leak]:
    """Everything in the tables that is alive and does not end with the Ray job that made it; without side effects."""
    actors = [
        Leak(
            ("actor", actor["job"], actor["namespace"], actor["name"]),
            "detached actor %(name)r (%(class)s, namespace %(namespace)r) is still alive; end it with "
            "ray.kill(ray.get_actor(%(name)r, namespace=%(namespace)r)) before the payload ends" % actor,
            tables["jobs"].get(actor["job"], ""),
        )
        for actor in tables["actors"]
    ]
    groups = [
        Leak(
            ("group", group["id"]),
            "placement group %s still holds its resources; give it back with "
            "ray.util.remove_placement_group(group) before the payload ends"
            % ("%(name)r (namespace %(namespace)r)" % group if group["name"] else group["id"]),
            tables["jobs"].get(group["job"], ""),
        )
        for group in tables["groups"]
    ]
    return actors + groups + _submitted(tables)


def leaks_of(tables: Tables, nonce: str, began: float) -> List[str]:
    """What one payload leaves alive, as sentences: what its Ray jobs made, and all jobs submitted since it began."""
    return [each.message for each in living(tables) if each.nonce == nonce or (each.nonce is None and each.since >= began)]


def left_when_idle(tables: Tables) -> List[Leak]:
    """What is still at work when no payload runs: submitted jobs, and used resources with everything that may hold them."""
    taken = []
    for name, total in sorted(tables["total"].items()):
        used = total - tables["available"].get(name, 0.0)
        if used > 1e-3 and name not in _COUNTED_IN_BYTES and not name.startswith("node:") and "_group_" not in name:
            message = "%s: %g of %g are not free although no payload runs" % (name, used, total)
            taken.append(Leak(("resource", name), message))
    return taken + living(tables) if taken else _submitted(tables)


def _submitted(tables: Tables) -> List[Leak]:
    return [
        Leak(
            ("job", job["id"]),
            "job %(id)s of `ray job submit` still runs; end it with `ray job stop %(id)s` before the payload ends, "
            "or submit it without --no-wait" % job,
            since=job["since"],
        )
        for job in tables["submitted"]
    ]


class LeakCheck:
    """Finds what payloads leave alive in the warm Ray cluster.

    Args:
        cluster: returns the warm cluster; None if there is none.
    """

    def __init__(self, loop: Loop, cluster: Callable[[], Optional[RayCluster]]) -> None:
        self._loop = loop
        self._cluster = cluster
        self._left: List[Leak] = []
        self._timer: Optional[Timer] = None

    @property
    def found(self) -> List[str]:
        """Sentences about the leaks that the last check of the idle cluster found and that have not ended since."""
        return [leak.message for leak in self._left]

    def at_end(self, nonce: str) -> Callable[[Callable[[List[str]], None]], None]:
        """Returns a function to call at the end of the payload that starts now; it passes the payload's leaks to a callback."""
        began = time.time()

        def find(done: Callable[[List[str]], None]) -> None:
            def answered(tables: Optional[Tables]) -> None:
                if tables is not None and self._left:
                    keys = {leak.key for leak in left_when_idle(tables)}
                    self._left = [leak for leak in self._left if leak.key in keys]
                done([] if tables is None else leaks_of(tables, nonce, began))

            self._query(_TIMEOUT, answered)

        return find

    def check_when_idle(self, is_idle: Callable[[], bool]) -> None:
        """Check the whole cluster in some seconds, unless a payload runs by then; `found` has the result."""
        if self._timer is not None:
            self._timer.cancel()

        def answered(tables: Optional[Tables]) -> None:
            if tables is not None and is_idle():
                self._left = left_when_idle(tables)

        if self._cluster() is not None:
            self._timer = self._loop.call_later(_IDLE, lambda: self._query(_IDLE_TIMEOUT, answered) if is_idle() else None)

    def _query(self, timeout: float, done: Callable[[Optional[Tables]], None]) -> None:
        cluster = self._cluster()
        if cluster is None:
            done(None)
        else:
            cluster.query_tables(timeout, done)
