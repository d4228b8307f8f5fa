"""Start barrier of the separate topology: its state and its messages. Pure.

Components that run a payload each: when all of them start, what ends them, and when all is over. Pure.

What is said where the runtimes of components meet that run a payload each: they start together, the first failure ends all.

The first component's runtime is the host (`meeting_host`). It stays until all have ended, so that the job does, and its exit
code is that of the first failure. The others, its guests (`meeting_guest`), say what becomes of theirs, and stay until the host
says that all is over: until then each component's cluster serves the payloads of all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional, Sequence, Set, Union

from ..protocol.rpc import Message
from ..protocol.spec import SpecError, from_fields

Order = Dict[str, Any]
"""What all components are told: "start" with where they are, "end" with whose failure ends them, "told" with what one of
them has to tell the users of all, and "over", which says whether Slurm has no reason to run them once more."""


class StartBarrier:
    """What is known of the components, and what follows from it.

    Args:
        components: all of them.

    Attributes:
        places: where the components are that are ready.
        failed: the component that failed first; None if none has.
        exit_code: what the first failure makes of the job's own exit code.
    """

    def __init__(self, components: Sequence[str]) -> None:
        self.places: Dict[str, Dict[str, Any]] = {}
        self.failed: Optional[str] = None
        self.exit_code = 0
        self._components = list(components)
        self._ended: Set[str] = set()
        self._missed: Set[str] = set()
        """Those that are waited for no more, unless they come."""
        self._terminated = False
        self._started = False
        self._told_over = False

    @property
    def started(self) -> bool:
        """Whether the payloads were told to start."""
        return self._started

    @property
    def over(self) -> bool:
        """Whether every component has ended, or is waited for no more."""
        return len(self._ended | self._missed) == len(self._components)

    def missing(self) -> List[str]:
        """The components that are not ready."""
        return [each for each in self._components if each not in self.places]

    def has_ended(self, component: str) -> bool:
        """Whether nothing more is expected of a component."""
        return component in self._ended | self._missed

    def ready(self, component: str, place: Dict[str, Any]) -> List[Order]:
        """Take note that a component's payload could start."""
        self.places[component] = place
        if self._started or self.failed is not None or self.missing():
            return []
        self._started = True
        return [{"op": "start", "components": {each: self.places[each] for each in self._components}}]

    def came(self, component: str) -> None:
        """Take note that a component's runtime is there: it is waited for, even if it was given up before."""
        self._missed.discard(component)

    def forget(self, component: str) -> List[Order]:
        """Wait no more for a component that never came."""
        self._missed.add(component)
        return self._perhaps_over()

    def lost(self, component: str, why: str) -> List[Order]:
        """Take note that a component's runtime is gone, and wait for it no more: a failure, unless its payload had ended."""
        ended = component in self._ended
        self._missed.add(component)
        orders = [told(component, why)] if ended and not self.over else [] if ended else self._fail(component, why, 1)
        return orders + self._perhaps_over()

    def interrupted(self, component: str, why: str, exit_code: int) -> List[Order]:
        """Take note that a component's runtime was told to end whose payload may have ended well before."""
        self._terminated = True
        return [] if self.over else self._fail(component, why, exit_code)

    def ended(self, component: str, failure: Optional[str], exit_code: int, terminated: bool = False) -> List[Order]:
        """Take note that a component's payload has ended.

        Args:
            component: the component.
            failure: what went wrong there; None for success.
            exit_code: what it makes of an exit code.
            terminated: whether a signal from outside ended it, so that Slurm may run all of them again.
        """
        if component in self._ended:
            return []
        self._ended.add(component)
        self._terminated = self._terminated or terminated
        orders = self._fail(component, failure, exit_code or 1) if failure is not None else []
        return orders + self._perhaps_over()

    def _fail(self, component: str, why: str, exit_code: int) -> List[Order]:
        """The first failure ends all."""
        if self.failed is not None:
            return []
        self.failed, self.exit_code = component, exit_code
        return [{"op": "end", "component": component, "why": why}]

    def _perhaps_over(self) -> List[Order]:
        if not self.over or self._told_over:
            return []
        self._told_over = True
        return [{"op": "over", "final": not self._terminated and not self._missed}]


def told(component: str, what: str) -> Order:
    """What one component has to tell the users of all."""
    return {"op": "told", "component": component, "what": what}


def who_is_missing(gathering: StartBarrier, heard: Sequence[str], patience: float) -> str:
    """Why the payloads do not start in time.

    Args:
        gathering: what is known.
        heard: components whose runtime has been here.
        patience: seconds that they had.
    """
    said = [
        "%r (%s)" % (each, "its cluster is not up" if each in heard else "no word from its runtime")
        for each in gathering.missing()
    ]
    return "not all components were ready within %g s, missing: %s" % (patience, ", ".join(said))


Take = Callable[[Order], None]


@dataclass(frozen=True)
class Place:
    """Where a component is, as the payloads of all are told.

    Attributes:
        host: what the first of its nodes calls itself.
        address: the address of that node for the others.
        ray_address: of its cluster; None without one.
        nodes: all its nodes.
    """

    host: str
    address: str
    ray_address: Optional[str]
    nodes: List[str]


@dataclass(frozen=True)
class Ready:
    """A guest's payload could start."""

    place: Place


@dataclass(frozen=True)
class Ended:
    """A guest's payload has ended; see `StartBarrier.ended`."""

    failure: Optional[str]
    exit_code: int
    terminated: bool


@dataclass(frozen=True)
class Told:
    """A guest has something to tell the users of all."""

    what: str


@dataclass(frozen=True)
class Leaving:
    """A guest tidies up: it knows that all is over, or was told to end."""


Event = Union[Ready, Ended, Told, Leaving]

_EVENTS = {"ready": Ready, "ended": Ended, "told": Told, "leaving": Leaving}


def event_of(message: Message) -> Event:
    """What a guest says.

    Raises:
        SpecError: nothing that is known.
    """
    name = message.get("event")
    if not isinstance(name, str) or name not in _EVENTS:
        raise SpecError("the event %r is not known" % (name,))
    said = {key: value for key, value in message.items() if key != "event"}
    event: Event = from_fields(_EVENTS[name], said, "the event %r" % name)
    return event
