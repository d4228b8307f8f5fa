"""One Ray cluster: start its head, have the workers join, know when it is complete, notice when it is lost."""

from __future__ import annotations

import functools
import time
from dataclasses import asdict
from types import MappingProxyType
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Set, Tuple

from ..node.addresses import interface_address, join_host_port
from ..node.footprint import Footprint, node_footprint, runtime_footprint
from ..node.resources import NodeResources, footprint_error, from_facts
from ..node.worker_node import WorkerNode, WorkerNodes
from ..process.loop import Loop, Timer
from ..process.scratch import Scratch
from ..protocol.end import ClusterError, EndReason
from ..protocol.node_messages import NodeCommand, NodeEvent
from ..protocol.spec import RaySpec, RuntimeSpec, node_spec
from . import node_table
from .leak_check import Tables
from .node_table import Nodes, alive, nodes_expected, present
from .reports import Report
from .start import Event, RayListener, RayStart
from .start_arguments import ray_environment

UNSCHEDULABLE = "unschedulable"
"""Phase in which a payload waits for resources that no node can ever grant."""


class HeadNode(NamedTuple):
    """The node on which clusters have their head, and the nodes that join them.

    Attributes:
        machine: what this node grants.
        workers: the other nodes; None if there are none.
        address: the address by which this node is known to them; None for the one that Ray finds.
        environ: variables for Ray's daemons on this node; None for one that must not be set.
    """

    machine: NodeResources
    workers: Optional[WorkerNodes] = None
    address: Optional[str] = None
    environ: Mapping[str, Optional[str]] = MappingProxyType({})


