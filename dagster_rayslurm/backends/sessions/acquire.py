"""Finding a session, or making the next one, and waiting until it takes requests."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from ...errors import FailureKind, RunFailure
from ...follow import Cadence, Evidence
from ...interrupts import deferred_interrupts
from ...outcome import judge, judge_job
from ...outcome.metadata import failure_metadata
from ...slurm.errors import SlurmUnanswered
from ...slurm.job_log import relevant_lines
from ...slurm.queue import SharedQueue, fetch_queue
from ...slurm.states import TERMINAL, JobPhase
from ...ssh.base import Connection, ConnectionFailed
from ..slurm_job import SlurmJob
from .client import Announcement
from .registry import TOUCH_INTERVAL, Found, Newest, SessionRegistry

CLAIM_GRACE = 60.0
"""Seconds in which whoever claimed a generation has submitted its job, and written that down."""
_CADENCE = Cadence(busy=0.1, idle=2.0, waiting=15.0)
_CLAIM_PAUSE = 0.5
_OUT_OF_REACH = 3.0
"""Seconds between two tries while the cluster, or Slurm, does not answer."""
_MOST_WAITS = 3
"""Generations that one step waits for: each of them is an allocation, and a cause may be one that stays."""
_CLOSED_FOR = 5.0
"""Seconds in which the job of a session that has ended comes to its final state."""

T = TypeVar("T")


@dataclass(frozen=True)
class AcquiredSession:
    """A session that takes requests.

    Attributes:
        found: the session.
        reused: whether it was there before anybody waited for it.
    """

    found: Found
    reused: bool


class SessionAcquisition:
    """Looks for a session, and makes one where there is none.

    Args:
        commands: runs Slurm's programs, and reaches the files.
        registry: the session's generations.
        queue: the shared view of the queue.
        job_of: the job of a generation: directory, job's id and name, and when it was submitted by the cluster's clock.
        create: claims a generation and submits its job, which it hands to its second argument before it can be interrupted
            again; False if another one was faster.
        who: a name for who waits, as no other one has.
        start_timeout: seconds in which a session announces itself whose job runs.
        patience: seconds for which the cluster, or Slurm, can be out of reach of somebody who waits.
        log: the step's log.
    """

    def __init__(
        self,
        *,
        commands: Connection,
        registry: SessionRegistry,
        queue: SharedQueue,
        job_of: Callable[[int, str, str, float], SlurmJob],
        create: Callable[[int, Callable[[SlurmJob], None]], bool],
        who: str,
        start_timeout: float,
        patience: float,
        log: Any,
    ) -> None:
        self._commands = commands
        self._registry = registry
        self._queue = queue
        self._job_of = job_of
        self._create = create
        self._who = who
        self._start_timeout = start_timeout
        self._patience = patience
        self._log = log
        self._jobs: dict[int, SlurmJob] = {}
        """The jobs that were waited for."""
        self._why = ""
        """Why the last of them took nothing."""

    def seek(self, passed: int) -> AcquiredSession:
        """A session that takes requests.

        Args:
            passed: the newest generation that is known to take none.

        Raises:
            RunFailure: its job ended before it came up, or it waited for too long; or none of several took anything.
            StartError: it cannot be made.
            OSError: the cluster cannot be reached.
        """
        found = self._registry.hinted()
        if found is not None and found.charter.generation > passed:
            return AcquiredSession(found, True)
        while True:
            newest = self._registry.look()
            if newest.number > passed:
                arrival = self._join(newest)
                passed = newest.number
            else:
                arrival = self._make(passed + 1)
            if arrival is not None:
                return arrival

    def took_nothing(self, number: int, why: str) -> None:
        """Hear that a session which had announced itself did not take the payload, nor will.

        Raises:
            RunFailure: it was waited for, and has never taken one: the next would do no better.
            OSError: that cannot be found out.
        """
        job = self._jobs.get(number)
        if job is None:
            return  # It served others before, and one that comes to its end is nothing unusual.
        said = self._patiently(lambda: self._registry.announcement(number))
        self._why = (said.closing if said is not None else None) or why
        if self._patiently(lambda: self._registry.took_nothing(number)):
            raise self._closed(job)

    def _make(self, number: int) -> AcquiredSession | None:
        self._see_to_an_end()
        with self._job_at(number) as held:
            if not self._create(number, held.append):
                time.sleep(_CLAIM_PAUSE)  # The one who was faster may not be seen at once from another host.
                return None
            found = self._wait(number, held[0], arrived=False)
        return None if found is None else AcquiredSession(found, False)

    def _join(self, newest: Newest) -> AcquiredSession | None:
        """Wait for what others have made; None if it takes no requests any more, or never will."""
        if newest.ended:
            return None
        said, found = self._look_into(newest.number)
        if found is not None:
            return AcquiredSession(found, True)
        if said is not None:
            return None
        job_id = newest.job_id or self._submitted_by_others(newest)
        if job_id is None or ((newest.abandoned or newest.age > CLAIM_GRACE) and self._is_over(int(job_id))):
            return None
        self._see_to_an_end()
        at = self._patiently(self._queue.clock.now) - newest.age
        with self._job_at(newest.number) as held:
            held.append(self._job_of(newest.number, job_id, newest.creator, at))
            self._log.info(f"[rayslurm] waiting for the session that Slurm job {job_id} is to hold")
            found = self._wait(newest.number, held[0], arrived=True)
        return None if found is None else AcquiredSession(found, False)

    def _look_into(self, number: int) -> tuple[Announcement | None, Found | None]:
        """What a generation says of itself, and the generation if it takes requests."""
        said = self._registry.announcement(number)
        return said, None if said is None else self._registry.found(number)

    def _submitted_by_others(self, newest: Newest) -> str | None:
        """The job of a claim, which another one is about to submit, or has left; None if there will be none."""
        number = newest.number
        while newest.number == number and newest.job_id is None and not newest.abandoned:
            if newest.age > CLAIM_GRACE:
                return self._left_behind(newest)
            # Its maker may have been cut off just before it wrote down the job, which is there all the same.
            said = self._patiently(lambda: self._registry.announcement(number))
            if said is not None:
                return said.job_id
            time.sleep(_CLAIM_PAUSE)
            newest = self._patiently(self._registry.look)
        return newest.job_id if newest.number == number else None

    def _left_behind(self, claim: Newest) -> str | None:
        """The job of a claim whose maker is gone, or slow; None if there is none, and the claim is given up then."""
        # The claim may be as old as it is because slurmctld answers nobody: then its maker is at it still.
        queue = self._patiently(lambda: fetch_queue(self._commands)) if claim.creator else None
        jobs = [row.job_id for row in queue.named(claim.creator) if row.is_leader] if queue is not None else []
        if jobs:
            self._patiently(lambda: self._registry.adopt(claim.number, str(jobs[0])))
            return str(jobs[0])
        # A maker that is slow finds the mark after its submission, and takes its job down; or it was done before the mark.
        self._patiently(lambda: self._registry.abandon(claim.number))
        return self._patiently(self._registry.look).job_id

    def _is_over(self, job_id: int) -> bool:
        """Whether a job that was submitted a while ago has ended, by a word of Slurm that others may have asked for."""
        try:
            now = self._queue.clock.now()
            snapshot = self._queue.wait_for_latest(now)
            row = snapshot.job(job_id) if snapshot is not None else None
            if row is not None and row.state not in TERMINAL:
                return False
            row = fetch_queue(self._commands).job(job_id)
        except OSError:
            return False  # It is watched, then.
        return row is None or row.state in TERMINAL

    def _wait(self, number: int, job: SlurmJob, arrived: bool) -> Found | None:
        """Wait until a generation takes requests; None if another one is needed.

        Args:
            number: the generation.
            job: its job.
            arrived: whether somebody else made it: then its job may have been over before anybody looked.
        """
        self._jobs[number] = job
        self._why = f"Slurm job {job.job_id} ended before anybody looked"
        began = time.monotonic()
        touched = -TOUCH_INTERVAL
        running_since: float | None = None
        alive = not arrived
        while True:
            # Out of reach nothing is known of it, so nothing is decided: neither that it is late nor that it is over.
            said, found = self._patiently(lambda: self._look_into(number), whatever=True)
            if found is not None:
                return found
            if said is not None:
                if said.closing is not None:
                    self.took_nothing(number, said.closing)
                return None
            now = time.monotonic()
            if now - touched >= TOUCH_INTERVAL:
                touched = now
                with contextlib.suppress(OSError):
                    self._registry.wait_at(number, self._who)
            if job.observe():
                view = job.view
                alive = alive or view.phase in (JobPhase.PENDING, JobPhase.RUNNING) or view.exit_code is not None
                how = job.end_description(started=False, recorded=False)
                if how is not None:
                    if not alive or self._patiently(lambda: self._registry.is_abandoned(number)):
                        return None
                    raise self._never_came(job, how)
                if not view.over:
                    job.tell()
                    with contextlib.suppress(OSError):  # Slurm that does not answer says nothing about the job.
                        job.check_waiting()
                if view.phase != JobPhase.RUNNING:
                    running_since = None
                elif running_since is None:
                    running_since = now
                elif now - running_since > self._start_timeout:
                    raise self._silent(job)
            time.sleep(_CADENCE.pause(now - (running_since or began), running_since is not None))

    @contextmanager
    def _job_at(self, number: int) -> Iterator[list[SlurmJob]]:
        """A place for the job of a generation: if anything goes wrong once it is there, it is left as if waited for."""
        held: list[SlurmJob] = []
        try:
            yield held
        except BaseException:
            if held:
                with deferred_interrupts():
                    self._leave(number, held[0])
            raise

    def _patiently(self, what: Callable[[], T], whatever: bool = False) -> T:
        """Do something over there, again and again while that is out of reach.

        Args:
            what: does it.
            whatever: whether it is done again whatever keeps it from being done.

        Raises:
            OSError: for too long.
        """
        until = time.monotonic() + self._patience
        told = ""
        while True:
            try:
                return what()
            except OSError as error:
                if time.monotonic() > until or not (whatever or _may_pass(error)):
                    raise
                if str(error) != told:
                    told = str(error)
                    self._log.warning(f"[rayslurm] the session cannot be looked for, trying again: {error}")
            time.sleep(_OUT_OF_REACH)

    def _see_to_an_end(self) -> None:
        """Make no more allocations where one after the other takes nothing.

        Raises:
            RunFailure: they have been enough.
        """
        if len(self._jobs) >= _MOST_WAITS:
            job = list(self._jobs.values())[-1]
            sentence = f"{len(self._jobs)} sessions that were waited for took nothing; the last one: {self._why}"
            raise self._came_to_nothing(job, self._why, sentence)

    def _leave(self, number: int, job: SlurmJob) -> None:
        """Wait no longer; a session that nobody waits for any more must not start later on."""
        if job.view.over:
            return
        try:
            last = self._registry.leave(number, self._who)
        except OSError as error:
            self._log.error(
                f"[rayslurm] Slurm job {job.job_id} may hold a session that nobody waits for ({error}); run "
                f"`scancel {job.job_id}` on {self._commands.place}"
            )
            return
        if last:
            self._log.info(f"[rayslurm] nobody waits for the session any more: cancelling Slurm job {job.job_id}")
            job.cancelled = True
            job.cancel_until_gone()

    def _never_came(self, job: SlurmJob, how: str) -> RunFailure:
        """What keeps a session from coming up, as for a payload in a job of its own."""
        evidence = Evidence(runtime_exit=how)
        job.explain(evidence)
        verdict = judge(evidence, uses_pipes=False, require_messages=False)
        sentence = f"the session did not come up: {verdict.sentence}"
        return RunFailure(verdict.kind or FailureKind.RUNTIME, sentence, self._metadata(job, evidence), verdict.retry)

    def _closed(self, job: SlurmJob) -> RunFailure:
        """What keeps a session from taking anything, though it had announced itself."""
        sentence = f"the session did not come up, it ended before it took anything: {self._why}"
        return self._came_to_nothing(job, self._why, sentence)

    def _came_to_nothing(self, job: SlurmJob, why: str, sentence: str) -> RunFailure:
        evidence = Evidence(runtime_exit=why, started_at=0.0)  # It has written something, so its files can be seen.
        job.explain(evidence, patience=_CLOSED_FOR)
        verdict = judge_job(evidence)
        if verdict is not None and verdict.kind in (FailureKind.ALLOCATION, FailureKind.ENVIRONMENT):
            return RunFailure(verdict.kind, f"{sentence}; {verdict.sentence}", self._metadata(job, evidence), verdict.retry)
        return RunFailure(FailureKind.CLUSTER_START, sentence, self._metadata(job, evidence))

    def _silent(self, job: SlurmJob) -> RunFailure:
        evidence = Evidence()
        job.explain(evidence, patience=0.0)
        log = f": {lines[-1]}" if (lines := relevant_lines(evidence.runtime_log)) else ""
        sentence = f"the session's runtime did not start within runtime_start_timeout={self._start_timeout:g} s{log}"
        return RunFailure(FailureKind.RUNTIME, sentence, self._metadata(job, evidence))

    def _metadata(self, job: SlurmJob, evidence: Evidence) -> dict[str, Any]:
        where = f"{job.place}:{job.directory}" if job.place else job.directory
        return {**failure_metadata(evidence, where), **job.metadata(evidence)}


def _may_pass(error: OSError) -> bool:
    """Whether it says only that nobody answers now."""
    return error.temporary if isinstance(error, ConnectionFailed) else isinstance(error, (SlurmUnanswered, TimeoutError))
