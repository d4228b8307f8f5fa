"""Interfaces between execution and the backends: a backend starts payloads, and hands back running payloads."""

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
R = TypeVar("R", covariant=True)


@dataclass(frozen=True)
class Step:
    """The Dagster step that runs a payload, and its ownership of the payload.

    Attributes:
        partition_key: None for a step without partition.
        log: the step's log.
        reattached: whether an earlier attempt at the step started the payload.
        owner: this attempt's ownership; None for a payload that no later attempt can take over.
    """

    run_id: str
    step_key: str
    partition_key: str | None
    log: Any
    reattached: bool = False
    owner: Ownership | None = None

    @property
    def new_owner(self) -> str | None:
        """The attempt that is known to have taken the payload over, in words."""
        return None if self.owner is None else self.owner.new_owner

    def may_end(self) -> bool:
        """Whether this attempt still owns the payload, and so may end it; from now on no other can take it over.

        Raises:
            OSError: the owner cannot be determined.
        """
        return self.owner is None or self.owner.confirm()

    def should_end(self) -> bool:
        """The same, but True if the owner cannot be determined: for a payload that must not be left running."""
        return self.owner is None or self.owner.confirm_or_assume()


class RunningPayload(Protocol):
    """A payload whose runtime was started, or waits in Slurm's queue.

    Attributes:
        cluster_id: name of the Ray cluster.
        job_id: Slurm's job id; None without Slurm.
        waiting: whether Slurm has not started the runtime.
        place: the host of the run directory; "" for this machine.
        requeue: whether Slurm may run it again.
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
            RunFailure: it can never start, or waited for too long.
        """
        ...

    def cancel(self, now: bool = False) -> None:
        """Ask the runtime to end the payload, at once or after its grace period."""
        ...

    def kill(self) -> None:
        """End the runtime and all that it runs."""
        ...

    def explain(self, evidence: Evidence) -> None:
        """Add logs and Slurm's accounting to the evidence, where the record does not explain the end."""
        ...

    def metadata(self, evidence: Evidence) -> Mapping[str, Any]:
        """Metadata of this backend for results and failures."""
        ...

    def release(self, evidence: Evidence) -> None:
        """Free what this process holds of the runtime, and make sure that a runtime ends which has to."""
        ...


Register = Callable[[RunningPayload], None]
"""Takes a running payload, which is then released in any case."""

Plans = Mapping[str, Plan]
RunningPayloads = Mapping[str, RunningPayload]
"""By component, in the job's order."""


class Backend(Protocol[P, R]):
    """Starts payloads: of one plan, or of the plans of all components at once.

    `P` is `Plan` or `Plans`; `R` is `RunningPayload` or `RunningPayloads`.

    Attributes:
        connection: reaches the files where runtimes run.
        layout: the directories there; the first access may ask the cluster.
        cadence: how often records are read.
    """

    @property
    def connection(self) -> Connection: ...

    @property
    def layout(self) -> Layout: ...

    @property
    def cadence(self) -> Cadence: ...

    def check(self, plan: P, /) -> None:
        """Refuse a plan that this backend cannot run, before anything starts.

        Raises:
            ValueError: naming the field, and the component if there are several.
        """
        ...

    def start(self, plan: P, run_dir: str, context: PipesContextData, step: Step, register: Register, /) -> R:
        """Write the run directory and start the runtime, or the runtimes of all components.

        Args:
            run_dir: the run directory; new unless the step reattached.
            register: called with each running payload at once, so that an interrupt cannot lose it.

        Raises:
            StartError: no runtime can be started.
            OSError: a file cannot be written.
        """
        ...

    def example(self, plan: P, /) -> str:
        """What would be started, for a person to read; words in capitals stand for what is known only then."""
        ...

    def sweep(self, retention_days: float) -> None:
        """Remove what was not used for so many days where runtimes run."""
        ...


@runtime_checkable
class CanReattach(Protocol):
    """A backend whose payloads outlive the Dagster process, so that a later attempt can take them over."""

    def can_reattach(self, plan: Plan, run_dir: str, step: Step) -> bool:
        """Whether the payload of a run directory is this plan and still of use; then `start` continues with it.

        Raises:
            StartError: no runtime can be started.
            OSError: the payload's state cannot be determined.
        """
        ...
