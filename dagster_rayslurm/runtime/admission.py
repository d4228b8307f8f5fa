"""Whether a payload has a place in this runtime: what it claims, what nodes grant, and whether the time suffices. Pure."""

from __future__ import annotations

from typing import Iterable, List, Mapping, Optional

from .footprint import footprint_error, payload_footprint
from .machine import Machine
from .queueing import Claim
from .spec import PayloadSpec, SpecError


class Closing(Exception):
    """The runtime takes no more payloads, as the message says; the caller starts another one."""


class Misfit(SpecError):
    """The payload asks for more than the nodes grant; the message names the field."""


def capacity_of(machines: Iterable[Machine]) -> Claim:
    """What every node grants."""
    known = list(machines)
    return Claim(min(machine.num_cpus for machine in known), min(machine.num_gpus for machine in known))


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


def misfit(spec: PayloadSpec, machines: Iterable[Machine]) -> Optional[str]:
    """What a payload asks for that a node does not grant, as a sentence; or None."""
    problems = (footprint_error(payload_footprint(spec), machine) for machine in machines)
    return next((problem for problem in problems if problem), None)


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
