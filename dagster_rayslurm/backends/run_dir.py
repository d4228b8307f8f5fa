"""Run directories: the files that they have before a runtime starts, and the removal of old directories on this machine."""

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
"""Suffix of the log of the process that waits for the end of a Dagster run, to end the session of that run."""

BOOKMARK = ".followed"
"""Suffix of the file that notes how much of a payload's output on the cluster was shown in Dagster."""


@dataclass(frozen=True)
class Layout:
    """Names of the directories below the base directory, the same on this machine and on a cluster."""

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
    """Returns the files that a run directory has before its runtime starts, by name.

    Empty files for the record are among them: on NFS, a file that was once looked for in vain stays missing for a minute.
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
    """Create a run directory with the given files; raises OSError if a file cannot be written."""
    connection.make_dir(run_dir)
    for name, content in files.items():
        connection.write(os.path.join(run_dir, name), content)


def write_runtime_spec(connection: Connection, directory: str, spec: RuntimeSpec) -> None:
    """Write `runtime.json`, with which a runtime starts; raises OSError if the file cannot be written."""
    connection.make_dir(directory)
    connection.write(os.path.join(directory, RUNTIME), to_json(spec).encode("utf-8"))


def sweep_old(layout: Layout, retention_days: float) -> list[Path]:
    """Remove old run directories, outputs and ended sessions from this machine; returns their paths.

    Old is what was not touched for `retention_days`. A runtime touches the directories of its payloads every few minutes. A
    session that its file announces stays. If a cluster has the same base directory, its sessions have numbered directories,
    which only `sweep_remote` removes.
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
            continue  # Another process removed the entry, or the entry belongs to another user.
    return removed


def _is_numbered(directory: Path) -> bool:
    """Whether a session's directory has numbered directories, as only sessions in Slurm jobs have."""
    return any(path.name.isdecimal() for path in directory.glob("*"))
