"""The state of a job, derived from all observations of it: pending, running, ended, lost or unknown. Pure.

Only positive evidence ends a job. A job that is not in the queue is lost only after a while without a break, by the clock of
the snapshots. An unanswered query makes no snapshot, so it makes no time pass. The states are those of squeue(1), Slurm 22.05
to 25.05; a state that is not listed here ends nothing.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from enum import Enum

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
    ENDED = "ended"
    """Slurm or the batch script reported the end."""
    LOST = "lost"
    """The job left the queue without a report of its end."""

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Timers:
    """How long a job must be missing from the queue until it counts as lost.

    Attributes:
        absence: seconds for a job that Slurm may not requeue.
        requeue_absence: seconds for a job that Slurm may requeue.
        snapshots: number of snapshots in a row without the job, at least.
    """

    absence: float = 60.0
    requeue_absence: float = 300.0
    snapshots: int = 2


@dataclass(frozen=True)
class Seen:
    """An observation: the job's row in a snapshot of the queue; None if the job is not in the snapshot."""

    at: float
    row: QueueRow | None


@dataclass(frozen=True)
class Started:
    """An observation: the record of the run has begun."""

    at: float


@dataclass(frozen=True)
class Exited:
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
    """The state of a job in Slurm, as far as is known.

    Attributes:
        phase: what the job is doing.
        state: Slurm's last word for it; "" if there is none.
        reason: why it waits or ended, in Slurm's word; "" for none.
        expected_start: when Slurm expects a pending job to start, in seconds of the epoch; None if it does not say.
        exit_code: the batch script's; None if it is not known.
    """

    phase: JobPhase
    state: str = ""
    reason: str = ""
    expected_start: float | None = None
    exit_code: int | None = None

    @property
    def over(self) -> bool:
        """Whether the job has ended or is lost, so that its phase changes no more."""
        return self.phase in (JobPhase.ENDED, JobPhase.LOST)


@dataclass(frozen=True)
class JobWatch:
    """What all observations of a job so far add up to: `after` adds one, and `view` says what they mean.

    Attributes:
        submitted: when sbatch returned, by the cluster's clock, in seconds of the epoch.
        requeue: whether Slurm may requeue the job.
        timers: when an absent job is lost.
        final: the final status; None before the job is over.
        newest: when the newest snapshot began.
        reported: what Slurm said last of the job, in the snapshot that began at `reported_at`.
        absent_since: since when the job is out of the queue without a break, in `absent_snapshots` snapshots.
        started_at: when the run record started.
        exit_code: the batch script's.
    """

    submitted: float
    requeue: bool = False
    timers: Timers = Timers()
    final: JobStatus | None = None
    newest: float = -math.inf
    reported: JobStatus = JobStatus(JobPhase.UNKNOWN)
    reported_at: float = -math.inf
    absent_since: float | None = None
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
            return dataclasses.replace(reported, phase=JobPhase.RUNNING)
        return reported

    def after(self, observation: Observation) -> JobWatch:
        """A copy of this watch with one more observation. A snapshot that is not newer than the last one changes nothing."""
        if self.final:
            # Slurm may report the end before the batch script's exit code arrives.
            if isinstance(observation, Exited) and self.final.exit_code is None:
                final = dataclasses.replace(self.final, exit_code=observation.exit_code)
                return dataclasses.replace(self, exit_code=observation.exit_code, final=final)
            return self
        if isinstance(observation, Seen):
            return self._after_snapshot(observation)
        if isinstance(observation, Started):
            return dataclasses.replace(self, started_at=min(observation.at, self.started_at or math.inf))
        return self._after_exit(observation)

    def _after_snapshot(self, snapshot: Seen) -> JobWatch:
        # A row from before the submission is that of another job with this id.
        if snapshot.at < self.submitted or snapshot.at <= self.newest:
            return self
        watch, row = dataclasses.replace(self, newest=snapshot.at), snapshot.row
        if row is None:
            return watch._absent(snapshot.at)
        status = JobStatus(
            _phase(row.state),
            row.state,
            "" if row.reason == "None" else row.reason,
            row.start if row.state in WAITING else None,
        )
        if row.state in TERMINAL and not (self.requeue and row.state in MAY_REQUEUE):
            return watch._ended(status)
        watch = dataclasses.replace(watch, reported=status, reported_at=snapshot.at)
        if row.state in TERMINAL:
            return watch._absent(snapshot.at)
        return dataclasses.replace(watch, absent_since=None, absent_snapshots=0)

    def _after_exit(self, exited: Exited) -> JobWatch:
        watch = dataclasses.replace(self, exit_code=exited.exit_code)
        if self.requeue and exited.exit_code:  # Slurm may have ended srun in order to requeue the job.
            return watch
        return watch._ended(self.reported if self.reported.state in TERMINAL else JobStatus(JobPhase.ENDED))

    def _ended(self, status: JobStatus, phase: JobPhase = JobPhase.ENDED) -> JobWatch:
        final = dataclasses.replace(status, phase=phase, expected_start=None, exit_code=self.exit_code)
        return dataclasses.replace(self, final=final)

    def _absent(self, at: float) -> JobWatch:
        since = at if self.absent_since is None else self.absent_since
        watch = dataclasses.replace(self, absent_since=since, absent_snapshots=self.absent_snapshots + 1)
        limit = self.timers.requeue_absence if self.requeue else self.timers.absence
        if at - since < limit or watch.absent_snapshots < self.timers.snapshots:
            return watch
        return watch._ended(self.reported, JobPhase.ENDED if self.reported.state in TERMINAL else JobPhase.LOST)


def _phase(state: str) -> JobPhase:
    return JobPhase.PENDING if state in WAITING else JobPhase.RUNNING if state in ACTIVE else JobPhase.UNKNOWN
