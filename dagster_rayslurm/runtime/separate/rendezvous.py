"""Connections between the runtimes of the components for the barrier: the host is the RPC server, the guests are its clients.

The host is the runtime of the first component and keeps the barrier's state. Each guest is the runtime of another component.
Both sides keep all messages and send them again after a reconnection, so that no message is lost with a connection.
"""

from __future__ import annotations

import sys
from typing import Callable, Dict, List, Optional, Sequence, Union

from ..process.loop import Loop, Timer
from ..protocol.rpc import (
    HEARTBEAT_INTERVAL,
    HEARTBEAT_TIMEOUT,
    RECONNECT_GRACE,
    Address,
    Channel,
    ChannelListener,
    ClientListener,
    Message,
    Peer,
    RpcClient,
    RpcServer,
    all_addresses,
)
from ..protocol.spec import BarrierSpec, SpecError
from .barrier import (
    Barrier,
    Command,
    ComponentAddress,
    Ended,
    Event,
    Fail,
    Finish,
    Leaving,
    Note,
    Notify,
    Ready,
    decode_command,
    decode_event,
    encode_command,
    encode_event,
)

_HOST_MARGIN = 30.0
"""Seconds beyond `BarrierSpec.patience`, the barrier's timeout, until a guest gives up a host that it never reached."""
_LATE_GUEST_GRACE = 30.0
"""Seconds after a failure until the host gives up guests that never connected: they may be about to connect."""
_LEAVE_TIMEOUT = 5.0
"""Seconds that the host waits at its end for the guests to end: `srun` ends them when the host's exit code is not 0."""


class TimedOut:
    """The host's instruction to its own component when the barrier timed out: end your payload.

    Its end is then a failure, for which the host sends `Fail` to the guests.
    """

    def __init__(self, why: str) -> None:
        self.why = why


HandleCommand = Callable[[Union[Command, TimedOut]], None]
"""Called with each command that this component must follow."""


class Guest(ClientListener):
    """The barrier in the runtime of a component other than the first: sends events to the host, and receives its commands.

    Args:
        loop: the event loop.
        spec: the start record's part about the barrier.
        hosts: names or addresses at which the barrier's host may be reached.
        handle: called with each command for this component.
    """

    def __init__(self, loop: Loop, spec: BarrierSpec, hosts: Sequence[str], handle: HandleCommand) -> None:
        self._loop = loop
        self._spec = spec
        self._handle = handle
        self._events: List[Event] = []
        self._commands: List[Command] = []
        self._problem = ""
        self._succeeded: Optional[bool] = None
        """Whether this component's payload succeeded; None until it ends."""
        self._host_given_up = False
        self._timeout: Optional[Timer] = loop.call_later(spec.patience + _HOST_MARGIN, self._give_up)
        """Gives the host up when it is due; None while the host is connected."""
        self._host = RpcClient(loop, spec.key, all_addresses(hosts, spec.ports), self)
        self._host.connect()
        self._check_host()

    @property
    def exit_code(self) -> int:
        """0 unless the host is lost and the payload did not succeed: any other exit code makes `srun` end all components.

        As long as there is a host, its exit code reports the failure.
        """
        return 1 if self._host_given_up and not self._succeeded else 0

    @property
    def alone(self) -> bool:
        """Whether the host is not connected, so that this runtime need not wait for the other components before it ends."""
        return not self._host.is_connected

    def ready(self, place: ComponentAddress) -> None:
        """Tell the host that this component's payload can start, and where the component runs."""
        self._send(Ready(place))

    def ended(self, event: Ended) -> None:
        """Tell the host that this component's payload has ended; without a host, end this runtime as well."""
        self._succeeded = event.failure is None
        self._send(event)
        if self._host_given_up:
            self._handle(Finish(final=False))

    def interrupted(self, why: str, exit_code: int) -> bool:  # noqa: ARG002
        """Called when this runtime received a signal after its payload had ended. Returns whether the runtime may end at once."""
        self.notify("its runtime and its cluster end, as " + why)
        self._send(Leaving())
        return True

    def notify(self, what: str) -> None:
        """Report a fault of this component, such as its lost Ray cluster, to the other components.

        Their runtimes record it, so that it appears in the Dagster log.
        """
        self._send(Note(what))

    def close(self) -> None:
        self._host.close()

    def give_up_absent(self) -> None:
        """Stop waiting for the host if it is not connected now."""
        if not self._host.is_connected and self._timeout is not None:
            self._timeout.cancel()
            self._give_up()

    def connected(self) -> None:
        if self._timeout is not None:
            self._timeout.cancel()
        self._timeout = None
        self._host.send(component=self._spec.component_id)
        for event in self._events:
            self._host.send(**encode_event(event))

    def received(self, message: Message) -> None:
        command = decode_command(message)
        if command in self._commands:
            return  # The host sends all commands again after a reconnection.
        self._commands.append(command)
        if isinstance(command, Finish):
            self._send(Leaving())
        self._handle(command)

    def disconnected(self) -> None:
        self._timeout = self._timeout or self._loop.call_later(RECONNECT_GRACE, self._give_up)

    def unreachable(self, address: Address, why: str) -> None:
        self._problem = "%s:%d: %s" % (address[0], address[1], why)

    def _send(self, event: Event) -> None:
        self._events.append(event)
        self._host.send(**encode_event(event))

    def _give_up(self) -> None:
        """Go on without the host, as if it had failed: end this component's payload, and then this runtime."""
        self._host_given_up = True
        self._host.close()
        self._handle(Fail(self._spec.components[0], "its runtime cannot be reached (%s)" % (self._problem or "it is gone")))
        if self._succeeded is not None:
            self._handle(Finish(final=False))

    def _check_host(self) -> None:
        """Reconnect if the host has been silent for too long."""
        if self._host.is_connected and self._host.silent_for > HEARTBEAT_TIMEOUT:
            print("rayslurm: the runtime of component %r is silent" % self._spec.components[0], file=sys.stderr)
            self._host.reconnect()
        self._loop.call_later(HEARTBEAT_INTERVAL, self._check_host)


