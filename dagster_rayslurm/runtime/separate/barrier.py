"""The barrier of the separate topology: decides when the payloads of all components start and end; has no side effects.

The payloads start together, and the first failure ends all payloads. Each component's runtime stays until all payloads have
ended, because other payloads may use the component's Ray cluster until then. The runtime of the first component is the barrier's
host; the runtimes of the other components are guests. Each guest sends its `ComponentState` to the host, and the host sends its
`RunState` to the guests: after each new connection and after each change of the state.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Dict, List, Optional, Sequence

_NEVER = float("inf")


@dataclass(frozen=True)
class ComponentAddress:
    """The nodes and the addresses of one component; every payload gets those of all components."""

    host: str  # Host name of the component's first node.
    address: str  # Network address of the first node.
    ray_address: Optional[str]  # Address of the component's Ray cluster; None without a Ray cluster.
    nodes: List[str]  # Names of all nodes of the component.


@dataclass(frozen=True)
class Ended:
    """How a component's payload ended; a part of the `ComponentState` that the component's runtime sends to the host."""

    failure: Optional[str]  # Why the payload failed; None for success.
    exit_code: int
    terminated: bool  # Whether the payload's runtime received a signal; then Slurm may run the job again.


@dataclass(frozen=True)
class ComponentState:
    """The state of one component, which the component's runtime sends to the barrier's host."""

    place: Optional[ComponentAddress] = None  # None until the component is ready to start its payload.
    ended: Optional[Ended] = None
    left: bool = False  # The runtime ends, because the run is finished or because it received a signal.


@dataclass(frozen=True)
class RunState:
    """The state of the whole run, which the barrier's host sends to the runtimes of all components."""

    places: Dict[str, ComponentAddress] = field(default_factory=dict)  # Not empty once the payloads start.
    failed: Optional[str] = None  # The component that failed first, so that all payloads end; None without a failure.
    why: str = ""  # Why the component failed.
    finished: bool = False  # The payloads of all components have ended, or were given up: all runtimes end.
    final: bool = False  # Slurm has no reason to run the job again, so files for another attempt are no longer needed.


@dataclass
class _Member:
    until: float  # When the host stops waiting for the component; never while the component is connected.
    told: ComponentState = ComponentState()
    problem: str = "no word from its runtime"

    def is_over(self, now: float) -> bool:
        return self.told.ended is not None or now >= self.until


class Barrier:
    """The states of all components, kept by the host; the attribute `state` is the `RunState` that follows from them.

    `components` are the names of all components, the host's first. `now` is the time of creation: the run fails if not all
    components are ready `patience` seconds later. A guest that lost its connection has `grace` seconds to reconnect. After a
    failure, the host waits `grace` seconds for guests that have never connected, so that it can inform them of the failure. All
    times are from one monotonic clock. This class sends no messages.
    """

    def __init__(self, components: Sequence[str], patience: float, grace: float, now: float) -> None:
        self.state = RunState()
        self.exit_code = 0  # The exit code for the job: the exit code of the first failure, or 0.
        self._host, self._patience, self._grace = components[0], patience, grace
        self._start_by = now + patience
        self._members = {name: _Member(_NEVER if name == self._host else self._start_by) for name in components}
        self._finished_at = _NEVER
        self._interrupted = False

    def connected(self, component: str) -> None:
        """Record that the runtime of a guest has connected.

        While the guest is connected, it has no deadline of its own; the deadline for the start of the run stays.
        """
        self._members[component].until = _NEVER
        self._members[component].problem = "its cluster is not up"

    def disconnected(self, component: str, why: str, now: float) -> None:
        """Record that the connection to a guest is lost.

        If the guest does not reconnect within `grace` seconds, its component has failed. `why` is the reason of the loss, for
        error messages.
        """
        member = self._members[component]
        if member.until == _NEVER:
            member.until, member.problem = now + self._grace, "its runtime is lost: " + why

    def update(self, component: str, told: ComponentState, now: float) -> None:
        """Store `told`, the new state of a component, and update the state of the run.

        The run starts when all components are ready, and fails when one component's payload has failed.
        """
        member = self._members[component]
        member.told = told
        if told.left:
            member.until = now
        places = {name: each.told.place for name, each in self._members.items() if each.told.place is not None}
        if self.state.failed is None and len(places) == len(self._members):
            self.state = replace(self.state, places=places)
        if told.ended is not None and told.ended.failure is not None:
            self._fail(component, told.ended.failure, told.ended.exit_code or 1, now)
        self.tick(now)

    def interrupted(self, why: str, exit_code: int, now: float) -> None:
        """Record that the host received a signal after its own payload had ended.

        If other components still run, the run fails with the message `why` and the exit code `exit_code`.
        """
        self._interrupted = True
        if not all(member.is_over(now) for member in self._members.values()):
            self._fail(self._host, why, exit_code, now)
        self.tick(now)

    def tick(self, now: float) -> None:
        """Apply the deadlines at the time `now`, and mark the run as finished when the payloads of all components have ended.

        The run fails if not all components are ready in time, or if a guest did not connect or reconnect in time. The host must
        call this method at intervals, because deadlines pass without an event.
        """
        if not self.state.places and now >= self._start_by:
            self._fail(self._host, self._why_not_started(), 1, now)
        for name, member in self._members.items():
            if not member.told.ended and now >= member.until:
                self._fail(name, member.problem, 1, now)
        if not self.state.finished and all(member.is_over(now) for member in self._members.values()):
            ends = [member.told.ended for member in self._members.values()]
            final = not self._interrupted and all(end is not None and not end.terminated for end in ends)
            self.state, self._finished_at = replace(self.state, finished=True, final=final), now

    def may_leave(self, now: float) -> bool:
        """Returns whether the host's runtime may end now.

        It may if the run is finished, and each guest has left or had `grace` seconds to leave.
        """
        left = all(now >= member.until for name, member in self._members.items() if name != self._host)
        return now >= self._finished_at + (0.0 if left else self._grace)

    def _why_not_started(self) -> str:
        missing = ["%r (%s)" % (name, each.problem) for name, each in self._members.items() if each.told.place is None]
        return "not all components were ready within %g s, missing: %s" % (self._patience, ", ".join(missing))

    def _fail(self, component: str, why: str, exit_code: int, now: float) -> None:
        """Record that a component has failed, so that the whole run fails; if a failure is recorded already, do nothing."""
        if self.state.failed is None:
            self.state, self.exit_code = replace(self.state, failed=component, why=why), exit_code
            for member in self._members.values():
                if member.until == self._start_by:
                    member.until = min(self._start_by, now + self._grace)
