"""A payload that a session has accepted: follow it, ask it to end, and explain its end.

The session's runtime runs the payload. A file in the payload's run directory asks the runtime to end it.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...follow import Evidence
from ...runtime.protocol.messages import EndReason
from ...runtime.protocol.record import JOURNAL, LineReader
from ...ssh.base import Connection
from ..base import CancelRequest, Step, cancel_path, cancel_request_json, deferred_interrupts, write_cancel_request
from ..slurm_job import STATE_TIMEOUT, SlurmJob

_EXIT_POLL_AFTER = 2.0
"""Seconds without a new line in the record after which the exit code of the session's batch script is polled; one small read a
second."""
_KILL_TIMEOUT = 10.0
"""Seconds in which a payload ends without a grace period, once the cancel request was delivered."""
_DELIVERY_TIMEOUT = 60.0
"""Seconds in which the cancel request is delivered; as many as Slurm has to confirm the end of a job."""
_DESCRIBE_AFTER = 60.0
"""Seconds without a new line in the record after which the session is asked whether it still has the payload. The end of a
payload may be missing from the record, because the disk was full. The pauses between these questions grow."""
_DESCRIBE_INTERVAL = 900.0
"""Longest pause, in seconds, between two of these questions."""
_RECORD_TIMEOUT = 30.0
"""Seconds in which the end of a payload appears in the record after the session says that it no longer has the payload."""
_POLL_INTERVAL = 0.5
"""Seconds between two looks at a payload that is being killed."""
_CHUNK = 1024 * 1024
"""Bytes of the record that are read at a time."""


@dataclass(kw_only=True, eq=False)
class SessionPayload:
    """One payload in a session; a `RunningPayload`.

    Attributes:
        name: name of the session and number of its generation.
        reused: whether the session accepted requests before this step came; None if that is not known.
        waited: seconds until the session accepted the payload; None if that is not known.
        poll_interval: seconds without a new line in the record after which the queue is polled for the session's job.
        describe: asks the session for its description, which lists the session's payloads.
    """

    connection: Connection
    job: SlurmJob
    cluster_id: str
    name: str
    run_dir: str
    nonce: str
    reused: bool | None
    waited: float | None
    poll_interval: float
    describe: Callable[[], Mapping[str, Any]]
    step: Step

    waiting = False  # The record of an accepted payload has begun.
    requeue = False

    def __post_init__(self) -> None:
        self.job_id: str | None = self.job.job_id
        self._log = self.step.log
        self._followed = False
        self._cancelled = False
        self._cancel_request = CancelRequest(self._send_cancel, self.step.log)
        self._describe_at = _DESCRIBE_AFTER
        self._missing_since: float | None = None
        """When the session first said that it no longer has the payload (monotonic clock); None before."""

    @property
    def place(self) -> str:
        return self.job.place

    def poll(self, evidence: Evidence) -> str | None:
        self._followed = True
        self._cancel_request.resend_for(evidence)
        silence = time.monotonic() - evidence.last_growth
        if self._is_lost(silence):
            evidence.ended_unrecorded = (
                f"its session, {self.name}, no longer has it; what it wrote is in {self.run_dir} on {self.connection.place}"
            )
            return "its session no longer has it"
        # While the record grows the session lives, and a short step costs slurmctld nothing.
        if silence < _EXIT_POLL_AFTER and not self.job.status.over:
            return None
        self.job.observe(evidence.started_at, ask=silence >= self.poll_interval)
        return self.job.end_description(started=True)

    def _is_lost(self, silence: float) -> bool:
        """Whether the session has no longer had the payload for `_RECORD_TIMEOUT`, while the record still has no end."""
        if silence < _DESCRIBE_AFTER:
            self._describe_at, self._missing_since = _DESCRIBE_AFTER, None
        elif self._missing_since is not None:
            return time.monotonic() - self._missing_since >= _RECORD_TIMEOUT
        elif silence >= self._describe_at and not self.job.status.over:
            self._describe_at = silence + min(silence, _DESCRIBE_INTERVAL)
            with contextlib.suppress(OSError):
                answer = self.describe()
                payloads = answer.get("payloads")
                known = answer.get("ok") and isinstance(payloads, list)
                if known and self.run_dir not in [each["run_dir"] for each in payloads or ()]:
                    self._missing_since = time.monotonic()
        return False

    def cancel(self, now: bool = False) -> None:
        self._cancelled = True
        self._cancel_request.send(now)

    def _send_cancel(self, now: bool) -> None:
        if self.step.may_end():
            write_cancel_request(self.connection, self.run_dir, now)

    def kill(self) -> None:
        """End the payload without grace period; the session keeps serving other payloads."""
        with deferred_interrupts():
            if not self.step.should_end():
                return
            began = time.monotonic()
            self.cancel(now=True)
            request, file = self._cancel_request, cancel_path(self.run_dir)
            while not self._is_over():
                now = time.monotonic()
                if request.delivered and now - max(began, request.sent_at) > _KILL_TIMEOUT:
                    self._log.error(
                        f"[rayslurm] the payload may still run: {file} tells it to end, and session {self.name} does not say "
                        f"that it has; run `scancel {self.job_id}` on {self.connection.place} to end the session and all it runs"
                    )
                    return
                if not request.delivered and now - began > _DELIVERY_TIMEOUT:
                    self._log.error(
                        f"[rayslurm] the payload may still run, as it could not be told to end ({request.error}); run "
                        f"`echo '{cancel_request_json(True)}' > {shlex.quote(file)}` on {self.connection.place}, or "
                        f"`scancel {self.job_id}` to end session {self.name} and all it runs"
                    )
                    return
                time.sleep(_POLL_INTERVAL)
                request.resend()

    def _is_over(self) -> bool:
        """Whether the payload's end is recorded, or the session's job has ended."""
        if self.job.observe(ask=False) and self.job.status.over:
            return True
        reader = LineReader()
        with contextlib.suppress(OSError):
            while data := self.connection.read(os.path.join(self.run_dir, JOURNAL), reader.next_read, _CHUNK):
                if any(each.get("type") == "end" and each.get("nonce") == self.nonce for each in reader.feed(data)):
                    return True
        return False

    def explain(self, evidence: Evidence) -> None:
        # If only the payload ended, its session's job reaches no final state to wait for.
        alone = evidence.end is not None and evidence.end["reason"] == EndReason.EXIT
        self.job.explain(evidence, timeout=0.0 if alone else STATE_TIMEOUT)

    def metadata(self, evidence: Evidence) -> Mapping[str, Any]:
        end = evidence.end or {}
        metadata = {**self.job.metadata(evidence), "Slurm session": self.name}
        if self.reused is not None:
            metadata["Session reused"] = self.reused
        if self.waited is not None:
            metadata["Queue wait (s)"] = round(self.waited, 2)
        if leaks := _leaks(evidence):
            metadata["Left on the cluster"] = leaks
        shared = (end.get("usage") or {}).get("shared")
        if shared:
            metadata["Payloads beside it"] = int(shared)
        return metadata

    def release(self, evidence: Evidence) -> None:
        """Called when this step is done with the payload; kills a payload that was neither followed nor cancelled."""
        if leaks := _leaks(evidence):
            self._log.warning(f"[rayslurm] the payload left on the session's cluster: {leaks}")
        if evidence.end is None and not self._followed and not self._cancelled:
            self.kill()


def _leaks(evidence: Evidence) -> str:
    """What the payload left alive on the Ray cluster that later payloads use, in words; "" for nothing."""
    return "; ".join(map(str, ((evidence.end or {}).get("context") or {}).get("leaks") or []))
