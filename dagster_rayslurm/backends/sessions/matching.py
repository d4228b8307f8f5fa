"""Whether a payload fits a session that is there: what it wishes for, held against what the session has. Pure.

A field that has its class's default wishes for nothing. What depends on what Slurm grants on each node is known to the
session alone; it refuses a payload that does not fit there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from ...components import Component
from ...config import mebibytes, time_limit_seconds
from ...launchers import Launcher, RayLauncher
from ...runtime.node.resources import Footprint
from ...runtime.protocol.spec import NodeSpec, RaySpec, SpecError, from_json
from ...runtime.ray.node_table import nodes_expected
from ...slurm.config import HetComponent, SlurmQueueConfig
from ...slurm.request import JobRequest, asks_for_gpus, gibibytes_for_ray

_LAUNCHER_FIELDS = {
    "num_cpus": "num_cpus_per_node",
    "num_gpus": "num_gpus_per_node",
    "object_store_memory": "object_store_memory_gb",
    "node_ip_address": "head_node_address",
}
"""Fields of a launcher that its cluster's specification calls by another name."""
_PAYLOADS_OWN = ("startup_timeout",)
"""What says how long to wait, and nothing of the cluster."""
_ALLOCATIONS_OWN = ("requeue",)
"""What is never asked for a session's job."""


@dataclass(frozen=True)
class ComponentCapacity:
    """What a session has in one component of its allocation.

    Attributes:
        component_id: name of the component.
        queue: the fields of its `SlurmQueueConfig`, with CPUs and GPUs as they were asked for.
    """

    component_id: str
    queue: Mapping[str, Any]


@dataclass(frozen=True)
class Capacity:
    """What a session has for each payload.

    Attributes:
        ray: its warm cluster; None if it has none.
        reuse: whether its cluster is for all payloads; else each gets one of its own on the session's nodes.
        queue: the fields of `SlurmQueueConfig` of its allocation, with CPUs and GPUs as they were asked for; None where
            there is no Slurm, or the allocation has components.
        rooms: the components of its allocation, the head's first; none where all nodes are alike.
    """

    ray: RaySpec | None
    reuse: bool
    queue: Mapping[str, Any] | None
    rooms: tuple[ComponentCapacity, ...] = ()

    @property
    def leader(self) -> Mapping[str, Any] | None:
        """The fields of the queue where the head is; None where there is no Slurm."""
        return self.rooms[0].queue if self.rooms else self.queue


@dataclass(frozen=True)
class Requirements:
    """What a payload wishes for.

    Attributes:
        ray: its cluster; None for a payload without Ray.
        footprint: what it needs of each node, by its own launcher.
        queue: the allocation that it would ask for; None where there is no Slurm, or that would have components.
        time_limited: whether the time limit of what it would ask for is the payload's own.
        components: the components that it would ask for, in the job's order, each with what the payload's launcher wants of it.
        head: the component in which it has to run; None for wherever the head is.
    """

    ray: RaySpec | None
    footprint: Footprint
    queue: SlurmQueueConfig | None = None
    time_limited: bool = False
    components: tuple[Component, ...] = ()
    head: str | None = None


def head_wanted(launcher: Launcher, own: Sequence[HetComponent] | None) -> str | None:
    """The component in which a payload has to run; None for wherever a session has its head.

    Args:
        launcher: the payload's.
        own: the components that it brings itself; None if it takes those that it finds.
    """
    if isinstance(launcher, RayLauncher) and launcher.component_id is not None:
        return launcher.component_id
    return next((each.component_id for each in own or () if each.head), None)


def make_offer(
    ray: RaySpec | None, reuse: bool, queue: SlurmQueueConfig, request: JobRequest, components: Sequence[Component] = ()
) -> Capacity:
    """What a session offers that is started so.

    Args:
        ray: the cluster of its launcher.
        reuse: whether that is kept warm.
        queue: what its allocation is asked for, if it has no components.
        request: what Slurm is asked for.
        components: the components of its allocation, in the job's order.
    """
    warm = ray if reuse else None
    if not components:
        return Capacity(warm, reuse, _granted(queue, request))
    rooms = [
        ComponentCapacity(each.component_id, _granted(each.queue, part))
        for each, part in zip(components, request.parts, strict=True)
    ]
    return Capacity(warm, reuse, None, tuple(rooms))


