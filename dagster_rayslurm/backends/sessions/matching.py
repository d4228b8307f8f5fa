"""Matches payloads with sessions: compares a payload's requirements with a session's capacity, and names the session to use.

A launcher or queue field at its default requires nothing. If the request for a session's job left an amount, such as the number
of CPUs, to Slurm, only the running session knows the granted amount. Then the session itself refuses a payload that does not fit.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from pydantic import BaseModel

from ...components import Component, request_for
from ...config import SessionConfig, time_limit_seconds
from ...launchers import Launcher, RayLauncher
from ...runtime.node.resources import Footprint
from ...runtime.protocol.spec import NodeSpec, PayloadSpec, RaySpec, from_fields
from ...runtime.ray.membership import nodes_expected
from ...slurm.config import HetComponent, SlurmQueueConfig
from ...slurm.request import SBATCH_FIELDS, JobRequest, gibibytes_for_ray, granted_gpus, make_request

# The fields of a `SlurmQueueConfig` as JSON, with the CPUs and GPUs that were requested of Slurm.
QueueFields = Mapping[str, Any]

# The field of `RayLauncher` for each field of `RaySpec` or `NodeSpec` that has another name.
_LAUNCHER_FIELDS = {
    "num_cpus": "num_cpus_per_node",
    "num_gpus": "num_gpus_per_node",
    "object_store_memory": "object_store_memory_gb",
    "node_ip_address": "head_node_address",
}
# Tests of a session's value against the wanted value, by field of `RaySpec` or `NodeSpec`; all other fields must be equal.
_RAY_FITS: Mapping[str, Callable[[Any, Any], bool]] = {
    "num_cpus": lambda wanted, has: has is None or wanted <= has,  # None is all that Slurm granted, which the session knows.
    "num_gpus": lambda wanted, has: has is None or wanted <= has,
    "object_store_memory": lambda wanted, has: has is not None and wanted <= has,
    "resources": lambda wanted, has: all(amount <= has.get(name, 0) for name, amount in wanted.items()),
    "labels": lambda wanted, has: wanted.items() <= has.items(),
    "min_nodes": lambda wanted, has: wanted <= has,
}


@dataclass(frozen=True)
class Requirements:
    """The Ray cluster and the allocation that a payload needs from a session, or with which a session is created."""

    ray: RaySpec | None
    footprint: Footprint  # The CPUs, GPUs and memory that the launcher requires of each node.
    queue: SlurmQueueConfig = field(default_factory=SlurmQueueConfig)  # Slurm settings of the job, or of its first component.
    components: tuple[Component, ...] = ()  # In the job's order; empty if all nodes are alike.
    time_limited: bool = False  # Whether the time limit in `queue` is the payload's own, and not the session's.
    head: str | None = None  # The component in which the payload must run; None for the one that has the session's Ray head.

    @property
    def parts(self) -> list[tuple[str | None, SlurmQueueConfig, Footprint]]:
        """For each component of the session's job, a tuple of its name, its queue and the resources that each of its nodes needs.

        If all nodes are alike, the list has a single tuple, whose name is None.
        """
        own = [(each.component_id, each.queue, each.launcher.footprint()) for each in self.components]
        return [*own] or [(None, self.queue, self.footprint)]

    def with_time_limit(self, time_limit: str) -> Requirements:
        """Returns a copy of the requirements with `time_limit`, such as "01:00:00", in all components."""
        components = tuple(replace(each, queue=each.queue.having(time_limit=time_limit)) for each in self.components)
        return replace(self, queue=self.queue.having(time_limit=time_limit), components=components)

    def job_request(self, name: str = "rayslurm", comment: str = "") -> JobRequest:
        """Returns the request for a session's Slurm job with the job name `name` and the comment `comment`.

        The request never allows a requeue. Raises ValueError if the settings of queue and launcher contradict each other.
        """
        if self.components:
            request = request_for(self.components, job_name=name, comment=comment)
        else:
            request = make_request(self.queue, self.footprint, job_name=name, comment=comment)
        # After a requeue, the session would not know which requests it had accepted before.
        first, *others = (replace(part, queue=part.queue.having(requeue=False)) for part in request.components)
        return replace(first, further_components=tuple(others))

    def capacity(self, reuse: bool) -> Capacity:
        """Returns the capacity of a session created with these requirements.

        `reuse` says whether the session's Ray cluster stays warm. Raises ValueError if queue and launcher contradict each other.
        """
        queues = {part.component_id: part.queue.model_dump(mode="json") for part in self.job_request().components}
        return Capacity(self.ray if reuse else None, reuse, queues)


@dataclass(frozen=True)
class Capacity:
    """The Ray cluster and the allocation that a session offers to payloads."""

    ray: RaySpec | None  # The warm Ray cluster; None if the session has none.
    reuse: bool  # Whether all payloads share the warm Ray cluster; otherwise each gets its own on the session's nodes.
    # Queue fields of each component, by its name, the head's first; the name is None if all nodes are alike. Empty without Slurm.
    queues: Mapping[str | None, QueueFields] = field(default_factory=dict)

    @property
    def components(self) -> list[str]:
        """The names of the components, beginning with the component of the Ray head; empty if all nodes are alike."""
        if self.queues:
            return [name for name in self.queues if name is not None]
        return [each.component_id for each in self.ray.components] if self.ray is not None else []

    def placed(self, request: JobRequest) -> Capacity:
        """Returns the capacity with the partitions of `request`, the job request that was submitted, in place of "auto"."""
        partitions = {part.component_id: part.queue.partition for part in request.components}
        return replace(self, queues={name: {**queue, "partition": partitions[name]} for name, queue in self.queues.items()})

    def to_json(self) -> dict[str, Any]:
        """Returns the capacity as a dictionary for a session's manifest. `capacity_from_json` reads the dictionary."""
        return {"ray": self.ray and asdict(self.ray), "reuse": self.reuse, "queues": list(self.queues.items())}


