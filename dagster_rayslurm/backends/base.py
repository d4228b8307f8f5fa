"""What every backend hands back: a runtime at work on one payload."""

from __future__ import annotations

from typing import Protocol


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

    def runtime_log(self) -> str:
        """The last lines of what the runtime itself had to say."""
        ...

    def release(self) -> None:
        """Let go of the runtime after the payload's end was read."""
        ...
