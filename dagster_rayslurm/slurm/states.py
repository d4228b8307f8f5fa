"""From what was seen of a job to what it is: waiting, running, ended, lost, or not known. Pure.

Only positive evidence ends a job. That it is not in the queue is no state: it has to be so for a while, without a break,
by the snapshots' own clock; a question that was not answered makes no snapshot, so it makes no time pass either. The
words are those of squeue(1), Slurm 22.05 to 25.05; a word that is not among them ends nothing.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Literal

from .snapshot import QueueRow, QueueSnapshot

TERMINAL = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "TIMEOUT",
    }
)
"""States that a job does not leave, unless Slurm requeues it. COMPLETING, STAGE_OUT, REVOKED and so on are none."""

MAY_REQUEUE = frozenset({"BOOT_FAIL", "NODE_FAIL", "PREEMPTED"})
"""Terminal states after which Slurm itself requeues a job that allows it, under the same id."""

WAITING = frozenset(
    {"CONFIGURING", "PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"},
)
"""States in which nothing of the job runs, and something may later on; CONFIGURING is that of nodes being powered up."""

ACTIVE = frozenset({"COMPLETING", "RESIZING", "RUNNING", "SIGNALING", "STAGE_OUT", "STOPPED", "SUSPENDED"})
"""States in which the job has its nodes, or still has to clean up there."""


@dataclass(frozen=True)
class Timers:
    """For how many seconds, and in how many snapshots at least, a job must be out of the queue to be gone for good."""

    absence: float = 60.0
    requeue_absence: float = 300.0
    snapshots: int = 2


@dataclass(frozen=True)
class Submission:
    """A job of ours.

    Attributes:
        job_id: Slurm's id; of the first component of a heterogeneous job.
        submitted: when sbatch returned, by the cluster's clock, in seconds of the epoch.
        requeue: whether Slurm may requeue it.
    """

    job_id: int
    submitted: float
    requeue: bool = False


@dataclass(frozen=True)
class Seen:
    """A snapshot of the queue, as far as this job goes: its row, or None if it is not in there."""

    at: float
    row: QueueRow | None


@dataclass(frozen=True)
class Started:
    """The record of the run has started."""

    at: float


@dataclass(frozen=True)
class Exited:
    """The batch script has written down how `srun` ended."""

    at: float
    exit_code: int


Observation = Seen | Started | Exited
"""`at` is the cluster's clock: when the snapshot began, else when the observation was made."""


def seen(snapshot: QueueSnapshot, job_id: int) -> Seen:
    """A snapshot as an observation of one job."""
    return Seen(snapshot.began, snapshot.job(job_id))


@dataclass(frozen=True)
class JobView:
    """What a job is, as far as is known.

    Attributes:
        kind: "pending", "running", "ended" (Slurm or the batch script said so), "lost" (out of the queue without a word
            of its end), or "unknown".
        state: Slurm's last word for it; "" if it has said none.
        reason: why it waits or ended, in Slurm's word; "" for none.
        expected_start: when Slurm expects a pending job to start, in seconds of the epoch; None if it does not say.
        exit_code: the batch script's; None if it is not known.
    """

    kind: Literal["pending", "running", "ended", "lost", "unknown"]
    state: str = ""
    reason: str = ""
    expected_start: float | None = None
    exit_code: int | None = None

    @property
    def over(self) -> bool:
        """Whether this is final."""
        return self.kind in ("ended", "lost")


