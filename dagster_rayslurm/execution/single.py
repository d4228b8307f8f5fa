"""One payload from start to verdict."""

from __future__ import annotations

import dagster as dg
from dagster_pipes import PipesExtras

from ..backends.base import Attempt, Backend, GoesOn
from ..completed import CompletedRun
from ..errors import RunFailure
from ..follow.pipes import RecordContextInjector, RecordReader, pipes_session
from ..outcome.metadata import failure_metadata
from ..plan import Plan
from .policy import Policy
from .underway import Underway


def execute(
    context: dg.OpExecutionContext, plan: Plan, backend: Backend[Plan, Attempt], policy: Policy, extras: PipesExtras | None
) -> CompletedRun:
    """Run a plan and wait for it.

    Args:
        context: of the step.
        plan: what to run.
        backend: gets it started.
        policy: what the user decided.
        extras: Pipes extras.

    Raises:
        RunFailure: it did not succeed.
    """
    run = Underway(context, {None: plan}, backend, policy)
    if isinstance(backend, GoesOn):
        run.may_go_on(backend.goes_on)
    reader, injector = RecordReader(), RecordContextInjector(context)
    with pipes_session(context, injector, reader, extras, plan.uses_pipes) as session:
        run.follow(lambda plans, *how: {None: backend.start(plans[None], *how)}, injector, lambda _: reader.handler)
        judged = run.judge()[None]
        verdict, metadata = judged.verdict, run.parts[0].metadata(policy.mode)
        kept = run.tidy_up(verdict)
        if verdict.kind is not None:
            metadata = {**failure_metadata(judged.evidence, kept), **metadata}
            raise RunFailure(verdict.kind, verdict.sentence, metadata, verdict.retry)
    return run.completed(session, metadata)
