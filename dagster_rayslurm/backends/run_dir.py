"""The run directory: what is written before a runtime starts, and which old ones go."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dagster_pipes import PipesContextData

from ..plan import Plan
from ..runtime.protocol.record import CONTEXT, JOURNAL, PAYLOAD, RUNTIME, SECRETS, SESSION, STDIO
from ..runtime.protocol.spec import RuntimeSpec, to_json
from ..ssh.base import Connection

WATCH_LOG = ".watch.log"
"""How the name of a file ends in which a session that could not be ended with its run is complained of."""

BOOKMARK = ".followed"
"""How the name of a file ends that says how far a payload elsewhere was followed."""


@dataclass(frozen=True)
class Layout:
    """Where things are below the base directory, here and on a cluster alike."""

    base: Path

    @property
    def runs(self) -> Path:
        return self.base / "runs"

    @property
    def sessions(self) -> Path:
        return self.base / "sessions"

    @property
    def runtimes(self) -> Path:
        return self.base / "runtime"

    @property
    def outputs(self) -> Path:
        return self.base / "outputs"

    @property
    def data(self) -> Path:
        return self.base / "data"

    @property
    def queue(self) -> Path:
        return self.base / "queue"

    @property
    def environments(self) -> Path:
        return self.base / "environments"


def run_files(plan: Plan, context: PipesContextData) -> dict[str, bytes]:
    """What stands in the run directory of a payload before its runtime starts.

    The record's files are made beforehand, too: on NFS a name that was looked for in vain stays missing for up to a
    minute.
    """
    files = {
        PAYLOAD: to_json(plan.payload),
        CONTEXT: json.dumps(context),
        JOURNAL: "",
        STDIO: "",
    }
    if plan.secret_env:
        files[SECRETS] = json.dumps(plan.secret_env)
    return {name: content.encode("utf-8") for name, content in files.items()}


def write_run_dir(connection: Connection, run_dir: str, files: Mapping[str, bytes]) -> None:
    """Make a run directory.

    Raises:
        OSError: something cannot be written.
    """
    connection.make_dir(run_dir)
    for name, content in files.items():
        connection.write(os.path.join(run_dir, name), content)


def write_runtime_spec(connection: Connection, directory: str, spec: RuntimeSpec) -> None:
    """Write the runtime's own start record.

    Raises:
        OSError: it cannot be written.
    """
    connection.make_dir(directory)
    connection.write(os.path.join(directory, RUNTIME), to_json(spec).encode("utf-8"))


def sweep_old(layout: Layout, retention_days: float) -> list[Path]:
    """Remove run directories, outputs and dead sessions of this machine that nobody touched for a while.

    A runtime touches the directories of its payloads every few minutes, and an announced session is left alone. Sessions
    of a cluster that has the same base directory have numbered directories of their own, see `sweep_remote`.

    Returns:
        What was removed.
    """
    oldest = time.time() - retention_days * 86400
    removed = []
    for entry in [*layout.runs.glob("*"), *layout.outputs.glob("*"), *layout.sessions.glob("*")]:
        try:
            newest = max(path.stat().st_mtime for path in (entry, *entry.glob("*.json*")))
            if newest >= oldest or (entry / SESSION).exists() or (entry.parent == layout.sessions and _is_numbered(entry)):
                continue
            if entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)
            elif entry.name.endswith((WATCH_LOG, BOOKMARK)):
                entry.unlink()
            else:
                continue
            removed.append(entry)
        except OSError:
            continue  # Another process sweeps as well, or it is not ours; what cannot be removed keeps nobody from running.
    return removed


def _is_numbered(directory: Path) -> bool:
    return any(path.name.isdecimal() for path in directory.glob("*"))
