"""Components of a heterogeneous Slurm job: the order of components, the request to Slurm, and the Ray cluster across components.

The component of the Ray head comes first, because Slurm runs the batch script on the first node of the first component, and the
job id of the first component names the whole job. The functions have no side effects, and raise `ValueError` if components
contradict each other. What sbatch passes on to later components was tested with Slurm 22.05 and 24.11.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from .launchers import Launcher, RayLauncher
from .runtime.node.resources import Footprint
from .runtime.protocol.spec import COMPONENT_LABEL, COMPONENT_RESOURCE, ComponentSpec, NodeSpec, RaySpec
from .slurm.config import HetComponent, SlurmQueueConfig
from .slurm.request import INHERITED_OPTIONS, SBATCH_FIELDS, Inheritance, JobRequest, make_request

# Queue fields with one value for the whole job, and for each field a function that returns the same for all spellings of a value.
_WHOLE_JOB = {field.name: field.meaning for field in SBATCH_FIELDS if field.inheritance is Inheritance.WHOLE_JOB}
# Queue fields whose value sbatch takes from an earlier component if a component does not set the field.
_INHERITED = tuple(field.name for field in SBATCH_FIELDS if field.inheritance is Inheritance.INHERITED)
_MAX_COMPONENTS = 128  # Maximum number of components in one job (MAX_HET_JOB_COMPS in Slurm's source).
# Fields of `RayLauncher` that a component may set for its own nodes; all other fields are for the cluster or the payload.
_NODE_FIELDS = (
    *("num_cpus_per_node", "num_gpus_per_node", "object_store_memory_gb", "resources", "labels"),
    *("network_interface", "health_check"),
)


@dataclass(frozen=True)
class Component:
    """One component of a heterogeneous Slurm job, with the component's queue and launcher."""

    component_id: str
    queue: SlurmQueueConfig
    launcher: Launcher
    # CPUs, GPUs and memory that the payload requires on each node, besides what `launcher` requires; () for nothing more.
    payload_wants: Footprint = ()


def arrange(components: Sequence[HetComponent], payload_in: str | None = None) -> tuple[Component, ...]:
    """Returns the components in the order of the Slurm job; the component with the payload and the Ray head comes first.

    The first component of the result is the component with the name `payload_in`. If `payload_in` is None, it is the component
    marked `head`. If no component is marked, it is the first of `components`. In the result, all components have the same
    `time_limit`, `requeue` and `signal_before_timeout`. Raises `ValueError` if there is no component, or if components contradict
    each other.
    """
    names = [each.component_id for each in components]
    if not names:
        raise ValueError("components: there is none; declare at least one HetComponent")
    if len(names) > _MAX_COMPONENTS:
        raise ValueError(f"components: Slurm takes at most {_MAX_COMPONENTS} components in a job, and these are {len(names)}")
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"components: two are called {twice[0]!r}; give each a component_id of its own")
    heads = [each.component_id for each in components if each.head]
    if len(heads) > 1:
        raise ValueError(f"components: {' and '.join(map(repr, heads))} are both marked head; a cluster has one head")
    if payload_in is not None and payload_in not in names:
        raise ValueError(f"launcher.component_id: there is no component {payload_in!r}; there are {', '.join(map(repr, names))}")
    first = payload_in or (heads or names)[0]
    ordered = sorted(components, key=lambda each: each.component_id != first)
    for each in ordered:
        own = each.launcher.component_id if isinstance(each.launcher, RayLauncher) else None
        if own not in (None, each.component_id):
            raise ValueError(f"components: the launcher of {each.component_id!r} has component_id={own!r}; leave it out")
    common = _values_of_whole_job(ordered)
    queues = [each.queue.having(**common) for each in ordered]
    arranged = tuple(Component(each.component_id, queue, each.launcher) for each, queue in zip(ordered, queues, strict=True))
    _check_inheritance(arranged)
    return arranged


def _values_of_whole_job(components: Sequence[HetComponent]) -> dict[str, Any]:
    """Returns the values of the queue fields that have one value for the whole job, such as `time_limit`, by field name.

    If a component's queue has a value that differs from the field's default, the result has this value; otherwise, it has the
    default. Raises `ValueError` if two queues have different values that both differ from the default.
    """
    common = {}
    for field, meaning in _WHOLE_JOB.items():
        default = SlurmQueueConfig.model_fields[field].default
        values = {each.component_id: getattr(each.queue, field) for each in components}
        changed = {name: value for name, value in values.items() if meaning(value) != meaning(default)}
        if len(set(map(meaning, changed.values()))) > 1:
            each = ", ".join(f"{value!r} in {name!r}" for name, value in changed.items())
            raise ValueError(
                f"components: SlurmQueueConfig.{field} is {each}; a heterogeneous job begins and ends as one, so say one"
            )
        common[field] = next(iter(changed.values()), default)
    return common


