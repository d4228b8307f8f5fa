"""A node of an allocation that is not the head: joins the head's runtime, starts Ray as told, measures, goes home."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from typing import Any, Callable

from ..node import resources
from ..node.allocation import Allocation
from ..node.memory_watch import MemoryWatch
from ..node.resources import may_need_gpus
from ..process import processes
from ..process.loop import Loop
from ..process.scratch import Scratch
from ..protocol.heartbeat import PING_INTERVAL, SILENCE
from ..protocol.rpc import Message
from ..protocol.rpc_client import Place, RpcClient, places
from ..protocol.spec import RuntimeSpec
from ..ray.cluster_dir import ClusterDirs
from .node_agent import Follower

_FORSAKEN = 20.0
"""Seconds after a signal in which a head that has got it, too, has said that it ends; SIGKILL comes after 30 (KillWait)."""
_FIRST_WORD = 600.0
"""Seconds until a head that was never reached is given up; it ends the step long before, after its own deadline."""


class Worker:
    """One node's runtime, for as long as its head is there.

    Args:
        loop: where everything happens.
        spec: the start record, the same as the head's.
        allocation: where this node stands.
        private: scratch directory of this runtime.
        on_joined: called each time that the head's runtime has been reached.
    """

    def __init__(
        self,
        loop: Loop,
        spec: RuntimeSpec,
        allocation: Allocation,
        private: Scratch,
        on_joined: Callable[[], None] = lambda: None,
    ) -> None:
        assert spec.control_key is not None
        self._loop = loop
        self._spec = spec
        self._allocation = allocation
        self._scratch = private
        self._on_joined = on_joined
        found = resources.detect(with_gpus=may_need_gpus(spec))
        self._machine = replace(found, component=allocation.component_of(allocation.node_id))
        corners = ClusterDirs(private)
        self._ray = Follower(loop, spec, self._machine, lambda key: corners.take() if key else private, self._send, self._say)
        MemoryWatch(loop, self._machine.name, lambda: self._ray.guarded, lambda: [], self._tell_of_memory)
        self._heard = loop.now()
        self._parent = os.getppid()
        self._signalled_once = False
        self._head_ends = False
        """Whether the head has been signalled as well, and gives payloads the time that they ask for."""
        self.exit_code = 0
        """That of this node's task; any other than 0 ends the step on all nodes."""
        self._ever_joined = False
        self._problem = ""
        ray = spec.ray
        override = [ray.node_ip_address] if ray is not None and ray.node_ip_address else []
        found_at = places([*allocation.head_addresses, *override], spec.control_ports)
        self._first = found_at[0]
        self._head = RpcClient(loop, spec.control_key, found_at, self._joined, self._take, self._lost, self._out_of_reach)
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.on_signal(signum, self._signalled)

    def run(self) -> None:
        """Stay until the head sends this node home, or is lost."""
        try:
            self._head.dial()
            self._watch()
            self._loop.run()
        finally:
            self._ray.end()
            processes.kill_descendants(os.getpid(), collect=self._loop.reap)
            self._scratch.remove()

    def _signalled(self, signum: int) -> None:
        """Slurm signals every process of the step; a head that is there decides how much time is left."""
        self._say("received %s" % signal.Signals(signum).name)
        self._signalled_once = True
        if not self._head.joined or os.getppid() != self._parent:  # Without its keeper, nobody would clean up after this runtime.
            self._loop.stop()
        elif len(self._spec.components) > 1:
            self._loop.call_later(_FORSAKEN, self._forsake)

    def _forsake(self) -> None:
        """Leave while there is time to tidy up: the head was not signalled, so Slurm ends this node's component alone."""
        if self._head_ends:
            return
        self._say("its component is being ended, and the head's goes on; ending")
        self.exit_code = 128 + signal.SIGTERM
        self._loop.stop()

    def _out_of_reach(self, place: Place, why: str) -> None:
        problem = "%s:%d: %s" % (place[0], place[1], why)
        if problem != self._problem and place == self._first:
            self._say("the head's runtime cannot be reached at " + problem)
            self._problem = problem

    def _joined(self) -> None:
        self._ever_joined = True
        self._heard = self._loop.now()
        self._send(node_id=self._allocation.node_id, machine=self._machine.facts())
        self._on_joined()

    def _lost(self) -> None:
        if self._signalled_once:
            self._loop.stop()  # Slurm ends the step, and the head has gone ahead.

    def _watch(self) -> None:
        """End when the head has not been heard for too long."""
        silent = self._loop.now() - self._heard
        if silent > (SILENCE if self._ever_joined else _FIRST_WORD):
            self._say("the head's runtime has been out of reach for %d s; ending" % silent)
            return self._loop.stop()
        self._loop.call_later(PING_INTERVAL, self._watch)

    def _take(self, message: Message) -> None:
        self._heard = self._loop.now()
        op = message.get("op")
        if op == "ping":
            self._send(event="pong")
        elif op == "ending":
            self._head_ends = True
        elif op == "stop":
            self._loop.stop()
        else:
            self._ray.obey(message)

    def _tell_of_memory(self, message: str, killed: bool) -> None:
        self._say(message)
        self._send(event="memory", message=message, killed=killed)

    def _send(self, **message: Any) -> None:
        self._head.send(**message)

    def _say(self, text: str) -> None:
        """Write to this node's log, whose end the head shows if this node is missing."""
        sys.stderr.write("rayslurm on %s: %s\n" % (self._machine.name, text))
        sys.stderr.flush()
