"""A submitted job that runs one payload."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any

from ..follow import Evidence
from ..slurm.commands import without_option_variables
from ..slurm.states import JobPhase
from ..ssh.base import Connection, ConnectionFailed
from .base import Step
from .cancel_request import CancelRequest, write_cancel_request
from .slurm_job import SlurmJob

_PATIENCE = 5.0
"""Seconds in which a job whose runtime has written its `end` is over by itself."""
_TERMINATED = "terminated"
_SRUN_MAY_WAIT = ("cluster-lost", "cluster-start", _TERMINATED)
"""Reasons of an `end` after which `srun` may wait for ever: it hears nothing of tasks on a node that was reset, nor of those
whose slurmstepd was killed (22.05)."""
_KEEP_FRESH = 3600.0
_NOBODY = Step("", "", None, None)


class BatchJob:
    """One Slurm job, whose directory is the run directory of its payload.

    Args:
        job: the job, and its directory.
        commands: runs commands there, and reaches the files.
        cluster_id: name of the Ray cluster.
        directory: the run directory; None for the job's.
        step: who asks; it may go on with a job that another process submitted, so that nobody here knows when.
    """

    def __init__(
        self, job: SlurmJob, commands: Connection, cluster_id: str, directory: str | None = None, step: Step | None = None
    ) -> None:
        self.cluster_id = cluster_id
        self.job_id: str | None = job.job_id
        self._job = job
        self._commands = commands
        self._directory = job.directory if directory is None else directory
        self._step = step or _NOBODY
        self._started = False
        """Whether the runtime is at work: its record has started, and the job was not requeued since."""
        self._heard: tuple[float, float] | None = None
        """When the record started, by its node's clock, and when that was heard of, by the one that the submission goes by."""
        self._fresh_at = time.monotonic()
        self._ending = False
        self._order = CancelRequest(self._give, job.log)

    @property
    def waiting(self) -> bool:
        return not self._started and self._job.status.phase in (JobPhase.UNKNOWN, JobPhase.PENDING)

    @property
    def place(self) -> str:
        return self._job.place

    @property
    def requeue(self) -> bool:
        return self._job.requeue

    def poll(self, evidence: Evidence) -> str | None:
        job, started_at = self._job, self._started_at(evidence)
        # Where the runtime could not be reached just now nobody can be asked either.
        away = self._started and isinstance(self._order.error, ConnectionFailed)
        seen = not away and job.observe(started_at)
        self._started = started_at is not None and job.status.phase != JobPhase.PENDING
        self._order.resend_for(evidence)
        if not seen:
            return None
        with contextlib.suppress(OSError):
            if started_at is not None and (self._heard is None or self._heard[0] != started_at):
                self._heard = started_at, job.now()
            self._keep_fresh()
            if not self._started and not job.status.over and not job.cancelled:
                job.report_waiting()
                job.check_waiting()
        return job.end_description(self._started)

    def cancel(self, now: bool = False) -> None:
        self._order.send(now)

    def _give(self, now: bool) -> None:
        """Have the payload ended, by Slurm if its runtime is not known to be at work.

        Raises:
            OSError: nobody can be told.
        """
        if not self._step.may_end():
            return
        if not self._started:
            self._job.cancelled = True
            done = self._commands.run(without_option_variables(["scancel", self._job.job_id]), timeout=60)
            # In 22.05 it exits with 0 even where it could not reach slurmctld; of a job that is over it says nothing.
            errors = [line for line in done.stderr.decode("utf-8", "replace").splitlines() if "error:" in line]
            if done.returncode or errors:
                raise OSError(f"{self._commands.place}: {'; '.join(errors[-2:]) or f'exit code {done.returncode}'}")
            return
        self._ending = True
        # The runtime ends the payload with Ray alive; scancel would hit all of Ray at the same moment.
        write_cancel_request(self._commands, self._directory, now)

    def kill(self) -> None:
        if self._step.should_end():
            self._job.cancelled = True
            self._job.cancel_until_gone()

    def explain(self, evidence: Evidence) -> None:
        if evidence.job is None:
            self._job.explain(evidence)

    def metadata(self, evidence: Evidence) -> Mapping[str, Any]:
        metadata = self._job.metadata(evidence)
        if evidence.started_at is not None and not self._step.reattached:
            # The clocks of a node and of the edge may differ: nothing has started after it was heard of.
            started_at = min(evidence.started_at, self._heard[1] if self._heard else self._job.now())
            metadata["Queue wait (s)"] = round(max(0.0, started_at - self._job.submitted_at), 2)
        return metadata

    def release(self, evidence: Evidence) -> None:
        """See to it that a job which was to be ended is over; one that ended by itself needs nobody."""
        reason = (evidence.end or {}).get("reason")
        if evidence.connection_lost and not self._job.cancelled:
            return  # Nobody can be told, and the job may go on.
        if self._job.cancelled or (not evidence.started and not self._job.status.over):
            if self._step.should_end():
                self._job.cancel_until_gone()
        elif (self._ending or evidence.nodes_lost or reason in _SRUN_MAY_WAIT) and self._step.should_end():
            if reason == _TERMINATED and not self._ending:
                self.explain(evidence)  # Slurm's reason, while it is not the cancellation to come.
            self._job.cancelled = self._ending
            self._job.cancel_until_gone(_PATIENCE)

    def _started_at(self, evidence: Evidence) -> float | None:
        """When the job's record started, if it has."""
        return evidence.started_at

    def _keep_fresh(self) -> None:
        """A run directory whose job still waits is swept as old otherwise."""
        if not self._started and time.monotonic() - self._fresh_at >= _KEEP_FRESH:
            self._fresh_at = time.monotonic()
            self._commands.run(["touch", "--", self._job.directory])
