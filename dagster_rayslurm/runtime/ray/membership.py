"""Decides which nodes make up a Ray cluster, and whether enough have joined: a state machine, and functions on Ray's node table.

Nothing here has side effects. Host name and component together identify a node: two components of an allocation may each have a
node on one host.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Callable, Dict, Iterable, List, Mapping, NamedTuple, Optional, Set, Tuple, Union

from ..node.resources import named
from ..node.worker_nodes import Identity
from ..protocol.messages import ClusterError, EndReason, NodeEvent, TextEnum
from ..protocol.spec import RaySpec

# A report of Ray on the head (`Report`) or an event of the worker node `node` (`NodeEvent`); `event` is its kind.
Event = Dict[str, Any]
Node = Dict[str, Any]  # One row of Ray's node table; see `internals.node_table`.
Nodes = Dict[str, Node]  # Ray's node table: its rows by Ray's id of the node.


# Names of two phases: the cluster is up; a payload waits for resources that no node of the cluster can ever grant.
CLUSTER_READY, UNSCHEDULABLE = "cluster-ready", "unschedulable"


class Report(TextEnum):
    """The kinds of reports about Ray on one node.

    A report is a dictionary. Its key `event` has the kind, and the comments name its other keys. Reports come from the process
    that runs Ray (`node_main`) or from the runtime (`RayNode`, `RayCluster`).
    """

    NODES = "nodes"  # Ray's node table has changed; `nodes` is the new one. `ray_version` is Ray's version.
    ENTRYPOINT = "entrypoint"  # `ray symmetric-run` has started its command, so the Ray cluster is up.
    PHASE = "phase"  # A line for the Dagster log: `phase` and `message`.
    GCS_LOST = "gcs-lost"  # Ray's control service (GCS) has ended.
    TABLES = "tables"  # The answer to the query `id` of the leak check: `tables`, or None after an error.
    # Ray starts on the head; `gcs` is the address of its GCS. If Ray must start again (a port was taken), another report comes.
    STARTING = "starting"
    # Ray did not start, or was lost. A report of `node_main` has `message` and `reason`; any other has `error`, a `ClusterError`.
    FAILED = "ray-failed"
    DEADLINE = "deadline"  # The time in which the cluster must be ready is over.


class Say(NamedTuple):
    """An action: write `message` to the Dagster logs of the payloads that use the Ray cluster.

    `phase` is the name of the phase, such as "cluster-ready".
    """

    phase: str
    message: str


class Join(NamedTuple):
    """An action: command the worker nodes with the ids `members` to start Ray and join the Ray cluster."""

    members: List[int]


class NodeLost(NamedTuple):
    """An action: announce that the Ray cluster, which was ready before, has lost the worker node with the name `title`."""

    title: str


class Ready(NamedTuple):
    """An action: announce that enough nodes have joined for payloads to start.

    `head` is the row of the head node in Ray's node table.
    """

    head: Node


Step = Tuple["Membership", List["Action"]]
# What follows from an event; a `ClusterError` means that the cluster has failed and must end.
Action = Union[Say, Join, NodeLost, Ready, ClusterError]


class Member(NamedTuple):
    """One of the worker nodes that are to make up the Ray cluster, whether it has joined yet or not."""

    title: str  # Name of the node in messages.
    # Host name and component, which identify the node in Ray's node table; None until the node connects to the head's runtime.
    identity: Optional[Identity] = None
    here: bool = False  # Whether the node is connected to the head's runtime.
    given_up: bool = False  # Whether the cluster no longer waits for the node, or has lost the node.


@dataclass(frozen=True)
class Membership:
    """The immutable state of a Ray cluster while nodes join and get lost.

    For each event, `step` returns the next state and the actions to take. `members` has the worker nodes by node id, and
    `nodes` is the node table that Ray has reported last.
    """

    spec: RaySpec
    head: str  # Name of the head node in messages.
    members: Mapping[int, Member] = field(default_factory=dict)
    nodes: Nodes = field(default_factory=dict)
    attempt: int = 0  # Number of the latest start of Ray on the head; 0 before the first.
    entrypoint: bool = False  # Whether `ray symmetric-run` has started its command.
    ready: bool = False
    failed: bool = False

    @property
    def expected(self) -> int:
        """Number of nodes that the Ray cluster has when it is complete, the head included."""
        return 1 + len(self.members)

    @property
    def complete(self) -> bool:
        """Whether no further node is expected: each worker node is alive in Ray's node table, or is not waited for any more."""
        here = present(self.nodes)
        return all(member.given_up or member.identity in here for member in self.members.values())

    @property
    def needed(self) -> int:
        """Number of nodes that must be alive for the Ray cluster to become ready, the head included."""
        return self.expected if self.spec.min_nodes is None else min(self.spec.min_nodes, self.expected)

    def step(self, event: Event) -> Step:
        """Returns the next state after `event`, and the actions to take.

        An event of an unknown kind or node changes nothing, and so does any event after the Ray cluster has failed.
        """
        handler = _HANDLERS.get(event["event"])
        unknown = "node" in event and event["node"] not in self.members
        return (self, []) if self.failed or handler is None or unknown else handler(self, event)

    def _fail(self, why: str, reason: EndReason = EndReason.CLUSTER_START) -> Step:
        return replace(self, failed=True), [ClusterError(reason, why)]

    def _with(self, node_id: int, **changes: Any) -> Membership:
        return replace(self, members={**self.members, node_id: self.members[node_id]._replace(**changes)})

    def _started(self, _: Event) -> Step:
        return replace(self, attempt=self.attempt + 1), [Join(list(self.members))]

    def _joined(self, event: Event) -> Step:
        after = self._with(event["node"], identity=event["identity"], here=event["here"])
        if not event["problem"]:
            return after, []
        return after._give_up(event["node"], ClusterError(EndReason.CLUSTER_START, event["problem"]))

    def _ray_failed(self, event: Event) -> Step:
        if event["attempt"] != self.attempt:
            return self, []
        return self._give_up(event["node"], ClusterError(EndReason(event["reason"]), event["message"], event.get("unhealthy")))

    def _lost(self, event: Event) -> Step:
        phase, what = ("node-lost", "lost") if self.ready else ("cluster-start", "out of reach")
        message = "node %s is %s: %s" % (self.members[event["node"]].title, what, event["message"])
        return self._with(event["node"], here=False), [Say(phase, message)]

    def _gone(self, event: Event) -> Step:
        if self.ready:
            return self, []  # The node table tells.
        why = "node %s was lost while the cluster started" % self.members[event["node"]].title
        return self._give_up(event["node"], ClusterError(EndReason.CLUSTER_START, why))

    def _give_up(self, node_id: int, error: ClusterError) -> Step:
        """Stops waiting for a worker node that failed with `error`; returns the next state and the actions.

        If too few nodes are left for the Ray cluster to become ready, it fails with `error`; otherwise it goes on without the
        node. If the node was given up before, nothing changes, because a node may report the same failure again.
        """
        member = self.members[node_id]
        if member.given_up:
            return self, []
        after = self._with(node_id, given_up=True)
        if self.ready:
            return after, [NodeLost(member.title), Say("node-lost", "node %s: %s" % (member.title, error))]
        if self.expected - sum(each.given_up for each in after.members.values()) < self.needed:
            return replace(after, failed=True), [error]
        return after, [Say("cluster-start", "the cluster starts without node %s: %s" % (member.title, error))]

    def _table(self, event: Event) -> Step:
        nodes = within(self.spec, event["nodes"])
        after, actions = replace(self, nodes=nodes), []  # type: Membership, List[Action]
        if not self.ready:
            joined = len(alive(nodes))
            if self.members and joined != len(alive(self.nodes)):
                actions.append(Say("cluster-start", "%d/%d nodes joined" % (joined, self.expected)))
            after, more = after._ready_if_complete()
            return after, actions + more
        gone = lost(self.nodes, nodes)
        if any(node["head"] for node in gone):
            return after._fail("the GCS reports the head node as dead", EndReason.CLUSTER_LOST)
        for name in map(title, gone):
            actions += [Say("node-lost", "Ray on node %s is dead, the others go on" % name), NodeLost(name)]
        return after, actions

    def _phase(self, event: Event) -> Step:
        return self, [Say(event["phase"], event["message"])]

    def _at_entrypoint(self, _: Event) -> Step:
        return replace(self, entrypoint=True)._ready_if_complete()

    def _ready_if_complete(self) -> Step:
        living = alive(self.nodes)
        head = next((node for node in living if node["head"]), None)
        waits = self.spec.launch_style == "symmetric-run" and not self.entrypoint
        if self.ready or head is None or len(living) < self.needed or waits:
            return self, []
        return replace(self, ready=True), [Ready(head)]

    def _head_failed(self, event: Event) -> Step:
        return replace(self, failed=True), [event["error"]]

    def _timed_out(self, _: Event) -> Step:
        limit = "within startup_timeout=%g s" % self.spec.startup_timeout
        living = alive(self.nodes)
        if self.ready:
            return self, []
        if not self.attempt:
            return self._fail("the health check did not end on node %s %s" % (self.head, limit))
        if not living:
            return self._fail("Ray was not up on node %s %s" % (self.head, limit))
        if len(living) >= self.needed:
            return self._fail("`ray symmetric-run` did not start its command " + limit)
        here = present(self.nodes)
        missing = {place: member for place, member in self.members.items() if member.identity not in here}
        unheard = [member.title for member in missing.values() if not member.here]
        names = ", ".join(member.title for member in missing.values())
        why = "%d of %d nodes joined, missing: %s" % (len(living), self.expected, names)
        if unheard:
            why += " (no word from the runtime on %s)" % ", ".join(unheard)
        given_up = {place: member._replace(given_up=True) for place, member in missing.items()}
        return replace(self, members={**self.members, **given_up})._fail("%s %s" % (why, limit))


