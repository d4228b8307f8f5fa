"""What a payload or a Ray cluster requires of each node; importing this module loads the specifications only."""

from __future__ import annotations

from typing import NamedTuple, Optional, Tuple, Union

from ..protocol.spec import NodeSpec, PayloadSpec, RaySpec, RuntimeSpec, node_spec

SHARE_FOR_RAY = 0.9
"""Share of a node's memory that Ray may use, its object store included; the runtime and Ray's daemons use the rest."""


class Requirement(NamedTuple):
    """An amount that a configuration field requires of a node, in CPUs, GPUs or GiB; None if the field is unset."""

    field: str
    amount: Optional[float]
    unit: str


Footprint = Tuple[Requirement, ...]
"""What a payload or a cluster requires of each node."""


def node_footprint(spec: Union[RaySpec, NodeSpec]) -> Footprint:
    """Requirements of a Ray cluster for each node, or for each node of a component."""
    store = spec.object_store_memory
    return (
        Requirement("RayLauncher.num_cpus_per_node", spec.num_cpus, "CPUs"),
        Requirement("RayLauncher.num_gpus_per_node", spec.num_gpus, "GPUs"),
        Requirement("RayLauncher.object_store_memory_gb", None if store is None else store / 2**30, "GiB"),
    )


def payload_footprint(spec: PayloadSpec) -> Footprint:
    """Requirements of a payload that shares its nodes: what it claims, and what a cluster of its own must have."""
    own = node_footprint(spec.ray) if spec.ray is not None else ()
    units = {requirement.unit for requirement in own if requirement.amount is not None}
    claims = (Requirement("num_cpus", spec.want_cpus, "CPUs"), Requirement("num_gpus", spec.want_gpus, "GPUs"))
    return own + tuple(claim for claim in claims if claim.unit not in units)


def runtime_footprint(spec: RuntimeSpec, component_id: Optional[str] = None) -> Footprint:
    """Requirements of a runtime, or of one of its components: what Slurm was asked for, and what the cluster must have."""
    own = next((each for each in spec.components if each.component_id == component_id), None)
    asked = (
        Requirement("SlurmQueueConfig.cpus_per_node", spec.asked_cpus if own is None else own.asked_cpus, "CPUs"),
        Requirement("SlurmQueueConfig.gpus_per_node", spec.asked_gpus if own is None else own.asked_gpus, "GPUs"),
    )
    return asked + (node_footprint(node_spec(spec.ray, component_id)) if spec.ray is not None else ())
