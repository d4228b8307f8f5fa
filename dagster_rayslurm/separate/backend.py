"""Backends of the separate topology: local processes, or one heterogeneous job.

A payload for each component, started together: what their runtimes are told, and local mode, where all are on this machine.

A payload for each component of a heterogeneous Slurm job: one job, one `srun`, and a run directory for each.
"""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from dagster_pipes import PipesContextData

from ..backends.base import Plans, Register, RunningPayload, RunningPayloads, Step
from ..backends.batch import CLUSTER, BatchBackend, check_paths, data_dir_of, job_script, runtime_spec
from ..backends.batch_job import BatchJob
from ..backends.local import LOCAL_CADENCE, OwnRuntime
from ..backends.local_process import runtime_command
from ..backends.payload_files import base_errors, deliver, needs_of, pack
from ..backends.run_dir import Layout, run_files, write_run_dir, write_runtime_spec
from ..backends.slurm_job import SlurmJob
from ..components import Component, component_specs, request_for
from ..environments import Interpreter
from ..follow import Cadence, Evidence
from ..plan import Plan
from ..runtime.node.ports import control_ports
from ..runtime.payload.environment import shared_variables
from ..runtime.protocol.record import CANCEL, COMPONENTS, EXIT, RUNTIME, component_dir
from ..runtime.protocol.requests import Operation
from ..runtime.protocol.rpc import derive_key
from ..runtime.protocol.spec import BarrierSpec, ComponentSpec, RuntimeSpec, to_json
from ..runtime.ray.node_table import nodes_expected
from ..slurm.commands import slurm_commands
from ..slurm.job_log import failed_tasks
from ..slurm.request import JobRequest, job_comment, job_name
from ..slurm.states import JobPhase
from ..slurm.submit import JOB_SCRIPT
from ..ssh.base import Connection
from ..ssh.local import LocalConnection

_MARGIN = 30.0
"""Seconds beyond the deadline of the slowest cluster until the meeting has failed: a cluster that is late says so itself."""
_WITHOUT_RAY = 300.0
"""Seconds in which runtimes without Ray shall meet."""


def check_components(components: Sequence[Component], plans: Plans) -> None:
    """Refuse components that no job can have.

    Args:
        components: in the job's order.
        plans: by component.

    Raises:
        ValueError: naming the component and the field.
    """
    request_for(components, job_name="rayslurm", comment="")
    for each in components:
        ray = plans[each.component_id].ray
        if ray is not None and ray.min_nodes is not None and ray.min_nodes > nodes_expected(ray, each.queue.num_nodes):
            raise ValueError(
                f"component {each.component_id!r}: RayLauncher.min_nodes={ray.min_nodes} is more than its cluster will have: "
                f"{nodes_expected(ray, each.queue.num_nodes)} nodes by SlurmQueueConfig.num_nodes={each.queue.num_nodes} and "
                f"max_workers={ray.max_workers}"
            )


def barrier_specs(plans: Plans, secret: str) -> dict[str, BarrierSpec]:
    """How the runtimes of components meet.

    Args:
        plans: by component, in the job's order; the first one's runtime is the host.
        secret: what only they know, hex.
    """
    first = next(iter(plans.values())).ray
    ports = control_ports(first.port_range if first is not None else None)
    if first is not None and first.port_range:
        ports = [port - 1 for port in ports]  # The host may listen for the other nodes of its own component, too.
    deadlines = [plan.ray.startup_timeout for plan in plans.values() if plan.ray is not None]
    return {
        component: BarrierSpec(
            component,
            list(plans),
            key=secret,
            ports=ports,
            hosts=[first.node_ip_address] if first is not None and first.node_ip_address else [],
            patience=max(deadlines, default=_WITHOUT_RAY) + _MARGIN,
        )
        for component in plans
    }


def local_specs(cluster_id: str, plans: Plans, components: Sequence[Component]) -> dict[str, RuntimeSpec]:
    """The start records of runtimes on this machine, each with what all of them ask of it."""
    meeting = barrier_specs(plans, secrets.token_hex(32))
    token = secrets.token_hex(32)
    wants = [_wants(each, plans[each.component_id]) for each in components]
    return {
        component: RuntimeSpec(
            f"{cluster_id}-{component}",
            plan.ray,
            token_key=token,
            worker_env=shared_variables(plan.payload),
            components=wants,
            meeting=meeting[component],
        )
        for component, plan in plans.items()
    }


def _wants(component: Component, plan: Plan) -> ComponentSpec:
    """What a component asks of this machine: what its launcher says, else its queue."""
    ray = plan.ray
    cpus = component.queue.cpus_per_node if ray is None or ray.num_cpus is None else ray.num_cpus
    gpus = component.queue.gpus_per_node if ray is None or ray.num_gpus is None else ray.num_gpus
    return ComponentSpec(component.component_id, 1, cpus, gpus)


