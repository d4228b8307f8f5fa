"""Which attempt at a step came before this one, in Dagster's own words: its event log outlives any process.

A payload on a cluster outlives the Dagster process that started it. What is noted before it starts leads a retry of the
step to it, in the same run or in one that retries it from its failure; re-executions of everything begin anew.
"""

from __future__ import annotations

import collections
import threading

import dagster as dg

try:
    from dagster._core.pipes import reattach
except ImportError:  # A Dagster without it: each attempt begins anew.
    reattach = None  # type: ignore[assignment]

_CLIENT = "dagster-rayslurm"
_IS_RETRY = ("dagster/is_resume_retry", "dagster/is_asset_resume_retry")

_lock = threading.Lock()
_calls: collections.Counter[tuple[str, str, int]] = collections.Counter()
"""Payloads so far of each attempt at a step in this process: what counts for one of them is that of the same number before."""


class Notes:
    """What is noted of one payload of an attempt.

    Args:
        context: of the step.
        step_key: the step.
    """

    def __init__(self, context: dg.OpExecutionContext, step_key: str) -> None:
        self._context = context
        with _lock:
            key = (context.run.run_id, step_key, context.retry_number)
            _calls[key] += 1
            self._client = f"{_CLIENT} {_calls[key]}"

    def before(self) -> str | None:
        """The name of the run directory of the attempt before this one; None if this is the first."""
        context, run = self._context, self._context.run
        first = not context.retry_number and not any(run.tags.get(tag) == "true" for tag in _IS_RETRY)
        # A worker that takes a run over goes by the same id; Dagster does so only where it monitors runs.
        if reattach is None or (first and not context.instance.run_monitoring_enabled):
            return None
        handle = reattach.find_latest_launch_handle(context, client_name=self._client)
        return handle.external_run_id if handle is not None else None

    def note(self, name: str) -> None:
        """Take note of the run directory in which the payload is about to start."""
        if reattach is not None:
            reattach.record_external_launch(self._context, client_name=self._client, external_run_id=name)
