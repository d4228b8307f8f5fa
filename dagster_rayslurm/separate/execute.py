"""Run the payloads of several components as one run: start them together, follow them in one thread, judge them together."""

from __future__ import annotations

from collections.abc import Mapping

import dagster as dg
from dagster_pipes import PipesExtras

from ..backends.base import Backend, Register, RunningPayload
from ..errors import CompletedRun, RunFailure
from ..execution import RunSettings, start_errors
from ..execution.cleanup import sweep
from ..execution.reattach import new_launch
from ..execution.run import PayloadRun
from ..follow.pipes import RecordContextInjector, RecordReader, pipes_session
from ..plan import Plan
from .outcome import components_metadata, failures_metadata, judge_components
from .reports import ReportMerger


def execute_separate(
    context: dg.OpExecutionContext,
    plans: Mapping[str, Plan],
    backend: Backend[Mapping[str, Plan], Mapping[str, RunningPayload]],
    settings: RunSettings,
    extras: PipesExtras | None,
) -> CompletedRun:
    """Run the plans of all components at once and wait for their ends; returns what the user's asset gets of the run.

    Args:
        plans: the plans by component, in the order of the components in the job.
        extras: the Pipes extras, the same for each payload.

    Raises:
        RunFailure: a payload did not succeed.
    """
    with start_errors():
        sweep(backend, settings)
        launch = new_launch(context, next(iter(plans.values())))
        run = PayloadRun(context, backend, settings, launch, plans)
    writers = sum(plan.uses_pipes for plan in plans.values())
    reader, injector = RecordReader(max(1, writers)), RecordContextInjector(context)

    def start(register: Register) -> Mapping[str, RunningPayload]:
        return backend.start(plans, run.run_dir, injector.pipes_context, launch.step, register)

    with pipes_session(context, injector, reader, extras, writers > 0) as session:
        # A throwaway handler checks each result, so that Dagster does not get the result yet.
        merger = ReportMerger(reader.handler, plans, lambda each: dg.PipesMessageHandler(context, reader).handle_message(each))
        run.follow(start, merger.of)
        payloads = dict(zip(plans, run.payloads, strict=True))
        for component, error in merger.hand_over():
            payloads[component].follower.refuse(error)
        judged = run.judge()
        verdict = judge_components(judged)
        own = {component: payload.metadata(settings.mode) for component, payload in payloads.items()}
        metadata = components_metadata(own, judged, settings.mode, run.payloads[0].running.job_id)
        kept = run.clean_up(verdict)
        if verdict.kind is not None:
            metadata = {**failures_metadata(judged, kept), **metadata}
            raise RunFailure(verdict.kind, verdict.sentence, metadata, verdict.retry)
    return run.completed(session, metadata)
