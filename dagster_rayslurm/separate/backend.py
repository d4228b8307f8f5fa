"""Backends for topology "separate": one payload for each component, on this machine or in one heterogeneous Slurm job."""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from dagster_pipes import PipesContextData

from ..backends.base import Plans, Register, Step, run_files, write_run_dir
from ..backends.batch import CLUSTER, JobBackend, check_min_nodes, check_paths, example_script, job_script, runtime_spec
from ..backends.local import OwnRuntime, ThisMachine, runtime_command
from ..backends.slurm_job import BatchJob
from ..components import Component, component_specs, request_for
from ..follow import Evidence
from ..plan import Plan
from ..runtime.node.network import control_ports
from ..runtime.payload.environment import shared_variables
from ..runtime.protocol.record import CANCEL, COMPONENTS, EXIT, RUNTIME, component_dir
from ..runtime.protocol.rpc import derive_key
from ..runtime.protocol.spec import BarrierSpec, ComponentSpec, RuntimeSpec, to_json
from ..slurm.accounting import failed_tasks
from ..slurm.exclusion import Exclusion
from ..slurm.request import JobRequest, job_comment, job_name
from ..slurm.states import JobPhase
from ..slurm.submit import JOB_SCRIPT

_MARGIN = 30.0  # Seconds that the barrier waits after the last Ray cluster's startup deadline, so that a failed cluster says why.
_TIMEOUT_WITHOUT_RAY = 300.0  # Stands for the startup deadline, in seconds, if no component has Ray.
_ROLE = "part"  # The subcommand of the runtime for a component of a heterogeneous job.


def check_components(components: Sequence[Component], plans: Plans) -> None:
    """Raise ValueError if no Slurm job can run these components with these plans; the text names the component and the field.

    `plans` has the plan of each component's payload, by component name.
    """
    request_for(components, job_name="rayslurm", comment="")
    for each in components:
        try:
            check_min_nodes(plans[each.component_id].ray, each.queue)
        except ValueError as error:
            raise ValueError(f"component {each.component_id!r}: {error}") from None


def barrier_specs(plans: Plans, secret: str) -> dict[str, BarrierSpec]:
    """Returns, by component name, the settings of the barrier at which the payloads wait for each other before they start.

    The runtime of the first component serves the barrier, and the settings say how another component's runtime reaches the
    barrier. `plans` has the plan of each component's payload, by component name; the first component comes first. `secret` is a
    hexadecimal number by which the runtimes of the run prove to each other that they belong to the run.
    """
    first = next(iter(plans.values())).ray
    ports = control_ports(first.port_range if first is not None else None)
    if first is not None and first.port_range:
        ports = [port - 1 for port in ports]  # The next port may serve the other nodes of the first component.
    hosts = [first.node_ip_address] if first is not None and first.node_ip_address else []
    deadlines = [plan.ray.startup_timeout for plan in plans.values() if plan.ray is not None]
    patience = max(deadlines, default=_TIMEOUT_WITHOUT_RAY) + _MARGIN
    return {component: BarrierSpec(component, list(plans), secret, ports, hosts, patience) for component in plans}


def local_specs(cluster_id: str, plans: Plans, components: Sequence[Component]) -> dict[str, RuntimeSpec]:
    """Returns, by component name, the content of `runtime.json` (the settings of a runtime), for a run on this machine.

    `cluster_id` is the beginning of the ids of the Ray clusters; "-" and the name of the component follow. `plans` has the plan
    of each component's payload, by component name.
    """
    barriers = barrier_specs(plans, secrets.token_hex(32))
    token = secrets.token_hex(32)
    requirements = [_requirements(each, plans[each.component_id]) for each in components]
    return {
        component: RuntimeSpec(
            f"{cluster_id}-{component}",
            plan.ray,
            token_key=token,
            worker_env=shared_variables(plan.payload),
            components=requirements,
            meeting=barriers[component],
        )
        for component, plan in plans.items()
    }


def _requirements(component: Component, plan: Plan) -> ComponentSpec:
    """Returns the numbers of CPUs and GPUs that a component needs on this machine, where a component is one node.

    The numbers are those in the settings of the component's Ray cluster. If a number is unset there, or without a Ray cluster,
    the number in the component's queue counts; None if this is unset, too.
    """
    ray = plan.ray
    cpus = component.queue.cpus_per_node if ray is None or ray.num_cpus is None else ray.num_cpus
    gpus = component.queue.gpus_per_node if ray is None or ray.num_gpus is None else ray.num_gpus
    return ComponentSpec(component.component_id, 1, cpus, gpus)


@dataclass(frozen=True, kw_only=True)
class SeparateLocalBackend(ThisMachine):
    """Runs the payloads of all components on this machine, with one runtime process for each payload."""

    components: tuple[Component, ...]

    def check(self, plans: Plans) -> None:
        # Resources are simulated on this machine, but a mistake should show before the components run on a Slurm cluster.
        check_components(self.components, plans)

    def start(self, plans: Plans, run_dir: str, context: PipesContextData, step: Step, register: Register) -> None:
        plans = {name: replace(plan, ray=plan.ray and replace(plan.ray, simulate=self.simulate)) for name, plan in plans.items()}
        nonce = next(iter(plans.values())).payload.nonce
        specs = local_specs(f"local-{nonce}", plans, self.components)
        for component, plan in plans.items():
            directory, spec = component_dir(run_dir, component), specs[component]
            write_run_dir(self.connection, directory, {**run_files(plan, context, step), RUNTIME: to_json(spec).encode()})
            register(OwnRuntime(self.layout, self.interpreter, directory, spec.cluster_id))

    def example(self, plans: Plans) -> str:
        run_dir = str(self.layout.runs / "RUN_DIR")
        shown = []
        for component, plan in plans.items():
            directory = component_dir(run_dir, component)
            command = runtime_command(self.layout, self.interpreter, "run", directory)
            shown.append(f"{shlex.join(command)}\n\n# {directory}/payload.json\n{to_json(plan.payload)}\n")
        return "\n".join(shown)


