"""Follow running payloads to their ends, and end them after an interrupt or if a runtime does not start in time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import dagster as dg

from ..backends.base import RunningPayload
from ..errors import FailureKind, RunFailure
from ..follow import Evidence, Follower, follow_all
from ..interrupts import deferred_interrupts
from ..outcome import judge
from ..outcome.metadata import failure_metadata, run_metadata
from ..outcome.usage import Metadata
from ..plan import Plan
from ..slurm.accounting import relevant_lines
from .cleanup import RunSettings

_CANCEL_MARGIN = 15.0
"""Seconds beyond the grace period for which a cancelled payload's record is still read."""


@dataclass(frozen=True)
class FollowedPayload:
    """One running payload with the follower of its record.

    Attributes:
        component: the component that runs it; None for the only payload of a run.
    """

    plan: Plan
    run_dir: str
    running: RunningPayload
    follower: Follower
    component: str | None = None

    @property
    def evidence(self) -> Evidence:
        """What the follower knows of the payload so far."""
        return self.follower.evidence

    @property
    def label(self) -> str:
        """The beginning of each line about the payload in the Dagster log; "" for the only payload of a run."""
        return "" if self.component is None else f"component {self.component!r}: "

    def metadata(self, mode: str) -> Metadata:
        """Returns the Dagster metadata of the payload, for a result and a failure alike."""
        # Names of jobs come before measured values.
        figures = run_metadata(self.evidence.end_or_partial, mode, self.running.cluster_id)
        return {**self.running.metadata(self.evidence), **figures}


def follow_until_end(
    payloads: Sequence[FollowedPayload],
    context: dg.OpExecutionContext,
    settings: RunSettings,
    superseded: Callable[[], bool] = lambda: False,
) -> None:
    """Follow payloads to their ends; after an interrupt, cancel them, follow them to their ends, and raise the interrupt again.

    Args:
        settings: its `runtime_start_timeout` limits the time from the start of the job to the first record.
        superseded: returns whether a later attempt has taken the payload over; this process then leaves the payload alone.

    Raises:
        RunFailure: a runtime does not start in time, or can never start.
    """
    start_timeout = settings.runtime_start_timeout
    start_by = dict.fromkeys(range(len(payloads)), time.monotonic() + start_timeout)

    def poll(index: int, evidence: Evidence) -> str | None:
        payload = payloads[index]
        # The timeout does not run while the job waits in the queue, or while the record cannot be read.
        if payload.running.waiting or not payload.follower.reachable:
            start_by[index] = time.monotonic() + start_timeout
        if not evidence.started and time.monotonic() > start_by[index]:
            raise _start_timeout(payload, start_timeout)
        return payload.running.poll(evidence)

    try:
        follow_all([(each.follower, partial(poll, index)) for index, each in enumerate(payloads)])
    except RunFailure:
        with deferred_interrupts():
            for each in payloads:
                each.running.kill()
                each.follower.flush_output()
            raise
    except BaseException as error:
        with deferred_interrupts() as interrupted_again:
            _end_interrupted(payloads, context, settings, error, interrupted_again, superseded)
        raise


def _start_timeout(payload: FollowedPayload, limit: float) -> RunFailure:
    """Returns the failure of a run whose runtime did not start within `limit` seconds."""
    evidence = payload.evidence
    payload.running.explain(evidence)
    log = f": {lines[-1]}" if (lines := relevant_lines(evidence.runtime_log)) else ""
    sentence = f"{payload.label}the runtime did not start within runtime_start_timeout={limit:g} s{log}"
    metadata = {**failure_metadata(evidence, None), **payload.running.metadata(evidence)}
    return RunFailure(FailureKind.RUNTIME, sentence, metadata)


def _end_interrupted(
    payloads: Sequence[FollowedPayload],
    context: dg.OpExecutionContext,
    settings: RunSettings,
    interrupt: BaseException,
    interrupted_again: Callable[[], bool],
    superseded: Callable[[], bool],
) -> None:
    """Cancel payloads and follow them to their ends; a second interrupt cancels them without a grace period."""
    for each in payloads:
        each.evidence.interrupted = True
    if isinstance(interrupt, (KeyboardInterrupt, dg.DagsterExecutionInterruptedError)) and _has_terminal():
        _mark_canceling(context)
    context.log.warning(f"[rayslurm] ending the payload{'s' * (len(payloads) > 1)}: {type(interrupt).__name__}")
    for each in payloads:
        each.running.cancel()
    if superseded():
        raise interrupt

    def poll(running: RunningPayload, evidence: Evidence) -> str | None:
        if interrupted_again():
            running.cancel(now=True)
        exited = running.poll(evidence)
        if superseded():
            raise interrupt
        return exited

    grace_period = max(each.plan.payload.grace_period for each in payloads)
    followed = [(each.follower, partial(poll, each.running)) for each in payloads]
    follow_all(followed, time.monotonic() + grace_period + _CANCEL_MARGIN)
    for each in payloads:
        if each.evidence.end is None:
            each.running.kill()
        verdict = judge(each.evidence, each.plan.uses_pipes, settings.require_messages)
        context.log.info(f"[rayslurm] {each.label}{verdict.sentence}")


def _has_terminal() -> bool:
    """Whether this process has a terminal, so that a person may have pressed Ctrl-C; a service has none."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY))
        return True
    except OSError:
        return False


def _mark_canceling(context: dg.OpExecutionContext) -> None:
    """Make Dagster show a run that Ctrl-C interrupts as canceled, as after its terminate button.

    Dagster 1.13 would show the run as failed. A run that Dagster will resume is left alone.
    """
    run = context.instance.get_run_by_id(context.run.run_id)
    if run is not None and run.status == dg.DagsterRunStatus.STARTED and not context.instance.run_will_resume(run.run_id):
        context.instance.report_run_canceling(run)
