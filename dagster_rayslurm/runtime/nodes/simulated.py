"""Simulated nodes: the components of an allocation on one machine, a Ray node for each, all started by the head's runtime.

The head commands them like the nodes of an allocation: `SimulatedNodes` stands in for `ConnectedWorkers`.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import Any, Callable, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from ..node.gpus import GPU_VARIABLES, gpu_environment, missing_gpus, visible_gpus
from ..node.resources import NodeResources
from ..node.worker_node import WorkerNode
from ..process.loop import Loop
from ..process.scratch import Scratch
from ..protocol.node_messages import NodeCommand, NodeEvent
from ..protocol.rpc import Message
from ..protocol.spec import ComponentSpec, NodeSpec, RuntimeSpec
from ..ray.cluster_dir import ClusterDirs
from .node_agent import AgentOwner, NodeAgent

ADDRESS = "127.0.0.1"
"""The address of all simulated nodes."""

Variables = Dict[str, Optional[str]]


class Share(NamedTuple):
    """The share of this machine that one Ray node gets.

    Attributes:
        machine: its resources, including simulated GPUs.
        environ: variables for Ray on this node; None for one that must not be set.
        remark: what is simulated, for the user; or "".
    """

    machine: NodeResources
    environ: Variables
    remark: str


def component_shares(spec: RuntimeSpec, here: NodeResources, visible: Tuple[str, Sequence[str]]) -> List[Share]:
    """The shares of all components. Pure.

    Each component may use all CPUs unless it asks for fewer, because simulated components are rarely busy at the same time. GPUs
    are assigned in the order of the components. Where too few are left, Ray counts placeholders.

    Args:
        spec: the start record.
        here: the resources of this machine.
        visible: the variable that shows GPUs to a process, and the ids of the GPUs of this machine.
    """
    variable, left = visible[0], list(visible[1])
    nodes = {each.component_id: each for each in spec.ray.components} if spec.ray is not None else {}
    # Without a limit, each Ray node would count the memory of the whole machine.
    memory = (here.memory if here.memory_limit is None else here.memory_limit) // max(1, len(spec.components))
    shares = []
    for component in spec.components:
        name = component.component_id
        cpus, gpus = _requested(component, nodes.get(name, NodeSpec(name)), here)
        remark = _remark(cpus, gpus, here.num_cpus, len(left))
        own, left = left[:gpus], left[gpus:]
        environ = _gpu_variables(variable, own, gpus) if visible[1] or gpus else {}
        machine = replace(here, num_cpus=cpus, num_gpus=gpus, memory_limit=memory, component=name)
        shares.append(Share(machine, environ, remark and "component %s: %s" % (name, remark)))
    return shares


def single_node_share(spec: RuntimeSpec, here: NodeResources, visible: Tuple[str, Sequence[str]]) -> Share:
    """The share of the only node of a runtime without components, with simulated CPUs and GPUs if it asks for more. Pure."""
    if spec.ray is None:
        return Share(here, {}, "")
    cpus, gpus = max(here.num_cpus, spec.ray.num_cpus or 0), max(here.num_gpus, spec.ray.num_gpus or 0)
    environ = _gpu_variables(visible[0], visible[1], gpus) if gpus > here.num_gpus else {}
    return Share(replace(here, num_cpus=cpus, num_gpus=gpus), environ, _remark(cpus, gpus, here.num_cpus, here.num_gpus))


def _gpu_variables(variable: str, own: Sequence[str], gpus: int) -> Variables:
    """The variables that show a node its own GPUs, and placeholders for missing ones."""
    missing = missing_gpus(gpus - len(own))
    others: Variables = dict.fromkeys(GPU_VARIABLES) if missing else {}  # Ray refuses a number that contradicts them.
    return {**others, **gpu_environment(variable, [*own, *missing])}


def _remark(cpus: int, gpus: int, has_cpus: int, has_gpus: int) -> str:
    """What Ray counts beyond what this machine has; "" if nothing."""
    units = [("CPU", cpus, has_cpus), ("GPU", gpus, has_gpus)]
    short = [(_count(counted, unit), _count(has, unit)) for unit, counted, has in units if counted > has]
    if not short:
        return ""
    counted, has = (" and ".join(words) for words in zip(*short))
    return "Ray counts %s, but this machine has %s for it: the others are simulated, no device is behind them" % (counted, has)


def _count(number: int, unit: str) -> str:
    return "%s %s%s" % (number or "no", unit, "" if number == 1 else "s")


def _requested(component: ComponentSpec, node: NodeSpec, here: NodeResources) -> Tuple[int, int]:
    """CPUs and GPUs of a component's node."""
    cpus = min(component.asked_cpus or here.num_cpus, here.num_cpus) if node.num_cpus is None else node.num_cpus
    return cpus, (component.asked_gpus or 0) if node.num_gpus is None else node.num_gpus


