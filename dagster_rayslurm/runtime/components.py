"""Components of an allocation within one Ray cluster: what tells their nodes apart, for Ray and for the user. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Dict, Optional

from .spec import NodeSpec, RaySpec

LABEL = "component"
"""Label of each node that names its component: `label_selector={"component": "gpu"}`."""
RESOURCE = "component:"
"""What the name of a component's custom resource begins with: `resources={"component:gpu": 1}`."""
PLENTY = 1000.0
"""How much of that resource a node has: it says where something runs, and not how much of it."""


def node_spec(ray: RaySpec, component_id: Optional[str]) -> RaySpec:
    """What one node is told of its cluster.

    Args:
        ray: the cluster.
        component_id: the component that the node belongs to; None in an allocation that has none.
    """
    own = next((each for each in ray.components if each.component_id == component_id), None)
    if own is None:
        return ray
    return replace(
        ray,
        num_cpus=own.num_cpus,
        num_gpus=own.num_gpus,
        object_store_memory=own.object_store_memory,
        resources={**own.resources, **place(own)},
        labels={**own.labels, LABEL: own.component_id},
        network_interface=own.network_interface,
        health_check=own.health_check,
    )


def place(node: NodeSpec) -> Dict[str, float]:
    """The custom resource by which tasks and actors find the nodes of a component."""
    return {RESOURCE + node.component_id: PLENTY}
