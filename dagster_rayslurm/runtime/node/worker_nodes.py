"""The worker nodes of an allocation: the head's runtime sends commands to the worker nodes, and receives events from them."""

from __future__ import annotations

import socket
import sys
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional, Set, Tuple

from ..process.loop import Loop, Timer
from ..protocol.messages import NodeCommand, NodeEvent
from ..protocol.record import tail_file
from ..protocol.rpc import RECONNECT_GRACE, Channel, Listener, Message, RpcServer
from ..protocol.spec import SpecError, from_fields
from .resources import NodeResources, named

# Seconds that the head's runtime waits at its end for the nodes to disconnect; a node cleans up within milliseconds.
_STOP_TIMEOUT = 2.0
_USAGE_TIMEOUT = 0.25  # Seconds that the end of a payload waits for the usage of the worker nodes.
# Each command that ends something, with the command that began it.
_UNDOES = {NodeCommand.REPORT: NodeCommand.MEASURE, NodeCommand.END_RAY: NodeCommand.START_RAY}
UsageByHost = Dict[str, Dict[str, Any]]  # The measured usage of each node, by hostname, with its component if it has one.


class Identity(NamedTuple):
    """Host name and component of a node: together they identify the node in Ray's node table.

    The component is None if the allocation has no components.
    """

    hostname: str
    component: Optional[str]


@dataclass(eq=False)
class WorkerNode:
    """What the runtime on the head node knows of one worker node: name, resources, connection, and commands.

    The commands are kept because the node gets them again when it reconnects.
    """

    node_id: int  # Its index in the allocation, in which 0 is the head.
    name: str
    component: Optional[str] = None
    machine: Optional[NodeResources] = None  # The resources that the node reports when it joins.
    commands: Dict[str, Message] = field(default_factory=dict)  # Commands to send again after a reconnection, by `_subject`.
    gone: bool = False  # Whether the node has not reconnected in time after a loss.
    grace: Timer = field(default_factory=Timer)  # Runs from the loss of the connection until the node counts as gone.
    channel: Optional[Channel] = None  # The newest connection; None while the node is not connected.

    @property
    def pids(self) -> List[int]:
        """Ids of Ray's topmost processes on the node, one for each Ray cluster, if the node is simulated on this machine.

        The list is empty for a node on another machine.
        """
        return []

    @property
    def here(self) -> bool:
        """Whether the node is connected to the head now."""
        return self.channel is not None

    def send(self, **message: Any) -> None:
        """Send a message with the given keys to the node; if the node is not connected now, the message is dropped."""
        if self.channel is not None:
            self.channel.send(**message)

    @property
    def joined(self) -> bool:
        """Whether the node has ever connected to the head, even if the connection is lost by now."""
        return self.machine is not None

    @property
    def title(self) -> str:
        """The node's name for messages: the name in Slurm, and the component if the node has one."""
        return named(self.name, self.component)

    @property
    def identity(self) -> Identity:
        """The node's key in Ray's node table: the host name, which may differ from the name in Slurm, and the component.

        Before the node has joined, the name in Slurm stands for the host name.
        """
        return Identity(self.name if self.machine is None else self.machine.hostname, self.component)

    def facts(self) -> Dict[str, Any]:
        """The node's name, component, CPUs and GPUs, and whether the node is connected, as a dictionary for JSON.

        The CPUs and GPUs are None until the node has joined.
        """
        cpus, gpus = (None, None) if self.machine is None else (self.machine.num_cpus, self.machine.num_gpus)
        return {"name": self.name, "cpus": cpus, "gpus": gpus, "here": self.here, "component": self.component}


