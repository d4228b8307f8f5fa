"""Match payloads with sessions: what a payload requires, what a session offers, and the first misfit between them. Pure.

A launcher or queue field at its default requires nothing. If a session's job left an amount to Slurm, only the running session
knows what Slurm granted, and the session itself refuses a payload that does not fit.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from ...components import Component, request_for
from ...config import SessionConfig, time_limit_seconds
from ...launchers import Launcher, RayLauncher
from ...runtime.node.resources import Footprint
from ...runtime.protocol.spec import NodeSpec, RaySpec, SpecError, from_json
from ...runtime.ray.membership import nodes_expected
from ...slurm.config import HetComponent, SlurmQueueConfig
from ...slurm.request import SBATCH_FIELDS, JobRequest, gibibytes_for_ray, granted_gpus, make_request

QueueFields = Mapping[str, Any]
"""The fields of a `SlurmQueueConfig` as JSON, with the CPUs and GPUs that were requested of Slurm."""

_LAUNCHER_FIELDS = {
    "num_cpus": "num_cpus_per_node",
    "num_gpus": "num_gpus_per_node",
    "object_store_memory": "object_store_memory_gb",
    "node_ip_address": "head_node_address",
}
"""The field of `RayLauncher` for each field of `RaySpec` or `NodeSpec` that has another name."""


@dataclass(frozen=True)
class Requirements:
    """What a payload requires of a session, and what a session is created with.

    Attributes:
        footprint: what the launcher requires of each node.
        queue: the allocation, or its first component.
        components: the components of the allocation, in the job's order; empty where all nodes are alike.
        time_limited: whether the time limit in `queue` is the payload's own, and not the session's.
        head: the component in which the payload must run; None for the component that has the session's Ray head.
    """

    ray: RaySpec | None
    footprint: Footprint
    queue: SlurmQueueConfig = field(default_factory=SlurmQueueConfig)
    components: tuple[Component, ...] = ()
    time_limited: bool = False
    head: str | None = None

    def with_time_limit(self, time_limit: str) -> Requirements:
        """The same requirements with another time limit of the job."""
        components = tuple(replace(each, queue=each.queue.having(time_limit=time_limit)) for each in self.components)
        return replace(self, queue=self.queue.having(time_limit=time_limit), components=components)

    def job_request(self, name: str = "rayslurm", comment: str = "") -> JobRequest:
        """The request for the Slurm job of a session; raises ValueError if the queue and the launcher contradict each other."""
        if self.components:
            request = request_for(self.components, job_name=name, comment=comment)
        else:
            request = make_request(self.queue, self.footprint, job_name=name, comment=comment)
        # After a requeue, the session would not know which requests it had accepted before.
        first, *others = (replace(part, queue=part.queue.having(requeue=False)) for part in request.components)
        return replace(first, further_components=tuple(others))

    def capacity(self, reuse: bool) -> Capacity:
        """What a session offers that is created with these requirements; `reuse` says whether its Ray cluster stays warm."""
        queues = {part.component_id: part.queue.model_dump(mode="json") for part in self.job_request().components}
        return Capacity(self.ray if reuse else None, reuse, queues)


@dataclass(frozen=True)
class Capacity:
    """What a session offers to each payload.

    Attributes:
        ray: the warm Ray cluster; None if the session has none.
        reuse: whether all payloads share the warm Ray cluster; otherwise each payload gets its own on the session's nodes.
        queues: what was granted to each component, the head's first; under None where all nodes are alike; empty without Slurm.
    """

    ray: RaySpec | None
    reuse: bool
    queues: Mapping[str | None, QueueFields] = field(default_factory=dict)

    @property
    def components(self) -> list[str]:
        """Names of the components, the head's first; empty where all nodes are alike."""
        if self.queues:
            return [name for name in self.queues if name is not None]
        return [each.component_id for each in self.ray.components] if self.ray is not None else []


