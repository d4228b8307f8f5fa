"""Barrier of the separate topology: decides when the payloads of all components start and end. State and messages, pure.

Each component of the heterogeneous job has a runtime and a payload of its own. The payloads start together, and the first
failure ends all of them. A runtime stays until all payloads have ended, because payloads of other components may use its Ray
cluster until then.

The runtime of the first component is the barrier's host. It keeps the state, and its exit code is that of the first failure.
The other runtimes are its guests: they send `Ready`, `Ended` and `Leaving`, and receive `Start`, `Fail` and `Finish`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any, Dict, List, Optional, Sequence, Union

from ..protocol.rpc import Message
from ..protocol.spec import SpecError, from_fields


@dataclass(frozen=True)
class ComponentAddress:
    """Where one component runs; each payload finds the addresses of all components in RAYSLURM_COMPONENTS.

    `host` and `address` are those of the component's first node, `ray_address` that of its Ray cluster, if it has one.
    """

    host: str
    address: str
    ray_address: Optional[str]
    nodes: List[str]


@dataclass(frozen=True)
class Ready:
    """A component's payload can start."""

    place: ComponentAddress


@dataclass(frozen=True)
class Ended:
    """A component's payload has ended.

    Attributes:
        failure: why the payload failed; None for success.
        terminated: whether the payload ended because its runtime received a signal; then Slurm may run the job again.
    """

    failure: Optional[str]
    exit_code: int
    terminated: bool


@dataclass(frozen=True)
class Leaving:
    """A guest's runtime ends, because the host sent `Finish` or because it received a signal."""


@dataclass(frozen=True)
class Start:
    """All components are ready: start your payload."""

    components: Dict[str, ComponentAddress]


@dataclass(frozen=True)
class Fail:
    """A component has failed: end your payload."""

    component: str
    why: str


@dataclass(frozen=True)
class Finish:
    """The payloads of all components have ended, or were given up: end your runtime.

    If `final`, Slurm has no reason to run the job again, so that files for another attempt are no longer needed.
    """

    final: bool


Event = Union[Ready, Ended, Leaving]
Command = Union[Start, Fail, Finish]

_TYPES: Dict[str, Any] = {cls.__name__: cls for cls in (Ready, Ended, Leaving, Start, Fail, Finish)}


def encode(value: Union[Event, Command]) -> Message:
    """The RPC message for an event or a command."""
    return {"op": type(value).__name__, **asdict(value)}


def decode(message: Message) -> Any:
    """The event or command in an RPC message.

    Raises:
        SpecError: the message holds none.
    """
    fields = dict(message)
    name = fields.pop("op", None)
    if not isinstance(name, str) or name not in _TYPES:
        raise SpecError("the message %r is not known" % (name,))
    return from_fields(_TYPES[name], fields, "the message %r" % name)


class Link(Enum):
    """The connection between the host and a component."""

    ABSENT = "never connected"
    HERE = "connected"
    LOST = "lost; may reconnect"
    GONE = "left or given up: the host does not wait for the component, unless it connects again"


@dataclass
class _Member:
    link: Link = Link.ABSENT
    lost_at: float = 0.0
    why_lost: str = ""
    address: Optional[ComponentAddress] = None
    ended: bool = False