@dataclass(eq=False)
class WorkerNodes(Listener):
    """All worker nodes of an allocation: sends commands to the nodes, and passes their events to `on_event`.

    The nodes connect after `listen` was called. A node that reconnects gets all commands again that have not been undone; it
    ignores those that it has carried out. `members` has the nodes by node id, their index in the allocation.
    """

    loop: Loop
    members: Dict[int, WorkerNode]
    on_event: Callable[[WorkerNode, Message], None]
    log_path: Callable[[int], str] = lambda _: ""  # Path of a node's own log on the shared file system, by node id.

    def __post_init__(self) -> None:
        self._node_of_channel: Dict[Channel, WorkerNode] = {}
        # By nonce of an ended payload: the nodes that have not answered, the usage so far, and the argument `done` of `collect`.
        self._collections: Dict[str, Tuple[Set[int], UsageByHost, Callable[[UsageByHost], None]]] = {}
        self._stopped = False
        self._server: Optional[RpcServer] = None

    @property
    def pids(self) -> List[int]:
        """Ids of Ray's topmost processes on those nodes that are simulated on this machine.

        The list is empty if all nodes are on other machines.
        """
        return [pid for node in self.members.values() for pid in node.pids]

    def listen(self, key: str, ports: List[int]) -> None:
        """Listen for connections of the nodes on the first free port of `ports`; raises OSError if no port is free.

        `key` is the secret, in hex, that the runtimes of the allocation share.
        """
        self._server = RpcServer(self.loop, key, ports, self, heartbeat=True)

    def send_command(self, places: Iterable[int], **command: Any) -> None:
        """Send a command to the worker nodes with the ids `places`; a node that is not connected gets it when it connects.

        `command` has the keys of the message: `op` (`NodeCommand`), and often the Ray cluster (`cluster`) or payload (`id`) that
        the command concerns. The command replaces an earlier one about the same Ray cluster or payload if both have the same
        `op`, or if one undoes the other. A node that reconnects gets the command again, but END_RAY and REPORT only until the
        node has confirmed them. If a node has never connected, END_RAY and REPORT are not sent to it, and the command that they
        undo is not sent either.
        """
        op = NodeCommand(command["op"])
        subject = _subject(op, command.get("cluster") or command.get("id") or "")
        for node in [self.members[place] for place in places]:
            if op in _UNDOES and not node.joined:
                node.commands.pop(subject, None)  # The node never got the command that began it.
            else:
                node.commands[subject] = command
                node.send(**command)

    def log_tail(self, place: int) -> str:
        """The last lines of the log of the node with the id `place`; "" if the log cannot be read."""
        return tail_file(self.log_path(place), lines=15)

    def measure(self, nonce: str, jobs: Optional[List[str]]) -> None:
        """Tell all worker nodes to measure the usage of a payload; does not wait.

        `nonce` is the random name of the payload. `jobs` are the ids of the payload's known Ray jobs if payloads share the Ray
        cluster; None if the Ray cluster is the payload's own.
        """
        self.send_command(self.members, op=NodeCommand.MEASURE, id=nonce, jobs=jobs)

    def collect(self, nonce: str, done: Callable[[UsageByHost], None]) -> None:
        """Tell the worker nodes to stop measuring the payload with the random name `nonce`, and collect what they have measured.

        Does not wait. `done` is called once, when all connected nodes have answered or `_USAGE_TIMEOUT` seconds are over, with
        the usage of the nodes that have answered.
        """
        expected = {node.node_id for node in self.members.values() if node.here}
        self._collections[nonce] = expected, {}, done
        self.send_command(self.members, op=NodeCommand.REPORT, id=nonce)
        self.loop.call_later(_USAGE_TIMEOUT if expected else 0.0, lambda: self._finish(nonce))

    def dismiss(self) -> None:
        """Tell all worker nodes to end their runtimes: connected nodes now, the others when they connect. Does not wait."""
        self._stopped = True
        for node in self.members.values():
            node.send(op=NodeCommand.STOP)

    def wait_gone(self, patience: float) -> None:
        """At the end of this runtime, block until all worker nodes have disconnected, or until time limits are over.

        The nodes have `_STOP_TIMEOUT` seconds to clean up. If this runtime ended without this wait, the nodes could be ended
        before they have cleaned up. If a node has never connected, this method first waits up to `patience` seconds until all
        nodes have connected, because only this runtime can tell such a node to end.
        """
        if patience > 0 and not self._all_joined():
            self.loop.resume(patience)
        if self._server is not None:
            self._server.close()
        deadline = self.loop.now() + _STOP_TIMEOUT
        for node in self.members.values():
            if node.channel is not None:
                node.channel.wait_closed(deadline)

    def received(self, channel: Channel, message: Message) -> None:
        """Handle a message on a connection of a worker node.

        The first message tells which node has connected; each later message is an event of this node.
        """
        node = self._node_of_channel.get(channel)
        if node is None:
            self._introduce(channel, message)
        else:
            self.handle(node, message)

    def handle(self, node: WorkerNode, message: Message) -> None:
        """Handle an event that a node has sent: process it here if it answers a command, otherwise pass it to `on_event`."""
        event = message.get("event")
        if event == NodeEvent.USAGE:
            self._add_usage(node, message["id"], message["usage"])
        elif event == NodeEvent.RAY_ENDED:
            node.commands.pop(_subject(NodeCommand.END_RAY, message["cluster"]), None)
        else:
            self.on_event(node, message)

    def closed(self, channel: Channel, why: str) -> None:
        """Handle the loss of a node's connection, for the reason `why`: pass the event LOST to `on_event`.

        If the node does not reconnect within `RECONNECT_GRACE` seconds, the event GONE follows.
        """
        node = self._node_of_channel.pop(channel, None)
        if node is not None:
            node.channel = None
            node.grace = self.loop.call_later(RECONNECT_GRACE, partial(self._missed, node))
            self.on_event(node, {"event": NodeEvent.LOST, "message": why})

    def _missed(self, node: WorkerNode) -> None:
        node.gone = True
        self.on_event(node, {"event": NodeEvent.GONE})

    def _all_joined(self) -> bool:
        return all(node.joined for node in self.members.values())

    def _introduce(self, channel: Channel, message: Message) -> None:
        """Handle the first message of a connection: assign the connection to the node that the message names.

        The node then gets the commands that are kept for it or, after `dismiss`, only the command to end. If the message is
        invalid, the connection is closed.
        """
        try:
            machine = from_fields(NodeResources, message.get("machine"), "what a node tells of itself")
            node = self.members[message["node_id"]]
        except (SpecError, KeyError, TypeError) as error:
            print("rayslurm: %s" % error, file=sys.stderr)
            return channel.close()
        if node.channel is not None:  # The node reconnected before its loss was noticed here.
            del self._node_of_channel[node.channel]
            node.channel.close()
        node.channel, node.machine, node.gone = channel, machine, False
        node.grace.cancel()
        self._node_of_channel[channel] = node
        if self._stopped:
            channel.send(op=NodeCommand.STOP)
            return self.loop.stop() if self._all_joined() else None
        for command in node.commands.values():
            channel.send(**command)
        self.on_event(node, {"event": NodeEvent.JOINED, "remark": message.get("remark")})

    def _add_usage(self, node: WorkerNode, nonce: str, usage: Optional[Dict[str, Any]]) -> None:
        node.commands.pop(_subject(NodeCommand.REPORT, nonce), None)
        expected, figures, _ = self._collections.get(nonce, (set(), {}, None))
        if node.node_id in expected:
            expected.remove(node.node_id)
            if usage is not None:
                name = named(*node.identity)
                # In a test cluster, several nodes may run on one machine and so have the same hostname.
                figures[node.name if name in (*figures, socket.gethostname()) else name] = usage
            if not expected:
                self._finish(nonce)

    def _finish(self, nonce: str) -> None:
        if nonce in self._collections:
            _, figures, done = self._collections.pop(nonce)
            done(figures)


def _subject(op: NodeCommand, name: str) -> str:
    """Returns the key under which the last command about a Ray cluster or a payload is kept, such as "measure 3f2a…".

    `name` is the key of the Ray cluster or the nonce of the payload. A command and the command that undoes it, such as MEASURE
    and REPORT, have the same key, so that the later one replaces the earlier one.
    """
    return "%s %s" % (_UNDOES.get(op, op), name)
