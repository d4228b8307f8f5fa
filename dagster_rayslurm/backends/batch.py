"""Slurm mode: run each payload in a batch job of the payload's own."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from dagster_pipes import PipesContextData

from ..components import Component, component_specs, request_for
from ..edge.sessions import JOB_ID
from ..environments import Environment, Interpreter, path_on_cluster
from ..environments.check import check_environment_on
from ..environments.send import send_environment
from ..errors import FailureKind, StartError, UnhealthyNode
from ..follow import Cadence
from ..handle import RunHandle
from ..plan import Plan
from ..runtime.node.network import control_ports
from ..runtime.payload.environment import shared_variables
from ..runtime.protocol.record import CANCEL, EXIT, RUNTIME
from ..runtime.protocol.spec import RaySpec, RuntimeSpec, to_json
from ..runtime.ray.membership import nodes_expected
from ..slurm.arrays import elements_of
from ..slurm.config import AUTO, SlurmQueueConfig, SlurmResource, split_signal
from ..slurm.exclusion import Exclusion, excluding, exclusion_for, remember
from ..slurm.partition_choice import is_auto, placement_for
from ..slurm.request import JobRequest, is_job_of, job_comment, job_name, make_request, render_script
from ..slurm.shared_queue import QueueSnapshot, SharedQueue, SlurmUnanswered, ask_patiently, fetch_queue, shared_queue
from ..slurm.states import TERMINAL
from ..slurm.submit import JOB_SCRIPT, SubmissionRefused, SubmittedJob, cancel_named, submit, wait_until_gone
from ..ssh.base import Connection, check_no_variable, is_rooted
from ..ssh.pool import connection_to
from .base import Register, Step, deferred_interrupts, run_files, sweep_remote, write_cancel_request
from .layout import Layout, absolute, remote_base_errors
from .ownership import FIRST_OWNER, REQUEST_FILE, fingerprint, reattachable_job
from .payload_files import PayloadFiles, deliver, pack
from .sessions.listing import IdleSessions
from .slurm_job import BatchJob, SlurmJob

# How often records on the cluster are read: each read costs a round trip over SSH, and load on the shared file system.
_CADENCE = Cadence(busy=0.1, idle=3.0, waiting=15.0)
CLUSTER = "slurm-"  # Prefix of a Ray cluster's id in Slurm mode; the nonce that follows also ends the name of the Slurm job.


@dataclass(frozen=True, kw_only=True)
class ClusterBackend:
    """Base class of the backends that run payloads on a Slurm cluster."""

    slurm: SlurmResource
    environment: Environment
    queue_timeout: float | None = None  # Seconds after which a job that still waits in the queue fails; None waits for ever.
    patience: float = 60.0  # Seconds for which the cluster may be out of reach while it is unknown whether there is a job.
    avoids_unhealthy: bool = False  # Whether jobs avoid the nodes that failed a health check in this user's runs.
    detect_platform: bool = True  # True: environments are made for the platform of the compute nodes; False: of the edge node.

    @cached_property
    def connection(self) -> Connection:
        return connection_to(self.slurm.ssh)

    @property
    def user_queue(self) -> SharedQueue:
        """The user's jobs in Slurm's queue, cached in a file that all processes of the user share."""
        return shared_queue(self.connection, str(self.layout.queue), self.slurm.poll_interval)

    def slurm_job(
        self,
        request: JobRequest,
        submitted: SubmittedJob,
        directory: str,
        step: Step,
        ends_idle_sessions: bool = True,
        waiting_since: float | None = None,
    ) -> SlurmJob:
        """Returns the object that watches and cancels a submitted job.

        `request` is what the job asked Slurm for. The job writes its exit code and logs to `directory`. If `ends_idle_sessions`
        is True, idle sessions whose nodes the waiting job could use are asked to end. `waiting_since` is the start of the queue
        timeout, by the cluster's clock; None for the time of submission.
        """
        return SlurmJob(
            commands=self.connection,
            queue=self.user_queue,
            request=request,
            submitted=submitted,
            directory=directory,
            queue_timeout=self.queue_timeout,
            log=step.log,
            make_way=IdleSessions(self.connection, str(self.layout.base), step.log) if ends_idle_sessions else None,
            waiting_since=waiting_since,
        )

    @cached_property
    def layout(self) -> Layout:
        return Layout(Path(absolute(self.connection, self.slurm.remote_base)))

    def remember_unhealthy(self, nodes: Sequence[UnhealthyNode]) -> None:
        """Record in the base directory that `nodes` failed a health check, so that later jobs of this user can avoid these nodes.

        Raises OSError if the cluster does not answer, or the base directory cannot be written.
        """
        remember(self.connection, str(self.layout.base), nodes)

    def exclusion(self, request: JobRequest) -> Exclusion:
        """Returns the nodes with failed health checks that the job of `request` is to avoid.

        If the field `avoids_unhealthy` is False, the result has no nodes. Raises OSError if the cluster or Slurm does not answer.
        """
        return exclusion_for(self.connection, str(self.layout.base), request) if self.avoids_unhealthy else Exclusion()

    def placed(self, request: JobRequest, step: Step) -> JobRequest:
        """Returns a copy of the job request with a partition instead of "auto", which excludes nodes that failed a health check.

        Logs the choice of the partition and the excluded nodes. Raises StartError if no partition can run the job, and OSError if
        the cluster does not answer.
        """
        if is_auto(request):
            try:
                placement = placement_for(self.connection, request)
            except ValueError as error:
                raise StartError(
                    FailureKind.CONFIGURATION, f"SlurmQueueConfig: {error}; ask for less, or name a partition"
                ) from None
            for reason in placement.reasons:
                step.log.info(f"[rayslurm] {reason}")
            request = placement.request
        return self._avoiding(request, step)

    def _avoiding(self, request: JobRequest, step: Step) -> JobRequest:
        """Returns the job request, changed to exclude the nodes that failed a health check, and logs the excluded nodes.

        If Slurm does not answer, logs a warning and returns the job request unchanged. Raises OSError if the cluster cannot be
        reached.
        """
        try:
            exclusion = self.exclusion(request)
        except SlurmUnanswered as error:
            step.log.warning(f"[rayslurm] no node is excluded for a failed health check: {error}")
            return request
        for each, why in exclusion.kept:
            step.log.warning(f"[rayslurm] {each} failed a health check and is not excluded: {why}")
        if not exclusion.nodes:
            return request
        named = ", ".join(map(str, exclusion.nodes))
        step.log.info(f"[rayslurm] excluded for a failed health check: {named}")
        return excluding(request, [each.node for each in exclusion.nodes])

    def sweep(self, retention_days: float) -> None:
        def work() -> None:
            with contextlib.suppress(OSError):  # A later sweep tries again.
                sweep_remote(self.connection, str(self.layout.base), retention_days)

        # The file system may be slow.
        threading.Thread(target=work, name="rayslurm-sweep", daemon=True).start()


@dataclass(frozen=True, kw_only=True)
class JobBackend(ClusterBackend):
    """Base class of the backends that submit a Slurm job for each Dagster step."""

    queue: SlurmQueueConfig
    components: tuple[Component, ...] = ()  # The components of a heterogeneous job, in order.
    cadence: Cadence = _CADENCE

    def deliver(self, plan: Plan, step: Step) -> tuple[PayloadFiles, Interpreter, str]:
        """Send a plan's files, the environment and the runtime to the cluster, unless they are there.

        Returns the files, the environment's Python, and the path of the runtime's zipapp on the cluster. Raises StartError if the
        files, the environment or the base directory cannot be used, and OSError if the cluster cannot be reached.
        """
        base = str(self.layout.base)
        packed = pack(plan, base, data_dir_of(self.connection, self.layout, plan))
        with remote_base_errors(base):
            interpreter = self.interpreter_for(plan, step)
            return packed, interpreter, deliver(self.connection, base, packed, step.log)

    @contextlib.contextmanager
    def cancel_on_error(self, request: JobRequest, step: Step) -> Iterator[None]:
        """Context manager: if the block raises an exception, cancel the job of `request` by its name, and re-raise the exception.

        The job may exist even if Slurm's answer to the submission did not arrive. After SubmissionRefused there is no job, so
        that nothing is cancelled.
        """
        try:
            yield
        except SubmissionRefused:
            raise
        except BaseException:
            with deferred_interrupts():
                cancel_named(self.connection, request.job_name, step.log)
            raise

    def submit_job(self, run_dir: str, files: Mapping[str, bytes], request: JobRequest, step: Step) -> SlurmJob:
        """Create the run directory `run_dir` with `files`, submit the job of `request`, and return the submitted job.

        If a job of this run directory was submitted before, the function submits nothing, and returns that job. Callers must be
        inside `cancel_on_error`, which cancels the job if the submission fails halfway. Raises SubmissionRefused or OSError.
        """
        queue = self.user_queue
        submitted = submit(self.connection, run_dir, files, request, queue.clock, step.log.warning, patience=self.patience)
        which = f"Slurm job {submitted.job_id} ({request.job_name})"
        done = f"reattached to {which}" if step.reattached else f"submitted {which} to {request.partitions_text}"
        step.log.info(f"[rayslurm] {done} on {self.connection.place}")
        return self.slurm_job(request, submitted, run_dir, step)

    def interpreter_for(self, plan: Plan, step: Step) -> Interpreter:
        """Send the environment if the cluster lacks it; returns the environment's Python.

        Raises StartError if the environment cannot be sent, or the Python cannot run the plan.
        """
        queues = [each.queue for each in self.components] or [self.queue] if self.detect_platform else []
        environment = send_environment(self.connection, self.environment, str(self.layout.base), step.log, queues)
        return check_environment_on(self.connection, environment, plan.ray, plan.uses_pipes, str(self.layout.environments))


@dataclass(frozen=True, kw_only=True)
class SubmittedBackend(JobBackend):
    """Follows the Slurm job of a run that `ComputeResource.submit` has submitted; `start` only finds this job."""

    handle: RunHandle

    def check(self, plan: Plan) -> None: ...

    def example(self, plan: Plan) -> str:
        raise NotImplementedError

    def start(self, plan: Plan, run_dir: str, context: PipesContextData, step: Step, register: Register) -> BatchJob:  # noqa: ARG002
        handle = self.handle
        queue = self.queue.model_copy(update={"requeue": handle.requeue})
        request = make_request(queue, plan.footprint, job_name=handle.job_name, comment="")
        shared = self.user_queue
        submitted = SubmittedJob(handle.job_id, handle.submitted_at or shared.clock.now())
        job = self.slurm_job(request, submitted, run_dir, step, ends_idle_sessions=False)
        step.log.info(f"[rayslurm] reattached to Slurm job {handle.job_id} ({handle.job_name}) on {self.connection.place}")
        running = BatchJob(job, handle.cluster_id, run_dir, step)
        register(running)
        return running


class BatchBackend(JobBackend):
    """Runs each payload in a Slurm job of the payload's own."""

    def check(self, plan: Plan) -> None:
        self._request(plan, job_name="rayslurm", comment="")
        if not self.components:
            check_min_nodes(plan.ray, self.queue)
        check_paths(self.slurm, self.environment, plan)

    def start(self, plan: Plan, run_dir: str, context: PipesContextData, step: Step, register: Register) -> BatchJob:
        packed, request, request_files = self._prepare(plan, run_dir, step, submits=not step.reattached)
        plan = packed.plan
        files = {**run_files(plan, context, step), **request_files, CANCEL: b"", EXIT: b"", FIRST_OWNER: b"", **step.files}
        with self.cancel_on_error(request, step):
            job = self.submit_job(run_dir, files, request, step)
            running = BatchJob(job, f"{CLUSTER}{plan.payload.nonce}", run_dir, step)
            register(running)
        return running

    def can_reattach(self, plan: Plan, run_dir: str, step: Step) -> bool:
        _, request, files = self._prepare(plan, run_dir, step)

        def job_of(_: object) -> str | None:
            return job_in(self.user_queue.recent()) or job_in(
                ask_patiently(lambda: fetch_queue(self.connection), self.patience, True, step.log.warning)
            )

        def job_in(queue: QueueSnapshot | None) -> str | None:
            rows = queue.named(request.job_name) if queue is not None else ()
            return next((str(row.job_id) for row in rows if row.is_leader and row.state not in TERMINAL), None)

        nonce = plan.payload.nonce
        job_id = reattachable_job(self.connection, run_dir, nonce, files[REQUEST_FILE], job_of, step.log, request.queue.requeue)
        if job_id is not None:
            # An attempt that was killed may not have written the id, without which `submit` would submit again.
            self.connection.write(os.path.join(run_dir, JOB_ID), job_id.encode() + b"\n")
        return job_id is not None

    def end_abandoned(self, run_dir: str, grace_period: float) -> None:
        job_id = self.connection.read(os.path.join(run_dir, JOB_ID), 0, 64).decode().strip()
        write_cancel_request(self.connection, run_dir, now=False)
        if not wait_until_gone(self.connection, int(job_id), grace_period):
            sentence = f"Slurm job {job_id} of an earlier attempt is cancelled, and Slurm has not confirmed its end"
            raise StartError(FailureKind.SUBMISSION, sentence, retry=True)

    def _prepare(
        self, plan: Plan, run_dir: str, step: Step, submits: bool = False
    ) -> tuple[PayloadFiles, JobRequest, dict[str, bytes]]:
        """Send a plan's files to the cluster, and return what the submission of the job needs. Submits nothing.

        Returns three values: the plan's files, with their paths on the cluster; the job request; and the contents of the files
        that the job itself needs in the run directory, by file name. If `submits` is True, a partition replaces "auto" in the job
        request, and the job request excludes nodes that failed a health check.
        """
        packed, interpreter, runtime = self.deliver(plan, step)
        plan = packed.plan
        name = job_name(step.step_key, plan.payload.nonce)
        request = self._request(plan, job_name=name, comment=job_comment(step.run_id, step.step_key, step.partition_key))
        spec = runtime_spec(f"{CLUSTER}{plan.payload.nonce}", plan, request)
        lasting = replace(spec, control_key="", control_ports=[])
        asked = job_script(replace(request, comment=""), interpreter, runtime, run_dir, self.slurm)
        if submits:
            request = self.placed(request, step)
        files = {
            RUNTIME: to_json(spec).encode("utf-8"),
            JOB_SCRIPT: job_script(request, interpreter, runtime, run_dir, self.slurm).encode("utf-8", "surrogateescape"),
            REQUEST_FILE: fingerprint(to_json(plan.payload), to_json(lasting), asked),
        }
        return packed, request, files

    def exclusion_for_plan(self, plan: Plan) -> Exclusion:
        return self.exclusion(self._request(plan, job_name="rayslurm", comment=""))

    def example(self, plan: Plan) -> str:
        request = self._request(plan, job_name=job_name("STEP", plan.payload.nonce), comment=job_comment("RUN", "STEP", None))
        return example_script(request, self.slurm)

    def _request(self, plan: Plan, *, job_name: str, comment: str) -> JobRequest:
        if self.components:
            return request_for(self.components, job_name=job_name, comment=comment)
        return make_request(self.queue, plan.footprint, job_name=job_name, comment=comment)


