"""A payload for each component of a heterogeneous Slurm job: one job, one `srun`, and a run directory for each."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from dagster_pipes import PipesContextData

from ..components import Component, component_specs, request_for
from ..connections.base import Connection
from ..environments import Interpreter
from ..follow import Cadence, Evidence
from ..runtime.channel import derive
from ..runtime.record import CANCEL, COMPONENTS, EXIT, RUNTIME, component_dir
from ..runtime.spec import RuntimeSpec, to_json
from ..slurm.commands import slurm_commands
from ..slurm.log import failed_tasks
from ..slurm.request import JobRequest, job_comment, job_name
from ..slurm.submit import JOB_SCRIPT
from .base import Attempts, Hold, Plans, Step
from .batch import CLUSTER, BatchBackend, check_paths, data_dir_of, job_script, runtime_spec
from .batch_job import BatchJob
from .cargo import base_errors, deliver, needs_of, pack
from .rundir import Layout, run_files
from .slurm_job import SlurmJob
from .together import check_components, meetings

_ROLE = "part"


@dataclass(frozen=True)
class BatchTogether:
    """Runs the payloads of components in one heterogeneous job.

    Args:
        batch: how jobs are submitted.
        components: in the job's order.
    """

    batch: BatchBackend
    components: tuple[Component, ...]

    @property
    def connection(self) -> Connection:
        return self.batch.connection

    @property
    def layout(self) -> Layout:
        return self.batch.layout

    @property
    def cadence(self) -> Cadence:
        return self.batch.cadence

    def check(self, plans: Plans) -> None:
        check_components(self.components, plans)
        for each in self.components:
            check_paths(self.batch.slurm, self.batch.environment, plans[each.component_id])

    def sweep(self, retention_days: float) -> None:
        self.batch.sweep(retention_days)

    def start(self, plans: Plans, run_dir: str, context: PipesContextData, step: Step, hold: Hold) -> Attempts:
        base, connection = str(self.layout.base), self.connection
        cargos = {component: pack(plan, base, data_dir_of(connection, self.layout, plan)) for component, plan in plans.items()}
        for cargo in cargos.values():
            cargo.warn(step.log)
        with base_errors(base):
            # One environment, which must be good for each of them.
            interpreters = [self.batch.interpreter_for(plan) for plan in plans.values()]
            runtimes = [deliver(connection, base, cargo, step.log) for cargo in cargos.values()]
        needs = needs_of(connection, base, list(cargos.values()), step.log)
        plans = {component: cargo.plan for component, cargo in cargos.items()}
        nonce = next(iter(plans.values())).payload.nonce
        request = request_for(
            self.components,
            job_name=job_name(step.step_key, nonce),
            comment=job_comment(step.run_id, step.step_key, step.partition_key),
        )
        cluster_id = f"{CLUSTER}{nonce}"
        script = job_script(request, interpreters[0], runtimes[0], run_dir, self.batch.slurm, _ROLE)
        files = {
            RUNTIME: to_json(RuntimeSpec(cluster_id, components=component_specs(request))).encode("utf-8"),
            JOB_SCRIPT: script.encode("utf-8", "surrogateescape"),
            EXIT: b"",
        }
        specs = job_specs(cluster_id, plans, request, self.components)
        for component, plan in plans.items():
            own = {**run_files(plan, context), RUNTIME: to_json(specs[component]).encode("utf-8"), CANCEL: b""}
            files.update({f"{COMPONENTS}/{component}/{name}": content for name, content in own.items()})

        def attempts_at(job: SlurmJob) -> Attempts:
            commands, shared = slurm_commands(connection), _Shared()
            views = {each: PartJob(job, commands, cluster_id, component_dir(run_dir, each), shared) for each in plans}
            for view in views.values():
                hold(view)
            return views

        return self.batch.submit_job(run_dir, files, request, step, attempts_at, needs)

    def example(self, plans: Plans) -> str:
        nonce = next(iter(plans.values())).payload.nonce
        request = request_for(self.components, job_name=job_name("STEP", nonce), comment=job_comment("RUN", "STEP", None))
        base = self.batch.slurm.remote_base
        python, runtime = Interpreter("ENVIRONMENT/bin/python"), f"{base}/runtime/RUNTIME.pyz"
        return job_script(request, python, runtime, f"{base}/runs/RUN_DIR", self.batch.slurm, _ROLE)


def job_specs(cluster_id: str, plans: Plans, request: JobRequest, components: Sequence[Component]) -> dict[str, RuntimeSpec]:
    """The start records of a job's runtimes, as each of them takes its component for a job of its own.

    Their clusters share a token, so that a payload may reach another component's; the runtimes of one component take no
    other's for theirs.
    """
    secret = secrets.token_hex(32)
    meeting = meetings(plans, derive(secret, "meeting"))
    specs = {}
    for part, each in zip(request.parts, components, strict=True):
        component = each.component_id
        alone = replace(part, component_id=None, others=())
        specs[component] = replace(
            runtime_spec(cluster_id, plans[component], alone, components[0].queue),
            control_key=derive(secret, "component:" + component),
            token_key=derive(secret, "token"),
            meeting=meeting[component],
        )
    return specs


@dataclass
class _Shared:
    """What the views of one job know together.

    Attributes:
        starts: when the records of its components started, by run directory.
        explained: what Slurm and the job's logs tell, once they were asked.
    """

    starts: dict[str, float] = field(default_factory=dict)
    explained: Evidence | None = None


class PartJob(BatchJob):
    """One component's payload in a job that others share.

    Args:
        job: the job of all of them.
        commands: runs commands there, and reaches the files.
        cluster_id: name of the Ray clusters.
        directory: the component's run directory.
        shared: what is known of the whole job.
    """

    def __init__(self, job: SlurmJob, commands: Connection, cluster_id: str, directory: str, shared: _Shared) -> None:
        super().__init__(job, commands, cluster_id, directory)
        self._shared = shared

    def _give(self, now: bool) -> None:
        # Another one's record may have started since this one was looked at.
        self._started = self._started or (bool(self._shared.starts) and self._job.view.kind != "pending")
        super()._give(now)

    def explain(self, evidence: Evidence) -> None:
        found = self._shared.explained
        if found is None:
            # Of none of the components: what is in their own records is theirs alone.
            found = self._shared.explained = Evidence()
            super().explain(found)
            # The first one to end took the others along; the host among them, with an exit code of its own.
            node, _, how = next(iter(failed_tasks(found.runtime_log)), (None, 0, ""))
            if node is not None and f"on node {node} " not in (found.culprit or ""):
                found.culprit = f"the runtime on node {node} ended ({how})"
        evidence.job, evidence.runtime_log, evidence.culprit = found.job, found.runtime_log, found.culprit
        evidence.tails.update({name: text for name, text in found.tails.items() if name not in evidence.tails})

    def _started_at(self, evidence: Evidence) -> float | None:
        """The job is what has started: a component that is a moment late must not have all of it cancelled."""
        starts = self._shared.starts
        if evidence.started_at is not None:
            starts[self._directory] = evidence.started_at
        return max(starts.values(), default=None)
