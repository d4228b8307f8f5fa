"""Slurm mode: the runtime in a batch job of its own, on all nodes of the allocation."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from dagster_pipes import PipesContextData

from ..components import Component, component_specs, request_for
from ..environments import Environment, Interpreter, path_on_cluster
from ..environments.check import check_environment_on
from ..errors import FailureKind, StartError
from ..follow import Cadence
from ..interrupts import deferred_interrupts
from ..plan import Plan
from ..runtime.node.ports import control_ports
from ..runtime.payload.environment import shared_variables
from ..runtime.protocol.record import CANCEL, EXIT, PAYLOAD, RUNTIME
from ..runtime.protocol.spec import RuntimeSpec, to_json
from ..runtime.ray.node_table import nodes_expected
from ..slurm.cancel import cancel_named, wait_until_gone
from ..slurm.commands import slurm_commands
from ..slurm.config import SlurmQueueConfig, SlurmResource, split_signal
from ..slurm.queue import fetch_queue, shared_queue
from ..slurm.request import JobRequest, is_job_of, job_comment, job_name, make_request
from ..slurm.script import render_script
from ..slurm.states import TERMINAL
from ..slurm.submit import JOB_ID, JOB_SCRIPT, RequiredFiles, SubmissionRefused, submit
from ..ssh.base import Connection, check_no_variable, expand_home, is_rooted
from ..ssh.pool import connection_to
from . import reattach
from .base import Register, Step
from .batch_job import BatchJob
from .ownership import FIRST_OWNER
from .payload_files import PayloadFiles, base_errors, deliver, needs_of, pack
from .remote_cleanup import sweep_remote
from .run_dir import Layout, run_files
from .sessions.idle import IdleSessions
from .slurm_job import SlurmJob

T = TypeVar("T")

_CADENCE = Cadence(busy=0.1, idle=3.0, waiting=15.0)
CLUSTER = "slurm-"
"""What the name of a cluster begins with; the rest is what the name of its job ends with."""


@dataclass(frozen=True)
class BatchBackend:
    """Runs each payload in a Slurm job of its own.

    Args:
        slurm: the cluster.
        queue: what to ask it for.
        environment: the Python environment there.
        queue_timeout: seconds after which a job that still waits is given up; None waits for ever.
        patience: seconds for which a job that may have been submitted can be out of reach.
        components: of a heterogeneous job, in its order, each with a queue of its own; none for any other job.
    """

    slurm: SlurmResource
    queue: SlurmQueueConfig
    environment: Environment
    queue_timeout: float | None
    patience: float
    components: tuple[Component, ...] = ()
    cadence: Cadence = _CADENCE

    @cached_property
    def connection(self) -> Connection:
        return connection_to(self.slurm.ssh)

    @cached_property
    def layout(self) -> Layout:
        return Layout(Path(absolute(self.connection, self.slurm.remote_base)))

    def check(self, plan: Plan) -> None:
        self._request(plan, job_name="rayslurm", comment="")
        if plan.ray is not None and plan.ray.min_nodes is not None and not self.components:
            expected = nodes_expected(plan.ray, self.queue.num_nodes)
            if plan.ray.min_nodes > expected:
                raise ValueError(
                    f"RayLauncher.min_nodes={plan.ray.min_nodes} is more than the cluster will have: {expected} nodes by "
                    f"SlurmQueueConfig.num_nodes={self.queue.num_nodes} and max_workers={plan.ray.max_workers}"
                )
        check_paths(self.slurm, self.environment, plan)

    def sweep(self, retention_days: float) -> None:
        sweep_in_background(self.connection, str(self.layout.base), retention_days)

    def start(self, plan: Plan, run_dir: str, context: PipesContextData, step: Step, hold: Register) -> BatchJob:
        cargo, request, asked = self._asked(plan, run_dir, step)
        plan = cargo.plan
        files = {**run_files(plan, context), **asked, CANCEL: b"", EXIT: b"", FIRST_OWNER: b""}
        commands, cluster_id = slurm_commands(self.connection), f"{CLUSTER}{plan.payload.nonce}"

        def attempt_at(job: SlurmJob) -> BatchJob:
            attempt = BatchJob(job, commands, cluster_id, step=step)
            hold(attempt)
            return attempt

        needs = needs_of(self.connection, str(self.layout.base), [cargo], step.log)
        return self.submit_job(run_dir, files, request, step, attempt_at, needs)

    def can_reattach(self, plan: Plan, run_dir: str, step: Step) -> bool:
        _, request, asked = self._asked(plan, run_dir, step)
        commands = slurm_commands(self.connection)

        def job_of(_: object) -> str | None:
            rows = fetch_queue(commands).named(request.job_name)
            return next((str(row.job_id) for row in rows if row.is_leader and row.state not in TERMINAL), None)

        job_id = reattach.job_with(self.connection, run_dir, plan.payload.nonce, asked, job_of, step.log)
        if job_id is not None:
            # Whoever submitted it may have been killed before that was written; with it nothing is submitted again.
            commands.write(os.path.join(run_dir, JOB_ID), job_id.encode() + b"\n")
        return job_id is not None

    def _asked(self, plan: Plan, run_dir: str, step: Step) -> tuple[PayloadFiles, JobRequest, dict[str, bytes]]:
        """What is submitted for a plan: its files, the request, and the files that say what is asked for.

        Raises:
            StartError: it cannot be had.
            OSError: the cluster cannot be reached.
        """
        base = str(self.layout.base)
        cargo = pack(plan, base, data_dir_of(self.connection, self.layout, plan))
        cargo.warn(step.log)
        with base_errors(base):
            interpreter = self.interpreter_for(plan)
            runtime = deliver(self.connection, base, cargo, step.log)
        plan = cargo.plan
        name = job_name(step.step_key, plan.payload.nonce)
        comment = job_comment(step.run_id, step.step_key, step.partition_key)
        request = self._request(plan, job_name=name, comment=comment)
        spec = runtime_spec(f"{CLUSTER}{plan.payload.nonce}", plan, request, self._leading_queue)
        return (
            cargo,
            request,
            {
                PAYLOAD: to_json(plan.payload).encode("utf-8"),
                RUNTIME: to_json(spec).encode("utf-8"),
                JOB_SCRIPT: job_script(request, interpreter, runtime, run_dir, self.slurm).encode("utf-8", "surrogateescape"),
            },
        )

    def example(self, plan: Plan) -> str:
        request = self._request(plan, job_name=job_name("STEP", plan.payload.nonce), comment=job_comment("RUN", "STEP", None))
        python, base = Interpreter("ENVIRONMENT/bin/python"), self.slurm.remote_base
        return job_script(request, python, f"{base}/runtime/RUNTIME.pyz", f"{base}/runs/RUN_DIR", self.slurm)

    def submit_job(
        self,
        run_dir: str,
        files: Mapping[str, bytes],
        request: JobRequest,
        step: Step,
        attempt_at: Callable[[SlurmJob], T],
        needs: RequiredFiles,
    ) -> T:
        """Submit a job, or make sure that there is none; or go on with the one that the run directory names.

        Args:
            run_dir: its directory, not there yet.
            files: what goes into it.
            request: what its script asks for.
            step: who asks.
            attempt_at: makes of the job what is returned, and has it held.
            needs: what must be on the cluster before.

        Raises:
            StartError: the job is not taken.
            OSError: the cluster cannot be reached.
        """
        commands = slurm_commands(self.connection)
        queue = shared_queue(commands, str(self.layout.queue), self.slurm.poll_interval)
        try:
            submitted = submit(
                commands, run_dir, files, request, queue.clock, step.log.warning, patience=self.patience, needs=needs
            )
            job = SlurmJob(
                commands=commands,
                queue=queue,
                request=request,
                submitted=submitted,
                directory=run_dir,
                queue_timeout=self.queue_timeout,
                over_ssh=self.slurm.ssh is not None,
                log=step.log,
                idle_sessions=IdleSessions(self.connection, str(self.layout.base), step.log),
            )
            attempt = attempt_at(job)
        except SubmissionRefused:
            raise
        except BaseException:
            # Interrupted or cut off: whether Slurm has taken the job is not known, so it is cancelled by its name.
            with deferred_interrupts():
                cancel_named(commands, request.job_name, step.log)
            raise
        which, place = f"Slurm job {submitted.job_id} ({request.job_name})", self.connection.place
        if step.reattached:
            step.log.info(f"[rayslurm] going on with {which} on {place}")
        else:
            step.log.info(f"[rayslurm] submitted {which} to {request.partitions_text} on {place}")
        return attempt

    @property
    def _leading_queue(self) -> SlurmQueueConfig:
        """The queue that says what is the whole job's, such as its limit."""
        return self.components[0].queue if self.components else self.queue

    def _request(self, plan: Plan, *, job_name: str, comment: str) -> JobRequest:
        if self.components:
            return request_for(self.components, job_name=job_name, comment=comment)
        return make_request(self.queue, plan.footprint, job_name=job_name, comment=comment)

    def interpreter_for(self, plan: Plan) -> Interpreter:
        kept = str(self.layout.environments)
        return check_environment_on(self.connection, self.environment, plan.ray, plan.uses_pipes, kept)


