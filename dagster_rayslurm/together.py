"""Payloads of several components from start to verdict: started together, followed in one thread, judged and reported as one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dagster as dg
from dagster_pipes import PipesExtras

from .backends.base import Attempt, Step, TogetherBackend
from .errors import RunFailure
from .execution import CompletedRun, Followed, Policy, discard, fetch_outputs, follow_to_the_end, start_errors, sweep
from .follow import Evidence, Follower
from .metadata_together import failures_metadata, together_metadata
from .outcome import Verdict, asks_slurm, judge
from .outcome_together import Judged, judge_together
from .pipes import RecordContextInjector, RecordReader
from .plan import Plan, run_dir_name
from .reports import Reports
from .runtime.record import SECRETS, component_dir


def execute_together(
    context: dg.OpExecutionContext,
    plans: Mapping[str, Plan],
    backend: TogetherBackend,
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
    step_key = context.get_step_execution_context().step.key
    partition_key = context.partition_key if context.has_partition_key else None
    name = run_dir_name(context.run.run_id, step_key, next(iter(plans.values())).payload.nonce)
    reader = RecordReader(max(1, sum(plan.uses_pipes for plan in plans.values())))
    injector = RecordContextInjector(context)
    with dg.open_pipes_session(context, injector, reader, extras) as session:
        held: list[Attempt] = []
        parts: dict[str, Followed] = {}
        run_dir: str | None = None
        # A handler of its own for each: what is tried out there goes nowhere.
        reports = Reports(reader.handler, plans, lambda each: dg.PipesMessageHandler(context, reader).handle_message(each))
        try:
            with start_errors():
                sweep(backend, policy)
                run_dir = str(backend.layout.runs / name)
                assert injector.context_data is not None
                step = Step(context.run.run_id, step_key, partition_key, context.log)
                attempts = backend.start(plans, run_dir, injector.context_data, step, held.append)
            for component, plan in plans.items():
                follower = Follower(
                    backend.connection,
                    component_dir(run_dir, component),
                    plan.payload.nonce,
                    reports.of(component),
                    context.log,
                    backend.cadence,
                    policy.connection_loss_timeout,
                    attempts[component].requeue,
                    component,
                )
                parts[component] = Followed(plan, attempts[component], follower, component)
            follow_to_the_end(list(parts.values()), policy, context)
        except BaseException:
            if run_dir is not None and not policy.keeps(failed=True):
                discard(backend.connection, run_dir)
            raise
        finally:
            for component, plan in plans.items():
                if plan.secret_env and run_dir is not None:
                    discard(backend.connection, os.path.join(component_dir(run_dir, component), SECRETS))
            evidence = {each.attempt: each.follower.evidence for each in parts.values()}
            for attempt in held:
                attempt.release(evidence.get(attempt) or Evidence())
        for component, error in reports.hand_over():
            parts[component].follower.refuse(error)
        outputs = policy.home.outputs / name
        metadata = _conclude(parts, backend, policy, run_dir, outputs)
    first = next(iter(parts.values())).attempt
    return CompletedRun(session, metadata, first, sorted(path for path in outputs.rglob("*") if path.is_file()))


def _conclude(
    parts: Mapping[str, Followed], backend: TogetherBackend, policy: Policy, run_dir: str, outputs: Path
) -> dict[str, Any]:
    """Judge the payloads, bring their outputs back and tidy up.

    Returns:
        The metadata of the run's results.

    Raises:
        RunFailure: one of them did not succeed.
    """
    judged: dict[str, Judged] = {}
    stranded = False
    for component, part in parts.items():
        evidence = part.follower.evidence
        if asks_slurm(evidence):
            part.attempt.explain(evidence)
        verdict = judge(evidence, part.plan.uses_pipes, policy.require_messages)
        error = fetch_outputs(evidence, backend.connection, component_dir(run_dir, component), outputs / component, policy)
        if error is not None:
            stranded = True
            if verdict.kind is None:
                verdict = Verdict("record", f"the payload succeeded, but its outputs cannot be brought back: {error}")
        judged[component] = Judged(verdict, evidence)
    verdict = judge_together(judged)
    metadata = together_metadata({name: (part.attempt, part.follower.evidence) for name, part in parts.items()}, policy.mode)
    keep = stranded or policy.keeps(verdict.kind is not None)
    if not keep:
        discard(backend.connection, run_dir)
    if verdict.kind is not None:
        place = next(iter(parts.values())).attempt.place
        where = f"{place}:{run_dir}" if place else run_dir
        metadata.update(failures_metadata(judged, where if keep else None))
        raise RunFailure(verdict.kind, verdict.sentence, metadata, verdict.retry)
    return metadata
