"""A worker node as the head sees it, and the interface of all worker nodes together."""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterable, List, Mapping, NamedTuple, Optional, Protocol

from ..process.loop import Loop
from ..protocol.rpc import RECONNECT_GRACE, Message
from ..protocol.rpc_server import Peer


class Identity(NamedTuple):
    """Identifies a node; `component` is None if the allocation has no components."""

    hostname: str
    component: Optional[str]


def named(hostname: str, component: Optional[str]) -> str:
    """A node in words: "g1", or "g1 (component gpu)"."""
    return hostname if component is None else "%s (component %s)" % (hostname, component)


class WorkerNode(Peer):
    """One worker node as the head sees it."""

    def __init__(self, node_id: int, name: str, component: Optional[str] = None) -> None:
        super().__init__()
        self.node_id = node_id
        self.name = name
        self.component = component
        self.machine: Dict[str, Any] = {}
        self.commands: Dict[str, Message] = {}
        """Commands that the node gets again when it reconnects, by subject."""
        self.losses = 0
        """How often the node was lost so far."""

    @property
    def joined(self) -> bool:
        """Whether the node has ever joined, even if it is lost by now."""
        return bool(self.machine)

    @property
    def hostname(self) -> str:
        """The hostname of the node, which Ray uses; Slurm's name may differ."""
        return str(self.machine.get("hostname") or self.name)

    @property
    def title(self) -> str:
        """The node in words."""
        return named(self.name, self.component)

    @property
    def identity(self) -> Identity:
        """The node's identity in Ray's table of nodes."""
        return Identity(self.hostname, self.component)

    def await_back(self, loop: Loop, missed: Callable[[], None]) -> None:
        """Call `missed` unless the node reconnects within the grace period, which starts anew with each loss."""
        losses = self.losses
        loop.call_later(RECONNECT_GRACE, lambda: missed() if not self.here and self.losses == losses else None)

    def facts(self) -> Dict[str, Any]:
        """The node's resources as far as they are known, and whether it is connected."""
        return {
            "name": self.name,
            "cpus": self.machine.get("num_cpus"),
            "gpus": self.machine.get("num_gpus"),
            "here": self.here,
            "component": self.component,
        }


class WorkerNodes(Protocol):
    """The interface of all worker nodes; `ConnectedWorkers` documents its methods."""

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
