"""Find what payloads leave alive in a warm Ray cluster: detached actors, placement groups, submitted jobs, used resources."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Callable, List, NamedTuple, Optional, Tuple

from ..process.loop import Loop, Timer
from .cluster import RayCluster, Tables

_TIMEOUT, _IDLE_TIMEOUT = 0.3, 5.0
"""Seconds that the end of a payload, and the check of the idle cluster, wait for the tables, which take some milliseconds."""
_IDLE = 10.0
"""Seconds from the last payload's end to the check of the idle cluster; Ray frees some resources late."""
_HINTS = {
    "actor": "detached actor %(name)r (%(class)s, namespace %(namespace)r) is still alive; end it with "
    "ray.kill(ray.get_actor(%(name)r, namespace=%(namespace)r)) before the payload ends",
    "group": "placement group %(title)s still holds its resources; give it back with "
    "ray.util.remove_placement_group(group) before the payload ends",
    "job": "job %(id)s of `ray job submit` still runs; end it with `ray job stop %(id)s` before the payload ends, "
    "or submit it without --no-wait",
}


class Leak(NamedTuple):
    """One thing that is left: its key in later tables, a sentence, the nonce of its payload if Ray tells, when a job began."""

    key: Tuple[str, str]
    message: str
    nonce: str = ""
    since: float = 0.0


def living(tables: Tables) -> List[Leak]:
    """Everything in the tables that is alive and does not end with the Ray job that made it; without side effects."""
    left = [(each, tables["jobs"].get(each["job"], "")) for each in tables["living"]]
    return [Leak((each["kind"], each["id"]), _HINTS[each["kind"]] % each, nonce, each["since"]) for each, nonce in left]


def left_when_idle(tables: Tables) -> List[Leak]:
    """What is still at work when no payload runs: submitted jobs, and used resources with everything that may hold them."""
    taken = []
    for name, total in sorted(tables["total"].items()):  # Idle workers and cached objects use memory until others need it.
        used = total - tables["available"].get(name, 0.0)
        if used > 1e-3 and not name.endswith("memory") and not name.startswith("node:") and "_group_" not in name:
            taken.append(Leak(("resource", name), "%s: %g of %g are not free although no payload runs" % (name, used, total)))
    return taken + [leak for leak in living(tables) if taken or leak.since]


@dataclass(eq=False)
class LeakCheck:
    """Finds what payloads leave in the warm Ray cluster, which `cluster` returns; `found` is what was left when it was idle."""

    loop: Loop
    cluster: Callable[[], Optional[RayCluster]]
    left: List[Leak] = field(default_factory=list)
    timer: Optional[Timer] = None

    @property
    def found(self) -> List[str]:
        return [leak.message for leak in self.left]

    def at_end(self, nonce: str) -> Callable[[Callable[[List[str]], None]], None]:
        """Returns a function to call at the end of the payload that starts now; it passes the payload's leaks to a callback."""
        began, cluster = time.time(), self.cluster()
        assert cluster is not None

        def answered(tables: Optional[Tables], done: Callable[[List[str]], None]) -> None:
            still = set() if tables is None else {leak.key for leak in left_when_idle(tables)}
            self.left = self.left if tables is None else [leak for leak in self.left if leak.key in still]
            left = [] if tables is None else [leak for leak in living(tables) if leak.nonce == nonce or leak.since >= began]
            done([leak.message for leak in left])

        return lambda done: cluster.query_tables(_TIMEOUT, lambda tables: answered(tables, done))

    def check_when_idle(self, is_idle: Callable[[], bool]) -> None:
        """Check the whole cluster in some seconds, unless a payload runs by then."""
        cluster = self.cluster()
        if self.timer is not None:
            self.timer.cancel()

        def answered(tables: Optional[Tables]) -> None:
            if tables is not None and is_idle():
                self.left = left_when_idle(tables)

        def check() -> None:
            if cluster is not None and is_idle():
                cluster.query_tables(_IDLE_TIMEOUT, answered)

        self.timer = self.loop.call_later(_IDLE, check)
