"""Barrier of the separate topology: decides when the payloads of all components start and end. Pure.

The payloads start together, and the first failure ends all. A runtime stays until all payloads have ended, because they may use
its Ray cluster until then. The runtime of the first component is the barrier's host, the others are its guests: each sends its
`ComponentState` to the host, and gets the `RunState`, whenever one changes and after each connection.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Dict, List, Optional, Sequence

_NEVER = float("inf")


@dataclass(frozen=True)
class ComponentAddress:
    """Where a component runs: its first node, its Ray cluster if any, and all nodes; in RAYSLURM_COMPONENTS for each payload."""

    host: str
    address: str
    ray_address: Optional[str]
    nodes: List[str]


@dataclass(frozen=True)
class Ended:
    """How a component's payload ended."""

    failure: Optional[str]  # Why the payload failed; None for success.
    exit_code: int
    terminated: bool  # Whether its runtime received a signal; then Slurm may run the job again.


@dataclass(frozen=True)
class ComponentState:
    """What a component's runtime tells the host about itself."""

    place: Optional[ComponentAddress] = None  # Set once the payload can start.
    ended: Optional[Ended] = None
    left: bool = False  # The runtime ends, because the run is finished or because it received a signal.


@dataclass(frozen=True)
class RunState:
    """What the host tells all components."""

    places: Dict[str, ComponentAddress] = field(default_factory=dict)  # Not empty once the payloads start.
    failed: Optional[str] = None  # The component that failed first: all payloads end.
    why: str = ""
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
    """The host's state of all components; `state` is what follows for all of them.

    All must be ready within `patience` seconds. A guest that lost its connection may reconnect within `grace` seconds; after a
    failure, the host waits that long for guests that have never connected.
    """

    def __init__(self, components: Sequence[str], patience: float, grace: float, now: float) -> None:
        self.state = RunState()
        self.exit_code = 0  # The job's: that of the first failure, or 0.
        self._host, self._patience, self._grace = components[0], patience, grace
        self._start_by = now + patience
        self._members = {name: _Member(_NEVER if name == self._host else self._start_by) for name in components}
        self._finished_at = _NEVER
        self._interrupted = False

    def connected(self, component: str) -> None:
        """A component's runtime has connected: the host waits for it, even if it was given up before."""
        self._members[component].until = _NEVER
        self._members[component].problem = "its cluster is not up"

    def disconnected(self, component: str, why: str, now: float) -> None:
        """The connection to a component is lost."""
        member = self._members[component]
        if member.until == _NEVER:
            member.until, member.problem = now + self._grace, "its runtime is lost: " + why

    def update(self, component: str, told: ComponentState, now: float) -> None:
        """Take in what a component tells of itself."""
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
        """Called when the host gets a signal after its payload has ended; the host has failed if other components still run."""
        self._interrupted = True
        if not all(member.is_over(now) for member in self._members.values()):
            self._fail(self._host, why, exit_code, now)
        self.tick(now)

    def tick(self, now: float) -> None:
        """To be called every now and then: give up components that have not come, or not come back, in time."""
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
        """Whether the host may end: each guest that is connected, or may reconnect, has heard that the run is finished."""
        left = all(now >= member.until for name, member in self._members.items() if name != self._host)
        return now >= self._finished_at + (0.0 if left else self._grace)

    def _why_not_started(self) -> str:
        missing = ["%r (%s)" % (name, each.problem) for name, each in self._members.items() if each.told.place is None]
        return "not all components were ready within %g s, missing: %s" % (self._patience, ", ".join(missing))

    def _fail(self, component: str, why: str, exit_code: int, now: float) -> None:
        """End all payloads because of the first failure; later failures change nothing."""
        if self.state.failed is None:
            self.state, self.exit_code = replace(self.state, failed=component, why=why), exit_code
            for member in self._members.values():
                if member.until == self._start_by:
                    member.until = min(self._start_by, now + self._grace)
