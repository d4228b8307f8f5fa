"""The other nodes of an allocation, as the head's runtime sees them: who has come, what they say, what they are told."""

from __future__ import annotations

import functools
import socket
import sys
from typing import Any, Callable, Dict, Iterable, List, Optional, Set

from ..node.resources import NodeResources
from ..node.worker_node import WorkerNode, named
from ..process.loop import Loop
from ..protocol.heartbeat import Heartbeat
from ..protocol.record import tail_file
from ..protocol.rpc import Channel, Message
from ..protocol.rpc_server import RpcServer
from ..protocol.spec import SpecError, from_fields

_FAREWELL = 2.0
"""Seconds that the head's runtime outstays the work for the others; a node takes some milliseconds to tidy up."""
_USAGE_TIMEOUT = 0.25
"""Seconds that the end of a run waits for the other nodes' figures."""
_ABOUT = {"report": "measure", "end-ray": "ray"}
"""The orders that end something, and the orders that began it."""


class ConnectedWorkers:
    """Accepts the workers' connections and passes on what they say.

    Args:
        loop: where everything happens.
        key: the secret of this run, hex.
        ports: where to listen, the first free one.
        nodes: names of all nodes; the first is this one.
        log_path: where a node's own log is, by its place.
        on_message: called with a member and its message; "joined" and "lost" come from here, too.
        component_of: the component that the node in a place belongs to.
    """

    def __init__(
        self,
        loop: Loop,
        key: str,
        ports: List[int],
        nodes: List[str],
        log_path: Callable[[int], str],
        on_message: Callable[[WorkerNode, Message], None],
        component_of: Callable[[int], Optional[str]] = lambda _: None,
    ) -> None:
        self.members = {place: WorkerNode(place, name, component_of(place)) for place, name in enumerate(nodes) if place}
        self._loop = loop
        self._log_path = log_path
        self._on_message = on_message
        self._collecting: Dict[str, _Collection] = {}
        self._dismissed = False
        self._door = RpcServer(loop, key, ports, self._introduced)
        self._pulse = Heartbeat(loop, self.members.values, self._lost)

    @property
    def pids(self) -> List[int]:
        """Processes on this machine that are theirs: none."""
        return []

    def order(self, places: Iterable[int], **order: Any) -> None:
        """Tell some nodes something, those too that join later; a later order about the same thing replaces it.

        What an order is about: its `op`, and the cluster or the payload that it names. One that ends something stands until
        the node says that it has obeyed, as it may not hear it at once.
        """
        slot = "%s %s" % (_ABOUT.get(order["op"], order["op"]), order.get("cluster") or order.get("id") or "")
        for place in places:
            member = self.members[place]
            if order["op"] == "end-ray":
                member.orders.pop("ready %s" % order["cluster"], None)
            if order["op"] in _ABOUT and not member.joined:
                member.orders.pop(slot, None)  # It never heard of what ends.
                continue
            member.orders[slot] = order
            member.send(**order)

    def facts(self) -> List[Dict[str, Any]]:
        """The nodes, what each of them grants as far as that is known, and whether they can be reached."""
        return [member.facts() for member in self.members.values()]

    def log_tail(self, member: WorkerNode) -> str:
        """The end of what a node's runtime had to say, from the file system that all nodes share."""
        return tail_file(self._log_path(member.node_id), lines=15)

    def measure(self, nonce: str, jobs: Optional[List[str]]) -> None:
        """Measure on all nodes for one payload; `jobs` are its own in a Ray cluster that is shared, as far as they are known."""
        self.order(self.members, op="measure", id=nonce, jobs=jobs)

    def collect(self, nonce: str, done: Callable[[Dict[str, Dict[str, Any]]], None]) -> None:
        """End the measuring for a payload and hand over the figures by hostname; of those that answer soon."""
        asked = {member.node_id for member in self.members.values() if member.here}

        def collected(figures: Dict[str, Dict[str, Any]]) -> None:
            del self._collecting[nonce]
            done(figures)

        self._collecting[nonce] = collection = _Collection(asked, collected)
        self.order(self.members, op="report", id=nonce)
        self._loop.call_later(_USAGE_TIMEOUT if asked else 0.0, collection.finish)

    def dismiss(self) -> None:
        """Send everybody home; those who have not come yet, as they come."""
        self._dismissed = True
        for member in self.members.values():
            member.send(op="stop")
        self._pulse.stop()

    def wait_gone(self, patience: float) -> None:
        """Wait until the others have tidied up: the end of this runtime may well be the end of theirs.

        Args:
            patience: seconds for those who have never come; nobody else would tell them that there is nothing to do.
        """
        if patience > 0 and not self._complete:
            self._loop.resume(patience)
        self._door.close()
        deadline = self._loop.now() + _FAREWELL
        for member in self.members.values():
            if member.channel is not None:
                member.channel.wait_end(deadline)

    @property
    def _complete(self) -> bool:
        return all(member.joined for member in self.members.values())

    def _introduced(self, channel: Channel, message: Message) -> None:
        """The first message after the proof says which node it is; later ones are that node's."""
        place, facts = message.get("node_id"), message.get("machine")
        member = self.members.get(place) if isinstance(place, int) else None
        try:
            from_fields(NodeResources, facts, "what a node tells of itself")
        except SpecError as error:
            print("rayslurm: %s" % error, file=sys.stderr)
            member = None
        if member is None or facts is None:
            return channel.close()
        again = member.joined
        member.came(channel, self._loop.now())
        member.machine = facts
        channel.on_message(functools.partial(self._take, member))
        channel.on_gone(functools.partial(self._lost, member, channel, "its connection ended"))
        if self._dismissed:
            channel.send(op="stop")
            return self._loop.stop() if self._complete else None
        for order in member.orders.values():
            channel.send(**order)
        if not again:
            self._on_message(member, {"event": "joined"})

    def _take(self, member: WorkerNode, message: Message) -> None:
        member.heard = self._loop.now()
        event = message.get("event")
        if event == "pong":
            return
        if event == "usage":
            member.orders.pop("measure %s" % message["id"], None)
            if message["id"] in self._collecting and message["usage"] is not None:
                self._collecting[message["id"]].take(member, message["usage"])
            return
        if event == "ended":
            member.orders.pop("ray %s" % message["cluster"], None)
            return
        self._on_message(member, message)

    def _lost(self, member: WorkerNode, channel: Channel, why: str) -> None:
        if member.went(channel):
            member.losses += 1
            self._on_message(member, {"event": "lost", "message": why})


class _Collection:
    """Figures on their way in; handed over once, when all are there or it is time."""

    def __init__(self, waiting: Set[int], done: Callable[[Dict[str, Dict[str, Any]]], None]) -> None:
        self._waiting = waiting
        self._done: Optional[Callable[[Dict[str, Dict[str, Any]]], None]] = done
        self._figures: Dict[str, Dict[str, Any]] = {}

    def take(self, member: WorkerNode, usage: Dict[str, Any]) -> None:
        if member.node_id in self._waiting:
            self._waiting.remove(member.node_id)
            # Several nodes of a test bed may be one host, which has one hostname.
            taken = member.hostname in self._figures or member.hostname == socket.gethostname()
            other_name = member.name if member.component is None else named(*member.identity)
            self._figures[other_name if taken else member.hostname] = usage
        if not self._waiting:
            self.finish()

    def finish(self) -> None:
        if self._done is not None:
            done, self._done = self._done, None
            done(self._figures)