def _granted(queue: SlurmQueueConfig, request: JobRequest) -> dict[str, Any]:
    granted = {"cpus_per_node": request.cpus_per_node, "gpus_per_node": request.gpus_per_node}
    return {**queue.model_dump(mode="json"), **granted}


def offer_to_json(offer: Capacity) -> dict[str, Any]:
    """An offer as it stands in a session's directory."""
    return {
        "ray": None if offer.ray is None else asdict(offer.ray),
        "reuse": offer.reuse,
        "queue": offer.queue,
        "components": [{"component_id": room.component_id, "queue": room.queue} for room in offer.rooms],
    }


def offer_from_json(data: Mapping[str, Any]) -> Capacity:
    """The offer of `offer_to_json`.

    Raises:
        ValueError: it is none.
    """
    try:
        ray = None if data["ray"] is None else from_json(RaySpec, json.dumps(data["ray"]))
        rooms = tuple(_room_from_json(each) for each in _list(data["components"]))
        if type(data["reuse"]) is not bool or len({room.component_id for room in rooms}) != len(rooms):
            raise ValueError("a field is missing, or is no such thing")
        if rooms and data["queue"] is not None:
            raise ValueError("it has a queue beside its components")
        return Capacity(ray, data["reuse"], None if rooms else _queue_from_json(data["queue"]), rooms)
    except (KeyError, TypeError, SpecError) as error:
        raise ValueError(f"no offer of a session: {error}") from None


def _list(data: Any) -> list[Any]:
    if not isinstance(data, list):
        raise ValueError("its components are no list")
    return data


def _room_from_json(data: Any) -> ComponentCapacity:
    if not isinstance(data["component_id"], str) or set(data) != {"component_id", "queue"}:
        raise ValueError("it has a component that is none")
    return ComponentCapacity(data["component_id"], _queue_from_json(data["queue"]))


def _queue_from_json(data: Any) -> Mapping[str, Any]:
    queue = SlurmQueueConfig(**data)
    if set(data) != set(SlurmQueueConfig.model_fields):
        raise ValueError("a field is missing")
    return queue.model_dump(mode="json")


def misfit(wish: Requirements, offer: Capacity) -> str | None:
    """What a payload wishes for and the session does not have, as a sentence that names the field; None if it fits."""
    if wish.components or offer.rooms:
        return _component_misfit(wish, offer)
    if offer.queue is not None:
        nodes = int(offer.queue["num_nodes"])
    else:
        nodes = len(offer.ray.components) or 1 if offer.ray is not None else 1
    return (
        _head_misfit(wish, offer)
        or (wish.ray and _ray_misfit(wish.ray, offer, nodes))
        or (offer.queue is not None and _footprint_misfit(wish.footprint, offer.queue))
        or (wish.queue and offer.queue is not None and _queue_misfit(wish.queue, offer.queue, wish.time_limited))
        or None
    )


def _component_misfit(wish: Requirements, offer: Capacity) -> str | None:
    """As `misfit`, where either has components: each that is wished for is held against the session's of that name."""
    if not offer.rooms:
        return f"components: the session has none, and the payload asks for {_names(wish.components)}"
    if not wish.components:
        return f"components: the session has {_names(offer.rooms)}, and the payload asks for nodes that are all alike"
    rooms = {room.component_id: room.queue for room in offer.rooms}
    for each in wish.components:
        if each.component_id not in rooms:
            return f"components: the session has no {each.component_id!r}; it has {_names(offer.rooms)}"
    nodes = sum(int(queue["num_nodes"]) for queue in rooms.values())
    problem = _head_misfit(wish, offer) or (wish.ray and _ray_misfit(wish.ray, offer, nodes))
    # What the payload's own process wants, it wants where the head is, whichever component it would have that in.
    own = tuple(want for each in wish.components for want in each.payload_wants)
    head = offer.rooms[0].component_id
    problem = problem or _within(head, _footprint_misfit(own, rooms[head]))
    for each in wish.components:
        queue = rooms[each.component_id]
        problem = problem or _within(each.component_id, _footprint_misfit(each.launcher.footprint(), queue))
        problem = problem or _within(each.component_id, _queue_misfit(each.queue, queue, wish.time_limited))
    return problem or None


