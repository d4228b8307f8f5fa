"""The nodes that one runtime leads: this node, and worker nodes from the Slurm allocation or simulated on this machine."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any, Callable, Dict, List, Optional

from ..node import resources
from ..node.allocation import Allocation, head_address
from ..node.resources import may_need_gpus, named
from ..node.worker_node import WorkerNode, WorkerNodes
from ..nodes import simulated
from ..nodes.head import ConnectedWorkers
from ..process.loop import Loop
from ..process.scratch import Scratch
from ..protocol.record import node_log
from ..protocol.rpc import Message
from ..protocol.spec import RaySpec, RuntimeSpec
from ..ray.cluster import HeadNode
from ..ray.node_table import nodes_expected
from ..ray.start_arguments import granted_defaults

_MOST_NAMES = 8
"""Most nodes that one message in the Dagster log names."""


class NodeGroup:
    """This node and its worker nodes: connects them, and says which resources each of them has.

    Args:
        loop: the event loop.
        spec: the start record.
        private: scratch directory of the runtime.
        on_message: called with a worker node and its message.
        allocation: the Slurm step whose first node this is; None outside Slurm.
        log_dir: directory in which the nodes of the allocation write their logs.
        machine: the resources of this node; None to detect them.

    Attributes:
        spec: the start record, changed where nodes are simulated.
        machine: the resources of this node.
        workers: the other nodes; None if there are none.
        head: this node in its role as head of Ray clusters.
    """

    def __init__(
        self,
        loop: Loop,
        spec: RuntimeSpec,
        private: Scratch,
        on_message: Callable[[WorkerNode, Message], None],
        allocation: Optional[Allocation] = None,
        log_dir: str = "",
        machine: Optional[resources.NodeResources] = None,
    ) -> None:
        self.spec = spec
        self.machine = resources.detect(with_gpus=may_need_gpus(spec)) if machine is None else machine
        self.allocation = allocation
        self.workers: Optional[WorkerNodes] = None
        self._simulation: Optional[simulated.Simulation] = None
        if allocation is not None:
            self.machine = replace(self.machine, component=allocation.component_of(0))
            if len(allocation.nodes) > 1:
                self.workers = _connected_workers(loop, spec, allocation, log_dir, on_message)
            self.head = HeadNode(self.machine, self.workers, head_address(allocation))
        elif spec.components or (spec.ray is not None and spec.ray.simulate):
            self._simulation = simulation = simulated.simulate(loop, spec, self.machine, private, on_message)
            self.spec, self.workers, self.machine = simulation.spec, simulation.workers, simulation.shares[0].machine
            address = simulated.ADDRESS if spec.components else None
            self.head = HeadNode(self.machine, self.workers, address, simulation.shares[0].environ)
        else:
            self.head = HeadNode(self.machine)

    def machines(self) -> List[resources.NodeResources]:
        """The resources of each node that has connected so far, the head first."""
        members = self.workers.members.values() if self.workers is not None else []
        return [self.machine, *(resources.from_facts(member.machine) for member in members if member.joined)]

    def remarks(self, uses_ray: bool) -> List[str]:
        """Sentences for the Dagster log about resources that are only simulated; empty outside a simulation."""
        return self._simulation.remarks(uses_ray) if self._simulation is not None else []

    def payload_environ(self, environ: Dict[str, str]) -> Dict[str, str]:
        """`environ` with variables that limit the payload to the resources granted on this node."""
        if self.allocation is not None:
            environ = {**granted_defaults(self.machine), **environ}
        return self._simulation.head_environ(environ) if self._simulation is not None else environ

    def in_words(self, ray: Optional[RaySpec]) -> str:
        """The names of a Ray cluster's nodes for the Dagster log; of all nodes if `ray` is None."""
        others = self.workers.members.values() if self.workers is not None else []
        names = [named(self._name, self.machine.component), *(member.title for member in others)]
        if ray is not None:
            names = names[: nodes_expected(ray, len(names))]
        if len(names) == 1:
            return names[0]
        return "%d nodes: %s" % (len(names), ", ".join(names[:_MOST_NAMES] + ["…"] * (len(names) > _MOST_NAMES)))

    def facts(self) -> List[Dict[str, Any]]:
        """Name, component, CPUs and GPUs of each node, for `describe`; this node first."""
        own = {
            "name": self._name,
            "cpus": self.machine.num_cpus,
            "gpus": self.machine.num_gpus,
            "here": True,
            "component": self.machine.component,
        }
        return [own, *(self.workers.facts() if self.workers is not None else [])]

    @property
    def _name(self) -> str:
        return self.machine.hostname if self.allocation is None else self.allocation.nodes[0]


def _connected_workers(
    loop: Loop, spec: RuntimeSpec, allocation: Allocation, log_dir: str, on_message: Callable[[WorkerNode, Message], None]
) -> ConnectedWorkers:
    assert spec.control_key is not None

    def log_path(place: int) -> str:
        return os.path.join(log_dir, node_log(allocation.first + place))

    return ConnectedWorkers(
        loop, spec.control_key, spec.control_ports, allocation.nodes, log_path, on_message, allocation.component_of
    )
