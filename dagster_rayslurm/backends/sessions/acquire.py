"""Acquire a session: find one, wait for one that another process is starting, or start one.

A session has one allocation at a time. Its allocations are numbered; each is a generation of the session (see `registry`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ...errors import FailureKind, RunFailure
from ...follow import Cadence, Evidence
from ...interrupts import deferred_interrupts
from ...outcome import judge, judge_job
from ...outcome.metadata import failure_metadata
from ...slurm.accounting import relevant_lines
from ...slurm.commands import SlurmUnanswered
from ...slurm.shared_queue import SharedQueue, fetch_queue
from ...slurm.states import TERMINAL, JobPhase
from ...ssh.base import Connection, ConnectionFailed
from ..slurm_job import SlurmJob
from .registry import TOUCH_INTERVAL, LiveSession, NewestGeneration, SessionRegistry

CLAIM_TIMEOUT = 60.0
"""Seconds in which the process that claimed a generation submits its job and writes the job's id down."""
_CADENCE = Cadence(busy=0.1, idle=2.0, waiting=15.0)
"""Pauses between two looks at a session that starts."""
_CLAIM_INTERVAL = 0.5
"""Seconds between two looks at a generation whose job another process is submitting."""
_RETRY_INTERVAL = 3.0
"""Seconds between two tries while the cluster, or Slurm, does not answer."""
_MOST_ALLOCATIONS = 3
"""Most allocations of a session for which one step waits; if none of them serves the step, the cause may be permanent."""
_FINAL_STATE_TIMEOUT = 5.0
"""Seconds in which the job of a session that has ended reaches its final state."""

T = TypeVar("T")


@dataclass(frozen=True)
class AcquiredSession:
    """The session that a step got; it accepts requests.

    Attributes:
        session: the session.
        reused: whether the session accepted requests before this step came.
    """

    session: LiveSession
    reused: bool


