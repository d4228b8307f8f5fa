"""Find what payloads leave alive in a warm Ray cluster: detached actors, placement groups, submitted jobs, used resources."""

from __future__ import annotations

import time
from typing import Callable, Dict, List, NamedTuple, Optional

from ..process.loop import Loop
from .cluster import RayCluster, Tables

_TIMEOUT = 0.3  # Seconds that the end of a payload waits for the tables, which take some milliseconds.
_IDLE = 10.0  # Seconds from the last end of a payload to the check of the idle cluster; Ray frees some resources late.
_UNCOUNTED = ("memory", "object_store_memory")  # Idle workers and cached objects use them until others need them.
_HINTS = {
    "actor": "detached actor %(name)r (%(class)s, namespace %(namespace)r) is still alive; end it with "
    "ray.kill(ray.get_actor(%(name)r, namespace=%(namespace)r)) before the payload ends",
    "group": "placement group %(title)s still holds its resources; give it back with "
    "ray.util.remove_placement_group(group) before the payload ends",
    "job": "job %(id)s of `ray job submit` still runs; end it with `ray job stop %(id)s` before the payload ends, "
    "or submit it without --no-wait",
}


class Leak(NamedTuple):
    """One thing that is left: its name in later tables, a sentence, its payload's nonce if Ray tells, when a job began."""

    key: str
    message: str
    nonce: str = ""
    since: float = 0.0


def living(tables: Tables) -> List[Leak]:
    """Everything in the tables that is alive and does not end with the Ray job that made it; without side effects."""
    nonces, rows = tables["jobs"], tables["living"]
    return [Leak(row["id"], _HINTS[row["kind"]] % row, nonces.get(row["job"], ""), row["since"]) for row in rows]


def left_when_idle(tables: Tables) -> List[Leak]:
    """What is still at work when no payload runs: submitted jobs, and used resources with everything that may hold them."""
    taken = []
    for name, total in sorted(tables["total"].items()):
        used = total - tables["available"].get(name, 0.0)
        if used > 1e-3 and name not in _UNCOUNTED and not name.startswith("node:") and "_group_" not in name:
            taken.append(Leak(name, "%s: %g of %g are not free although no payload runs" % (name, used, total)))
    return taken + [leak for leak in living(tables) if taken or leak.since]


class LeakCheck:
    """Finds what payloads leave in the warm Ray cluster, which `cluster` returns."""

    def __init__(self, loop: Loop, cluster: Callable[[], Optional[RayCluster]]) -> None:
        self._loop, self._cluster, self._timer = loop, cluster, loop.call_later(0.0, lambda: None)
        self.found: Dict[str, str] = {}  # What was left when the cluster was idle, and has not ended since: key by sentence.

    def at_end(self, nonce: str) -> Callable[[Callable[[List[str]], None]], None]:
        """Returns a function to call at the end of the payload that starts now; it passes the payload's leaks to a callback."""
        began, cluster = time.time(), self._cluster()
        assert cluster is not None

        def find(done: Callable[[List[str]], None], tables: Optional[Tables]) -> None:
            if tables is not None:
                still = {leak.key for leak in left_when_idle(tables)}
                self.found = {message: key for message, key in self.found.items() if key in still}
            left = [] if tables is None else living(tables)
            done([leak.message for leak in left if leak.nonce == nonce or leak.since >= began])

        return lambda done: cluster.query_tables(_TIMEOUT, lambda tables: find(done, tables))

    def check_when_idle(self, is_idle: Callable[[], bool]) -> None:
        """Check the whole cluster in some seconds, unless a payload runs by then."""

        def check(tables: Optional[Tables]) -> None:
            if tables is not None and is_idle():
                self.found = {leak.message: leak.key for leak in left_when_idle(tables)}

        self._timer.cancel()
        cluster = self._cluster()
        if cluster is not None:
            self._timer = self._loop.call_later(_IDLE, lambda: cluster.query_tables(5.0, check) if is_idle() else None)
