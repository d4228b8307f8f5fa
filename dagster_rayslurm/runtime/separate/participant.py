"""Connects a component's runtime to the barrier: the payload starts when all components are ready, and ends if a component fails.

Each message between host and guests holds the sender's whole state, so a lost connection loses no information.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, replace
from typing import Any, Dict, Optional, Sequence, Tuple

from ..node.allocation import Allocation, change
from ..node.resources import NodeResources, detect, simulated_shares
from ..payload.payload import Payload
from ..process.processes import signal_name
from ..protocol.messages import End, EndReason
from ..protocol.rpc import Channel, Listener, Message, RpcClient, RpcServer, all_addresses
from ..protocol.spec import BarrierSpec, RuntimeSpec, SpecError, from_fields, take_secrets
from ..supervisor.supervisor import Supervisor
from .barrier import Barrier, ComponentAddress, ComponentState, Ended, RunState

# Environment variables of a payload: the name of its component, and the addresses of all components (`ComponentAddress`) as JSON.
COMPONENT, COMPONENTS = "RAYSLURM_COMPONENT", "RAYSLURM_COMPONENTS"

_LOCALHOST = "127.0.0.1"
# Seconds that the host waits at its end for the guests to end: `srun` ends them when the host's exit code is not 0.
_LEAVE_TIMEOUT = 5.0


@dataclass(eq=False)
class Participant(Listener, ABC):
    """Represents one component's runtime at the barrier; each participant is a `Host` or a `Guest`.

    The participant delays the start of the component's payload until all components are ready, and the end of the runtime until
    all payloads have ended. The participant joins the barrier when it is created.
    """

    supervisor: Supervisor
    run_dir: str  # The directory of the whole run, not the component's directory.
    allocation: Optional[Allocation] = None  # The nodes of the component; None if all components are on this machine.
    hosts: Sequence[str] = (_LOCALHOST,)  # Hosts at which the first component's runtime may be reached.

    def __post_init__(self) -> None:
        assert self.supervisor.spec.meeting is not None
        self.spec: BarrierSpec = self.supervisor.spec.meeting
        self.loop = self.supervisor.loop
        self.payload: Optional[Payload] = None
        self.mine, self.told = ComponentState(), RunState()  # States of this component and of the run.
        self.supervisor.may_start = self.may_start
        self.supervisor.on_finished = lambda: None  # The runtime stays until all payloads have ended.
        self.supervisor.on_interrupted = self.interrupted
        self._join()
        self._tick()

    @property
    @abstractmethod
    def exit_code(self) -> int:
        """The exit code with which this runtime's process ends."""

    @abstractmethod
    def interrupted(self, signum: int) -> None:
        """Handle the signal `signum`, which this runtime has received after the end of its payload."""

    @abstractmethod
    def close(self) -> None:
        """Close the connections to the other components.

        The host first blocks up to `_LEAVE_TIMEOUT` seconds until the guests close theirs.
        """

    @abstractmethod
    def _join(self) -> None: ...

    @abstractmethod
    def _report(self) -> None: ...

    @abstractmethod
    def _check(self) -> None: ...

    def tell(self, **news: Any) -> None:
        """Change fields of this component's state, such as `tell(left=True)`, and report the new state to the barrier."""
        self.mine = replace(self.mine, **news)
        self._report()

    def watch(self, payload: Payload) -> None:
        """Set the payload of this component; when the payload ends, the participant reports its end to the barrier.

        Until then, the payload keeps the modification time of `run_dir` recent, so that cleanup does not remove this directory.
        Must be called before the event loop runs.
        """
        self.payload = payload
        payload.kept_fresh.append(self.run_dir)
        payload.on_ended.append(lambda: self.tell(ended=_end_of(payload)))

    def may_start(self, payload: Payload) -> bool:
        """Returns whether the payload may start, which is True when all components are ready; called by the supervisor.

        The first call reports to the barrier that this component is ready. If the result is False, the participant makes the
        supervisor call this method again when all components are ready.
        """
        if self.mine.place is None:
            others = ["component %r" % each for each in self.spec.components if each != self.spec.component_id]
            if others:
                payload.phase("ready", "waiting for " + ", ".join(others))
            self.tell(place=self._address())
        return bool(self.told.places)

    def follow(self, told: RunState) -> None:
        """Act on `told`, the new state of the run: start or end the payload, or stop the event loop when the run is finished.

        Only changes since the last call have an effect.
        """
        before, self.told, payload = self.told, told, self.payload
        assert payload is not None
        if told.places and not before.places and told.failed is None:
            addresses = {name: asdict(address) for name, address in told.places.items()}
            payload.component_env = {COMPONENT: self.spec.component_id, COMPONENTS: json.dumps(addresses)}
            if len(addresses) > 1:
                payload.phase("start", "all %d components are ready" % len(addresses))
            self.supervisor.schedule()
        if told.failed is not None and before.failed is None:
            payload.end_early(self._end_after(told.failed, told.why))
        if told.finished and not before.finished:
            if not payload.ended:  # The host has given this component up.
                payload.on_ended.append(self.loop.stop)
                return payload.end_early(End(EndReason.RUNTIME, "the other components have ended without this one"))
            if told.final and self.supervisor.spec.requeue:
                with contextlib.suppress(OSError, SpecError):
                    take_secrets(payload.run_dir, keep=False)  # No other attempt will need them.
            self.loop.stop()

    def _end_after(self, failed: str, why: str) -> End:
        """Returns the reason for the end of this runtime's payload after a component has failed.

        `failed` is the name of the failed component, which may be this runtime's own, and `why` says why that component failed.
        """
        if failed != self.spec.component_id:
            return End(EndReason.OTHER_COMPONENT, "component %r: %s" % (failed, why))
        if isinstance(self, Host):
            return End(EndReason.CLUSTER_START, why)  # The components were not ready in time.
        return End(EndReason.RUNTIME, "the other components have given this one up: " + why)

    def _address(self) -> ComponentAddress:
        cluster, here = self.supervisor.cluster, self.allocation
        address, nodes = _LOCALHOST, [self.supervisor.machine.hostname]
        if here is not None:
            address, nodes = here.head_addresses[0], here.nodes
        return ComponentAddress(socket.gethostname(), address, cluster.address if cluster is not None else None, nodes)

    def _tick(self) -> None:
        self._check()
        self.loop.call_later(self.spec.grace / 10, self._tick)


