"""A payload that a session has accepted. The allocation owns it, so it ends by itself or is asked to, by a file."""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections.abc import Callable, Mapping
from typing import Any

from ...follow import Evidence
from ...interrupts import deferred_interrupts
from ...runtime.protocol.end import EndReason
from ...runtime.protocol.record import JOURNAL, LineReader
from ...ssh.base import Connection
from ..base import Step
from ..cancel_request import CancelRequest, cancel_path, cancel_request_json, write_cancel_request
from ..slurm_job import STATE_DEADLINE, SlurmJob

_QUIET = 2.0
"""Seconds of silence after which it is looked whether the session's script has ended; one small read a second."""
_KILL_DEADLINE = 10.0
"""Seconds in which a payload without grace comes to its end, once it was told to."""
_TELL_DEADLINE = 60.0
"""Seconds in which that can be told; as many as Slurm has to confirm the end of a job."""
_ASK_AFTER = 60.0
"""Seconds of silence after which a session is asked whether it has the payload still: it may have ended, and the disk where
that was to be written was full. The pauses to the next questions grow with the silence."""
_ASK_EVERY = 900.0
"""Longest pause between two such questions."""
_SETTLE = 30.0
"""Seconds in which the end comes into sight of a payload that its session no longer has, or is written after all."""
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
        reused: whether the session was there before anybody waited for it; None if that is not known.
        waited: seconds until the session had accepted it; None if that is not known.
        poll_interval: seconds of silence after which Slurm is asked whether the session's job lives.
        describe: asks the session what it has.
        step: who asks.
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
        reused: bool | None,
        waited: float | None,
        poll_interval: float,
        describe: Callable[[], Mapping[str, Any]],
        step: Step,
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
        self._describe = describe
        self._step, self._log = step, step.log
        self._followed = False
        self._cancelled = False
        self._order = CancelRequest(self._give, step.log)
        self._ask_at = _ASK_AFTER
        self._forgotten_since: float | None = None
        """Since when it is known that the session no longer has the payload."""

    @property
    def place(self) -> str:
        return self._job.place

    def poll(self, evidence: Evidence) -> str | None:
        self._followed = True
        self._order.resend_for(evidence)
        silence = time.monotonic() - evidence.last_growth
        if self._is_forgotten(silence):
            evidence.ended_unrecorded = (
                f"its session, {self._name}, no longer has it; what it wrote is in {self._run_dir} on {self._connection.place}"
            )
            return "its session no longer has it"
        # While the record grows the session lives, and a short step costs slurmctld nothing.
        if silence < _QUIET and not self._job.view.over:
            return None
        self._job.observe(evidence.started_at, ask=silence >= self._poll_interval)
        return self._job.end_description(started=True)

    def _is_forgotten(self, silence: float) -> bool:
        """Whether the session has not had the payload for a while, and yet nothing more was written."""
        if silence < _ASK_AFTER:
            self._ask_at, self._forgotten_since = _ASK_AFTER, None
        elif self._forgotten_since is not None:
            return time.monotonic() - self._forgotten_since >= _SETTLE
        elif silence >= self._ask_at and not self._job.view.over:
            self._ask_at = silence + min(silence, _ASK_EVERY)
            with contextlib.suppress(OSError):
                said = self._describe()
                payloads = said.get("payloads")
                if said.get("ok") and isinstance(payloads, list) and self._run_dir not in [each["run_dir"] for each in payloads]:
                    self._forgotten_since = time.monotonic()
        return False

    def cancel(self, now: bool = False) -> None:
        self._cancelled = True
        self._order.send(now)

    def _give(self, now: bool) -> None:
        """Tell the session to end the payload.

        Raises:
            OSError: it cannot be told.
        """
        if self._step.may_end():
            write_cancel_request(self._connection, self._run_dir, now)

    def kill(self) -> None:
        """End the payload without grace. The session, which serves others, is left alone."""
        with deferred_interrupts():
            if not self._step.should_end():
                return
            began = time.monotonic()
            self.cancel(now=True)
            order, file = self._order, cancel_path(self._run_dir)
            while not self._is_over():
                now = time.monotonic()
                if order.delivered and now - max(began, order.sent_at) > _KILL_DEADLINE:
                    self._log.error(
                        f"[rayslurm] the payload may still run: {file} tells it to end, and session {self._name} does not say "
                        f"that it has; run `scancel {self.job_id}` on {self._connection.place} to end the session and all it runs"
                    )
                    return
                if not order.delivered and now - began > _TELL_DEADLINE:
                    self._log.error(
                        f"[rayslurm] the payload may still run, as it could not be told to end ({order.error}); run "
                        f"`echo '{cancel_request_json(True)}' > {shlex.quote(file)}` on {self._connection.place}, or "
                        f"`scancel {self.job_id}` to end session {self._name} and all it runs"
                    )
                    return
                time.sleep(_LOOK_INTERVAL)
                order.resend()

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
        alone = evidence.end is not None and evidence.end["reason"] == EndReason.EXIT
        self._job.explain(evidence, patience=0.0 if alone else STATE_DEADLINE)

    def metadata(self, evidence: Evidence) -> Mapping[str, Any]:
        end = evidence.end or {}
        metadata = {**self._job.metadata(evidence), "Slurm session": self._name}
        if self._reused is not None:
            metadata["Session reused"] = self._reused
        if self._waited is not None:
            metadata["Queue wait (s)"] = round(self._waited, 2)
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
