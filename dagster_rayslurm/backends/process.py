"""Runtimes as processes of this machine: how they are started and collected."""

from __future__ import annotations

import os
import subprocess
import threading

from ..archive import install_runtime
from ..environments import Interpreter
from ..runtime.record import RUNTIME_LOG
from .rundir import Layout


def runtime_command(layout: Layout, interpreter: Interpreter, role: str, directory: str) -> list[str]:
    """The command that starts a runtime on this machine; `-I` keeps the user's modules out of it."""
    archive = install_runtime(layout.runtimes)
    return interpreter.start("-I", str(archive), role, directory)


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
