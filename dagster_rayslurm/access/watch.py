"""Parses answers of the Ray dashboard (tried on Ray 2.60) into the state of a cluster for `rayslurm top`. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ..runtime.ray import feasibility
from ..runtime.ray.feasibility import Bundle

# Paths of the dashboard, requested one at a time; the head node answers each without asking the other nodes.
QUERIES = {
    "nodes": "/nodes?view=summary",
    "tasks": "/api/v0/tasks/summarize",
    "pending": "/api/v0/tasks?detail=1&limit=200&filter_keys=state&filter_predicates=%3D&filter_values=PENDING_NODE_ASSIGNMENT",
    "groups": "/api/v0/placement_groups?detail=1&limit=200&filter_keys=state&filter_predicates=%3D&filter_values=PENDING",
    "actors": "/api/v0/actors/summarize",
    "jobs": "/api/jobs/",
}
_MOST_NAMES = 3
_LISTS = {"pending": "tasks that wait for a node", "groups": "placement groups"}  # Queries with a limit: their rows.

Counts = Mapping[str, Mapping[str, int]]  # Numbers of tasks or actors, by the name of the task or class, and by the state.


@dataclass(frozen=True)
class Gpu:
    """One GPU of a node: the model, the utilization in percent, and the used and total memory in MiB."""

    name: str
    percent: float
    used: float
    total: float


@dataclass(frozen=True)
class Node:
    """One node of a Ray cluster; amounts of memory are in bytes.

    `store` is Ray's object store. The totals of `memory` and `store`, and the amounts in `resources`, are what Ray may use on the
    node. The machine may have more.
    """

    name: str
    address: str
    alive: bool
    head: bool
    cpu: float  # CPU use in percent of the whole machine.
    memory: tuple[float, float]  # Used, and total.
    store: tuple[float, float]  # Used, and total.
    gpus: tuple[Gpu, ...]
    resources: Mapping[str, float]  # Total amounts. Keys are Ray's names in camel case, such as "objectStoreMemory".


@dataclass(frozen=True)
class Group:
    """One placement group that waits for its bundles; a bundle maps names of resources to the amounts that the group needs.

    `infeasible` is True if Ray itself says that the nodes cannot hold the group. Ray considers the group's strategy and labels.
    This package cannot compute the value, because the dashboard does not tell the strategy.
    """

    name: str
    bundles: Sequence[Mapping[str, float]]
    infeasible: bool


@dataclass(frozen=True)
class Snapshot:
    """The known state of a Ray cluster.

    The fields named like the keys of `QUERIES` hold the dashboard's latest answers to these queries. The field `payloads` holds
    the latest answer of the session to which the cluster belongs. This field stays empty without a session.
    """

    nodes: tuple[Node, ...] = ()
    tasks: Counts = field(default_factory=dict)  # Numbers of tasks, by name and state.
    actors: Counts = field(default_factory=dict)  # Numbers of actors, by class and state.
    jobs: tuple[Mapping[str, Any], ...] = ()
    pending: tuple[tuple[str, Mapping[str, float]], ...] = ()  # Name and resources of each task that waits for a node.
    groups: tuple[Group, ...] = ()
    unlisted: Mapping[str, int] = field(default_factory=dict)  # By query: how many rows its answer lacks because of the limit.
    payloads: tuple[Mapping[str, Any], ...] = ()  # In the order of the session's queue.

    def with_answer(self, query: str, answer: Any) -> Snapshot:
        """Returns a copy in which the field `query` has the content of `answer`, the dashboard's parsed JSON answer.

        `query` is a key of `QUERIES`. Raises ValueError if `answer` has an unknown form.
        """
        try:
            changes = {query: _READERS[query](answer)}
            if query in _LISTS:
                found = answer["data"]["result"]
                changes["unlisted"] = {**self.unlisted, query: int(found.get("num_filtered") or 0) - len(found["result"])}
            return replace(self, **changes)
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"the dashboard's answer about {query} has another form: {type(error).__name__}: {error}") from None

    @property
    def totals(self) -> Mapping[str, float]:
        """The sum of each resource over all living nodes, by the name of the resource."""
        total: Counter[str] = Counter()
        for node in self.nodes:
            if node.alive:
                total.update(node.resources)
        return total

    @cached_property
    def never(self) -> list[str]:
        """Sentences about waiting tasks and placement groups that the living nodes can never hold; [] if no node lives."""
        alive = [node for node in self.nodes if node.alive]
        if not alive:
            return []
        names = {name for _, wanted in self.pending for name in wanted}
        names |= {name for group in self.groups for bundle in group.bundles for name in bundle}
        nodes = [feasibility.Node({name: _amount(node, name) for name in names}) for node in alive]
        unmet: dict[str, list[str]] = {}
        for name, wanted in self.pending:
            if not _fits(wanted, nodes):
                unmet.setdefault(_words(wanted), []).append(name)
        sentences = [f"{_names(names)} waits for {wanted}, which no node has" for wanted, names in sorted(unmet.items())]
        whole: dict[str, bool] = {}  # Whether the nodes can hold bundles together, by the words for these bundles.
        for group in self.groups:
            bad = next((bundle for bundle in group.bundles if not _fits(bundle, nodes)), None)
            several = ", ".join(f"{count} of {words}" for words, count in Counter(map(_words, group.bundles)).items())
            waits = f"placement group {group.name} waits for"
            if several not in whole:
                whole[several] = feasibility.can_hold(list(map(Bundle, group.bundles)), "PACK", nodes)
            if bad is not None:
                sentences.append(f"{waits} a bundle of {_words(bad)}, which no node has")
            elif not whole[several]:
                sentences.append(f"{waits} bundles ({several}), which all nodes together cannot hold")
            elif group.infeasible:
                sentences.append(f"{waits} bundles ({several}), which its strategy or labels cannot place on the nodes")
        return sentences

    @property
    def unchecked(self) -> list[str]:
        """Sentences about waiting tasks and placement groups that the dashboard did not list, so that `never` lacks them."""
        return [
            f"{count:,} more {_LISTS[query]} are not listed, and not checked"
            for query, count in self.unlisted.items()
            if count > 0
        ]


def state_counts(counts: Counts) -> Counter[str]:
    """Returns the number of tasks or actors in each state, summed over all names in `counts`."""
    total: Counter[str] = Counter()
    for each in counts.values():
        total.update(each)
    return total


def _nodes(answer: Any) -> tuple[Node, ...]:
    """Returns the nodes of a Ray cluster from the dashboard's JSON: the head node first, then living nodes, then dead nodes."""
    found = []
    for row in answer["data"]["summary"]:
        raylet = row.get("raylet") or {}
        resources = {str(name): float(amount) for name, amount in (raylet.get("resourcesTotal") or {}).items()}
        own = row.get("cgroupMem") or [row["mem"][0] - row["mem"][1], row["mem"][0]] if row.get("mem") else [0, 0]
        granted = resources.get("memory", 0.0) + resources.get("objectStoreMemory", 0.0)
        used, free = float(raylet.get("objectStoreUsedMemory") or 0), float(raylet.get("objectStoreAvailableMemory") or 0)
        found.append(
            Node(
                name=str(row.get("hostname") or raylet.get("nodeManagerHostname") or row.get("ip")),
                address=str(row.get("ip") or raylet.get("nodeManagerAddress") or ""),
                alive=raylet.get("state", "ALIVE") == "ALIVE",
                head=bool(raylet.get("isHeadNode")),
                cpu=float(row.get("cpu") or 0.0),
                memory=(float(own[0]), granted or float(own[1])),
                store=(used, used + free),
                gpus=tuple(map(_gpu, row.get("gpus") or ())),
                resources=resources,
            )
        )
    return tuple(sorted(found, key=lambda node: (not node.head, not node.alive, _natural(node.name))))


