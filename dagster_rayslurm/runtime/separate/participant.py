"""A component's runtime in the separate topology: its payload starts when all components are ready and ends when one fails."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from dataclasses import asdict, replace
from typing import List, Optional, Sequence, Tuple, Union

from ..node.allocation import Allocation, change
from ..node.gpus import visible_gpus
from ..node.resources import NodeResources, detect
from ..nodes.simulated import component_shares
from ..payload.payload import Payload
from ..process.loop import Loop
from ..process.processes import signal_name
from ..protocol.end import End, EndReason
from ..protocol.spec import BarrierSpec, RuntimeSpec, SpecError
from ..protocol.start_files import take_secrets
from ..supervisor.supervisor import Hooks, Supervisor
from .barrier import Command, ComponentAddress, Ended, Fail, Finish, Start
from .rendezvous import Guest, Host, TimedOut

COMPONENT = "RAYSLURM_COMPONENT"
"""Variable of a payload: the name of its component."""
COMPONENTS = "RAYSLURM_COMPONENTS"
"""Variable of a payload: the addresses of all components, as JSON."""

_REFRESH_INTERVAL = 600.0
"""Seconds between two marks that the run's directory is in use; the supervisor marks only the component's own directory."""
_LOCALHOST = "127.0.0.1"


class BarrierParticipant(Hooks):
    """Holds a payload back until all components are ready, and reports its end to the other components.

    Args:
        supervisor: runs the payload; must not have one yet.
        spec: the barrier.
        run_dir: the run's directory, which holds those of the components.
        nodes: the component's nodes; the first is this one.
        address: the address of this node for other components.
        hosts: where the first component's runtime may be reached; None for this machine.
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
        """The exit code for this process: of the first failure of any component in the first one, 0 in the others."""
        return self._side.exit_code

    def watch(self, payload: Payload) -> None:
        """Set this component's payload, before the loop runs."""
        self._payload = payload
        payload.on_ended.append(lambda: self._payload_ended(payload))

    def close(self) -> None:
        """Disconnect; the first component waits for the others."""
        self._side.close()

    def may_start(self, payload: Payload) -> bool:
        """Whether all components are ready; the first call says that this one is."""
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
        """Keep the runtime until all components have ended."""

    def cluster_lost(self, why: str) -> None:
        self._side.notify("its cluster is lost: " + why)

    def interrupted(self, loop: Loop, signum: int) -> None:
        """End early although the payload has ended: this component's cluster ends, and in the first component the job."""
        if self._side.interrupted("the runtime received %s" % signal.Signals(signum).name, 128 + signum):
            loop.stop()

    def _payload_ended(self, payload: Payload) -> None:
        ending = payload.ending
        alone = ending.terminated and self._side.alone
        self._side.ended(Ended(_failure_of(payload), ending.exit_code, ending.terminated))
        if alone or self._finished:
            self._supervisor.loop.stop()  # Slurm gives this process little time.
        if ending.result is not None and ending.result.reason == EndReason.OTHER_COMPONENT and not self._other_failed:
            self._side.give_up_absent()  # Dagster said that a component is gone; it knows better than this runtime.

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
        if command.component != self._spec.component_id:
            self._other_failed = True
            payload.end_early(End(EndReason.OTHER_COMPONENT, "component %r: %s" % (command.component, command.why)))
        elif not payload.ended:
            payload.end_early(End(EndReason.RUNTIME, "the other components have given this one up: " + command.why))

    def _finish(self, payload: Payload, final: bool) -> None:
        """End the runtime, and before it a payload that the other components have given up."""
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
    """The share of this machine that one of several components gets; hides other GPUs from this process.

    Args:
        spec: the component's start record, which lists all components and what each asks for.

    Returns:
        The share, and a remark for the user if devices are simulated, or "".
    """
    assert spec.meeting is not None
    here = detect(with_gpus=True)
    shares = component_shares(replace(spec, ray=None), here, visible_gpus(os.environ, here.num_gpus))
    share = next(each for each in shares if each.machine.component == spec.meeting.component_id)
    change(os.environ, share.environ)
    # The remark begins with the component's name, which its own user knows. Without Ray, no simulated GPUs are counted.
    remark = share.remark.partition(": ")[2] if spec.ray is not None else ""
    return replace(share.machine, component=None), remark


def join_barrier(
    supervisor: Supervisor, run_dir: str, allocation: Optional[Allocation] = None, hosts: Optional[Sequence[str]] = None
) -> BarrierParticipant:
    """Make a runtime take part in the barrier of its start record.

    Args:
        supervisor: runs the payload; must not have one yet.
        run_dir: the run's directory.
        allocation: the nodes of its component; None on this machine.
        hosts: where the first component's runtime may be reached; None for this machine.
    """
    assert supervisor.spec.meeting is not None
    nodes = [supervisor.nodes.machine.hostname] if allocation is None else allocation.nodes
    address = _LOCALHOST if allocation is None else allocation.head_addresses[0]
    return BarrierParticipant(supervisor, supervisor.spec.meeting, run_dir, nodes, address, hosts)


def _failure_of(payload: Payload) -> Optional[str]:
    """Why a payload failed, for the other components; None for success."""
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
