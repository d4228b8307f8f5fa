"""Host and guests of the start barrier.

A meeting's guest: the runtime of any other component says what becomes of its own, and hears from the host what follows.

A meeting's host: the first component's runtime hears of all, and tells all what follows.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import asdict
from typing import Any, Dict, List, Optional, Sequence

from ..process.loop import Loop, Timer
from ..protocol.heartbeat import COMES_BACK, PING_INTERVAL, SILENCE, Heartbeat, Peer
from ..protocol.rpc import Channel, Message
from ..protocol.rpc_client import Place as Reached
from ..protocol.rpc_client import RpcClient, places
from ..protocol.rpc_server import RpcServer
from ..protocol.spec import BarrierSpec, SpecError
from .barrier import Ended, Order, Place, Ready, StartBarrier, Take, Told, event_of, told, who_is_missing

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

    def __init__(self, loop: Loop, spec: BarrierSpec, hosts: Sequence[str], take: Take) -> None:
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
        self._host = RpcClient(loop, spec.key, found_at, self._joined, self._hear, self._disconnected, self._out_of_reach)
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


_LATE = 30.0
"""Seconds after a failure in which one that has not come yet is still waited for: it may be about to."""
_FAREWELL = 5.0
"""Seconds that the host outstays the others: an exit code of its own other than 0 has `srun` end them at once."""


class _Guest(Peer):
    """The runtime of another component, as the host sees it."""

    def __init__(self, component: str) -> None:
        super().__init__()
        self.component = component
        self.joined = False
        self.left = False
        """Whether it has said that it goes."""
        self._missed: Optional[Timer] = None

    @property
    def awaited(self) -> bool:
        """Whether it is here, or has time left to come back."""
        return self.here or self._missed is not None

    def expect(self, missed: Optional[Timer]) -> None:
        """Give it time to come back, instead of what it had before; None if it is here, or is expected no more."""
        if self._missed is not None:
            self._missed.cancel()
        self._missed = missed


class Host:
    """The first component's side: hears of all, and tells all what follows.

    Args:
        loop: where everything happens.
        spec: who meets.
        take: told what follows for the host's own component.
        loopback: whether the others are on this machine.
    """

    def __init__(self, loop: Loop, spec: BarrierSpec, take: Take, loopback: bool = False) -> None:
        self._loop = loop
        self._spec = spec
        self._take = take
        self._gathering = StartBarrier(spec.components)
        self._orders: List[Order] = []
        self._over: Optional[Order] = None
        """That all is over, while the host itself still stays."""
        self._guests: Dict[str, _Guest] = {each: _Guest(each) for each in spec.components if each != spec.component_id}
        self._door = RpcServer(loop, spec.key, spec.ports, self._welcome, loopback)
        loop.call_later(spec.patience, self._too_late)
        self._pulse = Heartbeat(loop, self._guests.values, self._gone)

    @property
    def exit_code(self) -> int:
        """That of the first failure anywhere."""
        return self._gathering.exit_code

    @property
    def alone(self) -> bool:
        """Whether there is nobody to wait for."""
        return all(not guest.here or self._gathering.has_ended(guest.component) for guest in self._guests.values())

    def ready(self, place: Place) -> None:
        """Say that this component's payload could start, and where it is."""
        self._follow(self._gathering.ready(self._spec.component_id, asdict(place)))

    def ended(self, failure: Optional[str], exit_code: int, terminated: bool = False) -> None:
        """Say that this component's payload has ended, and what went wrong."""
        self._follow(self._gathering.ended(self._spec.component_id, failure, exit_code, terminated))

    def interrupted(self, why: str, exit_code: int) -> bool:
        """Say that this runtime was told to end although its payload has ended; whether it may go at once."""
        alone = self.alone
        self._follow(self._gathering.interrupted(self._spec.component_id, why, exit_code))
        return alone

    def tell(self, what: str) -> None:
        """Say something about this component to the users of the others."""
        self._follow([told(self._spec.component_id, what)])

    def close(self) -> None:
        """Wait until the others have tidied up, and let nobody in any more."""
        self._pulse.stop()
        deadline = self._loop.now() + _FAREWELL
        for guest in self._guests.values():
            if guest.channel is not None:
                guest.channel.wait_end(deadline)
        self._door.close()

    def _follow(self, orders: List[Order]) -> None:
        for order in orders:
            self._orders.append(order)
            for guest in self._guests.values():
                guest.send(**order)
            # Not from within the call that led to it.
            if order["op"] == "over":
                self._over = order
                self._loop.call_later(COMES_BACK, self._leave)
                self._loop.call_later(0.0, self._leave_when_known)
                continue
            if order["op"] == "end":
                self._loop.call_later(_LATE, self.forget_absent)
            self._loop.call_later(0.0, functools.partial(self._take, order))

    def _leave_when_known(self) -> None:
        """Go once everybody who is here, or about to be back, knows that all is over: nobody else could tell them."""
        if all(guest.left or not guest.awaited for guest in self._guests.values()):
            self._leave()

    def _leave(self) -> None:
        if self._over is not None:
            over, self._over = self._over, None
            self._take(over)

    def _welcome(self, channel: Channel, message: Message) -> None:
        component = message.get("component")
        guest = self._guests.get(component) if isinstance(component, str) else None
        if guest is None:
            return channel.close()
        guest.came(channel, self._loop.now())
        guest.joined = True
        guest.expect(None)
        self._gathering.came(guest.component)
        channel.on_message(functools.partial(self._hear, guest))
        channel.on_gone(functools.partial(self._gone, guest, channel, "its connection ended"))
        for order in self._orders:
            channel.send(**order)

    def _hear(self, guest: _Guest, message: Message) -> None:
        guest.heard = self._loop.now()
        if message.get("event") == "pong":
            return
        component = guest.component
        try:
            event = event_of(message)
        except SpecError as error:
            why = "what its runtime says cannot be understood: %s" % error
            print("rayslurm: component %r: %s" % (component, why), file=sys.stderr)
            return self._follow(self._gathering.lost(component, why))
        if isinstance(event, Ready):
            self._follow(self._gathering.ready(component, asdict(event.place)))
        elif isinstance(event, Ended):
            self._follow(self._gathering.ended(component, event.failure, event.exit_code, event.terminated))
        elif isinstance(event, Told):
            self._follow([order for order in [told(component, event.what)] if order not in self._orders])
        else:
            guest.left = True
            self._leave_when_known()

    def _gone(self, guest: _Guest, channel: Channel, why: str) -> None:
        if not guest.went(channel):
            return

        def missed() -> None:
            guest.expect(None)
            if not guest.left:
                self._follow(self._gathering.lost(guest.component, "its runtime is lost: %s" % why))
            self._leave_when_known()

        guest.expect(self._loop.call_later(COMES_BACK, missed))

    def _too_late(self) -> None:
        if self._gathering.started:
            return
        if self._gathering.failed is None:
            heard = [guest.component for guest in self._guests.values() if guest.joined]
            why = who_is_missing(self._gathering, [self._spec.component_id, *heard], self._spec.patience)
            self._take({"op": "give-up", "why": why})
        self.forget_absent()

    def forget_absent(self) -> None:
        """Wait no more for those that never came."""
        for guest in self._guests.values():
            if not guest.joined:
                self._follow(self._gathering.forget(guest.component))