_HANDLERS: Dict[str, Callable[[Membership, Event], Step]] = {
    NodeEvent.JOINED: Membership._joined,
    NodeEvent.RAY_FAILED: Membership._ray_failed,
    NodeEvent.LOST: Membership._lost,
    NodeEvent.GONE: Membership._gone,
    Report.STARTING: Membership._started,
    Report.NODES: Membership._table,
    Report.PHASE: Membership._phase,
    Report.ENTRYPOINT: Membership._at_entrypoint,
    Report.FAILED: Membership._head_failed,
    Report.DEADLINE: Membership._timed_out,
}


def nodes_expected(spec: RaySpec, available: int) -> int:
    """Returns how many of `available` nodes the Ray cluster uses: all, or the head and at most `max_workers` other nodes."""
    return available if spec.max_workers is None else min(available, 1 + spec.max_workers)


def title(node: Node) -> str:
    """Returns the name of a node for messages: its host name, such as "g1", or with a component "g1 (component gpu)"."""
    return named(str(node.get("hostname")), node.get("component"))


def within(spec: RaySpec, nodes: Nodes) -> Nodes:
    """Returns the node table `nodes` if `spec` has components; otherwise a copy in which each node has the component None.

    Without components, a label "component" in Ray's table is the user's own, with another meaning.
    """
    return nodes if spec.components else {node_id: {**node, "component": None} for node_id, node in nodes.items()}


