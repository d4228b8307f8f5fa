"""The backend of the mode `slurm-session`: run payloads in a session, a warm allocation that many steps share.

If there is no session, the step creates one. A session has one allocation, its newest generation, at a time (see `registry`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from dagster_pipes import PipesContextData

from ...environments.check import check_environment_on
from ...errors import FailureKind, StartError
from ...follow import Cadence
from ...interrupts import deferred_interrupts
from ...plan import Plan
from ...runtime.protocol.messages import Refusal
from ...runtime.protocol.record import CANCEL, EXIT, PAYLOAD, RUNTIME, SECRETS, SESSION, Record
from ...runtime.protocol.spec import to_json
from ...slurm.config import SlurmResource
from ...slurm.request import JobRequest, is_job_of, job_comment, job_name
from ...slurm.shared_queue import shared_queue
from ...slurm.submit import JOB_SCRIPT, MANIFEST, ClaimTaken, SubmissionRefused, SubmittedJob, cancel_named, submit
from ...ssh.base import Connection
from ...ssh.pool import connection_to
from ..base import Register, RunningPayload, Step
from ..batch import CLUSTER, absolute, check_paths, cluster_nonce, data_dir_of, sweep_in_background
from ..ownership import FIRST_OWNER, REQUIREMENTS_FILE, reattachable_job
from ..payload_files import deliver, pack, remote_base_errors, required_files
from ..run_dir import Layout, run_files
from ..slurm_job import SlurmJob
from .acquire import AcquiredSession, SessionAcquisition
from .idle import make_way_for
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
from .registry import LiveSession, SessionManifest, SessionRegistry, manifest_to_json
from .request import RunRequest
from .run_scope import end_with_run, slurm_target
from .session_job import SessionSetup

_CADENCE = Cadence(busy=0.05, idle=3.0, waiting=1.0)
"""Pauses between two looks at a payload's record; the first are short, as a warm step may be over in no time."""
_VISIBILITY_TIMEOUT = 90.0
"""Seconds in which a node sees uploaded files: on NFS a name that was looked up in vain stays missing for up to a minute."""
_DELIVERIES = 3
"""Most uploads for one session of bundles that disappear again."""