def data_dir_of(connection: Connection, layout: Layout, plan: Plan) -> str:
    """Returns the absolute path of the payload's data directory on the cluster."""
    return absolute(connection, plan.payload.data_dir) if plan.payload.data_dir else str(layout.data)


def check_min_nodes(ray: RaySpec | None, queue: SlurmQueueConfig) -> None:
    """Raise ValueError if the launcher's `min_nodes` is more than the number of nodes that the Ray cluster will have.

    Does nothing if `ray` is None.
    """
    if ray is not None and ray.min_nodes is not None and ray.min_nodes > nodes_expected(ray, queue.num_nodes):
        raise ValueError(
            f"RayLauncher.min_nodes={ray.min_nodes} is more than the cluster will have: "
            f"{nodes_expected(ray, queue.num_nodes)} nodes by SlurmQueueConfig.num_nodes={queue.num_nodes} and "
            f"max_workers={ray.max_workers}"
        )


def check_paths(slurm: SlurmResource, environment: Environment, plan: Plan) -> None:
    """Raise ValueError if the path of the environment, of `remote_base` or of `data_dir` cannot be used on the cluster.

    A path must not contain a variable. `remote_base` and `data_dir` must be absolute or begin with "~/". If Dagster reaches the
    cluster by SSH, the same holds for the path of the environment, and Dagster's own Python cannot be the environment. The
    message names the configuration field.
    """
    path_on_cluster(environment, over_ssh=slurm.ssh is not None)
    for name, path in (("remote_base", slurm.remote_base), ("data_dir", plan.payload.data_dir)):
        if path is None:
            continue
        check_no_variable(path, name)
        if not is_rooted(path):
            raise ValueError(f'{name}: {path!r} is relative; write an absolute path, or one that begins with "~/"')