def absolute(connection: Connection, path: str) -> str:
    """An absolute path over there, whose user may have begun it with a tilde."""
    return os.path.normpath(expand_home(connection, path))


def data_dir_of(connection: Connection, layout: Layout, plan: Plan) -> str:
    """The directory there that payloads share."""
    return absolute(connection, plan.payload.data_dir) if plan.payload.data_dir else str(layout.data)


def check_paths(slurm: SlurmResource, environment: Environment, plan: Plan) -> None:
    """Refuse paths that mean nothing on the cluster.

    Raises:
        ValueError: naming the field.
    """
    path_on_cluster(environment, over_ssh=slurm.ssh is not None)
    for name, path in (("remote_base", slurm.remote_base), ("data_dir", plan.payload.data_dir)):
        if path is not None:
            check_no_variable(path, name)
        if path is not None and not is_rooted(path):
            raise ValueError(f'{name}: {path!r} is relative; write an absolute path, or one that begins with "~/"')


def sweep_in_background(connection: Connection, base: str, retention_days: float) -> None:
    """Remove what nobody touched for so many days; it takes its time on a cluster's file system, and nobody waits for it."""

    def work() -> None:
        with contextlib.suppress(OSError):  # Another one will come to it.
            sweep_remote(slurm_commands(connection), base, retention_days)

    threading.Thread(target=work, name="rayslurm-sweep", daemon=True).start()


