"""A component's runtime at the meeting: its payload starts when all are ready, and ends when another one has failed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from dataclasses import replace
from typing import List, Optional, Sequence, Tuple, Union

from ..node.allocation import Allocation, change
from ..node.gpus import visible_gpus
from ..node.resources import NodeResources, detect
from ..nodes.simulated import cast
from ..payload.payload import Payload
from ..process.loop import Loop
from ..process.processes import signal_name
from ..protocol.end import End, EndReason
from ..protocol.spec import BarrierSpec, RuntimeSpec, SpecError
from ..protocol.start_files import take_secrets
from ..supervisor.supervisor import Hooks, Supervisor
from .barrier import Order, Place
from .rendezvous import Guest, Host

COMPONENT = "RAYSLURM_COMPONENT"
COMPONENTS = "RAYSLURM_COMPONENTS"
"""Variables of a payload: the name of its own component, and where all of them are, as JSON."""

_FRESH_INTERVAL = 600.0
"""Seconds between two marks that the run's directory is in use, which is not the payload's own."""
_HERE = "127.0.0.1"


class BarrierParticipant(Hooks):
    """Holds a payload back until the payloads of all components may start, and tells the others of its end.

    Args:
        runner: runs the payload; it has none yet.
        spec: who meets.
        run_dir: the run's directory, in which each component has one of its own.
        nodes: the component's nodes, the first of which is this one.
        address: the address of this node for the others.
        hosts: where the first component's runtime may be reached; None on this machine.
    """

    def __init__(
        self,
        runner: Supervisor,
        spec: BarrierSpec,
        run_dir: str,
        nodes: List[str],
        address: str,
        hosts: Optional[Sequence[str]],
    ) -> None:
        self._runner = runner
        self._spec = spec
        self._run_dir = run_dir
        self._nodes = nodes
        self._address = address
        self._payload: Optional[Payload] = None
        self._ready = False
        self._open = False
        self._ending = False
        self._over = False
        self._side: Union[Host, Guest]
        if spec.component_id == spec.components[0]:
            self._side = Host(runner.loop, spec, self._take, loopback=hosts is None)
        else:
            self._side = Guest(runner.loop, spec, [*(hosts or [_HERE]), *spec.hosts], self._take)
        runner.hooks = self
        self._keep_fresh()

    @property
    def exit_code(self) -> int:
        """What this process's own shall be: in the first component that of the first failure anywhere, in the others 0."""
        return self._side.exit_code

    def of(self, payload: Payload) -> None:
        """Say which payload it is."""
        self._payload = payload

        def ended() -> None:
            alone = payload.ending.terminated and self._side.alone
            self._side.ended(failure_of(payload), payload.ending.exit_code, payload.ending.terminated)
            if alone or self._over:
                self._runner.loop.stop()  # Slurm gives this process little time.
            how = payload.ending.how
            if how is not None and how.reason == EndReason.OTHER_COMPONENT and not self._ending:
                self._side.forget_absent()  # Whoever asked for the run knows better who is gone.

        payload.on_ended.append(ended)

    def close(self) -> None:
        """Leave, the first component's runtime after the others."""
        self._side.close()

    def may_start(self, payload: Payload) -> bool:
        """Whether all components are ready; the first call, when nothing of this component holds it up, says that it is."""
        if not self._ready:
            self._ready = True
            others = [each for each in self._spec.components if each != self._spec.component_id]
            if others:
                payload.phase("ready", "waiting for %s" % ", ".join("component %r" % each for each in others))
            self._side.ready(self._place())
        return self._open

    def _place(self) -> Place:
        """Where this component is."""
        cluster = self._runner.cluster
        return Place(socket.gethostname(), self._address, cluster.address if cluster is not None else None, self._nodes)

    def _take(self, order: Order) -> None:
        """Do what follows from what became of all components."""
        op, payload = order["op"], self._payload
        assert payload is not None
        if op == "over":
            return self._leave(payload, order["final"])
        if op == "start":
            payload.company = {COMPONENT: self._spec.component_id, COMPONENTS: json.dumps(order["components"])}
            if len(order["components"]) > 1:
                payload.phase("start", "all %d components are ready" % len(order["components"]))
            self._open = True
            self._runner.look_again()
        elif op == "give-up":
            payload.end_early(End(EndReason.CLUSTER_START, order["why"]))
        elif order["component"] == self._spec.component_id:
            if op == "end" and not payload.ended:
                payload.end_early(End(EndReason.RUNTIME, "the other components have given this one up: " + order["why"]))
        elif op == "end":
            self._ending = True
            payload.end_early(End(EndReason.OTHER_COMPONENT, "component %r: %s" % (order["component"], order["why"])))
        elif op == "told":
            payload.phase("component", "component %r: %s" % (order["component"], order["what"]))

    def _leave(self, payload: Payload, final: bool) -> None:
        """All is over; a payload that the others have given up ends first."""
        if not payload.ended:
            self._over = True
            return payload.end_early(End(EndReason.RUNTIME, "the other components have ended without this one"))
        if final and self._runner.spec.requeue:
            with contextlib.suppress(OSError, SpecError):
                take_secrets(payload.run_dir, keep=False)  # No other attempt will need them.
        self._runner.loop.stop()

    def finished(self, loop: Loop) -> None:
        """Keep the runtime until all components have ended."""

    def cluster_lost(self, why: str) -> None:
        """Tell the other components."""
        self._side.tell("its cluster is lost: " + why)

    def interrupted(self, loop: Loop, signum: int) -> None:
        """A signal to a runtime whose own payload has ended: its cluster, and the job if this is the host, ends early."""
        if self._side.interrupted("the runtime received %s" % signal.Signals(signum).name, 128 + signum):
            loop.stop()

    def _keep_fresh(self) -> None:
        with contextlib.suppress(OSError):
            os.utime(self._run_dir)
        self._runner.loop.call_later(_FRESH_INTERVAL, self._keep_fresh)