def cluster_nonce(cluster_id: str) -> str | None:
    """Returns the nonce in a Ray cluster's id: "0123456789ab" for "slurm-0123456789ab". None if `cluster_id` has another form."""
    match = re.fullmatch(rf"{CLUSTER}([0-9a-f]{{12}})", cluster_id)
    return match[1] if match else None


def cancel_cluster(slurm: SlurmResource, cluster_id: str) -> bool:
    """Cancel the Slurm jobs of the Ray cluster `cluster_id`, and wait for their ends; returns False if there is no such job.

    Raises StartError if Slurm does not confirm the end of a job, and OSError if Slurm does not answer.
    """
    nonce = cluster_nonce(cluster_id)
    if nonce is None:
        return False
    commands = connection_to(slurm.ssh)
    jobs = live_jobs(commands, nonce)
    for job_id in jobs:
        if not wait_until_gone(commands, job_id):
            raise StartError(FailureKind.RUNTIME, f"Slurm does not confirm the end of job {job_id}; run `scancel {job_id}`")
    return bool(jobs)


def live_jobs(connection: Connection, nonce: str) -> list[int]:
    """Returns the ids of a payload's jobs and job arrays that have not ended, from Slurm's queue.

    `nonce` is the random text with which the names of the payload's jobs end. Raises OSError if Slurm does not answer.
    """
    own = [row for row in fetch_queue(connection).rows if is_job_of(row.name, nonce)]
    alive = [row for row in own if row.is_leader and row.state not in TERMINAL]
    return list(dict.fromkeys((elements_of(row.label) or (row.job_id, []))[0] for row in alive))


