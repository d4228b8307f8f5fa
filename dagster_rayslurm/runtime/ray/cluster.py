"""One Ray cluster, seen from its head: start it, have the worker nodes join, say when it is ready, and notice lost nodes."""

from __future__ import annotations

import functools
import time
from dataclasses import asdict
from types import MappingProxyType
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Set, Tuple

from ..node.network import interface_address, join_host_port
from ..node.resources import Footprint, NodeResources, footprint_error, from_facts, node_footprint, runtime_footprint
from ..node.worker_node import WorkerNode, WorkerNodes
from ..process.loop import Loop, Timer
from ..process.scratch import Scratch
from ..protocol.end import ClusterError, EndReason
from ..protocol.messages import NodeCommand, NodeEvent
from ..protocol.spec import RaySpec, RuntimeSpec, node_spec
from . import node_table
from .leak_check import Tables
from .node_table import Nodes, alive, nodes_expected, present
from .reports import Report
from .start import Event, RayListener, RayStart
from .start_arguments import ray_environment

UNSCHEDULABLE = "unschedulable"
"""Name of the phase in which a payload waits for resources that no node of its Ray cluster can ever grant."""


class HeadNode(NamedTuple):
    """What a Ray cluster must know of its head's node: resources, address and variables, and the worker nodes that can join.

    Attributes:
        machine: the resources of this node.
        workers: the worker nodes; None if there are none.
        address: the address of this node for the worker nodes; None for the one that Ray finds.
        environ: environment variables for Ray's daemons on this node; the value None removes a variable.
    """

    machine: NodeResources
    workers: Optional[WorkerNodes] = None
    address: Optional[str] = None
    environ: Mapping[str, Optional[str]] = MappingProxyType({})


class _JoiningWorkers:
    """The worker nodes that one Ray cluster waits for: which have failed, and which the cluster can do without."""

    def __init__(self, spec: RaySpec, workers: Optional[WorkerNodes]) -> None:
        self.places: List[int] = []
        """Ids of the worker nodes of the complete cluster."""
        self.tails: Dict[str, str] = {}
        """The last lines of logs of worker nodes that did not join, by title."""
        self._workers = workers
        self._given_up: Set[int] = set()
        """Ids of the worker nodes that the cluster no longer waits for."""
        self._failures: Set[Tuple[int, int]] = set()
        """Ids of the nodes whose Ray failed, each with the number of the attempt to start the cluster."""
        self._counted: Set[int] = set()
        """Ids of the nodes that were told that Ray's node table contains them."""
        if workers is not None:
            self.places = sorted(workers.members)[: nodes_expected(spec, 1 + len(workers.members)) - 1]
        self.expected = 1 + len(self.places)
        """Number of nodes of the complete cluster, the head included."""
        self.needed = self.expected if spec.min_nodes is None else min(spec.min_nodes, self.expected)
        """Least number of nodes with which the cluster starts, the head included."""

    @property
    def members(self) -> List[WorkerNode]:
        """The worker nodes of the complete cluster, joined or not."""
        return [self._workers.members[place] for place in self.places] if self._workers is not None else []

    def command(self, **command: Any) -> None:
        """Send a command to all worker nodes of the cluster."""
        if self._workers is not None:
            self._workers.send_command(self.places, **command)

    def is_new_failure(self, member: WorkerNode, attempt: int) -> bool:
        """Whether a node reports its failure for the first time; a node that reconnects repeats its report."""
        known = (member.node_id, attempt) in self._failures
        self._failures.add((member.node_id, attempt))
        return not known

    def give_up(self, member: WorkerNode) -> bool:
        """Wait for a worker node no more. Returns whether enough other nodes may still join to start the cluster."""
        self._given_up.add(member.node_id)
        return self.expected - len(self._given_up) >= self.needed

    def command_present(self, nodes: Nodes, **command: Any) -> None:
        """Send a command, only once, to each worker node that Ray's node table reports as alive."""
        here = present(nodes)
        for member in self.members:
            if member.node_id not in self._counted and member.joined and member.identity in here:
                self._counted.add(member.node_id)
                assert self._workers is not None
                self._workers.send_command([member.node_id], **command)

    def keep_tails(self, member: WorkerNode, tails: Mapping[str, str]) -> None:
        """Keep the last lines of the logs that Ray wrote on a worker node."""
        self.tails.update({"%s on %s" % (name, member.title): text for name, text in tails.items()})

    def keep_log(self, member: WorkerNode) -> None:
        """Keep the last lines of the log that the runtime wrote on a worker node."""
        assert self._workers is not None
        tail = self._workers.log_tail(member)
        if tail.strip():
            self.tails["runtime on %s" % member.title] = tail

    def missing(self, nodes: Nodes) -> str:
        """Say which worker nodes are missing in Ray's node table, and keep the last lines of their logs. Returns the sentence."""
        here = present(nodes)
        missing = [member for member in self.members if not member.joined or member.identity not in here]
        unheard = [member.title for member in missing if not member.here]
        for member in missing:
            self.keep_log(member)
        joined = "%d of %d nodes joined" % (len(alive(nodes)), self.expected)
        what = "%s, missing: %s" % (joined, ", ".join(member.title for member in missing))
        if unheard:
            what += " (no word from the runtime on %s)" % ", ".join(unheard)
        return what