def share_of(spec: RuntimeSpec) -> Tuple[NodeResources, str]:
    """What one of several components on this machine is given of it; this process sees no other GPUs from here on.

    Args:
        spec: its start record, with all components and what each of them asks for.

    Returns:
        What it is given, and what is not as it seems, for the user, or "".
    """
    assert spec.meeting is not None
    here = detect(with_gpus=True)
    roles = cast(replace(spec, ray=None), here, visible_gpus(os.environ, here.num_gpus))
    role = next(each for each in roles if each.machine.component == spec.meeting.component_id)
    change(os.environ, role.environ)
    # Without Ray, nobody is told a number of GPUs that are none.
    remark = role.remark.partition(": ")[2] if spec.ray is not None else ""  # Whose it is, is clear.
    return replace(role.machine, component=None), remark


def failure_of(payload: Payload) -> Optional[str]:
    """What went wrong with a payload that has ended, as the others are told; None for success."""
    if payload.ending.exit_code == 0:
        return None
    end = payload.ending.how
    if end is None:
        return "its payload did not run"
    if end.reason != EndReason.EXIT:
        return end.message or end.reason
    if end.signal is not None:
        return "its payload was killed by %s" % signal_name(end.signal)
    return "its payload ended with exit code %s" % end.exit_code


def attend(
    runner: Supervisor, run_dir: str, here: Optional[Allocation] = None, hosts: Optional[Sequence[str]] = None
) -> BarrierParticipant:
    """Have a runtime take part in the meeting that its start record tells of.

    Args:
        runner: runs the payload; it has none yet.
        run_dir: the run's directory.
        here: the nodes of its component; None on this machine.
        hosts: where the first component's runtime may be reached; None on this machine.
    """
    assert runner.spec.meeting is not None
    nodes = [runner.nodes.machine.hostname] if here is None else here.nodes
    return BarrierParticipant(
        runner, runner.spec.meeting, run_dir, nodes, _HERE if here is None else here.head_addresses[0], hosts
    )