def capacity_from_json(data: Mapping[str, Any]) -> Capacity:
    """Returns the capacity from a result of `Capacity.to_json`; raises ValueError, KeyError or TypeError if `data` is damaged."""
    ray = None if data["ray"] is None else from_fields(RaySpec, data["ray"])
    granted = {name: SlurmQueueConfig(**queue).model_dump(mode="json") for name, queue in data["queues"]}
    return Capacity(ray, data["reuse"] is True, granted)


@dataclass(frozen=True)
class Target:
    """A session that a payload may use: the name of its directory, and the settings with which the session is created."""

    key: str
    created_with: Requirements


@dataclass(frozen=True)
class Choice:
    """The decision which session a payload looks for, and what happens if the payload does not fit."""

    required: Requirements
    problem: str | None  # Why the payload does not fit the shared session, as a sentence; None if it fits.
    target: Target  # The session to look for first: the shared session, or `own` if there is a `problem`.
    own: Target  # The separate session, created for payloads that do not fit.
    strict: bool  # Whether a payload that does not fit is refused, instead of getting a separate session.

    def text(self) -> str:
        """Returns a text that describes the session to look for first, and the requirements.

        A retry of a step may continue the step's payload only if the texts of both attempts are equal.
        """
        return _as_text([self.target.key, self.required])


def session_key(config: SessionConfig, run_id: str, what: Mapping[str, Any], created_with: Requirements, apart: bool) -> str:
    """Returns the name of a session's directory: the configured name or "default", and a hash. Equal names mean a shared session.

    The hash always covers `what`. If the session has no configured name, or `apart` is True, the hash also covers `created_with`
    and the fields of `config` that the session's runtime gets.

    Args:
        config: The configuration of the session.
        run_id: The id of the Dagster run. If the session is for this Dagster run alone, the name ends with a hash of the id.
        what: Settings by name, such as the environment. If these settings differ, the sessions are always separate.
        created_with: The settings with which the session is created.
        apart: Whether the session is a separate one, for a payload that does not fit the shared session.
    """
    told_apart: list[Any] = [what]
    if config.name is None or apart:
        # The timeout for the start of a Ray cluster is no property of the cluster.
        ray = None if created_with.ray is None else replace(created_with.ray, startup_timeout=0.0)
        told_apart += [replace(created_with, ray=ray, time_limited=False, head=None)]
        told_apart.append(config.for_runtime())
    key = f"{config.name or 'default'}-{_digest(_as_text(told_apart))}"
    return key + run_suffix(run_id) if config.scope == "run" else key


