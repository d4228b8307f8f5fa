"""Whether a payload fits a session that is there: what it wishes for, held against what the session has. Pure.

A field that has its class's default wishes for nothing. What depends on what Slurm grants on each node is known to the
session alone; it refuses a payload that does not fit there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from .config import time_limit_seconds
from .runtime.cluster import nodes_expected
from .runtime.footprint import Footprint
from .runtime.spec import RaySpec, SpecError, from_json
from .slurm.config import SlurmQueueConfig
from .slurm.request import JobRequest

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
_ASKS_FOR_GPUS = re.compile(r"--(gpus(-per-(socket|task))?=|(gres|tres-per-task)=(.*[,/])?gpu([:=,]|$))")
_UNITS = {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024 * 1024}


@dataclass(frozen=True)
class Offer:
    """What a session has for each payload.

    Attributes:
        ray: its warm cluster; None if it has none.
        reuse: whether its cluster is for all payloads; else each gets one of its own on the session's nodes.
        queue: the fields of `SlurmQueueConfig` of its allocation, with CPUs and GPUs as they were asked for; None where
            there is no Slurm.
    """

    ray: RaySpec | None
    reuse: bool
    queue: Mapping[str, Any] | None


@dataclass(frozen=True)
class Wish:
    """What a payload wishes for.

    Attributes:
        ray: its cluster; None for a payload without Ray.
        footprint: what it needs of each node.
        queue: the allocation that it would ask for; None where there is no Slurm.
        time_limited: whether that queue's time limit is the payload's own.
    """

    ray: RaySpec | None
    footprint: Footprint
    queue: SlurmQueueConfig | None = None
    time_limited: bool = False


def make_offer(ray: RaySpec | None, reuse: bool, queue: SlurmQueueConfig, request: JobRequest) -> Offer:
    """What a session offers that is started so."""
    granted = {"cpus_per_node": request.cpus_per_node, "gpus_per_node": request.gpus_per_node}
    return Offer(ray if reuse else None, reuse, {**queue.model_dump(mode="json"), **granted})


def offer_to_json(offer: Offer) -> dict[str, Any]:
    """An offer as it stands in a session's directory."""
    return {"ray": None if offer.ray is None else asdict(offer.ray), "reuse": offer.reuse, "queue": offer.queue}


def offer_from_json(data: Mapping[str, Any]) -> Offer:
    """The offer of `offer_to_json`.

    Raises:
        ValueError: it is none.
    """
    try:
        ray = None if data["ray"] is None else from_json(RaySpec, json.dumps(data["ray"]))
        queue = SlurmQueueConfig(**data["queue"])
        if set(data["queue"]) != set(SlurmQueueConfig.model_fields) or type(data["reuse"]) is not bool:
            raise ValueError("a field is missing, or is no such thing")
        return Offer(ray, data["reuse"], queue.model_dump(mode="json"))
    except (KeyError, TypeError, SpecError) as error:
        raise ValueError(f"no offer of a session: {error}") from None


def misfit(wish: Wish, offer: Offer) -> str | None:
    """What a payload wishes for and the session does not have, as a sentence that names the field; None if it fits."""
    nodes = int(offer.queue["num_nodes"]) if offer.queue is not None else 1
    return (
        (wish.ray and _ray_misfit(wish.ray, offer, nodes))
        or _footprint_misfit(wish.footprint, offer)
        or (wish.queue and offer.queue is not None and _queue_misfit(wish.queue, offer.queue, wish.time_limited))
        or None
    )


def alike(one: Offer, other: Offer) -> bool:
    """Whether two sessions have the same; how long one waits for their clusters says nothing of what these are."""
    plain, also = (
        replace(each, ray=replace(each.ray, startup_timeout=0.0)) if each.ray is not None else each for each in (one, other)
    )
    return plain == also


def refused(problem: str) -> str:
    """A misfit as an error for a session that shall get no other one beside it."""
    return f'{problem}; use what the session has, another session name, or SessionConfig(on_misfit="new-session")'


