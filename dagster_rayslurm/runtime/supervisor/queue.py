"""Queue of payloads: admission by resources and time, and fair order.

Whose turn it is: first come, first served within a run, turn about between runs; and what fits beside what runs. Pure.

Whether a payload has a place in this runtime: what it claims, what nodes grant, and whether the time suffices. Pure.

The payloads of a runtime: who waits, who runs, who is next, and whether the time suffices.
"""

from __future__ import annotations

import collections
from dataclasses import replace
from typing import (
    Any,
    Callable,
    Deque,
    Dict,
    Generic,
    Iterable,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    TypeVar,
)

from ..node.resources import NodeResources, footprint_error, payload_footprint
from ..payload.payload import Payload
from ..protocol.spec import PayloadSpec, RuntimeSpec, SpecError, node_spec

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Items of several runs.

    The run whose turn it is keeps it until its first item fits, so that nobody starves who asks for more than others.
    A run that got its turn goes to the end of the line.

    Args:
        run_of: which run an item belongs to.
    """

    def __init__(self, run_of: Callable[[T], str]) -> None:
        self._run_of = run_of
        self._runs: Dict[str, Deque[T]] = {}
        self._turns: Deque[str] = collections.deque()

    def __len__(self) -> int:
        return sum(map(len, self._runs.values()))

    def __iter__(self) -> Iterator[T]:
        """The items in the order in which they are taken, if all of them fit."""
        left = {run: list(items) for run, items in self._runs.items()}
        turns = collections.deque(self._turns)
        while turns:
            run = turns.popleft()
            yield left[run].pop(0)
            if left[run]:
                turns.append(run)

    def add(self, item: T) -> None:
        """Line up behind the items of the same run."""
        run = self._run_of(item)
        if run not in self._runs:
            self._runs[run] = collections.deque()
            self._turns.append(run)
        self._runs[run].append(item)

    def remove(self, item: T) -> bool:
        """Take an item out of the line, wherever it stands; False if it is not there."""
        run = self._run_of(item)
        if item not in self._runs.get(run, ()):
            return False
        self._runs[run].remove(item)
        if not self._runs[run]:
            del self._runs[run]
            self._turns.remove(run)
        return True

    def take(self, fits: Callable[[T], bool], could: Callable[[T], bool] = lambda _: True) -> Optional[T]:
        """The item whose turn it is, if it fits; None otherwise.

        Args:
            fits: whether there is room for an item now.
            could: whether room is all that an item waits for; others are passed over, and keep their place.
        """
        for run in self._turns:
            item = next((each for each in self._runs[run] if could(each)), None)
            if item is None:
                continue
            if not fits(item):
                return None
            self._turns.remove(run)
            self._runs[run].remove(item)
            if self._runs[run]:
                self._turns.append(run)
            else:
                del self._runs[run]
            return item
        return None


class Claim(NamedTuple):
    """What a payload claims of each node while others run beside it."""

    cpus: int = 0
    gpus: int = 0


Claims = Mapping[Optional[str], Claim]
"""What a payload claims of the nodes of each component, or what these grant; None is the one of nodes that are all alike."""


def room_for(claims: Claims, running: Iterable[Claims], capacities: Claims, limit: int) -> bool:
    """Whether there is room for one more in every component that it claims something of; alone it always fits.

    Args:
        claims: what it claims.
        running: what those claim that run.
        capacities: what the nodes grant.
        limit: most payloads that run at once.
    """
    others: List[Claims] = list(running)
    return all(
        fits(claim, [each.get(name, Claim()) for each in others], capacities[name], limit) for name, claim in claims.items()
    )


def fits(claim: Claim, running: Iterable[Claim], capacity: Claim, limit: int) -> bool:
    """Whether there is room for one more; alone it always fits.

    Args:
        claim: what it claims.
        running: what those claim that run.
        capacity: what a node grants.
        limit: most payloads that run at once.
    """
    others: List[Claim] = list(running)
    if not others:
        return True
    cpus = claim.cpus + sum(other.cpus for other in others)
    gpus = claim.gpus + sum(other.gpus for other in others)
    return len(others) < limit and cpus <= capacity.cpus and gpus <= capacity.gpus


class Closing(Exception):
    """The runtime takes no more payloads, as the message says; the caller starts another one."""


class Misfit(SpecError):
    """The payload asks for more than the nodes grant; the message names the field."""


def capacities_of(machines: Iterable[NodeResources]) -> Claims:
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


def misfit(spec: PayloadSpec, machines: Sequence[NodeResources]) -> Optional[str]:
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


class PayloadQueue:
    """Keeps the payloads.

    Args:
        spec: the runtime, which limits how many run at once.
        claims: what a payload claims of the nodes.
        now: the clock.
    """

    def __init__(self, spec: RuntimeSpec, claims: Callable[[Payload], Claims], now: Callable[[], float]) -> None:
        self.durations: Dict[str, float] = {}
        """Seconds that the longest run of each step took."""
        self.running: List[Payload] = []
        self.served = 0
        """Payloads that came so far."""
        self.margin = spec.drain_margin
        """Seconds that a payload is taken to need at least if it does not say."""
        self._spec = spec
        self._claims = claims
        self._now = now
        self._queue: FairQueue[Payload] = FairQueue(lambda payload: payload.spec.run_id)
        self._since: Dict[Payload, float] = {}
        """When each payload came, and from its turn on when that was."""
        self._turns = 0

    def __iter__(self) -> Iterator[Payload]:
        """Those that wait, in their order, and those that run."""
        return iter([*self._queue, *self.running])

    def __len__(self) -> int:
        return len(self._queue) + len(self.running)

    @property
    def waiting(self) -> List[Payload]:
        """Those that wait, in their order."""
        return list(self._queue)

    def add(self, payload: Payload) -> None:
        """Have a payload wait."""
        self.served += 1
        self._queue.add(payload)
        self._since[payload] = self._now()

    def next(self, capacities: Claims, could: Callable[[Payload], bool]) -> Optional[Payload]:
        """The payload that starts now, if one does; it counts as running.

        Args:
            capacities: what the nodes grant.
            could: whether room is all that a payload waits for.
        """
        running = [self._claims(payload) for payload in self.running]
        limit = self._spec.max_concurrent_payloads
        payload = self._queue.take(lambda each: room_for(self._claims(each), running, capacities, limit), could)
        if payload is not None:
            self._turns += 1
            self._since[payload] = self._now()
            self.running.append(payload)
        return payload

    def remove(self, payload: Payload) -> None:
        """Forget a payload that has ended, but for the time that it took."""
        since = self._since.pop(payload)
        if payload in self.running:
            self.running.remove(payload)
            step = payload.spec.step
            if payload.ending.by_itself:  # What was cut off, or hung, tells nothing of the next one.
                self.durations[step] = max(self._now() - since, self.durations.get(step, 0.0))
        else:
            self._queue.remove(payload)

    def refusal(self, spec: PayloadSpec, left: Optional[float]) -> Optional[str]:
        """Why another payload could not end in time; the first one always may, as another allocation has no more of it.

        Those ahead of it count by what is known of them, or a queue of short ones would look like hours; one whose turn comes
        too late after all is given back.
        """
        if not self.served:
            return None
        ahead = [time_known(payload.spec, self.durations) for payload in self._queue]
        for each in self.running:
            ahead.append(max(0.0, time_known(each.spec, self.durations) - (self._now() - self._since[each])))
        return too_little_time(self._needs(spec), ahead, self._spec.max_concurrent_payloads, left)

    def late(self, left: Optional[float]) -> List[Tuple[Payload, str]]:
        """Those that wait and cannot end in time any more, and why."""
        if not self._turns:
            return []
        found = [(payload, too_little_time(self._needs(payload.spec), [], 1, left)) for payload in self._queue]
        return [(payload, why) for payload, why in found if why is not None]

    def facts(self, unwritten: Iterable[Payload] = ()) -> List[Dict[str, Any]]:
        """What a session tells of its payloads; `age` is seconds since they came, or since their turn.

        Args:
            unwritten: those that have ended, but whose `end` cannot be written for now.
        """
        here = [(payload, "running" if payload in self.running else "waiting", self._since[payload]) for payload in self]
        gone = [(payload, "ended", self._now()) for payload in unwritten if payload not in self._since]
        return [
            {
                "run_dir": payload.run_dir,
                "run_id": payload.spec.run_id,
                "step": payload.spec.step,
                "state": state,
                "age": round(self._now() - since, 1),
            }
            for payload, state, since in here + gone
        ]

    def _needs(self, spec: PayloadSpec) -> float:
        return time_needed(spec, self.durations, self.margin)
