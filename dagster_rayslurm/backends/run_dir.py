"""Run directories: the files that they have before a runtime starts, requests to end a payload, and the sweep of a base."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dagster_pipes import PipesContextData

from ..edge.sweep import SWEPT, sweep
from ..follow import Evidence
from ..plan import Plan
from ..runtime.protocol.record import CANCEL, CONTEXT, JOURNAL, PAYLOAD, SECRETS, STDIO
from ..runtime.protocol.spec import to_json
from ..slurm.shared_queue import fetch_queue
from ..ssh.base import Connection


@dataclass(frozen=True)
class Layout:
    """The directories below the base directory, the same on this machine and on a cluster."""

    base: Path

    runs = property(lambda self: self.base / "runs")
    outputs = property(lambda self: self.base / "outputs")
    runtimes = property(lambda self: self.base / "runtime")
    data = property(lambda self: self.base / "data")
    queue = property(lambda self: self.base / "queue")
    environments = property(lambda self: self.base / "environments")


def run_files(plan: Plan, context: PipesContextData) -> dict[str, bytes]:
    """Returns the files that a run directory has before its runtime starts, by name.

    Empty files for the record are among them: on NFS, a file that was once looked for in vain stays missing for a minute.
    """
    files = {PAYLOAD: to_json(plan.payload), CONTEXT: json.dumps(context), JOURNAL: "", STDIO: ""}
    if plan.secret_env:
        files[SECRETS] = json.dumps(plan.secret_env)
    return {name: content.encode("utf-8") for name, content in files.items()}


def write_run_dir(connection: Connection, run_dir: str, files: Mapping[str, bytes]) -> None:
    """Create a run directory with the given files; raises OSError if a file cannot be written."""
    connection.make_dir(run_dir)
    for name, content in files.items():
        connection.write(os.path.join(run_dir, name), content)


_INTERVAL = 1.0  # Seconds between two attempts to deliver a request.


def cancel_path(run_dir: str) -> str:
    """Returns the path of the file in which a runtime looks for a cancel request."""
    return os.path.join(run_dir, CANCEL)


def cancel_request_json(now: bool) -> str:
    """Returns the content of a cancel request's file; `now` leaves the payload no grace period."""
    return json.dumps({"op": "cancel", "now": now})


def write_cancel_request(connection: Connection, run_dir: str, now: bool) -> None:
    """Ask the runtime of a run directory to end its payload, at once or after its grace period."""
    connection.write(cancel_path(run_dir), cancel_request_json(now).encode())


@dataclass
class CancelRequest:
    """The cancel request for one payload: made by `send`, and repeated by `resend` until it is delivered."""

    deliver: Callable[[bool], Any]  # Called with `now` to deliver the request; raises OSError on failure.
    log: Any
    now: bool | None = None  # Whether the request leaves the payload no grace period; None before `send`.
    delivered: bool = False
    error: OSError | None = None  # Why the last delivery failed; None if it worked.
    sent_at: float = 0.0  # Time of the last try to deliver the request, by this machine's monotonic clock.

    def send(self, now: bool) -> None:
        """Send a request, unless an equal one was sent; a request without a grace period replaces one with a grace period."""
        if self.now is None or now > self.now:
            self.now, self.delivered, self.sent_at = now, False, -math.inf
            self.resend()

    def resend(self) -> None:
        """Repeat a request that was not delivered, at most once a second."""
        if self.now is None or self.delivered or time.monotonic() - self.sent_at < _INTERVAL:
            return
        try:
            self.deliver(self.now)
            self.delivered, self.error = True, None
        except OSError as error:
            if self.error is None:
                self.log.warning(f"[rayslurm] the payload cannot be told to end, which is tried again: {error}")
            self.error = error
        self.sent_at = time.monotonic()

    def resend_for(self, evidence: Evidence) -> None:
        """Resend the request; mark the payload unreachable in the evidence if a request without grace period cannot arrive."""
        self.resend()
        if self.now and self.error is not None:
            evidence.unreachable = str(self.error)


def sweep_remote(
    connection: Connection, base: str, retention_days: float, *, every_minutes: int = 60, timeout: float = 600.0
) -> list[str]:
    """Remove run directories, sessions, bundles and runtimes not used for `retention_days`, and leftovers of killed processes.

    A session's directory stays while its job may live. The newest directory of a session's name stays as long as anybody
    looks for that session, because its number determines the next number. A bundle or runtime stays while a run or session
    names it. Only one process sweeps at a time, on any machine, and once in `every_minutes` (0: always).

    Returns the removed paths, relative to the base directory. Raises OSError if the cluster cannot be reached, the base
    directory cannot be written, or the timeout is over; the next sweep removes the rest.
    """
    swept = connection.stat(os.path.join(base, SWEPT))
    # If the clocks differ, a sweep starts in vain, or later.
    if every_minutes and swept is not None and abs(time.time() - swept.modified) < 60.0 * every_minutes:
        return []
    jobs = None
    if connection.stat(os.path.join(base, "sessions")) is not None:
        with contextlib.suppress(OSError):
            jobs = [row.job_id for row in fetch_queue(connection).rows]
    age = max(60.0, retention_days * 86400.0)
    return connection.call(sweep, base, age, 60.0 * every_minutes, jobs, timeout=timeout)
