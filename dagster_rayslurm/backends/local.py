"""Local mode: the runtime as a child process of the step, or one that is warm already."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dagster_pipes import PipesContextData

from ..components import on_one_machine
from ..config import SessionConfig
from ..environments import Interpreter
from ..errors import FailureKind, StartError
from ..follow import Cadence, Evidence
from ..outcome import exit_in_words
from ..plan import Plan
from ..runtime.node import resources
from ..runtime.node.gpus import count_gpus
from ..runtime.node.resources import Footprint, footprint_error, node_footprint
from ..runtime.payload.environment import shared_variables
from ..runtime.process import processes
from ..runtime.protocol.record import RUNTIME_LOG, STATUS, tail_file
from ..runtime.protocol.requests import Operation
from ..runtime.protocol.spec import ComponentSpec, RaySpec, RuntimeSpec
from ..ssh.local import LocalConnection
from .base import Register, RunningPayload, Step
from .local_process import LocalPayload, example_command, reap_later, runtime_command, start_process
from .run_dir import Layout, run_files, write_run_dir, write_runtime_spec
from .sessions import local as local_session
from .sessions.matching import Capacity, Requirements, claimed_resources, misfit, misfit_error

LOCAL_CADENCE = Cadence(busy=0.01, idle=0.03, waiting=0.03)
"""Reading a file of this machine costs next to nothing."""
_LARGE_STORE = 10**10
"""Bytes up to which Ray 2.60 takes an object store that does not fit into /dev/shm (REQUIRE_SHM_SIZE_THRESHOLD)."""
_KEEPER_DEADLINE = 5.0


@dataclass(frozen=True)
class LocalBackend:
    """Runs payloads on this machine.

    Args:
        layout: where run directories go.
        interpreter: the Python that runs them.
        session: how a warm Ray cluster is shared; None for a cluster of each payload's own.
        offered: that cluster, for all payloads that it is enough for; None for what each payload asks for.
        components: what is asked for each component of that cluster; none where all nodes are alike.
        head: the component in which the payload has to run; None for wherever that cluster has its head.
        simulate: whether CPUs and GPUs that this machine lacks are simulated; else they are refused.
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

    def _cluster(self, wanted: RaySpec, session: SessionConfig) -> RaySpec:
        """The cluster that a payload gets: that of the session if it fits, else one as it asks for.

        Raises:
            StartError: it does not fit, and shall get no other one.
        """
        if self.offered is None:
            return wanted
        offered = self._here(self.offered, self.components)
        problem = misfit(Requirements(wanted, (), head=self.head), Capacity(_as_granted(offered, wanted), True))
        if problem is not None and session.on_misfit == "error":
            raise StartError(FailureKind.CONFIGURATION, misfit_error(problem))
        return offered if problem is None else wanted

    def sweep(self, retention_days: float) -> None:  # noqa: ARG002
        return  # This machine is swept in every mode.

    def start(self, plan: Plan, run_dir: str, context: PipesContextData, step: Step, hold: Register) -> RunningPayload:
        attempt: RunningPayload
        if plan.ray is not None:
            plan = replace(plan, ray=self._here(plan.ray, plan.components))
        elif self.simulate:
            problem = lacking(plan, "CPUs", "GPUs")
            if problem:
                step.log.info(f"[rayslurm] {problem}; local mode starts the payload all the same")
        if plan.ray is not None and self.session is not None:
            ray = self._cluster(plan.ray, self.session)
            cpus, gpus = claimed_resources(Requirements(plan.ray, plan.footprint), Capacity(ray, True))
            payload = replace(plan.payload, run_id=step.run_id, step=step.step_key, want_cpus=cpus, want_gpus=gpus)
            plan = replace(plan, payload=payload)
        write_run_dir(self.connection, run_dir, run_files(plan, context))
        if plan.ray is not None and self.session is not None:
            attempt = local_session.submit(self.layout, self.interpreter, plan, ray, self.session, step, run_dir)
        else:
            cluster_id = f"local-{plan.payload.nonce}"
            components, worker_env = list(plan.components), shared_variables(plan.payload)
            spec = RuntimeSpec(cluster_id, plan.ray, worker_env=worker_env, components=components)
            write_runtime_spec(self.connection, run_dir, spec)
            attempt = OwnRuntime(self.layout, self.interpreter, run_dir, cluster_id)
        hold(attempt)
        return attempt

    def example(self, plan: Plan) -> str:
        return example_command(self.layout, self.interpreter, plan)

    def _here(self, ray: RaySpec, components: Sequence[ComponentSpec]) -> RaySpec:
        """The cluster as it is on this machine."""
        return replace(on_one_machine(ray, components, resources.count_cpus(os.environ)), simulate=self.simulate)