class Barrier:
    """The host's state of all components.

    Methods take in what happened to a component, and return the commands for all components that follow from it.

    Args:
        components: the names of the components, the host's first.
        patience: seconds in which all components must be ready.
        grace: seconds after the loss of a connection in which a guest may reconnect.
        now: the time now; only differences between times count.

    Attributes:
        failed: the component that failed first; None if none has.
        exit_code: the job's exit code: that of the first failure, or 0.
        started: whether the payloads were told to start.
    """

    def __init__(self, components: Sequence[str], patience: float, grace: float, now: float) -> None:
        self.failed: Optional[str] = None
        self.exit_code = 0
        self.started = False
        self._members = {each: _Member() for each in components}
        self._host = components[0]
        self._members[self._host].link = Link.HERE
        self._patience = patience
        self._grace = grace
        self._start_by = now + patience
        self._failed_at = self._finished_at = float("inf")
        # Whether a runtime received a signal, so that Slurm may run the job again.
        self._terminated = False

    def connected(self, component: str) -> None:
        """A component's runtime has connected: the host waits for it, even if it was given up before."""
        self._members[component].link = Link.HERE

    def disconnected(self, component: str, why: str, now: float) -> None:
        """The connection to a component is lost: after a while, its runtime counts as lost."""
        member = self._members[component]
        if member.link == Link.HERE:
            member.link, member.lost_at, member.why_lost = Link.LOST, now, why

    def handle(self, component: str, event: Event, now: float) -> List[Command]:
        """Take in an event of a component; an event that comes again has no effect."""
        member = self._members[component]
        if isinstance(event, Leaving):
            member.link = Link.GONE
        elif isinstance(event, Ready):
            member.address = event.place
            addresses = {name: each.address for name, each in self._members.items() if each.address is not None}
            if not self.started and self.failed is None and len(addresses) == len(self._members):
                self.started = True
                return [Start(addresses)]
        elif not member.ended:
            member.ended = True
            self._terminated = self._terminated or event.terminated
            failure = self._fail(component, event.failure, event.exit_code or 1, now) if event.failure is not None else []
            # After a signal, Slurm gives the host little time.
            hurry = event.terminated and component == self._host
            return failure + (self.give_up_absent(now) if hurry else self._finish_if_over(now))
        return []

    def lost(self, component: str, why: str, now: float) -> List[Command]:
        """A component's runtime is lost: that is a failure, unless the component's payload had ended."""
        member = self._members[component]
        member.link = Link.GONE
        failure = [] if member.ended else self._fail(component, why, 1, now)
        return failure + self._finish_if_over(now)

    def interrupted(self, why: str, exit_code: int, now: float) -> List[Command]:
        """Called when the host gets a signal after its payload has ended; the host has failed if other components still run."""
        self._terminated = True
        return ([] if self._is_over() else self._fail(self._host, why, exit_code, now)) + self.give_up_absent(now)

    def give_up_absent(self, now: float) -> List[Command]:
        """Stop waiting for guests that never connected."""
        for member in self._members.values():
            if member.link == Link.ABSENT:
                member.link = Link.GONE
        return self._finish_if_over(now)

    def tick(self, now: float) -> List[Command]:
        """To be called every now and then: give up components that have not come, or not come back, in time."""
        commands: List[Command] = []
        for name, member in self._members.items():
            if member.link == Link.LOST and now >= member.lost_at + self._grace:
                commands += self.lost(name, "its runtime is lost: " + member.why_lost, now)
        late = not self.started and now >= self._start_by
        if late:
            commands += self._fail(self._host, self._why_not_started(), 1, now)
        if late or now >= self._failed_at + 3 * self._grace:
            commands += self.give_up_absent(now)
        return commands

    def may_leave(self, now: float) -> bool:
        """Whether the host may end: each guest that is connected, or may reconnect, has followed `Finish`."""
        guests = (member.link for name, member in self._members.items() if name != self._host)
        left = all(link in (Link.ABSENT, Link.GONE) for link in guests)
        return now >= self._finished_at + (0.0 if left else self._grace)

    def _why_not_started(self) -> str:
        """Why the payloads were not started in time: which components are missing, and their states."""
        states = [
            "%r (%s)" % (name, "no word from its runtime" if member.link == Link.ABSENT else "its cluster is not up")
            for name, member in self._members.items()
            if member.address is None
        ]
        return "not all components were ready within %g s, missing: %s" % (self._patience, ", ".join(states))

    def _fail(self, component: str, why: str, exit_code: int, now: float) -> List[Command]:
        """The command to end all payloads for the first failure; no command for later failures."""
        if self.failed is not None:
            return []
        self.failed, self.exit_code, self._failed_at = component, exit_code, now
        return [Fail(component, why)]

    def _is_over(self) -> bool:
        return all(member.ended or member.link == Link.GONE for member in self._members.values())

    def _finish_if_over(self, now: float) -> List[Command]:
        if not self._is_over() or self._finished_at <= now:
            return []
        self._finished_at = now
        return [Finish(final=not self._terminated and all(member.ended for member in self._members.values()))]
