"""Barrier of the separate topology: decides when the payloads of all components start and end. State and messages only, pure.

Each component of the heterogeneous job has its own runtime and payload. The payloads start together, and the first failure
ends all of them. The runtime of the first component is the barrier's host. The runtimes of the other components are its guests.
Guests send the host events (`Ready`, `Ended`, `Note`, `Leaving`). The host sends commands to all guests and follows them itself
(`Start`, `Fail`, `Notify`, `Finish`).

A runtime stays until the host sends `Finish`, because payloads of other components may use its Ray cluster until then. The host's
exit code is that of the first failure.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Dict, List, Optional, Sequence, Set, Type, Union

from ..protocol.rpc import Message
from ..protocol.spec import SpecError, from_fields


@dataclass(frozen=True)
class ComponentAddress:
    """Where one component runs; each payload finds the addresses of all components in RAYSLURM_COMPONENTS."""

    host: str
    """Hostname of the component's first node."""
    address: str
    """Address of that node for the other components."""
    ray_address: Optional[str]
    """Address of the component's Ray cluster; None if it has none."""
    nodes: List[str]
    """Names of all nodes of the component."""


@dataclass(frozen=True)
class Ready:
    """A guest's event when its component's payload can start."""

    place: ComponentAddress
    """Where that component runs."""


@dataclass(frozen=True)
class Ended:
    """A guest's event when its component's payload has ended."""

    failure: Optional[str]
    """Why the payload failed; None for success."""
    exit_code: int
    terminated: bool
    """Whether the payload ended because its runtime received a signal; then Slurm may run the job again."""


@dataclass(frozen=True)
class Note:
    """A guest's event with a message for the Dagster log, for instance that its Ray cluster is lost."""

    what: str
    """The message, without the name of the component."""


@dataclass(frozen=True)
class Leaving:
    """A guest's last event: its runtime ends, because the host sent `Finish` or because it received a signal."""


@dataclass(frozen=True)
class Start:
    """The host's command when all components are ready: start your payload."""

    components: Dict[str, ComponentAddress]
    """The address of each component, by its name."""


@dataclass(frozen=True)
class Fail:
    """The host's command when a component has failed: end your payload."""

    component: str
    """The component that failed."""
    why: str
    """Why it failed, for the Dagster log."""


@dataclass(frozen=True)
class Notify:
    """The host's command to record a component's message for the Dagster log; that component itself ignores the command."""

    component: str
    """The component that the message is about."""
    what: str
    """The message, without the name of the component."""


@dataclass(frozen=True)
class Finish:
    """The host's command when the payloads of all components have ended or were given up: end your runtime."""

    final: bool
    """Whether Slurm has no reason to run the job again, so that files for another attempt are no longer needed."""


Event = Union[Ready, Ended, Note, Leaving]
Command = Union[Start, Fail, Notify, Finish]

# The keys are the names in messages. Both sides must agree on them.
_EVENTS: Dict[str, Type[Event]] = {"ready": Ready, "ended": Ended, "told": Note, "leaving": Leaving}
_COMMANDS: Dict[str, Type[Command]] = {"start": Start, "end": Fail, "told": Notify, "over": Finish}


def encode_event(event: Event) -> Message:
    """The RPC message in which a guest sends an event."""
    return _encode("event", _EVENTS, event)


def encode_command(command: Command) -> Message:
    """The RPC message in which the host sends a command."""
    return _encode("op", _COMMANDS, command)


def decode_event(message: Message) -> Event:
    """The event that a guest sent in an RPC message.

    Raises:
        SpecError: the message holds no known event.
    """
    event: Event = _decode("event", _EVENTS, message)
    return event


def decode_command(message: Message) -> Command:
    """The command that the host sent in an RPC message.

    Raises:
        SpecError: the message holds no known command.
    """
    command: Command = _decode("op", _COMMANDS, message)
    return command


def _encode(key: str, types: Dict[str, Any], value: Any) -> Message:
    name = next(name for name, cls in types.items() if cls is type(value))
    return {key: name, **asdict(value)}


