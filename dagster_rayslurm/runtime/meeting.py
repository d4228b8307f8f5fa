"""What is said where the runtimes of components meet that run a payload each: they start together, the first failure ends all.

The first component's runtime is the host (`meeting_host`). It stays until all have ended, so that the job does, and its exit
code is that of the first failure. The others, its guests (`meeting_guest`), say what becomes of theirs, and stay until the host
says that all is over: until then each component's cluster serves the payloads of all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, List, Optional, Union

from .channel import Message
from .gathering import Order
from .spec import SpecError, from_fields

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
    """A guest's payload has ended; see `Gathering.ended`."""

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
