"""Decides whether the nodes of a Ray cluster could hold tasks, actors and placement groups if nothing else ran.

The functions have no side effects. The rules follow Ray's scheduler (src/ray/common/scheduling/resource_instance_set.cc,
Ray 2.60). Amounts count in steps of 0.0001. A part of a GPU comes from one GPU, so three times 0.6 GPUs do not fit on two GPUs.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")

_UNIT = 10000  # Ray counts amounts in units of 1 / 10000.
_UNLIMITED = 10**15  # Units of a resource whose amount on a node is not known.
# Resources of which a node has instances, each with an amount of 1 (predefined and custom_unit_instance_resources of Ray 2.60).
_INSTANCES = ("GPU", "HPU", "NPU", "RBLN", "TPU", "neuron_cores")
_MOST_BUNDLES = 200  # Most bundles for which the search looks.
_MOST_STEPS = 20000  # Most steps of the search, which take about a second.
_SELECTOR = re.compile(r"(!?)(?:in\((.*)\)|(.*))")


class Rule(NamedTuple):
    """A condition on a node's label `key`: the value must be one of `values` or, if `wanted` is False, must be none of them.

    A node without the label meets the condition only if `wanted` is False.
    """

    key: str
    wanted: bool
    values: Tuple[str, ...]


class Bundle(NamedTuple):
    """The resources and labels that one task, actor or bundle of a placement group needs on its node."""

    resources: Mapping[str, float]
    # Alternatives: the node must meet all rules of at least one of them. Empty if the labels of the node do not matter.
    selectors: Tuple[Tuple[Rule, ...], ...] = ()


class Node(NamedTuple):
    """The resources and labels of one node of the cluster."""

    resources: Mapping[str, float]
    labels: Mapping[str, str] = {}
    # Pattern of the names of further resources and the keys of further labels that the node may have; None for none.
    unknown: Optional[str] = None


def feasible(bundles: Iterable[Mapping[str, Any]], strategy: str, nodes: Iterable[Mapping[str, Any]]) -> bool:
    """Returns whether the bundles of a placement group, or tasks that run together (PACK), fit on nodes where nothing else runs.

    The result is exact for up to some dozens of bundles. For more bundles, and where the search would take longer than about a
    second, the result is True unless a simple check shows that the bundles do not fit.

    Example:
        ```python
        from dagster_rayslurm import feasible

        nodes = [{"CPU": 8, "GPU": 2, "labels": {"component": "gpu"}}, {"CPU": 32}]
        assert feasible([{"GPU": 0.5}] * 4, "STRICT_PACK", nodes)
        assert not feasible([{"GPU": 0.6}] * 3, "PACK", nodes)  # A part of a GPU comes from one GPU.
        assert not feasible([{"CPU": 16, "labels": {"component": "gpu"}}], "PACK", nodes)
        ```

    Args:
        bundles: the amounts by resource of each bundle or task; `labels` has its label selector, as Ray writes it.
        strategy: PACK or SPREAD (with the same result, as Ray follows both only if it can), STRICT_PACK (all on one node) or
            STRICT_SPREAD (each on a node of its own).
        nodes: the amounts by resource of each node; `labels` has its labels.

    Raises:
        ValueError: a bundle, a node or the strategy is invalid.
    """
    check_strategy(strategy)
    there = [Node(*_split(node, "nodes[%d]" % place)) for place, node in enumerate(nodes)]
    return can_hold([read_bundle(each, "bundles[%d]" % place) for place, each in enumerate(bundles)], strategy, there)


def check_strategy(strategy: object) -> None:
    """Raise `ValueError` if `strategy` is not "PACK", "SPREAD", "STRICT_PACK" or "STRICT_SPREAD"."""
    if strategy not in STRATEGIES:
        raise ValueError("%r is no placement strategy of Ray; write %s" % (strategy, ", ".join(STRATEGIES)))


def read_bundle(bundle: Any, where: str) -> Bundle:
    """Returns the bundle that a user wrote as a dictionary, such as `{"CPU": 4, "labels": {"component": "gpu"}}`.

    Raises `ValueError` if `bundle` is no valid dictionary of this form. `where` is the name of the bundle in the error text.
    """
    resources, labels = _split(bundle, where)
    rules = []
    for key, text in labels.items():
        # "a", "!a", "in(a, b)" or "!in(a, b)": docs.ray.io, "Use labels to control scheduling" (Ray 2.60).
        found = _SELECTOR.fullmatch(text)
        assert found is not None  # The last alternative matches every text.
        several = found.group(2)
        values = [found.group(3)] if several is None else [each.strip() for each in several.split(",")]
        rules.append(Rule(key, not found.group(1), tuple(values)))
    return Bundle(resources, (tuple(rules),) if rules else ())


def _split(values: Any, where: str) -> Tuple[Dict[str, float], Dict[str, str]]:
    if not isinstance(values, Mapping):
        raise ValueError('%s: %r is no dictionary; write one such as {"CPU": 4, "GPU": 1}' % (where, values))
    labels = values.get("labels", {})
    if not isinstance(labels, Mapping) or not all(isinstance(text, str) for pair in labels.items() for text in pair):
        raise ValueError('%s: labels=%r is no dictionary of texts, such as {"component": "gpu"}' % (where, labels))
    resources = {name: amount for name, amount in values.items() if name != "labels"}
    for name, amount in resources.items():
        number = isinstance(amount, (int, float)) and not isinstance(amount, bool)
        if not isinstance(name, str) or not number or not 0 <= amount < math.inf:
            raise ValueError("%s: %s=%r is no amount of a resource; write a number of at least 0" % (where, name, amount))
    return resources, dict(labels)


def fits(bundle: Bundle, node: Node) -> bool:
    """Returns whether the node `node` could hold `bundle` if nothing else ran there: labels and resources fit."""
    return _labels_fit(bundle, node) and not lacking(bundle, node)


def lacking(bundle: Bundle, node: Node) -> List[str]:
    """Returns the names of the resources that are too few: `bundle` requests more of them than `node` has when idle.

    Labels are not checked.
    """
    return [name for name, amount in bundle.resources.items() if _units(amount) > _has(node, name)]


def can_hold(bundles: Sequence[Bundle], strategy: str, nodes: Sequence[Node]) -> bool:
    """Returns whether `nodes` could hold all `bundles` at the same time if nothing else ran there; see `feasible`.

    As in `feasible`, True may also mean that the search for an answer would take too long.
    """
    if strategy == "STRICT_SPREAD":
        if len(bundles) > len(nodes):
            return False
        choices: Dict[str, List[int]] = {}  # By bundle: equal bundles have the same choices.
        for bundle in bundles:
            if repr(bundle) not in choices:
                choices[repr(bundle)] = [place for place, node in enumerate(nodes) if fits(bundle, node)]
        return _each_has_its_own([choices[repr(bundle)] for bundle in bundles])
    if strategy == "STRICT_PACK":
        return not bundles or any(_Search(bundles, [node]).succeeds() for node in nodes)
    return _Search(bundles, nodes).succeeds()


def _each_has_its_own(choices: Sequence[Sequence[int]]) -> bool:
    """Returns whether each bundle can get a node of its own; `choices` has, for each bundle, the indices of the nodes that fit.

    The function grows a bipartite matching by one bundle at a time.
    """
    holder: Dict[int, int] = {}  # By node: the bundle that has the node.

    def find(start: int) -> bool:
        came_from: Dict[int, Optional[int]] = {start: None}  # By bundle: the bundle that may take the node of the bundle.
        wanted: Dict[int, int] = {}  # By bundle: the node of the bundle, by which the search came.
        waiting = [start]
        for bundle in waiting:
            for node in choices[bundle]:
                other = holder.get(node)
                if other is None:  # Each bundle on the way here moves to the node of the next bundle.
                    at: Optional[int] = bundle
                    while at is not None:
                        holder[node] = at
                        node, at = wanted.get(at, -1), came_from[at]
                    return True
                if other not in came_from:
                    came_from[other], wanted[other] = bundle, node
                    waiting.append(other)
        return False

    return all(find(bundle) for bundle in range(len(choices)))


def _units(amount: float) -> int:
    return round(amount * _UNIT)


def _has(node: Node, name: str) -> int:
    """Returns the amount of a resource on a node, in units of 1 / 10000.

    The result is `_UNLIMITED` if the amount is infinite, or if it is not known whether the node has the resource.
    """
    if name not in node.resources:
        return _UNLIMITED if node.unknown is not None and re.match(node.unknown, name) else 0
    amount = node.resources[name]
    if amount == math.inf:
        return _UNLIMITED
    return _units(math.floor(amount) if name in _INSTANCES else amount)


def _labels_fit(bundle: Bundle, node: Node) -> bool:
    def matches(rule: Rule) -> bool:
        unknown = rule.key not in node.labels and node.unknown is not None and re.match(node.unknown, rule.key)
        return bool(unknown) or (node.labels.get(rule.key) in rule.values) is rule.wanted

    return not bundle.selectors or any(all(map(matches, rules)) for rules in bundle.selectors)


# What is free on a node: its kind, the units of each resource, and the units of the instances of each resource that has them.
_Free = Tuple[int, Tuple[int, ...], Tuple[Tuple[int, ...], ...]]


class _Search:
    """Searches, by backtracking, for a way to put each bundle on a node.

    Of several equal nodes, only one is tried, and the search never continues twice from the same state.
    """

    def __init__(self, bundles: Sequence[Bundle], nodes: Sequence[Node]) -> None:
        names = sorted({name for bundle in bundles for name, amount in bundle.resources.items() if _units(amount)})
        # With unlimited instances there is nothing to search for.
        unlimited = {name for name in names for node in nodes if _has(node, name) == _UNLIMITED}
        self.instances = [name for name in names if name in _INSTANCES and name not in unlimited]
        self.plain = [name for name in names if name not in self.instances]
        # The bundle that needs the largest share of a resource comes first.
        total = {name: sum(_has(node, name) for node in nodes) or 1 for name in names}

        def share(bundle: Bundle) -> float:
            return max([_units(bundle.resources.get(name, 0)) / total[name] for name in names], default=0.0)

        self.bundles = sorted(bundles, key=lambda each: (share(each), repr(each)), reverse=True)
        kinds: Dict[Tuple[bool, ...], int] = {}  # Numbers of the kinds of nodes, by the bundles whose labels fit.
        self.nodes: List[_Free] = []
        by_labels: Dict[str, Tuple[bool, ...]] = {}
        for node in nodes:
            key = repr((node.labels, node.unknown))
            if key not in by_labels:
                by_labels[key] = tuple(_labels_fit(bundle, node) for bundle in self.bundles)
            labels = by_labels[key]
            whole = tuple((_UNIT,) * (_has(node, name) // _UNIT) for name in self.instances)
            self.nodes.append((kinds.setdefault(labels, len(kinds)), tuple(_has(node, name) for name in self.plain), whole))
        self.labels = list(kinds)
        self.needs = [[_units(each.resources.get(name, 0)) for name in self.plain] for each in self.bundles]
        self.parts = [[_units(each.resources.get(name, 0)) for name in self.instances] for each in self.bundles]

    def succeeds(self) -> bool:
        """Returns whether the nodes can hold all bundles; also True if the search takes too many steps to find out."""
        if not self._enough():
            return False
        if len(self.bundles) > _MOST_BUNDLES:
            return True
        tried: Set[Tuple[int, Tuple[_Free, ...]]] = set()
        # The ways that are not tried yet, for the bundles so far: depth first.
        ways = [self._ways(0, tuple(sorted(self.nodes)))]
        for _ in range(_MOST_STEPS):
            if len(ways) > len(self.bundles):
                return True
            state = next((each for each in ways[-1] if (len(ways), each) not in tried), None)
            if state is not None:
                tried.add((len(ways), state))
                ways.append(self._ways(len(ways), state))
            else:
                ways.pop()
                if not ways:
                    return False
        return True

    def _enough(self) -> bool:
        """Returns False if a simple check shows that the nodes cannot hold all bundles; True does not mean that they can.

        The check: the sum of each resource is enough for all bundles, and each set of equal bundles would fit alone.
        """
        free = [sum(node[1][place] for node in self.nodes) for place in range(len(self.plain))]
        whole = [sum(sum(node[2][place]) for node in self.nodes) for place in range(len(self.instances))]
        if any(sum(each) > there for each, there in zip(zip(*self.needs), free)):
            return False
        if any(sum(each) > there for each, there in zip(zip(*self.parts), whole)):
            return False
        fitting = (
            zip(*self.labels) if self.labels else [()] * len(self.bundles)
        )  # For each bundle, whether the labels of each kind of node fit.
        equal = Counter(zip(map(tuple, self.needs), map(tuple, self.parts), fitting))
        for (needs, parts, labels), count in equal.items():
            if sum(_copies(needs, parts, node) for node in self.nodes if labels[node[0]]) < count:
                return False
        return True

    def _ways(self, place: int, state: Tuple[_Free, ...]) -> Any:
        """Generator that yields, for each way to put the bundle with the index `place` on a node, the new state of the nodes.

        `state` is the present state: what is free on each node. If no bundle has this index, nothing is yielded.
        """
        for at, (kind, free, instances) in enumerate(state if place < len(self.bundles) else ()):
            if (at and state[at - 1] == state[at]) or not self.labels[kind][place]:
                continue
            left = tuple(there - need for there, need in zip(free, self.needs[place]))
            if all(each >= 0 for each in left):
                for rest in _without(instances, self.parts[place]):
                    yield tuple(sorted((*state[:at], (kind, left, rest), *state[at + 1 :])))


def _without(instances: Tuple[Tuple[int, ...], ...], parts: Sequence[int]) -> Iterable[Tuple[Tuple[int, ...], ...]]:
    """Generator that yields, for each way to take the amounts `parts` from a node, what is left of its instances.

    `instances` has, for each resource, the free units of each instance, such as each GPU. Each result has the same form.
    `parts` has one amount for each resource.
    """
    if not parts:
        yield ()
        return
    for rest in _without(instances[1:], parts[1:]):
        for first in _taken(instances[0], parts[0]):
            yield (first, *rest)


def _taken(instances: Tuple[int, ...], amount: int) -> Iterable[Tuple[int, ...]]:
    """Generator that yields, for each way to take `amount` units of one resource from a node, what is left of its instances.

    `instances` has the free units of each instance, such as each GPU. Each result has the same form, and is sorted. Whole
    instances are taken first, and the rest of the amount comes from one other instance. If `amount` cannot be taken, nothing is
    yielded.
    """
    count, part = divmod(amount, _UNIT)
    whole = [each for each in instances if each == _UNIT]
    if len(whole) < count:
        return
    others = [each for each in instances if each != _UNIT] + whole[count:] + [0] * count
    if not part:
        yield tuple(sorted(others))
    for size in sorted({each for each in others if part and each >= part}):
        left = list(others)
        left[left.index(size)] -= part
        yield tuple(sorted(left))


def _copies(needs: Sequence[int], parts: Sequence[int], node: _Free) -> int:
    """Returns how many equal bundles the node `node` could hold at most if nothing else ran there.

    `parts` has the units that one bundle needs of each resource with instances (such as single GPUs), and `needs` has the units
    that one bundle needs of each other resource.
    """
    most = [there // need for there, need in zip(node[1], needs) if need]
    for there, part in zip(node[2], parts):
        if part:
            most.append(len(there) // (part // _UNIT) if part >= _UNIT else len(there) * (_UNIT // part))
    return min(most, default=_UNLIMITED)