def capacity_to_json(capacity: Capacity) -> dict[str, Any]:
    """A capacity as JSON for a session's manifest; `capacity_from_json` reads it."""
    return {
        "ray": None if capacity.ray is None else asdict(capacity.ray),
        "reuse": capacity.reuse,
        "queue": capacity.queues.get(None),
        "components": [{"component_id": name, "queue": queue} for name, queue in capacity.queues.items() if name is not None],
    }


def capacity_from_json(data: Mapping[str, Any]) -> Capacity:
    """The capacity that `capacity_to_json` wrote; raises ValueError if the data is damaged."""
    try:
        ray = None if data["ray"] is None else from_json(RaySpec, json.dumps(data["ray"]))
        queues: dict[str | None, QueueFields] = {str(each["component_id"]): each["queue"] for each in data["components"]}
        if not queues and data["queue"] is not None:
            queues = {None: data["queue"]}
        granted = {name: SlurmQueueConfig(**queue).model_dump(mode="json") for name, queue in queues.items()}
        capacity = Capacity(ray, bool(data["reuse"]), granted)
    except (KeyError, TypeError, SpecError) as error:
        raise ValueError(f"this is not the capacity of a session: {error}") from None
    if capacity_to_json(capacity) != data:
        raise ValueError("this is not the capacity of a session: a field is missing, unknown or of another type")
    return capacity


@dataclass(frozen=True)
class Target:
    """A session that a payload may use: the name of its directory, and what it is created with if there is none."""

    key: str
    created_with: Requirements
    capacity: Capacity


@dataclass(frozen=True)
class Choice:
    """Which session one payload gets."""

    required: Requirements
    problem: str | None  # Why the payload does not fit the shared session, as a sentence; None if it fits.
    shared: Callable[[], Target]  # The session for all payloads; used only without a `problem`.
    own: Callable[[], Target]  # A separate session that is created for such payloads.
    strict: bool  # Whether a payload that does not fit is refused, instead of getting a separate session.

    def fingerprint(self) -> bytes:
        """Text of all that the payload asks for. A retry of the step continues the payload only if its own text is the same."""
        required, target = self.required, self.own() if self.problem else self.shared()
        what = {"session": target.key, "time_limited": required.time_limited, "head": required.head}
        return json.dumps(what | requirements_to_json(required), sort_keys=True).encode()


def session_key(config: SessionConfig, run_id: str, what: Mapping[str, Any], created_with: Requirements, apart: bool) -> str:
    """The name of a session's directory: the session's name and a fingerprint of all that tells sessions apart.

    Args:
        what: what tells sessions apart whatever their names are.
        apart: whether this is a separate session, for a payload that does not fit the shared one.
    """
    what = dict(what)
    if config.name is None or apart:
        # How long to wait for a Ray cluster says nothing about the Ray cluster.
        ray = None if created_with.ray is None else replace(created_with.ray, startup_timeout=0.0)
        what |= requirements_to_json(replace(created_with, ray=ray))
        what |= {"concurrent": config.max_concurrent_payloads, "idle": config.idle_timeout, "yields": config.yield_when_idle}
    key = f"{config.name or 'default'}-{_digest(json.dumps(what, sort_keys=True))}"
    return key + run_suffix(run_id) if config.scope == "run" else key


def run_suffix(run_id: str) -> str:
    """The end of the names of all sessions that belong to a Dagster run."""
    return f"-{_digest(run_id)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def requirements_to_json(required: Requirements) -> dict[str, Any]:
    """The requirements that tell sessions apart, as JSON."""
    return {
        "ray": None if required.ray is None else asdict(required.ray),
        "footprint": required.footprint,
        "queue": required.queue.model_dump(mode="json"),
        "components": [
            [each.component_id, each.queue.model_dump(mode="json"), each.launcher.footprint(), each.payload_wants]
            for each in required.components
        ],
    }


def required_head(launcher: Launcher, own_components: Sequence[HetComponent] | None) -> str | None:
    """The component in which a payload must run; None if it runs wherever the session has its head.

    `own_components` are the components of this run; None if it takes those of the session.
    """
    if isinstance(launcher, RayLauncher) and launcher.component_id is not None:
        return launcher.component_id
    return next((each.component_id for each in own_components or () if each.head), None)