def alive(nodes: Nodes) -> List[Node]:
    """Returns the rows of the nodes that the node table `nodes` shows as alive."""
    return [node for node in nodes.values() if node["alive"]]


def present(nodes: Nodes) -> Set[Optional[Identity]]:
    """Returns the identities (host name and component) of the nodes that Ray's node table shows as alive."""
    return {Identity(node["hostname"], node.get("component")) for node in alive(nodes)}


def lost(before: Nodes, after: Nodes) -> List[Node]:
    """Returns the rows of the nodes that are alive in the node table `before`, but dead or missing in `after`.

    A row is that of `after`, or of `before` if the node is missing in `after`.
    """
    gone = [node_id for node_id, node in before.items() if node["alive"] and not after.get(node_id, {}).get("alive")]
    return [after.get(node_id, before[node_id]) for node_id in gone]


def in_order(nodes: Nodes, spec: RaySpec) -> List[Node]:
    """Returns the rows of a node table in order: the head first, then by component as in the start record, then by host name."""
    places: Dict[Any, int] = {component.component_id: place for place, component in enumerate(spec.components)}
    return sorted(
        nodes.values(), key=lambda node: (not node["head"], places.get(node.get("component"), len(places)), node["hostname"])
    )


def in_words(nodes: Nodes, spec: RaySpec) -> str:
    """Returns a text for the Dagster log, such as "2 nodes, the head is c1 (CPU 16, GPU 2)", about the nodes that are alive.

    With several components, the text has the numbers of each component instead of the totals.
    """
    here = alive(nodes)
    head = next(node["hostname"] for node in here if node["head"])
    where = head if len(here) == 1 else "%d nodes, the head is %s" % (len(here), head)
    parts = [(each.component_id, [node for node in here if node["component"] == each.component_id]) for each in spec.components]
    words = ["%s: %d node%s, %s" % (name, len(own), "" if len(own) == 1 else "s", _totals(own)) for name, own in parts]
    return "%s (%s)" % (where, "; ".join(words) if len(words) > 1 else _totals(here))


def _totals(nodes: Iterable[Node]) -> str:
    total = {name: sum(node["resources"].get(name, 0.0) for node in nodes) for name in ("CPU", "GPU")}
    return ", ".join("%s %g" % (name, amount) for name, amount in total.items() if amount) or "no CPU"
