"""Connects a component's runtime to the barrier: its payload starts when all components are ready, and ends when one fails."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from dataclasses import asdict, replace
from typing import List, Optional, Sequence, Tuple, Union

from ..node.allocation import Allocation, change
from ..node.resources import NodeResources, detect, visible_gpus
from ..nodes.simulated import component_shares
from ..payload.payload import Payload
from ..process.loop import Loop
from ..process.processes import signal_name
from ..protocol.end import End, EndReason
from ..protocol.spec import BarrierSpec, RuntimeSpec, SpecError, take_secrets
from ..supervisor.supervisor import Hooks, Supervisor
from .barrier import Command, ComponentAddress, Ended, Fail, Finish, Start
from .rendezvous import Guest, Host, TimedOut

COMPONENT = "RAYSLURM_COMPONENT"
"""Environment variable of a payload with the name of its component."""
COMPONENTS = "RAYSLURM_COMPONENTS"
"""Environment variable of a payload with the addresses of all components (`ComponentAddress`), as JSON."""

_REFRESH_INTERVAL = 600.0
"""Seconds between two updates of the run directory's modification time, which keep cleanup from removing it.

The supervisor does the same only for the component's own directory."""
_LOCALHOST = "127.0.0.1"


class BarrierParticipant(Hooks):
    """Connects one component's supervisor to the barrier, as its hooks.

    It holds the component's payload back until all components are ready, and reports the payload's end to the other components.

    Args:
        supervisor: runs the payload; must not have one yet.
        spec: the start record's part about the barrier.
        run_dir: the run's directory, which holds the run directories of all components.
        nodes: names of the component's nodes; the first is this node.
        address: the address of this node for other components.
        hosts: hosts where the first component's runtime may be reached; None if all components are on this machine.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        spec: BarrierSpec,
        run_dir: str,
        nodes: List[str],
        address: str,
        hosts: Optional[Sequence[str]],
    ) -> None:
        self._supervisor = supervisor
        self._spec = spec
        self._run_dir = run_dir
        self._nodes = nodes
        self._address = address
        self._payload: Optional[Payload] = None
        self._ready = False
        self._started = False
        self._other_failed = False
        self._finished = False
        self._side: Union[Host, Guest]
        if spec.component_id == spec.components[0]:
            self._side = Host(supervisor.loop, spec, self._handle, loopback=hosts is None)
        else:
            self._side = Guest(supervisor.loop, spec, [*(hosts or [_LOCALHOST]), *spec.hosts], self._handle)
        supervisor.hooks = self
        self._keep_fresh()

    @property
    def exit_code(self) -> int:
        """The exit code for this runtime. In the first component: that of the first failure of any component. In others: 0.

        A guest that lost the host before its payload succeeded returns 1.
        """
        return self._side.exit_code

    def watch(self, payload: Payload) -> None:
        """Set the payload that takes part in the barrier; to be called before the event loop runs."""
        self._payload = payload
        payload.on_ended.append(lambda: self._payload_ended(payload))

    def close(self) -> None:
        """Disconnect from the other components; the first component waits a few seconds for them to end."""
        self._side.close()

    def may_start(self, payload: Payload) -> bool:
        """Whether all components are ready, so that the payload may start; the first call reports this component as ready."""
        if not self._ready:
            self._ready = True
            others = [each for each in self._spec.components if each != self._spec.component_id]
            if others:
                payload.phase("ready", "waiting for %s" % ", ".join("component %r" % each for each in others))
            cluster = self._supervisor.cluster
            ray_address = cluster.address if cluster is not None else None
            self._side.ready(ComponentAddress(socket.gethostname(), self._address, ray_address, self._nodes))
        return self._started

    def finished(self, loop: Loop) -> None:
        """Called when this component's payload has ended: keeps the runtime until the host sends `Finish`."""

    def cluster_lost(self, why: str) -> None:
        self._side.notify("its cluster is lost: " + why)

    def interrupted(self, loop: Loop, signum: int) -> None:
        """Called when the runtime receives a signal after its payload has ended.

        A guest ends at once, and with it the component's Ray cluster. The host ends at once if no other payload runs. Otherwise
        it has all payloads ended first.
        """
        if self._side.interrupted("the runtime received %s" % signal.Signals(signum).name, 128 + signum):
            loop.stop()

    def _payload_ended(self, payload: Payload) -> None:
        ending = payload.ending
        alone = ending.terminated and self._side.alone
        self._side.ended(Ended(_failure_of(payload), ending.exit_code, ending.terminated))
        if alone or self._finished:
            self._supervisor.loop.stop()  # After a signal, Slurm gives this process little time.
        if ending.result is not None and ending.result.reason == EndReason.OTHER_COMPONENT and not self._other_failed:
            self._side.give_up_absent()  # Dagster ended the payload because a component is gone, so none is worth waiting for.

    def _handle(self, command: Union[Command, TimedOut]) -> None:
        payload = self._payload
        assert payload is not None
        if isinstance(command, Finish):
            self._finish(payload, command.final)
        elif isinstance(command, Start):
            addresses = {name: asdict(address) for name, address in command.components.items()}
            payload.component_env = {COMPONENT: self._spec.component_id, COMPONENTS: json.dumps(addresses)}
            if len(addresses) > 1:
                payload.phase("start", "all %d components are ready" % len(addresses))
            self._started = True
            self._supervisor.schedule()
        elif isinstance(command, TimedOut):
            payload.end_early(End(EndReason.CLUSTER_START, command.why))
        elif isinstance(command, Fail):
            self._end_payload(payload, command)
        elif command.component != self._spec.component_id:
            payload.phase("component", "component %r: %s" % (command.component, command.what))

    def _end_payload(self, payload: Payload, command: Fail) -> None:
        """End the payload because a component failed: another one, or this one in the eyes of the host."""
        if command.component != self._spec.component_id:
            self._other_failed = True
            payload.end_early(End(EndReason.OTHER_COMPONENT, "component %r: %s" % (command.component, command.why)))
        elif not payload.ended:
            payload.end_early(End(EndReason.RUNTIME, "the other components have given this one up: " + command.why))

    def _finish(self, payload: Payload, final: bool) -> None:
        """End the runtime; if its payload still runs because the host gave this component up, end the payload first."""
        if not payload.ended:
            self._finished = True
            return payload.end_early(End(EndReason.RUNTIME, "the other components have ended without this one"))
        if final and self._supervisor.spec.requeue:
            with contextlib.suppress(OSError, SpecError):
                take_secrets(payload.run_dir, keep=False)  # No other attempt will need them.
        self._supervisor.loop.stop()

    def _keep_fresh(self) -> None:
        with contextlib.suppress(OSError):
            os.utime(self._run_dir)
        self._supervisor.loop.call_later(_REFRESH_INTERVAL, self._keep_fresh)


