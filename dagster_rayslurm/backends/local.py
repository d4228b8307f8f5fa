"""Local mode: run payloads on this machine, in a runtime of their own or in a warm session."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from dagster_pipes import PipesContextData

from ..components import on_one_machine
from ..config import SessionConfig
from ..environments import Interpreter
from ..errors import FailureKind, StartError
from ..follow import Cadence
from ..plan import Plan
from ..runtime.node import resources
from ..runtime.node.resources import Footprint, count_gpus, footprint_error, node_footprint
from ..runtime.protocol.spec import ComponentSpec, RaySpec
from ..ssh.local import LocalConnection
from .base import Register, RunningPayload, Step
from .local_process import OwnRuntime, example_command, own_runtime_spec
from .run_dir import Layout, run_files, write_run_dir, write_runtime_spec
from .sessions import local as local_session
from .sessions.matching import Capacity, Requirements, claimed_resources, misfit, misfit_error

LOCAL_CADENCE = Cadence(busy=0.01, idle=0.03, waiting=0.03)
"""How often records on this machine are read: often, because reads of local files cost next to nothing."""
_LARGE_STORE = 10**10
"""Bytes up to which Ray 2.60 accepts an object store that does not fit into /dev/shm (REQUIRE_SHM_SIZE_THRESHOLD)."""


@dataclass(frozen=True)
class LocalBackend:
    """Runs payloads on this machine.

    Args:
        session: how payloads share a warm Ray cluster; None gives each payload a Ray cluster of its own.
        offered: the warm Ray cluster as configured; None makes a cluster as each payload requires.
        components: the requirements of the warm cluster's components; empty if all its nodes are alike.
        head: the component in which the payload must run; None for the component with the head of the Ray cluster.
        simulate: whether missing CPUs and GPUs are simulated; else a plan that requires them is refused.
    """

    layout: Layout
    interpreter: Interpreter
    session: SessionConfig | None
    offered: RaySpec | None = None
    components: Sequence[ComponentSpec] = ()
    head: str | None = None
    simulate: bool = False
    connection: LocalConnection = field(default_factory=LocalConnection)
    cadence: Cadence = LOCAL_CADENCE

    def check(self, plan: Plan) -> None:
        problem = lacking(plan, "GiB") or _too_large_for_shared_memory(plan)
        if problem:
            raise ValueError(f"{problem}; lower it")
        problem = None if self.simulate else lacking(plan, "CPUs", "GPUs")
        if problem:
            raise ValueError(f'{problem}; ask for less, or set ComputeResource(local_resources="simulate")')

    def sweep(self, retention_days: float) -> None:  # noqa: ARG002
        return  # This machine is swept in every mode.

    def start(self, plan: Plan, run_dir: str, context: PipesContextData, step: Step, register: Register) -> RunningPayload:
        running: RunningPayload
        if plan.ray is not None:
            plan = replace(plan, ray=self._on_this_machine(plan.ray, plan.components))
        elif self.simulate and (problem := lacking(plan, "CPUs", "GPUs")):
            step.log.info(f"[rayslurm] {problem}; local mode starts the payload all the same")
        if plan.ray is not None and self.session is not None:
            ray = self._session_cluster(plan.ray, self.session)
            cpus, gpus = claimed_resources(Requirements(plan.ray, plan.footprint), Capacity(ray, True))
            payload = replace(plan.payload, run_id=step.run_id, step=step.step_key, want_cpus=cpus, want_gpus=gpus)
            plan = replace(plan, payload=payload)
            write_run_dir(self.connection, run_dir, run_files(plan, context))
            running = local_session.submit(self.layout, self.interpreter, plan, ray, self.session, step, run_dir)
        else:
            spec = own_runtime_spec(plan)
            write_run_dir(self.connection, run_dir, run_files(plan, context))
            write_runtime_spec(self.connection, run_dir, spec)
            running = OwnRuntime(self.layout, self.interpreter, run_dir, spec.cluster_id)
        register(running)
        return running

    def example(self, plan: Plan) -> str:
        return example_command(self.layout, self.interpreter, plan)

    def _session_cluster(self, wanted: RaySpec, session: SessionConfig) -> RaySpec:
        """Returns the warm Ray cluster if the payload fits into it, else a cluster as the payload requires.

        Raises:
            StartError: the payload does not fit, and `on_misfit` is "error".
        """
        if self.offered is None:
            return wanted
        offered = self._on_this_machine(self.offered, self.components)
        problem = misfit(Requirements(wanted, (), head=self.head), Capacity(_with_counts(offered, wanted), True))
        if problem is not None and session.on_misfit == "error":
            raise StartError(FailureKind.CONFIGURATION, misfit_error(problem))
        return offered if problem is None else wanted

    def _on_this_machine(self, ray: RaySpec, components: Sequence[ComponentSpec]) -> RaySpec:
        return replace(on_one_machine(ray, components, resources.count_cpus(os.environ)), simulate=self.simulate)


def _with_counts(ray: RaySpec, wanted: RaySpec) -> RaySpec:
    """Returns the Ray cluster with this machine's CPUs and GPUs filled in if `ray` names none and `wanted` requires some."""
    cpus, gpus = ray.num_cpus, ray.num_gpus
    if cpus is None and wanted.num_cpus:
        cpus = resources.count_cpus(os.environ)
    if gpus is None and wanted.num_gpus:
        gpus = count_gpus(os.environ)
    return replace(ray, num_cpus=cpus, num_gpus=gpus)


def lacking(plan: Plan, *units: str) -> str | None:
    """A sentence about the first requirement of a plan, counted in one of `units`, that this machine does not meet; or None."""
    for label, footprint in footprints(plan):
        asked = tuple(want for want in footprint if want.unit in units and want.amount is not None)
        problem = footprint_error(asked, resources.detect(with_gpus="GPUs" in units)) if asked else None
        if problem:
            return label + problem
    return None


def _too_large_for_shared_memory(plan: Plan) -> str | None:
    """Returns a sentence if an object store is too large for /dev/shm, else None.

    Ray 2.60 keeps a smaller store that does not fit in files, and refuses to start with a large one.
    """
    try:
        status = os.statvfs("/dev/shm")
    except OSError:
        return None
    free = status.f_bsize * status.f_bavail
    for label, footprint in footprints(plan):
        for want in footprint:
            if want.unit == "GiB" and want.amount is not None and want.amount * 2**30 > max(free, _LARGE_STORE):
                return f"{label}{want.field}={want.amount:g} does not fit into /dev/shm, which has {free / 2**30:.3g} GiB free"
    return None


def footprints(plan: Plan) -> list[tuple[str, Footprint]]:
    """Returns the resources that each node of a plan needs, with the component's label; GPUs of components are simulated."""
    if not plan.components:
        return [("", plan.footprint)]
    nodes = plan.ray.components if plan.ray is not None else []
    found = [(f"component {node.component_id!r}: ", node_footprint(node)) for node in nodes] or [("", plan.footprint)]
    return [(label, tuple(want for want in footprint if want.unit != "GPUs")) for label, footprint in found]
