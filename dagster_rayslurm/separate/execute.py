"""Payloads of several components from start to verdict: started together, followed in one thread, judged and reported as one."""

from __future__ import annotations

from collections.abc import Mapping

import dagster as dg
from dagster_pipes import PipesExtras

from ..backends.base import Backend, RunningPayload
from ..completed import CompletedRun
from ..errors import RunFailure
from ..execution.cleanup import Policy
from ..execution.run import PayloadRun
from ..follow.pipes import RecordContextInjector, RecordReader, pipes_session
from ..plan import Plan
from .metadata import components_metadata, failures_metadata
from .reports import ReportMerger
from .verdict import judge_components


def execute_separate(
    context: dg.OpExecutionContext,
    plans: Mapping[str, Plan],
    backend: Backend[Mapping[str, Plan], Mapping[str, RunningPayload]],
    policy: Policy,
    extras: PipesExtras | None,
) -> CompletedRun:
    """Run the plans of components at once and wait for all of them.

    Args:
        context: of the step.
        plans: by component, in the order of the job.
        backend: gets them started.
        policy: what the user decided.
        extras: Pipes extras, for each payload.

    Raises:
        RunFailure: one of them did not succeed.
    """
    run = PayloadRun(context, plans, backend, policy)
    reader = RecordReader(max(1, sum(plan.uses_pipes for plan in plans.values())))
    injector = RecordContextInjector(context)
    expected = any(plan.uses_pipes for plan in plans.values())
    with pipes_session(context, injector, reader, extras, expected) as session:
        # A handler of its own for each: what is tried out there goes nowhere.
        reports = ReportMerger(reader.handler, plans, lambda each: dg.PipesMessageHandler(context, reader).handle_message(each))
        run.follow(lambda plans, *how: backend.start(plans, *how), injector, reports.of)
        parts = dict(zip(plans, run.parts, strict=True))
        for component, error in reports.hand_over():
            parts[component].follower.refuse(error)
        judged = run.judge()
        verdict = judge_components(judged)
        own = {component: part.metadata(policy.mode) for component, part in parts.items()}
        metadata = components_metadata(own, judged, policy.mode, run.parts[0].attempt.job_id)
        kept = run.clean_up(verdict)
        if verdict.kind is not None:
            metadata = {**failures_metadata(judged, kept), **metadata}
            raise RunFailure(verdict.kind, verdict.sentence, metadata, verdict.retry)
    return run.completed(session, metadata)
