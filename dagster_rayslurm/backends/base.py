"""What every backend is, and what it hands back: a runtime at work on one payload."""

from __future__ import annotations

from typing import Protocol

from ..connections.base import Connection
from ..follow import Cadence
from ..plan import Plan
from .rundir import Layout


class StartError(RuntimeError):
    """A runtime cannot be had; the message says why.

    Attributes:
        kind: one of `errors.KINDS`.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Attempt(Protocol):
    """A runtime at work on one payload.

    Attributes:
        cluster_id: name of the Ray cluster or of the runtime that holds it.
        job_id: Slurm's job id; None where there is no Slurm.
    """

    cluster_id: str
    job_id: str | None

    def ended(self) -> str | None:
        """How the runtime ended, in words; None while it lives."""
        ...

    def cancel(self, now: bool = False) -> None:
        """Ask the runtime to end the payload, at once or after its grace period."""
        ...

    def kill(self) -> None:
        """End a runtime that does not answer, with all that it runs."""
        ...

    def runtime_log(self) -> str:
        """The last lines of what the runtime itself had to say."""
        ...

    def release(self) -> None:
        """Let go of the runtime after the payload's end was read."""
        ...


class Backend(Protocol):
    """A way to get a runtime started.

    Attributes:
        connection: how to reach the files where the runtime works.
        layout: where things are there.
        cadence: how often the record is read.
    """

    @property
    def connection(self) -> Connection: ...

    @property
    def layout(self) -> Layout: ...

    @property
    def cadence(self) -> Cadence: ...

    def check(self, plan: Plan) -> None:
        """Refuse what this backend cannot give, before anything starts.

        Raises:
            ValueError: naming the field.
        """
        ...

    def start(self, plan: Plan, run_dir: str, run_id: str) -> Attempt:
        """Get a runtime to work on the payload whose run directory is written.

        Args:
            plan: what to run.
            run_dir: its run directory.
            run_id: the Dagster run.

        Raises:
            StartError: no runtime can be had.
            OSError: a file cannot be written.
        """
        ...