@dataclass(frozen=True)
class SessionBackend:
    """Runs payloads in the allocations of sessions.

    Args:
        setup: which session a payload gets.
        queue_timeout: seconds after which a run no longer waits for a session that is still in the queue; None waits for ever.
        start_timeout: seconds in which a session announces itself once its job runs.
        patience: seconds for which the cluster may be out of reach once a session or a job may have been started.
        home: the base directory on this machine.
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

    def start(self, plan: Plan, run_dir: str, context: PipesContextData, step: Step, register: Register) -> RunningPayload:
        return _SessionStart(self, plan, run_dir, context, step, register).run()

    def can_reattach(self, plan: Plan, run_dir: str, step: Step) -> bool:
        base, data_dir = str(self.layout.base), data_dir_of(self.connection, self.layout, plan)
        packed = pack(plan, base, data_dir).plan
        expected = {
            PAYLOAD: to_json(dataclasses.replace(packed.payload, step=step.step_key)).encode("utf-8"),
            REQUIREMENTS_FILE: self.setup.fingerprint(packed, step.run_id, base, data_dir),
        }

        def job_of(start: Record | None) -> str | None:
            if start is None:
                return None
            generations = list_generations(self.connection, base)
            for each in generations:
                announcement = each.announcement
                if announcement is None or announcement.cluster_id != start.get("cluster_id") or each.exit_code is not None:
                    continue
                # A run request reaches only the newest generation, which then says whether it has the payload.
                newest = max(other.number for other in generations if other.key == each.key)
                return announcement.job_id if each.number == newest else None
            return None

        return reattachable_job(self.connection, run_dir, packed.payload.nonce, expected, job_of, step.log) is not None

    def example(self, plan: Plan) -> str:
        return self.setup.example_script(plan)


def end_session(slurm: SlurmResource, cluster_id: str) -> bool:
    """End the session of a Ray cluster, with all its payloads; False if there is no such session, or it has ended.

    Args:
        slurm: the Slurm cluster.
        cluster_id: name of the Ray cluster.

    Raises:
        StartError: Slurm does not confirm the end.
        OSError: the cluster or Slurm does not answer.
    """
    nonce = cluster_nonce(cluster_id)
    if nonce is None:
        return False
    connection = connection_to(slurm.ssh)
    generations = list_generations(connection, absolute(connection, slurm.remote_base))
    own = [each for each in generations if is_job_of(each.job_name, nonce)]
    return bool(own) and end_generations(connection, own)


class _SessionStart:
    """The start of one payload in a session: acquires a session, uploads the payload's files, and submits the run request."""

    def __init__(
        self, backend: SessionBackend, plan: Plan, run_dir: str, context: PipesContextData, step: Step, register: Register
    ) -> None:
        self._began = time.monotonic()
        self._backend, self._setup = backend, backend.setup
        self._connection = backend.connection
        self._commands = self._connection
        self._queue = shared_queue(self._commands, str(backend.layout.queue), backend.setup.slurm.poll_interval)
        self._base = str(backend.layout.base)
        self._data_dir = data_dir_of(self._connection, backend.layout, plan)
        self._upload = pack(plan, self._base, self._data_dir)
        self._upload.warn(step.log)
        self._plan = self._upload.plan
        self._run_dir, self._context, self._step, self._register = run_dir, context, step, register
        self._required = self._setup.required(plan)
        self._fingerprint = self._setup.fingerprint(self._plan, step.run_id, self._base, self._data_dir)
        self._acquired: AcquiredSession | None = None
        self._payload: SessionPayload | None = None
        self._refusal = ""
        self._request = RunRequest(
            connection=self._connection,
            commands=self._commands,
            queue=self._queue,
            run_dir=run_dir,
            nonce=plan.payload.nonce,
            carrier=self._setup.session.carrier,
            patience=backend.patience,
            on_accepted=self._on_accepted,
            log=step.log,
            secrets=run_files(self._plan, context)[SECRETS] if plan.secret_env else b"",
        )

    def run(self) -> SessionPayload:
        """Start the payload, and return it once a session has accepted it.

        Raises:
            RunFailure: the payload's session did not start.
            StartError: the payload fits no session, or no session can be created.
            OSError: the cluster cannot be reached or written to.
        """
        # A misfit of the run's own launcher or queue is known before any request.
        apart = self._setup.misfit(self._plan) is not None
        try:
            payload = self._submit(apart) or self._submit(apart=True)
        except BaseException:
            if self._request.unsettled and self._payload is None:
                with deferred_interrupts():
                    self._request.withdraw()
            raise
        assert payload is not None
        return payload

    def _submit(self, apart: bool) -> SessionPayload | None:
        """Submit the payload to a session, and to its next generation while one ends before it accepts the payload.

        Args:
            apart: whether to use a separate session that is created for such payloads, instead of the default session.

        Returns:
            The accepted payload; None if it does not fit the default session and needs a separate one.
        """
        setup = self._setup
        created_with = setup.own(self._plan) if apart else setup.default
        key = setup.key(created_with, self._step.run_id, self._base, self._data_dir, apart)
        if setup.session.scope == "run":
            end_with_run(self._backend.home, self._step.run_id, slurm_target(setup.slurm.ssh, self._base, key), self._step.log)
        registry = SessionRegistry(self._commands, os.path.join(self._base, "sessions", key))
        acquisition = self._acquisition(registry, created_with)
        number = 0
        while True:
            self._acquired = acquisition.acquire(after=number)
            session = self._acquired.session
            problem = misfit(self._required, session.manifest.capacity) or self._submit_to(session)
            if self._payload is not None:
                return self._payload
            if problem is not None:
                if apart or setup.session.on_misfit == "error":
                    raise StartError(FailureKind.CONFIGURATION, problem if apart else misfit_error(problem))
                if same_capacity(setup.own(self._plan).capacity(setup.reuse), session.manifest.capacity):
                    raise StartError(FailureKind.CONFIGURATION, f"{problem}; a session of its own would be given no more")
                self._step.log.info(f"[rayslurm] another session is needed: {problem}")
                return None
            number = session.manifest.generation
            acquisition.on_refused(number, self._refusal)

    def _submit_to(self, session: LiveSession) -> str | None:
        """Submit the payload to one generation. Returns why the payload does not fit, if the session refuses it for that."""
        log, job_id = self._step.log, session.announcement.job_id
        files = self._run_dir_files(session.manifest.capacity)
        needs = self._upload.places(self._base)
        deliveries, deadline, pause = 0, time.monotonic() + _VISIBILITY_TIMEOUT, 0.1
        while True:
            answer = self._request.submit(session, files, needs)
            if self._payload is not None:
                return None
            error = answer.get("error")
            message = str(answer.get("message") or error)
            if error != Refusal.MISSING:
                break
            if time.monotonic() > deadline:
                message = f"its node does not see {', '.join(map(str, answer.get('missing') or ()))}"
                break
            if deliveries < _DELIVERIES:
                with remote_base_errors(self._base):
                    deliver(self._connection, self._base, self._upload, log, recheck=deliveries > 0)
            deliveries += 1
            if deliveries > 1:  # The bundle is there, but the session's node looked for it too early.
                time.sleep(pause)
                pause = min(2 * pause, 3.0)
        if error == Refusal.MISFIT:
            return message
        if error not in (Refusal.CLOSING, Refusal.GONE):
            raise StartError(FailureKind.RUNTIME, f"the session in Slurm job {job_id} refuses the payload: {message}")
        self._refusal = "it was gone before it could be asked" if error == Refusal.GONE else message
        log.info(f"[rayslurm] Slurm job {job_id} takes no more payloads: {message}")
        return None

    def _run_dir_files(self, capacity: Capacity) -> dict[str, str]:
        """The first files of the payload's run directory, except secrets."""
        cpus, gpus = claimed_resources(self._required, capacity)
        payload = dataclasses.replace(
            self._plan.payload,
            run_id=self._step.run_id,
            step=self._step.step_key,
            ray=None if capacity.reuse else own_cluster(self._plan.ray, capacity),
            want_cpus=cpus,
            want_gpus=gpus,
            time_limit=payload_time_limit(self._required, capacity),
        )
        files = run_files(dataclasses.replace(self._plan, payload=payload, secret_env={}), self._context)
        first = {} if self._step.reattached else {FIRST_OWNER: b""}
        # CANCEL is there from the beginning: on NFS a name that was looked up in vain stays missing for up to a minute.
        files = {**files, REQUIREMENTS_FILE: self._fingerprint, CANCEL: b"", **first}
        return {name: content.decode("utf-8") for name, content in files.items()}

    def _on_accepted(self, session: LiveSession) -> None:
        """Called when a session has accepted the payload: registers the running payload."""
        assert self._acquired is not None
        reattached = self._step.reattached
        key, capacity = os.path.basename(os.path.dirname(session.directory)), session.manifest.capacity
        cluster_id = session.announcement.cluster_id
        name = job_name(f"session-{self._setup.name}", cluster_id.removeprefix(CLUSTER))
        first, *others = [
            JobRequest(name, "", partition=queue["partition"], component_id=part) for part, queue in capacity.queues.items()
        ]
        request = dataclasses.replace(first, further_components=tuple(others))
        self._payload = SessionPayload(
            connection=self._connection,
            job=self._slurm_job(request, SubmittedJob(session.announcement.job_id, 0.0), session.directory),
            cluster_id=cluster_id,
            name=f"{key}/{session.manifest.generation}",
            run_dir=self._run_dir,
            nonce=self._plan.payload.nonce,
            # After a reattach, this process does not know whether the session was reused or how long the wait was.
            reused=None if reattached else self._acquired.reused,
            waited=None if reattached else time.monotonic() - self._began,
            poll_interval=self._setup.slurm.poll_interval,
            describe=lambda: self._request.describe(session),
            step=self._step,
        )
        self._register(self._payload)

    def _slurm_job(self, request: JobRequest, submitted: SubmittedJob, directory: str, since: float | None = None) -> SlurmJob:
        return SlurmJob(
            commands=self._commands,
            queue=self._queue,
            request=request,
            submitted=submitted,
            directory=directory,
            queue_timeout=self._backend.queue_timeout,
            over_ssh=self._setup.slurm.ssh is not None,
            log=self._step.log,
            make_way=make_way_for(self._connection, self._base, self._step.log),
            waiting_since=since,
        )

    def _acquisition(self, registry: SessionRegistry, created_with: Requirements) -> SessionAcquisition:
        def watch_job(number: int, job_id: str, name: str, submitted_at: float) -> SlurmJob:
            request = dataclasses.replace(created_with.job_request(), job_name=name)
            since = self._queue.clock.now() - (time.monotonic() - self._began)
            return self._slurm_job(request, SubmittedJob(job_id, submitted_at), registry.generation_dir(number), since)

        return SessionAcquisition(
            commands=self._commands,
            registry=registry,
            queue=self._queue,
            watch_job=watch_job,
            create=lambda number, hold: self._create(registry, created_with, number, hold),
            waiter=self._plan.payload.nonce,
            start_timeout=self._backend.start_timeout,
            patience=self._backend.patience,
            log=self._step.log,
        )

    def _create(
        self, registry: SessionRegistry, created_with: Requirements, number: int, hold: Callable[[SlurmJob], None]
    ) -> bool:
        """Claim a generation, by making its directory, and submit its job. Returns False if another process was faster.

        `hold` is called with the job before an interrupt can come.
        """
        step, setup, base = self._step, self._setup, self._base
        with remote_base_errors(base):
            ray, kept = created_with.ray or self._plan.ray, str(self._backend.layout.environments)
            interpreter = check_environment_on(self._connection, setup.environment, ray, self._plan.uses_pipes, kept)
            runtime = deliver(self._connection, base, self._upload, step.log)
        nonce = secrets.token_hex(6)
        name = job_name(f"session-{setup.name}", nonce)
        request = created_with.job_request(name, job_comment(step.run_id, step.step_key, step.partition_key))
        directory = registry.generation_dir(number)
        ask_command = tuple(interpreter.start("-I", runtime, "ask"))
        files = {
            RUNTIME: to_json(setup.runtime_spec(f"{CLUSTER}{nonce}", created_with, request, self._plan)).encode("utf-8"),
            JOB_SCRIPT: setup.script(request, interpreter, runtime, directory).encode("utf-8", "surrogateescape"),
            MANIFEST: manifest_to_json(SessionManifest(number, created_with.capacity(setup.reuse), ask_command)),
            SESSION: b"",
            EXIT: b"",
        }
        try:
            needs = required_files(self._connection, base, [self._upload], step.log)
            submitted = submit(
                self._commands,
                directory,
                files,
                request,
                self._queue.clock,
                step.log.warning,
                claim=True,
                patience=self._backend.patience,
                needs=needs,
            )
            hold(self._slurm_job(request, submitted, directory))
        except ClaimTaken:
            return False
        except SubmissionRefused:
            with contextlib.suppress(OSError):  # If the mark cannot be made, other processes wait until the claim expires.
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