def runtime_spec(cluster_id: str, plan: Plan, request: JobRequest) -> RuntimeSpec:
    """Returns the content of `runtime.json`, the settings with which the runtime of the job `request` starts.

    `cluster_id` is the id that the Ray cluster gets. Each call makes a new secret key for requests to the runtime.
    """
    signal_name, before = split_signal(request.queue.signal_before_timeout)
    components = component_specs(request)
    return RuntimeSpec(
        cluster_id,
        plan.ray,
        control_key=secrets.token_hex(32),
        control_ports=control_ports(plan.ray.port_range if plan.ray is not None else None),
        # Each component has its own CPUs and GPUs.
        asked_cpus=None if components else request.queue.cpus_per_node,
        asked_gpus=None if components else request.queue.gpus_per_node,
        requeue=request.queue.requeue,
        warn_before_limit=before,
        warn_signal=signal_name,
        worker_env=shared_variables(plan.payload),
        components=components,
    )


def job_script(
    request: JobRequest, interpreter: Interpreter, runtime: str, run_dir: str, slurm: SlurmResource, role: str = "node"
) -> str:
    """Returns the text of the batch script that starts the runtime on all nodes of the job of `request`.

    `runtime` is the path of the runtime's zipapp on the cluster, and `run_dir` the path of the run directory there. `role` is the
    runtime's subcommand, such as "node".
    """
    options = (*interpreter.srun, f"--container-workdir={run_dir}") if interpreter.srun else ()
    return render_script(request, interpreter.start("-I", runtime, role, run_dir), run_dir, slurm.site, options)


def example_script(request: JobRequest, slurm: SlurmResource, role: str = "node", directory: str = "runs/RUN_DIR") -> str:
    """Returns the batch script of a job request for display, with words in capitals for values known only at submission.

    `role` is the runtime's subcommand, and `directory` the run directory's path below the base directory.
    """
    base = slurm.remote_base
    parts = [
        replace(each, queue=each.queue.having(partition="PARTITION") if each.queue.partition == AUTO else each.queue)
        for each in request.components
    ]
    request = replace(parts[0], further_components=tuple(parts[1:]))
    python, runtime = Interpreter("ENVIRONMENT/bin/python"), f"{base}/runtime/RUNTIME.pyz"
    return job_script(request, python, runtime, f"{base}/{directory}", slurm, role)