def nonce_of_cluster(cluster_id: str) -> str | None:
    """The nonce in a cluster's name, with which the name of its job ends; None if this is not the name of a cluster."""
    match = re.fullmatch(rf"{CLUSTER}([0-9a-f]{{12}})", cluster_id)
    return match[1] if match else None


def cancel_cluster(slurm: SlurmResource, cluster_id: str) -> bool:
    """Cancel the job of a cluster; False if there is none.

    Raises:
        StartError: Slurm does not confirm its end.
        OSError: Slurm cannot be asked.
    """
    nonce = nonce_of_cluster(cluster_id)
    if nonce is None:
        return False
    commands = slurm_commands(connection_to(slurm.ssh))
    own = [row for row in fetch_queue(commands).rows if is_job_of(row.name, nonce)]
    jobs = [row.job_id for row in own if row.is_leader and row.state not in TERMINAL]
    for job_id in jobs:
        if not wait_until_gone(commands, job_id):
            raise StartError(FailureKind.RUNTIME, f"Slurm does not confirm the end of job {job_id}; run `scancel {job_id}`")
    return bool(jobs)


def runtime_spec(cluster_id: str, plan: Plan, request: JobRequest, queue: SlurmQueueConfig) -> RuntimeSpec:
    """The start record of a job's runtime."""
    signal_name, before = split_signal(queue.signal_before_timeout)
    components = component_specs(request)
    return RuntimeSpec(
        cluster_id,
        plan.ray,
        control_key=secrets.token_hex(32),
        control_ports=control_ports(plan.ray.port_range if plan.ray is not None else None),
        # What is asked of a component's nodes stands with the component.
        asked_cpus=None if components else request.cpus_per_node,
        asked_gpus=None if components else request.gpus_per_node,
        requeue=request.requeue,
        warn_before_limit=before,
        warn_signal=signal_name,
        worker_env=shared_variables(plan.payload),
        components=components,
    )


def job_script(
    request: JobRequest, interpreter: Interpreter, runtime: str, run_dir: str, slurm: SlurmResource, role: str = "node"
) -> str:
    """The batch script that starts the runtime on all nodes, in a role of its command line."""
    return render_script(request, interpreter.start("-I", runtime, role, run_dir), run_dir, slurm.site)
