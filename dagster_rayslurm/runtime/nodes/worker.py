"""The runtime of a worker node: connects to the head's runtime and follows the head's commands until STOP."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass, replace
from typing import Callable

from ..node import resources
from ..node.allocation import Allocation
from ..node.memory import MemoryWatch
from ..process import processes
from ..process.loop import Loop
from ..process.scratch import Scratch
from ..protocol.messages import NodeCommand, NodeEvent
from ..protocol.rpc import HEARTBEAT_INTERVAL, HEARTBEAT_TIMEOUT, Channel, Listener, Message, RpcClient, all_addresses
from ..protocol.spec import RuntimeSpec
from ..ray.ray_node import ClusterDir
from .agent import NodeAgent

_HEAD_SIGNAL_TIMEOUT = 20.0
"""Seconds after a signal in which the head must say that it ends as well. After 30 s Slurm sends SIGKILL (KillWait)."""
_FIRST_CONNECT_TIMEOUT = 600.0
"""Seconds until a head that was never reached counts as lost; usually the head itself ends the Slurm step long before."""


@dataclass(eq=False)
class Worker(Listener):
    """The runtime of one worker node: passes the head's commands to the node agent, and the agent's events to the head."""

    loop: Loop
    spec: RuntimeSpec
    allocation: Allocation
    scratch: Scratch
    on_connected: Callable[[], None] = lambda: None  # Called each time that this node has connected to the head's runtime.
    exit_code: int = 0  # Of this node's Slurm task; any but 0 ends the Slurm step on all nodes.

    def __post_init__(self) -> None:
        spec, allocation = self.spec, self.allocation
        assert spec.control_key is not None
        detected = resources.detect(with_gpus=resources.may_need_gpus(spec))
        self._machine = replace(detected, component=allocation.component_of(allocation.node_id))
        override = [spec.ray.node_ip_address] if spec.ray is not None and spec.ray.node_ip_address else []
        addresses = all_addresses([*allocation.head_addresses, *override], spec.control_ports)
        self._head = RpcClient(self.loop, spec.control_key, addresses, self)
        self._agent = NodeAgent(self.loop, spec, self._machine, self._head.send, self.log, self._scratch_for)
        MemoryWatch(self.loop, self._machine.name, lambda: self._agent.guarded, lambda: [], self._report_memory)
        self._parent = os.getppid()
        self._was_signalled = self._head_is_ending = self._was_connected = False
        self._logged_problem = ""
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            self.loop.on_signal(signum, self._signalled)

    def run(self) -> None:
        """Run until the head sends STOP, the head is lost, or a signal ends this node; then clean up."""
        try:
            self._head.connect()
            self._check_head()
            self.loop.run()
        finally:
            self._agent.end()
            processes.kill_descendants(os.getpid(), collect=self.loop.reap)
            self.scratch.remove()

    def authenticated(self, channel: Channel) -> None:  # noqa: ARG002
        self._was_connected = True
        self._head.send(node_id=self.allocation.node_id, machine=self._machine.facts())
        self.on_connected()

    def received(self, channel: Channel, message: Message) -> None:  # noqa: ARG002
        op = message.get("op")
        if op == NodeCommand.ENDING:
            self._head_is_ending = True
        elif op == NodeCommand.STOP:
            self.loop.stop()
        else:
            self._agent.handle(message)

    def closed(self, channel: Channel, why: str) -> None:  # noqa: ARG002
        if self._was_signalled:
            self.loop.stop()  # Slurm ends the step, and the head ended first.

    def log(self, text: str) -> None:
        sys.stderr.write("rayslurm on %s: %s\n" % (self._machine.name, text))
        sys.stderr.flush()

    def _signalled(self, signum: int) -> None:
        """Called when this runtime receives a signal: ends it, unless the head is connected and so decides when to end.

        Slurm usually signals all processes of the step, and so the head as well, which gives payloads their grace period.
        """
        self.log("received %s" % signal.Signals(signum).name)
        self._was_signalled = True
        # If the keeper, this runtime's parent, is gone, nothing cleans up after SIGKILL: end while there is time.
        if not self._head.is_connected or os.getppid() != self._parent:
            self.loop.stop()
        elif len(self.spec.components) > 1:
            self.loop.call_later(_HEAD_SIGNAL_TIMEOUT, self._leave_component)

    def _leave_component(self) -> None:
        """End this runtime after a signal that the head did not get: Slurm ends only this node's component.

        If the head was signalled as well, it has sent ENDING, and nothing happens.
        """
        if not self._head_is_ending:
            self.log("its component is being ended, and the head's goes on; ending")
            self.exit_code = 128 + signal.SIGTERM
            self.loop.stop()

    def _check_head(self) -> None:
        """End this runtime if the head has been silent for too long; else check again later."""
        silent = self._head.silent_for
        if silent > (HEARTBEAT_TIMEOUT if self._was_connected else _FIRST_CONNECT_TIMEOUT):
            self.log("the head's runtime has been out of reach for %d s; ending" % silent)
            return self.loop.stop()
        if self._head.problem != self._logged_problem:
            self._logged_problem = self._head.problem
            self.log("the head's runtime cannot be reached at " + self._logged_problem)
        self.loop.call_later(HEARTBEAT_INTERVAL, self._check_head)

    def _report_memory(self, message: str, killed: bool) -> None:
        self.log(message)
        self._head.send(event=NodeEvent.MEMORY, message=message, killed=killed)

    def _scratch_for(self, cluster_key: str) -> Scratch:
        return ClusterDir(self.scratch) if cluster_key else self.scratch
