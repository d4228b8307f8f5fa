"""A meeting's guest: the runtime of any other component says what becomes of its own, and hears from the host what follows."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any, List, Optional, Sequence

from .channel import Message
from .dialler import Dialler, places
from .dialler import Place as Reached
from .gathering import Order
from .loop import Loop, Timer
from .meeting import Place, Take
from .presence import COMES_BACK, PING_INTERVAL, SILENCE
from .spec import MeetingSpec

_MARGIN = 30.0
"""Seconds beyond the host's own patience after which one that was never reached is given up."""


class Guest:
    """The side of any other component: says what becomes of its own, and hears what follows.

    Args:
        loop: where everything happens.
        spec: who meets.
        hosts: where the host's runtime may be reached.
        take: told what follows.
    """

    def __init__(self, loop: Loop, spec: MeetingSpec, hosts: Sequence[str], take: Take) -> None:
        self._loop = loop
        self._spec = spec
        self._take = take
        self._events: List[Message] = []
        """All that was said; a host that is reached anew hears it once more."""
        self._problem = ""
        self._orders: List[Order] = []
        self._ended: Optional[bool] = None
        """Whether its payload has ended well; None if it has not ended."""
        self._given_up = False
        self._lost: Optional[Timer] = loop.call_later(spec.patience + _MARGIN, self._give_up)
        self._heard = loop.now()
        found_at = places(hosts, spec.ports)
        self._host = Dialler(loop, spec.key, found_at, self._joined, self._hear, self._disconnected, self._out_of_reach)
        self._host.dial()
        self._watch()

    @property
    def exit_code(self) -> int:
        """A component's end must not end the others; what it was is the host's to tell, if there is one."""
        return 1 if self._given_up and not self._ended else 0

    @property
    def alone(self) -> bool:
        """Whether there is nobody to wait for."""
        return not self._host.joined

    def ready(self, place: Place) -> None:
        """Say that this component's payload could start, and where it is."""
        self._say(event="ready", place=asdict(place))

    def ended(self, failure: Optional[str], exit_code: int, terminated: bool = False) -> None:
        """Say that this component's payload has ended, and what went wrong."""
        self._ended = failure is None
        self._say(event="ended", failure=failure, exit_code=exit_code, terminated=terminated)
        if self._given_up:
            self._take({"op": "over", "final": False})

    def interrupted(self, why: str, exit_code: int) -> bool:  # noqa: ARG002
        """Say that this runtime was told to end although its payload has ended; whether it may go at once."""
        self.tell("its runtime and its cluster end, as " + why)
        self._say(event="leaving")
        return True

    def tell(self, what: str) -> None:
        """Say something about this component to the users of the others."""
        self._say(event="told", what=what)

    def close(self) -> None:
        """Let go of the host."""
        self._host.close()

    def forget_absent(self) -> None:
        """Wait no more for a host that never came."""
        if not self._host.joined and self._lost is not None:
            self._lost.cancel()
            self._give_up()

    def _say(self, **event: Any) -> None:
        self._events.append(event)
        self._host.send(**event)

    def _out_of_reach(self, place: Reached, why: str) -> None:
        self._problem = "%s:%d: %s" % (place[0], place[1], why)

    def _joined(self) -> None:
        self._heard = self._loop.now()
        if self._lost is not None:
            self._lost.cancel()
        self._lost = None
        self._host.send(component=self._spec.component_id)
        for event in self._events:
            self._host.send(**event)

    def _disconnected(self) -> None:
        self._lost = self._lost or self._loop.call_later(COMES_BACK, self._give_up)

    def _give_up(self) -> None:
        """Go on without the host: this component's payload ends, and this runtime after it."""
        self._given_up = True
        self._host.close()
        why = "its runtime cannot be reached (%s)" % (self._problem or "it is gone")
        self._take({"op": "end", "component": self._spec.components[0], "why": why})
        if self._ended is not None:
            self._take({"op": "over", "final": False})

    def _hear(self, message: Message) -> None:
        self._heard = self._loop.now()
        if message.get("op") == "ping":
            return self._host.send(event="pong")
        if message in self._orders:
            return  # A host tells all of them once more after a reconnection.
        self._orders.append(message)
        if message.get("op") == "over":
            self._say(event="leaving")
        self._take(message)

    def _watch(self) -> None:
        """Look for the host anew once it was not heard for too long."""
        if self._host.joined and self._loop.now() - self._heard > SILENCE:
            print("rayslurm: the runtime of component %r is silent" % self._spec.components[0], file=sys.stderr)
            self._host.redial()
        self._loop.call_later(PING_INTERVAL, self._watch)
