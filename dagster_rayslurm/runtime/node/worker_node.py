"""A worker node as the runtime on the head node sees it, and the interface to all worker nodes together."""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterable, List, Mapping, NamedTuple, Optional, Protocol

from ..process.loop import Loop
from ..protocol.rpc import RECONNECT_GRACE, Message, Peer
from .resources import named


class Identity(NamedTuple):
    """The pair that identifies a node; `component` is None if the allocation has no components."""

    hostname: str
    component: Optional[str]


class WorkerNode(Peer):
    """What the head knows about one worker node, and the connection to it."""

    def __init__(self, node_id: int, name: str, component: Optional[str] = None) -> None:
        super().__init__()
        self.node_id = node_id
        self.name = name
        self.component = component
        self.machine: Dict[str, Any] = {}
        """The resources that the node reports when it joins (`NodeResources.facts`); empty before."""
        self.commands: Dict[str, Message] = {}
        """Commands to send again when the node reconnects; a newer command on the same subject, the key, replaces the older."""
        self.losses = 0
        """How often the connection to the node was lost so far."""

    @property
    def joined(self) -> bool:
        """Whether the node has ever connected to the head, even if the connection is lost by now."""
        return bool(self.machine)

    @property
    def hostname(self) -> str:
        """The hostname of the node, which Ray uses; Slurm may use another name."""
        return str(self.machine.get("hostname") or self.name)

    @property
    def title(self) -> str:
        """The node's name for messages, with its component if it has one."""
        return named(self.name, self.component)

    @property
    def identity(self) -> Identity:
        """The identity by which the node is found in Ray's table of nodes."""
        return Identity(self.hostname, self.component)

    def await_back(self, loop: Loop, missed: Callable[[], None]) -> None:
        """Call `missed` if a node whose connection was just lost does not reconnect within `RECONNECT_GRACE` seconds.

        If the node reconnects and is lost again meanwhile, only the call for the later loss counts.
        """
        losses = self.losses
        loop.call_later(RECONNECT_GRACE, lambda: missed() if not self.here and self.losses == losses else None)

    def facts(self) -> Dict[str, Any]:
        """The node's name, its resources as far as they are known, and whether it is connected, as a dictionary for JSON."""
        return {
            "name": self.name,
            "cpus": self.machine.get("num_cpus"),
            "gpus": self.machine.get("num_gpus"),
            "here": self.here,
            "component": self.component,
        }


class WorkerNodes(Protocol):
    """The interface by which the head uses all worker nodes of an allocation; `ConnectedWorkers` documents the methods."""

    @property
    def members(self) -> Mapping[int, WorkerNode]: ...
    @property
    def pids(self) -> List[int]: ...
    def send_command(self, places: Iterable[int], **command: Any) -> None: ...
    def facts(self) -> List[Dict[str, Any]]: ...
    def log_tail(self, member: WorkerNode) -> str: ...
    def measure(self, nonce: str, jobs: Optional[List[str]]) -> None: ...
    def collect(self, nonce: str, done: Callable[[Dict[str, Dict[str, Any]]], None]) -> None: ...
    def dismiss(self) -> None: ...
    def wait_gone(self, patience: float) -> None: ...