def _head_misfit(wish: Requirements, offer: Capacity) -> str | None:
    components: Sequence[ComponentCapacity | NodeSpec] = offer.rooms or (offer.ray.components if offer.ray is not None else ())
    if wish.head is None or not components or components[0].component_id == wish.head:
        return None
    return (
        f"RayLauncher.component_id={wish.head!r} is not what the session has: its head, where payloads run, is in component "
        f"{components[0].component_id!r}"
    )


def _within(component_id: str, problem: str | None) -> str | None:
    return f"component {component_id!r}: {problem}" if problem else None


def _names(components: Sequence[Component | ComponentCapacity]) -> str:
    return ", ".join(repr(each.component_id) for each in components)


def across_rooms(ray: RaySpec | None, offer: Capacity) -> RaySpec | None:
    """The cluster of a payload's own on the nodes of a session: components that the payload does not name are part of it."""
    if ray is None or not offer.rooms:
        return ray
    named = {each.component_id: each for each in ray.components}
    return replace(ray, components=[named.get(room.component_id, NodeSpec(room.component_id)) for room in offer.rooms])


def alike(one: Capacity, other: Capacity) -> bool:
    """Whether two sessions have the same; how long one waits for their clusters says nothing of what these are."""
    plain, also = (
        replace(each, ray=replace(each.ray, startup_timeout=0.0)) if each.ray is not None else each for each in (one, other)
    )
    return plain == also


def refused(problem: str) -> str:
    """A misfit as an error for a session that shall get no other one beside it."""
    return f'{problem}; use what the session has, another session name, or SessionConfig(on_misfit="new-session")'


def wants(wish: Requirements, offer: Capacity) -> tuple[int | None, int | None]:
    """The CPUs and GPUs of each node that a payload claims while others run beside it; None claims nothing.

    A payload that takes the session's cluster as it is leaves it to Ray who gets what; so does one whose nodes differ by
    component, as there is no amount that it wants of each of them.
    """
    if wish.ray is not None and (wish.ray == offer.ray or wish.components or wish.ray.components):
        return None, None
    most: dict[str, int | None] = {"CPUs": None, "GPUs": None}
    for want in wish.footprint:
        if want.amount is not None and want.unit in most:
            most[want.unit] = max(int(want.amount), most[want.unit] or 0)
    return most["CPUs"], most["GPUs"]


def payload_time_limit(wish: Requirements, offer: Capacity) -> float | None:
    """Seconds that a payload may take by its own queue; None for as long as the session lives, of which it has begun a part."""
    asked = wish.components[0].queue if wish.components else wish.queue
    if asked is None or offer.leader is None or not wish.time_limited:
        return None
    own, whole = (time_limit_seconds(text) for text in (asked.time_limit, offer.leader["time_limit"]))
    return own if own is not None and (whole is None or own < whole) else None


def _ray_misfit(wanted: RaySpec, offer: Capacity, nodes: int) -> str | None:
    if not offer.reuse:  # A cluster of its own, on all the nodes that there are.
        if wanted.min_nodes is not None and wanted.min_nodes > nodes:
            return f"RayLauncher.min_nodes={wanted.min_nodes} is more than the session's {nodes} nodes"
        return None
    if offer.ray is None:
        return "the session has no Ray cluster: its default_launcher is no RayLauncher"
    # What nodes are that differ by component stands there, and what the launcher says of each is part of it already.
    elsewhere = {"components", *(field.name for field in fields(NodeSpec))} if wanted.components else {"components"}
    problem = _field_misfit(wanted, offer.ray, RaySpec(), {*_PAYLOADS_OWN, *elsewhere}, nodes)
    if problem:
        return problem
    has = {each.component_id: each for each in offer.ray.components}
    if not wanted.components and has:
        return f"components: the session's cluster has {', '.join(map(repr, has))}, and the payload asks for none"
    for each in wanted.components:
        if each.component_id not in has:
            return f"components: the session's cluster has no {each.component_id!r}"
        problem = _field_misfit(each, has[each.component_id], NodeSpec(each.component_id), set(), nodes)
        if problem:
            return _within(each.component_id, problem)
    return None


