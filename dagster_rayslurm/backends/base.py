"""What every backend is, and what it hands back: a runtime at work on one payload."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from dagster_pipes import PipesContextData

from ..connections.base import Connection
from ..follow import Cadence, Evidence
from ..plan import Plan
from .rundir import Layout


@dataclass(frozen=True)
class Step:
    """What asks for a payload.

    Attributes:
        run_id: the Dagster run.
        step_key: its step.
        partition_key: the partition, or None.
        log: the step's log.
    """

    run_id: str
    step_key: str
    partition_key: str | None
    log: Any


class Attempt(Protocol):
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

    def ended(self, evidence: Evidence) -> str | None:
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


class Backend(Place, Protocol):
    """A way to get a runtime started."""

    def check(self, plan: Plan) -> None:
        """Refuse what this backend cannot give, before anything starts.

        Raises:
            ValueError: naming the field.
        """
        ...

    def start(self, plan: Plan, run_dir: str, context: PipesContextData, step: Step, hold: Callable[[Attempt], None]) -> Attempt:
        """Make the run directory of a payload and get a runtime to work on it.

        Args:
            plan: what to run.
            run_dir: its run directory, not there yet.
            context: the Pipes context.
            step: who asks.
            hold: told of the attempt before this returns: an interrupt in between must not lose it.

        Raises:
            StartError: no runtime can be had.
            OSError: a file cannot be written.
        """
        ...

    def example(self, plan: Plan) -> str:
        """What would be started, for a person to read, with words in capitals for what is known only then."""
        ...


class TogetherBackend(Place, Protocol):
    """A way to get a runtime for each component of an allocation started, all at once."""

    def check(self, plans: Mapping[str, Plan]) -> None:
        """Refuse what this backend cannot give, before anything starts.

        Raises:
            ValueError: naming the component and the field.
        """
        ...

    def start(
        self,
        plans: Mapping[str, Plan],
        run_dir: str,
        context: PipesContextData,
        step: Step,
        hold: Callable[[Attempt], None],
    ) -> Mapping[str, Attempt]:
        """Make the run directories of payloads and get a runtime to work on each.

        Args:
            plans: what to run in each component, in the job's order.
            run_dir: the run's directory, not there yet, in which each component gets one of its own.
            context: the Pipes context.
            step: who asks.
            hold: told of each attempt before this returns: an interrupt in between must not lose it.

        Raises:
            StartError: no runtime can be had.
            OSError: a file cannot be written.
        """
        ...

    def example(self, plans: Mapping[str, Plan]) -> str:
        """What would be started, for a person to read, with words in capitals for what is known only then."""
        ...
