"""Checks, before a payload starts, whether its Ray cluster can hold the resources in the argument `requires` of `run()`.

A bundle has the resources that one task, one actor or one part of a placement group needs on a single node.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .runtime.node.resources import NodeResources, usable_memory
from .runtime.protocol.spec import RaySpec, node_spec
from .runtime.ray.feasibility import Bundle, Node, can_hold, check_strategy, fits, lacking, read_bundle
from .slurm.request import JobRequest, gibibytes_for_ray, granted_gpus

# Resources and labels that Ray finds by itself on a node (Ray 2.60), so that only the node knows which of them exist.
_FOUND_BY_RAY = r"(node:|accelerator_type:|ray\.io/)|(HPU|NPU|RBLN|TPU|neuron_cores)$"
_RAISE = {
    "CPU": "raise SlurmQueueConfig.cpus_per_node or RayLauncher.num_cpus_per_node",
    "GPU": "raise SlurmQueueConfig.gpus_per_node or RayLauncher.num_gpus_per_node",
    "memory": "raise SlurmQueueConfig.mem",
    "object_store_memory": "raise RayLauncher.object_store_memory_gb",
}
_MOST = 4  # Most bundles that a message shows.


@dataclass(frozen=True)
class AskedNodes:
    """Equal nodes of a Ray cluster: the number of nodes, and the resources that launcher and queue request for each node.

    `title` is the name of the nodes in error messages.
    """

    title: str
    count: int
    node: Node


def check_requires(requires: Any, nodes: Sequence[AskedNodes]) -> None:
    """Raise `ValueError` if the nodes could not hold the required bundles at the same time, even if nothing else ran there.

    Args:
        requires: a list of bundles, such as `[{"GPU": 1}, {"GPU": 1}]`; or a mapping from placement strategies, such as
            "STRICT_SPREAD", to such lists. `ValueError` is also raised if `requires` has another form.
        nodes: the nodes of the Ray cluster, with the resources that were requested for each node.
    """
    if not isinstance(requires, Mapping):
        requires = {"PACK": requires}
    for strategy, group in requires.items():
        check_strategy(strategy)
        if isinstance(group, (str, Mapping)) or not isinstance(group, Sequence):
            raise ValueError(f'requires: {group!r} is no list of bundles; write one such as [{{"CPU": 4, "GPU": 1}}] * 8')
        bundles = [read_bundle(each, f"requires[{place}]") for place, each in enumerate(group)]
        for place, bundle in enumerate(bundles):
            if not any(fits(bundle, each.node) for each in nodes):
                raise ValueError(f"requires[{place}]: {_bundle_in_words(bundle)} fits on no node: {_why(bundle, nodes)}")
        if not can_hold(bundles, strategy, [each.node for each in nodes for _ in range(each.count)]):
            shown = ", ".join(map(_bundle_in_words, bundles[:_MOST])) + ", …" * (len(bundles) > _MOST)
            names = sorted({name for bundle in bundles for name in bundle.resources})
            there = "; ".join(f"{each.title}: {_amounts(each.node, names)}" for each in nodes)
            raise ValueError(
                f"requires: {len(bundles)} bundles ({strategy}), {shown}, do not fit at once ({there}); ask for more or larger "
                "nodes, or require less"
            )


def nodes_of_job(ray: RaySpec, request: JobRequest) -> list[AskedNodes]:
    """Returns the nodes of a Ray cluster in a Slurm job, with the resources of each node.

    `ray` has the settings of the Ray cluster, and `request` is the request for the job. An amount that Slurm will choose is
    infinite in the result.
    """
    nodes = []
    for part in request.components:
        queue = part.queue
        count = queue.num_nodes if ray.max_workers is None else min(queue.num_nodes, 1 + ray.max_workers)
        cpus = math.inf if queue.exclusive or queue.cpus_per_node is None else queue.cpus_per_node
        granted = None if queue.exclusive else granted_gpus(queue.model_dump())
        gpus = math.inf if granted is None else granted
        memory = gibibytes_for_ray(queue.model_dump())
        nodes.append(_asked(ray, part.component_id, count, cpus, gpus, math.inf if memory is None else memory * 2**30))
    return nodes


def nodes_of_machine(ray: RaySpec, machine: NodeResources) -> list[AskedNodes]:
    """Returns the nodes of a Ray cluster in local mode, with the resources of each node: one node, or one for each component.

    `ray` has the settings of the Ray cluster, and `machine` the resources of this machine.
    """
    names: list[str | None] = [each.component_id for each in ray.components] or [None]
    return [_asked(ray, name, 1, machine.num_cpus, machine.num_gpus, usable_memory(machine)) for name in names]


def _asked(ray: RaySpec, component_id: str | None, count: int, cpus: float, gpus: float, memory: float) -> AskedNodes:
    """Returns an `AskedNodes` for the `count` equal nodes of a component. Without components, `component_id` is None.

    `cpus`, `gpus` and `memory` (in bytes) are the amounts that each node has. If `ray` sets a number of CPUs or GPUs for the
    node, this number replaces `cpus` or `gpus`. The memory that `ray` sets for the object store is subtracted from `memory`.
    """
    spec = node_spec(ray, component_id)
    resources = {
        "CPU": cpus if spec.num_cpus is None else spec.num_cpus,
        "GPU": gpus if spec.num_gpus is None else spec.num_gpus,
        "memory": memory - (spec.object_store_memory or 0),
        "object_store_memory": math.inf if spec.object_store_memory is None else spec.object_store_memory,
        **spec.resources,
    }
    own_labels = any(argument.startswith("--labels") for argument in ray.ray_args)
    title = "the node" if count == 1 else f"each of the {count} nodes"
    title += "" if component_id is None else f" of component {component_id!r}"
    return AskedNodes(title, count, Node(resources, spec.labels, ".*" if own_labels else _FOUND_BY_RAY))


def _why(bundle: Bundle, nodes: Sequence[AskedNodes]) -> str:
    """Returns, for an error message, the reason why no node can hold `bundle`: what each node has, and which field to change."""
    short = [name for name in bundle.resources if all(name in lacking(bundle, each.node) for each in nodes)]
    names = short or sorted(bundle.resources)
    labels = sorted({rule.key for rules in bundle.selectors for rule in rules})
    has = []
    for each in nodes:
        own = [f"label {key} = {each.node.labels[key]}" if key in each.node.labels else f"no label {key}" for key in labels]
        has.append(f"{each.title} has {', '.join([_amounts(each.node, names), *own] if names else own)}")
    hint = (
        _RAISE.get(short[0], "raise RayLauncher.resources") if short else "see RayLauncher.labels" if labels else "ask for more"
    )
    return f"{'; '.join(has)}; {hint}, or require less"


def _bundle_in_words(bundle: Bundle) -> str:
    words = [f"{name}: {amount:g}" for name, amount in bundle.resources.items()]
    for rules in bundle.selectors:
        words += [f"label {key} {'=' if wanted else '!='} {' or '.join(values)}" for key, wanted, values in rules]
    return f"{{{', '.join(words)}}}"


def _amounts(node: Node, names: Sequence[str]) -> str:
    known = ((name, node.resources.get(name, 0)) for name in names)
    return ", ".join(f"{name} {'as Slurm grants' if amount == math.inf else f'{amount:g}'}" for name, amount in known)