@dataclass(frozen=True)
class JobWatch:
    """What a job's observations come to, taken one after the other; `view` is final once it is over."""

    submission: Submission
    timers: Timers = field(default=Timers())
    final: JobView | None = None
    newest: float = -math.inf
    """When the newest snapshot began."""
    known_at: float = -math.inf
    known: JobView = field(default=JobView("unknown"))
    """What Slurm said last of the job itself."""
    present_at: float = -math.inf
    gone_since: float | None = None
    gone_in: int = 0
    """Since when, and in how many snapshots, the job is out of the queue without a break."""
    started_at: float | None = None
    exit_code: int | None = None

    @property
    def view(self) -> JobView:
        """What the job is now."""
        if self.final:
            return self.final
        known, started = self.known, self.started_at is not None
        if known.kind == "pending" and self.started_at is not None and self.started_at >= self.known_at:
            return JobView("running")
        if known.kind == "unknown" and started and known.state not in TERMINAL:
            return dataclasses.replace(known, kind="running")
        return known

    def after(self, observation: Observation) -> JobWatch:
        """The watch with one more observation. Snapshots that are not newer than the newest one change nothing."""
        if self.final:
            # Slurm's word may come before what the batch script has written; it stands, and this tells more of it.
            if isinstance(observation, Exited) and self.final.exit_code is None:
                return self._with_exit_code(self.final, observation.exit_code)
            return self
        if isinstance(observation, Seen):
            return self._after_snapshot(observation)
        if isinstance(observation, Started):
            return dataclasses.replace(self, started_at=min(observation.at, self.started_at or math.inf))
        return self._after_exit(observation)

    def _after_snapshot(self, snapshot: Seen) -> JobWatch:
        # What was seen before the submission is of another job with this id, if it is of any.
        if snapshot.at < self.submission.submitted or snapshot.at <= self.newest:
            return self
        watch = dataclasses.replace(self, newest=snapshot.at)
        row = snapshot.row
        if row is not None:
            watch = watch._told(snapshot.at, _view_of_row(row))
            if watch.final or row.state not in TERMINAL:
                return watch._present(snapshot.at)
        return watch._gone(snapshot.at)

    def _after_exit(self, exited: Exited) -> JobWatch:
        watch = dataclasses.replace(self, exit_code=exited.exit_code)
        if self.submission.requeue and exited.exit_code:  # Slurm may have ended srun in order to requeue the job.
            return watch
        known = self.known if self.known.state in TERMINAL else JobView("ended")
        return dataclasses.replace(watch, final=dataclasses.replace(known, kind="ended", exit_code=exited.exit_code))

    def _with_exit_code(self, final: JobView, exit_code: int) -> JobWatch:
        return dataclasses.replace(self, exit_code=exit_code, final=dataclasses.replace(final, exit_code=exit_code))

    def _told(self, at: float, view: JobView) -> JobWatch:
        """With what Slurm says of the job itself."""
        if view.state in TERMINAL and not (self.submission.requeue and view.state in MAY_REQUEUE):
            exit_code = view.exit_code if self.exit_code is None else self.exit_code
            return dataclasses.replace(self, final=dataclasses.replace(view, kind="ended", exit_code=exit_code))
        return dataclasses.replace(self, known=view, known_at=at) if at >= self.known_at else self

    def _present(self, at: float) -> JobWatch:
        if self.gone_since is not None and self.gone_since > at:
            return self
        return dataclasses.replace(self, present_at=max(at, self.present_at), gone_since=None, gone_in=0)

    def _gone(self, at: float) -> JobWatch:
        if at <= self.present_at:
            return self
        since = at if self.gone_since is None else self.gone_since
        watch = dataclasses.replace(self, gone_since=since, gone_in=self.gone_in + 1)
        limit = self.timers.requeue_absence if self.submission.requeue else self.timers.absence
        if at - since < limit or watch.gone_in < self.timers.snapshots:
            return watch
        kind: Literal["ended", "lost"] = "ended" if self.known.state in TERMINAL else "lost"
        exit_code = self.known.exit_code if self.exit_code is None else self.exit_code
        return dataclasses.replace(
            watch, final=dataclasses.replace(self.known, kind=kind, expected_start=None, exit_code=exit_code)
        )


def _view_of_row(row: QueueRow) -> JobView:
    reason = "" if row.reason == "None" else row.reason
    start = row.start if row.state in WAITING else None
    return JobView(_kind(row.state), row.state, reason, start)


def _kind(state: str) -> Literal["pending", "running", "unknown"]:
    return "pending" if state in WAITING else "running" if state in ACTIVE else "unknown"
