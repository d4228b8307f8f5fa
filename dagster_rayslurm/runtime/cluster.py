"""One Ray cluster: start its head and have the other nodes join, know when it is complete, notice when it is lost."""

from __future__ import annotations

import time
from dataclasses import asdict
from types import MappingProxyType
from typing import Any, Callable, Dict, List, Mapping, Optional, Set

from . import nodes as node_table
from .allocation import Allocation, is_loopback
from .audit import Auditor, Tables
from .components import node_spec
from .footprint import Footprint, footprint_error
from .loop import Loop, Timer
from .machine import Machine, from_facts
from .prestart import logs_of, waiting
from .ray_arguments import ClusterError, interface_address, join_host_port, ray_environment, route_address
from .ray_start import Event, RayStart
from .scratch import Scratch
from .spec import RaySpec
from .team import Member, Others

COMES_BACK = 10.0
"""Seconds in which a runtime that lives is back after its connection was lost; it tries ten times a second."""

_ELSEWHERE = "192.0.2.1"
"""An address on no network (RFC 5737): the route there is the default one."""


def nodes_expected(spec: RaySpec, available: int) -> int:
    """Nodes that the cluster shall have when it is complete."""
    return available if spec.max_workers is None else min(available, 1 + spec.max_workers)


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
        machine: Machine,
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
        self._auditor = Auditor(self._question, loop.call_later)
        self._team: Optional[Others] = None
        self._own = node_spec(spec, machine.component)
        self._components = [each.component_id for each in spec.components]
        self._address: Optional[str] = None
        self._joining: Dict[int, str] = {}
        """Names of the workers that shall join, by place."""
        self._given_up: Dict[int, str] = {}
        """Why a worker does not join, by place."""
        self._worker_tails: Dict[str, str] = {}
        self._entrypoint = spec.launch_style == "builtin"
        self._deadline: Optional[Timer] = None
        self._told = 0
        self._counted_in: Set[int] = set()
        """Places of the workers that know that their Ray is up."""
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

    def waiting(self) -> Set[int]:
        """The processes of this node's workers that belong to no payload yet."""
        return waiting(logs_of(self.ray_temp_dir)) if self._prestart else set()

    def facts(self) -> Dict[str, Any]:
        """What metadata tells of the cluster."""
        return {
            "ray_version": self.ray_version,
            "ray_address": self.address,
            "dashboard_url": self.dashboard_url,
            "bring_up": self.bring_up,
            "nodes": node_table.in_order(self.nodes, self._components),
        }

    def start(self, team: Optional[Others] = None, address: Optional[str] = None) -> None:
        """Begin to start the cluster; `on_ready` or `on_failed` follows.

        Args:
            team: the other nodes; None if there are none.
            address: the address by which this node is known to them; None for the one that Ray finds.
        """
        self._team, self._address = team, address
        if team is not None:
            wanted = nodes_expected(self.spec, 1 + len(team.members)) - 1
            self._joining = {place: member.title for place, member in sorted(team.members.items())[:wanted]}
            self._loop.call_later(0.0, self._see_who_is_here)
        problem = footprint_error(self._footprint(self._machine.component), self._machine)
        if problem:
            return self._fail(ClusterError("cluster-start", problem))
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
            1 + len(self._joining),
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
        if self.key and self._team is not None and self._attempt:
            self._team.order(self._joining, op="end-ray", cluster=self.key)
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
        return {**own, **self._worker_tails}

    def take(self, member: Member, message: Event) -> None:
        """Take what the runtime of another node says."""
        if self._failed:
            return
        event = message.get("event")
        if event == "joined":
            problem = footprint_error(self._footprint(member.component), from_facts(member.machine))
            if problem:
                self._give_up(member, ClusterError("cluster-start", problem))
        elif event == "failed" and (message.get("cluster", ""), message.get("attempt")) == (self.key, self._attempt):
            for name, text in message.get("tails", {}).items():
                self._worker_tails["%s on %s" % (name, member.title)] = text
            self._give_up(member, ClusterError(message["reason"], message["message"]))
        elif event == "lost":
            if self.ready:
                self._on_phase("node-lost", "node %s is lost: %s" % (member.title, message["message"]))
            else:
                self._on_phase("cluster-start", "node %s is out of reach: %s" % (member.title, message["message"]))
                self._await_back(member)

    def _see_who_is_here(self) -> None:
        """Judge the nodes that came, or were lost, before this cluster was thought of."""
        assert self._team is not None
        for place in self._joining:
            member = self._team.members[place]
            if self._failed or not member.joined:
                continue
            self.take(member, {"event": "joined"})
            if not member.here:
                self._await_back(member)

    def _question(self, question: int) -> bool:
        return self._ray is not None and self._ray.audit(question)

    def _await_back(self, member: Member) -> None:
        """Give a worker that was lost its time, the whole of it each time that it is lost."""
        losses = member.losses
        self._loop.call_later(COMES_BACK, lambda: self._missed(member) if member.losses == losses else None)

    def _missed(self, member: Member) -> None:
        """A worker that was lost while the cluster started had time enough to come back."""
        if not member.here and not self.ready and not self._failed and self._team is not None:
            self._keep_log(member)
            self._give_up(member, ClusterError("cluster-start", "node %s was lost while the cluster started" % member.title))

    def _gcs_chosen(self, gcs: str) -> None:
        """Have the workers join; they start while the head does."""
        self._attempt += 1
        if self._team is not None:
            order = {"gcs": gcs, "attempt": self._attempt, "nodes": 1 + len(self._joining)}
            if self.key:
                order.update(cluster=self.key, ray=asdict(self.spec))
            self._team.order(self._joining, op="ray", **order)

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
        elif kind == "gcs-lost" and self.ready:
            self._fail(ClusterError("cluster-lost", "the GCS on node %s is gone" % self._machine.name))

    def _take_nodes(self, nodes: node_table.Nodes) -> None:
        before, self.nodes = self.nodes, node_table.within(self.spec, nodes)
        if self.ready:
            for gone in node_table.lost(before, self.nodes):
                if gone["head"]:
                    return self._fail(ClusterError("cluster-lost", "the GCS reports the head node as dead"))
                self._on_phase("node-lost", "Ray on node %s is dead, the others go on" % node_table.title(gone))
                self._on_node_lost(node_table.title(gone))
            return self._count_in()
        alive = self._alive()
        wanted = 1 + len(self._joining)
        if wanted > 1 and len(alive) != self._told:
            self._told = len(alive)
            self._on_phase("cluster-start", "%d/%d nodes joined" % (len(alive), wanted))
        self._ready_if_complete()

    def _alive(self) -> List[Dict[str, Any]]:
        return node_table.alive(self.nodes)

    def _needed(self) -> int:
        wanted = 1 + len(self._joining)
        return wanted if self.spec.min_nodes is None else min(self.spec.min_nodes, wanted)

    def _ready_if_complete(self) -> None:
        alive = self._alive()
        head = next((node for node in alive if node["head"]), None)
        if self.ready or self._failed or head is None or len(alive) < self._needed() or not self._entrypoint:
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
        if self._team is None:
            return
        here = node_table.present(self.nodes)
        for place in sorted(set(self._joining) - self._counted_in):
            if self._team.members[place].joined and self._team.members[place].identity in here:
                self._counted_in.add(place)
                named = {"cluster": self.key} if self.key else {}
                self._team.order([place], op="ready", attempt=self._attempt, **named)

    def _give_up(self, member: Member, error: ClusterError) -> None:
        """A worker will not join: the end of the cluster, unless enough others do."""
        if self.ready:
            self._on_node_lost(member.title)
            return self._on_phase("node-lost", "node %s: %s" % (member.title, error))
        if member.node_id not in self._joining:
            return
        self._given_up[member.node_id] = str(error)
        if 1 + len(self._joining) - len(self._given_up) < self._needed():
            self._fail(error)
        else:
            self._on_phase("cluster-start", "the cluster starts without node %s: %s" % (member.title, error))

    def _too_late(self) -> None:
        limit = "within startup_timeout=%g s" % self.spec.startup_timeout
        started = self._ray is not None and self._ray.started
        if not started:
            return self._fail(
                ClusterError("cluster-start", "the health check did not end on node %s %s" % (self._machine.name, limit))
            )
        if not self._alive():
            return self._fail(ClusterError("cluster-start", "Ray was not up on node %s %s" % (self._machine.name, limit)))
        if len(self._alive()) >= self._needed():
            return self._fail(ClusterError("cluster-start", "`ray symmetric-run` did not start its command " + limit))
        self._fail(ClusterError("cluster-start", self._who_is_missing() + " " + limit))

    def _keep_log(self, member: Member) -> None:
        """Keep what a worker's runtime had to say."""
        assert self._team is not None
        tail = self._team.log_tail(member)
        if tail.strip():
            self._worker_tails["runtime on %s" % member.title] = tail

    def _who_is_missing(self) -> str:
        """Names the nodes that did not join, and keeps what their logs say."""
        here = node_table.present(self.nodes)
        assert self._team is not None
        wanted = [self._team.members[place] for place in self._joining]
        missing = [member for member in wanted if not member.joined or member.identity not in here]
        unheard = [member.title for member in self._team.missing() if member in missing]
        for member in missing:
            self._keep_log(member)
        joined = "%d of %d nodes joined" % (len(self._alive()), 1 + len(self._joining))
        what = "%s, missing: %s" % (joined, ", ".join(member.title for member in missing))
        if unheard:
            what += " (no word from the runtime on %s)" % ", ".join(unheard)
        return what

    def _fail(self, error: ClusterError) -> None:
        if self._failed:
            return
        self._failed = True
        if self._deadline is not None:
            self._deadline.cancel()
        if self._ray is not None:
            self._ray.end()
        self._on_failed(error)


def head_address(allocation: Allocation) -> str:
    """The address by which the head is known to the other nodes of its allocation; alone, any of its own will do.

    Without one that Slurm tells, it is the address at which the route to another node begins.
    """
    known, *_ = allocation.head_addresses
    name, *others = allocation.nodes
    if not others or known != name:
        return known
    for host in (others[0], _ELSEWHERE):
        address = route_address(host)
        if address is not None and not is_loopback(address):
            return address
    return name  # The others know it, or nobody does.
