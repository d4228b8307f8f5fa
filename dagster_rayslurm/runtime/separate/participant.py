"""Connects a component's runtime to the barrier: its payload starts when all components are ready, and ends when one fails.

The runtime of the first component is the RPC server, those of the others are its clients. Both sides send all their messages
again after a reconnection, so that no message is lost with a connection.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from abc import ABC, abstractmethod
from dataclasses import asdict, replace
from functools import partial
from typing import Dict, List, Optional, Sequence, Tuple

from ..node.allocation import Allocation, change
from ..node.resources import NodeResources, detect, visible_gpus
from ..nodes.simulated import component_shares
from ..payload.payload import Payload
from ..process.loop import Loop
from ..process.processes import signal_name
from ..protocol.end import End, EndReason
from ..protocol.rpc import (
    HEARTBEAT_TIMEOUT,
    Address,
    Channel,
    ChannelListener,
    ClientListener,
    Message,
    RpcClient,
    RpcServer,
    all_addresses,
)
from ..protocol.spec import RuntimeSpec, SpecError, take_secrets
from ..supervisor.supervisor import Hooks, Supervisor
from .barrier import Barrier, Command, ComponentAddress, Ended, Event, Fail, Finish, Leaving, Ready, Start, decode, encode

# Environment variable of a payload with the name of its component.
COMPONENT = "RAYSLURM_COMPONENT"
# Environment variable of a payload with the addresses of all components (`ComponentAddress`), as JSON.
COMPONENTS = "RAYSLURM_COMPONENTS"

# Seconds between two updates of the run directory's modification time, which keep cleanup from removing it.
#
# The supervisor does the same only for the component's own directory.
_REFRESH_INTERVAL = 600.0
_LOCALHOST = "127.0.0.1"
# Seconds that the host waits at its end for the guests to end: `srun` ends them when the host's exit code is not 0.
_LEAVE_TIMEOUT = 5.0


class Participant(Hooks, ABC):
    """Connects one component's supervisor to the barrier, as its hooks.

    It holds the component's payload back until all components are ready, and reports the payload's end to the other components.
    """

    def __init__(self, supervisor: Supervisor, run_dir: str, allocation: Optional[Allocation]) -> None:
        assert supervisor.spec.meeting is not None
        self._supervisor = supervisor
        self._loop = supervisor.loop
        self._spec = supervisor.spec.meeting
        self._run_dir = run_dir
        self._allocation = allocation
        self._payload: Optional[Payload] = None
        self._ready = self._started = False
        # The host's commands so far.
        self._commands: List[Command] = []
        supervisor.hooks = self
        self._keep_fresh()

    @property
    @abstractmethod
    def exit_code(self) -> int:
        """The exit code for this runtime."""

    @abstractmethod
    def tell(self, event: Event) -> None:
        """Tell the host what happened to this component."""

    @abstractmethod
    def close(self) -> None:
        """Disconnect from the other components; the host waits a few seconds for them to end."""

    def watch(self, payload: Payload) -> None:
        """Set the payload that takes part in the barrier; to be called before the event loop runs."""
        self._payload = payload
        payload.on_ended.append(lambda: self.tell(self._end_of(payload)))

    def may_start(self, payload: Payload) -> bool:
        """Whether all components are ready, so that the payload may start; the first call reports this component as ready."""
        if not self._ready:
            self._ready = True
            others = [each for each in self._spec.components if each != self._spec.component_id]
            if others:
                payload.phase("ready", "waiting for %s" % ", ".join("component %r" % each for each in others))
            self.tell(Ready(self._address()))
        return self._started

    def finished(self, loop: Loop) -> None:
        """Called when this component's payload has ended: keeps the runtime until the host sends `Finish`."""

    def follow(self, command: Command) -> None:
        """Do what the host commands."""
        payload = self._payload
        assert payload is not None
        if isinstance(command, Start):
            addresses = {name: asdict(address) for name, address in command.components.items()}
            payload.component_env = {COMPONENT: self._spec.component_id, COMPONENTS: json.dumps(addresses)}
            if len(addresses) > 1:
                payload.phase("start", "all %d components are ready" % len(addresses))
            self._started = True
            self._supervisor.schedule()
        elif isinstance(command, Fail) and command.component != self._spec.component_id:
            payload.end_early(End(EndReason.OTHER_COMPONENT, "component %r: %s" % (command.component, command.why)))
        elif isinstance(command, Fail) and isinstance(self, Host):
            payload.end_early(End(EndReason.CLUSTER_START, command.why))  # The components were not ready in time.
        elif isinstance(command, Fail):
            payload.end_early(End(EndReason.RUNTIME, "the other components have given this one up: " + command.why))
        elif not payload.ended:  # The host has given this component up.
            payload.on_ended.append(self._loop.stop)
            payload.end_early(End(EndReason.RUNTIME, "the other components have ended without this one"))
        else:
            if command.final and self._supervisor.spec.requeue:
                with contextlib.suppress(OSError, SpecError):
                    take_secrets(payload.run_dir, keep=False)  # No other attempt will need them.
            self._loop.stop()

    def _end_of(self, payload: Payload) -> Ended:
        """How a payload ended, as the other components are told."""
        ending = payload.ending
        end = ending.result
        if end is None:
            failure = "its payload did not run"
        elif end.reason != EndReason.EXIT:
            failure = end.message or end.reason
        elif end.signal is not None:
            failure = "its payload was killed by %s" % signal_name(end.signal)
        else:
            failure = "its payload ended with exit code %s" % end.exit_code
        return Ended(failure if ending.exit_code != 0 else None, ending.exit_code, ending.terminated)

    def _address(self) -> ComponentAddress:
        cluster, here = self._supervisor.cluster, self._allocation
        address, nodes = _LOCALHOST, [self._supervisor.machine.hostname]
        if here is not None:
            address, nodes = here.head_addresses[0], here.nodes
        return ComponentAddress(socket.gethostname(), address, cluster.address if cluster is not None else None, nodes)

    def _keep_fresh(self) -> None:
        with contextlib.suppress(OSError):
            os.utime(self._run_dir)
        self._loop.call_later(_REFRESH_INTERVAL, self._keep_fresh)


