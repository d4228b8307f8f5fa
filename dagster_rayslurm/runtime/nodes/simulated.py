"""Components simulated on one machine: a Ray node for each, all below one runtime, which is the head's and theirs.

To the head's runtime they are what the nodes of an allocation are to it (`team`): they are told the same, and say the same.
"""

from __future__ import annotations

import functools
import os
import sys
from dataclasses import replace
from typing import Any, Callable, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from ..node.gpus import GPU_VARIABLES, gpu_environment, missing_gpus, visible_gpus
from ..node.resources import NodeResources
from ..node.worker_node import WorkerNode
from ..process.loop import Loop
from ..process.scratch import Scratch
from ..protocol.rpc import Message
from ..protocol.spec import ComponentSpec, NodeSpec, RuntimeSpec
from ..ray.cluster_dir import ClusterDirs
from .node_agent import Follower

ADDRESS = "127.0.0.1"
"""Where the nodes of one machine find each other."""

Variables = Dict[str, Optional[str]]


class Role(NamedTuple):
    """What the Ray node of one component is given of this machine.

    Attributes:
        machine: what it grants, GPUs that are none included.
        environ: variables for Ray there; None for one that must not be set.
        remark: what is not as it seems, for the user; or "".
    """

    machine: NodeResources
    environ: Variables
    remark: str


def cast(spec: RuntimeSpec, here: NodeResources, visible: Tuple[str, Sequence[str]]) -> List[Role]:
    """What the nodes of a runtime's components are given of this machine; pure.

    Each may use all CPUs, if it does not ask for fewer, as what is simulated is seldom busy all at once. GPUs are shared out in
    the order of the components; where too few are left, Ray counts placeholders as well.

    Args:
        spec: the runtime.
        here: what this machine grants.
        visible: the variable by which GPUs are shown to a process, and what those are called that there are.
    """
    left = list(visible[1])
    nodes = {each.component_id: each for each in spec.ray.components} if spec.ray is not None else {}
    # What is not limited, Ray would take for each node anew.
    memory = (here.memory if here.memory_limit is None else here.memory_limit) // max(1, len(spec.components))
    roles = []
    for component in spec.components:
        name = component.component_id
        cpus, gpus = _wanted(component, nodes.get(name, NodeSpec(name)), here)
        remark = _remark(cpus, gpus, here.num_cpus, len(left))
        mine, left = left[:gpus], left[gpus:]
        environ = _shown(visible, mine, gpus) if visible[1] or gpus else {}
        machine = replace(here, num_cpus=cpus, num_gpus=gpus, memory_limit=memory, component=name)
        roles.append(Role(machine, environ, remark and "component %s: %s" % (name, remark)))
    return roles


def alone(spec: RuntimeSpec, here: NodeResources, visible: Tuple[str, Sequence[str]]) -> Role:
    """What the only node of a runtime without components is given of this machine; pure.

    Args:
        spec: the runtime.
        here: what this machine grants.
        visible: as for `cast`.
    """
    if spec.ray is None:
        return Role(here, {}, "")
    cpus, gpus = max(here.num_cpus, spec.ray.num_cpus or 0), max(here.num_gpus, spec.ray.num_gpus or 0)
    environ = _shown(visible, visible[1], gpus) if gpus > here.num_gpus else {}
    return Role(replace(here, num_cpus=cpus, num_gpus=gpus), environ, _remark(cpus, gpus, here.num_cpus, here.num_gpus))


def _shown(visible: Tuple[str, Sequence[str]], mine: Sequence[str], gpus: int) -> Variables:
    """The variables that show a node its own GPUs, and placeholders for those that the machine lacks."""
    variable = visible[0]
    missing = missing_gpus(gpus - len(mine))
    others: Variables = dict.fromkeys(GPU_VARIABLES) if missing else {}  # Ray refuses a number that they contradict.
    return {**others, **gpu_environment(variable, [*mine, *missing])}


def _remark(cpus: int, gpus: int, has_cpus: int, has_gpus: int) -> str:
    """What Ray counts here beyond what there is; "" if nothing is."""
    kinds = [("CPU", cpus, has_cpus), ("GPU", gpus, has_gpus)]
    short = [(_count(asked, unit), _count(has, unit)) for unit, asked, has in kinds if asked > has]
    if not short:
        return ""
    asked, has = (" and ".join(words) for words in zip(*short))
    return "Ray counts %s, but this machine has %s for it: the others are simulated, no device is behind them" % (asked, has)


def _count(number: int, unit: str) -> str:
    return "%s %s%s" % (number or "no", unit, "" if number == 1 else "s")


def _wanted(component: ComponentSpec, node: NodeSpec, here: NodeResources) -> Tuple[int, int]:
    cpus = min(component.asked_cpus or here.num_cpus, here.num_cpus) if node.num_cpus is None else node.num_cpus
    return cpus, (component.asked_gpus or 0) if node.num_gpus is None else node.num_gpus


def settled(spec: RuntimeSpec) -> RuntimeSpec:
    """The start record once its components have their roles: nothing was asked of Slurm, and nodes share a secret."""
    plain = [replace(each, asked_cpus=None, asked_gpus=None) for each in spec.components]
    return replace(spec, components=plain, control_key=os.urandom(32).hex())


