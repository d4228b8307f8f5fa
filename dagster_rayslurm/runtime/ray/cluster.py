"""A Ray cluster, seen from the head: starts the cluster, has the worker nodes join, reports when the cluster is ready.

`RayCluster` also notices lost nodes, and finds what payloads leave alive in a cluster that the runtime keeps warm for later
payloads: detached actors, placement groups, submitted jobs, used resources.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import os
import time
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Set, Tuple

from ..node.network import join_host_port
from ..node.resources import NodeResources, footprint_error, node_footprint, runtime_footprint
from ..node.worker_nodes import WorkerNode, WorkerNodes
from ..process.loop import Timer
from ..protocol.messages import ClusterError, EndReason, NodeCommand, NodeEvent, Unhealthy
from ..protocol.spec import RaySpec, node_spec
from . import membership
from .agent import NodeAgent
from .membership import Action, Event, Member, Membership, Report
from .metrics_targets import MetricsTargets
from .ray_node import ray_environment

Tables = Dict[str, Any]  # The answer of `internals.living_things`.


# ---- What payloads leave in the cluster

# Seconds for which the failure of one node's health check waits for those of other nodes, so that all are known at once.
_OTHER_CHECKS = 2.0
_TIMEOUT = 0.3  # Seconds that the end of a payload waits for the tables, which take some milliseconds.
_IDLE = 10.0  # Seconds from the last end of a payload to the check of the idle cluster; Ray frees some resources late.
_UNCOUNTED = ("memory", "object_store_memory")  # Idle workers and cached objects use memory until others need the memory.
_HINTS = {
    "actor": "detached actor %(name)r (%(class)s, namespace %(namespace)r) is still alive; end it with "
    "ray.kill(ray.get_actor(%(name)r, namespace=%(namespace)r)) before the payload ends",
    "group": "placement group %(title)s still holds its resources; give it back with "
    "ray.util.remove_placement_group(group) before the payload ends",
    "job": "job %(id)s of `ray job submit` still runs; end it with `ray job stop %(id)s` before the payload ends, "
    "or submit it without --no-wait",
}


class Leak(NamedTuple):
    """Something that a payload has left in a Ray cluster: an actor, a placement group, a submitted job or a used resource.

    `key` identifies the leak: a later search of the Ray cluster finds the same leak under the same key. `message` describes the
    leak for the Dagster log. `nonce` is the random name of the payload that has left it; "" if Ray does not know the payload.
    `since` is the start time of a submitted job, and 0 for other leaks.
    """

    key: str
    message: str
    nonce: str = ""
    since: float = 0.0


def living(tables: Tables) -> List[Leak]:
    """Returns a leak for each detached actor, each placement group and each running job of `ray job submit` in `tables`.

    These outlive the Ray job that has created them. `tables` is the result of `internals.living_things`.
    """
    nonces, rows = tables["jobs"], tables["living"]
    return [Leak(row["id"], _HINTS[row["kind"]] % row, nonces.get(row["job"], ""), row["since"]) for row in rows]


def left_when_idle(tables: Tables) -> List[Leak]:
    """Returns the leaks in `tables`, which were read while no payload ran.

    Leaks are submitted jobs that run, and resources that are not free. If a resource is not free, the result also has all
    detached actors and placement groups, because they may hold the resource. `tables` is the result of `internals.living_things`.
    """
    taken = []
    for name, total in sorted(tables["total"].items()):
        used = total - tables["available"].get(name, 0.0)
        if used > 1e-3 and name not in _UNCOUNTED and not name.startswith("node:") and "_group_" not in name:
            taken.append(Leak(name, "%s: %g of %g are not free although no payload runs" % (name, used, total)))
    return taken + [leak for leak in living(tables) if taken or leak.since]


# ---- The cluster

_HEAD = 0  # The id of the head among the nodes of an allocation.


@dataclass(eq=False)
class RayCluster:
    """A Ray cluster whose head is on this node: starts, watches and ends it. `Membership` decides what happens.

    The callback `tell` is called with each event that concerns the runtime's payloads: the Ray cluster is ready, has lost a
    node or has failed, or has a line for the Dagster log. The constructor raises OSError if no directory can be made for a
    payload's own Ray cluster.
    """

    head: NodeAgent  # The agent of this node.
    workers: WorkerNodes  # The worker nodes that can join.
    head_address: Optional[str]  # Address at which the worker nodes reach this node; None for the address that Ray finds.
    tell: Callable[["RayCluster", Action], None]  # Called with each action of `Membership` but `Join`, which is carried out here.
    fresh: Optional[RaySpec] = None  # Describes a payload's own cluster; None for the cluster that the runtime keeps warm.
    key: str = ""  # Names the cluster on its nodes: "" for the warm one, the payload's nonce for a payload's own.
    ray_version: Optional[str] = None
    address: Optional[str] = None  # "HOST:PORT" for drivers; None until the cluster is ready.
    unhealthy: List[Unhealthy] = field(default_factory=list)  # Nodes that failed a health check.
    # The leaks that the latest search of the idle cluster has found: for each `Leak.message`, the `Leak.key`.
    leaks: Dict[str, str] = field(default_factory=dict)
    _bring_up: Optional[float] = None
    _dashboard_url: Optional[str] = None
    _gcs: str = ""
    _targets: Optional[MetricsTargets] = None

    def __post_init__(self) -> None:
        self.loop = self.head.loop
        spec = self.head.spec.ray if self.fresh is None else self.fresh
        assert spec is not None
        self.spec = spec
        titles = [(place, node.title) for place, node in self.workers.members.items()]
        members = dict(titles[: membership.nodes_expected(spec, 1 + len(titles)) - 1])
        self.state = Membership(spec, self.head.machine.name, {place: Member(title) for place, title in members.items()})
        self._ray = self.head.prepare_ray(spec, self.key, self.state.expected, self.on_event)
        self._started = self.loop.now()
        self._tails: Dict[str, str] = {}  # The last lines of logs of worker nodes, by title.
        # The archives of logs that are being made, by run directory: the nodes that have not answered, the names of archives so
        # far, and what is called at the end.
        self._archives: Dict[str, Tuple[Set[int], List[str], Callable[[], None]]] = {}
        self._queries: Dict[int, Callable[[Optional[Tables]], None]] = {}
        self._query_ids = itertools.count(1)
        self._idle_check = self._deadline = Timer()

    @property
    def ready(self) -> bool:
        """Whether enough nodes have joined for payloads to start; stays True when nodes are lost later."""
        return self.state.ready

    @property
    def complete(self) -> bool:
        """Whether no further node is expected: each worker node has joined, or is not waited for any more."""
        return self.state.complete

    @property
    def environment(self) -> Dict[str, str]:
        """The environment variables, by name, with which a payload's `ray.init()` connects to this Ray cluster."""
        where = {"RAY_ADDRESS": self.address, "RAY_API_SERVER_ADDRESS": self._dashboard_url}
        return {**ray_environment(self.spec, self._ray.token_path), **{name: value for name, value in where.items() if value}}

    @property
    def dashboard_port(self) -> Optional[int]:
        """The dashboard's port on the loopback address of this node; None without dashboard, and until the cluster is ready."""
        return self._ray.ports.dashboard if self._dashboard_url else None

    @property
    def token(self) -> str:
        """Ray's token for authentication with this cluster; empty without authentication."""
        return self._ray.token if self.spec.auth == "token" else ""

    def facts(self) -> Dict[str, Any]:
        """Returns facts about this Ray cluster as a dictionary for JSON: Ray's version, addresses, seconds to start, and nodes.

        Facts that are not known yet are None.
        """
        return {
            "ray_version": self.ray_version,
            "ray_address": self.address,
            "dashboard_url": self._dashboard_url,
            "bring_up": self._bring_up,
            "nodes": membership.in_order(self.state.nodes, self.spec),
            "unhealthy": self.unhealthy,
        }

    def query_tables(self, timeout: float, done: Callable[[Optional[Tables]], None]) -> None:
        """Request the tables of `internals.living_things` (what lives in the Ray cluster) from the process of Ray's head.

        Does not block. `done` is called once, later, with the tables, or with None if there is no answer within `timeout`
        seconds.
        """
        query = next(self._query_ids)
        self._queries[query] = done
        asked = self._ray.request(tables=query)
        self.loop.call_later(timeout if asked else 0.0, lambda: self._answer(query, None))

    def leak_check(self, nonce: str) -> Callable[[Callable[[List[str]], None]], None]:
        """Called when a payload starts; returns a function, to be called when the payload ends, that finds the payload's leaks.

        That function does not block. Its argument is a callback, which is called once with a list of sentences, one for each
        leak; the list is empty if Ray does not answer in time. `nonce` is the random name of the payload.
        """
        began = time.time()

        def find(done: Callable[[List[str]], None], tables: Optional[Tables]) -> None:
            if tables is None:
                return done([])
            still = {leak.key for leak in left_when_idle(tables)}
            self.leaks = {message: key for message, key in self.leaks.items() if key in still}
            done([leak.message for leak in living(tables) if leak.nonce == nonce or leak.since >= began])

        return lambda done: self.query_tables(_TIMEOUT, lambda tables: find(done, tables))

    def check_when_idle(self, is_idle: Callable[[], bool]) -> None:
        """Have the Ray cluster searched for leaks in `_IDLE` seconds, if no payload runs then; the result is stored in `leaks`.

        Leaks are what earlier payloads have left: submitted jobs that run, resources that are not free, and the actors and
        placement groups that may hold them. `is_idle` returns whether no payload runs. If a payload runs when the search begins
        or ends, or if Ray does not answer, `leaks` stays unchanged. A new call cancels a search that has not begun.
        """

        def check(tables: Optional[Tables]) -> None:
            if tables is not None and is_idle():
                self.leaks = {leak.message: leak.key for leak in left_when_idle(tables)}

        self._idle_check.cancel()
        self._idle_check = self.loop.call_later(_IDLE, lambda: self.query_tables(5.0, check) if is_idle() else None)

    def prestart(self) -> None:
        """Request that Ray starts idle worker processes for the next payload; does nothing before the Ray cluster is ready.

        Ray starts them only in the warm Ray cluster, and only if the runtime preloads the module `ray`.
        """
        if self.ready:
            self._ray.request(prestart=True)

    def start(self) -> None:
        """Begin to start the Ray cluster; calls `tell` with `Ready` or a `ClusterError`, later or during this call.

        `tell` is the callback that was passed to the constructor.
        """
        self.loop.call_later(0.0, self._check_present)
        problem = self._problem(self.head.machine)
        if problem:
            return self.on_event({"event": Report.FAILED, "error": ClusterError(EndReason.CLUSTER_START, problem)})
        self._deadline = self.loop.call_later(self.spec.startup_timeout, lambda: self.on_event({"event": Report.DEADLINE}))
        self._ray.start(address=self.head_address)

    def stop(self) -> None:
        """Kill a payload's own Ray cluster on this node, and command the worker nodes to do the same on theirs.

        Its directory on this node is removed soon after.
        """
        if self.state.attempt:
            self.workers.send_command(self.state.members, op=NodeCommand.END_RAY, cluster=self.key)
        self.end()
        self.head.end_ray(self.key)

    def end(self) -> None:
        """Kill all processes of the Ray cluster on this node. The worker nodes get no message.

        `tell`, the callback that was passed to the constructor, is not called again.
        """
        self.state = replace(self.state, failed=True)
        self._deadline.cancel()
        if self._targets is not None:
            self._targets.stop()
        self._ray.end()

    def log_tails(self) -> Dict[str, str]:
        """Returns the last lines of logs that may tell why the Ray cluster failed, by name of log.

        They are the logs of this node and of worker nodes that failed; empty logs are left out.
        """
        given_up = [(place, member.title) for place, member in self.state.members.items() if member.given_up]
        logs = {"runtime on %s" % title: self.workers.log_tail(place) for place, title in given_up}
        return {**self._ray.log_tails(), **self._tails, **{name: text for name, text in logs.items() if text.strip()}}

    def archive_logs(self, run_dir: str, names: List[str], done: Callable[[], None]) -> None:
        """Archive Ray's logs of all connected nodes into the run directory `run_dir`, one archive for each node. Does not block.

        The file name of each archive is added to `names` as soon as it is written. `done` is called when all these nodes have
        answered or are lost; if a node is frozen, this may be late or never.
        """
        here = [place for place in self.state.members if self.workers.members[place].here]
        self._archives[run_dir] = {*here, _HEAD}, names, done
        for place in here:  # Not kept for a node that reconnects: by then, nobody waits for it.
            self.workers.members[place].send(op=NodeCommand.ARCHIVE, cluster=self.key, run_dir=run_dir)
        self.head.archive_logs(self.key, run_dir, lambda name: self._archived(_HEAD, run_dir, name))

    def _archived(self, place: int, run_dir: str, name: Optional[str]) -> None:
        missing, names, done = self._archives.get(run_dir, (set(), [], lambda: None))
        if name is not None and place in missing:
            bisect.insort(names, name)
        missing.discard(place)
        if not missing:
            self._archives.pop(run_dir, None)
            done()

    def handle(self, member: WorkerNode, message: Event) -> None:
        """Handle an event of a worker node (`NodeEvent`); an event that concerns another Ray cluster is ignored."""
        event, kind = {**message, "node": member.node_id}, message.get("event")
        if kind == NodeEvent.ARCHIVED:
            if message["cluster"] == self.key:
                self._archived(member.node_id, message["run_dir"], message["name"])
            return
        if kind in (NodeEvent.LOST, NodeEvent.GONE):
            for run_dir in list(self._archives):  # The archives of the other nodes count.
                self._archived(member.node_id, run_dir, None)
        if kind == NodeEvent.JOINED and member.machine is not None:
            event.update(identity=member.identity, here=member.here, problem=self._problem(member.machine))
        elif kind == NodeEvent.RAY_FAILED and event["cluster"] == self.key:
            self._tails.update({"%s on %s" % (name, member.title): text for name, text in event["tails"].items()})
        if kind in tuple(NodeEvent) and event.get("cluster", self.key) == self.key:
            self.on_event(event)

    def on_event(self, event: Event) -> None:
        """Handle a report of Ray on this node, or an event of a worker node: take the actions that `Membership` decides on."""
        kind = event["event"]
        if kind == Report.TABLES:
            self._answer(event["id"], event["tables"])
        elif kind == Report.NODES:
            self.ray_version = event["ray_version"]
        elif kind == Report.STARTING:
            self._gcs = event["gcs"]
        found = event["error"].unhealthy if kind == Report.FAILED else event.get("unhealthy")
        if found and found not in self.unhealthy:
            self.unhealthy.append(found)
        self.state, actions = self.state.step(event)
        for action in actions:
            if isinstance(action, membership.Join):
                how = {"gcs": self._gcs, "nodes": self.state.expected, "ray": asdict(self.spec) if self.key else None}
                command = {"cluster": self.key, "attempt": self.state.attempt, **how}
                self.workers.send_command(action.members, op=NodeCommand.START_RAY, **command)
                continue
            if isinstance(action, membership.Ready):
                self._be_ready(action.head)
            elif isinstance(action, ClusterError):
                if action.unhealthy and self.workers.members:
                    self._deadline.cancel()
                    self._deadline = self.loop.call_later(_OTHER_CHECKS, functools.partial(self._fail_health_check, action))
                    continue
                self.end()
            self.tell(self, action)

    def _fail_health_check(self, error: ClusterError) -> None:
        """End the Ray cluster because of a failed health check, and call the callback `tell` with a `ClusterError`.

        Its message is that of `error`, the first failure, and also names the other nodes that have failed their health checks
        by now.
        """
        self.end()
        others = [each["node"] for each in self.unhealthy if each != error.unhealthy]
        more = " (and so did %s)" % ", ".join(others) if others else ""
        self.tell(self, ClusterError(error.reason, "%s%s" % (error, more), error.unhealthy))

    def _answer(self, query: int, tables: Optional[Tables]) -> None:
        done = self._queries.pop(query, None)
        if done is not None:
            done(tables)

    def _problem(self, machine: NodeResources) -> Optional[str]:
        """Returns an error text if the node `machine` has too few CPUs, too few GPUs or too little memory for this Ray cluster.

        Returns None if the node has enough.
        """
        own = node_footprint(node_spec(self.spec, machine.component))
        return footprint_error(own if self.key else runtime_footprint(self.head.spec, machine.component), machine)

    def _check_present(self) -> None:
        """Handle worker nodes that had connected or were lost before this Ray cluster began to start, as if this happened now."""
        for worker in self.workers.members.values():
            if worker.joined:
                self.handle(worker, {"event": NodeEvent.JOINED})
            if worker.gone:
                self.handle(worker, {"event": NodeEvent.GONE})

    def _be_ready(self, head: membership.Node) -> None:
        self.address = join_host_port(head["address"], self._ray.ports.gcs)
        up = "Ray %s is up on %s" % (self.ray_version, membership.in_words(self.state.nodes, self.spec))
        if self.spec.dashboard:
            self._dashboard_url = "http://127.0.0.1:%d" % self._ray.ports.dashboard
        self._ray.ready = True
        if self.spec.metrics_dir is not None:
            name = "-".join(filter(None, [self.head.spec.cluster_id, self.key]))
            job = {"slurm_job": os.environ["SLURM_JOB_ID"]} if os.environ.get("SLURM_JOB_ID") else {}
            self._targets = MetricsTargets(self.loop, self.spec.metrics_dir, name, job, self._ray.scratch.ray_temp_dir)
            if self._targets.problem is not None:
                self.tell(self, membership.Say("metrics", self._targets.problem))
        self._bring_up = self.loop.now() - self._started
        self._deadline.cancel()
        self.tell(self, membership.Say(membership.CLUSTER_READY, up))
        self.prestart()
