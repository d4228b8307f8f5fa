"""What a payload or a Ray cluster requires of each of its nodes; this module imports only `protocol.spec`."""

from __future__ import annotations

from typing import NamedTuple, Optional, Tuple, Union

from ..protocol.spec import NodeSpec, PayloadSpec, RaySpec, RuntimeSpec, node_spec

SHARE_FOR_RAY = 0.9
"""Share of a node's memory that Ray may use, its object store included; the runtime and Ray's daemons use the rest."""


class Requirement(NamedTuple):
    """What one configuration field requires of a node.

    Attributes:
        field: the configuration field, as error messages name it.
        amount: the required amount; None if the field is unset.
        unit: "CPUs", "GPUs" or "GiB".
    """

    field: str
    amount: Optional[float]
    unit: str


Footprint = Tuple[Requirement, ...]
"""Everything that a payload or a Ray cluster requires of each of its nodes."""


def node_footprint(spec: Union[RaySpec, NodeSpec]) -> Footprint:
    """What a Ray cluster requires of each of its nodes, or of each node of one component."""
    store = spec.object_store_memory
    return (
        Requirement("RayLauncher.num_cpus_per_node", spec.num_cpus, "CPUs"),
        Requirement("RayLauncher.num_gpus_per_node", spec.num_gpus, "GPUs"),
        Requirement("RayLauncher.object_store_memory_gb", None if store is None else store / 2**30, "GiB"),
    )


def payload_footprint(spec: PayloadSpec) -> Footprint:
    """What a payload that shares its nodes with other payloads requires of each node.

    These are the requirements of the payload's own Ray cluster, if it has one, and the CPUs and GPUs that the payload asks
    for where its cluster has no requirement of the same unit.
    """
    own = node_footprint(spec.ray) if spec.ray is not None else ()
    units = {requirement.unit for requirement in own if requirement.amount is not None}
    claims = (Requirement("num_cpus", spec.want_cpus, "CPUs"), Requirement("num_gpus", spec.want_gpus, "GPUs"))
    return own + tuple(claim for claim in claims if claim.unit not in units)


def runtime_footprint(spec: RuntimeSpec, component_id: Optional[str] = None) -> Footprint:
    """What a runtime, or one component of it, requires of each node: what Slurm was asked for, and what the Ray cluster needs."""
    own = next((each for each in spec.components if each.component_id == component_id), None)
    asked = (
        Requirement("SlurmQueueConfig.cpus_per_node", spec.asked_cpus if own is None else own.asked_cpus, "CPUs"),
        Requirement("SlurmQueueConfig.gpus_per_node", spec.asked_gpus if own is None else own.asked_gpus, "GPUs"),
    )
    return asked + (node_footprint(node_spec(spec.ray, component_id)) if spec.ray is not None else ())