def wants(wish: Wish, offer: Offer) -> tuple[int | None, int | None]:
    """The CPUs and GPUs of each node that a payload claims while others run beside it; None claims nothing.

    A payload that takes the session's cluster as it is leaves it to Ray who gets what.
    """
    if wish.ray is not None and wish.ray == offer.ray:
        return None, None
    most: dict[str, int | None] = {"CPUs": None, "GPUs": None}
    for want in wish.footprint:
        if want.amount is not None:
            most[want.unit] = max(want.amount, most[want.unit] or 0)
    return most["CPUs"], most["GPUs"]


def payload_time_limit(wish: Wish, offer: Offer) -> float | None:
    """Seconds that a payload may take by its own queue; None for as long as the session lives, of which it has begun a part."""
    if wish.queue is None or offer.queue is None or not wish.time_limited:
        return None
    own, whole = (time_limit_seconds(text) for text in (wish.queue.time_limit, offer.queue["time_limit"]))
    return own if own is not None and (whole is None or own < whole) else None


def _ray_misfit(wanted: RaySpec, offer: Offer, nodes: int) -> str | None:
    if not offer.reuse:  # A cluster of its own, on all the nodes that there are.
        if wanted.min_nodes is not None and wanted.min_nodes > nodes:
            return f"RayLauncher.min_nodes={wanted.min_nodes} is more than the session's {nodes} nodes"
        return None
    if offer.ray is None:
        return "the session has no Ray cluster: its default_launcher is no RayLauncher"
    plain = RaySpec()
    for field in fields(RaySpec):
        value = getattr(wanted, field.name)
        if field.name in _PAYLOADS_OWN or value == getattr(plain, field.name):
            continue
        has = getattr(offer.ray, field.name)
        if not _grants(field.name, value, has, offer.ray, nodes):
            name = _LAUNCHER_FIELDS.get(field.name, field.name)
            return f"RayLauncher.{name}={_shown(field.name, value)!r} is not what the session has: {_shown(field.name, has)!r}"
    return None


def _grants(name: str, value: Any, has: Any, ray: RaySpec, nodes: int) -> bool:
    if name in ("num_cpus", "num_gpus"):
        return has is None or value <= has  # None is what Slurm grants, which the session knows.
    if name == "object_store_memory":
        return has is not None and value <= has
    if name == "resources":
        return all(amount <= has.get(key, 0) for key, amount in value.items())
    if name == "labels":
        return all(has.get(key) == label for key, label in value.items())
    if name == "min_nodes":
        return bool(value <= (has or nodes_expected(ray, nodes)))
    return bool(value == has)


def _shown(name: str, value: Any) -> Any:
    return value / 2**30 if name == "object_store_memory" and value is not None else value


def _footprint_misfit(footprint: Footprint, offer: Offer) -> str | None:
    if offer.queue is None:
        return None
    granted = {"CPUs": offer.queue["cpus_per_node"], "GPUs": _gpus(offer.queue)}
    for want in footprint:
        has = granted[want.unit]
        if want.amount is not None and has is not None and want.amount > has:
            return f"{want.field}={want.amount} is more than the session was given on each node: {has} {want.unit}"
    return None


def _gpus(queue: Mapping[str, Any]) -> int | None:
    """GPUs of each node; None if they were asked for in words of Slurm's own."""
    if queue["gpus_per_node"] is None and any(_ASKS_FOR_GPUS.match(option) for option in queue["extra_sbatch"]):
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
        return value == given or (given is not None and 0 < _mebibytes(value) <= (_mebibytes(given) or float("inf")))
    if name == "time_limit":
        own, whole = time_limit_seconds(value), time_limit_seconds(given)
        return whole is None or (own is not None and own <= whole)
    if name == "extra_sbatch":
        return all(option in given for option in value)
    return bool(value == given)


def _mebibytes(text: str) -> float:
    """A size as `sbatch --mem` takes it; 0 stands for all of a node's memory (sbatch(1), Slurm 22.05)."""
    number, unit = re.fullmatch(r"(\d+)([KMGT]?)", text.upper()).groups()  # type: ignore[union-attr]
    return int(number) * _UNITS[unit]