class SeparateBatchBackend(JobBackend):
    """Runs the payloads of all components in one heterogeneous Slurm job."""

    def check(self, plans: Plans) -> None:
        check_components(self.components, plans)
        for each in self.components:
            check_paths(self.slurm, self.environment, plans[each.component_id])

    def start(self, plans: Plans, run_dir: str, context: PipesContextData, step: Step, register: Register) -> None:
        # All components share one environment, which is checked for each of them.
        delivered = {component: self.deliver(plan, step) for component, plan in plans.items()}
        packed = [each for each, _, _ in delivered.values()]
        plans = {component: each.plan for component, each in zip(plans, packed, strict=True)}
        _, interpreter, runtime = next(iter(delivered.values()))
        nonce = next(iter(plans.values())).payload.nonce
        comment = job_comment(step.run_id, step.step_key, step.partition_key)
        request = request_for(self.components, job_name=job_name(step.step_key, nonce), comment=comment)
        request = self.placed(request, step)
        cluster_id = f"{CLUSTER}{nonce}"
        files = {
            RUNTIME: to_json(RuntimeSpec(cluster_id, components=component_specs(request))).encode("utf-8"),
            JOB_SCRIPT: job_script(request, interpreter, runtime, run_dir, self.slurm, _ROLE).encode("utf-8", "surrogateescape"),
            EXIT: b"",
        }
        specs = job_specs(cluster_id, plans, request)
        for component, plan in plans.items():
            own = {**run_files(plan, context, step), RUNTIME: to_json(specs[component]).encode("utf-8"), CANCEL: b""}
            files.update({f"{COMPONENTS}/{component}/{name}": content for name, content in own.items()})

        shared = Evidence()
        with self.cancel_on_error(request, step):
            job = self.submit_job(run_dir, files, request, step)
            for component in plans:
                register(ComponentJob(job, cluster_id, component_dir(run_dir, component), step, shared=shared))

    def exclusion_for_plan(self, plans: Plans) -> Exclusion:  # noqa: ARG002
        return self.exclusion(request_for(self.components, job_name="rayslurm", comment=""))

    def example(self, plans: Plans) -> str:
        nonce = next(iter(plans.values())).payload.nonce
        request = request_for(self.components, job_name=job_name("STEP", nonce), comment=job_comment("RUN", "STEP", None))
        return example_script(request, self.slurm, _ROLE)


def job_specs(cluster_id: str, plans: Plans, request: JobRequest) -> dict[str, RuntimeSpec]:
    """Returns, by component name, the content of `runtime.json` (the settings of a runtime), for one heterogeneous job.

    The runtime of each component treats its component as a whole job. All Ray clusters share one token, so that a payload can use
    the clusters of other components. Each component has a control key of its own, the secret with which its nodes connect to each
    other, so that nodes join only the cluster of their own component. `cluster_id` is the id of all Ray clusters. `plans` has the
    plan of each component's payload, by component name, in the order of the job. `request` is the request for the job.
    """
    secret = secrets.token_hex(32)
    barriers = barrier_specs(plans, derive_key(secret, "meeting"))
    specs = {}
    for component, part in zip(plans, request.components, strict=True):
        alone = replace(part, component_id=None, further_components=())
        specs[component] = replace(
            runtime_spec(cluster_id, plans[component], alone),
            control_key=derive_key(secret, "component:" + component),
            token_key=derive_key(secret, "token"),
            meeting=barriers[component],
        )
    return specs


@dataclass(eq=False)
class ComponentJob(BatchJob):
    """The payload of one component in the heterogeneous job of all components."""

    # The facts about the whole job, which all components share: when the latest run record of any component began, what Slurm's
    # accounting says of the job, and the job's logs.
    shared: Evidence = field(kw_only=True)

    def _send_cancel(self, now: bool) -> None:
        # Another component's record may have started since the last poll.
        self._started = self._started or (self.shared.started and self.job.status.phase != JobPhase.PENDING)
        super()._send_cancel(now)

    def explain(self, evidence: Evidence) -> None:
        shared = self.shared
        if shared.job is None and not shared.runtime_log:
            super().explain(shared)
            # The first runtime that failed caused the ends of all others, even of the barrier's server with its own exit code.
            node, _, how = next(iter(failed_tasks(shared.runtime_log)), (None, 0, ""))
            if node is not None and f"on node {node} " not in (shared.culprit or ""):
                shared.culprit = f"the runtime on node {node} ended ({how})"
        evidence.job, evidence.runtime_log, evidence.culprit = shared.job, shared.runtime_log, shared.culprit
        evidence.tails = {**shared.tails, **evidence.tails}

    def _started_at(self, evidence: Evidence) -> float | None:
        """Returns the time at which the latest run record among all components began, in seconds since the epoch.

        A run record is the file to which the runtime of a component writes what happens. The result is None if no component has a
        record yet. `evidence` has the facts about this component; its `started_at` is the time at which this component's record
        began, or None. The job counts as started as soon as one of its components has started.
        """
        self.shared.started_at = max(self.shared.started_at or 0.0, evidence.started_at or 0.0) or None
        return self.shared.started_at
