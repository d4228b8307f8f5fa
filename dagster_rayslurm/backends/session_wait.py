"""Finding a session, or making the next one, and waiting until it takes requests."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..connections.base import Connection
from ..errors import RunFailure
from ..follow import Cadence, Evidence
from ..interrupts import deferred_interrupts
from ..metadata import failure_metadata
from ..outcome import judge
from ..slurm.log import telling_lines
from ..slurm.queue import SharedQueue, ask_queue
from ..slurm.states import TERMINAL
from .session_registry import TOUCH_INTERVAL, Found, Newest, SessionRegistry
from .slurm_job import SlurmJob

CLAIM_GRACE = 60.0
"""Seconds in which whoever claimed a generation has submitted its job, and written that down."""
_CADENCE = Cadence(busy=0.1, idle=2.0, waiting=15.0)
_CLAIM_PAUSE = 0.5


@dataclass(frozen=True)
class Arrival:
    """A session that takes requests.

    Attributes:
        found: the session.
        reused: whether it was there before anybody waited for it.
    """

    found: Found
    reused: bool


class SessionSearch:
    """Looks for a session, and makes one where there is none.

    Args:
        commands: runs Slurm's programs, and reaches the files.
        registry: the session's generations.
        queue: the shared view of the queue.
        job_of: the job of a generation: directory, job's id and name, and when it was submitted by the cluster's clock.
        create: claims a generation and submits its job; None if another one was faster.
        who: a name for who waits, as no other one has.
        start_timeout: seconds in which a session announces itself whose job runs.
        log: the step's log.
    """

    def __init__(
        self,
        *,
        commands: Connection,
        registry: SessionRegistry,
        queue: SharedQueue,
        job_of: Callable[[int, str, str, float], SlurmJob],
        create: Callable[[int], SlurmJob | None],
        who: str,
        start_timeout: float,
        log: Any,
    ) -> None:
        self._commands = commands
        self._registry = registry
        self._queue = queue
        self._job_of = job_of
        self._create = create
        self._who = who
        self._start_timeout = start_timeout
        self._log = log

    def seek(self, passed: int) -> Arrival:
        """A session that takes requests.

        Args:
            passed: the newest generation that is known to take none.

        Raises:
            RunFailure: its job ended before it came up, or it waited for too long.
            StartError: it cannot be made.
            OSError: the cluster cannot be reached.
        """
        found = self._registry.hinted()
        if found is not None and found.charter.generation > passed:
            return Arrival(found, True)
        while True:
            newest = self._registry.look()
            if newest.number > passed:
                arrival = self._join(newest)
                passed = newest.number
            else:
                arrival = self._make(passed + 1)
            if arrival is not None:
                return arrival

    def _make(self, number: int) -> Arrival | None:
        job = self._create(number)
        if job is None:
            time.sleep(_CLAIM_PAUSE)  # The one who was faster may not be seen at once from another host.
            return None
        found = self._wait(number, job, arrived=False)
        return None if found is None else Arrival(found, False)

    def _join(self, newest: Newest) -> Arrival | None:
        """Wait for what others have made; None if it takes no requests any more, or never will."""
        if newest.ended:
            return None
        found = self._registry.found(newest.number)
        if found is not None:
            return Arrival(found, True)
        if self._registry.announcement(newest.number) is not None:
            return None
        job_id = newest.job_id or self._submitted_by_others(newest)
        if job_id is None or ((newest.abandoned or newest.age > CLAIM_GRACE) and self._is_over(int(job_id))):
            return None
        at = self._queue.clock.now() - newest.age
        self._log.info(f"[rayslurm] waiting for the session that Slurm job {job_id} is to hold")
        found = self._wait(newest.number, self._job_of(newest.number, job_id, newest.creator, at), arrived=True)
        return None if found is None else Arrival(found, False)

    def _submitted_by_others(self, newest: Newest) -> str | None:
        """The job of a claim, which another one is about to submit, or has left; None if there will be none."""
        number = newest.number
        while newest.number == number and newest.job_id is None and not newest.abandoned:
            if newest.age > CLAIM_GRACE:
                return self._left_behind(newest)
            time.sleep(_CLAIM_PAUSE)
            newest = self._registry.look()
        return newest.job_id if newest.number == number else None

    def _left_behind(self, claim: Newest) -> str | None:
        """The job of a claim whose maker is gone, or slow; None if there is none, and the claim is given up then."""
        jobs = [row.job_id for row in ask_queue(self._commands).named(claim.creator)] if claim.creator else []
        if jobs:
            self._registry.adopt(claim.number, str(jobs[0]))
            return str(jobs[0])
        # A maker that is slow finds the mark after its submission, and takes its job down; or it was done before the mark.
        self._registry.abandon(claim.number)
        return self._registry.look().job_id

    def _is_over(self, job_id: int) -> bool:
        """Whether a job that was submitted a while ago has ended, by a word of Slurm that others may have asked for."""
        try:
            now = self._queue.clock.now()
            snapshot = self._queue.beside(lambda work: work()).look(now)
            row = snapshot.job(job_id) if snapshot is not None else None
            if row is not None and row.state not in TERMINAL:
                return False
            row = ask_queue(self._commands).job(job_id)
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
        began = time.monotonic()
        touched = -TOUCH_INTERVAL
        running_since: float | None = None
        alive = not arrived
        try:
            while True:
                if self._registry.announcement(number) is not None:
                    return self._registry.found(number)
                now = time.monotonic()
                if now - touched >= TOUCH_INTERVAL:
                    touched = now
                    with contextlib.suppress(OSError):
                        self._registry.wait_at(number, self._who)
                if job.observe():
                    view = job.view
                    alive = alive or view.kind in ("pending", "running") or view.exit_code is not None
                    how = job.how_it_ended(started=False)
                    if how is not None:
                        if not alive or self._registry.is_abandoned(number):
                            return None
                        raise self._never_came(job, how)
                    if not view.over:
                        job.tell()
                        job.give_up_waiting()
                    if view.kind != "running":
                        running_since = None
                    elif running_since is None:
                        running_since = now
                    elif now - running_since > self._start_timeout:
                        raise self._silent(job)
                pause = _CADENCE.pause(now - (running_since or began), running_since is not None)
                time.sleep(pause)
        except BaseException:
            with deferred_interrupts():
                self._leave(number, job)
            raise

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
            job.confirm_gone()

    def _never_came(self, job: SlurmJob, how: str) -> RunFailure:
        """What keeps a session from coming up, as for a payload in a job of its own."""
        evidence = Evidence(runtime_exit=how)
        job.explain(evidence)
        verdict = judge(evidence, uses_pipes=False, require_messages=False)
        sentence = f"the session did not come up: {verdict.sentence}"
        return RunFailure(verdict.kind or "runtime", sentence, self._metadata(job, evidence), verdict.retry)

    def _silent(self, job: SlurmJob) -> RunFailure:
        evidence = Evidence()
        job.explain(evidence, patience=0.0)
        log = f": {lines[-1]}" if (lines := telling_lines(evidence.runtime_log)) else ""
        sentence = f"the session's runtime did not start within runtime_start_timeout={self._start_timeout:g} s{log}"
        return RunFailure("runtime", sentence, self._metadata(job, evidence))

    def _metadata(self, job: SlurmJob, evidence: Evidence) -> dict[str, Any]:
        where = f"{job.place}:{job.directory}" if job.place else job.directory
        return {**job.metadata(evidence), **failure_metadata(evidence, where)}
