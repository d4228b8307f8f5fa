"""Run directories: their files before a runtime starts, and the sweep of old ones on this machine."""

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
"""Suffix of the log of a process that waits to end a session with its run."""

BOOKMARK = ".followed"
"""Suffix of the file that says how far a remote payload's output was shown."""


@dataclass(frozen=True)
class Layout:
    """Directories below a base directory, the same on this machine and on a cluster."""

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
    """The files of a run directory before its runtime starts.

    The record's files are among them: on NFS, a file that was missing at one look stays missing for up to a minute.
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
    """Create a run directory with its files; raises OSError if one cannot be written."""
    connection.make_dir(run_dir)
    for name, content in files.items():
        connection.write(os.path.join(run_dir, name), content)


def write_runtime_spec(connection: Connection, directory: str, spec: RuntimeSpec) -> None:
    """Write a runtime's start record; raises OSError if it cannot be written."""
    connection.make_dir(directory)
    connection.write(os.path.join(directory, RUNTIME), to_json(spec).encode("utf-8"))


def sweep_old(layout: Layout, retention_days: float) -> list[Path]:
    """Remove run directories, outputs and dead sessions of this machine that were not touched for a while; returns their paths.

    A runtime touches the directories of its payloads every few minutes, and an announced session stays. Sessions of a
    cluster with the same base directory have numbered directories, which `sweep_remote` removes.
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
            continue  # Another process sweeps, too, or the entry is another user's.
    return removed


def _is_numbered(directory: Path) -> bool:
    return any(path.name.isdecimal() for path in directory.glob("*"))
