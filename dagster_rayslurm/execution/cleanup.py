"""After a run: fetch the payload's output files, remove the run directory, and sweep old run directories."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..backends.base import Backend, Layout
from ..edge.base_directory import sweep_runs
from ..runtime.protocol.record import Record
from ..runtime.protocol.spec import is_passable
from ..ssh.base import Connection, ConnectionFailed


@dataclass(frozen=True)
class RunSettings:
    """The fields of `ComputeResource` that every run needs; see there for their meaning."""

    mode: str
    require_messages: bool
    keep_run_dirs: str
    retention_days: float
    connection_loss_timeout: float
    runtime_start_timeout: float
    home: Layout  # The base directory on this machine, wherever payloads run.

    def keeps_run_dir(self, failed: bool) -> bool:
        """Whether the run directory stays after a run that failed or succeeded."""
        return self.keep_run_dirs == "all" or (self.keep_run_dirs == "failed" and failed)


_RETRY = 5.0  # Seconds between two tries to download a file over a lost connection.
_SHOWN = 5  # Most files that a warning names.
_SWEEP_INTERVAL = 3600.0  # Seconds between two sweeps of one base directory by one process.
# When this process last swept each base directory, by host and path, by the monotonic clock.
_last_sweep: dict[tuple[str, Path], float] = {}


def fetch_outputs(end: Record, connection: Connection, run_dir: str, outputs: Path, timeout: float) -> None:
    """Copy a payload's output files from its working directory to this machine.

    The `end` record names the files; its `outputs_failed` gets a sentence for each failed copy. Raises OSError if the connection
    is lost for `timeout` seconds, or the record names a file outside the working directory.
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
    """Download a file; while the connection is lost, try again for up to `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            return connection.download(source, target)
        except ConnectionFailed as error:
            if not error.temporary or time.monotonic() > deadline:
                raise
            time.sleep(_RETRY)


def missing_output_warnings(end: Record, succeeded: bool) -> list[str]:
    """Returns warnings about lost output and missing output files; a failed payload need not have made all its files."""
    warnings = []
    if dropped := end.get("stdio_dropped"):
        warnings.append(f"{dropped} characters of output were not recorded: max_stdio_mb was reached, or the disk was full")
    left_out = [*(end.get("outputs_failed") or ()), *(end.get("outputs_left_out", ()) if succeeded else ())]
    if left_out:
        more = f"; and {len(left_out) - _SHOWN} more, see the metadata" if len(left_out) > _SHOWN else ""
        warnings.append(f"outputs left out: {'; '.join(left_out[:_SHOWN])}{more}")
    return warnings


def discard(connection: Connection, path: str) -> None:
    """Remove a file or directory; if that fails, a later sweep removes it."""
    with suppress(OSError):
        connection.remove(path)


def sweep(backend: Backend, settings: RunSettings) -> None:
    """Remove files older than `retention_days` on this machine and where payloads run; at most once an hour per process."""
    now, base = time.monotonic(), (backend.connection.place, backend.layout.base)
    if now - _last_sweep.get(base, -_SWEEP_INTERVAL) >= _SWEEP_INTERVAL:
        _last_sweep[base] = now
        sweep_runs(str(settings.home.base), settings.retention_days * 86400)
        backend.sweep(settings.retention_days)
