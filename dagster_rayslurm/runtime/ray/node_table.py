"""Functions on Ray's table of nodes, which Ray's control service (GCS) reports; without side effects.

A node is identified by host name and component: two components of an allocation may have a node each on one host.
"""

from __future__ import annotations

from typing import Any, Dict, Iterable, List, Set

from ..node.resources import named
from ..node.worker_node import Identity
from ..protocol.spec import RaySpec

Node = Dict[str, Any]
"""One row of the table; see `internals.node_table`."""
Nodes = Dict[str, Node]
"""Rows of the table by Ray's id of the node."""


def title(node: Node) -> str:
    """The name of a node in messages: its host name, and its component if it has one."""
    return named(str(node.get("hostname")), node.get("component"))


def within(spec: RaySpec, nodes: Nodes) -> Nodes:
    """The table, without components if the start record has none; a component label of Ray is then one that the user set."""
    if spec.components:
        return nodes
    return {node_id: {**node, "component": None} for node_id, node in nodes.items()}


def nodes_expected(spec: RaySpec, available: int) -> int:
    """Number of nodes of a complete Ray cluster in an allocation of `available` nodes."""
    return available if spec.max_workers is None else min(available, 1 + spec.max_workers)


def alive(nodes: Nodes) -> List[Node]:
    """The nodes that Ray reports as alive."""
    return [node for node in nodes.values() if node["alive"]]


def present(nodes: Nodes) -> Set[Identity]:
    """The living nodes as pairs of host name and component."""
    return {Identity(node["hostname"], node.get("component")) for node in alive(nodes)}


def in_order(nodes: Nodes, components: Iterable[str]) -> List[Node]:
    """All nodes, sorted: the head first, then by component in the given order, then by host name."""
    places: Dict[Any, int] = {component: place for place, component in enumerate(components)}
    return sorted(
        nodes.values(), key=lambda node: (not node["head"], places.get(node.get("component"), len(places)), node["hostname"])
    )


def lost(before: Nodes, after: Nodes) -> List[Node]:
    """The nodes that are alive in the table `before`, and dead or missing in the table `after`."""
    gone = [node_id for node_id, node in before.items() if node["alive"] and not after.get(node_id, {}).get("alive")]
    return [after.get(node_id, before[node_id]) for node_id in gone]


def in_words(nodes: Nodes, components: Iterable[str]) -> str:
    """The number of living nodes and their CPUs and GPUs, for the Dagster log: in all, or by component if there are several."""
    here = alive(nodes)
    head = next(node["hostname"] for node in here if node["head"])
    where = head if len(here) == 1 else "%d nodes, the head is %s" % (len(here), head)
    parts = [(name, [node for node in here if node.get("component") == name]) for name in components]
    if len(parts) < 2:
        return "%s (%s)" % (where, _totals(here))
    words = ["%s: %d node%s, %s" % (name, len(own), "" if len(own) == 1 else "s", _totals(own)) for name, own in parts]
    return "%s (%s)" % (where, "; ".join(words))


def _totals(nodes: Iterable[Node]) -> str:
    total: Dict[str, float] = {}
    for node in nodes:
        for name in ("CPU", "GPU"):
            total[name] = total.get(name, 0.0) + node["resources"].get(name, 0.0)
    return ", ".join("%s %g" % (name, amount) for name, amount in sorted(total.items()) if amount) or "no CPU"
