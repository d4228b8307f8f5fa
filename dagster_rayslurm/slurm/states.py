"""The state of a job, derived from all observations of the job: pending, running, ended, lost or unknown.

There are three kinds of observations: a snapshot of Slurm's queue (an answer of squeue); the beginning of the run record (the
file to which the runtime, this package's program on the nodes, writes what happens in a run); and the exit code of the batch
script's srun. The functions have no side effects.

A job counts as ended only if squeue shows a terminal state, or if the exit code of srun is known. A job counts as lost only if no
snapshot of a minute or more shows the job. While squeue gives no answer, there is no snapshot, and no job becomes lost. This
module lists the states of squeue(1), Slurm 22.05 to 25.05; a job in any other state does not count as ended.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..runtime.protocol.messages import TextEnum
from .shared_queue import QueueRow

# Final states, the one that explains least of the end of a heterogeneous job first. UNKNOWN stands for a state that is not final.
BY_SEVERITY = (
    *("COMPLETED", "FAILED", "UNKNOWN", "CANCELLED", "DEADLINE", "TIMEOUT", "OUT_OF_MEMORY", "PREEMPTED", "BOOT_FAIL"),
    "NODE_FAIL",
)

# States of a job that has ended; a job leaves such a state only if Slurm requeues the job. COMPLETING, STAGE_OUT and REVOKED are
# not among them.
TERMINAL = frozenset(BY_SEVERITY) - {"UNKNOWN"}

# How a job lost its nodes, by its state.
LOST_NODES = {
    "BOOT_FAIL": "its nodes did not boot",
    "NODE_FAIL": "one of its nodes failed",
    "PREEMPTED": "another job took its place",
    "REVOKED": "another cluster took it over",
}

# Terminal states after which Slurm requeues a job that allows it, under the same id.
MAY_REQUEUE = frozenset({"BOOT_FAIL", "NODE_FAIL", "PREEMPTED"})

# States in which nothing of the job runs, but may run later. In CONFIGURING nodes are being powered up.
WAITING = frozenset(["CONFIGURING", "PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"])

# States in which the job has its nodes, or is being cleaned up there.
ACTIVE = frozenset({"COMPLETING", "RESIZING", "RUNNING", "SIGNALING", "STAGE_OUT", "STOPPED", "SUSPENDED"})


class JobPhase(TextEnum):
    """The phase of a job, as far as the observations tell; the comments at the members say what each phase means."""

    UNKNOWN = "unknown"  # There is no observation yet, or squeue shows a state that says too little.
    PENDING = "pending"  # The job waits for its nodes.
    RUNNING = "running"  # The job has its nodes.
    ENDED = "ended"  # Slurm or the batch script reported the end.
    LOST = "lost"  # The job left the queue without a report of its end.


# Seconds for which a job must be missing from the queue before it counts as lost: ABSENCE for a job that Slurm never requeues,
# REQUEUE_ABSENCE for a job that Slurm may requeue.
ABSENCE, REQUEUE_ABSENCE = 60.0, 300.0


@dataclass(frozen=True)
class JobStatus:
    """The state of a job in Slurm, as far as known."""

    phase: JobPhase
    state: str = ""  # The last state that Slurm reported, such as "RUNNING"; "" if there is none.
    reason: str = ""  # Slurm's word for why the job waits or has ended, such as "Priority"; "" for none.
    # When Slurm expects a pending job to start, in seconds since the epoch; None if it does not say.
    expected_start: float | None = None
    exit_code: int | None = None  # Exit code of the batch script's srun; None if it is not known.

    @property
    def over(self) -> bool:
        """Whether the job has ended or is lost. The phase of such a job does not change any more."""
        return self.phase in (JobPhase.ENDED, JobPhase.LOST)


@dataclass(frozen=True)
class JobWatch:
    """All observations of a job so far; `seen`, `started` and `exited` return a copy with one more observation.

    All times are in seconds since the epoch, by the cluster's clock.
    """

    submitted: float  # When sbatch returned.
    requeue: bool = False  # Whether Slurm may requeue the job.
    final: JobStatus | None = None  # The status of a job that is over; None before.
    newest: float = -math.inf  # When the newest snapshot began.
    # The status of the job in the last snapshot that shows the job; this snapshot began at `reported_at`.
    reported: JobStatus = JobStatus(JobPhase.UNKNOWN)
    reported_at: float = -math.inf
    # When the first of the newest snapshots that do not show the job began; None if the newest snapshot shows the job. A snapshot
    # that shows an end after which Slurm may requeue the job counts as well.
    absent_since: float | None = None
    started_at: float | None = None  # When the run record began; None before.
    exit_code: int | None = None  # Exit code of the batch script's srun; None if it is not known.

    @property
    def view(self) -> JobStatus:
        """The status of the job that follows from all observations so far."""
        if self.final or self.started_at is None:
            return self.final or self.reported
        if self.reported.phase is JobPhase.PENDING and self.started_at >= self.reported_at:
            return JobStatus(JobPhase.RUNNING)
        if self.reported.phase is JobPhase.UNKNOWN and self.reported.state not in TERMINAL:
            return replace(self.reported, phase=JobPhase.RUNNING)
        return self.reported

    def seen(self, at: float, row: QueueRow | None) -> JobWatch:
        """Returns a copy that takes a snapshot of the queue into account.

        `at` is the time when the snapshot began. `row` is the job's row in the snapshot; None if the snapshot does not show the
        job. The result is `self` in three cases: the job is over already; the snapshot is not newer than the last one; or the
        snapshot is older than the submission, so that it may show another job with the same id.
        """
        if self.final or at < self.submitted or at <= self.newest:
            return self
        watch = replace(self, newest=at)
        if row is None:
            return watch._absent(at)
        phase = JobPhase.PENDING if row.state in WAITING else JobPhase.RUNNING if row.state in ACTIVE else JobPhase.UNKNOWN
        reason = "" if row.reason == "None" else row.reason
        status = JobStatus(phase, row.state, reason, row.start if row.state in WAITING else None)
        if row.state in TERMINAL and not (self.requeue and row.state in MAY_REQUEUE):
            return watch._ended(status)
        watch = replace(watch, reported=status, reported_at=at)
        return watch._absent(at) if row.state in TERMINAL else replace(watch, absent_since=None)

    def started(self, at: float) -> JobWatch:
        """Returns a copy that takes into account that the job has started; `at` is the time when the run record began.

        Returns `self` if the job is over already.
        """
        return self if self.final else replace(self, started_at=min(at, self.started_at or math.inf))

    def exited(self, exit_code: int) -> JobWatch:
        """Returns a copy that takes into account the exit code of `srun`, which the batch script has written to a file.

        In the copy, the job has ended, unless Slurm may requeue the job. If the job was over before, the copy only gets the exit
        code. If, in addition, an exit code was known and Slurm never requeues the job, the result is `self`.
        """
        watch = replace(self, exit_code=exit_code)
        if self.final:
            known = self.exit_code is not None and not self.requeue  # A known exit code may be that of the run before a requeue.
            return self if known else replace(watch, final=replace(self.final, exit_code=exit_code))
        # Slurm may have ended srun in order to requeue the job. srun exits with 0 even then if no task has told it how it ended
        # (`global_rc` of Slurm's src/srun/srun.c).
        if self.requeue:
            return watch
        return watch._ended(self.reported if self.reported.state in TERMINAL else JobStatus(JobPhase.ENDED))

    def _ended(self, status: JobStatus, phase: JobPhase = JobPhase.ENDED) -> JobWatch:
        return replace(self, final=replace(status, phase=phase, expected_start=None, exit_code=self.exit_code))

    def _absent(self, at: float) -> JobWatch:
        since = at if self.absent_since is None else self.absent_since
        watch = replace(self, absent_since=since)
        if at - since < (REQUEUE_ABSENCE if self.requeue else ABSENCE):
            return watch
        return watch._ended(self.reported, JobPhase.ENDED if self.reported.state in TERMINAL else JobPhase.LOST)
