"""Decide whether a payload can run here: whether the nodes are large enough, have room now, and have enough time left.

All functions are without side effects.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence

from ..node.resources import NodeResources, footprint_error, payload_footprint
from ..protocol.spec import PayloadSpec, SpecError, node_spec


class Closing(Exception):
    """Raised when the runtime does not take a payload because the runtime is about to end; the message says why.

    The payload can run in another runtime, which the client starts.
    """


class Misfit(SpecError):
    """Raised when a payload needs more than the nodes of the allocation have; the message names the setting."""


class Claim(NamedTuple):
    """An amount of CPUs and GPUs per node: the part that one payload reserves while it runs, or the capacity of the node."""

    cpus: int = 0
    gpus: int = 0


Claims = Mapping[Optional[str], Claim]
"""CPUs and GPUs per node, by component of the Slurm allocation; the only key is None if the allocation has no components."""


def capacities_of(machines: Iterable[NodeResources]) -> Claims:
    """The CPUs and GPUs that every node of a component has at least, by component."""
    known: Dict[Optional[str], Claim] = {}
    for machine in machines:
        least = known.get(machine.component, Claim(machine.num_cpus, machine.num_gpus))
        known[machine.component] = Claim(min(least.cpus, machine.num_cpus), min(least.gpus, machine.num_gpus))
    return known


def claims_of(spec: PayloadSpec, fresh: bool, capacities: Claims, head: Optional[str]) -> Claims:
    """The CPUs and GPUs that a payload reserves on each node, by component; a payload without Ray reserves only on the head.

    Args:
        spec: the payload.
        fresh: whether it gets a Ray cluster of its own, which takes whole nodes unless the payload says what it needs.
        capacities: the CPUs and GPUs of each component's nodes.
        head: the component of the head node.
    """
    concerned = capacities if spec.uses_ray else {head: capacities[head]}
    return {name: claim_of(spec, fresh, capacity) for name, capacity in concerned.items()}


def claim_of(spec: PayloadSpec, fresh: bool, capacity: Claim) -> Claim:
    """The CPUs and GPUs that a payload reserves on each node of one component; see `claims_of`."""
    whole = capacity if fresh else Claim()
    return Claim(
        whole.cpus if spec.want_cpus is None else spec.want_cpus,
        whole.gpus if spec.want_gpus is None else spec.want_gpus,
    )


def room_for(claims: Claims, running: Iterable[Claims], capacities: Claims, limit: int) -> bool:
    """Whether the nodes have room for one more payload now. A payload always fits if no other one runs.

    Args:
        claims: what the payload reserves.
        running: what each running payload has reserved.
        capacities: the CPUs and GPUs of each component's nodes.
        limit: most payloads that run at once.
    """
    others = list(running)
    return all(
        fits(claim, [each.get(name, Claim()) for each in others], capacities[name], limit) for name, claim in claims.items()
    )


def fits(claim: Claim, running: Iterable[Claim], capacity: Claim, limit: int) -> bool:
    """Whether a node has room for one more payload, which reserves `claim`; always true if no payload runs. See `room_for`."""
    others = list(running)
    if not others:
        return True
    cpus = claim.cpus + sum(other.cpus for other in others)
    gpus = claim.gpus + sum(other.gpus for other in others)
    return len(others) < limit and cpus <= capacity.cpus and gpus <= capacity.gpus


def misfit(spec: PayloadSpec, machines: Sequence[NodeResources]) -> Optional[str]:
    """What a payload needs that a node does not have, as a sentence; None if all nodes are large enough.

    If the allocation has components, a payload without Ray is compared with the head node, where it runs. A payload with Ray
    is compared with every node: with what its Ray cluster needs on nodes of that component.

    Args:
        machines: the resources that Slurm granted on each node, the head first.
    """
    if machines[0].component is None:
        compared = [(spec, machine) for machine in machines]
    elif not spec.uses_ray:
        compared = [(spec, machines[0])]
    else:
        compared = [(_within(spec, machine.component), machine) for machine in machines]
    problems = (footprint_error(payload_footprint(own), machine) for own, machine in compared)
    return next((problem for problem in problems if problem), None)


def _within(spec: PayloadSpec, component: Optional[str]) -> PayloadSpec:
    """A payload's spec, reduced to what its Ray cluster needs on the nodes of one component; without CPUs and GPUs to reserve."""
    own = node_spec(spec.ray, component) if spec.ray is not None else None
    return replace(spec, ray=own, want_cpus=None, want_gpus=None)


def time_known(spec: PayloadSpec, durations: Mapping[str, float]) -> float:
    """Estimated seconds that a payload takes: its own time limit, else the longest run of its step so far, else 0."""
    return durations.get(spec.step, 0.0) if spec.time_limit is None else spec.time_limit


def time_needed(spec: PayloadSpec, durations: Mapping[str, float], margin: float) -> float:
    """Seconds that the allocation must have left to start a payload; at least `margin` if the payload has no time limit."""
    known = time_known(spec, durations)
    return known if spec.time_limit is not None else max(known, margin)


def too_little_time(need: float, ahead: List[float], at_once: int, left: Optional[float]) -> Optional[str]:
    """Why a payload would not finish before its allocation's time limit, as a sentence; None if it has time enough.

    Args:
        need: seconds that the payload may take.
        ahead: seconds that each earlier payload, waiting or running, may still take.
        at_once: number of payloads that run at the same time.
        left: seconds until the allocation's time limit; None if the allocation has no limit.
    """
    wait = sum(ahead) / at_once
    if left is None or wait + need <= left:
        return None
    queue = " and may wait %d s for its turn" % wait if wait >= 1 else ""
    return "its time limit comes in %d s, and the payload may take %d s%s" % (left, need, queue)
