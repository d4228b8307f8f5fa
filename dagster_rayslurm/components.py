"""Components of a heterogeneous allocation: which of them comes first, and what they agree on. Pure.

The component of the Ray head comes first in the job: its first node then is the one where Slurm runs the batch script,
its job id is the one that users know the job by, and nothing has to look for the head.

What sbatch makes of options that only some components have was tried on Slurm 22.05 and 24.11.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .launchers import BashLauncher, Launcher, RayLauncher
from .runtime.components import LABEL, RESOURCE
from .runtime.spec import ComponentSpec, NodeSpec, RaySpec
from .slurm.config import SlurmQueueConfig
from .slurm.hetjob import HetComponent
from .slurm.request import JobRequest, make_request

_MOST = 128
"""Components of one job (MAX_HET_JOB_COMPS in Slurm's source)."""
_SHARED = ("time_limit", "requeue", "signal_before_timeout")
"""Fields of a queue that are the whole job's: its components begin and end together."""
_OF_NODES = (
    "num_cpus_per_node",
    "num_gpus_per_node",
    "object_store_memory_gb",
    "resources",
    "labels",
    "network_interface",
    "health_check",
)
"""Fields of a launcher that say something of each node; the others are the cluster's, or the payload's."""


@dataclass(frozen=True)
class Component:
    """One component of an allocation.

    Attributes:
        component_id: its name.
        queue: what it is asked for.
        launcher: what runs on its nodes.
    """

    component_id: str
    queue: SlurmQueueConfig
    launcher: Launcher


def arrange(components: Sequence[HetComponent], payload_in: str | None = None) -> tuple[Component, ...]:
    """The components in the order that the job has them, each with the job's own limit and signal.

    Args:
        components: every `EnvVar` resolved.
        payload_in: the component that the payload asks to run in, and the head with it; None for that marked `head`, or the
            first.

    Raises:
        ValueError: they contradict each other; the sentence names the component and the field.
    """
    names = [each.component_id for each in components]
    if not names:
        raise ValueError("components: there is none; declare at least one HetComponent")
    if len(names) > _MOST:
        raise ValueError(f"components: Slurm takes at most {_MOST} components in a job, and these are {len(names)}")
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"components: two are called {name!r}; give each a component_id of its own")
    heads = [each.component_id for each in components if each.head]
    if len(heads) > 1:
        raise ValueError(f"components: {' and '.join(map(repr, heads))} are both marked head; a cluster has one head")
    if payload_in is not None and payload_in not in names:
        raise ValueError(f"launcher.component_id: there is no component {payload_in!r}; there are {', '.join(map(repr, names))}")
    first = payload_in or (heads[0] if heads else names[0])
    ordered = sorted(components, key=lambda each: each.component_id != first)
    queues = _share([each.queue for each in ordered], [each.component_id for each in ordered])
    for each in ordered:
        own = each.launcher.component_id if isinstance(each.launcher, RayLauncher) else None
        if own not in (None, each.component_id):
            raise ValueError(f"components: the launcher of {each.component_id!r} has component_id={own!r}; leave it out")
    _check_inheritance([(each.component_id, queue) for each, queue in zip(ordered, queues, strict=True)])
    return tuple(Component(each.component_id, queue, each.launcher) for each, queue in zip(ordered, queues, strict=True))


def _share(queues: list[SlurmQueueConfig], names: list[str]) -> list[SlurmQueueConfig]:
    """The queues, with what is the whole job's said by all of them if one says it."""
    common = {}
    for field in _SHARED:
        default = SlurmQueueConfig.model_fields[field].default
        said = {
            name: getattr(queue, field) for name, queue in zip(names, queues, strict=True) if getattr(queue, field) != default
        }
        if len(set(said.values())) > 1:
            each = ", ".join(f"{value!r} in {name!r}" for name, value in said.items())
            raise ValueError(
                f"components: SlurmQueueConfig.{field} is {each}; a heterogeneous job begins and ends as one, so say one"
            )
        common[field] = next(iter(said.values()), default)
    return [SlurmQueueConfig(**{**queue.model_dump(), **common}) for queue in queues]


