"""Whose turn it is: first come, first served within a run, turn about between runs; and what fits beside what runs. Pure."""

from __future__ import annotations

import collections
from typing import Callable, Deque, Dict, Generic, Iterable, Iterator, List, Mapping, NamedTuple, Optional, TypeVar

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
