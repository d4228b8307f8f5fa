"""Local mode: run each payload on this machine, in a runtime that is a child process of Dagster."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from dagster_pipes import PipesContextData

from ..archive import install_runtime
from ..components import on_one_machine
from ..environments import Interpreter
from ..follow import Cadence, Evidence
from ..outcome.verdict import exit_in_words
from ..plan import Plan
from ..runtime.node import resources
from ..runtime.node.resources import Footprint, footprint_error, node_footprint
from ..runtime.payload.environment import shared_variables
from ..runtime.process import processes
from ..runtime.protocol.record import RUNTIME, RUNTIME_LOG, STATUS, tail_file
from ..runtime.protocol.spec import ComponentSpec, RaySpec, RuntimeSpec, to_json
from ..ssh.local import LocalConnection
from .base import Register, RunningPayload, Step, run_files, write_cancel_request, write_run_dir
from .layout import Layout

# How often records on this machine are read: often, because reads of local files cost next to nothing.
LOCAL_CADENCE = Cadence(busy=0.01, idle=0.03, waiting=0.03)
_KEEPER_TIMEOUT = 5.0  # Seconds in which the keeper (the process that watches a runtime) ends all processes of a killed runtime.


@dataclass(frozen=True, kw_only=True)
class ThisMachine:
    """Base class of the backends that run payloads on this machine."""

    layout: Layout
    interpreter: Interpreter
    simulate: bool = False  # Whether missing CPUs and GPUs are simulated; GPUs of components always are.
    connection: LocalConnection = field(default_factory=LocalConnection)
    cadence: Cadence = LOCAL_CADENCE

    def sweep(self, retention_days: float) -> None:
        """Do nothing, because the caller removes old files from this machine in every mode."""


class LocalBackend(ThisMachine):
    """Runs payloads on this machine. Each payload has a runtime and a Ray cluster of the payload's own."""

    def check(self, plan: Plan) -> None:
        problem = lacking(plan, "GiB")
        if problem:
            raise ValueError(f"{problem}; lower it")
        problem = None if self.simulate else lacking(plan, "CPUs", "GPUs")
        if problem:
            raise ValueError(f'{problem}; ask for less, or set ComputeResource(local_resources="simulate")')

    def start(self, plan: Plan, run_dir: str, context: PipesContextData, step: Step, register: Register) -> RunningPayload:
        if plan.ray is not None:
            plan = replace(plan, ray=self.on_this_machine(plan.ray, plan.components))
        elif self.simulate and (problem := lacking(plan, "CPUs", "GPUs")):
            step.log.info(f"[rayslurm] {problem}; local mode starts the payload all the same")
        worker_env, components = shared_variables(plan.payload), list(plan.components)
        spec = RuntimeSpec(f"local-{plan.payload.nonce}", plan.ray, worker_env=worker_env, components=components)
        write_run_dir(self.connection, run_dir, {**run_files(plan, context, step), RUNTIME: to_json(spec).encode()})
        running = OwnRuntime(self.layout, self.interpreter, run_dir, spec.cluster_id)
        register(running)
        return running

    def example(self, plan: Plan) -> str:
        run_dir = str(self.layout.runs / "RUN_DIR")
        command = runtime_command(self.layout, self.interpreter, "run", run_dir)
        spec = RuntimeSpec(f"local-{plan.payload.nonce}", plan.ray, components=list(plan.components))
        return (
            f"{shlex.join(command)}\n\n# {run_dir}/runtime.json\n{to_json(spec)}\n\n"
            f"# {run_dir}/payload.json\n{to_json(plan.payload)}\n"
        )

    def on_this_machine(self, ray: RaySpec, components: Sequence[ComponentSpec]) -> RaySpec:
        """Returns the settings `ray` of a Ray cluster, changed for a Ray cluster that has all nodes on this machine.

        `components` are the components of the job; empty if all nodes are alike. This machine simulates a node for each
        component.
        """
        return replace(on_one_machine(ray, components, resources.count_cpus(os.environ)), simulate=self.simulate)