def _check_inheritance(queues: Sequence[tuple[str, SlurmQueueConfig]]) -> None:
    """Refuse what sbatch would hand on from one component to the next, or mix up: `--mem` stands for those that come after."""
    before: tuple[str, str] | None = None
    for name, queue in queues:
        if before is not None and queue.mem is None:
            whose, mem = before
            if queue.mem_per_cpu is not None:
                raise ValueError(
                    f"components: {name!r} has mem_per_cpu and {whose!r} before it has mem={mem!r}, which sbatch takes for both; "
                    "use mem in all components"
                )
            raise ValueError(
                f"components: {name!r} says no SlurmQueueConfig.mem, so sbatch would give it mem={mem!r} of {whose!r}; set mem "
                "in every component"
            )
        if queue.mem is not None:
            before = name, queue.mem


def ray_across(launcher: Launcher, components: Sequence[Component]) -> RaySpec | None:
    """The cluster that spans the components, or None for a payload without one.

    Args:
        launcher: the payload's; it says all that is the whole cluster's, and what components leave at its default.
        components: in the job's order.

    Raises:
        ValueError: a component asks for what is not its own to say.
    """
    spec = launcher.ray_spec()
    if spec is None:
        return None
    nodes = [_nodes(launcher, each) for each in components]
    return replace(spec, components=nodes)


def _nodes(launcher: Launcher, component: Component) -> NodeSpec:
    """What the nodes of a component are to Ray."""
    name, own = component.component_id, component.launcher
    if isinstance(own, BashLauncher) or not isinstance(own, RayLauncher):
        raise ValueError(
            f"components: the launcher of {name!r} has no Ray, and one cluster spans all components; give it a RayLauncher, or "
            'use topology="separate"'
        )
    said = {field for field in RayLauncher.model_fields if getattr(own, field) != RayLauncher.model_fields[field].default}
    for field in sorted(said - {*_OF_NODES, "component_id"}):
        if getattr(own, field) != getattr(launcher, field, None):
            raise ValueError(
                f"components: {field} in the launcher of {name!r} is for the whole cluster or the payload; set it in "
                "default_launcher or run(launcher=…)"
            )
    both = (
        own
        if not isinstance(launcher, RayLauncher)
        else RayLauncher(**{field: getattr(own if field in said else launcher, field) for field in _OF_NODES})
    )
    if LABEL in both.labels:
        raise ValueError(
            f"components: the launcher of {name!r} has a label {LABEL!r}, which names the component; call it otherwise"
        )
    if any(resource.startswith(RESOURCE) for resource in both.resources):
        raise ValueError(f"components: the launcher of {name!r} has a resource that begins with {RESOURCE!r}; call it otherwise")
    ray = both.ray_spec()
    return NodeSpec(
        component_id=name,
        num_cpus=ray.num_cpus,
        num_gpus=ray.num_gpus,
        object_store_memory=ray.object_store_memory,
        resources=ray.resources,
        labels=ray.labels,
        network_interface=ray.network_interface,
        health_check=ray.health_check,
    )


def request_for(components: Sequence[Component], *, job_name: str, comment: str) -> JobRequest:
    """What to ask Slurm for: one job of all components.

    Raises:
        ValueError: a component contradicts itself, or grants less than its launcher wants; the sentence names both.
    """
    requests = []
    for each in components:
        try:
            request = make_request(each.queue, each.launcher.footprint(), job_name=job_name, comment=comment)
        except ValueError as error:
            raise ValueError(f"component {each.component_id!r}: {error}") from None
        requests.append(replace(request, component_id=each.component_id))
    first, *others = requests
    return replace(first, others=tuple(others))


def component_specs(request: JobRequest) -> list[ComponentSpec]:
    """What the runtime is told of a job's components; nothing of a job that has none."""
    return [
        ComponentSpec(part.component_id, part.num_nodes, part.cpus_per_node, part.gpus_per_node)
        for part in request.parts
        if part.component_id is not None
    ]