class _ConnectedGuest(Peer):
    """The runtime of another component, as the host sees it."""

    def __init__(self, component: str) -> None:
        super().__init__()
        self.component = component
        self.joined = False
        """Whether the guest has ever connected."""
        self.leaving = False
        """Whether the guest has said that its runtime ends, so that the end of its connection is no loss."""
        self.grace: Optional[Timer] = None
        """Gives the guest up when it is due; set from the loss of a connection until the guest reconnects or is given up."""

    @property
    def is_awaited(self) -> bool:
        """Whether the guest is connected, or may still reconnect."""
        return self.here or self.grace is not None


class Host(ChannelListener):
    """The barrier in the runtime of the first component: keeps the state, receives the guests' events, and sends commands.

    Args:
        loop: the event loop.
        spec: the start record's part about the barrier.
        handle: called with each command for the host's own component.
        loopback: whether all components are on this machine.
    """

    def __init__(self, loop: Loop, spec: BarrierSpec, handle: HandleCommand, loopback: bool = False) -> None:
        self._loop = loop
        self._spec = spec
        self._component = spec.component_id
        self._handle = handle
        self._barrier = Barrier(spec.components)
        self._commands: List[Command] = []
        self._finish: Optional[Finish] = None
        """The command to end all runtimes, between the decision and the time when the host follows it itself."""
        self._guests = {each: _ConnectedGuest(each) for each in spec.components if each != spec.component_id}
        self._guest_of_channel: Dict[Channel, _ConnectedGuest] = {}
        self._server = RpcServer(loop, spec.key, spec.ports, self, loopback, heartbeat=True)
        loop.call_later(spec.patience, self._time_out)

    @property
    def exit_code(self) -> int:
        """The exit code of the first failure in any component; 0 if there is none."""
        return self._barrier.exit_code

    @property
    def alone(self) -> bool:
        """Whether no connected guest has a payload that still has to end, so that this runtime may end without waiting."""
        return all(not guest.here or self._barrier.has_ended(guest.component) for guest in self._guests.values())

    def ready(self, place: ComponentAddress) -> None:
        """Called when the host's own payload can start; `place` says where the host's component runs."""
        self._send(self._barrier.ready(self._component, place))

    def ended(self, event: Ended) -> None:
        """Called when the host's own payload has ended."""
        self._send(self._barrier.ended(self._component, event))

    def interrupted(self, why: str, exit_code: int) -> bool:
        """Called when this runtime received a signal after its payload had ended. Returns whether the runtime may end at once."""
        alone = self.alone
        self._send(self._barrier.interrupted(self._component, why, exit_code))
        return alone

    def notify(self, what: str) -> None:
        """Report a fault of the host's component, such as its lost Ray cluster, to the guests.

        Their runtimes record it, so that it appears in the Dagster log.
        """
        self._send([Notify(self._component, what)])

    def close(self) -> None:
        """Wait for the guests to disconnect, at most `_LEAVE_TIMEOUT`, and then stop the server."""
        self._server.stop_heartbeat()
        deadline = self._loop.now() + _LEAVE_TIMEOUT
        for guest in self._guests.values():
            if guest.channel is not None:
                guest.channel.wait_closed(deadline)
        self._server.close()

    def give_up_absent(self) -> None:
        """Stop waiting for guests that never connected."""
        for guest in self._guests.values():
            if not guest.joined:
                self._send(self._barrier.give_up(guest.component))

    def received(self, channel: Channel, message: Message) -> None:
        """Handle a guest's message; the first one of a connection only names the guest's component."""
        guest = self._guest_of_channel.get(channel)
        if guest is None:
            return self._introduce(channel, message.get("component"))
        component = guest.component
        try:
            event = decode_event(message)
        except SpecError as error:
            why = "what its runtime says cannot be understood: %s" % error
            print("rayslurm: component %r: %s" % (component, why), file=sys.stderr)
            return self._send(self._barrier.lost(component, why))
        if isinstance(event, Ready):
            self._send(self._barrier.ready(component, event.place))
        elif isinstance(event, Ended):
            self._send(self._barrier.ended(component, event))
        elif isinstance(event, Note):
            self._send([command for command in [Notify(component, event.what)] if command not in self._commands])
        else:
            guest.leaving = True
            self._finish_if_known()

    def closed(self, channel: Channel, why: str) -> None:
        """Give a guest that lost its connection some time to reconnect, after which its component is lost."""
        guest = self._guest_of_channel.pop(channel, None)
        if guest is None or not guest.detach(channel):
            return
        lost = guest

        def give_up() -> None:
            lost.grace = None
            if not lost.leaving:
                self._send(self._barrier.lost(lost.component, "its runtime is lost: %s" % why))
            self._finish_if_known()

        guest.grace = self._loop.call_later(RECONNECT_GRACE, give_up)

    def _introduce(self, channel: Channel, component: object) -> None:
        """Take a new connection as that of a component's guest, and send it all earlier commands."""
        guest = self._guests.get(component) if isinstance(component, str) else None
        if guest is None:
            return channel.close()
        if guest.channel is not None:
            del self._guest_of_channel[guest.channel]
        if guest.grace is not None:
            guest.grace.cancel()
        guest.attach(channel)
        guest.joined, guest.grace = True, None
        self._guest_of_channel[channel] = guest
        self._barrier.connected(guest.component)
        for command in self._commands:
            channel.send(**encode_command(command))

    def _send(self, commands: Sequence[Command]) -> None:
        """Send commands to all guests, and then follow them here."""
        for command in commands:
            self._commands.append(command)
            for guest in self._guests.values():
                guest.send(**encode_command(command))
            if isinstance(command, Finish):
                self._finish = command
                self._loop.call_later(RECONNECT_GRACE, self._follow_finish)
                self._loop.call_later(0.0, self._finish_if_known)
                continue
            if isinstance(command, Fail):
                self._loop.call_later(_LATE_GUEST_GRACE, self.give_up_absent)
            self._handle_later(command)

    def _handle_later(self, command: Command) -> None:
        """Follow a command in the next round of the loop, not within the call that led to the command."""
        self._loop.call_later(0.0, lambda: self._handle(command))

    def _finish_if_known(self) -> None:
        """Follow `Finish` once all guests that are connected, or may reconnect, have received it: only the host can send it."""
        if all(guest.leaving or not guest.is_awaited for guest in self._guests.values()):
            self._follow_finish()

    def _follow_finish(self) -> None:
        """Hand `Finish` to the host's own component, once."""
        if self._finish is not None:
            command, self._finish = self._finish, None
            self._handle(command)

    def _time_out(self) -> None:
        """Fail the barrier if the payloads have not started, and give up guests that never connected."""
        if self._barrier.started:
            return
        if self._barrier.failed is None:
            connected = [self._component, *(guest.component for guest in self._guests.values() if guest.joined)]
            self._handle(TimedOut(self._barrier.why_not_started(connected, self._spec.patience)))
        self.give_up_absent()
