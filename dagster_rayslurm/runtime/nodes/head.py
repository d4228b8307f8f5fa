"""The worker nodes of an allocation as the head's runtime sees them: it sends them commands and receives their events."""

from __future__ import annotations

import socket
import sys
from typing import Any, Callable, Dict, Iterable, List, Optional, Set

from ..node.resources import NodeResources, named
from ..node.worker_node import WorkerNode
from ..process.loop import Loop
from ..protocol.messages import NodeCommand, NodeEvent
from ..protocol.record import tail_file
from ..protocol.rpc import Channel, ChannelListener, Message, RpcServer
from ..protocol.spec import SpecError, from_fields

_STOP_TIMEOUT = 2.0
"""Seconds that the head's runtime waits at its end for the nodes to disconnect; a node cleans up within milliseconds."""
_USAGE_TIMEOUT = 0.25
"""Seconds that the end of a payload waits for the usage of the worker nodes."""
_UNDOES = {NodeCommand.REPORT: NodeCommand.MEASURE, NodeCommand.END_RAY: NodeCommand.START_RAY}
"""Each command that ends something, with the command that began it."""

UsageByHost = Dict[str, Dict[str, Any]]
"""The measured usage of each node, by hostname."""


class ConnectedWorkers(ChannelListener):
    """All worker nodes of an allocation: listens for their connections, sends them commands, and passes on their events.

    Implements `WorkerNodes`. To a node that reconnects, it sends once more all commands that still hold; the node's agent ignores
    those that it has carried out. Nodes are identified by their place in the allocation, which counts from 0, the head.

    Args:
        loop: the event loop.
        key: the secret that all runtimes of the allocation share, hex.
        ports: the ports to try; the RPC server listens on the first free one.
        nodes: names of all nodes; the first is the head, that is, this node.
        log_path: returns the path of a node's own log, given its place.
        on_event: called with a worker node and its event.
        component_of: returns the component of a node, given its place.

    Attributes:
        members: the worker nodes by place, whether connected or not.
    """

    def __init__(
        self,
        loop: Loop,
        key: str,
        ports: List[int],
        nodes: List[str],
        log_path: Callable[[int], str],
        on_event: Callable[[WorkerNode, Message], None],
        component_of: Callable[[int], Optional[str]] = lambda _: None,
    ) -> None:
        self.members = {place: WorkerNode(place, name, component_of(place)) for place, name in enumerate(nodes) if place}
        self._loop = loop
        self._log_path = log_path
        self._on_event = on_event
        self._node_of_channel: Dict[Channel, WorkerNode] = {}
        self._collecting: Dict[str, _UsageCollection] = {}
        self._stopped = False
        self._server = RpcServer(loop, key, ports, self, heartbeat=True)

    @property
    def pids(self) -> List[int]:
        """Process ids of the worker nodes' Ray on this machine: none, because the nodes are other machines."""
        return []

    def send_command(self, places: Iterable[int], **command: Any) -> None:
        """Send a command to the nodes at these places; a node that is not connected gets it when it connects.

        A command replaces an earlier command on the same subject, that is, the same task for the same Ray cluster or payload. A
        command that ends something is kept until the node has confirmed it.
        """
        op = NodeCommand(command["op"])
        name = command.get("cluster") or command.get("id") or ""
        for place in places:
            node = self.members[place]
            if op == NodeCommand.END_RAY:
                node.commands.pop(_subject(NodeCommand.RAY_READY, name), None)
            if op in _UNDOES and not node.joined:
                node.commands.pop(_subject(op, name), None)  # The node never got the command that began it.
                continue
            node.commands[_subject(op, name)] = command
            node.send(**command)

    def facts(self) -> List[Dict[str, Any]]:
        """For each worker node, its resources as far as they are known, and whether it is connected."""
        return [node.facts() for node in self.members.values()]

    def log_tail(self, node: WorkerNode) -> str:
        """The last lines of a node's own log, which this node reads from the shared file system."""
        return tail_file(self._log_path(node.node_id), lines=15)

    def measure(self, nonce: str, jobs: Optional[List[str]]) -> None:
        """Measure usage on all worker nodes for one payload.

        Args:
            nonce: identifies the payload.
            jobs: ids of the payload's known Ray jobs, if payloads share the Ray cluster; None for a Ray cluster of its own.
        """
        self.send_command(self.members, op=NodeCommand.MEASURE, id=nonce, jobs=jobs)

    def collect(self, nonce: str, done: Callable[[UsageByHost], None]) -> None:
        """Stop measuring for a payload, and call `done` with the usage of those nodes that answer in time."""
        connected = {node.node_id for node in self.members.values() if node.here}

        def collected(usage: UsageByHost) -> None:
            del self._collecting[nonce]
            done(usage)

        self._collecting[nonce] = collection = _UsageCollection(connected, collected)
        self.send_command(self.members, op=NodeCommand.REPORT, id=nonce)
        self._loop.call_later(_USAGE_TIMEOUT if connected else 0.0, collection.finish)

    def dismiss(self) -> None:
        """Tell all worker nodes to end their runtimes; nodes that have not connected yet are told when they connect."""
        self._stopped = True
        for node in self.members.values():
            node.send(op=NodeCommand.STOP)
        self._server.stop_heartbeat()

    def wait_gone(self, patience: float) -> None:
        """Wait until the worker nodes have cleaned up, because the end of this runtime may end theirs before they have.

        Args:
            patience: seconds to wait also for nodes that never connected: only this runtime can tell them to end.
        """
        if patience > 0 and not self._all_joined:
            self._loop.resume(patience)
        self._server.close()
        deadline = self._loop.now() + _STOP_TIMEOUT
        for node in self.members.values():
            if node.channel is not None:
                node.channel.wait_closed(deadline)

    def received(self, channel: Channel, message: Message) -> None:
        """Called with each message of a worker node; the first message of a connection says which node it is."""
        node = self._node_of_channel.get(channel)
        if node is None:
            return self._introduce(channel, message)
        event = message.get("event")
        if event == NodeEvent.USAGE:
            nonce, usage = message["id"], message["usage"]
            node.commands.pop(_subject(NodeCommand.REPORT, nonce), None)
            if nonce in self._collecting and usage is not None:
                self._collecting[nonce].add(node, usage)
        elif event == NodeEvent.RAY_ENDED:
            node.commands.pop(_subject(NodeCommand.END_RAY, message["cluster"]), None)
        else:
            self._on_event(node, message)

    def closed(self, channel: Channel, why: str) -> None:
        """Called when a connection has ended: reports the loss of the node, unless the node has reconnected."""
        node = self._node_of_channel.pop(channel, None)
        if node is not None and node.detach(channel):
            node.losses += 1
            self._on_event(node, {"event": NodeEvent.LOST, "message": why})

    @property
    def _all_joined(self) -> bool:
        return all(node.joined for node in self.members.values())

    def _introduce(self, channel: Channel, message: Message) -> None:
        """Take a new connection as that of the node that its first message names, and send the node its commands."""
        place, resources = message.get("node_id"), message.get("machine")
        node = self.members.get(place) if isinstance(place, int) else None
        try:
            from_fields(NodeResources, resources, "what a node tells of itself")
        except SpecError as error:
            print("rayslurm: %s" % error, file=sys.stderr)
            node = None
        if node is None or resources is None:
            return channel.close()
        reconnected = node.joined
        if node.channel is not None:
            del self._node_of_channel[node.channel]
        node.attach(channel)
        node.machine = resources
        self._node_of_channel[channel] = node
        if self._stopped:
            channel.send(op=NodeCommand.STOP)
            return self._loop.stop() if self._all_joined else None
        for command in node.commands.values():
            channel.send(**command)
        if not reconnected:
            self._on_event(node, {"event": NodeEvent.JOINED})


def _subject(op: NodeCommand, name: str) -> str:
    """What a command is about; a command that ends something has the same subject as the command that began it."""
    return "%s %s" % (_UNDOES.get(op, op), name)


class _UsageCollection:
    """Collects the usage of one payload from the expected nodes; calls `done` once, when all have answered or at `finish`."""

    def __init__(self, expected: Set[int], done: Callable[[UsageByHost], None]) -> None:
        self._expected = expected
        self._done: Optional[Callable[[UsageByHost], None]] = done
        self._usage: UsageByHost = {}

    def add(self, node: WorkerNode, usage: Dict[str, Any]) -> None:
        if node.node_id in self._expected:
            self._expected.remove(node.node_id)
            # In a test cluster several nodes may run on one machine, and so have the same hostname.
            taken = node.hostname in self._usage or node.hostname == socket.gethostname()
            other_name = node.name if node.component is None else named(*node.identity)
            self._usage[other_name if taken else node.hostname] = usage
        if not self._expected:
            self.finish()

    def finish(self) -> None:
        """Call `done` with the usage so far, unless it was called."""
        if self._done is not None:
            done, self._done = self._done, None
            done(self._usage)