def _gpu(row: Mapping[str, Any]) -> Gpu:
    """Returns a GPU from its entry in the answer to the query "nodes"."""
    percent = float(row.get("utilizationGpu") or 0)
    return Gpu(str(row.get("name") or "GPU"), percent, float(row.get("memoryUsed") or 0), float(row.get("memoryTotal") or 0))


def _natural(name: str) -> list[tuple[int, str]]:
    """Returns a key that sorts names with numbers, so that "node10" comes after "node9"."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name) if part]


def _counts(answer: Any) -> Counts:
    """Returns the numbers of tasks or actors, by name and state, from the answer to the query "tasks" or "actors"."""
    summary = answer["data"]["result"]["result"]["node_id_to_summary"]["cluster"]["summary"]
    return {str(name): {str(state): int(n) for state, n in row["state_counts"].items()} for name, row in summary.items()}


def _pending(answer: Any) -> tuple[tuple[str, Mapping[str, float]], ...]:
    """Returns the name and the resources of each task in the answer to the query "pending", except tasks in placement groups."""
    # A task within a placement group waits for the group, and the group has an entry of its own.
    rows = [row for row in answer["data"]["result"]["result"] if not row.get("placement_group_id")]
    return tuple((str(row["name"]), _amounts(row.get("required_resources") or {})) for row in rows)


def _groups(answer: Any) -> tuple[Group, ...]:
    """Returns the placement groups in the answer to the query "groups"."""
    return tuple(
        Group(
            str(row.get("name") or row["placement_group_id"][:12]),
            [_amounts(each["unit_resources"]) for each in row["bundles"]],
            (row.get("stats") or {}).get("scheduling_state") == "INFEASIBLE",
        )
        for row in answer["data"]["result"]["result"]
    )


def _amounts(resources: Mapping[str, Any]) -> Mapping[str, float]:
    return {str(name): float(amount) for name, amount in resources.items()}


_READERS: Mapping[str, Callable[[Any], Any]] = {
    **{"nodes": _nodes, "tasks": _counts, "actors": _counts},
    **{"jobs": tuple, "pending": _pending, "groups": _groups},
}


def _amount(node: Node, name: str) -> float:
    """Returns how much of the resource `name` Ray may use on a node; 0.0 if the node has no such resource."""
    return node.resources.get(name, node.resources.get(_camel(name), 0.0))


def _fits(wanted: Mapping[str, float], nodes: Iterable[feasibility.Node]) -> bool:
    """Returns True if at least one node could hold the resources `wanted`, as if nothing else ran there."""
    return any(feasibility.fits(Bundle(wanted), node) for node in nodes)


def _camel(name: str) -> str:
    """Returns a name such as "object_store_memory" in camel case, as the dashboard writes it: "objectStoreMemory"."""
    first, *rest = name.split("_")
    return first + "".join(part[:1].upper() + part[1:] for part in rest)


def _words(wanted: Mapping[str, float]) -> str:
    """Returns resources as text, such as "CPU 4, GPU 1"."""
    return ", ".join(f"{name} {amount:g}" for name, amount in sorted(wanted.items())) or "nothing"


def _names(names: Iterable[str]) -> str:
    """Returns the most frequent names as text; a number before a name counts its occurrences, as in "12 train, load"."""
    counted = Counter(names)
    words = [name if number == 1 else f"{number} {name}" for name, number in counted.most_common(_MOST_NAMES)]
    return ", ".join(words) + (", …" if len(counted) > _MOST_NAMES else "")
