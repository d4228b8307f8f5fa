"""Local mode: the runtime as a child process, for one payload."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from pathlib import Path

from ..archive import install_runtime
from ..environments import Interpreter
from ..outcome import exit_in_words
from ..runtime.record import RUNTIME_LOG, tail_file
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


class OwnRuntime:
    """A runtime of one payload's own. Its standard input is the lifeline: it ends when Dagster does."""

    job_id: str | None = None

    def __init__(self, layout: Layout, interpreter: Interpreter, run_dir: str, cluster_id: str) -> None:
        self.cluster_id = cluster_id
        self._log = Path(run_dir) / RUNTIME_LOG
        command = runtime_command(layout, interpreter, "run", run_dir)
        self._process = start_process(command, run_dir, subprocess.PIPE)

    def ended(self) -> str | None:
        code = self._process.poll()
        return None if code is None else exit_in_words(code)

    def cancel(self, now: bool = False) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"op": "cancel", "now": now}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return  # It is gone already; `ended` tells.

    def runtime_log(self) -> str:
        return tail_file(str(self._log))

    def release(self) -> None:
        # The end is read; the runtime still takes its cluster down, and nobody waits for that.
        reap_later(self._process)
