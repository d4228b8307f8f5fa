"""Simulated nodes for local mode: each component of a heterogeneous job gets a Ray node of its own on this machine.

The head's runtime runs their agents itself, and commands them like worker nodes.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from ..node.resources import GPU_VARIABLES, NodeResources, gpu_environment, missing_gpus, visible_gpus
from ..node.worker_nodes import WorkerNode, WorkerNodes
from ..process.loop import Loop
from ..process.scratch import Scratch
from ..protocol.rpc import Message
from ..protocol.spec import ComponentSpec, NodeSpec, RuntimeSpec
from ..ray.ray_node import ClusterDir
from .agent import NodeAgent

ADDRESS = "127.0.0.1"
"""The address of all simulated nodes."""

Variables = Dict[str, Optional[str]]
"""Environment variables; a variable with the value None must not be set."""


class Share(NamedTuple):
    """The share of this machine that one Ray node gets."""

    machine: NodeResources  # With simulated CPUs and GPUs.
    environ: Variables  # For Ray on this node.
    remark: str  # A sentence for the Dagster log about what is simulated; "" if nothing is.


def component_shares(spec: RuntimeSpec, here: NodeResources, visible: Tuple[str, Sequence[str]]) -> List[Share]:
    """The share of this machine that each component gets, in the order of the start record. Pure.

    Each component may use all CPUs unless it requests fewer, because simulated components are rarely busy at the same time. GPUs
    are assigned in the order of the components. If too few are left for a component, Ray counts simulated ones. `visible` is the
    name of the environment variable that limits the GPUs of a process, and the ids of this machine's GPUs.
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
    """The share for the only node of a runtime without components, with simulated devices if it requests more. Pure."""
    if spec.ray is None:
        return Share(here, {}, "")
    cpus, gpus = max(here.num_cpus, spec.ray.num_cpus or 0), max(here.num_gpus, spec.ray.num_gpus or 0)
    environ = _gpu_variables(visible[0], visible[1], gpus) if gpus > here.num_gpus else {}
    return Share(replace(here, num_cpus=cpus, num_gpus=gpus), environ, _remark(cpus, gpus, here.num_cpus, here.num_gpus))


def _gpu_variables(variable: str, own: Sequence[str], gpus: int) -> Variables:
    """The environment variables that show a node its own GPUs only; simulated GPUs have made-up ids."""
    missing = missing_gpus(gpus - len(own))
    # Ray refuses a number of GPUs that contradicts any of these variables.
    others: Variables = dict.fromkeys(GPU_VARIABLES) if missing else {}
    return {**others, **gpu_environment(variable, [*own, *missing])}


def _remark(cpus: int, gpus: int, has_cpus: int, has_gpus: int) -> str:
    """A sentence about the CPUs and GPUs that Ray counts and this machine does not have; "" if there are none."""
    units = [("CPU", cpus, has_cpus), ("GPU", gpus, has_gpus)]
    short = [(_count(counted, unit), _count(has, unit)) for unit, counted, has in units if counted > has]
    if not short:
        return ""
    counted, has = (" and ".join(words) for words in zip(*short))
    return "Ray counts %s, but this machine has %s for it: the others are simulated, no device is behind them" % (counted, has)


def _count(number: int, unit: str) -> str:
    return "%s %s%s" % (number or "no", unit, "" if number == 1 else "s")


def _requested(component: ComponentSpec, node: NodeSpec, here: NodeResources) -> Tuple[int, int]:
    """The CPUs and GPUs that a component's node gets: Ray's settings for it, else what was requested of Slurm."""
    cpus = min(component.asked_cpus or here.num_cpus, here.num_cpus) if node.num_cpus is None else node.num_cpus
    return cpus, (component.asked_gpus or 0) if node.num_gpus is None else node.num_gpus


class Simulation(NamedTuple):
    """The simulated components or devices of one runtime in local mode."""

    spec: RuntimeSpec  # The start record, changed for the simulation.
    shares: List[Share]  # Those of all components, the head's first.
    workers: WorkerNodes  # The simulated nodes besides the head.

    def remarks(self, uses_ray: bool) -> List[str]:
        """Sentences for the Dagster log about what is simulated; for a payload without Ray, only in the first component."""
        return [share.remark for share in (self.shares if uses_ray else self.shares[:1]) if share.remark]

    def head_environ(self, environ: Mapping[str, str]) -> Dict[str, str]:
        """The environment variables for payloads, which see only the GPUs of the head's component."""
        own = {**environ, **self.shares[0].environ}
        return {name: value for name, value in own.items() if value is not None}


def simulate(
    loop: Loop, spec: RuntimeSpec, here: NodeResources, private: Scratch, on_event: Callable[[WorkerNode, Message], None]
) -> Simulation:
    """Make the simulated nodes of a runtime in local mode; no process starts yet."""
    visible = visible_gpus(os.environ, here.num_gpus)
    nodes = WorkerNodes(loop, {}, on_event)
    if not spec.components:
        return Simulation(spec, [single_node_share(spec, here, visible)], nodes)
    shares = component_shares(spec, here, visible)
    # The shares replace what was requested of Slurm, and the nodes need a shared secret.
    components = [replace(each, asked_cpus=None, asked_gpus=None) for each in spec.components]
    spec = replace(spec, components=components, control_key=os.urandom(32).hex())
    for node_id, share in enumerate(shares[1:], 1):
        nodes.members[node_id] = SimulatedNode(nodes, spec, node_id, share, private)
    return Simulation(spec, shares, nodes)


class SimulatedNode(WorkerNode):
    """The simulated node of one component other than the head's: a worker node whose agent runs in the head's runtime."""

    def __init__(self, nodes: WorkerNodes, spec: RuntimeSpec, node_id: int, share: Share, private: Scratch) -> None:
        machine = share.machine
        super().__init__(node_id, machine.hostname, machine.component)
        self.machine = machine.facts()

        def send(**event: Any) -> None:
            # Not at once: the agent sends this from within a call of the head.
            nodes.loop.call_later(0.0, lambda: nodes.handle(self, event))

        def log(text: str) -> None:
            print("rayslurm on %s: %s" % (machine.name, text), file=sys.stderr, flush=True)

        def scratch_for(_: str) -> Scratch:
            return ClusterDir(private)

        self._agent = NodeAgent(nodes.loop, spec, machine, send, log, scratch_for, share.environ, simulated=True)

    @property
    def here(self) -> bool:
        return True

    @property
    def pids(self) -> List[int]:
        return self._agent.pids

    def send(self, **message: Any) -> None:
        self._agent.handle(message)
