"""Session mode: the runtime in an allocation that is warm already, or is made warm for all who come after."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from dagster_pipes import PipesContextData

from ...environments.check import check_environment_on
from ...errors import FailureKind, StartError
from ...follow import Cadence
from ...interrupts import deferred_interrupts
from ...plan import Plan
from ...runtime.protocol.record import CANCEL, EXIT, PAYLOAD, RUNTIME, SECRETS, SESSION, Record
from ...runtime.protocol.spec import to_json
from ...slurm.cancel import cancel_named
from ...slurm.commands import slurm_commands
from ...slurm.config import SlurmResource
from ...slurm.queue import SharedQueue, shared_queue
from ...slurm.request import JobRequest, is_job_of, job_comment, job_name
from ...slurm.submit import JOB_SCRIPT, OFFER, ClaimTaken, SubmissionRefused, SubmittedJob, submit
from ...ssh.base import Connection
from ...ssh.pool import connection_to
from .. import reattach
from ..base import Register, RunningPayload, Step
from ..batch import CLUSTER, absolute, check_paths, data_dir_of, nonce_of_cluster, sweep_in_background
from ..ownership import FIRST_OWNER
from ..payload_files import base_errors, deliver, needs_of, pack
from ..run_dir import Layout, run_files
from ..slurm_job import SlurmJob
from .acquire import AcquiredSession, SessionAcquisition
from .idle import IdleSessions
from .listing import end_generations, list_generations
from .matching import (
    Capacity,
    Requirements,
    claimed_resources,
    misfit,
    misfit_error,
    own_cluster,
    payload_time_limit,
    same_capacity,
)
from .payload import SessionPayload
from .registry import Found, SessionManifest, SessionRegistry, charter_to_json
from .request import GONE, Request
from .run_scope import end_with_run, slurm_session_of
from .session_job import SessionSetup

_CADENCE = Cadence(busy=0.05, idle=3.0, waiting=1.0)
"""A payload's record begins before it is followed, and a warm step may be over in no time."""
_IN_SIGHT = 90.0
"""Seconds in which a node sees what was delivered: a name that it looked for in vain stays missing on NFS for up to a minute."""
_DELIVERIES = 3
"""Times that bundles are sent which are there no longer a moment later."""


@dataclass(frozen=True)
class SessionBackend:
    """Runs payloads in a session's allocation.

    Args:
        setup: which sessions.
        queue_timeout: seconds after which a run whose session still waits in the queue is given up; None waits for ever.
        start_timeout: seconds in which a session announces itself whose job runs.
        patience: seconds for which a session that may have accepted a payload, or its job that may be there, can be out of
            reach.
        home: where things are on this machine.
    """

    setup: SessionSetup
    queue_timeout: float | None
    start_timeout: float
    patience: float
    home: Layout
    cadence: Cadence = _CADENCE

    @cached_property
    def connection(self) -> Connection:
        return connection_to(self.setup.slurm.ssh)

    @cached_property
    def layout(self) -> Layout:
        return Layout(Path(absolute(self.connection, self.setup.slurm.remote_base)))

    def check(self, plan: Plan) -> None:
        setup = self.setup
        check_paths(setup.slurm, setup.environment, plan)
        problem = setup.misfit(plan)
        if problem is None:
            return
        if setup.session.on_misfit == "error":
            raise ValueError(misfit_error(problem))
        if problem := misfit(setup.required(plan), setup.own(plan).capacity(setup.reuse)):
            raise ValueError(problem)

    def sweep(self, retention_days: float) -> None:
        sweep_in_background(self.connection, str(self.layout.base), retention_days)

    def start(self, plan: Plan, run_dir: str, context: PipesContextData, step: Step, hold: Register) -> RunningPayload:
        return _Start(self, plan, run_dir, context, step, hold).run()

    def can_reattach(self, plan: Plan, run_dir: str, step: Step) -> bool:
        base, data_dir = str(self.layout.base), data_dir_of(self.connection, self.layout, plan)
        packed = pack(plan, base, data_dir).plan
        payload = packed.payload
        asked = {
            PAYLOAD: to_json(dataclasses.replace(payload, step=step.step_key)).encode("utf-8"),
            reattach.REQUIREMENTS_FILE: self.setup.fingerprint(packed, step.run_id, base, data_dir),
        }

        def job_of(start: Record | None) -> str | None:
            if start is None:
                return None
            there = list_generations(self.connection, base)
            for each in there:
                said = each.announcement
                if said is not None and said.cluster_id == start.get("cluster_id") and each.exit_code is None:
                    # Only the newest of them is asked whether it has the payload.
                    newest = max(other.number for other in there if other.key == each.key)
                    return said.job_id if each.number == newest else None
            return None

        return reattach.job_with(self.connection, run_dir, payload.nonce, asked, job_of, step.log) is not None

    def example(self, plan: Plan) -> str:
        return self.setup.example_script(plan)