class Simulation(NamedTuple):
    """A runtime with simulated components or devices.

    Attributes:
        spec: the start record, changed for the simulation.
        shares: of all components, the head's first.
        workers: the nodes besides the head; None without components.
    """

    spec: RuntimeSpec
    shares: List[Share]
    workers: Optional[SimulatedNodes]

    def remarks(self, uses_ray: bool) -> List[str]:
        """What is simulated, for the user; a payload without Ray runs in the first component only."""
        return [share.remark for share in (self.shares if uses_ray else self.shares[:1]) if share.remark]

    def head_environ(self, environ: Mapping[str, str]) -> Dict[str, str]:
        """The environment for payloads, with only the GPUs of the head's component."""
        own = {**environ, **self.shares[0].environ}
        return {name: value for name, value in own.items() if value is not None}


def simulate(
    loop: Loop, spec: RuntimeSpec, here: NodeResources, private: Scratch, on_event: Callable[[WorkerNode, Message], None]
) -> Simulation:
    """Set up the simulated nodes of a runtime; nothing starts yet.

    Args:
        loop: the event loop.
        spec: the start record.
        here: the resources of this machine.
        private: scratch directory of the runtime.
        on_event: called with a node and its event.
    """
    visible = visible_gpus(os.environ, here.num_gpus)
    if not spec.components:
        return Simulation(spec, [single_node_share(spec, here, visible)], None)
    shares = component_shares(spec, here, visible)
    # The shares replace what was requested of Slurm, and the nodes need a shared secret.
    components = [replace(each, asked_cpus=None, asked_gpus=None) for each in spec.components]
    spec = replace(spec, components=components, control_key=os.urandom(32).hex())
    return Simulation(spec, shares, SimulatedNodes(loop, spec, shares, ClusterDirs(private), on_event))


class SimulatedNode(WorkerNode, AgentOwner):
    """The Ray node of one component other than the head's."""

    def __init__(self, nodes: SimulatedNodes, node_id: int, share: Share, cluster_dirs: ClusterDirs) -> None:
        super().__init__(node_id, share.machine.hostname, share.machine.component)
        self.machine = share.machine.facts()
        self._nodes = nodes
        self._log_name = share.machine.name
        self._cluster_dirs = cluster_dirs

    @property
    def here(self) -> bool:
        """A simulated node is always connected."""
        return True

    def scratch_for(self, cluster_key: str) -> Scratch:  # noqa: ARG002
        return self._cluster_dirs.take()

    def send(self, **message: Any) -> None:
        self._nodes.handle_event(self, message)

    def log(self, text: str) -> None:
        sys.stderr.write("rayslurm on %s: %s\n" % (self._log_name, text))
        sys.stderr.flush()


class SimulatedNodes:
    """The simulated nodes besides the head; see `WorkerNodes`.

    Args:
        loop: the event loop.
        spec: the start record.
        shares: of all components, the head's first.
        cluster_dirs: makes their directories.
        on_event: called with a node and its event.
    """

    def __init__(
        self,
        loop: Loop,
        spec: RuntimeSpec,
        shares: Sequence[Share],
        cluster_dirs: ClusterDirs,
        on_event: Callable[[WorkerNode, Message], None],
    ) -> None:
        self._loop = loop
        self._on_event = on_event
        self._usage: Dict[str, Dict[str, Dict[str, Any]]] = {}
        self.members: Dict[int, WorkerNode] = {}
        self._agents: Dict[int, NodeAgent] = {}
        for node_id, share in enumerate(shares):
            if node_id:
                self.members[node_id] = node = SimulatedNode(self, node_id, share, cluster_dirs)
                self._agents[node_id] = NodeAgent(loop, spec, share.machine, node, share.environ, simulated=True)

    @property
    def pids(self) -> List[int]:
        """The root processes of Ray on all nodes."""
        return [pid for agent in self._agents.values() for pid in agent.pids]

    def send_command(self, places: Iterable[int], **command: Any) -> None:
        for place in places:
            self._agents[place].handle(command)

    def facts(self) -> List[Dict[str, Any]]:
        """The resources of the nodes."""
        return [node.facts() for node in self.members.values()]

    def log_tail(self, member: WorkerNode) -> str:  # noqa: ARG002
        """Nothing: the nodes write to the runtime's log."""
        return ""

    def measure(self, nonce: str, jobs: Optional[List[str]]) -> None:
        self._usage[nonce] = {}
        self.send_command(self.members, op=NodeCommand.MEASURE, id=nonce, jobs=jobs)

    def collect(self, nonce: str, done: Callable[[Dict[str, Dict[str, Any]]], None]) -> None:
        self.send_command(self.members, op=NodeCommand.REPORT, id=nonce)
        usage = self._usage.pop(nonce)
        self._loop.call_later(0.0, lambda: done(usage))

    def dismiss(self) -> None:
        """End Ray on all nodes."""
        for agent in self._agents.values():
            agent.end()

    def wait_gone(self, patience: float) -> None:
        """Nothing to do: the processes of the nodes were below this runtime, which has ended them."""

    def handle_event(self, node: WorkerNode, event: Message) -> None:
        """Handle an event of a node."""
        if event["event"] == NodeEvent.USAGE:
            if event["usage"] is not None and event["id"] in self._usage:
                self._usage[event["id"]][node.title] = event["usage"]
        elif event["event"] == NodeEvent.RAY_FAILED:
            # The head must not be interrupted in what it is doing.
            self._loop.call_later(0.0, lambda: self._on_event(node, event))
