"""One Ray cluster, seen from its head: start it, have the worker nodes join, say when it is ready, and notice lost nodes."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Callable, Dict, Mapping, Optional

from ..node.network import join_host_port
from ..node.resources import NodeResources, footprint_error, node_footprint, runtime_footprint
from ..node.worker_nodes import WorkerNode, WorkerNodes
from ..process.loop import Loop, Timer
from ..process.scratch import Scratch
from ..protocol.messages import ClusterError, EndReason, NodeCommand, NodeEvent
from ..protocol.spec import RaySpec, RuntimeSpec, node_spec
from . import membership
from .membership import Event, Member, Membership, Report
from .ray_node import RayNode, ray_environment

UNSCHEDULABLE = "unschedulable"
"""Name of the phase in which a payload waits for resources that no node of its Ray cluster can ever grant."""

Tables = Dict[str, Any]
"""The answer of `internals.living_things`."""


class RayListener:
    """Callbacks for what happens to a Ray cluster; in this base class they do nothing."""

    def on_ready(self) -> None:
        """Called once, when enough nodes have joined the Ray cluster."""

    def on_failed(self, error: ClusterError) -> None:
        """Called once, when the Ray cluster did not start or was lost."""

    def on_node_lost(self, name: str) -> None:
        """Called when a worker node was lost after the Ray cluster was ready."""

    def on_phase(self, phase: str, message: str) -> None:
        """Called when something happens that the Dagster log should show; `phase` is a word such as "cluster-start"."""


@dataclass(frozen=True)
class HeadNode:
    """What a Ray cluster must know of its head's node, and the worker nodes that can join."""

    machine: NodeResources
    workers: Optional[WorkerNodes] = None
    address: Optional[str] = None  # Of this node for the worker nodes; None for the one that Ray finds.
    environ: Mapping[str, Optional[str]] = field(default_factory=dict)  # For Ray's daemons; None removes a variable.