def _as_granted(ray: RaySpec, wanted: RaySpec) -> RaySpec:
    """A cluster with the numbers that its launcher leaves to this machine, as far as a payload asks for any."""
    cpus, gpus = ray.num_cpus, ray.num_gpus
    if cpus is None and wanted.num_cpus:
        cpus = resources.count_cpus(os.environ)
    if gpus is None and wanted.num_gpus:
        gpus = count_gpus(os.environ)
    return replace(ray, num_cpus=cpus, num_gpus=gpus)


def lacking(plan: Plan, *units: str) -> str | None:
    """What a plan asks of this machine in some units and does not get, as a sentence that names the field; or None."""
    for place, footprint in footprints(plan):
        asked = tuple(want for want in footprint if want.unit in units and want.amount is not None)
        problem = footprint_error(asked, resources.detect(with_gpus="GPUs" in units)) if asked else None
        if problem:
            return place + problem
    return None


def _too_large_for_shared_memory(plan: Plan) -> str | None:
    """Ray 2.60 keeps a store that does not fit into /dev/shm in files, but no large one."""
    try:
        status = os.statvfs("/dev/shm")
    except OSError:
        return None
    free = status.f_bsize * status.f_bavail
    for place, footprint in footprints(plan):
        for want in footprint:
            if want.unit == "GiB" and want.amount is not None and want.amount * 2**30 > max(free, _LARGE_STORE):
                return f"{place}{want.field}={want.amount:g} does not fit into /dev/shm, which has {free / 2**30:.3g} GiB free"
    return None


def footprints(plan: Plan) -> list[tuple[str, Footprint]]:
    """What this machine must grant to each node of a plan, and whose node it is; GPUs of components are simulated if need be."""
    if not plan.components:
        return [("", plan.footprint)]
    nodes = plan.ray.components if plan.ray is not None else []
    found = [(f"component {node.component_id!r}: ", node_footprint(node)) for node in nodes] or [("", plan.footprint)]
    return [(place, tuple(want for want in footprint if want.unit != "GPUs")) for place, footprint in found]


class OwnRuntime(LocalPayload):
    """A runtime of one payload's own. Its standard input is the lifeline: it ends when Dagster does."""

    def __init__(self, layout: Layout, interpreter: Interpreter, run_dir: str, cluster_id: str) -> None:
        self.cluster_id = cluster_id
        self._run_dir = Path(run_dir)
        command = runtime_command(layout, interpreter, "run", run_dir)
        self._process = start_process(command, run_dir, subprocess.PIPE)

    def poll(self, evidence: Evidence) -> str | None:  # noqa: ARG002
        code = self._process.poll()
        return None if code is None else exit_in_words(code)

    def cancel(self, now: bool = False) -> None:
        self._request(op=Operation.CANCEL, now=now)

    def _request(self, **request: Any) -> None:
        """Ask the runtime for something."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return  # It is gone already; `poll` tells.

    def kill(self) -> None:
        if self._process.poll() is not None:
            return  # A keeper outlives its runtime, whose number may be another process's by now.
        # The runtime first: its keeper then ends all that is below. A keeper that cannot do so goes next.
        status = LocalConnection().read(str(self._run_dir / STATUS), 0, 65536)
        with contextlib.suppress(ValueError, KeyError, ProcessLookupError):
            pid = json.loads(status)["runtime_pid"]
            below = [process.pid for process in processes.descendants(self._process.pid)]
            if pid in below or sys.platform != "linux":  # Else the runtime has ended, and the number is another process's.
                os.kill(pid, signal.SIGKILL)
        try:
            self._process.wait(_KEEPER_DEADLINE)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)

    def explain(self, evidence: Evidence) -> None:
        evidence.runtime_log = tail_file(str(self._run_dir / RUNTIME_LOG))

    def release(self, evidence: Evidence) -> None:  # noqa: ARG002
        # The end is read; the runtime still takes its cluster down, and nobody waits for that.
        reap_later(self._process)