class _JoiningWorkers:
    """The workers that one cluster waits for."""

    def __init__(self, spec: RaySpec, workers: Optional[WorkerNodes]) -> None:
        self.places: List[int] = []
        self.tails: Dict[str, str] = {}
        """The last lines of logs of workers that did not join."""
        self._workers = workers
        self._given_up: Set[int] = set()
        self._failures: Set[Tuple[int, int]] = set()
        """Workers whose Ray failed, and in which attempt."""
        self._counted: Set[int] = set()
        """Workers that know that the cluster counts their Ray in."""
        if workers is not None:
            self.places = sorted(workers.members)[: nodes_expected(spec, 1 + len(workers.members)) - 1]
        self.expected = 1 + len(self.places)
        """Nodes of the complete cluster, the head included."""
        self.needed = self.expected if spec.min_nodes is None else min(spec.min_nodes, self.expected)
        """Nodes without which the cluster does not start."""

    @property
    def members(self) -> List[WorkerNode]:
        return [self._workers.members[place] for place in self.places] if self._workers is not None else []

    def command(self, **command: Any) -> None:
        """Send a command to all of them."""
        if self._workers is not None:
            self._workers.send_command(self.places, **command)

    def is_new_failure(self, member: WorkerNode, attempt: int) -> bool:
        """Whether this failure was not reported yet; a node that reconnects repeats its report."""
        known = (member.node_id, attempt) in self._failures
        self._failures.add((member.node_id, attempt))
        return not known

    def give_up(self, member: WorkerNode) -> bool:
        """Wait for a worker no more; whether enough others may still join."""
        self._given_up.add(member.node_id)
        return self.expected - len(self._given_up) >= self.needed

    def command_present(self, nodes: Nodes, **command: Any) -> None:
        """Send a command once to each worker that the node table has."""
        here = present(nodes)
        for member in self.members:
            if member.node_id not in self._counted and member.joined and member.identity in here:
                self._counted.add(member.node_id)
                assert self._workers is not None
                self._workers.send_command([member.node_id], **command)

    def keep_tails(self, member: WorkerNode, tails: Mapping[str, str]) -> None:
        """Keep the last lines of the logs of a worker's Ray."""
        self.tails.update({"%s on %s" % (name, member.title): text for name, text in tails.items()})

    def keep_log(self, member: WorkerNode) -> None:
        """Keep the last lines of the log of a worker's runtime."""
        assert self._workers is not None
        tail = self._workers.log_tail(member)
        if tail.strip():
            self.tails["runtime on %s" % member.title] = tail

    def missing(self, nodes: Nodes) -> str:
        """Name the workers that are not in the node table, and keep the last lines of their logs."""
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
    """A Ray cluster whose head is below this runtime.

    Args:
        loop: where everything happens.
        runtime: the start record.
        head: the node of the head, and those that join.
        scratch: private directory for Ray's files and the token.
        listener: told what becomes of it.
        fresh: the cluster, if it is a payload's own; None for the one that the runtime keeps warm.
        key: tells it from other clusters on the same nodes; "" for the warm one.
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
        """Number of living nodes that the user was told last."""
        self._attempt = 0
        self._started = time.monotonic()
        self._failed = False
        self._ray: Optional[RayStart] = None
        self._queries: Dict[int, Callable[[Optional[Tables]], None]] = {}
        self._last_query = 0

    @property
    def environment(self) -> Dict[str, str]:
        """What a driver needs in its environment to reach this cluster and no other."""
        env = ray_environment(self.spec, self.scratch.join("ray.token"))
        if self.address:
            env["RAY_ADDRESS"] = self.address
        if self._dashboard_url:
            env["RAY_API_SERVER_ADDRESS"] = self._dashboard_url
        return env

    @property
    def ray_temp_dir(self) -> str:
        """Where Ray's own files are on this node."""
        return self.scratch.ray_temp_dir

    @property
    def pid(self) -> Optional[int]:
        """The process below which all of Ray on this node is."""
        return self._ray.pid if self._ray is not None else None

    def facts(self) -> Dict[str, Any]:
        """The cluster for metadata."""
        return {
            "ray_version": self.ray_version,
            "ray_address": self.address,
            "dashboard_url": self._dashboard_url,
            "bring_up": self._bring_up,
            "nodes": node_table.in_order(self._nodes, self._components),
        }

    def query_tables(self, timeout: float, done: Callable[[Optional[Tables]], None]) -> None:
        """Ask for the tables of the leak check; `done` gets None if they do not come within `timeout` seconds."""
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
        """Have Ray start idle workers for the next payload, if payloads begin with Ray imported."""
        if self._ray is not None and self.ready:
            self._ray.prestart()

    def start(self) -> None:
        """Begin to start the cluster; `on_ready` or `on_failed` of the listener follows."""
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
        """End every process of the cluster at once, on the other nodes as soon as the command reaches them."""
        if self.key and self._attempt:
            self._joining.command(op=NodeCommand.END_RAY, cluster=self.key)
        self.end()

    def end(self) -> None:
        """End every process of the cluster on this node at once; the listener is told no more."""
        self._failed = True
        if self._deadline is not None:
            self._deadline.cancel()
        if self._ray is not None:
            self._ray.end()

    def log_tails(self) -> Dict[str, str]:
        """The last lines of the logs that tell why a cluster failed."""
        own = self._ray.log_tails() if self._ray is not None else {}
        return {**own, **self._joining.tails}

    def handle(self, member: WorkerNode, message: Event) -> None:
        """Handle a message of the runtime on another node."""
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
        """Have the workers join; they start while the head does."""
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
        """Handle a report of the process that runs Ray on this node."""
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
        """Pass a phase on to the listener."""
        self._listener.on_phase(phase, message)

    def on_failed(self, error: ClusterError) -> None:
        """End Ray on this node and tell the listener, once."""
        if self._failed:
            return
        self.end()
        self._listener.on_failed(error)

    def _footprint(self, component: Optional[str]) -> Footprint:
        """What every node of a component must grant."""
        if self.key:
            return node_footprint(node_spec(self.spec, component))
        return runtime_footprint(self._runtime, component)

    def _check_present(self) -> None:
        """Check the nodes that joined or were lost before this cluster began to start."""
        for member in self._joining.members:
            if self._failed or not member.joined:
                continue
            self.handle(member, {"event": NodeEvent.JOINED})
            if not member.here:
                self._await_back(member)

    def _await_back(self, member: WorkerNode) -> None:
        member.await_back(self._loop, functools.partial(self._missed, member))

    def _missed(self, member: WorkerNode) -> None:
        """A worker that was lost while the cluster started did not come back in time."""
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
        """Tell the workers whose Ray is up, late ones too, that its end is a loss from here on."""
        self._joining.command_present(self._nodes, op=NodeCommand.RAY_READY, attempt=self._attempt, **self._name_in_commands)

    @property
    def _name_in_commands(self) -> Dict[str, str]:
        return {"cluster": self.key} if self.key else {}

    def _give_up(self, member: WorkerNode, error: ClusterError) -> None:
        """Go on without a worker; without enough workers the cluster fails."""
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
