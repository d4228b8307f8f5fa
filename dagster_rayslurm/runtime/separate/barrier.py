"""Start barrier of the separate topology: its state and its messages. Pure.

Each component runs a payload of its own. The payloads start together, and the first failure ends all of them. The runtime of
the first component is the barrier's host. Those of the other components are its guests and send it events (`Ready`, `Ended`,
`Note`, `Leaving`). The host answers with commands for all components (`Start`, `Fail`, `Notify`, `Finish`).

Runtimes stay until the host says that all is over, because until then payloads of other components may use their Ray clusters.
The host's exit code is that of the first failure.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Dict, List, Optional, Sequence, Set, Type, Union

from ..protocol.rpc import Message
from ..protocol.spec import SpecError, from_fields


@dataclass(frozen=True)
class ComponentAddress:
    """Where a component runs; all payloads find it in RAYSLURM_COMPONENTS."""

    host: str
    """Hostname of its first node."""
    address: str
    """Address of that node for the other components."""
    ray_address: Optional[str]
    nodes: List[str]


@dataclass(frozen=True)
class Ready:
    """A component's payload can start."""

    place: ComponentAddress


@dataclass(frozen=True)
class Ended:
    """A component's payload has ended."""

    failure: Optional[str]
    """What went wrong; None for success."""
    exit_code: int
    terminated: bool
    """Whether a signal to its runtime ended it, so that Slurm may run the job again."""


@dataclass(frozen=True)
class Note:
    """A component has a message for the users of the others."""

    what: str


@dataclass(frozen=True)
class Leaving:
    """A component's runtime ends, because all is over or it received a signal."""


@dataclass(frozen=True)
class Start:
    """All components are ready: start the payloads."""

    components: Dict[str, ComponentAddress]


@dataclass(frozen=True)
class Fail:
    """A component has failed: end all payloads."""

    component: str
    why: str


@dataclass(frozen=True)
class Notify:
    """A component's message for the users of the others."""

    component: str
    what: str


@dataclass(frozen=True)
class Finish:
    """All components have ended: end the runtimes."""

    final: bool
    """Whether Slurm has no reason to run the job again."""


Event = Union[Ready, Ended, Note, Leaving]
Command = Union[Start, Fail, Notify, Finish]

_EVENTS: Dict[str, Type[Event]] = {"ready": Ready, "ended": Ended, "told": Note, "leaving": Leaving}
_COMMANDS: Dict[str, Type[Command]] = {"start": Start, "end": Fail, "told": Notify, "over": Finish}


def encode_event(event: Event) -> Message:
    """The message by which a guest sends an event."""
    return _encode("event", _EVENTS, event)


def encode_command(command: Command) -> Message:
    """The message by which the host sends an command."""
    return _encode("op", _COMMANDS, command)


def decode_event(message: Message) -> Event:
    """The event of a message.

    Raises:
        SpecError: the message is no event.
    """
    event: Event = _decode("event", _EVENTS, message)
    return event


def decode_command(message: Message) -> Command:
    """The command of a message.

    Raises:
        SpecError: the message is no command.
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


class StartBarrier:
    """State of all components. Each method takes in an event and returns the commands that follow.

    Attributes:
        failed: the component that failed first; None if none has.
        exit_code: the job's exit code, from the first failure.
        started: whether the payloads were started.
    """

    def __init__(self, components: Sequence[str]) -> None:
        self.failed: Optional[str] = None
        self.exit_code = 0
        self.started = False
        self._components = list(components)
        self._addresses: Dict[str, ComponentAddress] = {}
        self._ended: Set[str] = set()
        self._given_up: Set[str] = set()
        """Components that are not waited for, unless they connect again."""
        self._terminated = False
        self._finished = False

    @property
    def over(self) -> bool:
        """Whether every component has ended or was given up."""
        return len(self._ended | self._given_up) == len(self._components)

    def missing(self) -> List[str]:
        """The components that are not ready."""
        return [each for each in self._components if each not in self._addresses]

    def has_ended(self, component: str) -> bool:
        """Whether a component has ended or was given up."""
        return component in self._ended | self._given_up

    def ready(self, component: str, place: ComponentAddress) -> List[Command]:
        """A component's payload can start."""
        self._addresses[component] = place
        if self.started or self.failed is not None or self.missing():
            return []
        self.started = True
        return [Start({each: self._addresses[each] for each in self._components})]

    def connected(self, component: str) -> None:
        """A component's runtime is connected: wait for it, even if it was given up before."""
        self._given_up.discard(component)

    def give_up(self, component: str) -> List[Command]:
        """Stop waiting for a component that never connected."""
        self._given_up.add(component)
        return self._finish_if_over()

    def lost(self, component: str, why: str) -> List[Command]:
        """A component's runtime is lost: a failure, unless its payload had ended."""
        self._given_up.add(component)
        commands: List[Command] = []
        if component not in self._ended:
            commands = self._fail(component, why, 1)
        elif not self.over:
            commands = [Notify(component, why)]
        return commands + self._finish_if_over()

    def interrupted(self, component: str, why: str, exit_code: int) -> List[Command]:
        """A component's runtime received a signal after its payload had ended."""
        self._terminated = True
        return [] if self.over else self._fail(component, why, exit_code)

    def ended(self, component: str, event: Ended) -> List[Command]:
        """A component's payload has ended."""
        if component in self._ended:
            return []
        self._ended.add(component)
        self._terminated = self._terminated or event.terminated
        commands = self._fail(component, event.failure, event.exit_code or 1) if event.failure is not None else []
        return commands + self._finish_if_over()

    def why_not_started(self, connected: Sequence[str], timeout: float) -> str:
        """The message for a barrier that timed out.

        Args:
            connected: components whose runtime has connected.
            timeout: seconds that the components had.
        """
        states = [
            "%r (%s)" % (each, "its cluster is not up" if each in connected else "no word from its runtime")
            for each in self.missing()
        ]
        return "not all components were ready within %g s, missing: %s" % (timeout, ", ".join(states))

    def _fail(self, component: str, why: str, exit_code: int) -> List[Command]:
        """Only the first failure counts."""
        if self.failed is not None:
            return []
        self.failed, self.exit_code = component, exit_code
        return [Fail(component, why)]

    def _finish_if_over(self) -> List[Command]:
        if not self.over or self._finished:
            return []
        self._finished = True
        return [Finish(final=not self._terminated and not self._given_up)]
