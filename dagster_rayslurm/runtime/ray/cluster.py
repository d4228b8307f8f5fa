"""One Ray cluster: start its head, let the other nodes join, report when it is complete or lost.

The workers that one cluster waits for: who shall join, who will not after all, who is missing, and what their logs say.

One Ray cluster: start its head and have the other nodes join, know when it is complete, notice when it is lost.
"""

from __future__ import annotations

import functools
import time
from dataclasses import asdict
from types import MappingProxyType
from typing import Any, Callable, Dict, List, Mapping, Optional, Set, Tuple

from ..node.addresses import interface_address, join_host_port
from ..node.resources import Footprint, NodeResources, footprint_error, from_facts
from ..node.worker_node import WorkerNode, WorkerNodes
from ..process.loop import Loop, Timer
from ..process.scratch import Scratch
from ..protocol.end import ClusterError, EndReason
from ..protocol.spec import RaySpec, node_spec
from . import node_table
from .leak_check import LeakQuery, Tables
from .node_table import Nodes, alive, nodes_expected, present
from .start import Event, RayStart
from .start_arguments import ray_environment


class JoiningWorkers:
    """Keeps account of the workers of one cluster.

    Args:
        spec: what is asked for.
        team: the other nodes; None if there are none.
    """

    def __init__(self, spec: RaySpec, team: Optional[WorkerNodes]) -> None:
        self.places: List[int] = []
        """The workers that shall join, by place."""
        self.tails: Dict[str, str] = {}
        """The last lines of logs of workers that did not join."""
        self._spec = spec
        self._team = team
        self._given_up: Set[int] = set()
        self._failures: Set[Tuple[int, int]] = set()
        """Workers whose Ray failed, and in which attempt."""
        self._told: Set[int] = set()
        """Workers that know that their Ray counts."""
        if team is not None:
            self.places = sorted(team.members)[: nodes_expected(spec, 1 + len(team.members)) - 1]

    @property
    def expected(self) -> int:
        """Nodes that the cluster has when it is complete, the head included."""
        return 1 + len(self.places)

    @property
    def needed(self) -> int:
        """Nodes without which it does not start."""
        return self.expected if self._spec.min_nodes is None else min(self._spec.min_nodes, self.expected)

    @property
    def members(self) -> List[WorkerNode]:
        """The workers that shall join."""
        return [self._team.members[place] for place in self.places] if self._team is not None else []

    def order(self, **order: Any) -> None:
        """Tell all of them something."""
        if self._team is not None:
            self._team.order(self.places, **order)

    def is_news(self, member: WorkerNode, attempt: int) -> bool:
        """Whether the failure of a worker's Ray in this attempt was not known; a node that is back tells of it once more."""
        known = (member.node_id, attempt) in self._failures
        self._failures.add((member.node_id, attempt))
        return not known

    def give_up(self, member: WorkerNode) -> bool:
        """Wait for a worker no more; whether enough others may still join."""
        self._given_up.add(member.node_id)
        return self.expected - len(self._given_up) >= self.needed

    def tell_those_in(self, nodes: Nodes, **order: Any) -> None:
        """Tell those something that the table of nodes has, each of them once."""
        here = present(nodes)
        for member in self.members:
            if member.node_id not in self._told and member.joined and member.identity in here:
                self._told.add(member.node_id)
                assert self._team is not None
                self._team.order([member.node_id], **order)

    def keep_tails(self, member: WorkerNode, tails: Mapping[str, str]) -> None:
        """Keep what the logs of a worker's Ray say."""
        for name, text in tails.items():
            self.tails["%s on %s" % (name, member.title)] = text

    def keep_log(self, member: WorkerNode) -> None:
        """Keep what a worker's runtime had to say."""
        assert self._team is not None
        tail = self._team.log_tail(member)
        if tail.strip():
            self.tails["runtime on %s" % member.title] = tail

    def who_is_missing(self, nodes: Nodes) -> str:
        """Names the workers that are not in the table of nodes, and keeps what their logs say."""
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


UNSCHEDULABLE = "unschedulable"
"""Phase in which a payload asks for what no node can ever grant."""