def run_suffix(run_id: str) -> str:
    """Returns the suffix of the directory names of those sessions that serve only the Dagster run `run_id`."""
    return f"-{_digest(run_id)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _as_text(value: Any) -> str:
    """Returns JSON text of a value that contains dataclasses and configuration objects. Equal values have equal texts."""

    def plain(each: Any) -> Any:
        return each.model_dump(mode="json") if isinstance(each, BaseModel) else vars(each)

    return json.dumps(value, sort_keys=True, default=plain)


def required_head(launcher: Launcher, own_components: Sequence[HetComponent] | None) -> str | None:
    """Returns the name of the component in which a payload must run; None if it may run in the head component of any session.

    The component is the one that `launcher` names, or else the head among `own_components`. `own_components` are the components
    that the run configures; None if the run configures none.
    """
    if isinstance(launcher, RayLauncher) and launcher.component_id is not None:
        return launcher.component_id
    return next((each.component_id for each in own_components or () if each.head), None)


def misfit(required: Requirements, capacity: Capacity) -> str | None:
    """Returns a sentence about the first requirement that a session does not meet; None if the payload fits.

    The sentence names the field of the requirement.
    """
    return next(filter(None, _misfits(required, capacity)), None)


def misfit_error(problem: str) -> str:
    """Returns the error message for a payload that does not fit the session: `problem`, a sentence, and remedies for the user."""
    return f'{problem}; use what the session has, another session name, or SessionConfig(on_misfit="new-session")'


def adapted(payload: PayloadSpec, ray: RaySpec | None, required: Requirements, capacity: Capacity) -> PayloadSpec:
    """Returns a copy of `payload` with the fields that a session with the capacity `capacity` reads.

    - `ray`: the payload's own Ray cluster, from the parameter `ray`; None if all payloads share the session's Ray cluster.
    - `want_cpus` and `want_gpus`: what is reserved for the payload on each node, from `required`. Nothing is reserved if the
      payload takes the session's Ray cluster as it is, or needs a Ray cluster with components.
    - `time_limit`: the payload's own time limit, in seconds; None if it has none, or if the session's limit is not longer.
    """
    if not capacity.reuse and ray is not None and None not in capacity.queues:
        # Its own cluster on the session's nodes includes components that the payload does not name.
        named = {each.component_id: each for each in ray.components}
        ray = replace(ray, components=[named.get(name, NodeSpec(name)) for name in capacity.components])
    claims: dict[str, int] = {}
    # Ray itself divides the session's Ray cluster among payloads that take it as it is. Nodes that differ by component have no
    # common amount to reserve on each node.
    if required.ray is None or not (required.ray == capacity.ray or required.components or required.ray.components):
        for want in required.footprint:
            if want.amount is not None:
                claims[want.unit] = max(int(want.amount), claims.get(want.unit, 0))
    limit, head_queue = None, next(iter(capacity.queues.values()), None)
    if head_queue is not None and required.time_limited:
        own, whole = (time_limit_seconds(text) for text in (required.queue.time_limit, head_queue["time_limit"]))
        limit = own if own is not None and (whole is None or own < whole) else None
    ray = None if capacity.reuse else ray
    return replace(payload, ray=ray, want_cpus=claims.get("CPUs"), want_gpus=claims.get("GPUs"), time_limit=limit)


