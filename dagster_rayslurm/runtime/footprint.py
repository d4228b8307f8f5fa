"""What a payload asks of a node, held against what the node grants. Pure."""

from __future__ import annotations

from typing import NamedTuple, Optional, Tuple, Union

from .components import node_spec
from .machine import Machine, usable_memory
from .spec import NodeSpec, PayloadSpec, RaySpec, RuntimeSpec


class Want(NamedTuple):
    """An amount that a field of a launcher asks of a node; None if it does not say. Units are CPUs, GPUs and GiB."""

    field: str
    amount: Optional[float]
    unit: str


Footprint = Tuple[Want, ...]


def footprint_error(footprint: Footprint, machine: Machine) -> Optional[str]:
    """What a payload asks of this node and does not get, as a sentence that names the field; or None."""
    granted = {"CPUs": machine.num_cpus, "GPUs": machine.num_gpus, "GiB": round(usable_memory(machine) / 2**30, 2)}
    for wanted in footprint:
        if wanted.amount is not None and wanted.amount > granted[wanted.unit]:
            return "%s=%g asks for more than node %s grants: %g %s" % (
                wanted.field,
                wanted.amount,
                machine.name,
                granted[wanted.unit],
                wanted.unit,
            )
    return None


def node_footprint(spec: Union[RaySpec, NodeSpec]) -> Footprint:
    """What a cluster asks of each node, or of each of a component."""
    store = spec.object_store_memory
    return (
        Want("RayLauncher.num_cpus_per_node", spec.num_cpus, "CPUs"),
        Want("RayLauncher.num_gpus_per_node", spec.num_gpus, "GPUs"),
        Want("RayLauncher.object_store_memory_gb", None if store is None else store / 2**30, "GiB"),
    )


def payload_footprint(spec: PayloadSpec) -> Footprint:
    """What a payload among others asks of each node: what it claims, and what a cluster of its own is to have."""
    own = node_footprint(spec.ray) if spec.ray is not None else ()
    named = {want.unit for want in own if want.amount is not None}
    claims = (Want("num_cpus", spec.want_cpus, "CPUs"), Want("num_gpus", spec.want_gpus, "GPUs"))
    return own + tuple(claim for claim in claims if claim.unit not in named)


def runtime_footprint(spec: RuntimeSpec, component_id: Optional[str] = None) -> Footprint:
    """What every node of a runtime or of a component must grant: what Slurm was asked for, and what the cluster is to have."""
    own = next((each for each in spec.components if each.component_id == component_id), None)
    asked = (
        Want("SlurmQueueConfig.cpus_per_node", spec.asked_cpus if own is None else own.asked_cpus, "CPUs"),
        Want("SlurmQueueConfig.gpus_per_node", spec.asked_gpus if own is None else own.asked_gpus, "GPUs"),
    )
    return asked + (node_footprint(node_spec(spec.ray, component_id)) if spec.ray is not None else ())


def asks_for_gpus(spec: RuntimeSpec) -> bool:
    """Whether payloads of this runtime may want GPUs: it takes its time to look for them."""
    asked = any([spec.asked_gpus, *(component.asked_gpus for component in spec.components)])
    return spec.ray is not None or asked or (spec.idle_timeout is not None and spec.control_key is not None)
