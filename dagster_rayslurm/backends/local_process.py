"""Runtimes as child processes of Dagster on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..archive import install_runtime
from ..environments import Interpreter
from ..follow import Evidence
from ..outcome import exit_in_words
from ..plan import Plan
from ..runtime.payload.environment import shared_variables
from ..runtime.process import processes
from ..runtime.protocol.messages import Operation
from ..runtime.protocol.record import RUNTIME_LOG, STATUS, tail_file
from ..runtime.protocol.spec import RuntimeSpec, to_json
from ..ssh.local import LocalConnection
from .run_dir import Layout

_KEEPER_TIMEOUT = 5.0
"""Seconds in which the keeper (the process that watches a runtime) ends all processes of a killed runtime."""


class LocalPayload:
    """Base class of running payloads on this machine, without Slurm; see `RunningPayload`."""

    job_id: str | None = None
    waiting = False
    place = ""
    requeue = False

    def metadata(self, evidence: Evidence) -> Mapping[str, Any]:  # noqa: ARG002
        return {}


class OwnRuntime(LocalPayload):
    """The runtime of one payload, as a child process; it ends when its standard input closes, so at the latest with Dagster."""

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
        """Write a request to the runtime's standard input."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # The runtime has ended, which `poll` reports.
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()

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
        # The runtime still takes its Ray cluster down, and nobody waits for that.
        reap_later(self._process)


def own_runtime_spec(plan: Plan) -> RuntimeSpec:
    """Returns the content of `runtime.json` for a runtime with one payload."""
    worker_env, components = shared_variables(plan.payload), list(plan.components)
    return RuntimeSpec(f"local-{plan.payload.nonce}", plan.ray, worker_env=worker_env, components=components)


def runtime_command(layout: Layout, interpreter: Interpreter, role: str, directory: str) -> list[str]:
    """Returns the command that starts a runtime; `-I` keeps Python from importing the user's modules."""
    archive = install_runtime(layout.runtimes)
    return interpreter.start("-I", str(archive), role, directory)


def example_command(layout: Layout, interpreter: Interpreter, plan: Plan) -> str:
    """Returns the command of a plan with its `runtime.json` and `payload.json`, for a person to read."""
    run_dir = str(layout.runs / "RUN_DIR")
    command = runtime_command(layout, interpreter, "run", run_dir)
    spec = RuntimeSpec(f"local-{plan.payload.nonce}", plan.ray, components=list(plan.components))
    return (
        f"{shlex.join(command)}\n\n# {run_dir}/runtime.json\n{to_json(spec)}\n\n"
        f"# {run_dir}/payload.json\n{to_json(plan.payload)}\n"
    )


def start_process(command: list[str], directory: str, stdin: int) -> subprocess.Popen[bytes]:
    """Start a runtime with its log, in a process session of its own, so that Ctrl-C in a terminal reaches only Dagster.

    Raises:
        OSError: the interpreter cannot be started.
    """
    with open(os.path.join(directory, RUNTIME_LOG), "ab") as log:
        return subprocess.Popen(command, cwd=directory, stdin=stdin, stdout=log, stderr=log, start_new_session=True)


def reap_later(process: subprocess.Popen[bytes]) -> None:
    """Wait for a process in a thread, so that a long-lived Dagster process keeps no zombie."""
    threading.Thread(target=process.communicate, name="rayslurm-reaper", daemon=True).start()
