"""A payload for each component, started together: what their runtimes are told, and local mode, where all are on this machine."""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from dagster_pipes import PipesContextData

from ..components import Component, request_for
from ..connections.local import LocalConnection
from ..environments import Interpreter
from ..follow import Cadence, Evidence
from ..plan import Plan
from ..runtime.nodes import nodes_expected
from ..runtime.ports import control_ports
from ..runtime.record import component_dir
from ..runtime.spec import ComponentSpec, MeetingSpec, RuntimeSpec, to_json
from ..runtime.workspace import shared_variables
from .base import Attempt, Attempts, Hold, Plans, Step
from .local import LOCAL_CADENCE, OwnRuntime
from .process import runtime_command
from .rundir import Layout, run_files, write_run_dir, write_runtime_spec

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


def meetings(plans: Plans, secret: str) -> dict[str, MeetingSpec]:
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
        component: MeetingSpec(
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
    meeting = meetings(plans, secrets.token_hex(32))
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

    def ended(self, evidence: Evidence) -> str | None:
        self._evidence = evidence
        gone = [each._component for each in self._parts if each._evidence.runtime_exit and each._evidence.end is None]
        if gone and not self._forsaken:
            self._forsaken = True
            self._request(op="cancel", gone=gone[0])
        return super().ended(evidence)


@dataclass(frozen=True)
class LocalTogether:
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

    def start(self, plans: Plans, run_dir: str, context: PipesContextData, step: Step, hold: Hold) -> Attempts:  # noqa: ARG002
        plans = {name: replace(plan, ray=plan.ray and replace(plan.ray, simulate=self.simulate)) for name, plan in plans.items()}
        nonce = next(iter(plans.values())).payload.nonce
        specs = local_specs(f"local-{nonce}", plans, self.components)
        for component, plan in plans.items():
            directory = component_dir(run_dir, component)
            write_run_dir(self.connection, directory, run_files(plan, context))
            write_runtime_spec(self.connection, directory, specs[component])
        attempts: dict[str, Attempt] = {}
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