def misfit(required: Requirements, capacity: Capacity) -> str | None:
    """The first requirement that the session does not meet, as a sentence that names the field; None if the payload fits."""
    queues = capacity.queues
    there = [name for name in queues if name is not None]
    wanted = [each.component_id for each in required.components]
    if wanted and not there:
        return f"components: the session has none, and the payload asks for {_quoted(wanted)}"
    if there and not wanted:
        return f"components: the session has {_quoted(there)}, and the payload asks for nodes that are all alike"
    for name in wanted:
        if name not in there:
            return f"components: the session has no {name!r}; it has {_quoted(there)}"
    nodes = sum(int(queue["num_nodes"]) for queue in queues.values()) or len(capacity.components) or 1
    problem = _head_misfit(required, capacity) or (required.ray and _ray_misfit(required.ray, capacity, nodes)) or None
    return problem or next(filter(None, _allocation_misfits(required, queues)), None)


def misfit_error(problem: str) -> str:
    """The error message for a payload that does not fit the session, with what the user may change."""
    return f'{problem}; use what the session has, another session name, or SessionConfig(on_misfit="new-session")'


def same_capacity(one: Capacity, other: Capacity) -> bool:
    """Whether two sessions offer the same to payloads; how long to wait for the Ray cluster does not count."""
    plain, also = (
        replace(each, ray=replace(each.ray, startup_timeout=0.0)) if each.ray is not None else each for each in (one, other)
    )
    return plain == also


def own_cluster(ray: RaySpec | None, capacity: Capacity) -> RaySpec | None:
    """A payload's own Ray cluster on the session's nodes; it includes components that the payload does not name."""
    if ray is None or None in capacity.queues or not capacity.queues:
        return ray
    named = {each.component_id: each for each in ray.components}
    return replace(ray, components=[named.get(name, NodeSpec(name)) for name in capacity.components])


def claimed_resources(required: Requirements, capacity: Capacity) -> tuple[int | None, int | None]:
    """The CPUs and the GPUs on each node that a session reserves for a payload beside others; None for no reservation.

    Ray itself divides the session's Ray cluster among payloads that take it as it is. Nodes that differ by component have no
    common amount.
    """
    if required.ray is not None and (required.ray == capacity.ray or required.components or required.ray.components):
        return None, None
    most: dict[str, int | None] = {"CPUs": None, "GPUs": None}
    for want in required.footprint:
        if want.amount is not None and want.unit in most:
            most[want.unit] = max(int(want.amount), most[want.unit] or 0)
    return most["CPUs"], most["GPUs"]


def payload_time_limit(required: Requirements, capacity: Capacity) -> float | None:
    """The payload's own time limit in seconds; None if it has none, or the session's allocation is no longer than that."""
    head_queue = next(iter(capacity.queues.values()), None)
    if head_queue is None or not required.time_limited:
        return None
    own, whole = (time_limit_seconds(text) for text in (required.queue.time_limit, head_queue["time_limit"]))
    return own if own is not None and (whole is None or own < whole) else None


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def _within(component_id: str | None, problem: str | None) -> str | None:
    return f"component {component_id!r}: {problem}" if problem and component_id is not None else problem


def _head_misfit(required: Requirements, capacity: Capacity) -> str | None:
    components = capacity.components
    if required.head is None or not components or components[0] == required.head:
        return None
    return (
        f"RayLauncher.component_id={required.head!r} is not what the session has: its head, where payloads run, is in component "
        f"{components[0]!r}"
    )