def _field_misfit(
    wanted: RaySpec | NodeSpec, has: RaySpec | NodeSpec, plain: RaySpec | NodeSpec, but: set[str], nodes: int
) -> str | None:
    """The first field that is wished for otherwise than it is there, as a sentence."""
    for field in fields(wanted):
        value, given = getattr(wanted, field.name), getattr(has, field.name)
        if field.name in but or value == getattr(plain, field.name):
            continue
        if not _grants(field.name, value, given, has, nodes):
            name = _LAUNCHER_FIELDS.get(field.name, field.name)
            return f"RayLauncher.{name}={_shown(field.name, value)!r} is not what the session has: {_shown(field.name, given)!r}"
    return None


def _grants(name: str, value: Any, has: Any, ray: RaySpec | NodeSpec, nodes: int) -> bool:
    if name in ("num_cpus", "num_gpus"):
        return has is None or value <= has  # None is what Slurm grants, which the session knows.
    if name == "object_store_memory":
        return has is not None and value <= has
    if name == "resources":
        return all(amount <= has.get(key, 0) for key, amount in value.items())
    if name == "labels":
        return all(has.get(key) == label for key, label in value.items())
    if name == "min_nodes" and isinstance(ray, RaySpec):
        return bool(value <= (has or nodes_expected(ray, nodes)))
    return bool(value == has)


def _shown(name: str, value: Any) -> Any:
    return value / 2**30 if name == "object_store_memory" and value is not None else value


def _footprint_misfit(footprint: Footprint, queue: Mapping[str, Any]) -> str | None:
    granted = {"CPUs": queue["cpus_per_node"], "GPUs": _gpus(queue), "GiB": _gibibytes_for_ray(queue)}
    for want in footprint:
        has = granted[want.unit]
        if want.amount is not None and has is not None and want.amount > has:
            return f"{want.field}={want.amount:g} is more than the session was given on each node: {has:g} {want.unit}"
    return None


def _gibibytes_for_ray(queue: Mapping[str, Any]) -> float | None:
    return gibibytes_for_ray(queue["mem"], queue["mem_per_cpu"], queue["cpus_per_node"])


def _gpus(queue: Mapping[str, Any]) -> int | None:
    """GPUs of each node; None if they were asked for in words of Slurm's own."""
    if queue["gpus_per_node"] is None and any(map(asks_for_gpus, queue["extra_sbatch"])):
        return None
    return queue["gpus_per_node"] or 0


def _queue_misfit(wanted: SlurmQueueConfig, has: Mapping[str, Any], time_limited: bool) -> str | None:
    for name, field in SlurmQueueConfig.model_fields.items():
        value, given = getattr(wanted, name), has.get(name, field.default)
        if name in _ALLOCATIONS_OWN or value == field.default or (name == "time_limit" and not time_limited):
            continue
        if not _given(name, value, given, has):
            return f"SlurmQueueConfig.{name}={value!r} is not what the session has: {given!r}"
    return None


def _given(name: str, value: Any, given: Any, has: Mapping[str, Any]) -> bool:
    if name == "num_nodes":
        return bool(value <= given)
    if name == "cpus_per_node":
        return given is None or value <= given
    if name == "gpus_per_node":
        gpus = _gpus(has)
        return gpus is None or value <= gpus
    if name in ("mem", "mem_per_cpu"):
        # 0 stands for all of a node's memory (sbatch(1), Slurm 22.05).
        return value == given or (given is not None and 0 < mebibytes(value) <= (mebibytes(given) or float("inf")))
    if name == "time_limit":
        own, whole = time_limit_seconds(value), time_limit_seconds(given)
        return whole is None or (own is not None and own <= whole)
    if name == "extra_sbatch":
        return all(option in given for option in value)
    return bool(value == given)