def component_share(spec: RuntimeSpec) -> Tuple[NodeResources, str]:
    """The share of this machine that one component gets if all components run on it.

    Sets the environment of this process so that it sees only the GPUs of that share.

    Args:
        spec: the component's start record, which lists all components and their requested CPUs and GPUs.

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


def join_barrier(
    supervisor: Supervisor, run_dir: str, allocation: Optional[Allocation] = None, hosts: Optional[Sequence[str]] = None
) -> BarrierParticipant:
    """Connect a component's runtime to the barrier that its start record describes, and return its participant.

    Args:
        supervisor: runs the payload; must not have one yet.
        run_dir: the run's directory, which holds the run directories of all components.
        allocation: the nodes of the component; None if all components are on this machine.
        hosts: hosts where the first component's runtime may be reached; None if all components are on this machine.
    """
    assert supervisor.spec.meeting is not None
    nodes = [supervisor.machine.hostname] if allocation is None else allocation.nodes
    address = _LOCALHOST if allocation is None else allocation.head_addresses[0]
    return BarrierParticipant(supervisor, supervisor.spec.meeting, run_dir, nodes, address, hosts)


def _failure_of(payload: Payload) -> Optional[str]:
    """Why a payload failed, as the other components report it; None for success."""
    if payload.ending.exit_code == 0:
        return None
    end = payload.ending.result
    if end is None:
        return "its payload did not run"
    if end.reason != EndReason.EXIT:
        return end.message or end.reason
    if end.signal is not None:
        return "its payload was killed by %s" % signal_name(end.signal)
    return "its payload ended with exit code %s" % end.exit_code
