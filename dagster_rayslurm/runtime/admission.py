"""Whether a payload has a place in this runtime: what it claims, what nodes grant, and whether the time suffices. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Dict, Iterable, List, Mapping, Optional, Sequence

from .components import node_spec
from .footprint import footprint_error, payload_footprint
from .machine import Machine
from .queueing import Claim, Claims
from .spec import PayloadSpec, SpecError


class Closing(Exception):
    """The runtime takes no more payloads, as the message says; the caller starts another one."""


class Misfit(SpecError):
    """The payload asks for more than the nodes grant; the message names the field."""


def capacities_of(machines: Iterable[Machine]) -> Claims:
    """What every node grants; by component, where there are any."""
    known: Dict[Optional[str], Claim] = {}
    for machine in machines:
        least = known.get(machine.component, Claim(machine.num_cpus, machine.num_gpus))
        known[machine.component] = Claim(min(least.cpus, machine.num_cpus), min(least.gpus, machine.num_gpus))
    return known


def claims_of(spec: PayloadSpec, fresh: bool, capacities: Claims, head: Optional[str]) -> Claims:
    """What a payload claims of the nodes.

    Args:
        spec: the payload.
        fresh: whether it gets a cluster of its own.
        capacities: what the nodes grant, by component.
        head: the component of the head; one without Ray runs there and nowhere else.
    """
    concerned = capacities if spec.uses_ray else {head: capacities[head]}
    return {name: claim_of(spec, fresh, capacity) for name, capacity in concerned.items()}


def claim_of(spec: PayloadSpec, fresh: bool, capacity: Claim) -> Claim:
    """What a payload claims of each node.

    Args:
        spec: the payload.
        fresh: whether it gets a cluster of its own, which takes whole nodes if it does not say what it needs.
        capacity: what every node grants.
    """
    whole = capacity if fresh else Claim()
    return Claim(
        whole.cpus if spec.want_cpus is None else spec.want_cpus,
        whole.gpus if spec.want_gpus is None else spec.want_gpus,
    )


def misfit(spec: PayloadSpec, machines: Sequence[Machine]) -> Optional[str]:
    """What a payload asks for that a node does not grant, as a sentence; or None.

    Where nodes differ by component, a payload without Ray is held against the head's, where it runs; and one with a cluster
    of its own against what that is to have on each.

    Args:
        spec: the payload.
        machines: what the nodes grant, the head first.
    """
    if machines[0].component is None:
        held = [(spec, machine) for machine in machines]
    elif not spec.uses_ray:
        held = [(spec, machines[0])]
    else:
        held = [(_within(spec, machine.component), machine) for machine in machines]
    problems = (footprint_error(payload_footprint(own), machine) for own, machine in held)
    return next((problem for problem in problems if problem), None)


def _within(spec: PayloadSpec, component: Optional[str]) -> PayloadSpec:
    """What a payload with Ray asks of the nodes of one component; what it claims of each node is not what each must have."""
    own = node_spec(spec.ray, component) if spec.ray is not None else None
    return replace(spec, ray=own, want_cpus=None, want_gpus=None)


def time_known(spec: PayloadSpec, durations: Mapping[str, float]) -> float:
    """Seconds that a payload takes as far as that is known: its own limit, else the longest that its step took so far, else 0.

    Args:
        spec: the payload.
        durations: the longest that each step took here.
    """
    return durations.get(spec.step, 0.0) if spec.time_limit is None else spec.time_limit


def time_needed(spec: PayloadSpec, durations: Mapping[str, float], margin: float) -> float:
    """Seconds that there must be for a payload.

    Args:
        spec: the payload.
        durations: the longest that each step took here.
        margin: what is assumed at least of one that has no limit.
    """
    known = time_known(spec, durations)
    return known if spec.time_limit is not None else max(known, margin)


def too_little_time(need: float, ahead: List[float], at_once: int, left: Optional[float]) -> Optional[str]:
    """Why a payload cannot end before its allocation does, as a sentence; or None.

    Args:
        need: seconds that it may take.
        ahead: seconds that those before it still may take.
        at_once: how many run at the same time.
        left: seconds until the allocation's time limit; None if it has none.
    """
    wait = sum(ahead) / at_once
    if left is None or wait + need <= left:
        return None
    queue = " and may wait %d s for its turn" % wait if wait >= 1 else ""
    return "its time limit comes in %d s, and the payload may take %d s%s" % (left, need, queue)