class RayCluster:
    """A Ray cluster whose head is below this runtime.

    Args:
        loop: where everything happens.
        spec: what is asked for.
        footprint: what every node of a component must grant.
        machine: what this node grants.
        scratch: private directory for Ray's files and the token.
        token: the cluster's secret.
        on_ready: called once, when the cluster is complete.
        on_failed: called once, with why the cluster did not start or was lost.
        on_phase: called with a phase and a message for the user.
        on_node_lost: called with the name of a node that was lost after the cluster was ready.
        key: what the nodes call this cluster, where there are several; the others' order then carries what is asked for.
        worker_env: variables for Ray's daemons, which all workers inherit; None for one that they must not have.
        prestart: whether Ray's workers shall be kept ready on the head.
    """

    def __init__(
        self,
        loop: Loop,
        spec: RaySpec,
        footprint: Callable[[Optional[str]], Footprint],
        machine: NodeResources,
        scratch: Scratch,
        token: str,
        on_ready: Callable[[], None],
        on_failed: Callable[[ClusterError], None],
        on_phase: Callable[[str, str], None],
        on_node_lost: Callable[[str], None] = lambda _: None,
        key: str = "",
        worker_env: Mapping[str, Optional[str]] = MappingProxyType({}),
        prestart: bool = False,
    ) -> None:
        self.spec = spec
        self.ready = False
        self.nodes: node_table.Nodes = {}
        self.ray_version: Optional[str] = None
        self.bring_up: Optional[float] = None
        self.address: Optional[str] = None
        self.dashboard_url: Optional[str] = None
        self._loop = loop
        self._footprint = footprint
        self._machine = machine
        self._scratch = scratch
        self._token = token
        self._on_ready = on_ready
        self._on_failed = on_failed
        self._on_phase = on_phase
        self._on_node_lost = on_node_lost
        self.key = key
        self._worker_env = worker_env
        self._prestart = prestart
        self._auditor = LeakQuery(self._question, loop.call_later)
        self._own = node_spec(spec, machine.component)
        self._components = [each.component_id for each in spec.components]
        self._address: Optional[str] = None
        self._joining = JoiningWorkers(spec, None)
        self._entrypoint = spec.launch_style == "builtin"
        self._deadline: Optional[Timer] = None
        self._told = 0
        self._attempt = 0
        self._started = time.monotonic()
        self._failed = False
        self._ray: Optional[RayStart] = None

    @property
    def environment(self) -> Dict[str, str]:
        """What a driver needs in its environment to reach this cluster and no other."""
        env = ray_environment(self.spec, self._scratch.join("ray.token"))
        if self.address:
            env["RAY_ADDRESS"] = self.address
        if self.dashboard_url:
            env["RAY_API_SERVER_ADDRESS"] = self.dashboard_url
        return env

    @property
    def ray_temp_dir(self) -> str:
        """Where Ray's own files are on this node."""
        return self._scratch.ray_temp_dir

    @property
    def pid(self) -> Optional[int]:
        """The process below which all of Ray on this node is."""
        return self._ray.pid if self._ray is not None else None

    def audit(self, patience: float, done: Callable[[Optional[Tables]], None]) -> None:
        """Ask what there is in the cluster; `done` gets None if it does not answer within `patience` seconds."""
        self._auditor.ask(patience, done)

    def prestart(self) -> None:
        """Have Ray start workers that wait for the next payload, if that was asked for."""
        if self._ray is not None and self.ready:
            self._ray.prestart()

    def facts(self) -> Dict[str, Any]:
        """What metadata tells of the cluster."""
        return {
            "ray_version": self.ray_version,
            "ray_address": self.address,
            "dashboard_url": self.dashboard_url,
            "bring_up": self.bring_up,
            "nodes": node_table.in_order(self.nodes, self._components),
        }

    def start(self, team: Optional[WorkerNodes] = None, address: Optional[str] = None) -> None:
        """Begin to start the cluster; `on_ready` or `on_failed` follows.

        Args:
            team: the other nodes; None if there are none.
            address: the address by which this node is known to them; None for the one that Ray finds.
        """
        self._joining, self._address = JoiningWorkers(self.spec, team), address
        self._loop.call_later(0.0, self._see_who_is_here)
        problem = footprint_error(self._footprint(self._machine.component), self._machine)
        if problem:
            return self._fail(ClusterError(EndReason.CLUSTER_START, problem))
        self._deadline = self._loop.call_later(self.spec.startup_timeout, self._too_late)
        try:
            if self.spec.node_ip_address:
                self._address = self.spec.node_ip_address
            elif self._own.network_interface:
                self._address = interface_address(self._own.network_interface)
        except ClusterError as error:
            return self._fail(error)
        self._ray = RayStart(
            self._loop,
            self._own,
            self._machine,
            self._scratch,
            self._token,
            self._joining.expected,
            self._gcs_chosen,
            self._take,
            self._fail,
            self._on_phase,
            self._worker_env,
            self._prestart,
        )
        self._ray.start(self._address)

    def stop(self) -> None:
        """End every process of the cluster at once, on the other nodes as soon as they hear of it."""
        if self.key and self._attempt:
            self._joining.order(op="end-ray", cluster=self.key)
        self.end()

    def end(self) -> None:
        """End every process of the cluster on this node at once; its results are already elsewhere."""
        self._failed = True  # Nothing that ends from here on is news.
        if self._deadline is not None:
            self._deadline.cancel()
        if self._ray is not None:
            self._ray.end()

    def log_tails(self) -> Dict[str, str]:
        """The last lines of the logs that tell why a cluster failed."""
        own = self._ray.log_tails() if self._ray is not None else {}
        return {**own, **self._joining.tails}

    def take(self, member: WorkerNode, message: Event) -> None:
        """Take what the runtime of another node says."""
        if self._failed:
            return
        event = message.get("event")
        if event == "joined":
            problem = footprint_error(self._footprint(member.component), from_facts(member.machine))
            if problem:
                self._give_up(member, ClusterError(EndReason.CLUSTER_START, problem))
        elif event == "failed" and (message.get("cluster", ""), message.get("attempt")) == (self.key, self._attempt):
            if not self._joining.is_news(member, self._attempt):
                return
            self._joining.keep_tails(member, message.get("tails", {}))
            self._give_up(member, ClusterError(EndReason(message["reason"]), message["message"]))
        elif event == "lost":
            if self.ready:
                self._on_phase("node-lost", "node %s is lost: %s" % (member.title, message["message"]))
            else:
                self._on_phase("cluster-start", "node %s is out of reach: %s" % (member.title, message["message"]))
                member.await_back(self._loop, lambda: self._missed(member))

    def _see_who_is_here(self) -> None:
        """Judge the nodes that came, or were lost, before this cluster was thought of."""
        for member in self._joining.members:
            if self._failed or not member.joined:
                continue
            self.take(member, {"event": "joined"})
            if not member.here:
                member.await_back(self._loop, functools.partial(self._missed, member))

    def _question(self, question: int) -> bool:
        return self._ray is not None and self._ray.audit(question)

    def _missed(self, member: WorkerNode) -> None:
        """A worker that was lost while the cluster started had time enough to come back."""
        if not self.ready and not self._failed:
            self._joining.keep_log(member)
            self._give_up(
                member, ClusterError(EndReason.CLUSTER_START, "node %s was lost while the cluster started" % member.title)
            )

    def _gcs_chosen(self, gcs: str) -> None:
        """Have the workers join; they start while the head does."""
        self._attempt += 1
        whole = {"ray": asdict(self.spec)} if self.key else {}
        self._joining.order(
            op="ray", gcs=gcs, attempt=self._attempt, nodes=self._joining.expected, **self._name_in_orders, **whole
        )

    def _take(self, event: Event) -> None:
        kind = event["event"]
        if kind == "audit":
            self._auditor.take(event["id"], event["tables"])
        elif kind == "version":
            self.ray_version = event["ray_version"]
        elif kind == "entrypoint":
            self._entrypoint = True
            self._ready_if_complete()
        elif kind == "nodes":
            self._take_nodes(event["nodes"])
        elif kind == "unschedulable":
            self._on_phase(UNSCHEDULABLE, event["message"])
        elif kind == "gcs-lost" and self.ready:
            self._fail(ClusterError(EndReason.CLUSTER_LOST, "the GCS on node %s is gone" % self._machine.name))

    def _take_nodes(self, nodes: node_table.Nodes) -> None:
        before, self.nodes = self.nodes, node_table.within(self.spec, nodes)
        if self.ready:
            for gone in node_table.lost(before, self.nodes):
                if gone["head"]:
                    return self._fail(ClusterError(EndReason.CLUSTER_LOST, "the GCS reports the head node as dead"))
                self._on_phase("node-lost", "Ray on node %s is dead, the others go on" % node_table.title(gone))
                self._on_node_lost(node_table.title(gone))
            return self._count_in()
        alive = node_table.alive(self.nodes)
        if self._joining.places and len(alive) != self._told:
            self._told = len(alive)
            self._on_phase("cluster-start", "%d/%d nodes joined" % (len(alive), self._joining.expected))
        self._ready_if_complete()

    def _ready_if_complete(self) -> None:
        alive = node_table.alive(self.nodes)
        head = next((node for node in alive if node["head"]), None)
        if self.ready or self._failed or head is None or len(alive) < self._joining.needed or not self._entrypoint:
            return
        assert self._ray is not None and self._ray.ports is not None
        self.address = join_host_port(head["address"], self._ray.ports.gcs)
        if self.spec.dashboard:
            self.dashboard_url = "http://127.0.0.1:%d" % self._ray.ports.dashboard
        self.ready = self._ray.ready = True
        self.bring_up = time.monotonic() - self._started
        if self._deadline is not None:
            self._deadline.cancel()
        up = "Ray %s is up on %s" % (self.ray_version, node_table.in_words(self.nodes, self._components))
        if self.dashboard_url:
            up += ", dashboard: %s on %s" % (self.dashboard_url, head["hostname"])
        self._on_phase("cluster-ready", up)
        self._count_in()
        self.prestart()
        self._on_ready()

    def _count_in(self) -> None:
        """Tell the workers whose Ray is up, those too that come late: from here on its end there is a loss."""
        self._joining.tell_those_in(self.nodes, op="ready", attempt=self._attempt, **self._name_in_orders)

    @property
    def _name_in_orders(self) -> Dict[str, str]:
        """What tells this cluster from others, where there are several."""
        return {"cluster": self.key} if self.key else {}

    def _give_up(self, member: WorkerNode, error: ClusterError) -> None:
        """A worker will not join: the end of the cluster, unless enough others do."""
        if self.ready:
            self._on_node_lost(member.title)
            return self._on_phase("node-lost", "node %s: %s" % (member.title, error))
        if member.node_id not in self._joining.places:
            return
        if not self._joining.give_up(member):
            self._fail(error)
        else:
            self._on_phase("cluster-start", "the cluster starts without node %s: %s" % (member.title, error))

    def _too_late(self) -> None:
        limit = "within startup_timeout=%g s" % self.spec.startup_timeout
        started = self._ray is not None and self._ray.started
        if not started:
            return self._fail(
                ClusterError(EndReason.CLUSTER_START, "the health check did not end on node %s %s" % (self._machine.name, limit))
            )
        alive = node_table.alive(self.nodes)
        if not alive:
            return self._fail(ClusterError(EndReason.CLUSTER_START, "Ray was not up on node %s %s" % (self._machine.name, limit)))
        if len(alive) >= self._joining.needed:
            return self._fail(ClusterError(EndReason.CLUSTER_START, "`ray symmetric-run` did not start its command " + limit))
        self._fail(ClusterError(EndReason.CLUSTER_START, self._joining.who_is_missing(self.nodes) + " " + limit))

    def _fail(self, error: ClusterError) -> None:
        if self._failed:
            return
        self._failed = True
        if self._deadline is not None:
            self._deadline.cancel()
        if self._ray is not None:
            self._ray.end()
        self._on_failed(error)
