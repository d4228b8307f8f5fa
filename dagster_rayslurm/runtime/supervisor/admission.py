"""Whether a payload can be admitted: resources of the nodes, room beside running payloads, and time. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence

from ..node.footprint import payload_footprint
from ..node.resources import NodeResources, footprint_error
from ..protocol.spec import PayloadSpec, SpecError, node_spec


class Closing(Exception):
    """The runtime takes no more payloads; the message says why. The caller starts another runtime."""


class Misfit(SpecError):
    """The payload needs more than the nodes grant; the message names the field."""


class Claim(NamedTuple):
    """What a payload claims of each node while others run beside it, or what every node grants."""

    cpus: int = 0
    gpus: int = 0


Claims = Mapping[Optional[str], Claim]
"""Claims by component; None is the component of nodes that are all alike."""


def capacities_of(machines: Iterable[NodeResources]) -> Claims:
    """What every node of each component grants."""
    known: Dict[Optional[str], Claim] = {}
    for machine in machines:
        least = known.get(machine.component, Claim(machine.num_cpus, machine.num_gpus))
        known[machine.component] = Claim(min(least.cpus, machine.num_cpus), min(least.gpus, machine.num_gpus))
    return known


def claims_of(spec: PayloadSpec, fresh: bool, capacities: Claims, head: Optional[str]) -> Claims:
    """What a payload claims of the nodes.

    Args:
        spec: the payload.
        fresh: whether it gets a cluster of its own, which takes whole nodes unless the payload says what it needs.
        capacities: what the nodes grant.
        head: the component of the head, the only one on which a payload without Ray runs.
    """
    concerned = capacities if spec.uses_ray else {head: capacities[head]}
    return {name: claim_of(spec, fresh, capacity) for name, capacity in concerned.items()}


def claim_of(spec: PayloadSpec, fresh: bool, capacity: Claim) -> Claim:
    """What a payload claims of each node of one component; see `claims_of`."""
    whole = capacity if fresh else Claim()
    return Claim(
        whole.cpus if spec.want_cpus is None else spec.want_cpus,
        whole.gpus if spec.want_gpus is None else spec.want_gpus,
    )


def room_for(claims: Claims, running: Iterable[Claims], capacities: Claims, limit: int) -> bool:
    """Whether there is room for one more payload in every component that it claims; alone it always fits.

    Args:
        limit: most payloads that run at once.
    """
    others = list(running)
    return all(
        fits(claim, [each.get(name, Claim()) for each in others], capacities[name], limit) for name, claim in claims.items()
    )


def fits(claim: Claim, running: Iterable[Claim], capacity: Claim, limit: int) -> bool:
    """Whether there is room for one more claim on a node; alone it always fits."""
    others = list(running)
    if not others:
        return True
    cpus = claim.cpus + sum(other.cpus for other in others)
    gpus = claim.gpus + sum(other.gpus for other in others)
    return len(others) < limit and cpus <= capacity.cpus and gpus <= capacity.gpus


def misfit(spec: PayloadSpec, machines: Sequence[NodeResources]) -> Optional[str]:
    """What a payload needs that a node does not grant, as a sentence; None if it fits.

    Where nodes differ by component, a payload without Ray is compared with the head, where it runs, and the nodes of each
    component with what its own cluster needs there.

    Args:
        machines: what the nodes grant, the head first.
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
    """A payload with Ray as one component sees it. Its claim on each node is not what each node must have."""
    own = node_spec(spec.ray, component) if spec.ray is not None else None
    return replace(spec, ray=own, want_cpus=None, want_gpus=None)


def time_known(spec: PayloadSpec, durations: Mapping[str, float]) -> float:
    """Seconds that a payload takes as far as known: its own limit, else the longest run of its step so far, else 0."""
    return durations.get(spec.step, 0.0) if spec.time_limit is None else spec.time_limit


def time_needed(spec: PayloadSpec, durations: Mapping[str, float], margin: float) -> float:
    """Seconds that must be left for a payload; at least `margin` if it has no time limit of its own."""
    known = time_known(spec, durations)
    return known if spec.time_limit is not None else max(known, margin)


def too_little_time(need: float, ahead: List[float], at_once: int, left: Optional[float]) -> Optional[str]:
    """Why a payload cannot end before its allocation does, as a sentence; None if it can.

    Args:
        need: seconds that it may take.
        ahead: seconds that each payload before it may still take.
        at_once: number of payloads that run at the same time.
        left: seconds until the allocation's time limit; None if it has none.
    """
    wait = sum(ahead) / at_once
    if left is None or wait + need <= left:
        return None
    queue = " and may wait %d s for its turn" % wait if wait >= 1 else ""
    return "its time limit comes in %d s, and the payload may take %d s%s" % (left, need, queue)