def _check_inheritance(components: Sequence[Component]) -> None:
    """Raise `ValueError` if a component lacks a field or an option that sbatch would take from an earlier component."""
    fields_before: dict[str, tuple[str, Any]] = {}
    options_before: dict[str, tuple[str, str]] = {}
    for each in components:
        name, queue = each.component_id, each.queue
        for field, (other, value) in fields_before.items():
            if getattr(queue, field) is not None:
                continue
            if field == "mem" and queue.mem_per_cpu is not None:
                raise ValueError(
                    f"components: {name!r} has mem_per_cpu and {other!r} before it has mem={value!r}, which sbatch takes for "
                    "both; use mem in all components"
                )
            raise ValueError(
                f"components: {name!r} says no SlurmQueueConfig.{field}, so sbatch would give it {field}={value!r} of "
                f"{other!r}; set {field} in every component"
            )
        own = {option: written for written in queue.extra_sbatch if (option := _inherited_option(written))}
        for option, (other, written) in options_before.items():
            if option not in own:
                raise ValueError(
                    f"components: {name!r} has no --{option} in SlurmQueueConfig.extra_sbatch, so sbatch would give it "
                    f"{written!r} of {other!r}; write --{option} in every component"
                )
        fields_before |= {field: (name, value) for field in _INHERITED if (value := getattr(queue, field)) is not None}
        options_before |= {option: (name, written) for option, written in own.items()}


def _inherited_option(written: str) -> str | None:
    """Returns the full name of an option of sbatch if sbatch passes the option on to later components; otherwise None.

    `written` is the option with its value, such as "--deadline=tomorrow". Like sbatch, the function accepts a shortened name,
    such as "--deadl"; the result is None if a shortened name could stand for several options that sbatch passes on.
    """
    name = written.partition("=")[0].removeprefix("--")
    longer = [option for option in INHERITED_OPTIONS if name and option.startswith(name)]
    return name if name in longer else longer[0] if len(longer) == 1 else None


def merge_launchers(launcher: Launcher, components: Sequence[Component]) -> tuple[Component, ...]:
    """Returns a copy of `components` in which fields that a component's launcher leaves unset have the values of `launcher`.

    `components` are in the job's order. `launcher` is the launcher of the payload, which runs in the first component. If
    `launcher` starts no Ray cluster, the launchers of all components stay unchanged. If `launcher` is not a `RayLauncher`,
    `payload_wants` of the first component has the CPUs, GPUs and memory that `launcher` requires. Raises `ValueError` if a
    component's launcher does not fit one Ray cluster across all components.
    """
    first, *others = components
    if launcher.ray_spec() is None:
        return (replace(first, payload_wants=launcher.footprint()), *others)
    wants = () if isinstance(launcher, RayLauncher) else launcher.footprint()
    settled = [replace(each, launcher=_node_launcher(launcher, each)) for each in components]
    return (replace(settled[0], payload_wants=wants), *settled[1:])


def spanning_components(launcher: Launcher, components: Sequence[HetComponent]) -> tuple[Component, ...]:
    """Returns the components of a job with topology "spanning", in the job's order; () if there are no components.

    One Ray cluster spans all components. `launcher` is the launcher of the payload; fields that the launcher of a component
    leaves unset come from `launcher`.
    """
    if not components:
        return ()
    return merge_launchers(launcher, arrange(components, launcher.component_id if isinstance(launcher, RayLauncher) else None))


def ray_across(launcher: Launcher, components: Sequence[Component]) -> RaySpec | None:
    """Returns the settings of one Ray cluster across all components; None for a payload without Ray.

    `launcher` is the launcher of the payload, and `components` are in the job's order. Without components, returns the settings
    of `launcher`. Raises `ValueError` if `launcher` sets `max_workers`, or requires more nodes than the components have.
    """
    spec = launcher.ray_spec()
    if spec is None or not components:
        return spec
    same = [field.name for field in fields(NodeSpec) if field.name != "component_id"]
    own = {each.component_id: _node_launcher(launcher, each).ray_spec() for each in components}
    nodes = [NodeSpec(name, **{field: getattr(node, field) for field in same}) for name, node in own.items()]
    if spec.max_workers is not None:
        # With fewer workers, the last components would have no node in the Ray cluster, and their tasks would wait forever.
        raise ValueError(
            f"RayLauncher.max_workers={spec.max_workers}: with components, each component's SlurmQueueConfig.num_nodes says how "
            "many nodes join; leave max_workers out"
        )
    expected = sum(each.queue.num_nodes for each in components)
    if spec.min_nodes is not None and spec.min_nodes > expected:
        raise ValueError(
            f"RayLauncher.min_nodes={spec.min_nodes} is more than the cluster will have: {expected} nodes by "
            "SlurmQueueConfig.num_nodes of all components"
        )
    return replace(spec, components=nodes)


