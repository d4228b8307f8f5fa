"""A node of an allocation that is not the head: joins the head's runtime, starts Ray as told, measures, goes home."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import traceback
from typing import Any, Callable, Dict, List, NamedTuple, Optional

from . import machine, processes
from .allocation import Allocation
from .channel import Channel, Message
from .cluster import node_address
from .clusters import asks_for_gpus, clear_away, token_of, worker_env_of
from .corner import Corners
from .loop import Loop
from .ray_arguments import ClusterError
from .ray_start import RayStart
from .scratch import Scratch
from .spec import RaySpec, RuntimeSpec, from_json
from .team import PING_INTERVAL, SILENCE
from .usage import Sampler

_CONNECT_TIMEOUT = 1.0
_RETRY = 0.1
_INTRODUCTION = 3.0
"""Seconds in which the head must prove itself; something else may listen on the port."""
_FIRST_WORD = 600.0
"""Seconds until a head that was never reached is given up; it ends the step long before, after its own deadline."""


class _Joined(NamedTuple):
    """A cluster that this node belongs to."""

    attempt: int
    ray: RayStart
    place: Scratch


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
        self._key = spec.control_key
        self._loop = loop
        self._spec = spec
        self._allocation = allocation
        self._scratch = private
        self._on_joined = on_joined
        self._machine = machine.detect(with_gpus=asks_for_gpus(spec))
        self._clusters: Dict[str, _Joined] = {}
        self._corners = Corners(private)
        self._samplers: Dict[str, Sampler] = {}
        self._channel: Optional[Channel] = None
        self._heard = loop.now()
        self._parent = os.getppid()
        self._signalled_once = False
        self._ever_joined = False
        self._problem = ""
        self._candidates = self._addresses()
        self._first = self._candidates[0]
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.on_signal(signum, self._signalled)

    def run(self) -> None:
        """Stay until the head sends this node home, or is lost."""
        try:
            self._connect()
            self._watch()
            self._loop.run()
        finally:
            for joined in self._clusters.values():
                joined.ray.end()
            processes.kill_descendants(os.getpid(), collect=self._loop.reap)
            self._scratch.remove()

    def _signalled(self, signum: int) -> None:
        """Slurm signals every process of the step; a head that is there decides how much time is left."""
        self._say("received %s" % signal.Signals(signum).name)
        self._signalled_once = True
        alone = self._channel is None or not self._channel.proved
        if alone or os.getppid() != self._parent:  # Without its keeper, nobody would clean up after this runtime.
            self._loop.stop()

    def _addresses(self) -> List[Any]:
        ray = self._spec.ray
        override = [ray.node_ip_address] if ray is not None and ray.node_ip_address else []
        hosts = dict.fromkeys([*self._allocation.head_addresses, *override])
        return [(host, port) for port in self._spec.control_ports for host in hosts]

    def _connect(self) -> None:
        """Try the next place where the head may listen."""
        if self._channel is not None:
            return
        place = self._candidates.pop(0)
        self._candidates.append(place)
        try:
            sock = socket.create_connection(place, timeout=_CONNECT_TIMEOUT)
        except OSError as error:
            problem = "%s:%d: %s" % (place[0], place[1], error)
            if problem != self._problem and place == self._first:
                self._say("the head's runtime cannot be reached at " + problem)
                self._problem = problem
            self._loop.call_later(_RETRY, self._connect)
            return
        channel = Channel(self._loop, sock, self._key, "worker", self._joined, self._take, self._disconnected)
        self._channel = channel

        def not_the_head() -> None:
            if self._channel is channel and not channel.proved:
                channel.close()
                self._disconnected()

        self._loop.call_later(_INTRODUCTION, not_the_head)

    def _joined(self) -> None:
        assert self._channel is not None
        self._ever_joined = True
        self._heard = self._loop.now()
        self._channel.send(node_id=self._allocation.node_id, machine=self._machine.facts())
        self._on_joined()

    def _disconnected(self) -> None:
        self._channel = None
        if self._signalled_once:
            return self._loop.stop()  # Slurm ends the step, and the head has gone ahead.
        self._loop.call_later(_RETRY, self._connect)

    def _watch(self) -> None:
        """End when the head has not been heard for too long."""
        silent = self._loop.now() - self._heard
        if silent > (SILENCE if self._ever_joined else _FIRST_WORD):
            self._say("the head's runtime has been out of reach for %d s; ending" % silent)
            return self._loop.stop()
        self._loop.call_later(PING_INTERVAL, self._watch)

    def _take(self, message: Message) -> None:
        try:
            self._obey(message)
        except Exception as error:
            if message.get("op") != "ray":
                raise  # It is the end of this connection, not of this runtime.
            traceback.print_exc()
            named = {"cluster": message["cluster"]} if message.get("cluster") else {}
            said = "node %s: %s: %s" % (self._machine.hostname, type(error).__name__, error)
            self._send(event="failed", attempt=message.get("attempt"), reason="cluster-start", message=said, tails={}, **named)

    def _obey(self, message: Message) -> None:
        self._heard = self._loop.now()
        op = message.get("op")
        if op == "ping":
            self._send(event="pong")
        elif op == "ray":
            self._start_ray(message)
        elif op == "ready":
            joined = self._clusters.get(message.get("cluster", ""))
            if joined is not None and message["attempt"] == joined.attempt:
                joined.ray.ready = True
        elif op == "end-ray":
            self._end_ray(message["cluster"])
            self._send(event="ended", cluster=message["cluster"])
        elif op == "measure" and message["id"] not in self._samplers:
            self._measure(message["id"])
        elif op == "report":
            sampler = self._samplers.pop(message["id"], None)
            self._send(event="usage", id=message["id"], usage=None if sampler is None else sampler.stop())
        elif op == "stop":
            self._loop.stop()

    def _measure(self, nonce: str) -> None:
        """Measure what all of Ray on this node uses, but for clusters that are another payload's own."""

        def not_mine() -> List[int]:
            others = [joined.ray.pid for key, joined in self._clusters.items() if key and key != nonce]
            return [pid for pid in others if pid is not None]

        own = self._clusters.get(nonce) or self._clusters.get("")
        where = self._scratch.ray_temp_dir if own is None else own.place.ray_temp_dir
        self._samplers[nonce] = Sampler(self._loop, where, not_mine)

    def _start_ray(self, order: Message) -> None:
        """Start Ray, or start it anew for a head that had to take another port; after a reconnection it runs already."""
        key, attempt = str(order.get("cluster", "")), int(order["attempt"])
        before = self._clusters.get(key)
        if before is not None and before.attempt == attempt:
            return
        spec = from_json(RaySpec, json.dumps(order["ray"])) if key else self._spec.ray
        assert spec is not None
        named = {"cluster": key} if key else {}

        def failed(error: ClusterError, tails: Optional[Dict[str, str]] = None) -> None:
            self._say(str(error))
            tails = ray.log_tails() if tails is None else tails
            self._send(event="failed", attempt=attempt, reason=error.reason, message=str(error), tails=tails, **named)

        place: Scratch = self._scratch
        if before is not None:
            before.ray.end()
            os.unlink(before.ray.token_path)
            place = before.place
        elif key:
            try:
                place = self._corners.take()
            except OSError as error:
                return failed(ClusterError("cluster-start", "node %s: %s" % (self._machine.hostname, error)), {})
        ray = RayStart(
            self._loop,
            spec,
            self._machine,
            place,
            token_of(self._key, key),
            int(order["nodes"]),
            lambda *_: None,
            lambda *_: None,
            failed,
            lambda *said: self._say(said[1]),
            worker_env_of(self._spec, key),
        )
        self._clusters[key] = _Joined(attempt, ray, place)
        try:
            ray.start(node_address(spec, order["gcs"]), order["gcs"])
        except ClusterError as error:
            failed(error)

    def _end_ray(self, key: str) -> None:
        joined = self._clusters.pop(key, None)
        if joined is not None:
            joined.ray.end()
            clear_away(self._loop, joined.place, key)

    def _send(self, **message: Any) -> None:
        if self._channel is not None and self._channel.proved:
            self._channel.send(**message)

    def _say(self, text: str) -> None:
        """Write to this node's log, whose end the head shows if this node is missing."""
        sys.stderr.write("rayslurm on %s: %s\n" % (self._machine.hostname, text))
        sys.stderr.flush()