def _decode(key: str, types: Dict[str, Any], message: Message) -> Any:
    name = message.get(key)
    if not isinstance(name, str) or name not in types:
        raise SpecError("the %s %r is not known" % (key, name))
    return from_fields(types[name], {k: value for k, value in message.items() if k != key}, "the %s %r" % (key, name))


class Barrier:
    """The host's state of all components, which decides when their payloads start and when all runtimes end.

    Methods take in what happened to a component, and return the commands that the host must send next.

    Attributes:
        failed: the component that failed first; None if none has.
        exit_code: the job's exit code: that of the first failure, or 0.
        started: whether the command to start the payloads was given.
    """

    def __init__(self, components: Sequence[str]) -> None:
        self.failed: Optional[str] = None
        self.exit_code = 0
        self.started = False
        self._components = list(components)
        self._addresses: Dict[str, ComponentAddress] = {}
        self._ended: Set[str] = set()
        self._given_up: Set[str] = set()
        """Components that the host does not wait for, unless their runtimes connect again."""
        self._terminated = False
        """Whether a runtime received a signal, so that Slurm may run the job again."""
        self._finished = False
        """Whether the command to end all runtimes was given."""

    @property
    def over(self) -> bool:
        """Whether the payload of every component has ended, or the component was given up; then all runtimes may end."""
        return len(self._ended | self._given_up) == len(self._components)

    def missing(self) -> List[str]:
        """The components whose payload cannot start yet."""
        return [each for each in self._components if each not in self._addresses]

    def has_ended(self, component: str) -> bool:
        """Whether a component's payload has ended, or the component was given up: nobody waits for it."""
        return component in self._ended | self._given_up

    def ready(self, component: str, place: ComponentAddress) -> List[Command]:
        """Called when a component's payload can start; returns the command to start once all components are ready."""
        self._addresses[component] = place
        if self.started or self.failed is not None or self.missing():
            return []
        self.started = True
        return [Start({each: self._addresses[each] for each in self._components})]

    def connected(self, component: str) -> None:
        """Called when a component's runtime has connected: the host waits for it, even if it was given up before."""
        self._given_up.discard(component)

    def give_up(self, component: str) -> List[Command]:
        """Stop waiting for a component whose runtime never connected."""
        self._given_up.add(component)
        return self._finish_if_over()

    def lost(self, component: str, why: str) -> List[Command]:
        """Called when a component's runtime is lost: that is a failure, unless the component's payload had ended."""
        self._given_up.add(component)
        commands: List[Command] = []
        if component not in self._ended:
            commands = self._fail(component, why, 1)
        elif not self.over:
            commands = [Notify(component, why)]
        return commands + self._finish_if_over()

    def interrupted(self, component: str, why: str, exit_code: int) -> List[Command]:
        """Called when a component's runtime received a signal after its payload had ended; returns the commands that follow.

        The signal is a failure of the component if payloads of other components still run.
        """
        self._terminated = True
        return [] if self.over else self._fail(component, why, exit_code)

    def ended(self, component: str, event: Ended) -> List[Command]:
        """Called when a component's payload has ended; a second call for the same component has no effect."""
        if component in self._ended:
            return []
        self._ended.add(component)
        self._terminated = self._terminated or event.terminated
        commands = self._fail(component, event.failure, event.exit_code or 1) if event.failure is not None else []
        return commands + self._finish_if_over()

    def why_not_started(self, connected: Sequence[str], timeout: float) -> str:
        """Why the payloads were not started before the timeout: which components are missing, and their states.

        Args:
            connected: components whose runtime has connected.
            timeout: seconds that the components had to become ready.
        """
        states = [
            "%r (%s)" % (each, "its cluster is not up" if each in connected else "no word from its runtime")
            for each in self.missing()
        ]
        return "not all components were ready within %g s, missing: %s" % (timeout, ", ".join(states))

    def _fail(self, component: str, why: str, exit_code: int) -> List[Command]:
        """The command to end all payloads for the first failure; no command for later failures."""
        if self.failed is not None:
            return []
        self.failed, self.exit_code = component, exit_code
        return [Fail(component, why)]

    def _finish_if_over(self) -> List[Command]:
        if not self.over or self._finished:
            return []
        self._finished = True
        return [Finish(final=not self._terminated and not self._given_up)]