def end_session(slurm: SlurmResource, cluster_id: str) -> bool:
    """End the session of a cluster, with all that it runs; False if there is none.

    Raises:
        StartError: Slurm does not confirm its end.
        OSError: the cluster cannot be reached, or Slurm cannot be asked.
    """
    nonce = nonce_of_cluster(cluster_id)
    if nonce is None:
        return False
    connection = connection_to(slurm.ssh)
    there = list_generations(connection, absolute(connection, slurm.remote_base))
    own = [each for each in there if is_job_of(each.job_name, nonce)]
    return bool(own) and end_generations(connection, own)


class _Start:
    """One payload on its way into a session: found or made, asked, and waited for until it has accepted.

    Args:
        backend: where and how.
        plan: what to run.
        run_dir: its run directory.
        context: the Pipes context.
        step: who asks.
        hold: told of the attempt as soon as there is one.
    """

    def __init__(
        self,
        backend: SessionBackend,
        plan: Plan,
        run_dir: str,
        context: PipesContextData,
        step: Step,
        hold: Register,
    ) -> None:
        self._began = time.monotonic()
        self._backend, self._setup = backend, backend.setup
        self._connection = backend.connection
        self._commands = slurm_commands(self._connection)
        self._base = str(backend.layout.base)
        self._data_dir = data_dir_of(self._connection, backend.layout, plan)
        self._cargo = pack(plan, self._base, self._data_dir)
        self._cargo.warn(step.log)
        self._plan = self._cargo.plan
        self._run_dir, self._context, self._step, self._hold = run_dir, context, step, hold
        self._wish = self._setup.required(plan)
        self._asked = self._setup.fingerprint(self._plan, step.run_id, self._base, self._data_dir)
        # A launcher of the run's own that does not fit is known before anything is asked.
        self._apart = self._setup.misfit(plan) is not None
        self._arrival: AcquiredSession | None = None
        self._attempt: SessionPayload | None = None
        self._refusal = ""
        self._request = Request(
            connection=self._connection,
            commands=self._commands,
            queue=self._queue(),
            run_dir=run_dir,
            nonce=plan.payload.nonce,
            carrier=self._setup.session.carrier,
            patience=backend.patience,
            accept=self._accepted,
            log=step.log,
            secrets=run_files(self._plan, context)[SECRETS] if plan.secret_env else b"",
        )

    def run(self) -> SessionPayload:
        """Get it accepted.

        Raises:
            RunFailure: its session did not come up.
            StartError: it fits no session, or none can be had.
            OSError: the cluster cannot be reached or written to.
        """
        try:
            while self._attempt is None:
                if self._try_session():
                    self._apart = True
        except BaseException:
            if self._request.unsettled and self._attempt is None:
                with deferred_interrupts():
                    self._request.withdraw()
            raise
        return self._attempt

    def _try_session(self) -> bool:
        """Go from generation to generation of one session; whether the payload needs another session."""
        kind = self._setup.own(self._plan) if self._apart else self._setup.default
        key = self._setup.key(kind, self._step.run_id, self._base, self._data_dir, self._apart)
        if self._setup.session.scope == "run":
            session = slurm_session_of(self._setup.slurm.ssh, self._base, key)
            end_with_run(self._backend.home, self._step.run_id, session, self._step.log)
        registry = SessionRegistry(self._commands, os.path.join(self._base, "sessions", key))
        search = self._search(registry, kind)
        passed = 0
        while True:
            self._arrival = search.seek(passed)
            found = self._arrival.found
            problem = misfit(self._wish, found.charter.offer)
            if problem is None:
                problem = self._ask(found)
            if self._attempt is not None:
                return False
            if problem is not None:
                if self._apart or self._setup.session.on_misfit == "error":
                    raise StartError(FailureKind.CONFIGURATION, problem if self._apart else misfit_error(problem))
                if same_capacity(self._setup.own(self._plan).capacity(self._setup.reuse), found.charter.offer):
                    raise StartError(FailureKind.CONFIGURATION, f"{problem}; a session of its own would be given no more")
                self._step.log.info(f"[rayslurm] another session is needed: {problem}")
                return True
            passed = found.charter.generation
            search.took_nothing(passed, self._refusal)

    def _ask(self, found: Found) -> str | None:
        """Ask one session; what keeps the payload from fitting in, if that is so."""
        files = self._files(found.charter.offer)
        needs = self._cargo.places(self._base)
        deliveries, until, pause = 0, time.monotonic() + _IN_SIGHT, 0.1
        while True:
            answer = self._request.put(found, files, needs)
            error = answer.get("error")
            said = str(answer.get("message") or error)
            if self._attempt is not None:
                return None
            if error == "missing" and time.monotonic() < until:
                if deliveries < _DELIVERIES:
                    with base_errors(self._base):
                        deliver(self._connection, self._base, self._cargo, self._step.log, afresh=deliveries > 0)
                deliveries += 1
                if deliveries > 1:  # It is there, and its node has looked for it too early.
                    time.sleep(pause)
                    pause = min(2 * pause, 3.0)
                continue
            if error == "missing":
                said = f"its node does not see {', '.join(map(str, answer.get('missing') or ()))}"
            if error == "misfit":
                return said
            if error in ("closing", GONE):
                self._refusal = "it was gone before it could be asked" if error == GONE else said
                self._step.log.info(f"[rayslurm] Slurm job {found.announcement.job_id} takes no more payloads: {said}")
                return None
            break
        raise StartError(FailureKind.RUNTIME, f"the session in Slurm job {found.announcement.job_id} refuses the payload: {said}")

    def _files(self, offer: Capacity) -> Mapping[str, str]:
        """What the payload's run directory begins with, but for secrets."""
        cpus, gpus = claimed_resources(self._wish, offer)
        payload = dataclasses.replace(
            self._plan.payload,
            run_id=self._step.run_id,
            step=self._step.step_key,
            ray=None if offer.reuse else own_cluster(self._plan.ray, offer),
            want_cpus=cpus,
            want_gpus=gpus,
            time_limit=payload_time_limit(self._wish, offer),
        )
        files = run_files(dataclasses.replace(self._plan, payload=payload, secret_env={}), self._context)
        first = {} if self._step.reattached else {FIRST_OWNER: b""}
        # There from the beginning: on NFS a name that was looked for in vain stays missing for up to a minute.
        files = {**files, reattach.REQUIREMENTS_FILE: self._asked, CANCEL: b"", **first}
        return {name: content.decode("utf-8") for name, content in files.items()}

    def _accepted(self, found: Found) -> None:
        assert self._arrival is not None
        number, key = found.charter.generation, os.path.basename(os.path.dirname(found.directory))
        self._attempt = SessionPayload(
            connection=self._connection,
            job=self._job(found.directory, found.announcement.job_id, found.announcement.cluster_id, found.charter.offer),
            cluster_id=found.announcement.cluster_id,
            name=f"{key}/{number}",
            run_dir=self._run_dir,
            nonce=self._plan.payload.nonce,
            # Of one that another process put to it nobody here knows how it came there.
            reused=None if self._step.reattached else self._arrival.reused,
            waited=None if self._step.reattached else time.monotonic() - self._began,
            poll_interval=self._setup.slurm.poll_interval,
            describe=lambda: self._request.describe(found),
            step=self._step,
        )
        self._hold(self._attempt)

    def _queue(self) -> SharedQueue:
        return shared_queue(self._commands, str(self._backend.layout.queue), self._setup.slurm.poll_interval)

    def _job(self, directory: str, job_id: str, cluster_id: str, offer: Capacity) -> SlurmJob:
        """The job of a session that is there, as far as it matters to a payload of it."""
        name = job_name(f"session-{self._setup.name}", cluster_id.removeprefix(CLUSTER))
        first, *others = [
            JobRequest(name, "", partition=queue["partition"], component_id=component)
            for component, queue in offer.queues.items()
        ]
        request = dataclasses.replace(first, further_components=tuple(others))
        return self._watched(request, SubmittedJob(job_id, 0.0), directory)

    def _watched(self, request: JobRequest, submitted: SubmittedJob, directory: str, since: float | None = None) -> SlurmJob:
        return SlurmJob(
            commands=self._commands,
            queue=self._queue(),
            request=request,
            submitted=submitted,
            directory=directory,
            queue_timeout=self._backend.queue_timeout,
            over_ssh=self._setup.slurm.ssh is not None,
            log=self._step.log,
            idle_sessions=IdleSessions(self._connection, self._base, self._step.log),
            waiting_since=since,
        )

    def _search(self, registry: SessionRegistry, kind: Requirements) -> SessionAcquisition:
        queue = self._queue()

        def job_of(number: int, job_id: str, name: str, at: float) -> SlurmJob:
            request = dataclasses.replace(kind.job_request(), job_name=name)
            since = queue.clock.now() - (time.monotonic() - self._began)
            return self._watched(request, SubmittedJob(job_id, at), registry.generation(number), since)

        return SessionAcquisition(
            commands=self._commands,
            registry=registry,
            queue=queue,
            job_of=job_of,
            create=lambda number, hold: self._create(registry, kind, number, hold),
            who=self._plan.payload.nonce,
            start_timeout=self._backend.start_timeout,
            patience=self._backend.patience,
            log=self._step.log,
        )

    def _create(self, registry: SessionRegistry, kind: Requirements, number: int, hold: Callable[[SlurmJob], None]) -> bool:
        """Claim a generation and submit its job, unless somebody else is faster."""
        step, setup = self._step, self._setup
        with base_errors(self._base):
            ray, kept = kind.ray or self._plan.ray, str(self._backend.layout.environments)
            interpreter = check_environment_on(self._connection, setup.environment, ray, self._plan.uses_pipes, kept)
            runtime = deliver(self._connection, self._base, self._cargo, step.log)
        nonce = secrets.token_hex(6)
        name = job_name(f"session-{setup.name}", nonce)
        request = kind.job_request(name, job_comment(step.run_id, step.step_key, step.partition_key))
        directory = registry.generation(number)
        charter = SessionManifest(number, kind.capacity(setup.reuse), tuple(interpreter.start("-I", runtime, "ask")))
        script = setup.script(request, interpreter, runtime, directory)
        files = {
            RUNTIME: to_json(setup.runtime_spec(f"{CLUSTER}{nonce}", kind, request, self._plan)).encode("utf-8"),
            JOB_SCRIPT: script.encode("utf-8", "surrogateescape"),
            OFFER: charter_to_json(charter),
            SESSION: b"",
            EXIT: b"",
        }
        queue = self._queue()
        try:
            patience = self._backend.patience
            needs = needs_of(self._connection, self._base, [self._cargo], step.log)
            submitted = submit(self._commands, directory, files, request, queue.clock, step.log.warning, True, patience, needs)
            hold(self._watched(request, submitted, directory))
        except ClaimTaken:
            return False
        except SubmissionRefused:
            with contextlib.suppress(OSError):  # Others find out for themselves, when the claim has grown old.
                registry.abandon(number)
            raise
        except BaseException:
            with deferred_interrupts():
                with contextlib.suppress(OSError):
                    registry.abandon(number)
                cancel_named(self._commands, name, step.log)
            raise
        where = f"{request.partitions_text} on {self._connection.place}"
        step.log.info(f"[rayslurm] submitted Slurm job {submitted.job_id} ({name}) to {where}")
        return True
