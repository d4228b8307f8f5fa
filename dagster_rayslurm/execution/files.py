"""Fetches the output files of a run, and removes files that are no longer needed."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from ..backends.base import Backend
from ..backends.layout import Layout
from ..compute_fields import ComputeFields
from ..edge.base_directory import sweep_runs
from ..runtime.protocol.record import Record
from ..runtime.protocol.spec import is_passable
from ..ssh.base import Connection, ConnectionFailed

_RETRY = 5.0  # Seconds between two tries to download a file over a lost connection.
_SHOWN = 5  # Most files that a warning names.
_SWEEP_INTERVAL = 3600.0  # Seconds between two sweeps of one base directory by one process.
# When this process last swept each base directory, by host and path, by the monotonic clock.
_last_sweep: dict[tuple[str, Path], float] = {}


def fetch_outputs(end: Record, connection: Connection, run_dir: str, outputs: Path, timeout: float) -> None:
    """Copy a payload's output files from its run directory `run_dir` to the directory `outputs` on this machine.

    `end` is the payload's `end` record, which lists the output files. If a file cannot be copied, the function appends a sentence
    to the list `end["outputs_failed"]`, and goes on. Raises OSError if the connection is lost for `timeout` seconds, or if the
    record names a file outside the payload's working directory.
    """
    failed = end["outputs_failed"] = list(end.get("outputs_failed") or ())
    for name in [entry["name"] for entry in end["outputs"]]:
        if os.path.isabs(name) or ".." in name.split("/") or not is_passable(name):
            # The account on the cluster may be compromised; it must not make this machine write outside `outputs`.
            raise OSError(f"the record names {name!r}, which leaves the directory of outputs")
        try:
            _download(connection, os.path.join(run_dir, "work", name), str(outputs / name), timeout)
        except ConnectionFailed:
            raise
        except OSError as error:
            failed.append(f"{name}: {error.strerror or error}")


def _download(connection: Connection, source: str, target: str, timeout: float) -> None:
    """Download the file `source` on the cluster to the path `target` on this machine, and wait for the end.

    While the connection is lost, the function tries again for up to `timeout` seconds; then it raises ConnectionFailed. Any other
    OSError is raised at once, and so is a ConnectionFailed that cannot get better, such as a refused login.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            return connection.download(source, target)
        except ConnectionFailed as error:
            if not error.temporary or time.monotonic() > deadline:
                raise
            time.sleep(_RETRY)


def missing_output_warnings(end: Record, succeeded: bool) -> list[str]:
    """Returns warnings: if a part of stdout or stderr was not recorded, and if output files were not copied; [] if all is there.

    `end` is the payload's `end` record. `succeeded` says whether the payload succeeded. If the payload has not succeeded, files
    that do not exist or exceed the size limit get no warning.
    """
    warnings = []
    if dropped := end.get("stdio_dropped"):
        warnings.append(f"{dropped} characters of output were not recorded: max_stdio_mb was reached, or the disk was full")
    left_out = [*(end.get("outputs_failed") or ()), *(end.get("outputs_left_out", ()) if succeeded else ())]
    if left_out:
        more = f"; and {len(left_out) - _SHOWN} more, see the metadata" if len(left_out) > _SHOWN else ""
        warnings.append(f"outputs left out: {'; '.join(left_out[:_SHOWN])}{more}")
    return warnings


def keeps_run_dir(resource: ComputeFields, failed: bool) -> bool:
    """Returns whether `keep_run_dirs` of a resource keeps the run directory of a run; `failed` says whether the run failed."""
    return resource.keep_run_dirs == "all" or (resource.keep_run_dirs == "failed" and failed)


def discard(connection: Connection, path: str) -> None:
    """Remove the file or directory `path` on the machine of `connection`. Ignores an OSError: old files are removed later."""
    with suppress(OSError):
        connection.remove(path)


def sweep_old_files(backend: Backend, home: Layout, retention_days: float) -> None:
    """Remove run directories and other files of this package that were not used for `retention_days` days.

    The function removes files from the base directory on this machine, whose paths `home` has. It also removes files from the
    base directory on the machine or cluster where payloads run (see `Backend.sweep`). Does nothing if this process has called the
    function for the latter directory less than an hour ago.
    """
    now, base = time.monotonic(), (backend.connection.place, backend.layout.base)
    if now - _last_sweep.get(base, -_SWEEP_INTERVAL) >= _SWEEP_INTERVAL:
        _last_sweep[base] = now
        sweep_runs(str(home.base), retention_days * 86400)
        backend.sweep(retention_days)