class RayCluster(RayListener):
    """A Ray cluster whose head runs on this node: starts it, watches it and ends it.

    Args:
        loop: the event loop.
        runtime: the start record.
        head: this node, and the worker nodes that join.
        scratch: private directory for Ray's files and the token.
        listener: gets the events of the cluster.
        fresh: describes a payload's own cluster; None for the cluster that the runtime keeps warm.
        key: identifies the cluster among those on the same nodes; "" for the warm one.
    """

    def __init__(
        self,
        loop: Loop,
        runtime: RuntimeSpec,
        head: HeadNode,
        scratch: Scratch,
        listener: RayListener,
        fresh: Optional[RaySpec] = None,
        key: str = "",
    ) -> None:
        spec = runtime.ray if fresh is None else fresh
        assert spec is not None
        self.spec = spec
        self.key = key
        self.ready = False
        self.ray_version: Optional[str] = None
        self.address: Optional[str] = None
        self._nodes: Nodes = {}
        self._bring_up: Optional[float] = None
        self._dashboard_url: Optional[str] = None
        self._loop = loop
        self._runtime = runtime
        self._head = head
        self._machine = head.machine
        self.scratch = scratch
        self._listener = listener
        self._own = node_spec(spec, head.machine.component)
        self._components = [each.component_id for each in spec.components]
        self._joining = _JoiningWorkers(spec, head.workers)
        self._entrypoint = spec.launch_style == "builtin"
        self._deadline: Optional[Timer] = None
        self._joined = 0
        """Number of joined nodes in the latest message to the Dagster log."""
        self._attempt = 0
        self._started = time.monotonic()
        self._failed = False
        self._ray: Optional[RayStart] = None
        self._queries: Dict[int, Callable[[Optional[Tables]], None]] = {}
        self._last_query = 0

    @property
    def environment(self) -> Dict[str, str]:
        """Environment variables with which a payload's `ray.init()` connects to this cluster."""
        env = ray_environment(self.spec, self.scratch.join("ray.token"))
        if self.address:
            env["RAY_ADDRESS"] = self.address
        if self._dashboard_url:
            env["RAY_API_SERVER_ADDRESS"] = self._dashboard_url
        return env

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
            "nodes": node_table.in_order(self._nodes, self._components),
        }

    def query_tables(self, timeout: float, done: Callable[[Optional[Tables]], None]) -> None:
        """Ask Ray's process for the tables of the leak check, and call `done` with them, or with None after `timeout` seconds."""
        self._last_query += 1
        query = self._last_query
        self._queries[query] = done
        asked = self._ray is not None and self._ray.query_tables(query)
        self._loop.call_later(timeout if asked else 0.0, lambda: self._answer(query, None))

    def _answer(self, query: int, tables: Optional[Tables]) -> None:
        done = self._queries.pop(query, None)
        if done is not None:
            done(tables)

    def prestart(self) -> None:
        """Have Ray start idle worker processes for the next payload, if the runtime preloads Ray for payloads."""
        if self._ray is not None and self.ready:
            self._ray.prestart()

    def start(self) -> None:
        """Begin to start the cluster; later the listener's `on_ready` or `on_failed` is called."""
        self._loop.call_later(0.0, self._check_present)
        problem = footprint_error(self._footprint(self._machine.component), self._machine)
        if problem:
            return self.on_failed(ClusterError(EndReason.CLUSTER_START, problem))
        self._deadline = self._loop.call_later(self.spec.startup_timeout, self._timed_out)
        address = self._head.address
        try:
            if self.spec.node_ip_address:
                address = self.spec.node_ip_address
            elif self._own.network_interface:
                address = interface_address(self._own.network_interface)
        except ClusterError as error:
            return self.on_failed(error)
        self._ray = RayStart(
            self._loop,
            self._runtime,
            self._own,
            self.key,
            self._machine,
            self.scratch,
            self._joining.expected,
            self,
            self._head.environ,
        )
        self._ray.start(address)

    def stop(self) -> None:
        """End every process of the cluster at once, on worker nodes as soon as the command reaches them."""
        if self.key and self._attempt:
            self._joining.command(op=NodeCommand.END_RAY, cluster=self.key)
        self.end()

    def end(self) -> None:
        """End every process of the cluster on this node at once; the listener gets no more events."""
        self._failed = True
        if self._deadline is not None:
            self._deadline.cancel()
        if self._ray is not None:
            self._ray.end()

    def log_tails(self) -> Dict[str, str]:
        """The last lines of the logs that may tell why the cluster failed, by title, from this node and from worker nodes."""
        own = self._ray.log_tails() if self._ray is not None else {}
        return {**own, **self._joining.tails}

    def handle(self, member: WorkerNode, message: Event) -> None:
        """Called when a worker node has joined, has failed to start Ray, or is lost; `message` says which."""
        if self._failed:
            return
        event = message.get("event")
        if event == NodeEvent.JOINED:
            problem = footprint_error(self._footprint(member.component), from_facts(member.machine))
            if problem:
                self._give_up(member, ClusterError(EndReason.CLUSTER_START, problem))
        elif event == NodeEvent.RAY_FAILED and (message.get("cluster", ""), message.get("attempt")) == (self.key, self._attempt):
            if not self._joining.is_new_failure(member, self._attempt):
                return
            self._joining.keep_tails(member, message.get("tails", {}))
            self._give_up(member, ClusterError(EndReason(message["reason"]), message["message"]))
        elif event == NodeEvent.LOST:
            if self.ready:
                self.on_phase("node-lost", "node %s is lost: %s" % (member.title, message["message"]))
            else:
                self.on_phase("cluster-start", "node %s is out of reach: %s" % (member.title, message["message"]))
                self._await_back(member)

    def on_gcs(self, gcs: str) -> None:
        """Called when the head's port is chosen: have the worker nodes start Ray while the head starts."""
        self._attempt += 1
        whole = {"ray": asdict(self.spec)} if self.key else {}
        self._joining.command(
            op=NodeCommand.START_RAY,
            gcs=gcs,
            attempt=self._attempt,
            nodes=self._joining.expected,
            **self._name_in_commands,
            **whole,
        )

    def on_report(self, event: Event) -> None:
        """Called when the process that runs Ray on this node reports something."""
        name = event["event"]
        if name == Report.TABLES:
            self._answer(event["id"], event["tables"])
        elif name == Report.VERSION:
            self.ray_version = event["ray_version"]
        elif name == Report.ENTRYPOINT:
            self._entrypoint = True
            self._ready_if_complete()
        elif name == Report.NODES:
            self._update_nodes(event["nodes"])
        elif name == Report.UNSCHEDULABLE:
            self.on_phase(UNSCHEDULABLE, event["message"])
        elif name == Report.GCS_LOST and self.ready:
            self.on_failed(ClusterError(EndReason.CLUSTER_LOST, "the GCS on node %s is gone" % self._machine.name))

    def on_phase(self, phase: str, message: str) -> None:
        """Called when something happens that the Dagster log should show: pass it on to the listener."""
        self._listener.on_phase(phase, message)

    def on_failed(self, error: ClusterError) -> None:
        """Called when the cluster has failed: end Ray on this node and tell the listener; a later call does nothing."""
        if self._failed:
            return
        self.end()
        self._listener.on_failed(error)

    def _footprint(self, component: Optional[str]) -> Footprint:
        """The resources that every node of a component must have for this cluster."""
        if self.key:
            return node_footprint(node_spec(self.spec, component))
        return runtime_footprint(self._runtime, component)

    def _check_present(self) -> None:
        """Handle the nodes that had connected, or were lost, before this cluster began to start."""
        for member in self._joining.members:
            if self._failed or not member.joined:
                continue
            self.handle(member, {"event": NodeEvent.JOINED})
            if not member.here:
                self._await_back(member)

    def _await_back(self, member: WorkerNode) -> None:
        member.await_back(self._loop, functools.partial(self._missed, member))

    def _missed(self, member: WorkerNode) -> None:
        """Called when a worker node that was lost while the cluster started did not connect again in time."""
        if not self.ready and not self._failed:
            self._joining.keep_log(member)
            self._give_up(
                member, ClusterError(EndReason.CLUSTER_START, "node %s was lost while the cluster started" % member.title)
            )

    def _update_nodes(self, nodes: Nodes) -> None:
        before, self._nodes = self._nodes, node_table.within(self.spec, nodes)
        if self.ready:
            for gone in node_table.lost(before, self._nodes):
                if gone["head"]:
                    return self.on_failed(ClusterError(EndReason.CLUSTER_LOST, "the GCS reports the head node as dead"))
                self.on_phase("node-lost", "Ray on node %s is dead, the others go on" % node_table.title(gone))
                self._listener.on_node_lost(node_table.title(gone))
            return self._count_in()
        joined = len(alive(self._nodes))
        if self._joining.places and joined != self._joined:
            self._joined = joined
            self.on_phase("cluster-start", "%d/%d nodes joined" % (joined, self._joining.expected))
        self._ready_if_complete()

    def _ready_if_complete(self) -> None:
        living = alive(self._nodes)
        head = next((node for node in living if node["head"]), None)
        if self.ready or self._failed or head is None or len(living) < self._joining.needed or not self._entrypoint:
            return
        assert self._ray is not None and self._ray.ports is not None
        self.address = join_host_port(head["address"], self._ray.ports.gcs)
        if self.spec.dashboard:
            self._dashboard_url = "http://127.0.0.1:%d" % self._ray.ports.dashboard
        self.ready = self._ray.ready = True
        self._bring_up = time.monotonic() - self._started
        if self._deadline is not None:
            self._deadline.cancel()
        up = "Ray %s is up on %s" % (self.ray_version, node_table.in_words(self._nodes, self._components))
        if self._dashboard_url:
            up += ", dashboard: %s on %s" % (self._dashboard_url, head["hostname"])
        self.on_phase("cluster-ready", up)
        self._count_in()
        self.prestart()
        self._listener.on_ready()

    def _count_in(self) -> None:
        """Tell each worker node in Ray's node table that the cluster uses it, so that an end of its Ray is a loss from now on."""
        self._joining.command_present(self._nodes, op=NodeCommand.RAY_READY, attempt=self._attempt, **self._name_in_commands)

    @property
    def _name_in_commands(self) -> Dict[str, str]:
        return {"cluster": self.key} if self.key else {}

    def _give_up(self, member: WorkerNode, error: ClusterError) -> None:
        """Go on without a worker node; fail the cluster if too few nodes are left to start it."""
        if self.ready:
            self._listener.on_node_lost(member.title)
            return self.on_phase("node-lost", "node %s: %s" % (member.title, error))
        if member.node_id not in self._joining.places:
            return
        if not self._joining.give_up(member):
            self.on_failed(error)
        else:
            self.on_phase("cluster-start", "the cluster starts without node %s: %s" % (member.title, error))

    def _timed_out(self) -> None:
        limit = "within startup_timeout=%g s" % self.spec.startup_timeout
        living, name = alive(self._nodes), self._machine.name
        if self._ray is None or not self._ray.started:
            why = "the health check did not end on node %s %s" % (name, limit)
        elif not living:
            why = "Ray was not up on node %s %s" % (name, limit)
        elif len(living) >= self._joining.needed:
            why = "`ray symmetric-run` did not start its command " + limit
        else:
            why = self._joining.missing(self._nodes) + " " + limit
        self.on_failed(ClusterError(EndReason.CLUSTER_START, why))
