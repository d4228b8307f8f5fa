"""The queue of a runtime's payloads: decides which payloads are accepted, when each payload starts, and when the runtime ends.

Payloads of the same Dagster run start in the order of their arrival, and the runs take turns. `Queue` is the whole state; each
method that changes the state returns a new `Queue`. Nothing here has side effects: `supervisor` acts on the decisions.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Callable, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from ..node.resources import NodeResources, footprint_error, payload_footprint
from ..payload.payload import Payload
from ..protocol.messages import End, EndReason
from ..protocol.spec import PayloadSpec, SpecError, node_spec

# Seconds that a closing session stays reachable after its last payload, so that late clients learn why it closes.
_CLOSING_TIME = 0.5
# Seconds that a session that served no payload stays reachable, so that the runs that started it learn why it failed.
_FAILURE_TIME = 5.0
# Seconds that a session must have been idle before it may end in favour of another job: a run's next step may still come.
_MIN_IDLE = 5.0
# Seconds that a session waits for its first payload at least: on NFS, the run that created it may see it a minute late.
_FIRST_PAYLOAD_TIME = 90.0
# Reasons for which a session may end without having served a payload, and yet has not failed.
_REGULAR = (EndReason.CANCEL, EndReason.TERMINATED, EndReason.TIMEOUT)


class Closing(Exception):
    """Raised when a runtime refuses a payload, because it accepts none any more or has too little time left.

    The message says why.
    """


class Misfit(SpecError):
    """Raised when a runtime refuses a payload that needs more CPUs, GPUs or memory than a node has.

    The message names the setting.
    """


class Claim(NamedTuple):
    """A number of CPUs and a number of GPUs on one node: what a payload reserves there, or what the node has."""

    cpus: int = 0
    gpus: int = 0


# CPUs and GPUs on each node, by component of the Slurm allocation; the only key is None if the allocation has no components.
Claims = Mapping[Optional[str], Claim]


def capacities_of(machines: Iterable[NodeResources]) -> Claims:
    """Returns the CPUs and GPUs that every node has, by component: the least number on any node of the component.

    Without components, the only key is None.
    """
    known: Dict[Optional[str], Claim] = {}
    for machine in machines:
        least = known.get(machine.component, Claim(machine.num_cpus, machine.num_gpus))
        known[machine.component] = Claim(min(least.cpus, machine.num_cpus), min(least.gpus, machine.num_gpus))
    return known


def claims_of(spec: PayloadSpec, fresh: bool, capacities: Claims) -> Claims:
    """Returns the CPUs and GPUs that a payload reserves on each node, by component.

    The numbers come from `spec`. Where `spec` has no number, a payload with a Ray cluster of its own (`fresh`) reserves all of a
    node, and any other payload none. A payload without Ray reserves nothing outside the component of the head node. `capacities`
    is a result of `capacities_of`.
    """

    def claim(capacity: Claim) -> Claim:
        cpus, gpus = capacity if fresh else Claim()
        return Claim(cpus if spec.want_cpus is None else spec.want_cpus, gpus if spec.want_gpus is None else spec.want_gpus)

    concerned = list(capacities) if spec.uses_ray else list(capacities)[:1]
    return {name: claim(capacities[name]) for name in concerned}


def room_for(claims: Claims, running: Iterable[Claims], capacities: Claims, limit: int) -> bool:
    """Whether a payload that reserves `claims` may run now, beside the running payloads, which reserve `running`.

    On each of its nodes, either no other payload runs, or enough CPUs and GPUs are free and fewer than `limit` payloads run.
    `capacities` is a result of `capacities_of`.
    """
    everywhere = list(running)
    for name, claim in claims.items():
        others = [each.get(name, Claim()) for each in everywhere]
        cpus, gpus = claim.cpus + sum(each.cpus for each in others), claim.gpus + sum(each.gpus for each in others)
        if others and (len(others) >= limit or cpus > capacities[name].cpus or gpus > capacities[name].gpus):
            return False
    return True


def misfit(spec: PayloadSpec, machines: Sequence[NodeResources]) -> Optional[str]:
    """Returns an error text if a payload needs more of a resource than a node of `machines` has; None if all nodes have enough.

    In an allocation with components, a payload without Ray is compared only with the head node, the first of `machines`. A
    payload with Ray is compared with all nodes. The payload's Ray cluster may have other settings for each component; a node is
    compared with the settings of the node's component.
    """
    for machine in machines if machines[0].component is None or spec.uses_ray else machines[:1]:
        own = spec
        if machine.component is not None and spec.uses_ray:
            ray = None if spec.ray is None else node_spec(spec.ray, machine.component)
            own = replace(spec, ray=ray, want_cpus=None, want_gpus=None)
        problem = footprint_error(payload_footprint(own), machine)
        if problem:
            return problem
    return None


class Entry(NamedTuple):
    """A payload that waits in the queue or runs. The queue reads only the `spec` of the payload."""

    payload: Payload
    fresh: bool  # Whether the payload gets a Ray cluster of its own.
    since: float  # Clock time at which the payload was added or, once it runs, started.

    @property
    def spec(self) -> PayloadSpec:
        return self.payload.spec


class Next(Enum):
    """What the supervisor does when the runtime has no payload; `Queue.settled` returns a member and a delay in seconds.

    FINISH: all work is done. End the runtime now; in the separate topology, when the payloads of all components have ended.
    STOP: the runtime accepts no payloads any more. End the runtime after the delay, in which clients can still learn the reason.
    IDLE: close the session after the delay, unless a payload comes before.
    """

    FINISH = "no other payload will come"
    STOP = "leave"
    IDLE = "end because no other payload came"


@dataclass(frozen=True)
class Queue:
    """The waiting and running payloads of a runtime, and whether the runtime accepts more payloads.

    The runtime of a session has an `idle_timeout`; a runtime without `idle_timeout` ends after its payloads. The parameter `now`
    of the methods is the present time on the clock of `Loop.now`, in seconds.
    """

    limit: int = 1  # Most payloads that run at once on a node.
    # Seconds that the allocation must have left, at least, to start a payload without a time limit.
    margin: float = 0.0
    idle_timeout: Optional[float] = None
    # Whether the runtime is in a Slurm job. If so, a session that failed stays reachable for `_FAILURE_TIME` seconds, so that the
    # runs that started the session can learn why it failed.
    in_allocation: bool = False
    idle_since: float = 0.0
    arrived: Tuple[Entry, ...] = ()  # The waiting payloads in the order in which they came.
    turns: Tuple[str, ...] = ()  # The Dagster runs of the waiting payloads; the first has its turn.
    running: Tuple[Entry, ...] = ()
    # Seconds that the longest run of each step took, by name of step.
    durations: Mapping[str, float] = field(default_factory=dict)
    served: int = 0  # Number of payloads added so far.
    any_started: bool = False
    ending: Optional[str] = None  # Why the payloads are being ended; None while they are not.
    draining: Optional[str] = None  # Why no more payloads are accepted while the present ones go on; None otherwise.
    failed: Optional[str] = None  # Why a session failed before it served a payload; None if it did not.

    @property
    def closing(self) -> Optional[str]:
        """The reason why no more payloads are accepted; None while payloads are accepted."""
        return self.ending or self.draining

    @property
    def waiting(self) -> List[Entry]:
        """The waiting payloads in the order in which they start if there is room for all: the Dagster runs take turns."""
        seen: Dict[str, int] = {}
        places = []
        for entry in self.arrived:
            run = entry.spec.run_id
            places.append((seen.get(run, 0), self.turns.index(run)))
            seen[run] = seen.get(run, 0) + 1
        return [self.arrived[number] for number in sorted(range(len(places)), key=places.__getitem__)]

    def idle_for(self, now: float) -> Optional[float]:
        """The seconds for which the runtime has had no payload, waiting or running; None while it has a payload."""
        return None if self.arrived or self.running else now - self.idle_since

    # ---- Payloads come, start and go

    def refusal(self, spec: PayloadSpec, left: Optional[float], now: float) -> Optional[str]:
        """Returns an explaining sentence if a new payload would not finish in the `left` seconds of the job; None if it would.

        The wait for its turn is estimated from the expected durations of the payloads ahead. The result is also None for the
        first payload of a runtime, and if `left` is None because no time limit is known. If the wait takes longer than estimated,
        `late` finds the payload later.
        """
        if not self.served:
            return None  # A new allocation would have no more time.
        ahead = [self._known(entry.spec) for entry in self.arrived]
        ahead += [max(0.0, self._known(entry.spec) - (now - entry.since)) for entry in self.running]
        return self._too_little_time(spec, sum(ahead) / self.limit, left)

    def late(self, left: Optional[float]) -> List[Tuple[Payload, str]]:
        """Returns the waiting payloads that would not finish in the `left` seconds of the job, each with an explaining sentence.

        The list is empty if `left` is None because no time limit is known, or if no payload has started yet.
        """
        found = [(entry.payload, self._too_little_time(entry.spec, 0.0, left)) for entry in self.waiting if self.any_started]
        return [(payload, why) for payload, why in found if why is not None]

    def added(self, payload: Payload, fresh: bool, now: float) -> Queue:
        """Returns the queue with one more waiting payload, behind the other payloads of the same Dagster run.

        `fresh` is True if the payload gets a Ray cluster of its own.
        """
        run = payload.spec.run_id
        turns = self.turns if run in self.turns else (*self.turns, run)
        return replace(self, arrived=(*self.arrived, Entry(payload, fresh, now)), turns=turns, served=self.served + 1)

    def start_next(self, capacities: Claims, may_start: Callable[[Payload], bool], now: float) -> Tuple[Queue, Optional[Payload]]:
        """Returns a queue in which one more payload runs, and this payload; returns `self` and None if no payload can start now.

        The Dagster runs take turns; of a run, the first payload for which `may_start` returns True is chosen, and a run without
        such a payload is skipped. If the chosen payload has no room on its nodes, nothing starts, and its run keeps the turn, so
        that small payloads of other runs cannot delay a large one for ever. `capacities` is a result of `capacities_of`.
        """
        running = [claims_of(each.spec, each.fresh, capacities) for each in self.running]
        for run in self.turns if self.ending is None else ():
            entry = next((each for each in self.arrived if each.spec.run_id == run and may_start(each.payload)), None)
            if entry is None:
                continue
            if not room_for(claims_of(entry.spec, entry.fresh, capacities), running, capacities, self.limit):
                break
            queue = self._without(entry)
            turns = (*(each for each in queue.turns if each != run), *(each for each in queue.turns if each == run))
            running_now = (*queue.running, entry._replace(since=now))
            return replace(queue, turns=turns, running=running_now, any_started=True), entry.payload
        return self, None

    def removed(self, payload: Payload, ran_to_exit: bool, now: float) -> Queue:
        """Returns the queue without `payload`, which was waiting or running and has ended.

        If a running payload's process ended by itself (`ran_to_exit`), the new queue remembers the payload's duration, unless
        another payload of the same step has taken longer.
        """
        entry = next(each for each in (*self.arrived, *self.running) if each.payload is payload)
        if entry in self.arrived:
            return self._without(entry)
        durations = dict(self.durations)
        if ran_to_exit:
            durations[entry.spec.step] = max(now - entry.since, durations.get(entry.spec.step, 0.0))
        return replace(self, running=tuple(each for each in self.running if each is not entry), durations=durations)

    # ---- The runtime ends

    def ended_by(self, end: End) -> Queue:
        """Returns the queue of a runtime that begins to end all its payloads, for the reason `end`, and accepts no more.

        Returns `self` if the payloads are being ended already; the first reason stays.
        """
        if self.ending is not None:
            return self
        why = end.message or "it ends"
        failed = why if self.idle_timeout is not None and not self.served and end.reason not in _REGULAR else None
        return replace(self, ending=why, failed=failed)

    def may_give_way(self, now: float) -> bool:
        """Returns whether the session may end before its idle timeout, so that another Slurm job of its user can start.

        It may if it has served a payload and has now been idle for `_MIN_IDLE` seconds or more.
        """
        idle = self.idle_for(now)  # If a session has served no payload, the run that started the session is about to send one.
        return idle is not None and idle >= _MIN_IDLE and self.served > 0

    def settled(self, now: float) -> Tuple[Queue, Optional[Tuple[Next, float]]]:
        """Returns the new queue, and how a runtime without payloads ends: what to do (`Next`), and after how many seconds.

        The second part is None in two cases: the runtime has a payload, or the runtime is no session and its first payload has
        not come yet. The new queue differs from `self` only for an open session without payloads: it records that the session is
        idle since `now`.
        """
        if self.arrived or self.running:
            return self, None
        if self.failed is not None and self.in_allocation:
            return self, (Next.STOP, _FAILURE_TIME)
        if self.ending is not None or (self.idle_timeout is None and self.served):
            return self, (Next.FINISH, 0.0)
        if self.draining is not None:
            return self, (Next.STOP, _CLOSING_TIME if self.served else _FAILURE_TIME)
        if self.idle_timeout is not None:
            return replace(self, idle_since=now), (Next.IDLE, max(self.idle_timeout, 0.0 if self.served else _FIRST_PAYLOAD_TIME))
        return self, None

    def _without(self, entry: Entry) -> Queue:
        arrived = tuple(each for each in self.arrived if each is not entry)
        left = {each.spec.run_id for each in arrived}
        return replace(self, arrived=arrived, turns=tuple(run for run in self.turns if run in left))

    def _known(self, spec: PayloadSpec) -> float:
        """The seconds that a payload is expected to take: its time limit, else the longest run of its step so far, else 0."""
        return self.durations.get(spec.step, 0.0) if spec.time_limit is None else spec.time_limit

    def _too_little_time(self, spec: PayloadSpec, wait: float, left: Optional[float]) -> Optional[str]:
        need = self._known(spec) if spec.time_limit is not None else max(self._known(spec), self.margin)
        if left is None or wait + need <= left:
            return None
        turn = " and may wait %d s for its turn" % wait if wait >= 1 else ""
        return "its time limit comes in %d s, and the payload may take %d s%s" % (left, need, turn)
