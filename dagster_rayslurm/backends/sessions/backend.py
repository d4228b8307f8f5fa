"""Run payloads in sessions, warm allocations that many steps share: the backend of the mode `slurm-session`.

If there is no session, the step creates one. `SessionStart` does the same for sessions on this machine (see `local`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from dagster_pipes import PipesContextData

from ...edge.sessions import MANIFEST
from ...environments.check import check_environment_on
from ...errors import FailureKind, StartError
from ...follow import Cadence
from ...interrupts import deferred_interrupts
from ...plan import Plan
from ...runtime.protocol.messages import Operation, Refusal
from ...runtime.protocol.record import CANCEL, EXIT, PAYLOAD, RUNTIME, SECRETS, SESSION, Record
from ...runtime.protocol.spec import to_json
from ...slurm.config import SlurmResource
from ...slurm.request import JobRequest, is_job_of, job_comment, job_name
from ...slurm.script import parse_exit
from ...slurm.shared_queue import SharedQueue, fetch_queue, shared_queue
from ...slurm.states import TERMINAL
from ...slurm.submit import JOB_SCRIPT, ClaimTaken, SubmissionRefused, SubmittedJob, cancel_named, submit
from ...ssh.base import Connection, ConnectionFailed
from ...ssh.pool import connection_to
from ..base import Register, RunningPayload, Step
from ..batch import CLUSTER, absolute, check_paths, cluster_nonce, data_dir_of, sweep_in_background
from ..ownership import FIRST_OWNER, REQUIREMENTS_FILE, reattachable_job
from ..payload_files import PayloadFiles, deliver, pack, remote_base_errors, required_files
from ..run_dir import Layout, run_files
from ..slurm_job import SlurmJob
from .acquire import SLURM_CADENCE, Hold, SessionAcquisition, Site
from .listing import end_generations, list_generations, make_way_for
from .matching import (
    Capacity,
    Choice,
    Target,
    claimed_resources,
    misfit,
    misfit_error,
    own_cluster,
    payload_time_limit,
    same_capacity,
)
from .payload import SessionPayload
from .registry import MOST_BYTES, LiveSession, NewestGeneration, SessionManifest, SessionRegistry
from .request import RunRequest, send_request
from .session_job import SessionSetup

_CADENCE = Cadence(busy=0.05, idle=3.0, waiting=1.0)
"""Pauses between two looks at a payload's record; the first are short, as a warm step may be over in no time."""
_VISIBILITY_TIMEOUT = 90.0
"""Seconds in which a node sees uploaded files: on NFS a name that was looked up in vain stays missing for up to a minute."""
_DELIVERIES = 3
"""Most uploads for one session of bundles that disappear again."""


