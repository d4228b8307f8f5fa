"""Fetch outputs, remove run directories, sweep old ones.

What the user decided about every run of a resource.

What a run leaves: outputs that are brought back, and what goes at once, or when it has grown old.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..backends.base import Place
from ..backends.run_dir import Layout, sweep_old
from ..runtime.protocol.record import Record
from ..runtime.protocol.spec import is_passable
from ..ssh.base import Connection, ConnectionFailed


@dataclass(frozen=True)
class Policy:
    """What the user decided about every run of a resource; see the fields of `ComputeResource`.

    Attributes:
        home: where things are on this machine, wherever payloads run.
    """

    mode: str
    require_messages: bool
    keep_run_dirs: str
    retention_days: float
    connection_loss_timeout: float
    runtime_start_timeout: float
    home: Layout

    def keeps(self, failed: bool) -> bool:
        """Whether a run directory stays."""
        return self.keep_run_dirs == "all" or (self.keep_run_dirs == "failed" and failed)


_RETRY = 5.0
"""Seconds between two tries to bring outputs back over a connection that is lost."""
_SHOWN = 5
"""Files that a warning names."""
_SWEEP_INTERVAL = 3600.0
_last_sweep: dict[tuple[str, Path], float] = {}


def fetch_outputs(end: Record, connection: Connection, run_dir: str, outputs: Path, patience: float) -> None:
    """Copy the outputs of a payload from its working directory to this machine.

    Args:
        end: the payload's `end`, which names them; its `outputs_failed` becomes one sentence for each that cannot be copied.
        connection: how to reach them.
        run_dir: the payload's run directory.
        outputs: where they go.
        patience: seconds for which the connection may be lost.

    Raises:
        OSError: the connection is lost, or the record names a file elsewhere.
    """
    failed = end["outputs_failed"] = list(end.get("outputs_failed") or ())
    for name in [entry["name"] for entry in end["outputs"]]:
        if os.path.isabs(name) or ".." in name.split("/") or not is_passable(name):
            # The record is as good as the account over there; this machine is not that account's to write to.
            raise OSError(f"the record names {name!r}, which leaves the directory of outputs")
        try:
            _bring_back(connection, os.path.join(run_dir, "work", name), str(outputs / name), patience)
        except ConnectionFailed:
            raise
        except OSError as error:
            failed.append(f"{name}: {error.strerror or error}")


def _bring_back(connection: Connection, source: str, target: str, patience: float) -> None:
    """Copy a file to this machine, again and again while the connection is lost.

    Raises:
        OSError: it cannot be had, or not within `patience` seconds.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            return connection.download(source, target)
        except ConnectionFailed as error:
            if not error.temporary or time.monotonic() > deadline:
                raise
            time.sleep(_RETRY)


def what_is_missing(end: Record, succeeded: bool) -> list[str]:
    """Warnings about output and files that the run directory has, or lost, and the user does not get.

    Args:
        end: the payload's `end`.
        succeeded: whether the payload did; one that failed need not have made any files.
    """
    warnings = []
    if dropped := end.get("stdio_dropped"):
        warnings.append(f"{dropped} characters of output were not recorded: max_stdio_mb was reached, or the disk was full")
    left_out = [*(end.get("outputs_failed") or ()), *(end.get("outputs_left_out", ()) if succeeded else ())]
    if left_out:
        more = f"; and {len(left_out) - _SHOWN} more, see the metadata" if len(left_out) > _SHOWN else ""
        warnings.append(f"outputs left out: {'; '.join(left_out[:_SHOWN])}{more}")
    return warnings


def discard(connection: Connection, path: str) -> None:
    """Remove something that is of no more use; what stays is swept later, and no run fails because of it."""
    with suppress(OSError):
        connection.remove(path)


def sweep(place: Place, policy: Policy) -> None:
    """Remove what is older than `retention_days`, here and where payloads run, once an hour and process."""
    now, where = time.monotonic(), (place.connection.place, place.layout.base)
    if now - _last_sweep.get(where, -_SWEEP_INTERVAL) >= _SWEEP_INTERVAL:
        _last_sweep[where] = now
        sweep_old(policy.home, policy.retention_days)
        place.sweep(policy.retention_days)