@dataclass(eq=False)
class RayCluster:
    """A Ray cluster whose head runs on this node: starts it, watches it and ends it. `Membership` decides."""

    loop: Loop
    runtime: RuntimeSpec
    head: HeadNode
    scratch: Scratch
    listener: RayListener
    fresh: Optional[RaySpec] = None  # Describes a payload's own cluster; None for the cluster that the runtime keeps warm.
    key: str = ""  # Names the cluster on its nodes; "" for the warm one.

    def __post_init__(self) -> None:
        spec = self.runtime.ray if self.fresh is None else self.fresh
        assert spec is not None
        self.spec = spec
        self.ray_version: Optional[str] = None
        self.address: Optional[str] = None
        self._workers = self.head.workers or WorkerNodes(self.loop, {}, lambda *_: None)
        titles = [(place, node.title) for place, node in self._workers.members.items()]
        members = dict(titles[: membership.nodes_expected(spec, 1 + len(titles)) - 1])
        self.state = Membership(spec, self.head.machine.name, {place: Member(title) for place, title in members.items()})
        self._started = self.loop.now()
        self._bring_up: Optional[float] = None
        self._dashboard_url: Optional[str] = None
        self._deadline: Optional[Timer] = None
        self._ray: Optional[RayNode] = None
        self._gcs = ""
        self._tails: Dict[str, str] = {}
        """The last lines of logs of worker nodes, by title."""
        self._queries: Dict[int, Callable[[Optional[Tables]], None]] = {}
        self._query_ids = itertools.count(1)

    @property
    def ready(self) -> bool:
        """Whether enough nodes have joined."""
        return self.state.ready

    @property
    def environment(self) -> Dict[str, str]:
        """Environment variables with which a payload's `ray.init()` connects to this cluster."""
        env = ray_environment(self.spec, self.scratch.join("ray.token"))
        where = {"RAY_ADDRESS": self.address, "RAY_API_SERVER_ADDRESS": self._dashboard_url}
        return {**env, **{name: value for name, value in where.items() if value}}

    @property
    def ray_temp_dir(self) -> str:
        """The directory of Ray's own files on this node."""
        return self.scratch.ray_temp_dir

    @property
    def pid(self) -> Optional[int]:
        """Id of the process of which all of Ray's processes on this node are descendants; None if there is none."""
        return self._ray.pid if self._ray is not None else None

    def facts(self) -> Dict[str, Any]:
        """Version, addresses, start time and nodes of the cluster, for the payload's metadata."""
        return {
            "ray_version": self.ray_version,
            "ray_address": self.address,
            "dashboard_url": self._dashboard_url,
            "bring_up": self._bring_up,
            "nodes": membership.in_order(self.state.nodes, self.spec),
        }

    def query_tables(self, timeout: float, done: Callable[[Optional[Tables]], None]) -> None:
        """Ask Ray's process for the tables of the leak check, and call `done` with them, or with None after `timeout` seconds."""
        query = next(self._query_ids)
        self._queries[query] = done
        asked = self._ray is not None and self._ray.request(tables=query)
        self.loop.call_later(timeout if asked else 0.0, lambda: self._answer(query, None))

    def prestart(self) -> None:
        """Have Ray start idle worker processes for the next payload, if the runtime preloads Ray for payloads."""
        if self._ray is not None and self.ready:
            self._ray.request(prestart=True)

    def start(self) -> None:
        """Begin to start the cluster; later the listener's `on_ready` or `on_failed` is called."""
        self.loop.call_later(0.0, self._check_present)
        problem = self._problem(self.head.machine)
        if problem:
            return self.on_event({"event": Report.FAILED, "error": ClusterError(EndReason.CLUSTER_START, problem)})
        self._deadline = self.loop.call_later(self.spec.startup_timeout, lambda: self.on_event({"event": Report.DEADLINE}))
        nodes, environ = self.state.expected, self.head.environ
        self._ray = RayNode(
            self.loop, self.runtime, self.spec, self.key, self.head.machine, self.scratch, nodes, self.on_event, environ
        )
        self._ray.start(address=self.head.address)

    def stop(self) -> None:
        """End every process of the cluster at once, on worker nodes as soon as the command reaches them."""
        if self.key and self.state.attempt:
            self._workers.send_command(self.state.members, op=NodeCommand.END_RAY, cluster=self.key)
        self.end()

    def end(self) -> None:
        """End every process of the cluster on this node at once; the listener gets no more events."""
        self.state = replace(self.state, failed=True)
        if self._deadline is not None:
            self._deadline.cancel()
        if self._ray is not None:
            self._ray.end()

    def log_tails(self) -> Dict[str, str]:
        """The last lines of the logs that may tell why the cluster failed, by title, from this node and from worker nodes."""
        own = self._ray.log_tails() if self._ray is not None else {}
        given_up = [(place, member.title) for place, member in self.state.members.items() if member.given_up]
        logs = {"runtime on %s" % title: self._workers.log_tail(place) for place, title in given_up}
        return {**own, **self._tails, **{name: text for name, text in logs.items() if text.strip()}}

    def handle(self, member: WorkerNode, message: Event) -> None:
        """Called with each event of a worker node."""
        event = {**message, "node": member.node_id}
        if event.get("event") not in tuple(NodeEvent):
            return
        if event["event"] == NodeEvent.JOINED:
            event.update(identity=member.identity, here=member.here, problem=self._problem(NodeResources(**member.machine)))
        elif event["event"] == NodeEvent.RAY_FAILED:
            if event["cluster"] != self.key:
                return
            self._tails.update({"%s on %s" % (name, member.title): text for name, text in event["tails"].items()})
        self.on_event(event)

    def on_event(self, event: Event) -> None:
        """Called with each report of Ray on this node, and each event of a worker node."""
        kind = event["event"]
        if kind == Report.TABLES:
            self._answer(event["id"], event["tables"])
        elif kind == Report.VERSION:
            self.ray_version = event["ray_version"]
        elif kind == Report.UNSCHEDULABLE:
            self.listener.on_phase(UNSCHEDULABLE, event["message"])
        elif kind == Report.RETRY:
            self.listener.on_phase("cluster-start", event["message"])
        elif kind == Report.STARTING:
            self._gcs = event["gcs"]
        self.state, actions = self.state.step(event)
        for action in actions:
            self._do(action)

    def _do(self, action: membership.Action) -> None:
        if isinstance(action, membership.Say):
            self.listener.on_phase(*action)
        elif isinstance(action, membership.Send):
            own: Dict[str, Any] = {}
            if action.op == NodeCommand.START_RAY:
                own = {"gcs": self._gcs, "nodes": self.state.expected, "ray": asdict(self.spec) if self.key else None}
            self._workers.send_command(action.to, op=action.op, cluster=self.key, attempt=self.state.attempt, **own)
        elif isinstance(action, membership.NodeLost):
            self.listener.on_node_lost(action.title)
        elif isinstance(action, membership.Ready):
            self._be_ready(action.head)
        else:
            self.end()
            self.listener.on_failed(action)

    def _answer(self, query: int, tables: Optional[Tables]) -> None:
        done = self._queries.pop(query, None)
        if done is not None:
            done(tables)

    def _problem(self, machine: NodeResources) -> Optional[str]:
        """Why a node has too few resources for this cluster; None if they suffice."""
        own = node_footprint(node_spec(self.spec, machine.component))
        return footprint_error(own if self.key else runtime_footprint(self.runtime, machine.component), machine)

    def _check_present(self) -> None:
        """Handle the nodes that had connected, or were lost, before this cluster began to start."""
        for worker in self._workers.members.values():
            if worker.joined:
                self.handle(worker, {"event": NodeEvent.JOINED})
            if worker.gone:
                self.handle(worker, {"event": NodeEvent.GONE})

    def _be_ready(self, head: membership.Node) -> None:
        assert self._ray is not None and self._ray.ports is not None
        self.address = join_host_port(head["address"], self._ray.ports.gcs)
        up = "Ray %s is up on %s" % (self.ray_version, membership.in_words(self.state.nodes, self.spec))
        if self.spec.dashboard:
            self._dashboard_url = "http://127.0.0.1:%d" % self._ray.ports.dashboard
            up += ", dashboard: %s on %s" % (self._dashboard_url, head["hostname"])
        self._ray.ready = True
        self._bring_up = self.loop.now() - self._started
        if self._deadline is not None:
            self._deadline.cancel()
        self.listener.on_phase("cluster-ready", up)
        self.prestart()
        self.listener.on_ready()
