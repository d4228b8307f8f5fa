"""Payloads at work, followed to their ends; and ended, when somebody interrupts or a runtime never starts."""

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
from ..outcome.figures import Metadata
from ..outcome.metadata import failure_metadata, run_metadata
from ..plan import Plan
from ..slurm.job_log import relevant_lines
from .cleanup import Policy

_CANCEL_MARGIN = 15.0
"""Seconds beyond the grace period that a cancelled run is followed: it still takes its record to the end."""


@dataclass(frozen=True)
class FollowedPayload:
    """One payload at work.

    Attributes:
        plan: what runs.
        run_dir: where its record is.
        attempt: its runtime.
        follower: reads its record.
        component: the component that it is the payload of; None for the only one.
    """

    plan: Plan
    run_dir: str
    attempt: RunningPayload
    follower: Follower
    component: str | None = None

    @property
    def evidence(self) -> Evidence:
        """What is known of it so far; a job that is requeued begins with nothing."""
        return self.follower.evidence

    @property
    def whose(self) -> str:
        """What a sentence about it begins with."""
        return "" if self.component is None else f"component {self.component!r}: "

    def metadata(self, mode: str) -> Metadata:
        """What users see of it with every result."""
        # Names of jobs come before figures.
        return {**self.attempt.metadata(self.evidence), **run_metadata(self.evidence.known, mode, self.attempt.cluster_id)}


def follow_until_end(
    followed: Sequence[FollowedPayload], policy: Policy, context: dg.OpExecutionContext, lost: Callable[[], bool] = lambda: False
) -> None:
    """Follow payloads; when interrupted, end them, take what they still say, and let the interrupt go on.

    Args:
        followed: the payloads.
        policy: what the user decided.
        context: of the step.
        lost: whether another attempt is known to have taken the payload over, which is then left alone.

    Raises:
        RunFailure: a runtime does not start, or never will.
    """
    limit = policy.runtime_start_timeout
    give_up = dict.fromkeys(range(len(followed)), time.monotonic() + limit)

    def ended_or_stuck(place: int, evidence: Evidence) -> str | None:
        each = followed[place]
        if each.attempt.waiting or not each.follower.in_reach:  # Nobody knows what is written out of reach.
            give_up[place] = time.monotonic() + limit
        if not evidence.started and time.monotonic() > give_up[place]:
            each.attempt.explain(evidence)
            log = f": {lines[-1]}" if (lines := relevant_lines(evidence.runtime_log)) else ""
            sentence = f"{each.whose}the runtime did not start within runtime_start_timeout={limit:g} s{log}"
            metadata = {**failure_metadata(evidence, None), **each.attempt.metadata(evidence)}
            raise RunFailure(FailureKind.RUNTIME, sentence, metadata)
        return each.attempt.poll(evidence)

    try:
        follow_all([(each.follower, partial(ended_or_stuck, place)) for place, each in enumerate(followed)])
    except BaseException as error:
        with deferred_interrupts() as interrupted_again:
            if isinstance(error, RunFailure):
                for each in followed:
                    each.attempt.kill()
                    each.follower.show_rest()
                raise
            for each in followed:
                each.evidence.interrupted = True
            if isinstance(error, (KeyboardInterrupt, dg.DagsterExecutionInterruptedError)) and _has_terminal():
                _mark_canceling(context)
            context.log.warning(f"[rayslurm] ending the payload{'s' * (len(followed) > 1)}: {type(error).__name__}")
            for each in followed:
                each.attempt.cancel()
            if lost():
                raise
            interrupt = error

            def ended(attempt: RunningPayload, evidence: Evidence) -> str | None:
                if interrupted_again():
                    attempt.cancel(now=True)
                said = attempt.poll(evidence)
                if lost():
                    raise interrupt
                return said

            grace = max(each.plan.payload.grace_period for each in followed)
            turns = [(each.follower, partial(ended, each.attempt)) for each in followed]
            follow_all(turns, time.monotonic() + grace + _CANCEL_MARGIN)
            for each in followed:
                if each.evidence.end is None:
                    each.attempt.kill()
                verdict = judge(each.evidence, each.plan.uses_pipes, policy.require_messages)
                context.log.info(f"[rayslurm] {each.whose}{verdict.sentence}")
        raise


def _has_terminal() -> bool:
    """Whether a person at a terminal can have pressed Ctrl-C; a SIGTERM from a service manager is no such thing."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY))
        return True
    except OSError:
        return False


def _mark_canceling(context: dg.OpExecutionContext) -> None:
    """Let a run that Ctrl-C interrupts end as canceled, as the terminate button does.

    Dagster 1.13 calls it failed unless somebody marked it beforehand. A run that Dagster will resume is left alone.
    """
    run = context.instance.get_run_by_id(context.run.run_id)
    if run is not None and run.status == dg.DagsterRunStatus.STARTED and not context.instance.run_will_resume(run.run_id):
        context.instance.report_run_canceling(run)
