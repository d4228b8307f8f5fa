"""Acquire a session: find a session, wait for a session that another process is starting, or start a session.

A session has one allocation at a time. The allocations of a session are numbered; each allocation is a generation of the session
(see `registry`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, TypeVar

from dagster_pipes import PipesContextData

from ...errors import FailureKind, UnhealthyNode
from ...failures import RunFailure
from ...follow import Cadence, Evidence
from ...outcome.metadata import failure_metadata
from ...outcome.verdict import judge, judge_job, unhealthy_nodes
from ...plan import Plan
from ...runtime.protocol.record import RUNTIME_LOG, tail_file
from ...slurm.accounting import relevant_lines
from ...slurm.shared_queue import ask_patiently
from ...slurm.states import JobPhase, JobStatus
from ...ssh.base import Connection
from ...ssh.local import LocalConnection
from ..base import Register, RunningPayload, Step, deferred_interrupts
from ..slurm_job import SlurmJob
from .here import is_alive
from .matching import Target
from .registry import TOUCH_INTERVAL, Generation, LiveSession, SessionRegistry

CLAIM_TIMEOUT = 60.0  # Seconds in which the process that claimed a generation submits its job and writes the job's id down.
_CLAIM_INTERVAL = 0.5  # Seconds between two reads of a generation whose job another process is submitting.
_FINAL_STATE_TIMEOUT = 5.0  # Seconds in which the job of a session that has ended reaches its final state.

T = TypeVar("T")


@dataclass(eq=False)
class LocalProcess:
    """The process of a session on this machine, with the methods and attributes of `SlurmJob` that a step uses."""

    job_id: str
    directory: str
    cancelled = False
    status = JobStatus(JobPhase.RUNNING)

    def observe(self, started_at: float | None = None, ask: bool = True) -> bool:  # noqa: ARG002
        if not is_alive(int(self.job_id), self.directory):
            self.status = JobStatus(JobPhase.ENDED)
        return True

    def check_waiting(self) -> None: ...

    def end_description(self, started: bool, recorded: bool = True) -> str | None:  # noqa: ARG002
        return "its runtime ended" if self.status.over else None

    def explain(self, evidence: Evidence, timeout: float = 0.0) -> None:  # noqa: ARG002
        evidence.runtime_log = tail_file(os.path.join(self.directory, RUNTIME_LOG))

    def metadata(self, evidence: Evidence) -> dict[str, Any]:  # noqa: ARG002
        return {}

    def cancel_until_gone(self) -> None:
        if is_alive(int(self.job_id), self.directory):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(self.job_id), signal.SIGTERM)


Allocation = SlurmJob | LocalProcess  # The Slurm job, or process of this machine, that holds a session.


@dataclass(kw_only=True, eq=False)
class Site:
    """The Slurm cluster or machine on which a step looks for sessions. The methods find, create and contact sessions there.

    The fields describe the step and its payload. Of the two subclasses, one is for a Slurm cluster, where sessions are jobs, and
    the other is for this machine, where sessions are processes.
    """

    noun: ClassVar[str]  # The word for an allocation in messages; the allocation's id follows this word.
    end_command: ClassVar[str]  # The shell command that ends an allocation, for messages; the allocation's id follows.
    cadence: ClassVar[Cadence]  # Pauses between two checks of a session that starts.

    connection: Connection
    base: str  # The base directory of the sessions, absolute.
    plan: Plan
    run_dir: str
    context: PipesContextData
    step: Step
    register: Register  # Called with the payload as soon as a session has accepted it.
    start_timeout: float  # Seconds in which a session announces itself once its job runs.
    patience: float  # Seconds for which the cluster, or Slurm, may be out of reach once a job may have been started.
    files: Mapping[str, bytes] = field(default_factory=dict)  # Files for the run directory, besides those of `run_files`.
    members: Mapping[str, Any] = field(default_factory=dict)  # Keys and values to add to the request to run the payload.
    leaves_unhealthy: bool = False  # Whether the step looks for another session after a failed health check.
    needs: Sequence[str] = ()  # Paths of the bundles that must be on the cluster.

    def deliver(self) -> None:
        """Upload the bundles of the step (code, input files) that the cluster does not have. In local mode, do nothing."""

    def create(self, registry: SessionRegistry, target: Target, number: int, hold: Callable[[Allocation], None]) -> bool:
        """Claim generation `number` of a session by creating its directory, and start its Slurm job or process.

        Does not wait for the session to start. Returns False if another process has claimed the generation before; then nothing
        is started. Otherwise returns True.

        Args:
            registry: The registry of the session.
            target: Has the settings with which the session is created.
            number: The number of the generation.
            hold: A function that is called with the allocation as soon as the allocation is known, so that the caller can
                cancel the allocation after an interrupt.
        """
        raise NotImplementedError

    def watch(self, target: Target, newest: Generation) -> Allocation:
        """Returns the Slurm job or process of the generation `newest`, which another process created. Starts nothing.

        `target` has the settings of the session. Raises OSError if the cluster is out of reach.
        """
        raise NotImplementedError

    def cancel(self, creator: str) -> None:
        """Cancel the Slurm job with the name `creator`. Does nothing without Slurm, or if the name is "" (not known).

        The job may not exist, because the process that wanted to submit the job may have died before the submission.
        """

    def is_alive(self, job_id: str, directory: str) -> bool | None:
        """Returns whether an allocation lives; None if Slurm's queue cannot be read now.

        `job_id` is the id of the allocation's job or process. `directory` is the directory of the generation.
        """
        raise NotImplementedError

    def send(self, session: LiveSession, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request, such as {"op": "describe"}, to a session; wait for the session's answer, and return it.

        Raises Unreachable, AnswerLost or ConnectionFailed (see `send_request`).
        """
        raise NotImplementedError

    def running(self, session: LiveSession, reused: bool) -> RunningPayload:
        """Returns the object by which the step follows its payload, which `session` has accepted.

        `reused` says whether the session already accepted requests when this step found the session.
        """
        raise NotImplementedError


