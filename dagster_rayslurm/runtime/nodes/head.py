"""The head's view of the worker nodes of an allocation: their connections, commands to them, and their events."""

from __future__ import annotations

import socket
import sys
from typing import Any, Callable, Dict, Iterable, List, Optional, Set

from ..node.resources import NodeResources
from ..node.worker_node import WorkerNode, named
from ..process.loop import Loop
from ..protocol.node_messages import NodeCommand, NodeEvent
from ..protocol.record import tail_file
from ..protocol.rpc import Channel, ChannelListener, Message
from ..protocol.rpc_server import RpcServer
from ..protocol.spec import SpecError, from_fields

_STOP_TIMEOUT = 2.0
"""Seconds that the head's runtime waits at its end for the nodes to disconnect; a node cleans up within milliseconds."""
_USAGE_TIMEOUT = 0.25
"""Seconds that the end of a payload waits for the usage of other nodes."""
_UNDOES = {NodeCommand.REPORT: NodeCommand.MEASURE, NodeCommand.END_RAY: NodeCommand.START_RAY}
"""The commands that end what another command began."""

UsageByHost = Dict[str, Dict[str, Any]]


class ConnectedWorkers(ChannelListener):
    """The worker nodes of an allocation, which connect to this runtime by RPC; see `WorkerNodes`.

    A node that reconnects is sent all commands that still hold once more; its agent ignores those that it has carried out.

    Args:
        loop: the event loop.
        key: the secret of this run, hex.
        ports: the RPC server listens on the first free one.
        nodes: names of all nodes; the first is this one.
        log_path: returns the path of a node's own log.
        on_event: called with a node and its event.
        component_of: returns the component of a node.
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
        """Processes of the worker nodes on this machine: none."""
        return []

    def send_command(self, places: Iterable[int], **command: Any) -> None:
        """Send a command to some nodes; a node that is not connected gets it when it connects.

        A command replaces an earlier one on the same subject, which is its `op` and the cluster or payload that it names. A
        command that ends something holds until the node has confirmed it.
        """
        op = NodeCommand(command["op"])
        name = command.get("cluster") or command.get("id") or ""
        for place in places:
            node = self.members[place]
            if op == NodeCommand.END_RAY:
                node.commands.pop(_subject(NodeCommand.RAY_READY, name), None)
            if op in _UNDOES and not node.joined:
                node.commands.pop(_subject(op, name), None)  # The node never heard of what ends now.
                continue
            node.commands[_subject(op, name)] = command
            node.send(**command)

    def facts(self) -> List[Dict[str, Any]]:
        """The resources of the nodes as far as they are known, and whether they are connected."""
        return [node.facts() for node in self.members.values()]

    def log_tail(self, node: WorkerNode) -> str:
        """The last lines of a node's own log, read from the shared file system."""
        return tail_file(self._log_path(node.node_id), lines=15)

    def measure(self, nonce: str, jobs: Optional[List[str]]) -> None:
        """Measure usage on all nodes for one payload; `jobs` are its known Ray jobs in a cluster that payloads share."""
        self.send_command(self.members, op=NodeCommand.MEASURE, id=nonce, jobs=jobs)

    def collect(self, nonce: str, done: Callable[[UsageByHost], None]) -> None:
        """Stop measuring for a payload, and call `done` with the usage of the nodes that answer in time."""
        connected = {node.node_id for node in self.members.values() if node.here}

        def collected(usage: UsageByHost) -> None:
            del self._collecting[nonce]
            done(usage)

        self._collecting[nonce] = collection = _UsageCollection(connected, collected)
        self.send_command(self.members, op=NodeCommand.REPORT, id=nonce)
        self._loop.call_later(_USAGE_TIMEOUT if connected else 0.0, collection.finish)

    def dismiss(self) -> None:
        """Stop all nodes; those that have not connected yet, when they connect."""
        self._stopped = True
        for node in self.members.values():
            node.send(op=NodeCommand.STOP)
        self._server.stop_heartbeat()

    def wait_gone(self, patience: float) -> None:
        """Wait until the worker nodes have cleaned up, because the end of this runtime may end theirs.

        Args:
            patience: seconds to wait for nodes that never connected, as only this runtime can stop them.
        """
        if patience > 0 and not self._all_joined:
            self._loop.resume(patience)
        self._server.close()
        deadline = self._loop.now() + _STOP_TIMEOUT
        for node in self.members.values():
            if node.channel is not None:
                node.channel.wait_closed(deadline)

    def received(self, channel: Channel, message: Message) -> None:
        """Handle a message; the first one of a channel names the node."""
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
        """Report the loss of a node, unless it has reconnected."""
        node = self._node_of_channel.pop(channel, None)
        if node is not None and node.detach(channel):
            node.losses += 1
            self._on_event(node, {"event": NodeEvent.LOST, "message": why})

    @property
    def _all_joined(self) -> bool:
        return all(node.joined for node in self.members.values())

    def _introduce(self, channel: Channel, message: Message) -> None:
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
    return "%s %s" % (_UNDOES.get(op, op), name)


class _UsageCollection:
    """Usage of one payload; calls `done` once, when all expected nodes have answered or by `finish`."""

    def __init__(self, expected: Set[int], done: Callable[[UsageByHost], None]) -> None:
        self._expected = expected
        self._done: Optional[Callable[[UsageByHost], None]] = done
        self._usage: UsageByHost = {}

    def add(self, node: WorkerNode, usage: Dict[str, Any]) -> None:
        if node.node_id in self._expected:
            self._expected.remove(node.node_id)
            # Several nodes of a test bed may be one host, which has one hostname.
            taken = node.hostname in self._usage or node.hostname == socket.gethostname()
            other_name = node.name if node.component is None else named(*node.identity)
            self._usage[other_name if taken else node.hostname] = usage
        if not self._expected:
            self.finish()

    def finish(self) -> None:
        if self._done is not None:
            done, self._done = self._done, None
            done(self._usage)