class OwnRuntime(RunningPayload):
    """The runtime of one payload, as a child process, which the constructor starts.

    The process ends when Dagster ends. The process also ends when Dagster closes the pipe to the standard input of the process.
    """

    def __init__(self, layout: Layout, interpreter: Interpreter, run_dir: str, cluster_id: str) -> None:
        self.cluster_id = cluster_id
        self._run_dir = Path(run_dir)
        self._process = start_process(runtime_command(layout, interpreter, "run", run_dir), run_dir, subprocess.PIPE)

    def poll(self, evidence: Evidence) -> str | None:  # noqa: ARG002
        code = self._process.poll()
        return None if code is None else exit_in_words(code)

    def cancel(self, now: bool = False) -> None:
        with contextlib.suppress(OSError):  # The disk is full, perhaps; `kill` follows.
            write_cancel_request(LocalConnection(), str(self._run_dir), now)

    def kill(self) -> None:
        if self._process.poll() is not None:
            return  # A keeper outlives its runtime, whose pid may be another process's by now.
        # Kill the runtime first: its keeper then ends all processes below it. A keeper that cannot do so is killed next.
        status = LocalConnection().read(str(self._run_dir / STATUS), 0, 65536)
        with contextlib.suppress(ValueError, KeyError, ProcessLookupError):
            pid = json.loads(status)["runtime_pid"]
            below = [process.pid for process in processes.descendants(self._process.pid)]
            if pid in below or sys.platform != "linux":  # Else the runtime has ended, and the pid is another process's.
                os.kill(pid, signal.SIGKILL)
        try:
            self._process.wait(_KEEPER_TIMEOUT)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)

    def explain(self, evidence: Evidence) -> None:
        evidence.runtime_log = tail_file(str(self._run_dir / RUNTIME_LOG))

    def release(self, evidence: Evidence) -> None:  # noqa: ARG002
        # The runtime still ends its Ray cluster; this process does not wait for that.
        reap_later(self._process)


def runtime_command(layout: Layout, interpreter: Interpreter, role: str, directory: str) -> list[str]:
    """Returns the command line of a runtime as a list. If the runtime's zipapp is missing below `layout`, installs the zipapp.

    `directory` is the run directory or session directory of the runtime. `role` is the runtime's subcommand, such as "run".
    """
    return interpreter.start("-I", str(install_runtime(layout.runtimes)), role, directory)


def start_process(command: list[str], directory: str, stdin: int) -> subprocess.Popen[bytes]:
    """Start a runtime whose output goes to a log file in `directory`, and return the process of the runtime.

    `command` is the command line of the runtime, and `directory` the working directory. `stdin` becomes the runtime's standard
    input: a file descriptor, `subprocess.PIPE` or `subprocess.DEVNULL`. Ctrl-C in a terminal does not reach the runtime.
    """
    with open(os.path.join(directory, RUNTIME_LOG), "ab") as log:
        return subprocess.Popen(command, cwd=directory, stdin=stdin, stdout=log, stderr=log, start_new_session=True)


def reap_later(process: subprocess.Popen[bytes]) -> None:
    """Start a thread that waits for the end of `process`, so that it leaves no zombie. The function returns at once."""
    threading.Thread(target=process.communicate, name="rayslurm-reaper", daemon=True).start()


def lacking(plan: Plan, *units: str) -> str | None:
    """Returns a sentence about the first requirement of a plan that this machine does not meet; None if all requirements are met.

    `units` name the kinds of requirements that are checked: "CPUs", "GPUs", and "GiB" for memory.
    """
    for label, footprint in _footprints(plan):
        asked = tuple(want for want in footprint if want.unit in units and want.amount is not None)
        problem = footprint_error(asked, resources.detect(with_gpus="GPUs" in units)) if asked else None
        if problem:
            return label + problem
    return None


def _footprints(plan: Plan) -> list[tuple[str, Footprint]]:
    """Returns the resources that each kind of node of a plan needs, each with a label for messages, such as "component 'gpu': ".

    The label is "" for a plan without components. GPUs of components are left out, because local mode simulates them.
    """
    if not plan.components:
        return [("", plan.footprint)]
    nodes = plan.ray.components if plan.ray is not None else []
    found = [(f"component {node.component_id!r}: ", node_footprint(node)) for node in nodes] or [("", plan.footprint)]
    return [(label, tuple(want for want in footprint if want.unit != "GPUs")) for label, footprint in found]