@dataclass(kw_only=True, eq=False)
class SessionAcquisition:
    """Acquires a session for one step.

    Attributes:
        watch_job: returns the `SlurmJob` of a generation that another process created. Its arguments are the generation's
            number, the job's id and name, and the time of its submission by the cluster's clock.
        create: claims the generation of a number and submits its job. Its second argument is called with the job before an
            interrupt can come. Returns False if another process was faster.
        waiter: the unique name under which this step waits for a generation, see `SessionRegistry.wait_for`.
        start_timeout: seconds in which a session announces itself once its job runs.
        patience: seconds for which the cluster, or Slurm, may be out of reach.
    """

    commands: Connection
    registry: SessionRegistry
    queue: SharedQueue
    watch_job: Callable[[int, str, str, float], SlurmJob]
    create: Callable[[int, Callable[[SlurmJob], None]], bool]
    waiter: str
    start_timeout: float
    patience: float
    log: Any

    _jobs: dict[int, SlurmJob] = field(default_factory=dict, init=False)
    """Jobs for which this step waited, by the number of their generation."""
    _problem: str = field(default="", init=False)
    """Why the last of these jobs did not serve this step."""

    def acquire(self, after: int) -> AcquiredSession:
        """Find, join or create a session, and wait until it accepts requests.

        Args:
            after: number of the last generation that did not serve this step; only a later one is returned. 0 for none.

        Raises:
            RunFailure: the session's job ended before the session accepted requests, or waited too long in the queue, or
                several sessions in a row did not serve this step.
            StartError: the session cannot be created.
            OSError: the cluster cannot be reached.
        """
        session = self.registry.current()
        if session is not None and session.manifest.generation > after:
            return AcquiredSession(session, reused=True)
        while True:
            newest = self.registry.newest()
            joins = newest.number > after
            number = newest.number if joins else after + 1
            try:
                acquired = self._join(newest) if joins else self._create_generation(number)
            except BaseException:
                if number in self._jobs:
                    with deferred_interrupts():
                        self._stop_waiting(number, self._jobs[number])
                raise
            if acquired is not None:
                return acquired
            if joins:
                after = number

    def on_refused(self, number: int, reason: str) -> None:
        """Called when a session that announced itself does not accept the payload and never will.

        Raises:
            RunFailure: this step waited for that session, and the session never accepted any payload: the next session would
                do no better.
            OSError: the cluster cannot be reached.
        """
        job = self._jobs.get(number)
        if job is None:
            return  # The session served other steps before, so its end is nothing unusual.
        announcement = self._retry(lambda: self.registry.announcement(number))
        self._problem = (announcement.closing if announcement is not None else None) or reason
        if self._retry(lambda: self.registry.never_served(number)):
            sentence = f"the session did not come up, it ended before it took anything: {self._problem}"
            raise self._served_nothing(job, sentence)

    def _create_generation(self, number: int) -> AcquiredSession | None:
        """Create a generation, and return its session once that accepts requests; None if the step must look for another one."""
        self._check_allocations()

        def hold(job: SlurmJob) -> None:
            self._jobs[number] = job

        if not self.create(number, hold):
            time.sleep(_CLAIM_INTERVAL)  # This host may not see the faster process's files at once.
            return None
        session = self._wait(number, self._jobs[number], created=True)
        return None if session is None else AcquiredSession(session, reused=False)

    def _join(self, newest: NewestGeneration) -> AcquiredSession | None:
        """Wait for a generation that another process created, and return its session once that accepts requests.

        Returns None if the generation has ended, or will never accept requests.
        """
        number = newest.number
        if newest.ended:
            return None
        if self.registry.announcement(number) is not None:
            session = self.registry.session(number)
            return None if session is None else AcquiredSession(session, reused=True)
        job_id = newest.job_id or self._wait_for_job(newest)
        if job_id is None or ((newest.abandoned or newest.age > CLAIM_TIMEOUT) and self._is_over(int(job_id))):
            return None
        self._check_allocations()
        submitted_at = self._retry(self.queue.clock.now) - newest.age
        job = self._jobs[number] = self.watch_job(number, job_id, newest.creator, submitted_at)
        self.log.info(f"[rayslurm] waiting for the session that Slurm job {job_id} is to hold")
        session = self._wait(number, job, created=False)
        return None if session is None else AcquiredSession(session, reused=False)

    def _wait_for_job(self, newest: NewestGeneration) -> str | None:
        """The id of the job of a claimed generation, once the claiming process has submitted it; None if it never will."""
        number = newest.number
        while newest.number == number and newest.job_id is None and not newest.abandoned:
            if newest.age > CLAIM_TIMEOUT:
                return self._expire_claim(newest)
            # The creator may have been cut off after the submission, before it wrote down the job.
            announcement = self._retry(lambda: self.registry.announcement(number))
            if announcement is not None:
                return announcement.job_id
            time.sleep(_CLAIM_INTERVAL)
            newest = self._retry(self.registry.newest)
        return newest.job_id if newest.number == number else None

    def _expire_claim(self, claim: NewestGeneration) -> str | None:
        """The id of the job of a claimed generation whose creator is gone or slow.

        If Slurm has no such job, the generation is marked as abandoned, and None is returned.
        """
        # An old claim may mean that slurmctld answers no process: then the creator still waits for the submission.
        queue = self._retry(lambda: fetch_queue(self.commands)) if claim.creator else None
        jobs = [str(row.job_id) for row in queue.named(claim.creator) if row.is_leader] if queue is not None else []
        if jobs:
            self._retry(lambda: self.registry.write_job_id(claim.number, jobs[0]))
            return jobs[0]
        # A slow creator finds the mark after its submission and cancels its job. If it submitted before the mark, its job counts.
        self._retry(lambda: self.registry.abandon(claim.number))
        return self._retry(self.registry.newest).job_id

    def _is_over(self, job_id: int) -> bool:
        """Whether a job that was submitted a while ago has ended; False if Slurm does not say."""
        try:
            snapshot = self.queue.wait_for_latest(self.queue.clock.now())
            row = snapshot.job(job_id) if snapshot is not None else None
            if row is None or row.state in TERMINAL:  # The shared snapshot may be too old to show the job.
                row = fetch_queue(self.commands).job(job_id)
        except OSError:
            return False
        return row is None or row.state in TERMINAL

    def _wait(self, number: int, job: SlurmJob, created: bool) -> LiveSession | None:
        """Wait for a generation, and return its session once that accepts requests; None if the step needs another generation.

        Another generation is needed if the session no longer accepts payloads, or if another process created the job and the
        job had ended before this step first looked at it.
        """
        self._problem = f"Slurm job {job.job_id} ended before anybody looked"
        began = time.monotonic()
        touched = -TOUCH_INTERVAL
        running_since: float | None = None
        alive = created

        def check() -> tuple[LiveSession | None, bool, str | None]:
            announcement = self.registry.announcement(number)
            if announcement is None:
                return None, False, None
            return self.registry.session(number), True, announcement.closing

        while True:
            # While the cluster is out of reach nothing is known of the session: it counts neither as late nor as ended.
            session, announced, closing = self._retry(check, any_error=True)
            if session is not None:
                return session
            if announced:
                if closing is not None:
                    self.on_refused(number, closing)
                return None
            now = time.monotonic()
            if now - touched >= TOUCH_INTERVAL:
                touched = now
                with contextlib.suppress(OSError):
                    self.registry.wait_for(number, self.waiter)
            if job.observe():
                view = job.status
                alive = alive or view.phase in (JobPhase.PENDING, JobPhase.RUNNING) or view.exit_code is not None
                description = job.end_description(started=False, recorded=False)
                if description is not None:
                    if not alive or self._retry(lambda: self.registry.is_abandoned(number)):
                        return None
                    raise self._never_started(job, description)
                if not view.over:
                    job.report_waiting()
                    with contextlib.suppress(OSError):  # If Slurm does not answer, that says nothing about the job.
                        job.check_waiting()
                if view.phase != JobPhase.RUNNING:
                    running_since = None
                elif running_since is None:
                    running_since = now
                elif now - running_since > self.start_timeout:
                    raise self._silent(job)
            time.sleep(_CADENCE.pause(now - (running_since or began), running_since is not None))

    def _retry(self, action: Callable[[], T], any_error: bool = False) -> T:
        """Return the result of an action, which is repeated for `patience` seconds while the cluster is out of reach.

        With `any_error`, the action is repeated after any other OSError, too.
        """
        deadline = time.monotonic() + self.patience
        logged = ""
        while True:
            try:
                return action()
            except OSError as error:
                if time.monotonic() > deadline or not (any_error or _is_temporary(error)):
                    raise
                if str(error) != logged:
                    logged = str(error)
                    self.log.warning(f"[rayslurm] the session cannot be looked for, trying again: {error}")
            time.sleep(_RETRY_INTERVAL)

    def _check_allocations(self) -> None:
        """Raise a RunFailure if this step has already waited for `_MOST_ALLOCATIONS` allocations that did not serve it."""
        if len(self._jobs) >= _MOST_ALLOCATIONS:
            job = list(self._jobs.values())[-1]
            sentence = f"{len(self._jobs)} sessions that were waited for took nothing; the last one: {self._problem}"
            raise self._served_nothing(job, sentence)

    def _stop_waiting(self, number: int, job: SlurmJob) -> None:
        """Record that this step no longer waits, and cancel the job if no other process waits for the session."""
        if job.status.over:
            return
        try:
            last = self.registry.stop_waiting(number, self.waiter)
        except OSError as error:
            self.log.error(
                f"[rayslurm] Slurm job {job.job_id} may hold a session that nobody waits for ({error}); run "
                f"`scancel {job.job_id}` on {self.commands.place}"
            )
            return
        if last:
            self.log.info(f"[rayslurm] nobody waits for the session any more: cancelling Slurm job {job.job_id}")
            job.cancelled = True
            job.cancel_until_gone()

    def _never_started(self, job: SlurmJob, description: str) -> RunFailure:
        """The failure to raise when a session's job ended before the session announced itself."""
        evidence = Evidence(runtime_exit=description)
        job.explain(evidence)
        verdict = judge(evidence, uses_pipes=False, require_messages=False)
        sentence = f"the session did not come up: {verdict.sentence}"
        return RunFailure(verdict.kind or FailureKind.RUNTIME, sentence, _metadata(job, evidence), verdict.retry)

    def _served_nothing(self, job: SlurmJob, sentence: str) -> RunFailure:
        """The failure to raise when sessions announced themselves but did not run this step's payload."""
        evidence = Evidence(runtime_exit=self._problem, started_at=0.0)  # The job wrote an announcement, so its files are there.
        job.explain(evidence, timeout=_FINAL_STATE_TIMEOUT)
        verdict = judge_job(evidence)
        if verdict is not None and verdict.kind in (FailureKind.ALLOCATION, FailureKind.ENVIRONMENT):
            return RunFailure(verdict.kind, f"{sentence}; {verdict.sentence}", _metadata(job, evidence), verdict.retry)
        return RunFailure(FailureKind.CLUSTER_START, sentence, _metadata(job, evidence))

    def _silent(self, job: SlurmJob) -> RunFailure:
        """The failure to raise when a session's job runs but the session does not announce itself in time."""
        evidence = Evidence()
        job.explain(evidence, timeout=0.0)
        log = f": {lines[-1]}" if (lines := relevant_lines(evidence.runtime_log)) else ""
        sentence = f"the session's runtime did not start within runtime_start_timeout={self.start_timeout:g} s{log}"
        return RunFailure(FailureKind.RUNTIME, sentence, _metadata(job, evidence))


def _metadata(job: SlurmJob, evidence: Evidence) -> dict[str, Any]:
    where = f"{job.place}:{job.directory}" if job.place else job.directory
    return {**failure_metadata(evidence, where), **job.metadata(evidence)}


def _is_temporary(error: OSError) -> bool:
    return error.temporary if isinstance(error, ConnectionFailed) else isinstance(error, (SlurmUnanswered, TimeoutError))