@dataclass(kw_only=True, eq=False)
class SessionStart:
    """The start of one payload in a session: acquires a session, and submits the run request."""

    site: Site
    base: str  # The base directory of the sessions, absolute.
    choice: Choice
    plan: Plan
    run_dir: str
    context: PipesContextData
    step: Step
    register: Register
    start_timeout: float
    patience: float
    running: Callable[[LiveSession, bool], RunningPayload]  # Gets the session, and whether it had served before.
    files: Mapping[str, bytes] = field(default_factory=dict)  # First files of the run directory beside the usual ones.
    members: Mapping[str, Any] = field(default_factory=dict)  # Further members of the run request.
    needs: Sequence[str] = ()  # Paths of the bundles that must be on the cluster; `deliver` uploads them, again if they vanished.
    deliver: Callable[[bool], Any] = lambda recheck: None  # noqa: ARG005

    def __post_init__(self) -> None:
        self._payload: RunningPayload | None = None
        self._reused = False
        self._refusal = ""
        self._request = RunRequest(
            site=self.site,
            run_dir=self.run_dir,
            nonce=self.plan.payload.nonce,
            patience=self.patience,
            on_accepted=self._on_accepted,
            log=self.step.log,
            secrets=run_files(self.plan, self.context)[SECRETS] if self.plan.secret_env else b"",
            members=self.members,
        )

    def run(self) -> RunningPayload:
        """Start the payload, and return it once a session has accepted it.

        Raises:
            RunFailure: the payload's session did not start.
            StartError: the payload fits no session, or no session can be created.
            OSError: the cluster cannot be reached or written to.
        """
        problem = self.choice.problem  # A misfit of the run's own launcher or queue is known before any request.
        if problem is not None and self.choice.strict:
            raise StartError(FailureKind.CONFIGURATION, misfit_error(problem))
        try:
            payload = (self._submit(apart=False) if problem is None else None) or self._submit(apart=True)
        except BaseException:
            if self._request.unsettled and self._payload is None:
                with deferred_interrupts():
                    self._request.withdraw()
            raise
        assert payload is not None
        return payload

    def _submit(self, apart: bool) -> RunningPayload | None:
        """Submit the payload to the shared session or, `apart`, to one of its own; to its next generation if one ends too early.

        Returns the accepted payload; None if it does not fit the shared session and needs a separate one.
        """
        choice = self.choice
        target = choice.own() if apart else choice.shared()
        acquisition = SessionAcquisition(
            registry=SessionRegistry(self.site.connection, os.path.join(self.base, "sessions", target.key)),
            site=self.site,
            target=target,
            waiter=self.plan.payload.nonce,
            start_timeout=self.start_timeout,
            patience=self.patience,
            log=self.step.log,
        )
        number = 0
        while True:
            acquired = acquisition.acquire(after=number)
            session, self._reused = acquired.session, acquired.reused
            problem = misfit(choice.required, session.manifest.capacity) or self._submit_to(session)
            if self._payload is not None:
                return self._payload
            if problem is not None:
                if apart or choice.strict:
                    raise StartError(FailureKind.CONFIGURATION, problem if apart else misfit_error(problem))
                if same_capacity(choice.own().capacity, session.manifest.capacity):
                    raise StartError(FailureKind.CONFIGURATION, f"{problem}; a session of its own would be given no more")
                self.step.log.info(f"[rayslurm] another session is needed: {problem}")
                return None
            number = session.manifest.generation
            acquisition.on_refused(number, self._refusal)

    def _submit_to(self, session: LiveSession) -> str | None:
        """Submit the payload to one generation. Returns why the payload does not fit, if the session refuses it for that."""
        log, name = self.step.log, f"{self.site.noun} {session.announcement.job_id}"
        files = self._first_files(session.manifest.capacity)
        deliveries, deadline, pause = 0, time.monotonic() + _VISIBILITY_TIMEOUT, 0.1
        while True:
            answer = self._request.submit(session, files, self.needs)
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
                self.deliver(deliveries > 0)
            deliveries += 1
            if deliveries > 1:  # The bundle is there, but the session's node looked for it too early.
                time.sleep(pause)
                pause = min(2 * pause, 3.0)
        if error == Refusal.MISFIT:
            return message
        if error not in (Refusal.CLOSING, Refusal.GONE):
            raise StartError(FailureKind.RUNTIME, f"the session in {name} refuses the payload: {message}")
        self._refusal = "it was gone before it could be asked" if error == Refusal.GONE else message
        log.info(f"[rayslurm] {name} takes no more payloads: {message}")
        return None

    def _first_files(self, capacity: Capacity) -> dict[str, str]:
        """The first files of the payload's run directory, except secrets."""
        required = self.choice.required
        cpus, gpus = claimed_resources(required, capacity)
        payload = dataclasses.replace(
            self.plan.payload,
            run_id=self.step.run_id,
            step=self.step.step_key,
            ray=None if capacity.reuse else own_cluster(self.plan.ray, capacity),
            want_cpus=cpus,
            want_gpus=gpus,
            time_limit=payload_time_limit(required, capacity),
        )
        files = run_files(dataclasses.replace(self.plan, payload=payload, secret_env={}), self.context)
        # CANCEL is there from the beginning: on NFS a name that was looked up in vain stays missing for up to a minute.
        return {name: content.decode("utf-8") for name, content in {**files, CANCEL: b"", **self.files}.items()}

    def _on_accepted(self, session: LiveSession) -> None:
        """Called when a session has accepted the payload: registers the running payload."""
        self._payload = self.running(session, self._reused)
        self.register(self._payload)


