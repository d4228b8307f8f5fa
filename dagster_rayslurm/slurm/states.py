"""The state of a job, derived from all observations of it: pending, running, ended, lost or unknown. Pure.

Only positive evidence ends a job. A job that is not in the queue is lost only after a while without a break, by the clock of
the snapshots. An unanswered query makes no snapshot, so it makes no time pass. The states are those of squeue(1), Slurm 22.05
to 25.05; a state that is not listed here ends nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from .shared_queue import QueueRow, QueueSnapshot

TERMINAL = frozenset(
    ["BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"]
)
"""States that a job does not leave, unless Slurm requeues it. COMPLETING, STAGE_OUT and REVOKED are not among them."""

MAY_REQUEUE = frozenset({"BOOT_FAIL", "NODE_FAIL", "PREEMPTED"})
"""Terminal states after which Slurm requeues a job that allows it, under the same id."""

WAITING = frozenset(["CONFIGURING", "PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"])
"""States in which nothing of the job runs, but may run later. In CONFIGURING nodes are being powered up."""

ACTIVE = frozenset({"COMPLETING", "RESIZING", "RUNNING", "SIGNALING", "STAGE_OUT", "STOPPED", "SUSPENDED"})
"""States in which the job has its nodes, or is being cleaned up there."""


class JobPhase(str, Enum):
    """What a job is doing, as far as is known."""

    UNKNOWN = "unknown"
    PENDING = "pending"
    RUNNING = "running"
    ENDED = "ended"  # Slurm or the batch script reported the end.
    LOST = "lost"  # The job left the queue without a report of its end.

    def __str__(self) -> str:
        return self.value


ABSENCE, REQUEUE_ABSENCE = 60.0, 300.0
"""Seconds for which a job must be missing from the queue until it counts as lost, and if Slurm may requeue it."""
SNAPSHOTS = 2
"""Number of snapshots in a row without the job, at least, until it counts as lost."""


class Seen(NamedTuple):
    """An observation: the job's row in a snapshot of the queue; None if the job is not in the snapshot."""

    at: float
    row: QueueRow | None


class Started(NamedTuple):
    """An observation: the run record has begun."""

    at: float


class Exited(NamedTuple):
    """An observation: the batch script has written the exit code of `srun`."""

    at: float
    exit_code: int


Observation = Seen | Started | Exited
"""What `JobWatch.after` takes. `at` is a time by the cluster's clock: when the snapshot began, else when it was observed."""


def seen(snapshot: QueueSnapshot, job_id: int) -> Seen:
    """What a snapshot of the queue says of one job, as an observation."""
    return Seen(snapshot.began, snapshot.job(job_id))


@dataclass(frozen=True)
class JobStatus:
    """The state of a job in Slurm, as far as is known."""

    phase: JobPhase
    state: str = ""  # Slurm's last word for it; "" if there is none.
    reason: str = ""  # Why it waits or ended, in Slurm's word; "" for none.
    expected_start: float | None = None
    """When Slurm expects a pending job to start, in seconds of the epoch; None if it does not say."""
    exit_code: int | None = None  # The batch script's; None if it is not known.

    @property
    def over(self) -> bool:
        """Whether the job has ended or is lost, so that its phase changes no more."""
        return self.phase in (JobPhase.ENDED, JobPhase.LOST)


@dataclass(frozen=True)
class JobWatch:
    """What all observations of a job so far add up to: `after` adds one, and `view` says what they mean."""

    submitted: float  # When sbatch returned, by the cluster's clock, in seconds of the epoch.
    requeue: bool = False  # Whether Slurm may requeue the job.
    final: JobStatus | None = None
    newest: float = -math.inf  # When the newest snapshot began.
    reported: JobStatus = JobStatus(JobPhase.UNKNOWN)
    """What Slurm said last of the job, in the snapshot that began at `reported_at`."""
    reported_at: float = -math.inf
    absent_since: float | None = None
    """Since when the job is out of the queue without a break, in `absent_snapshots` snapshots."""
    absent_snapshots: int = 0
    started_at: float | None = None
    exit_code: int | None = None

    @property
    def view(self) -> JobStatus:
        """The status of the job after all observations so far; it stays the same once it is over."""
        if self.final:
            return self.final
        reported = self.reported
        if self.started_at is None:
            return reported
        if reported.phase is JobPhase.PENDING and self.started_at >= self.reported_at:
            return JobStatus(JobPhase.RUNNING)
        if reported.phase is JobPhase.UNKNOWN and reported.state not in TERMINAL:
            return replace(reported, phase=JobPhase.RUNNING)
        return reported

    def after(self, observation: Observation) -> JobWatch:
        """A copy of this watch with one more observation. A snapshot that is not newer than the last one changes nothing."""
        if self.final:
            # Slurm may report the end before the batch script's exit code arrives.
            if isinstance(observation, Exited) and self.final.exit_code is None:
                final = replace(self.final, exit_code=observation.exit_code)
                return replace(self, exit_code=observation.exit_code, final=final)
            return self
        if isinstance(observation, Seen):
            return self._after_snapshot(observation)
        if isinstance(observation, Started):
            return replace(self, started_at=min(observation.at, self.started_at or math.inf))
        return self._after_exit(observation)

    def _after_snapshot(self, snapshot: Seen) -> JobWatch:
        # A row from before the submission is that of another job with this id.
        if snapshot.at < self.submitted or snapshot.at <= self.newest:
            return self
        watch, row = replace(self, newest=snapshot.at), snapshot.row
        if row is None:
            return watch._absent(snapshot.at)
        phase = JobPhase.PENDING if row.state in WAITING else JobPhase.RUNNING if row.state in ACTIVE else JobPhase.UNKNOWN
        reason = "" if row.reason == "None" else row.reason
        status = JobStatus(phase, row.state, reason, row.start if row.state in WAITING else None)
        if row.state in TERMINAL and not (self.requeue and row.state in MAY_REQUEUE):
            return watch._ended(status)
        watch = replace(watch, reported=status, reported_at=snapshot.at)
        if row.state in TERMINAL:
            return watch._absent(snapshot.at)
        return replace(watch, absent_since=None, absent_snapshots=0)

    def _after_exit(self, exited: Exited) -> JobWatch:
        watch = replace(self, exit_code=exited.exit_code)
        if self.requeue and exited.exit_code:  # Slurm may have ended srun in order to requeue the job.
            return watch
        return watch._ended(self.reported if self.reported.state in TERMINAL else JobStatus(JobPhase.ENDED))

    def _ended(self, status: JobStatus, phase: JobPhase = JobPhase.ENDED) -> JobWatch:
        final = replace(status, phase=phase, expected_start=None, exit_code=self.exit_code)
        return replace(self, final=final)

    def _absent(self, at: float) -> JobWatch:
        since = at if self.absent_since is None else self.absent_since
        watch = replace(self, absent_since=since, absent_snapshots=self.absent_snapshots + 1)
        limit = REQUEUE_ABSENCE if self.requeue else ABSENCE
        if at - since < limit or watch.absent_snapshots < SNAPSHOTS:
            return watch
        return watch._ended(self.reported, JobPhase.ENDED if self.reported.state in TERMINAL else JobPhase.LOST)