class Host(Participant):
    """The participant of the first component: it keeps the `Barrier`, and sends the state of the run to the guests.

    Its exit code is that of the first failure in any component, or 0.
    """

    def _join(self) -> None:
        self.barrier = Barrier(self.spec.components, self.spec.patience, self.spec.grace, self.loop.now())
        self._sent = self.barrier.state
        self._guests: Dict[str, Channel] = {}
        self._server = RpcServer(self.loop, self.spec.key, self.spec.ports, self, self.allocation is None, heartbeat=True)

    @property
    def exit_code(self) -> int:
        return self.barrier.exit_code

    def _report(self) -> None:
        self.barrier.update(self.spec.component_id, self.mine, self.loop.now())
        self.loop.call_later(0.0, self._act)

    def interrupted(self, signum: int) -> None:
        """Handle a signal that the host has received after the end of its own payload: end the payloads of the other components.

        The host itself ends later, after the other components.
        """
        self.barrier.interrupted("the runtime received %s" % signal.Signals(signum).name, 128 + signum, self.loop.now())
        self._act()

    def _check(self) -> None:
        self.barrier.tick(self.loop.now())
        self._act()

    def close(self) -> None:
        deadline = self.loop.now() + _LEAVE_TIMEOUT
        for channel in self._guests.values():
            channel.wait_closed(deadline)
        self._server.close()

    def received(self, channel: Channel, message: Message) -> None:
        """Handle a guest's message, which has the name and the state of the guest's component.

        If the component is unknown, the channel is closed. If the guest has an older channel, that one is closed.
        """
        component = message.pop("component")
        if component not in self.spec.components[1:]:
            return channel.close()
        older = self._guests.get(component)
        if older is not channel:
            if older is not None:
                older.close()
            self._guests[component] = channel
            self.barrier.connected(component)
            channel.send(**asdict(self._sent))
        self.barrier.update(component, from_fields(ComponentState, message), self.loop.now())
        self._act()

    def closed(self, channel: Channel, why: str) -> None:
        for component in [name for name, each in self._guests.items() if each is channel]:
            del self._guests[component]
            self.barrier.disconnected(component, why, self.loop.now())

    def _act(self) -> None:
        """If the state of the run has changed, send it to all guests; then act on it as every participant does.

        The host ends last, because only the host can inform the guests.
        """
        state = self.barrier.state
        if state != self._sent:
            self._sent = state
            for channel in list(self._guests.values()):
                channel.send(**asdict(state))
        if self.payload is not None:
            self.follow(replace(state, finished=state.finished and self.barrier.may_leave(self.loop.now())))


