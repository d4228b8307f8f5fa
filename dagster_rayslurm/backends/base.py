"""What every backend is, and what it hands back: a runtime at work on one payload."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

from dagster_pipes import PipesContextData

from ..follow import Cadence, Evidence
from ..plan import Plan
from ..ssh.base import Connection
from .ownership import Ownership
from .run_dir import Layout

P = TypeVar("P", contravariant=True)
A = TypeVar("A", covariant=True)


@dataclass(frozen=True)
class Step:
    """What asks for a payload.

    Attributes:
        run_id: the Dagster run.
        step_key: its step.
        partition_key: the partition, or None.
        log: the step's log.
        reattached: whether it goes on with what an attempt before it has started.
        owner: whether this attempt owns the payload; None where nobody else can go on with it.
    """

    run_id: str
    step_key: str
    partition_key: str | None
    log: Any
    reattached: bool = False
    owner: Ownership | None = None

    @property
    def new_owner(self) -> str | None:
        """Who is known to have taken the payload over, in words."""
        return None if self.owner is None else self.owner.new_owner

    def may_end(self) -> bool:
        """Whether this attempt may end the payload, because nobody else goes on with it or will.

        Raises:
            OSError: that cannot be found out.
        """
        return self.owner is None or self.owner.confirm()

    def should_end(self) -> bool:
        """The same, for a payload that has to be ended even where that cannot be found out."""
        return self.owner is None or self.owner.confirm_best_effort()


class RunningPayload(Protocol):
    """A runtime at work on one payload.

    Attributes:
        cluster_id: name of the Ray cluster or of the runtime that holds it.
        job_id: Slurm's job id; None where there is no Slurm.
        waiting: whether the runtime has yet to be started, by a scheduler that takes its time.
        place: where the run directory is, in words; "" for this machine.
        requeue: whether the runtime may be started once more, by Slurm.
    """

    cluster_id: str
    job_id: str | None

    @property
    def waiting(self) -> bool: ...

    @property
    def place(self) -> str: ...

    @property
    def requeue(self) -> bool: ...

    def poll(self, evidence: Evidence) -> str | None:
        """How the runtime ended, in words; None while it lives.

        Raises:
            RunFailure: it will never start, or has had its time.
        """
        ...

    def cancel(self, now: bool = False) -> None:
        """Ask the runtime to end the payload, at once or after its grace period."""
        ...

    def kill(self) -> None:
        """End a runtime that does not answer, with all that it runs."""
        ...

    def explain(self, evidence: Evidence) -> None:
        """Add to the evidence what logs and Slurm tell of an end that the record does not explain."""
        ...

    def metadata(self, evidence: Evidence) -> Mapping[str, Any]:
        """What this way of running adds to the metadata of results and failures."""
        ...

    def release(self, evidence: Evidence) -> None:
        """Let go of the runtime after the payload's end was read, or see to it that it ends."""
        ...


Register = Callable[[RunningPayload], None]
"""Takes note of an attempt, which is let go of whatever comes."""


class Place(Protocol):
    """Where runtimes work.

    Attributes:
        connection: how to reach the files where the runtime works.
        layout: where things are there; finding that out may take a look at the place.
        cadence: how often the record is read.
    """

    @property
    def connection(self) -> Connection: ...

    @property
    def layout(self) -> Layout: ...

    @property
    def cadence(self) -> Cadence: ...

    def sweep(self, retention_days: float) -> None:
        """Remove what nobody touched for so many days."""
        ...


class Backend(Place, Protocol[P, A]):
    """A way to get runtimes started: for one plan, or for a plan of each component, all at once.

    `P` is a plan, or plans by component in the job's order; `A` what is at work on it then.
    """

    def check(self, plan: P, /) -> None:
        """Refuse what this backend cannot give, before anything starts.

        Raises:
            ValueError: naming the field, and the component if there are some.
        """
        ...

    def start(self, plan: P, run_dir: str, context: PipesContextData, step: Step, hold: Register, /) -> A:
        """Make a run directory, with one for each component in it if there are some, and get runtimes to work there.

        Args:
            plan: what to run.
            run_dir: its run directory, not there yet.
            context: the Pipes context.
            step: who asks.
            hold: told of each attempt before this returns: an interrupt in between must not lose it.

        Raises:
            StartError: no runtime can be had.
            OSError: a file cannot be written.
        """
        ...

    def example(self, plan: P, /) -> str:
        """What would be started, for a person to read, with words in capitals for what is known only then."""
        ...


@runtime_checkable
class CanReattach(Protocol):
    """A backend whose payloads outlive the Dagster process that started them, for another one to go on with."""

    def can_reattach(self, plan: Plan, run_dir: str, step: Step) -> bool:
        """Whether what an attempt before started in a run directory is this plan, and still of use; then `start` goes on with it.

        Raises:
            StartError: no runtime can be had.
            OSError: that cannot be found out.
        """
        ...


Plans = Mapping[str, Plan]
RunningPayloads = Mapping[str, RunningPayload]
"""By component, in the job's order."""
