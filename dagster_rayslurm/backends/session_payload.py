"""A payload that a session has accepted. The allocation owns it, so it ends by itself or is asked to, by a file."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from typing import Any

from ..connections.base import Connection
from ..follow import Evidence
from ..interrupts import deferred_interrupts
from ..runtime.record import CANCEL, JOURNAL, LineReader
from .slurm_job import STATE_DEADLINE, SlurmJob

_QUIET = 2.0
"""Seconds of silence after which it is looked whether the session's script has ended; one small read a second."""
_KILL_DEADLINE = 10.0
"""Seconds in which a payload without grace comes to its end."""
_LOOK_INTERVAL = 0.5
_CHUNK = 1024 * 1024


class SessionPayload:
    """One payload in a session.

    Args:
        connection: reaches the files.
        job: the session's job.
        cluster_id: name of the session's cluster.
        name: what the session is called.
        run_dir: the payload's run directory.
        nonce: the payload's name.
        reused: whether the session was there before anybody waited for it.
        waited: seconds until the session had accepted it.
        poll_interval: seconds of silence after which Slurm is asked whether the session's job lives.
        log: the step's log.
    """

    waiting = False
    """Once it is accepted its record has begun."""
    requeue = False

    def __init__(
        self,
        *,
        connection: Connection,
        job: SlurmJob,
        cluster_id: str,
        name: str,
        run_dir: str,
        nonce: str,
        reused: bool,
        waited: float,
        poll_interval: float,
        log: Any,
    ) -> None:
        self.cluster_id = cluster_id
        self.job_id: str | None = job.job_id
        self._connection = connection
        self._job = job
        self._name = name
        self._run_dir = run_dir
        self._nonce = nonce
        self._reused = reused
        self._waited = waited
        self._poll_interval = poll_interval
        self._log = log
        self._followed = False
        self._cancelled = False

    @property
    def place(self) -> str:
        return self._job.place

    def ended(self, evidence: Evidence) -> str | None:
        self._followed = True
        silence = time.monotonic() - evidence.heard_at
        # While the record grows the session lives, and a short step costs slurmctld nothing.
        if silence < _QUIET and not self._job.view.over:
            return None
        self._job.observe(evidence.started_at, ask=silence >= self._poll_interval)
        return self._job.how_it_ended(started=True)

    def cancel(self, now: bool = False) -> None:
        self._cancelled = True
        with contextlib.suppress(OSError):
            text = json.dumps({"op": "cancel", "now": now})
            self._connection.write(os.path.join(self._run_dir, CANCEL), text.encode())

    def kill(self) -> None:
        """End the payload without grace. The session, which serves others, is left alone."""
        with deferred_interrupts():
            self.cancel(now=True)
            deadline = time.monotonic() + _KILL_DEADLINE
            while not self._is_over():
                if time.monotonic() > deadline:
                    self._log.error(
                        f"[rayslurm] the payload may still run: it was cancelled, and session {self._name} does not say that it "
                        f"has ended; run `scancel {self.job_id}` on {self._connection.place} to end the session and all it runs"
                    )
                    return
                time.sleep(_LOOK_INTERVAL)

    def _is_over(self) -> bool:
        """Whether its end is written, or its session has ended."""
        if self._job.observe(ask=False) and self._job.view.over:
            return True
        reader = LineReader()
        with contextlib.suppress(OSError):
            while data := self._connection.read(os.path.join(self._run_dir, JOURNAL), reader.next_read, _CHUNK):
                if any(each.get("type") == "end" and each.get("nonce") == self._nonce for each in reader.feed(data)):
                    return True
        return False

    def explain(self, evidence: Evidence) -> None:
        # A payload that was killed leaves its session as it was: Slurm will not come to a final word on that.
        alone = evidence.end is not None and evidence.end["reason"] == "exit"
        self._job.explain(evidence, patience=0.0 if alone else STATE_DEADLINE)

    def metadata(self, evidence: Evidence) -> Mapping[str, Any]:
        end = evidence.end or {}
        metadata = {
            **self._job.metadata(evidence),
            "Slurm session": self._name,
            "Session reused": self._reused,
            "Queue wait (s)": round(self._waited, 2),
        }
        if leaks := _leaks(evidence):
            metadata["Left on the cluster"] = leaks
        shared = (end.get("usage") or {}).get("shared")
        if shared:
            metadata["Payloads beside it"] = int(shared)
        return metadata

    def release(self, evidence: Evidence) -> None:
        """Let go of it; the session goes on. One that nobody has followed is ended first."""
        if leaks := _leaks(evidence):
            self._log.warning(f"[rayslurm] the payload left on the session's cluster: {leaks}")
        if evidence.end is None and not self._followed and not self._cancelled:
            self.kill()


def _leaks(evidence: Evidence) -> str:
    """What the payload left alive on the cluster that others use after it."""
    return "; ".join(map(str, ((evidence.end or {}).get("context") or {}).get("leaks") or []))
