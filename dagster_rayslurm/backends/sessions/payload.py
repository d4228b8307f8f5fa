"""A payload that a session has accepted: follow the payload, ask for its end, and explain its end.

The session's runtime runs the payload. A file in the payload's run directory asks the runtime to end the payload.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...follow import Evidence
from ...runtime.protocol.messages import EndReason, Operation
from ...runtime.protocol.record import CANCEL
from ..base import CancelRequest, RunningPayload, deferred_interrupts, write_cancel_request
from ..ownership import Journal
from ..slurm_job import STATE_TIMEOUT
from .acquire import Allocation, Site
from .registry import LiveSession

# Seconds without a new line in the record after which the exit code of the session's batch script is polled; one small read a
# second.
_EXIT_POLL_AFTER = 2.0
_KILL_TIMEOUT = 10.0  # Seconds in which a payload ends without a grace period, once the cancel request was delivered.
_DELIVERY_TIMEOUT = 60.0  # Seconds in which the cancel request is delivered; as many as Slurm has to confirm the end of a job.
# Seconds without a new line in the record after which the session is asked whether it still has the payload: the end of a
# payload may be missing from the record. The pauses between these questions grow, up to `_DESCRIBE_INTERVAL` seconds.
_DESCRIBE_AFTER = 60.0
_DESCRIBE_INTERVAL = 900.0
_POLL_INTERVAL = 0.5  # Seconds between two checks of a payload that is being killed.


@dataclass(eq=False)
class SessionPayload(RunningPayload):
    """One payload that a session has accepted; see `RunningPayload` for the methods.

    `waiting` is always False, because the session begins the run record as soon as it accepts the payload.
    """

    site: Site
    session: LiveSession
    job: Allocation
    poll_interval: float = 0.0  # Seconds without a new line in the record after which the queue is polled for the session's job.
    reused: bool | None = None  # Whether the session already accepted requests when this step found it; None if not known.
    waited: float | None = None  # Seconds until the session accepted the payload; None if that is not known.

    def __post_init__(self) -> None:
        self.cluster_id = self.session.announcement.cluster_id
        self.job_id: str | None = self.job.job_id
        self.name = "/".join(self.session.directory.split("/")[-2:])  # Of the session, and the number of its generation.
        self._log, self._connection, self._run_dir = self.site.step.log, self.site.connection, self.site.run_dir
        self._journal = Journal(self._connection, self._run_dir, self.site.plan.payload.nonce)
        self._cancel_request = CancelRequest(self._send_cancel, self._log)
        self._followed = self._cancelled = self._missed = False
        self._describe_at = _DESCRIBE_AFTER

    def poll(self, evidence: Evidence) -> str | None:
        self._followed = True
        self._cancel_request.resend_for(evidence)
        silence = time.monotonic() - evidence.last_growth
        if self._is_lost(silence):
            evidence.ended_unrecorded = (
                f"its session, {self.name}, no longer has it; what it wrote is in {self._run_dir} on {self._connection.place}"
            )
            return "its session no longer has it"
        # While the record grows the session lives, and a short step costs slurmctld nothing.
        if silence < _EXIT_POLL_AFTER and not self.job.status.over:
            return None
        self.job.observe(evidence.started_at, ask=silence >= self.poll_interval)
        return self.job.end_description(started=True)

    def _is_lost(self, silence: float) -> bool:
        """Returns True if the session answers that it does not have this payload; two such answers in a row are needed.

        The session is asked only after some seconds of silence, and then at intervals; otherwise the result is False. `silence`
        is the number of seconds since the last new line in the record.
        """
        if silence < _DESCRIBE_AFTER:
            self._describe_at, self._missed = _DESCRIBE_AFTER, False
        elif silence >= self._describe_at and not self.job.status.over:
            self._describe_at = silence + min(silence, _DESCRIBE_INTERVAL)
            with contextlib.suppress(OSError):
                payloads = self.site.send(self.session, {"op": Operation.DESCRIBE}).get("payloads")
                before = self._missed
                self._missed = payloads is not None and self._run_dir not in [each["run_dir"] for each in payloads]
                return before and self._missed
        return False

    def cancel(self, now: bool = False) -> None:
        self._cancelled = True
        self._cancel_request.send(now)

    def _send_cancel(self, now: bool) -> None:
        if self.site.step.owner.confirm():
            write_cancel_request(self._connection, self._run_dir, now)

    def kill(self) -> None:
        """End the payload without grace period, and wait for its end. The session keeps serving other payloads.

        Logs an error if the end is not seen in time. Does nothing if a later attempt owns the payload.
        """
        with deferred_interrupts():
            if not self.site.step.owner.confirm_or_assume():
                return
            began = time.monotonic()
            self.cancel(now=True)
            request, file = self._cancel_request, os.path.join(self._run_dir, CANCEL)
            while not self._is_over():
                since, timeout = began, _DELIVERY_TIMEOUT
                if request.delivered:
                    since, timeout = max(began, request.sent_at), _KILL_TIMEOUT
                if time.monotonic() - since > timeout:
                    why = f"session {self.name} does not say that it has ended"
                    if not request.delivered:
                        why = f"it could not be told to end by {file} ({request.error})"
                    self._log.error(
                        f"[rayslurm] the payload may still run, as {why}; run `{self.site.end_command} {self.job.job_id}` on "
                        f"{self._connection.place} to end the session and all it runs"
                    )
                    return
                time.sleep(_POLL_INTERVAL)
                request.resend()

    def _is_over(self) -> bool:
        """Returns whether the payload's end is recorded, or the session's job has ended."""
        if self.job.observe(ask=False) and self.job.status.over:
            return True
        with contextlib.suppress(OSError):
            return self._journal.start_and_end()[1] is not None
        return False

    def explain(self, evidence: Evidence) -> None:
        # If only the payload ended, its session's job reaches no final state to wait for.
        alone = evidence.end is not None and evidence.end["reason"] == EndReason.EXIT
        self.job.explain(evidence, timeout=0.0 if alone else STATE_TIMEOUT)

    def metadata(self, evidence: Evidence) -> Mapping[str, Any]:
        metadata = {**self.job.metadata(evidence), "Slurm session": self.name}
        if self.reused is not None:
            metadata["Session reused"] = self.reused
        if self.waited is not None:
            metadata["Queue wait (s)"] = round(self.waited, 2)
        if leaks := _leaks(evidence):
            metadata["Left on the cluster"] = leaks
        shared = ((evidence.end or {}).get("usage") or {}).get("shared")
        if shared:
            metadata["Payloads beside it"] = int(shared)
        return metadata

    def release(self, evidence: Evidence) -> None:
        """Log a warning about what the payload left alive in the session's Ray cluster. Called at the end of the step.

        Also kills the payload if its end is not recorded, and neither `poll` nor `cancel` was called before.
        """
        if leaks := _leaks(evidence):
            self._log.warning(f"[rayslurm] the payload left on the session's cluster: {leaks}")
        if evidence.end is None and not self._followed and not self._cancelled:
            self.kill()


def _leaks(evidence: Evidence) -> str:
    """Returns sentences about what the payload left alive in the session's Ray cluster, such as actors; "" for nothing."""
    return "; ".join(map(str, ((evidence.end or {}).get("context") or {}).get("leaks") or []))