@dataclass(frozen=True)
class SessionBackend:
    """Runs payloads in the Slurm allocations of sessions.

    Args:
        queue_timeout: seconds after which a run no longer waits for a session that is still in the queue; None waits for ever.
        start_timeout: seconds in which a session announces itself once its job runs.
        patience: seconds for which the cluster may be out of reach once a session or a job may have been started.
    """

    setup: SessionSetup
    queue_timeout: float | None
    start_timeout: float
    patience: float
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
        began = time.monotonic()
        connection, base = self.connection, str(self.layout.base)
        data_dir = data_dir_of(connection, self.layout, plan)
        upload = pack(plan, base, data_dir)
        upload.warn(step.log)
        site = SlurmSite(self, upload, step, began)
        choice = self.setup.choice(upload.plan, step.run_id, base, data_dir)

        def deliver_again(recheck: bool) -> None:
            with remote_base_errors(base):
                deliver(connection, base, upload, step.log, recheck=recheck)

        return SessionStart(
            site=site,
            base=base,
            choice=choice,
            plan=upload.plan,
            run_dir=run_dir,
            context=context,
            step=step,
            register=register,
            start_timeout=self.start_timeout,
            patience=self.patience,
            running=lambda session, reused: site.running(session, run_dir, reused),
            files={REQUIREMENTS_FILE: choice.fingerprint(), **({} if step.reattached else {FIRST_OWNER: b""})},
            needs=upload.places(base),
            deliver=deliver_again,
        ).run()

    def can_reattach(self, plan: Plan, run_dir: str, step: Step) -> bool:
        base, data_dir = str(self.layout.base), data_dir_of(self.connection, self.layout, plan)
        packed = pack(plan, base, data_dir).plan
        expected = {
            PAYLOAD: to_json(dataclasses.replace(packed.payload, step=step.step_key)).encode("utf-8"),
            REQUIREMENTS_FILE: self.setup.choice(packed, step.run_id, base, data_dir).fingerprint(),
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


class SlurmSite:
    """Sessions as Slurm jobs; a `Site` for one step, which began to look for a session at `began` (monotonic clock)."""

    noun = "Slurm job"
    cadence = SLURM_CADENCE

    def __init__(self, backend: SessionBackend, upload: PayloadFiles, step: Step, began: float) -> None:
        self.connection = backend.connection
        self._backend, self._setup, self._upload, self._step, self._began = backend, backend.setup, upload, step, began
        self._base = str(backend.layout.base)
        self._queue: SharedQueue = shared_queue(self.connection, str(backend.layout.queue), self._setup.slurm.poll_interval)

    def running(self, session: LiveSession, run_dir: str, reused: bool) -> SessionPayload:
        """The payload that a session has accepted."""
        key, capacity = os.path.basename(os.path.dirname(session.directory)), session.manifest.capacity
        cluster_id = session.announcement.cluster_id
        name = job_name(f"session-{self._setup.name}", cluster_id.removeprefix(CLUSTER))
        parts = [JobRequest(name, "", partition=queue["partition"], component_id=part) for part, queue in capacity.queues.items()]
        request = dataclasses.replace(parts[0], further_components=tuple(parts[1:]))
        reattached = self._step.reattached
        return SessionPayload(
            connection=self.connection,
            job=self._slurm_job(request, SubmittedJob(session.announcement.job_id, 0.0), session.directory),
            cluster_id=cluster_id,
            name=f"{key}/{session.manifest.generation}",
            run_dir=run_dir,
            nonce=self._upload.plan.payload.nonce,
            # After a reattach, this process does not know whether the session was reused or how long the wait was.
            reused=None if reattached else reused,
            waited=None if reattached else time.monotonic() - self._began,
            poll_interval=self._setup.slurm.poll_interval,
            describe=lambda: self.send(session, {"op": Operation.DESCRIBE}),
            step=self._step,
        )

    def create(self, registry: SessionRegistry, target: Target, number: int, hold: Hold) -> bool:
        step, setup, base, plan = self._step, self._setup, self._base, self._upload.plan
        with remote_base_errors(base):
            ray, kept = target.created_with.ray or plan.ray, str(self._backend.layout.environments)
            interpreter = check_environment_on(self.connection, setup.environment, ray, plan.uses_pipes, kept)
            runtime = deliver(self.connection, base, self._upload, step.log)
        nonce = secrets.token_hex(6)
        name = job_name(f"session-{setup.name}", nonce)
        request = target.created_with.job_request(name, job_comment(step.run_id, step.step_key, step.partition_key))
        directory = registry.generation_dir(number)
        manifest = SessionManifest(number, target.capacity, tuple(interpreter.start("-I", runtime, "ask")))
        files = {
            RUNTIME: to_json(setup.runtime_spec(f"{CLUSTER}{nonce}", target.created_with, request, plan)).encode("utf-8"),
            JOB_SCRIPT: setup.script(request, interpreter, runtime, directory).encode("utf-8", "surrogateescape"),
            MANIFEST: manifest.to_json(),
            SESSION: b"",
            EXIT: b"",
        }
        try:
            submitted = submit(
                self.connection,
                directory,
                files,
                request,
                self._queue.clock,
                step.log.warning,
                claim=True,
                patience=self._backend.patience,
                needs=required_files(self.connection, base, [self._upload], step.log),
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
                cancel_named(self.connection, name, step.log)
            raise
        where = f"{request.partitions_text} on {self.connection.place}"
        step.log.info(f"[rayslurm] submitted Slurm job {submitted.job_id} ({name}) to {where}")
        return True

    def watch(self, registry: SessionRegistry, target: Target, job_id: str, newest: NewestGeneration) -> SlurmJob:
        request = dataclasses.replace(target.created_with.job_request(), job_name=newest.creator)
        now = self._queue.clock.now()
        submitted = SubmittedJob(job_id, now - newest.age)
        return self._slurm_job(request, submitted, registry.generation_dir(newest.number), now - (time.monotonic() - self._began))

    def _slurm_job(self, request: JobRequest, submitted: SubmittedJob, directory: str, since: float | None = None) -> SlurmJob:
        return SlurmJob(
            commands=self.connection,
            queue=self._queue,
            request=request,
            submitted=submitted,
            directory=directory,
            queue_timeout=self._backend.queue_timeout,
            over_ssh=self._setup.slurm.ssh is not None,
            log=self._step.log,
            make_way=make_way_for(self.connection, self._base, self._step.log),
            waiting_since=since,
        )

    def find(self, creator: str) -> str | None:
        named = fetch_queue(self.connection).named(creator)
        return next((str(row.job_id) for row in named if row.is_leader), None)

    def is_alive(self, job_id: str, directory: str) -> bool | None:
        try:
            if parse_exit(self.connection.read(os.path.join(directory, EXIT), 0, MOST_BYTES), int(job_id)) is not None:
                return False
            snapshot = self._queue.latest(self._queue.clock.now())
            if snapshot is None or self._queue.error:
                return None
            row = snapshot.job(int(job_id))
            if row is None or row.state in TERMINAL:  # The shared snapshot may be older than the job.
                row = fetch_queue(self.connection).job(int(job_id))
        except ConnectionFailed:
            raise
        except OSError:
            return None
        return row is not None and row.state not in TERMINAL

    def send(self, session: LiveSession, request: Mapping[str, Any]) -> dict[str, Any]:
        carrier, command = self._setup.session.carrier, session.manifest.ask_command
        return send_request(self.connection, session.announcement, request, carrier, session.directory, command)

    def end_command(self, job_id: str) -> str:
        return f"scancel {job_id}"


def end_session(slurm: SlurmResource, cluster_id: str) -> bool:
    """End the session of a Ray cluster, with all its payloads; False if there is no such session, or it has ended.

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
