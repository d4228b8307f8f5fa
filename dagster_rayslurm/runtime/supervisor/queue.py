"""The queue of payloads: in order of arrival within a Dagster run, and in turn between runs."""

from __future__ import annotations

import collections
from typing import Any, Callable, Deque, Dict, Generic, Iterable, Iterator, List, Optional, Tuple, TypeVar

from ..payload.payload import Payload
from ..protocol.spec import PayloadSpec, RuntimeSpec
from .admission import Claims, room_for, time_known, time_needed, too_little_time

T = TypeVar("T")


class FairQueue(Generic[T]):
    """A queue that takes one item of each Dagster run in turn.

    A run keeps its turn until its first item fits, so that small items of other runs cannot hold up a large one for ever.
    Then the next run has its turn.

    Args:
        run_of: returns the run id of an item.
    """

    def __init__(self, run_of: Callable[[T], str]) -> None:
        self._run_of = run_of
        self._runs: Dict[str, Deque[T]] = {}
        self._turns: Deque[str] = collections.deque()

    def __len__(self) -> int:
        return sum(map(len, self._runs.values()))

    def __iter__(self) -> Iterator[T]:
        """Iterate over the items in the order in which `take` returns them if all of them fit."""
        left = {run: list(items) for run, items in self._runs.items()}
        turns = collections.deque(self._turns)
        while turns:
            run = turns.popleft()
            yield left[run].pop(0)
            if left[run]:
                turns.append(run)

    def add(self, item: T) -> None:
        """Add an item behind the other items of its run."""
        run = self._run_of(item)
        if run not in self._runs:
            self._runs[run] = collections.deque()
            self._turns.append(run)
        self._runs[run].append(item)

    def remove(self, item: T) -> bool:
        """Remove an item, wherever it stands. Returns whether it was in the queue."""
        run = self._run_of(item)
        if item not in self._runs.get(run, ()):
            return False
        self._runs[run].remove(item)
        if not self._runs[run]:
            del self._runs[run]
            self._turns.remove(run)
        return True

    def take(self, fits: Callable[[T], bool], is_eligible: Callable[[T], bool] = lambda _: True) -> Optional[T]:
        """Remove and return the item whose turn it is; None if that item does not fit now, or no item is eligible.

        Args:
            fits: returns whether an item has room now.
            is_eligible: returns whether an item could start if it had room; items that could not are skipped and keep their
                place.
        """
        for run in self._turns:
            item = next((each for each in self._runs[run] if is_eligible(each)), None)
            if item is None:
                continue
            if not fits(item):
                return None
            self.remove(item)
            if run in self._runs:
                self._turns.remove(run)
                self._turns.append(run)
            return item
        return None


class PayloadQueue:
    """The waiting and the running payloads of a runtime.

    Args:
        spec: the start record, which limits how many payloads run at once.
        claims: returns the CPUs and GPUs that a payload reserves on each node.
        now: returns the seconds on a monotonic clock.
    """

    def __init__(self, spec: RuntimeSpec, claims: Callable[[Payload], Claims], now: Callable[[], float]) -> None:
        self.durations: Dict[str, float] = {}
        """Seconds that the longest run of each step took, by name of step."""
        self.running: List[Payload] = []
        self.served = 0
        """Number of payloads added so far."""
        self.margin = spec.drain_margin
        """Seconds that the allocation must have left, at least, to start a payload without a time limit."""
        self._spec = spec
        self._claims = claims
        self._now = now
        self._queue: FairQueue[Payload] = FairQueue(lambda payload: payload.spec.run_id)
        self._since: Dict[Payload, float] = {}
        """Clock time at which each waiting payload was added, or each running one started."""
        self._any_started = False

    def __iter__(self) -> Iterator[Payload]:
        """Iterate over the waiting payloads in their order, then the running ones."""
        return iter([*self._queue, *self.running])

    def __len__(self) -> int:
        return len(self._queue) + len(self.running)

    @property
    def waiting(self) -> List[Payload]:
        """The waiting payloads in their order."""
        return list(self._queue)

    def add(self, payload: Payload) -> None:
        """Add a waiting payload."""
        self.served += 1
        self._queue.add(payload)
        self._since[payload] = self._now()

    def next(self, capacities: Claims, is_eligible: Callable[[Payload], bool]) -> Optional[Payload]:
        """Move the next payload that fits now to the running ones, and return it; None if no payload can start.

        Args:
            capacities: the CPUs and GPUs of each component's nodes.
            is_eligible: returns whether a payload could start if it had room.
        """
        running = [self._claims(payload) for payload in self.running]
        limit = self._spec.max_concurrent_payloads
        payload = self._queue.take(lambda each: room_for(self._claims(each), running, capacities, limit), is_eligible)
        if payload is not None:
            self._any_started = True
            self._since[payload] = self._now()
            self.running.append(payload)
        return payload

    def remove(self, payload: Payload) -> None:
        """Remove a payload that has ended, and remember how long its step took."""
        since = self._since.pop(payload)
        if payload not in self.running:
            self._queue.remove(payload)
            return
        self.running.remove(payload)
        if payload.ending.ran_to_exit:  # The time of a payload that was cut off says nothing about the next one.
            step = payload.spec.step
            self.durations[step] = max(self._now() - since, self.durations.get(step, 0.0))

    def refusal(self, spec: PayloadSpec, left: Optional[float]) -> Optional[str]:
        """Why a new payload would not finish before the allocation's time limit, as a sentence; None if it may be added.

        The first payload is always taken, because a new allocation would have no more time. The wait is estimated from the
        known durations of the payloads ahead. If the estimate is too low, `late` finds the payload when its turn comes.

        Args:
            left: seconds until the time limit; None if the allocation has none.
        """
        if not self.served:
            return None
        ahead = [time_known(payload.spec, self.durations) for payload in self._queue]
        for each in self.running:
            ahead.append(max(0.0, time_known(each.spec, self.durations) - (self._now() - self._since[each])))
        return too_little_time(self._needs(spec), ahead, self._spec.max_concurrent_payloads, left)

    def late(self, left: Optional[float]) -> List[Tuple[Payload, str]]:
        """The waiting payloads that cannot finish before the time limit any more, each with the reason as a sentence."""
        if not self._any_started:
            return []
        found = [(payload, too_little_time(self._needs(payload.spec), [], 1, left)) for payload in self._queue]
        return [(payload, why) for payload, why in found if why is not None]

    def facts(self, unwritten: Iterable[Payload] = ()) -> List[Dict[str, Any]]:
        """Directory, run, step, state and age of each payload, for `describe`.

        `age` is the seconds since a waiting payload was added, or a running one started.

        Args:
            unwritten: payloads that have ended, but whose `end` record cannot be written for now.
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