class Host(Participant, ChannelListener):
    """The participant of the first component. Its exit code is that of the first failure in any component, or 0."""

    def __init__(self, supervisor: Supervisor, run_dir: str, allocation: Optional[Allocation] = None) -> None:
        super().__init__(supervisor, run_dir, allocation)
        self.barrier = Barrier(self._spec.components, self._spec.patience, self._spec.grace, self._loop.now())
        # The command to end all runtimes, between the decision and the time when the host follows it itself.
        self._finish: Optional[Finish] = None
        self._guests: Dict[Channel, str] = {}
        self._server = RpcServer(self._loop, self._spec.key, self._spec.ports, self, allocation is None, heartbeat=True)
        self._tick()

    @property
    def exit_code(self) -> int:
        return self.barrier.exit_code

    def tell(self, event: Event) -> None:
        self._send(self.barrier.handle(self._spec.component_id, event, self._loop.now()))

    def interrupted(self, loop: Loop, signum: int) -> None:
        """Called when this runtime received a signal after its payload had ended: have all payloads ended first."""
        why = "the runtime received %s" % signal.Signals(signum).name
        self._send(self.barrier.interrupted(why, 128 + signum, loop.now()))

    def close(self) -> None:
        self._server.stop_heartbeat()
        deadline = self._loop.now() + _LEAVE_TIMEOUT
        for channel in list(self._guests):
            channel.wait_closed(deadline)
        self._server.close()

    def received(self, channel: Channel, message: Message) -> None:
        """Handle a guest's message; the first one of a connection names the guest's component."""
        component = self._guests.get(channel)
        if component is None:
            return self._introduce(channel, message.get("component"))
        now = self._loop.now()
        try:
            self._send(self.barrier.handle(component, decode(message), now))
        except SpecError as error:
            self._send(self.barrier.lost(component, "what its runtime says cannot be understood: %s" % error, now))

    def closed(self, channel: Channel, why: str) -> None:
        component = self._guests.pop(channel, None)
        if component is not None:
            self.barrier.disconnected(component, why, self._loop.now())

    def _introduce(self, channel: Channel, component: object) -> None:
        """Take a new connection as that of a component's guest, and send it all earlier commands."""
        if not isinstance(component, str) or component not in self._spec.components[1:]:
            return channel.close()
        for older in [each for each, name in self._guests.items() if name == component]:
            del self._guests[older]
            older.close()
        self._guests[channel] = component
        self.barrier.connected(component)
        for command in self._commands:
            channel.send(**encode(command))

    def _send(self, commands: Sequence[Command]) -> None:
        """Send commands to all guests, and follow them here in the next round of the loop."""
        for command in commands:
            self._commands.append(command)
            for channel in list(self._guests):
                channel.send(**encode(command))
            if isinstance(command, Finish):
                self._finish = command
            else:
                self._loop.call_later(0.0, partial(self.follow, command))
        self._loop.call_later(0.0, self._follow_finish)

    def _follow_finish(self) -> None:
        """Follow `Finish` once all guests have: only the host can send it to them."""
        if self._finish is not None and self.barrier.may_leave(self._loop.now()):
            command, self._finish = self._finish, None
            self.follow(command)

    def _tick(self) -> None:
        self._send(self.barrier.tick(self._loop.now()))
        self._loop.call_later(self._spec.grace / 10, self._tick)