class Action(Enum):
    """The next action of a step that looks for a session; `next_action` chooses the action.

    A generation is one allocation of a session.
    """

    CREATE = "create the next generation"
    USE = "use the session, if it still accepts requests"
    JOIN = "wait until the session announces itself"
    WAIT = "look again, because the creator is submitting the job"
    EXPIRE = "give up the generation of the late creator, and cancel the job that it may have submitted"
    SKIP = "do not wait for this generation"


def next_action(newest: Generation, after: int) -> Action:
    """Returns the next action of a step that looks for a session; `newest` is the newest generation of this session.

    `after` is the number of the last generation that this step has given up, for example because the generation refused the
    payload; 0 if there is none. If the number of `newest` is not greater than `after`, the step creates the next generation.
    """
    if newest.number <= after:
        return Action.CREATE
    if newest.ended:
        return Action.SKIP
    if newest.announcement is not None:
        return Action.USE
    if newest.abandoned:
        return Action.SKIP
    if newest.job_id is not None:
        return Action.JOIN
    return Action.EXPIRE if newest.age > CLAIM_TIMEOUT else Action.WAIT


@dataclass(eq=False)
class SessionAcquisition:
    """Finds a session for one step or creates it, and waits until the session accepts requests.

    If the session then refuses the payload, the step may call `acquire` again to get another generation of the session.
    """

    site: Site
    target: Target
    _jobs: dict[int, Allocation] = field(default_factory=dict, init=False)  # By generation: allocations this step waited for.

    def __post_init__(self) -> None:
        self.registry = SessionRegistry(self.site.connection, self.site.base, self.target.key)
        self._waiter = self.site.plan.payload.nonce
        self._log = self.site.step.log

    def acquire(self, after: int) -> tuple[LiveSession, bool]:
        """Find, wait for or create a session, and return the session when it accepts requests. Blocks until then.

        Also returns whether the session already accepted requests when this step found the session.

        `after` is the number of the last generation that this step has given up, or 0. Only later generations are used. Raises
        RunFailure if the session's job ends early or waits too long in the queue. Raises StartError if no session can be created.
        Raises OSError if the cluster is out of reach.
        """
        action = Action.SKIP
        while True:
            waits = action in (Action.WAIT, Action.EXPIRE)
            newest = self._retry(self.registry.newest) if waits else self.registry.newest()
            number = max(newest.number, after + 1)
            action = next_action(newest, after)
            try:
                session = self._act(action, newest, number)
            except BaseException:
                if number in self._jobs:
                    with deferred_interrupts():
                        self._stop_waiting(number, self._jobs[number])
                raise
            if session is not None:
                return session, action is Action.USE
            if action in (Action.USE, Action.JOIN, Action.SKIP):
                after = number

    def _act(self, action: Action, newest: Generation, number: int) -> LiveSession | None:
        """Carry out `action`, which may wait for the session to start; returns the session if it accepts requests now.

        Returns None if `acquire` must read the registry again. `newest` is the newest generation of the session. `number` is the
        number of the generation that the action concerns.
        """
        if action is Action.CREATE:
            if self.site.create(self.registry, self.target, number, lambda job: self._jobs.__setitem__(number, job)):
                return self._wait(number, self._jobs[number], created=True)
            time.sleep(_CLAIM_INTERVAL)  # This host may not see the faster process's files at once.
        elif action is Action.USE:
            return newest.live
        elif action is Action.WAIT:
            time.sleep(_CLAIM_INTERVAL)
        elif action is Action.EXPIRE:
            # A creator that is only slow finds the mark after its submission and cancels its job.
            self._retry(lambda: self.registry.abandon(number))
            self.site.cancel(newest.job_name)
        elif action is Action.JOIN:
            job = self._jobs[number] = self._retry(lambda: self.site.watch(self.target, newest))
            self._log.info(f"[rayslurm] waiting for the session that {self.site.noun} {job.job_id} is to hold")
            return self._wait(number, job, created=False)
        return None

    def on_refused(self, number: int, reason: str, unhealthy: Sequence[Mapping[str, str]] = ()) -> None:
        """Raise RunFailure if the session has never accepted a payload, because a new session would fail, too.

        Called when the session has refused the payload of this step, or is closing. Returns without an error, so that the caller
        can try a new generation, in three cases: this step did not wait for the session to start, the session has accepted a
        payload before, or the session's announcement is gone.

        Args:
            number: The number of the session's generation.
            reason: Why the session refuses payloads, in the session's words.
            unhealthy: The nodes whose failed health checks led to the refusal; empty if there are none.
        """
        job = self._jobs.get(number)
        if job is None:
            return  # The session served other steps before, so its end is nothing unusual.
        announcement = self._retry(lambda: self.registry.announcement(number))
        problem = (announcement and announcement.closing) or reason
        if announcement is None or announcement.served > 0:
            return
        sentence = f"the session did not come up, it ended before it took anything: {problem}"
        evidence = Evidence(runtime_exit=problem, started_at=0.0)  # The job wrote an announcement, so its files are there.
        unhealthy = announcement.unhealthy or unhealthy
        job.explain(evidence, timeout=0.0 if unhealthy else _FINAL_STATE_TIMEOUT)
        verdict = None if unhealthy else judge_job(evidence)
        if verdict is not None and verdict.kind in (FailureKind.ALLOCATION, FailureKind.ENVIRONMENT):
            raise self._failure(verdict.kind, f"{sentence}; {verdict.sentence}", job, evidence, verdict.retry)
        raise self._failure(FailureKind.CLUSTER_START, sentence, job, evidence, unhealthy=unhealthy_nodes(unhealthy))

    def _wait(self, number: int, job: Allocation, created: bool) -> LiveSession | None:
        """Wait until the session of generation `number` accepts requests; returns the session, or None.

        Returns None if the step needs another generation. There are three such cases: the session closes; the generation was
        abandoned, or is no longer the newest generation; another process submitted the job, and the job had ended before this
        step first checked the job. `job` is the allocation of the generation. `created` says whether this step submitted the
        job. Raises RunFailure if the session does not start, or if the job waits for longer than the queue timeout.
        """
        began = time.monotonic()
        touched = -TOUCH_INTERVAL
        running_since: float | None = None
        alive = created
        while True:
            # While the cluster is out of reach nothing is known of the session: it counts neither as late nor as ended.
            announcement = self._retry(lambda: self.registry.announcement(number))
            if announcement is not None:
                newest = self._retry(self.registry.newest)
                if announcement.closing is not None:
                    self.on_refused(number, announcement.closing)
                return newest.live if newest.number == number else None
            now = time.monotonic()
            if now - touched >= TOUCH_INTERVAL:
                with contextlib.suppress(OSError):  # Without the record, another process could cancel the job: it is tried again.
                    self.registry.wait_for(number, self._waiter)
                    touched = now
            if job.observe():
                view = job.status
                alive = alive or view.phase in (JobPhase.PENDING, JobPhase.RUNNING) or view.exit_code is not None
                description = job.end_description(started=False, recorded=False)
                if description is not None:
                    newest = self._retry(self.registry.newest)
                    if not alive or newest.number != number or newest.abandoned:
                        return None
                    raise self._never_started(job, description)
                if not view.over:
                    with contextlib.suppress(OSError):  # If Slurm does not answer, that says nothing about the job.
                        job.check_waiting()
                if view.phase != JobPhase.RUNNING:
                    running_since = None
                elif running_since is None:
                    running_since = now
                elif now - running_since > self.site.start_timeout:
                    raise self._silent(job)
            time.sleep(self.site.cadence.pause(now - (running_since or began), running_since is not None))

    def _retry(self, action: Callable[[], T]) -> T:
        """Call `action`, a request to the cluster, and return its result.

        While the cluster does not answer, the function repeats the call for up to `site.patience` seconds. Then it raises the
        OSError of the last call.
        """
        return ask_patiently(action, self.site.patience, True, self._log.warning)

    def _stop_waiting(self, number: int, job: Allocation) -> None:
        """Record that this step no longer waits for the session to start, and cancel `job` if no other process waits, either.

        `number` is the number of the session's generation (allocation), and `job` is the Slurm job or process of this generation.
        After a cancellation, the function blocks until `job` has ended. If `job` is known to have ended already, the function
        does nothing. If the files on the cluster that list the waiting processes are out of reach, the function only logs an
        error.
        """
        if job.status.over:
            return
        name = f"{self.site.noun} {job.job_id}"
        try:
            last = self.registry.stop_waiting(number, self._waiter)
        except OSError as error:
            command = f"`{self.site.end_command} {job.job_id}` on {self.site.connection.place}"
            self._log.error(f"[rayslurm] {name} may hold a session for which no step waits ({error}); run {command}")
            return
        if last:
            self._log.info(f"[rayslurm] no step waits for the session any more: cancelling {name}")
            job.cancelled = True
            job.cancel_until_gone()

    def _never_started(self, job: Allocation, description: str) -> RunFailure:
        """Returns the failure to raise when a session's job ended before the session announced itself.

        `description` says how the job ended.
        """
        evidence = Evidence(runtime_exit=description)
        job.explain(evidence)
        verdict = judge(evidence, uses_pipes=False, require_messages=False)
        sentence = f"the session did not come up: {verdict.sentence}"
        return self._failure(verdict.kind or FailureKind.RUNTIME, sentence, job, evidence, verdict.retry)

    def _silent(self, job: Allocation) -> RunFailure:
        """Returns the failure to raise when a session's job runs, but the session does not announce itself in time."""
        evidence = Evidence()
        job.explain(evidence, timeout=0.0)
        log = f": {lines[-1]}" if (lines := relevant_lines(evidence.runtime_log)) else ""
        timeout = f"runtime_start_timeout={self.site.start_timeout:g} s"
        return self._failure(FailureKind.RUNTIME, f"the session's runtime did not start within {timeout}{log}", job, evidence)

    def _failure(
        self,
        kind: FailureKind,
        sentence: str,
        job: Allocation,
        evidence: Evidence,
        retry: bool | None = None,
        unhealthy: Sequence[UnhealthyNode] = (),
    ) -> RunFailure:
        connection = self.site.connection
        where = job.directory if isinstance(connection, LocalConnection) else f"{connection.place}:{job.directory}"
        return RunFailure(kind, sentence, {**failure_metadata(evidence, where), **job.metadata(evidence)}, retry, unhealthy)
