"""A submitted Slurm job as a running payload: poll it, cancel it, and explain its end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any

from ..follow import Evidence
from ..runtime.protocol.end import EndReason
from ..slurm.commands import without_option_variables
from ..slurm.states import JobPhase
from ..ssh.base import Connection, ConnectionFailed
from .base import Step
from .cancel_request import CancelRequest, write_cancel_request
from .slurm_job import SlurmJob

_END_TIMEOUT = 5.0
"""Seconds in which a job may end by itself after its runtime wrote the `end` record; then it is cancelled."""
_SRUN_MAY_HANG = (EndReason.CLUSTER_LOST, EndReason.CLUSTER_START, EndReason.TERMINATED)
"""Reasons of an `end` record after which `srun` may wait for ever: `srun` does not notice the end of tasks on a node that
was reset, or whose slurmstepd was killed (22.05)."""
_TOUCH_INTERVAL = 3600.0
"""Seconds between two touches of a waiting job's run directory, which keep the directory from being swept."""
_NO_STEP = Step("", "", None, None)
"""Stands for a step without ownership, whose payload this process may always end."""


class BatchJob:
    """The payload of one Slurm job; see `RunningPayload`.

    Args:
        directory: the payload's run directory; None if it is the directory of the job.
    """

    def __init__(
        self, job: SlurmJob, commands: Connection, cluster_id: str, directory: str | None = None, step: Step = _NO_STEP
    ) -> None:
        self.cluster_id = cluster_id
        self.job_id: str | None = job.job_id
        self._job = job
        self._commands = commands
        self._directory = job.directory if directory is None else directory
        self._step = step
        self._started = False
        """Whether the runtime has begun its record, and Slurm has not requeued the job since."""
        self._start_seen: tuple[float, float] | None = None
        """When the record began, by its node's clock, and when this process first read that, by the cluster's clock."""
        self._touched_at = time.monotonic()
        self._runtime_cancels = False
        """Whether the runtime, not Slurm, was asked to end the payload."""
        self._cancel_request = CancelRequest(self._send_cancel, job.log)

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
        # While the runtime cannot be reached, Slurm cannot be reached either.
        unreachable = self._started and isinstance(self._cancel_request.error, ConnectionFailed)
        observed = not unreachable and job.observe(started_at)
        self._started = started_at is not None and job.status.phase != JobPhase.PENDING
        self._cancel_request.resend_for(evidence)
        if not observed:
            return None
        with contextlib.suppress(OSError):
            if started_at is not None and (self._start_seen is None or self._start_seen[0] != started_at):
                self._start_seen = started_at, job.now()
            self._touch_run_dir()
            if not self._started and not job.status.over and not job.cancelled:
                job.report_waiting()
                job.check_waiting()
        return job.end_description(self._started)

    def cancel(self, now: bool = False) -> None:
        self._cancel_request.send(now)

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
            # The node's clock may be ahead of the cluster's clock, but the start was certainly before the read.
            started_at = min(evidence.started_at, self._start_seen[1] if self._start_seen else self._job.now())
            metadata["Queue wait (s)"] = round(max(0.0, started_at - self._job.submitted_at), 2)
        return metadata

    def release(self, evidence: Evidence) -> None:
        """Called when the step is done with the payload: end a job that was cancelled, has not started, or may hang."""
        reason = (evidence.end or {}).get("reason")
        if evidence.connection_lost and not self._job.cancelled:
            return  # Slurm cannot be asked, and the job may go on.
        if self._job.cancelled or (not evidence.started and not self._job.status.over):
            if self._step.should_end():
                self._job.cancel_until_gone()
        elif (self._runtime_cancels or evidence.nodes_lost or reason in _SRUN_MAY_HANG) and self._step.should_end():
            if reason == EndReason.TERMINATED and not self._runtime_cancels:
                self.explain(evidence)  # Ask for Slurm's reason now, before `scancel` replaces that reason.
            self._job.cancelled = self._runtime_cancels
            self._job.cancel_until_gone(_END_TIMEOUT)

    def _send_cancel(self, now: bool) -> None:
        """Ask the runtime to end the payload; if the runtime has not started, ask Slurm to cancel the job.

        Raises:
            OSError: the request cannot be delivered.
        """
        if not self._step.may_end():
            return
        if self._started:
            # The runtime ends the payload while Ray lives; scancel would end Ray at the same moment.
            self._runtime_cancels = True
            write_cancel_request(self._commands, self._directory, now)
            return
        self._job.cancelled = True
        done = self._commands.run(without_option_variables(["scancel", self._job.job_id]), timeout=60)
        # In 22.05 scancel exits with 0 even if it could not reach slurmctld; for a job that is over it prints nothing.
        errors = [line for line in done.stderr.decode("utf-8", "replace").splitlines() if "error:" in line]
        if done.returncode or errors:
            raise OSError(f"{self._commands.place}: {'; '.join(errors[-2:]) or f'exit code {done.returncode}'}")

    def _started_at(self, evidence: Evidence) -> float | None:
        """Returns when the job's record began, by the node's clock; None if it has not begun."""
        return evidence.started_at

    def _touch_run_dir(self) -> None:
        """Keep the run directory of a waiting job from being swept as unused."""
        if not self._started and time.monotonic() - self._touched_at >= _TOUCH_INTERVAL:
            self._touched_at = time.monotonic()
            self._commands.run(["touch", "--", self._job.directory])
