"""Which attempt at a step came before this one, in Dagster's own words: its event log outlives any process.

A payload on a cluster outlives the Dagster process that started it. What is noted before it starts leads a retry of the
step to it, in the same run or in one that retries it from its failure; re-executions of everything begin anew.
"""

from __future__ import annotations

import dagster as dg

try:
    from dagster._core.pipes import reattach
except ImportError:  # A Dagster without it: each attempt begins anew.
    reattach = None  # type: ignore[assignment]

_CLIENT = "dagster-rayslurm"
_IS_RETRY = ("dagster/is_resume_retry", "dagster/is_asset_resume_retry")


def note(context: dg.OpExecutionContext, name: str) -> None:
    """Take note of the run directory in which a payload is about to start."""
    if reattach is not None:
        reattach.record_external_launch(context, client_name=_CLIENT, external_run_id=name)


def run_dir_before(context: dg.OpExecutionContext) -> str | None:
    """The name of the run directory of the attempt before this one; None if this is the first."""
    run = context.run
    first = not context.retry_number and not any(run.tags.get(tag) == "true" for tag in _IS_RETRY)
    # A worker that takes a run over goes by the same id; Dagster does so only where it monitors runs.
    if reattach is None or (first and not context.instance.run_monitoring_enabled):
        return None
    handle = reattach.find_latest_launch_handle(context, client_name=_CLIENT)
    return handle.external_run_id if handle is not None else None
