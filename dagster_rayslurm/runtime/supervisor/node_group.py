"""The nodes that one runtime leads: this one, and the others of its allocation or, simulated, of this machine."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any, Callable, Dict, List, Mapping, Optional

from ..node import resources
from ..node.allocation import Allocation, head_address
from ..node.resources import may_need_gpus
from ..node.worker_node import WorkerNode, WorkerNodes, named
from ..nodes import simulated
from ..nodes.head import ConnectedWorkers
from ..process.loop import Loop
from ..process.scratch import Scratch
from ..protocol.record import node_log
from ..protocol.rpc import Message
from ..protocol.spec import RaySpec, RuntimeSpec
from ..ray.node_table import nodes_expected
from ..ray.start_arguments import granted_defaults
from .queue import Claims, capacities_of

_MOST_NAMES = 8
"""Nodes that are named where all of them are told."""


class NodeGroup:
    """Brings the nodes together, and tells of them.

    Args:
        loop: where everything happens.
        spec: the start record.
        private: scratch directory of the runtime.
        hear: called with a node and what its runtime says.
        allocation: the Slurm step whose first node this is; None elsewhere.
        log_dir: directory of the logs of an allocation's nodes.
        here: what this node grants; None to find out.

    Attributes:
        spec: the start record as it is for these nodes.
        machine: what this node grants.
        allocation: the Slurm step whose first node this is; None elsewhere.
        others: the other nodes; None if there are none.
        address: the address by which this node is known to them; None for the one that Ray finds.
        ray_environ: variables for Ray's daemons on this node; None for one that they must not have.
    """

    def __init__(
        self,
        loop: Loop,
        spec: RuntimeSpec,
        private: Scratch,
        hear: Callable[[WorkerNode, Message], None],
        allocation: Optional[Allocation] = None,
        log_dir: str = "",
        here: Optional[resources.NodeResources] = None,
    ) -> None:
        self.spec = spec
        self.machine = resources.detect(with_gpus=may_need_gpus(spec)) if here is None else here
        self.allocation = allocation
        self.others: Optional[WorkerNodes] = None
        self.address: Optional[str] = None
        self.ray_environ: Mapping[str, Optional[str]] = {}
        self._stage: Optional[simulated.Stage] = None
        if allocation is not None:
            self.machine = replace(self.machine, component=allocation.component_of(0))
            self.address = head_address(allocation)
            if len(allocation.nodes) > 1:
                self.others = _team(loop, spec, allocation, log_dir, hear)
        elif spec.components or (spec.ray is not None and spec.ray.simulate):
            self._stage = stage = simulated.stage(loop, spec, self.machine, private, hear)
            self.spec, self.others = stage.spec, stage.team
            self.address = simulated.ADDRESS if spec.components else None
            self.machine, self.ray_environ = stage.roles[0].machine, stage.roles[0].environ

    @property
    def component(self) -> Optional[str]:
        """The component of this node; None where there are none."""
        return self.machine.component

    def machines(self) -> List[resources.NodeResources]:
        """What the nodes grant that have come so far."""
        members = self.others.members.values() if self.others is not None else []
        return [self.machine, *(resources.from_facts(member.machine) for member in members if member.joined)]

    def capacities(self) -> Claims:
        """What payloads may claim of the nodes, by component."""
        return capacities_of(self.machines())

    def remarks(self, uses_ray: bool) -> List[str]:
        """What a payload is to be told of the nodes, as they are not what they seem."""
        return self._stage.remarks(uses_ray) if self._stage is not None else []

    def payload_environ(self, environ: Dict[str, str]) -> Dict[str, str]:
        """What a payload's environment is made from: it sees what this node grants."""
        if self.allocation is not None:
            environ = {**granted_defaults(self.machine), **environ}
        return self._stage.head_environ(environ) if self._stage is not None else environ

    def in_words(self, ray: Optional[RaySpec]) -> str:
        """The nodes of a cluster."""
        others = self.others.members.values() if self.others is not None else []
        names = [named(self._name, self.component), *(member.title for member in others)]
        if ray is not None:
            names = names[: nodes_expected(ray, len(names))]
        if len(names) == 1:
            return names[0]
        return "%d nodes: %s" % (len(names), ", ".join(names[:_MOST_NAMES] + ["…"] * (len(names) > _MOST_NAMES)))

    def facts(self) -> List[Dict[str, Any]]:
        """The nodes, and what each of them grants."""
        own = {
            "name": self._name,
            "cpus": self.machine.num_cpus,
            "gpus": self.machine.num_gpus,
            "here": True,
            "component": self.component,
        }
        return [own, *(self.others.facts() if self.others is not None else [])]

    def allocation_facts(self) -> Optional[Dict[str, Any]]:
        """What metadata tells of the allocation; None without one."""
        return self.allocation.facts() if self.allocation is not None else None

    def tell(self, **order: Any) -> None:
        """Tell all others something."""
        if self.others is not None:
            self.others.order(self.others.members, **order)

    def dismiss(self) -> None:
        """Send all others home."""
        if self.others is not None:
            self.others.dismiss()

    def wait_gone(self, patience: float) -> None:
        """Wait until the others have tidied up, and so many seconds for those who have never come."""
        if self.others is not None:
            self.others.wait_gone(patience)

    @property
    def _name(self) -> str:
        return self.machine.hostname if self.allocation is None else self.allocation.nodes[0]


def _team(
    loop: Loop, spec: RuntimeSpec, allocation: Allocation, log_dir: str, hear: Callable[[WorkerNode, Message], None]
) -> ConnectedWorkers:
    assert spec.control_key is not None

    def log_path(place: int) -> str:
        return os.path.join(log_dir, node_log(allocation.first + place))

    return ConnectedWorkers(loop, spec.control_key, spec.control_ports, allocation.nodes, log_path, hear, allocation.component_of)