def _node_launcher(launcher: Launcher, component: Component) -> RayLauncher:
    """Returns the launcher for the nodes of a component; a field that the component does not set comes from `launcher`.

    `launcher` is the launcher of the payload. Raises `ValueError` if the component's launcher has no Ray, or if it sets a field
    of the whole cluster or of the payload to another value than `launcher` does.
    """
    name, own = component.component_id, component.launcher
    if not isinstance(own, RayLauncher):
        raise ValueError(
            f"components: the launcher of {name!r} has no Ray, and one cluster spans all components; give it a RayLauncher, or "
            'use topology="separate"'
        )
    changed = {field for field in RayLauncher.model_fields if getattr(own, field) != RayLauncher.model_fields[field].default}
    for field in sorted(changed - {*_NODE_FIELDS, "component_id"}):
        if getattr(own, field) != getattr(launcher, field, None):
            raise ValueError(
                f"components: {field} in the launcher of {name!r} is for the whole cluster or the payload; set it in "
                "default_launcher or run(launcher=…)"
            )
    both = own
    if isinstance(launcher, RayLauncher):
        both = RayLauncher(**{field: getattr(own if field in changed else launcher, field) for field in _NODE_FIELDS})
    if COMPONENT_LABEL in both.labels:
        raise ValueError(
            f"components: the launcher of {name!r} has a label {COMPONENT_LABEL!r}, which names the component; call it otherwise"
        )
    if any(resource.startswith(COMPONENT_RESOURCE) for resource in both.resources):
        raise ValueError(
            f"components: the launcher of {name!r} has a resource that begins with {COMPONENT_RESOURCE!r}; call it otherwise"
        )
    return both


def request_for(components: Sequence[Component], *, job_name: str, comment: str) -> JobRequest:
    """Returns the request to Slurm for one heterogeneous job of all components, in the order of `components`.

    The first component must be that of the Ray head, because Slurm runs the batch script on the first node of the first
    component. Raises `ValueError`, which names the component and the field, if the queue of a component is invalid.
    """
    requests = []
    for each in components:
        try:
            wants = each.launcher.footprint() + each.payload_wants
            request = make_request(each.queue, wants, job_name=job_name, comment=comment)
        except ValueError as error:
            raise ValueError(f"component {each.component_id!r}: {error}") from None
        requests.append(replace(request, component_id=each.component_id))
    return replace(requests[0], further_components=tuple(requests[1:]))


def component_specs(request: JobRequest) -> list[ComponentSpec]:
    """Returns descriptions of the components of the job `request`, for the files that a runtime (the program on the nodes) reads.

    The result is [] for a job without components.
    """
    return [
        ComponentSpec(part.component_id, part.queue.num_nodes, part.queue.cpus_per_node, part.queue.gpus_per_node)
        for part in request.components
        if part.component_id is not None
    ]


def on_one_machine(ray: RaySpec, components: Sequence[ComponentSpec], cpus: int) -> RaySpec:
    """Returns a copy of `ray`, the settings of a Ray cluster, for one machine that simulates a node for each component.

    `cpus` is the number of CPUs of the machine. A node gets the CPUs and GPUs that the component's launcher sets. If the launcher
    sets no CPUs, the node gets the CPUs that the component's queue requests, but at most `cpus`; without a request, it gets
    `cpus`. If the launcher sets no GPUs, the node gets the GPUs that the queue requests; without a request, it gets none.
    """
    requests = {each.component_id: each for each in components}
    nodes = []
    for node in ray.components:
        own = requests[node.component_id]
        given_cpus = min(own.asked_cpus or cpus, cpus) if node.num_cpus is None else node.num_cpus
        given_gpus = (own.asked_gpus or 0) if node.num_gpus is None else node.num_gpus
        nodes.append(replace(node, num_cpus=given_cpus, num_gpus=given_gpus))
    return replace(ray, components=nodes)