class _Part(OwnRuntime):
    """The runtime of one of several components; one that is gone before it met the others is missed by this process first.

    Args:
        layout: where run directories go.
        interpreter: the Python that runs it.
        run_dir: the component's run directory.
        cluster_id: name of its cluster.
        component: its name.
        parts: those of all components.
    """

    def __init__(
        self, layout: Layout, interpreter: Interpreter, run_dir: str, cluster_id: str, component: str, parts: list[_Part]
    ) -> None:
        super().__init__(layout, interpreter, run_dir, cluster_id)
        self._component = component
        self._parts = parts
        self._evidence = Evidence()
        self._forsaken = False

    def poll(self, evidence: Evidence) -> str | None:
        self._evidence = evidence
        gone = [each._component for each in self._parts if each._evidence.runtime_exit and each._evidence.end is None]
        if gone and not self._forsaken:
            self._forsaken = True
            self._request(op=Operation.CANCEL, gone=gone[0])
        return super().poll(evidence)


@dataclass(frozen=True)
class SeparateLocalBackend:
    """Runs the payloads of components on this machine, each below a runtime of its own.

    Args:
        layout: where run directories go.
        interpreter: the Python that runs them.
        components: in the order that a job would have them.
        simulate: whether CPUs that this machine lacks are simulated, as its GPUs always are.
    """

    layout: Layout
    interpreter: Interpreter
    components: tuple[Component, ...]
    simulate: bool = False
    connection: LocalConnection = field(default_factory=LocalConnection)
    cadence: Cadence = LOCAL_CADENCE

    def check(self, plans: Plans) -> None:
        # What this machine does not have is simulated; a mistake shows all the same, before it comes to a cluster.
        check_components(self.components, plans)

    def sweep(self, retention_days: float) -> None:  # noqa: ARG002
        return  # This machine is swept in every mode.

    def start(self, plans: Plans, run_dir: str, context: PipesContextData, step: Step, hold: Register) -> RunningPayloads:  # noqa: ARG002
        plans = {name: replace(plan, ray=plan.ray and replace(plan.ray, simulate=self.simulate)) for name, plan in plans.items()}
        nonce = next(iter(plans.values())).payload.nonce
        specs = local_specs(f"local-{nonce}", plans, self.components)
        for component, plan in plans.items():
            directory = component_dir(run_dir, component)
            write_run_dir(self.connection, directory, run_files(plan, context))
            write_runtime_spec(self.connection, directory, specs[component])
        attempts: dict[str, RunningPayload] = {}
        parts: list[_Part] = []
        for component in plans:
            directory = component_dir(run_dir, component)
            part = _Part(self.layout, self.interpreter, directory, specs[component].cluster_id, component, parts)
            attempts[component] = part
            parts.append(part)
            hold(part)
        return attempts

    def example(self, plans: Plans) -> str:
        run_dir = str(self.layout.runs / "RUN_DIR")
        shown = []
        for component, plan in plans.items():
            directory = component_dir(run_dir, component)
            command = runtime_command(self.layout, self.interpreter, "run", directory)
            shown.append(f"{shlex.join(command)}\n\n# {directory}/payload.json\n{to_json(plan.payload)}\n")
        return "\n".join(shown)


_ROLE = "part"


@dataclass(frozen=True)
class SeparateBatchBackend:
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

    def start(self, plans: Plans, run_dir: str, context: PipesContextData, step: Step, hold: Register) -> RunningPayloads:
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

        def attempts_at(job: SlurmJob) -> RunningPayloads:
            commands, shared = slurm_commands(connection), SharedJobState()
            views = {each: ComponentJob(job, commands, cluster_id, component_dir(run_dir, each), shared) for each in plans}
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
    meeting = barrier_specs(plans, derive_key(secret, "meeting"))
    specs = {}
    for part, each in zip(request.components, components, strict=True):
        component = each.component_id
        alone = replace(part, component_id=None, further_components=())
        specs[component] = replace(
            runtime_spec(cluster_id, plans[component], alone, components[0].queue),
            control_key=derive_key(secret, "component:" + component),
            token_key=derive_key(secret, "token"),
            meeting=meeting[component],
        )
    return specs


@dataclass
class SharedJobState:
    """What the views of one job know together.

    Attributes:
        starts: when the records of its components started, by run directory.
        explained: what Slurm and the job's logs tell, once they were asked.
    """

    starts: dict[str, float] = field(default_factory=dict)
    explained: Evidence | None = None


class ComponentJob(BatchJob):
    """One component's payload in a job that others share.

    Args:
        job: the job of all of them.
        commands: runs commands there, and reaches the files.
        cluster_id: name of the Ray clusters.
        directory: the component's run directory.
        shared: what is known of the whole job.
    """

    def __init__(self, job: SlurmJob, commands: Connection, cluster_id: str, directory: str, shared: SharedJobState) -> None:
        super().__init__(job, commands, cluster_id, directory)
        self._shared = shared

    def _give(self, now: bool) -> None:
        # Another one's record may have started since this one was looked at.
        self._started = self._started or (bool(self._shared.starts) and self._job.status.phase != JobPhase.PENDING)
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