class Guest(Participant):
    """The participant of any component but the first: it sends the component's state to the host, and receives the run's state.

    Its exit code is 1 if the host was lost and the component's payload did not succeed, otherwise 0.
    """

    def _join(self) -> None:
        self._given_up = False
        # Clock time at which this runtime gives the host up, unless the host is connected then.
        self._give_up_at = self.loop.now() + self.spec.patience + 3 * self.spec.grace
        addresses = all_addresses([*self.hosts, *self.spec.hosts], self.spec.ports)
        self.client = RpcClient(self.loop, self.spec.key, addresses, self)
        self.client.connect()

    @property
    def exit_code(self) -> int:
        """The exit code of this runtime: 1 if the host is lost and the payload did not succeed, otherwise 0."""
        return 1 if self._given_up and (self.mine.ended is None or self.mine.ended.failure is not None) else 0

    def _report(self) -> None:
        self.client.send(component=self.spec.component_id, **asdict(self.mine))
        if self.mine.ended is not None and self.mine.ended.failure is not None and not self.client.is_connected:
            # A host that is about to come should learn of the failure; but after a signal, Slurm gives little time.
            self._give_up_at = min(self._give_up_at, self.loop.now() + self.spec.grace)

    def interrupted(self, signum: int) -> None:  # noqa: ARG002
        """Handle a signal that this runtime has received after the end of its payload: inform the host, and end this runtime.

        The component's Ray cluster ends together with the runtime.
        """
        self.tell(left=True)
        self.loop.stop()

    def close(self) -> None:
        self.client.close()

    def authenticated(self, channel: Channel) -> None:  # noqa: ARG002
        self._report()

    def received(self, channel: Channel, message: Message) -> None:  # noqa: ARG002
        told = from_fields(RunState, message)
        if told.finished:
            self.tell(left=True)
        self.follow(told)

    def closed(self, channel: Channel, why: str) -> None:  # noqa: ARG002
        self._give_up_at = self.loop.now() + self.spec.grace

    def _check(self) -> None:
        """If the host has been out of reach for too long, give it up: act as if the host's component had failed.

        Called at intervals; while the host is connected, does nothing.
        """
        if not self._given_up and (self.client.is_connected or self.loop.now() < self._give_up_at):
            return
        self._given_up = True
        self.client.close()
        why = "its runtime cannot be reached (%s)" % self.client.problem
        told = replace(self.told, failed=self.told.failed or self.spec.components[0], why=self.told.why or why)
        self.follow(replace(told, finished=self.mine.ended is not None))


def _end_of(payload: Payload) -> Ended:
    """Returns how a payload has ended, in the form that is sent to the runtimes of the other components."""
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


def join_barrier(supervisor: Supervisor, run_dir: str, *where: Any) -> Participant:
    """Make a component's runtime take part in the barrier; returns the new participant.

    The runtime's start record (`runtime.json`) describes the barrier. The first component's runtime becomes the host. The others
    become guests, which begin to connect to the host. `supervisor` is the supervisor of this runtime, and `run_dir` is the
    directory of the whole run. `where` are the arguments `allocation` and `hosts` of `Participant`; without them, all components
    run on this machine.
    """
    spec = supervisor.spec.meeting
    side = Host if spec is not None and spec.component_id == spec.components[0] else Guest
    return side(supervisor, run_dir, *where)


def component_share(spec: RuntimeSpec) -> Tuple[NodeResources, str]:
    """Returns the resources that a component gets when all components run on this machine, and a remark for the Dagster log.

    `spec` is the start record (`runtime.json`) of the component's runtime. The remark tells which CPUs and GPUs are simulated.
    It is "" if none are simulated, or if the component has no Ray cluster. The function also changes `os.environ`, so that this
    process sees no GPUs of other components.
    """
    assert spec.meeting is not None
    here = detect(with_gpus=True)
    shares = simulated_shares(replace(spec, ray=None), here)
    share = next(each for each in shares if each.machine.component == spec.meeting.component_id)
    change(os.environ, share.environ)
    # The remark begins with the component's name, which the component's own messages do not need. Only Ray counts simulated GPUs.
    remark = share.remark.partition(": ")[2] if spec.ray is not None else ""
    return replace(share.machine, component=None), remark
