"""Runtimes as processes of this machine: how they are started and collected."""

from __future__ import annotations

import os
import shlex
import subprocess
import threading
from collections.abc import Mapping
from typing import Any

from ..archive import install_runtime
from ..environments import Interpreter
from ..follow import Evidence
from ..plan import Plan
from ..runtime.protocol.record import RUNTIME_LOG
from ..runtime.protocol.spec import RuntimeSpec, to_json
from .run_dir import Layout


class LocalPayload:
    """Base of payloads on this machine, where there is no Slurm; see `RunningPayload`."""

    job_id: str | None = None
    waiting = False
    place = ""
    requeue = False

    def metadata(self, evidence: Evidence) -> Mapping[str, Any]:  # noqa: ARG002
        return {}


def runtime_command(layout: Layout, interpreter: Interpreter, role: str, directory: str) -> list[str]:
    """The command that starts a runtime on this machine; `-I` keeps the user's modules out of it."""
    archive = install_runtime(layout.runtimes)
    return interpreter.start("-I", str(archive), role, directory)


def example_command(layout: Layout, interpreter: Interpreter, plan: Plan) -> str:
    """What would be started for a plan, with words in capitals for what is known only then, and its start records."""
    run_dir = str(layout.runs / "RUN_DIR")
    command = runtime_command(layout, interpreter, "run", run_dir)
    spec = RuntimeSpec(f"local-{plan.payload.nonce}", plan.ray, components=list(plan.components))
    return (
        f"{shlex.join(command)}\n\n# {run_dir}/runtime.json\n{to_json(spec)}\n\n"
        f"# {run_dir}/payload.json\n{to_json(plan.payload)}\n"
    )


def start_process(command: list[str], directory: str, stdin: int) -> subprocess.Popen[bytes]:
    """Start a runtime with its own log, in a session of its own: Ctrl-C in a terminal must reach Dagster alone.

    Raises:
        OSError: the interpreter cannot be started.
    """
    with open(os.path.join(directory, RUNTIME_LOG), "ab") as log:
        return subprocess.Popen(command, cwd=directory, stdin=stdin, stdout=log, stderr=log, start_new_session=True)


def reap_later(process: subprocess.Popen[bytes]) -> None:
    """Collect a process whenever it ends, so that a long-lived Dagster process keeps no zombie."""
    threading.Thread(target=process.communicate, name="rayslurm-reaper", daemon=True).start()