def _misfits(required: Requirements, capacity: Capacity) -> Iterator[str | None]:
    """Compares requirements and capacity; yields a sentence for each requirement that is not met, and None for the rest."""
    queues, there = capacity.queues, [name for name in capacity.queues if name is not None]
    wanted = [each.component_id for each in required.components]
    if wanted and not there:
        yield f"components: the session has none, and the payload asks for {_quoted(wanted)}"
    if there and not wanted:
        yield f"components: the session has {_quoted(there)}, and the payload asks for nodes that are all alike"
    for name in wanted:
        if name not in there:
            yield f"components: the session has no {name!r}; it has {_quoted(there)}"
    head = next(iter(capacity.components), None)
    if None not in (required.head, head) and required.head != head:
        yield (
            f"RayLauncher.component_id={required.head!r} is not what the session has: its head, where payloads run, is in "
            f"component {head!r}"
        )
    if required.ray is not None:
        yield from _ray_misfits(required.ray, capacity)
    if not queues:
        return
    # The payload's own process runs where the session has its head, whichever component the payload would choose.
    own = tuple(want for each in required.components for want in each.payload_wants)
    yield _within(head, _footprint_misfit(own, next(iter(queues.values()))))
    for component_id, queue, footprint in required.parts:
        has = queues[component_id]
        yield _within(component_id, _footprint_misfit(footprint, has) or _queue_misfit(queue, has, required.time_limited))


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def _within(component_id: str | None, problem: str | None) -> str | None:
    return f"component {component_id!r}: {problem}" if problem and component_id is not None else problem


def _ray_misfits(wanted: RaySpec, capacity: Capacity) -> Iterator[str | None]:
    nodes = sum(int(queue["num_nodes"]) for queue in capacity.queues.values()) or len(capacity.components) or 1
    if not capacity.reuse:  # The payload gets a cluster of its own on all nodes.
        if (wanted.min_nodes or 0) > nodes:
            yield f"RayLauncher.min_nodes={wanted.min_nodes} is more than the session's {nodes} nodes"
        return
    offered = capacity.ray
    if offered is None:
        yield "the session has no Ray cluster: its default_launcher is no RayLauncher"
        return
    # Settings of nodes were merged into `components`, so they are compared there. `startup_timeout` is the payload's own.
    elsewhere = {"components", "startup_timeout"} | ({each.name for each in fields(NodeSpec)} if wanted.components else set())
    expected = replace(offered, min_nodes=offered.min_nodes or nodes_expected(offered, nodes))
    yield _ray_field_misfit(wanted, expected, RaySpec(), elsewhere)
    there = {each.component_id: each for each in offered.components}
    if there and not wanted.components:
        yield f"components: the session's cluster has {_quoted(there)}, and the payload asks for none"
    for each in wanted.components:
        if each.component_id not in there:
            yield f"components: the session's cluster has no {each.component_id!r}"
        default = NodeSpec(each.component_id)
        yield _within(each.component_id, _ray_field_misfit(each, there[each.component_id], default, set()))


def _ray_field_misfit(wanted: Any, offered: Any, default: Any, ignored: set[str]) -> str | None:
    for each in fields(wanted):
        name, value, has = each.name, getattr(wanted, each.name), getattr(offered, each.name)
        fits = _RAY_FITS.get(name, lambda one, other: bool(one == other))
        if name in ignored or value == getattr(default, name) or fits(value, has):
            continue
        if name == "object_store_memory":
            value, has = (None if size is None else size / 2**30 for size in (value, has))
        return f"RayLauncher.{_LAUNCHER_FIELDS.get(name, name)}={value!r} is not what the session has: {has!r}"
    return None


def _footprint_misfit(footprint: Footprint, queue: QueueFields) -> str | None:
    granted = {"CPUs": queue["cpus_per_node"], "GPUs": granted_gpus(queue), "GiB": gibibytes_for_ray(queue)}
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
        granted = granted_gpus(has) if name == "gpus_per_node" else has[name]
        if not declared.granted(value, granted):
            return f"SlurmQueueConfig.{name}={value!r} is not what the session has: {has[name]!r}"
    return None