class Stage(NamedTuple):
    """A runtime with components or devices that are simulated.

    Attributes:
        spec: the start record as it is then.
        roles: what each component is given, the head's first.
        team: the nodes of the others; None without components.
    """

    spec: RuntimeSpec
    roles: List[Role]
    team: Optional[SimulatedNodes]

    def remarks(self, uses_ray: bool) -> List[str]:
        """What a payload is to be told; one without Ray runs in the first component alone."""
        return [role.remark for role in (self.roles if uses_ray else self.roles[:1]) if role.remark]

    def head_environ(self, environ: Mapping[str, str]) -> Dict[str, str]:
        """The environment of what runs beside the head, such as payloads: with the GPUs of the head's component alone."""
        own = {**environ, **self.roles[0].environ}
        return {name: value for name, value in own.items() if value is not None}


def stage(
    loop: Loop, spec: RuntimeSpec, here: NodeResources, private: Scratch, on_message: Callable[[WorkerNode, Message], None]
) -> Stage:
    """Set the nodes of a runtime up on this machine, with what is simulated; nothing starts before it is told to.

    Args:
        loop: where everything happens.
        spec: the start record.
        here: what this machine grants.
        private: scratch directory of the runtime.
        on_message: called with a member and its message.
    """
    visible = visible_gpus(os.environ, here.num_gpus)
    if not spec.components:
        return Stage(spec, [alone(spec, here, visible)], None)
    roles = cast(spec, here, visible)
    plain = settled(spec)
    return Stage(plain, roles, SimulatedNodes(loop, plain, roles, ClusterDirs(private), on_message))


class SimulatedNode(WorkerNode):
    """The Ray node of one component besides the head's."""

    def __init__(self, place: int, machine: NodeResources) -> None:
        super().__init__(place, machine.hostname, machine.component)
        self.machine = machine.facts()

    @property
    def here(self) -> bool:
        """It is where the head's runtime is."""
        return True


class SimulatedNodes:
    """The nodes of the other components, in the way of a `ConnectedWorkers`.

    Args:
        loop: where everything happens.
        spec: the start record.
        roles: what each component is given, the head's first.
        corners: where their directories are made.
        on_message: called with a member and its message.
    """

    def __init__(
        self,
        loop: Loop,
        spec: RuntimeSpec,
        roles: Sequence[Role],
        corners: ClusterDirs,
        on_message: Callable[[WorkerNode, Message], None],
    ) -> None:
        self._loop = loop
        self._on_message = on_message
        self._figures: Dict[str, Dict[str, Dict[str, Any]]] = {}
        self.members: Dict[int, WorkerNode] = {}
        self._followers: Dict[int, Follower] = {}
        for place, role in enumerate(roles):
            if place:
                self.members[place] = member = SimulatedNode(place, role.machine)
                self._followers[place] = Follower(
                    loop,
                    spec,
                    role.machine,
                    lambda _: corners.take(),
                    functools.partial(self._say, member),
                    functools.partial(_log, role.machine.name),
                    role.environ,
                    alone=False,
                )

    @property
    def pids(self) -> List[int]:
        """The processes below which all of Ray is that is theirs."""
        return [pid for follower in self._followers.values() for pid in follower.pids]

    def order(self, places: Iterable[int], **order: Any) -> None:
        """Tell some nodes something."""
        for place in places:
            self._followers[place].obey(order)

    def facts(self) -> List[Dict[str, Any]]:
        """The nodes, and what each is given."""
        return [member.facts() for member in self.members.values()]

    def log_tail(self, member: WorkerNode) -> str:  # noqa: ARG002
        """They have no logs but the runtime's."""
        return ""

    def measure(self, nonce: str, jobs: Optional[List[str]]) -> None:
        """Measure what each node uses for one payload; `jobs` are its own in a Ray cluster that is shared."""
        self._figures[nonce] = {}
        self.order(self.members, op="measure", id=nonce, jobs=jobs)

    def collect(self, nonce: str, done: Callable[[Dict[str, Dict[str, Any]]], None]) -> None:
        """End the measuring for a payload and hand over the figures."""
        self.order(self.members, op="report", id=nonce)
        figures = self._figures.pop(nonce)
        self._loop.call_later(0.0, lambda: done(figures))

    def dismiss(self) -> None:
        """End all of them at once."""
        for follower in self._followers.values():
            follower.end()

    def wait_gone(self, patience: float) -> None:
        """They were below this runtime, which has ended what is."""

    def _say(self, member: WorkerNode, **message: Any) -> None:
        if message["event"] == "usage":
            if message["usage"] is not None and message["id"] in self._figures:
                self._figures[message["id"]][member.title] = message["usage"]
        elif message["event"] == "failed":
            # Not from within what the head is just doing.
            self._loop.call_later(0.0, lambda: self._on_message(member, message))


def _log(name: str, text: str) -> None:
    sys.stderr.write("rayslurm on %s: %s\n" % (name, text))
    sys.stderr.flush()