class Guest(Participant, ClientListener):
    """The participant of another component than the first.

    Args:
        hosts: names or addresses at which the barrier's host may be reached.
    """

    def __init__(
        self, supervisor: Supervisor, run_dir: str, allocation: Optional[Allocation] = None, hosts: Sequence[str] = (_LOCALHOST,)
    ) -> None:
        super().__init__(supervisor, run_dir, allocation)
        self._events: List[Event] = []
        self._problem = "it is gone"
        self._ended: Optional[Ended] = None
        self._given_up = False
        # When the host is given up, unless it is connected then.
        self._give_up_at = self._loop.now() + self._spec.patience + 3 * self._spec.grace
        addresses = all_addresses([*hosts, *self._spec.hosts], self._spec.ports)
        self.client = RpcClient(self._loop, self._spec.key, addresses, self)
        self.client.connect()
        self._tick()

    @property
    def exit_code(self) -> int:
        """0 unless the host is lost and the payload did not succeed: any other exit code makes `srun` end all components.

        As long as there is a host, its exit code reports the failure.
        """
        return 1 if self._given_up and (self._ended is None or self._ended.failure is not None) else 0

    def tell(self, event: Event) -> None:
        self._events.append(event)
        self.client.send(**encode(event))
        if isinstance(event, Ended):
            self._ended = event
            if self._given_up:
                self.follow(Finish(final=False))
            elif event.failure is not None:
                # A host that is about to come should learn of the failure; after a signal, Slurm gives little time.
                pause = 0.0 if event.terminated else 3 * self._spec.grace
                self._give_up_at = min(self._give_up_at, self._loop.now() + pause)

    def interrupted(self, loop: Loop, signum: int) -> None:  # noqa: ARG002
        """Called when this runtime received a signal after its payload had ended: end the runtime, and its Ray cluster."""
        self.tell(Leaving())
        loop.stop()

    def close(self) -> None:
        self.client.close()

    def connected(self) -> None:
        self.client.send(component=self._spec.component_id)
        for event in self._events:
            self.client.send(**encode(event))

    def received(self, message: Message) -> None:
        command = decode(message)
        if command in self._commands:
            return  # The host sends all commands again after a reconnection.
        self._commands.append(command)
        if isinstance(command, Finish):
            self.tell(Leaving())
        self.follow(command)

    def disconnected(self) -> None:
        self._give_up_at = self._loop.now() + self._spec.grace

    def unreachable(self, address: Address, why: str) -> None:
        self._problem = "%s:%d: %s" % (address[0], address[1], why)

    def _tick(self) -> None:
        if self.client.is_connected and self.client.silent_for > HEARTBEAT_TIMEOUT:
            self.client.reconnect()
        if not self.client.is_connected and self._loop.now() >= self._give_up_at:
            return self._give_up()
        self._loop.call_later(self._spec.grace / 10, self._tick)

    def _give_up(self) -> None:
        """Go on without the host, as if it had failed."""
        self._given_up = True
        self.client.close()
        self.follow(Fail(self._spec.components[0], "its runtime cannot be reached (%s)" % self._problem))
        if self._ended is not None:
            self.follow(Finish(final=False))


def join_barrier(
    supervisor: Supervisor, run_dir: str, allocation: Optional[Allocation] = None, hosts: Sequence[str] = (_LOCALHOST,)
) -> Participant:
    """Connect a component's runtime to the barrier that its start record describes; the first component becomes the host.

    Args:
        supervisor: runs the payload; must not have one yet.
        run_dir: the run's directory, which holds the run directories of all components.
        allocation: the nodes of the component; None if all components are on this machine.
        hosts: hosts where the first component's runtime may be reached.
    """
    spec = supervisor.spec.meeting
    if spec is not None and spec.component_id == spec.components[0]:
        return Host(supervisor, run_dir, allocation)
    return Guest(supervisor, run_dir, allocation, hosts)


def component_share(spec: RuntimeSpec) -> Tuple[NodeResources, str]:
    """The share of this machine that one component gets if all components run on it.

    Sets the environment of this process so that it sees only the GPUs of that share.

    Returns:
        The share, and a remark for the Dagster log about simulated devices ("" if there are none).
    """
    assert spec.meeting is not None
    here = detect(with_gpus=True)
    shares = component_shares(replace(spec, ray=None), here, visible_gpus(os.environ, here.num_gpus))
    share = next(each for each in shares if each.machine.component == spec.meeting.component_id)
    change(os.environ, share.environ)
    # The remark begins with the component's name, which its own messages do not need. Without Ray nothing counts simulated GPUs.
    remark = share.remark.partition(": ")[2] if spec.ray is not None else ""
    return replace(share.machine, component=None), remark