def _ray_misfit(wanted: RaySpec, capacity: Capacity, nodes: int) -> str | None:
    if not capacity.reuse:  # The payload gets a cluster of its own on all nodes.
        if wanted.min_nodes is not None and wanted.min_nodes > nodes:
            return f"RayLauncher.min_nodes={wanted.min_nodes} is more than the session's {nodes} nodes"
        return None
    offered = capacity.ray
    if offered is None:
        return "the session has no Ray cluster: its default_launcher is no RayLauncher"
    # Settings of nodes were merged into `components`, so they are compared there. `startup_timeout` is the payload's own.
    elsewhere = {"components", "startup_timeout"} | ({each.name for each in fields(NodeSpec)} if wanted.components else set())
    problem = _ray_field_misfit(wanted, offered, RaySpec(), elsewhere, nodes)
    if problem:
        return problem
    there = {each.component_id: each for each in offered.components}
    if there and not wanted.components:
        return f"components: the session's cluster has {_quoted(there)}, and the payload asks for none"
    for each in wanted.components:
        if each.component_id not in there:
            return f"components: the session's cluster has no {each.component_id!r}"
        problem = _ray_field_misfit(each, there[each.component_id], NodeSpec(each.component_id), set(), nodes)
        if problem:
            return _within(each.component_id, problem)
    return None


def _ray_field_misfit(
    wanted: RaySpec | NodeSpec, offered: RaySpec | NodeSpec, default: RaySpec | NodeSpec, ignored: set[str], nodes: int
) -> str | None:
    for each in fields(wanted):
        name, value, has = each.name, getattr(wanted, each.name), getattr(offered, each.name)
        if name in ignored or value == getattr(default, name) or _ray_field_fits(name, value, has, offered, nodes):
            continue
        if name == "object_store_memory":
            value, has = (None if size is None else size / 2**30 for size in (value, has))
        return f"RayLauncher.{_LAUNCHER_FIELDS.get(name, name)}={value!r} is not what the session has: {has!r}"
    return None


def _ray_field_fits(name: str, value: Any, has: Any, offered: RaySpec | NodeSpec, nodes: int) -> bool:
    if name in ("num_cpus", "num_gpus"):
        return has is None or value <= has  # None is all that Slurm granted, which only the session knows.
    if name == "object_store_memory":
        return has is not None and value <= has
    if name == "resources":
        return all(amount <= has.get(key, 0) for key, amount in value.items())
    if name == "labels":
        return all(has.get(key) == label for key, label in value.items())
    if name == "min_nodes" and isinstance(offered, RaySpec):
        return bool(value <= (has or nodes_expected(offered, nodes)))
    return bool(value == has)


def _allocation_misfits(required: Requirements, queues: Mapping[str | None, QueueFields]) -> Iterator[str | None]:
    if not queues:
        return
    head = next(iter(queues))
    # The payload's own process runs where the session has its head, whichever component the payload would choose.
    own = tuple(want for each in required.components for want in each.payload_wants)
    yield _within(head, _footprint_misfit(own if required.components else required.footprint, queues[head]))
    for each in required.components:
        has = queues[each.component_id]
        yield _within(each.component_id, _footprint_misfit(each.launcher.footprint(), has))
        yield _within(each.component_id, _queue_misfit(each.queue, has, required.time_limited))
    if not required.components:
        yield _queue_misfit(required.queue, queues[head], required.time_limited)


def _footprint_misfit(footprint: Footprint, queue: QueueFields) -> str | None:
    # An exclusive node grants all its CPUs, so mem_per_cpu does not tell its memory.
    cpus = None if queue["exclusive"] else queue["cpus_per_node"]
    memory = gibibytes_for_ray(queue["mem"], queue["mem_per_cpu"], cpus)
    granted = {"CPUs": queue["cpus_per_node"], "GPUs": granted_gpus(queue), "GiB": memory}
    for want in footprint:
        has = granted[want.unit]
        if want.amount is not None and has is not None and want.amount > has:
            return f"{want.field}={want.amount:g} is more than the session was given on each node: {has:g} {want.unit}"
    return None


def _queue_misfit(wanted: SlurmQueueConfig, has: QueueFields, time_limited: bool) -> str | None:
    for declared in SBATCH_FIELDS:
        name = declared.name
        value = getattr(wanted, name)
        default = SlurmQueueConfig.model_fields[name].default
        if declared.granted is None or value == default or (name == "time_limit" and not time_limited):
            continue
        if not declared.granted(value, has[name], has):
            return f"SlurmQueueConfig.{name}={value!r} is not what the session has: {has[name]!r}"
    return None
