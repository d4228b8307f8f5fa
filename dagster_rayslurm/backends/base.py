"""Interfaces between execution and the backends: a backend starts payloads, and hands back running payloads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from dagster_pipes import PipesContextData

from ..follow import Cadence, Evidence
from ..plan import Plan
from ..ssh.base import Connection
from .ownership import Ownership
from .run_dir import Layout


@dataclass(frozen=True)
class Step:
    """The Dagster step that runs a payload: one attempt at it, and this attempt's ownership of the payload."""

    run_id: str
    step_key: str
    partition_key: str | None
    log: Any  # The step's Dagster log.
    reattached: bool = False  # Whether an earlier attempt at the step started the payload, and this attempt continues it.
    owner: Ownership | None = None
    """Says whether this attempt still owns the payload; None for a payload that no later attempt can take over."""

    @property
    def new_owner(self) -> str | None:
        """The later attempt that has taken the payload over, in words; None if no such attempt is known."""
        return None if self.owner is None else self.owner.new_owner

    def may_end(self) -> bool:
        """Whether this attempt still owns the payload, and so may end the payload; if so, no later attempt can take it over.

        Raises:
            OSError: the owner cannot be determined.
        """
        return self.owner is None or self.owner.confirm()

    def should_end(self) -> bool:
        """Like `may_end`, but True if the owner cannot be determined: for a payload that must not be left running."""
        return self.owner is None or self.owner.confirm_or_assume()


class RunningPayload(Protocol):
    """A payload whose runtime was started, or waits in Slurm's queue. What it does not say is that of a local process."""

    cluster_id: str  # Name of the Ray cluster.
    job_id: str | None = None  # Slurm's job id; None without Slurm.

    @property
    def waiting(self) -> bool:
        """Whether the runtime still waits in Slurm's queue."""
        return False

    @property
    def place(self) -> str:
        """The host of the run directory; "" for this machine."""
        return ""

    @property
    def requeue(self) -> bool:
        """Whether Slurm may requeue the job, and so run the payload again."""
        return False

    def poll(self, evidence: Evidence) -> str | None:
        """How the runtime ended, in words; None while it lives. RunFailure: it can never start, or waited for too long."""

    def cancel(self, now: bool = False) -> None:
        """Ask the runtime to end the payload, at once or after its grace period."""

    def kill(self) -> None:
        """End the runtime and all its processes at once."""

    def explain(self, evidence: Evidence) -> None:
        """Add logs and Slurm's accounting to the evidence; called if the record alone does not explain the end."""

    def metadata(self, evidence: Evidence) -> Mapping[str, Any]:  # noqa: ARG002
        """What this backend adds to the Dagster metadata of a result or failure, such as the Slurm job id."""
        return {}

    def release(self, evidence: Evidence) -> None:
        """Stop watching the runtime; first end a runtime that must not go on, such as one that never started."""


Register = Callable[[RunningPayload], None]
"""Callback to which a backend passes each running payload at once; a registered payload is released whatever happens."""

Plans = Mapping[str, Plan]
"""Plans by name of their component, in the order of the components in the job."""


class Backend(Protocol):
    """Starts the runtime for a payload (`Plan`), or the runtimes for the payloads of all components at once (`Plans`)."""

    @property
    def connection(self) -> Connection:
        """Reaches the files on the machine or cluster where runtimes run."""

    @property
    def layout(self) -> Layout:
        """The directories on that machine or cluster; the first access may ask the cluster."""

    @property
    def cadence(self) -> Cadence:
        """How often records are read."""

    def check(self, plan: Any, /) -> None:
        """Refuse a plan that this backend cannot run, by a ValueError that names the field, before anything starts."""

    def start(self, plan: Any, run_dir: str, context: PipesContextData, step: Step, register: Register, /) -> object:
        """Write the run directory, which is new unless the step reattached, and start the runtimes.

        Raises:
            StartError: no runtime can be started.
            OSError: a file cannot be written.
        """

    def example(self, plan: Any, /) -> str:
        """The command or batch script of a plan, to read; words in capitals stand for values known only at the start."""

    def sweep(self, retention_days: float) -> None:
        """Remove files that were not used for `retention_days` from the machine or cluster where runtimes run."""


@runtime_checkable
class CanReattach(Protocol):
    """A backend whose payloads outlive the Dagster process, so that a later attempt can take them over."""

    def can_reattach(self, plan: Plan, run_dir: str, step: Step) -> bool:
        """Whether the payload of a run directory runs this plan and has not failed, so that `start` can continue it."""
