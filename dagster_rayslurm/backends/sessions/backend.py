"""The backend of the mode `slurm-session`, which runs payloads in sessions: warm allocations that many steps share.

If there is no session, the step creates a session. `start_in_session` also serves sessions on this machine (see `local`).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from dagster_pipes import PipesContextData

from ...archive import runtime_name
from ...components import arrange, merge_launchers, ray_across
from ...config import SessionConfig, time_limit_seconds
from ...edge.sessions import MANIFEST
from ...environments import Environment, path_on_cluster
from ...environments.check import check_environment_on
from ...environments.send import send_environment
from ...errors import FailureKind, StartError
from ...follow import Cadence
from ...launchers import Launcher, RayLauncher
from ...plan import Plan, check_session, merge, session_queue
from ...runtime.protocol.messages import Refusal
from ...runtime.protocol.record import CANCEL, EXIT, RUNTIME, SESSION, Record
from ...runtime.protocol.spec import PROTOCOL_VERSION, RuntimeSpec, to_json
from ...slurm.config import HetComponent, SlurmQueueConfig, SlurmResource
from ...slurm.exclusion import Exclusion
from ...slurm.request import JobRequest, is_job_of, job_comment, job_name
from ...slurm.shared_queue import ask_patiently, fetch_queue
from ...slurm.states import TERMINAL
from ...slurm.steps import parse_exit
from ...slurm.submit import JOB_SCRIPT, ClaimTaken, SubmissionRefused, SubmittedJob, cancel_named, submit
from ...ssh.pool import connection_to
from .. import batch
from ..base import Register, RunningPayload, Step, deferred_interrupts, run_files, secrets_json, write_cancel_request
from ..layout import absolute, nonce_of, remote_base_errors
from ..ownership import FIRST_OWNER, REQUEST_FILE, Journal, fingerprint, reattachable_job
from ..payload_files import PayloadFiles, deliver, pack
from ..slurm_job import SlurmJob
from .acquire import Allocation, SessionAcquisition, Site
from .listing import end_generations
from .matching import Capacity, Choice, Requirements, Target, adapted, misfit, misfit_error, required_head, session_key
from .payload import SessionPayload
from .registry import MOST_BYTES, Generation, LiveSession, SessionManifest, SessionRegistry, list_generations
from .request import RunRequest, send_request
from .state import job_of

# Pauses between two reads of a payload's record; the first are short, as a payload in a warm session may be over in no time.
_CADENCE = Cadence(busy=0.05, idle=3.0, waiting=1.0)
_POLL_INTERVAL = 0.5  # Seconds between two reads of the record of an earlier attempt's payload that was told to end.
_CANCEL_MARGIN = 15.0  # Seconds beyond the grace period for which the end of such a payload is waited for.


def start_in_session(site: Site, choice: Choice) -> RunningPayload:
    """Find or create a session for a payload, and return the running payload as soon as the session has accepted the payload.

    Blocks while no session is ready, but does not wait for the end of the payload. `site` has the step, the plan of the payload,
    and the connection to the cluster. `choice` says which sessions the payload may use. Raises RunFailure if the session did not
    start. Raises StartError if no session can or will run the payload. Raises OSError if the cluster is out of reach.
    """
    if choice.problem is not None and choice.strict:  # A misfit of the run's own launcher or queue is known before any request.
        raise StartError(FailureKind.CONFIGURATION, misfit_error(choice.problem))
    accepted: list[RunningPayload] = []
    reused = False

    def on_accepted(session: LiveSession) -> None:
        accepted.append(site.running(session, reused))
        site.register(accepted[0])

    plan, apart, number = site.plan, choice.problem is not None, 0
    request = RunRequest(site, on_accepted, secrets_json(plan).encode("utf-8") if plan.secret_env else b"")
    acquisition = SessionAcquisition(site, choice.target)
    try:
        if site.step.reattached and request.resume():
            return accepted[0]
        while True:
            session, reused = acquisition.acquire(after=number)
            capacity = session.manifest.capacity
            problem, answer = misfit(choice.required, capacity), dict[str, Any]()
            if problem is None:
                answer = request.submit(session, _first_files(site, choice, capacity))
                if accepted:
                    return accepted[0]
            message = str(answer.get("message") or answer.get("error"))
            if problem or answer["error"] == Refusal.MISFIT:
                problem = problem or message
                if apart or choice.strict:
                    raise StartError(FailureKind.CONFIGURATION, problem if apart else misfit_error(problem))
                site.step.log.info(f"[rayslurm] another session is needed: {problem}")
                acquisition, apart, number = SessionAcquisition(site, choice.own), True, 0
                continue
            name = f"{site.noun} {session.announcement.job_id}"
            if answer["error"] not in (Refusal.CLOSING, Refusal.GONE):
                raise StartError(FailureKind.RUNTIME, f"the session in {name} refuses the payload: {message}")
            site.step.log.info(f"[rayslurm] {name} takes no more payloads: {message}")
            number = session.manifest.generation
            acquisition.on_refused(number, message, answer.get("unhealthy") or ())
    except BaseException:
        if request.unsettled and not accepted:
            with deferred_interrupts():
                request.withdraw()
        raise


def _first_files(site: Site, choice: Choice, capacity: Capacity) -> dict[str, str]:
    """Returns the files that the payload's run directory has before the payload starts, as texts by file name.

    Secrets are left out.
    """
    payload = replace(site.plan.payload, leaves_unhealthy=site.leaves_unhealthy)
    payload = adapted(payload, site.plan.ray, choice.required, capacity)
    files = run_files(replace(site.plan, payload=payload, secret_env={}), site.context, site.step)
    # CANCEL is there from the beginning: on NFS a name that was looked up in vain stays missing for up to a minute.
    return {name: content.decode("utf-8") for name, content in {**files, CANCEL: b"", **site.files}.items()}


@dataclass(frozen=True, kw_only=True)
class SessionBackend(batch.ClusterBackend):
    """Runs payloads in the Slurm allocations of sessions."""

    own_queue: SlurmQueueConfig | None  # The queue fields that this run changes; None if it changes none.
    session: SessionConfig
    launcher: Launcher  # The launcher for which sessions are created.
    reuse: bool  # Whether the Ray cluster stays warm between payloads.
    components: tuple[HetComponent, ...] = ()  # Components of a session's job; empty if all nodes are alike.
    own_components: tuple[HetComponent, ...] | None = None  # Components for this run; None for `components`.
    own_launcher: Launcher | None = None  # Launcher of this run; None for `launcher`.
    start_timeout: float = 60.0  # Seconds in which a session announces itself once its job runs.
    cadence: Cadence = _CADENCE

    def check(self, plan: Plan) -> None:
        batch.check_paths(self.slurm, self.environment, plan)
        if problem := self.misfit(plan):
            if self.session.on_misfit == "error":
                raise ValueError(misfit_error(problem))
            if problem := misfit(self.required(plan), self.own(plan).capacity(self.reuse)):
                raise ValueError(problem)

    def start(self, plan: Plan, run_dir: str, context: PipesContextData, step: Step, register: Register) -> RunningPayload:
        began = time.monotonic()
        upload, choice, request, environment = self._packed(plan, step)
        site = SlurmSite(
            connection=self.connection,
            base=str(self.layout.base),
            plan=upload.plan,
            run_dir=run_dir,
            context=context,
            step=step,
            register=register,
            start_timeout=self.start_timeout,
            patience=self.patience,
            files={REQUEST_FILE: request, **({} if step.reattached else {FIRST_OWNER: b""})},
            leaves_unhealthy=self.avoids_unhealthy,
            needs=upload.places(str(self.layout.base)),
            backend=self,
            upload=upload,
            environment=environment,
            began=began,
        )
        return start_in_session(site, choice)

    def _packed(self, plan: Plan, step: Step) -> tuple[PayloadFiles, Choice, bytes, Environment]:
        """Pack a plan's files on this machine, send the environment if the cluster lacks it, and choose a session.

        Returns the packed files, the choice of a session, the content of `REQUEST_FILE` (a fingerprint of the settings), and the
        environment as installed on the cluster.
        """
        base, data_dir = str(self.layout.base), batch.data_dir_of(self.connection, self.layout, plan)
        upload = pack(plan, base, data_dir)
        queues = [queue for _, queue, _ in self.required(plan).parts] if self.detect_platform else []
        with remote_base_errors(base):
            environment = send_environment(self.connection, self.environment, base, step.log, queues)
        choice = self.choice(upload.plan, step.run_id, base, data_dir, environment)
        return upload, choice, fingerprint(to_json(upload.plan.payload), choice.text()), environment

    def can_reattach(self, plan: Plan, run_dir: str, step: Step) -> bool:
        _, _, request, _ = self._packed(plan, step)

        def session_job(start: Record | None) -> str | None:
            # Any generation may have the payload: one that accepts no more payloads lets the running ones end.
            for each in list_generations(self.connection, str(self.layout.base)) if start is not None else ():
                said = each.announcement
                if start is not None and said is not None and said.cluster_id == start.get("cluster_id") and not each.ended:
                    queue = ask_patiently(lambda: fetch_queue(self.connection), self.patience, True, step.log.warning)
                    return said.job_id if job_of(each, queue) is not None else None
            return None

        return reattachable_job(self.connection, run_dir, plan.payload.nonce, request, session_job, step.log) is not None

    def end_abandoned(self, run_dir: str, grace_period: float) -> None:
        write_cancel_request(self.connection, run_dir, now=False)
        journal, deadline = Journal(self.connection, run_dir, nonce_of(run_dir)), time.monotonic() + grace_period + _CANCEL_MARGIN
        start, _ = journal.start_and_end()
        row = fetch_queue(self.connection).job(int(start["allocation"]["job_id"])) if start is not None else None
        if row is None or row.state in TERMINAL:
            return  # The session is lost, so no process writes an end.
        # Without the wait, it would run beside the payload of this attempt. The owner of an ended payload removes the directory.
        while journal.start_and_end()[1] is None and self.connection.modified(run_dir) is not None:
            if time.monotonic() > deadline:
                sentence = f"the payload of an earlier attempt was told to end, and its record in {run_dir} shows no end"
                raise StartError(FailureKind.RUNTIME, sentence, retry=True)
            time.sleep(_POLL_INTERVAL)

    def exclusion_for_plan(self, plan: Plan) -> Exclusion:
        required = self.default if self.misfit(plan) is None else self.own(plan)
        return self.exclusion(required.job_request())

    def example(self, plan: Plan) -> str:
        required = self.default if self.misfit(plan) is None else self.own(plan)
        request = required.job_request(job_name(f"session-{self.name}", "NONCE"), job_comment("RUN", "STEP", None))
        return batch.example_script(request, self.slurm, "session", f"sessions/{self.name}-FINGERPRINT/GENERATION")

    # ---- Which session a payload gets. Pure

    @property
    def name(self) -> str:
        """The configured name of the session; "default" if no name is configured.

        Sessions of one name are separate if their settings differ.
        """
        return self.session.name or "default"

    @cached_property
    def default(self) -> Requirements:
        """The settings of the default session, the one that all payloads share if they fit.

        Raises ValueError if the settings contradict each other.
        """
        if not self.components:
            queue = session_queue(self.slurm.queue, self.session)
            return Requirements(self.launcher.ray_spec(), self.launcher.footprint(), queue)
        check_session(self.session, self.components)
        parts = merge_launchers(self.launcher, arrange(self.components, _component_of(self.launcher)))
        ray = ray_across(self.launcher, parts)
        required = Requirements(ray, self.launcher.footprint(), parts[0].queue, parts)
        return required.with_time_limit(self.session.time_limit) if self.session.time_limit is not None else required

    def required(self, plan: Plan) -> Requirements:
        """Returns what a session must offer to the payload of this run: the Ray cluster, the nodes and the time limit.

        The field `time_limited` of the result says whether the time limit is this run's own, and so must be met.
        """
        own = self.own_components is not None
        components = self.components if self.own_components is None else self.own_components
        if not components:
            queue = merge(self.default.queue, self.own_queue)
            limited = self.own_queue is not None and "time_limit" in self.own_queue.model_fields_set
            return Requirements(plan.ray, plan.footprint, queue, time_limited=limited)
        launcher = self.own_launcher or self.launcher
        # The head stays where sessions have it, unless the run brings components or names one.
        head = _component_of(launcher) or (None if own else _component_of(self.launcher))
        parts = merge_launchers(launcher, arrange(components, head))
        wanted_head = required_head(launcher, self.own_components)
        required = Requirements(plan.ray, plan.footprint, parts[0].queue, parts, time_limited=own, head=wanted_head)
        return required if own else required.with_time_limit(self.default.queue.time_limit)

    def own(self, plan: Plan) -> Requirements:
        """Returns the settings of the separate session that is created for this payload if it does not fit the default session.

        The time limit is the longer of two limits: the payload's limit and the default session's limit.
        """
        required = self.required(plan)
        limits = [required.queue.time_limit]
        with contextlib.suppress(ValueError):  # The session's components may contradict each other where the run brings its own.
            limits.append(self.default.queue.time_limit)
        return required.with_time_limit(max(limits, key=lambda text: time_limit_seconds(text) or float("inf")))

    def misfit(self, plan: Plan) -> str | None:
        """Returns a sentence that says why the payload does not fit the default session, which payloads share; None if it fits.

        If the settings of the default session contradict each other, the function raises ValueError. There is one exception: if
        this run configures components, and `num_nodes` of the session is not set, the function returns a sentence about the
        contradiction.
        """
        required = self.required(plan)
        try:
            capacity = self.default.capacity(self.reuse)
        except ValueError as error:
            if not self.own_components or self.session.num_nodes is not None:
                raise
            return f"there is no session for all payloads: {error}"
        return misfit(required, capacity)

    def choice(self, plan: Plan, run_id: str, base: str, data_dir: str, environment: Environment | None = None) -> Choice:
        """Returns which session the payload of a plan is to use. Contacts no session.

        `run_id` is the id of the Dagster run. `base` is the base directory, and `data_dir` the data directory that all payloads
        of a session share; both are paths on the cluster. `environment` is the environment as installed on the cluster; None
        stands for the configured environment.
        """
        what = {
            "base": base,
            "runtime": [PROTOCOL_VERSION, runtime_name()],
            "environment": path_on_cluster(environment or self.environment, over_ssh=self.slurm.ssh is not None),
            "data_dir": data_dir,
            "reuse": self.reuse,
        }

        def target(created_with: Requirements, apart: bool) -> Target:
            more = {"site": self.slurm.site} if self.session.name is None or apart else {}
            key = session_key(self.session, run_id, {**what, **more}, created_with, apart)
            return Target(key, created_with)

        problem, own = self.misfit(plan), target(self.own(plan), True)
        first = own if problem else target(self.default, False)
        return Choice(self.required(plan), problem, first, own, self.session.on_misfit == "error")

    def runtime_spec(self, cluster_id: str, required: Requirements, request: JobRequest, plan: Plan) -> RuntimeSpec:
        """Returns the content of `runtime.json`, with which the runtime of a session starts.

        `cluster_id` is the id that the session's Ray cluster gets. `required` has the settings of the session, `request` is the
        request for the session's job, and `plan` is the first payload's plan.
        """
        return replace(
            batch.runtime_spec(cluster_id, replace(plan, ray=required.ray), request),
            ray=required.ray if self.reuse else None,
            preload=self.launcher.preload if isinstance(self.launcher, RayLauncher) else [],
            **self.session.for_runtime(),
        )


def _component_of(launcher: Launcher) -> str | None:
    return launcher.component_id if isinstance(launcher, RayLauncher) else None


@dataclass(kw_only=True, eq=False)
class SlurmSite(Site):
    """The Slurm cluster on which a step looks for sessions; each session is a Slurm job. See `Site` for the methods."""

    noun = "Slurm job"
    end_command = "scancel"
    cadence = Cadence(busy=0.1, idle=2.0, waiting=15.0)

    backend: SessionBackend
    upload: PayloadFiles
    environment: Environment
    began: float  # When the step began to look for a session (monotonic clock).

    def __post_init__(self) -> None:
        self._queue = self.backend.user_queue

    def deliver(self) -> None:
        with remote_base_errors(self.base):
            deliver(self.connection, self.base, self.upload, self.step.log)

    def running(self, session: LiveSession, reused: bool) -> SessionPayload:
        announcement, capacity = session.announcement, session.manifest.capacity
        name = job_name(f"session-{self.backend.name}", announcement.cluster_id.removeprefix(batch.CLUSTER))
        parts = [JobRequest(name, "", SlurmQueueConfig(**queue), part) for part, queue in capacity.queues.items()]
        request = replace(parts[0], further_components=tuple(parts[1:]))
        job = self.backend.slurm_job(request, SubmittedJob(announcement.job_id, 0.0), session.directory, self.step)
        payload = SessionPayload(self, session, job, self.backend.slurm.poll_interval)
        if not self.step.reattached:  # Otherwise it is not known whether the session was reused, and how long the wait was.
            payload.reused, payload.waited = reused, time.monotonic() - self.began
        return payload

    def create(self, registry: SessionRegistry, target: Target, number: int, hold: Callable[[Allocation], None]) -> bool:
        step, backend, created_with = self.step, self.backend, target.created_with
        with remote_base_errors(self.base):
            ray, kept = created_with.ray or self.plan.ray, str(backend.layout.environments)
            interpreter = check_environment_on(self.connection, self.environment, ray, self.plan.uses_pipes, kept)
            runtime = deliver(self.connection, self.base, self.upload, step.log)
        nonce = secrets.token_hex(6)
        name = job_name(f"session-{backend.name}", nonce)
        request = created_with.job_request(name, job_comment(step.run_id, step.step_key, step.partition_key))
        request = backend.placed(request, step)
        directory = registry.generation_dir(number)
        script = batch.job_script(request, interpreter, runtime, directory, backend.slurm, "session")
        ask = (*interpreter.srun, *interpreter.start("-I", runtime, "ask"))
        manifest = SessionManifest(number, created_with.capacity(backend.reuse).placed(request), ask)
        files = {
            RUNTIME: to_json(backend.runtime_spec(f"{batch.CLUSTER}{nonce}", created_with, request, self.plan)).encode("utf-8"),
            JOB_SCRIPT: script.encode("utf-8", "surrogateescape"),
            MANIFEST: manifest.to_json(),
            SESSION: b"",
            EXIT: b"",
        }
        arguments = self.connection, directory, files, request, self._queue.clock, step.log.warning
        try:
            submitted = submit(*arguments, claim=True, patience=self.patience)
            hold(backend.slurm_job(request, submitted, directory, step))
        except ClaimTaken:
            return False
        except BaseException as error:
            with deferred_interrupts():
                with contextlib.suppress(OSError):  # If the mark cannot be made, other processes wait until the claim expires.
                    if registry.creator(number) in ("", name):  # Another process may have claimed the generation before.
                        registry.abandon(number)
                if not isinstance(error, SubmissionRefused):
                    cancel_named(self.connection, name, step.log)
            raise
        where = f"{request.partitions_text} on {self.connection.place}"
        step.log.info(f"[rayslurm] submitted Slurm job {submitted.job_id} ({name}) to {where}")
        return True

    def watch(self, target: Target, newest: Generation) -> SlurmJob:
        request = replace(target.created_with.job_request(), job_name=newest.job_name)
        now = self._queue.clock.now()
        submitted = SubmittedJob(str(newest.job_id), now - newest.age)
        since = now - (time.monotonic() - self.began)
        return self.backend.slurm_job(request, submitted, newest.directory, self.step, waiting_since=since)

    def cancel(self, creator: str) -> None:
        if creator:
            cancel_named(self.connection, creator, self.step.log)

    def is_alive(self, job_id: str, directory: str) -> bool | None:
        if parse_exit(self.connection.read(os.path.join(directory, EXIT), 0, MOST_BYTES), int(job_id)) is not None:
            return False
        snapshot = self._queue.latest(self._queue.clock.now())
        if snapshot is None or self._queue.error:
            return None
        row = snapshot.job(int(job_id))
        if row is None or row.state in TERMINAL:  # The shared snapshot may be older than the job.
            row = fetch_queue(self.connection).job(int(job_id))
        return row is not None and row.state not in TERMINAL

    def send(self, session: LiveSession, request: Mapping[str, Any]) -> dict[str, Any]:
        return send_request(self.connection, session, request, self.backend.session.carrier)


def end_session(slurm: SlurmResource, cluster_id: str) -> bool:
    """End the session of the Ray cluster `cluster_id`, with all its payloads, and wait for the end.

    Returns False if no such session is alive. Raises StartError if Slurm does not confirm the end, and OSError if the cluster is
    out of reach.
    """
    nonce = batch.cluster_nonce(cluster_id)
    if nonce is None:
        return False
    connection = connection_to(slurm.ssh)
    generations = list_generations(connection, absolute(connection, slurm.remote_base))
    own = [each for each in generations if is_job_of(each.job_name, nonce)]
    return bool(own) and end_generations(connection, own)
