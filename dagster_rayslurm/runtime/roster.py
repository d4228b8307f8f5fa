"""The payloads of a runtime: who waits, who runs, who is next, and whether the time suffices."""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Tuple

from .admission import time_known, time_needed, too_little_time
from .payload import Payload
from .queueing import Claims, FairQueue, room_for
from .spec import PayloadSpec, RuntimeSpec


class Roster:
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
