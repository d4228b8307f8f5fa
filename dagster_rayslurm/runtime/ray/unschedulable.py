"""Find tasks, actors and placement groups that no node of a Ray cluster can ever hold; without side effects.

Ray lets them wait without a message, because a node that joins later might have what they need.
"""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Sequence, Tuple

LabelRule = Tuple[str, bool, Tuple[str, ...]]
"""A condition on one label of a node: the key, whether the label must (True) or must not have one of the values, the values."""

_MOST_NAMES = 4
"""Most nodes, or bundles of a placement group, that one message names."""
_BYTES = ("memory", "object_store_memory")
"""Resources of Ray that are amounts of bytes."""


class Request(NamedTuple):
    """What one task, one actor, or one bundle of a placement group needs on one node.

    Attributes:
        resources: amounts by name of resource.
        labels: alternative lists of rules; a node must meet all rules of one list. Empty if labels do not matter.
    """

    resources: Dict[str, float]
    labels: Tuple[Tuple[LabelRule, ...], ...] = ()


class Group(NamedTuple):
    """A placement group that Ray has not placed yet."""

    strategy: str
    bundles: List[Request]


class Node(NamedTuple):
    """A living node of the Ray cluster: its host name, total resources and labels."""

    name: str
    resources: Dict[str, float]
    labels: Dict[str, str]


class Demand(NamedTuple):
    """What waits for resources in a Ray cluster, and the nodes of the cluster."""

    requests: List[Request]
    groups: List[Group]
    nodes: List[Node]


def unschedulable(requests: Sequence[Request], groups: Sequence[Group], nodes: Sequence[Node]) -> List[str]:
    """Sentences about the requests and placement groups that these nodes could not hold even if nothing else ran."""
    found = []
    for request in requests:
        # A task inside a placement group waits until the group is placed.
        if not any("_group_" in name for name in request.resources) and not any(_fits(request, node) for node in nodes):
            found.append("a task or actor asks for %s, and no node has that" % _words(request))
    for group in groups:
        if not _group_fits(group, nodes):
            bundles = ", ".join("{%s}" % _words(bundle) for bundle in group.bundles[:_MOST_NAMES])
            more = ", …" if len(group.bundles) > _MOST_NAMES else ""
            told = (group.strategy, len(group.bundles), bundles, more)
            found.append("a placement group (%s) asks for %d bundles, %s%s, and the nodes cannot hold them" % told)
    asked = {name for request in [*requests, *(each for group in groups for each in group.bundles)] for name in request.resources}
    there = "; ".join(_has(node, asked) for node in nodes[:_MOST_NAMES]) + ("; …" if len(nodes) > _MOST_NAMES else "")
    end = " (%s). It waits forever unless the launcher and the queue ask for nodes that have it" % there
    return sorted({sentence + end for sentence in found})


def _fits(request: Request, node: Node) -> bool:
    if any(node.resources.get(name, 0.0) < amount for name, amount in request.resources.items()):
        return False
    return not request.labels or any(all(_matches(rule, node) for rule in rules) for rules in request.labels)


def _matches(rule: LabelRule, node: Node) -> bool:
    key, wanted, values = rule
    return (node.labels.get(key) in values) is wanted


def _group_fits(group: Group, nodes: Sequence[Node]) -> bool:
    """Whether the nodes could hold a placement group if nothing else ran; an approximation, which is never False by mistake."""
    if not all(any(_fits(bundle, node) for node in nodes) for bundle in group.bundles):
        return False
    total: Dict[str, float] = {}
    for bundle in group.bundles:
        for name, amount in bundle.resources.items():
            total[name] = total.get(name, 0.0) + amount
    if group.strategy == "STRICT_PACK":
        return any(_fits(Request(total), node) for node in nodes)
    if group.strategy == "STRICT_SPREAD" and len(group.bundles) > len(nodes):
        return False
    return all(sum(node.resources.get(name, 0.0) for node in nodes) >= amount for name, amount in total.items())


def _words(request: Request) -> str:
    words = [_amount(name, amount) for name, amount in sorted(request.resources.items())]
    for key, wanted, values in request.labels[0] if request.labels else ():
        words.append("label %s %s %s" % (key, "=" if wanted else "!=", " or ".join(values)))
    return ", ".join(words)


def _has(node: Node, asked: "set[str]") -> str:
    names = ["CPU", "GPU", *sorted(asked - {"CPU", "GPU"})]
    return "%s has %s" % (node.name, ", ".join(_amount(name, node.resources.get(name, 0.0)) for name in names))


def _amount(name: str, amount: float) -> str:
    return "%s %.1f GiB" % (name, amount / 2**30) if name in _BYTES else "%s %g" % (name, amount)
