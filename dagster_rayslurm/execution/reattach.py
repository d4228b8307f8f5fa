"""Which attempt at a step came before this one, in Dagster's own words: its event log outlives any process.

A payload on a cluster outlives the Dagster process that started it. What is noted before it starts leads a retry of the
step to it, in the same run or in one that retries it from its failure; re-executions of everything begin anew. The event log
says, too, which messages of the payload it has.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Iterator

import dagster as dg

try:
    from dagster._core.pipes import reattach
except ImportError:  # A Dagster without it: each attempt begins anew.
    reattach = None  # type: ignore[assignment]

try:
    from dagster._core.storage.local_compute_log_manager import LocalComputeLogManager
except ImportError:  # Nor with it: all output is repeated.
    LocalComputeLogManager = None  # type: ignore[assignment, misc]

_CLIENT = "dagster-rayslurm"
_IS_RETRY = ("dagster/is_resume_retry", "dagster/is_asset_resume_retry")

_PAGE = 1000
"""Entries of the event log that are read at once."""

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
        self._step_key = step_key
        with _lock:
            key = (context.run.run_id, step_key, context.retry_number)
            _calls[key] += 1
            self._client = f"{_CLIENT} {_calls[key]}"
        self._noted_at = time.time()

    def before(self) -> str | None:
        """The name of the run directory of the attempt before this one; None if this is the first."""
        context, run = self._context, self._context.run
        first = not context.retry_number and not _is_retry(run)
        # A worker that takes a run over goes by the same id; Dagster does so only where it monitors runs.
        if reattach is None or (first and not context.instance.run_monitoring_enabled):
            return None
        handle = reattach.find_latest_launch_handle(context, client_name=self._client)
        return handle.external_run_id if handle is not None else None

    def note(self, name: str) -> None:
        """Take note of the run directory in which the payload is about to start."""
        if reattach is not None:
            handle = reattach.record_external_launch(self._context, client_name=self._client, external_run_id=name)
            self._noted_at = handle.launched_at

    def successor(self) -> str | None:
        """The id of the run whose attempt at this step came after this one; None if there is none, or Dagster cannot say."""
        context = self._context
        try:
            handle = reattach and reattach.find_latest_launch_handle(context, client_name=self._client)
            if handle is not None and handle.launched_at > self._noted_at:
                return context.run.run_id
            later = context.instance.get_runs(dg.RunsFilter(job_name=context.run.job_name), limit=_PAGE)
            own = context.run.run_id
            return next((run.run_id for run in later if run.parent_run_id == own and _is_retry(run)), None)
        except Exception:  # noqa: BLE001 - whatever the storage raises
            return None

    def logged(self, name: str) -> Iterator[tuple[int, str]]:
        """Level and text of what was logged in the step since the payload of a run directory was about to start."""
        begun = False
        for run in self._lineage():
            for entry in _entries(self._context.instance, run.run_id):
                if entry.step_key != self._step_key:
                    continue
                if not entry.is_dagster_event:
                    if begun:
                        yield int(entry.level), entry.user_message
                elif name in entry.message:
                    begun = True

    def _lineage(self) -> list[dg.DagsterRun]:
        """The run and those whose failures it retries, the first one first."""
        runs = [self._context.run]
        while _is_retry(runs[0]) and runs[0].parent_run_id:
            parent = self._context.instance.get_run_by_id(runs[0].parent_run_id)
            if parent is None:
                break
            runs.insert(0, parent)
        return runs

    @property
    def output_stays(self) -> bool:
        """Whether what was printed stays with this machine's files when the process that printed it is killed.

        What Dagster takes elsewhere it takes there in the end, or from time to time.
        """
        manager = self._context.instance.compute_log_manager
        return LocalComputeLogManager is not None and isinstance(manager, LocalComputeLogManager)


def _is_retry(run: dg.DagsterRun) -> bool:
    return any(run.tags.get(tag) == "true" for tag in _IS_RETRY)


def _entries(instance: dg.DagsterInstance, run_id: str) -> Iterator[dg.EventLogEntry]:
    """A run's entries in the event log, the first one first; each page is read once it is asked for."""
    cursor, more = None, True
    while more:
        page = instance.get_records_for_run(run_id, cursor, limit=_PAGE)
        cursor, more = page.cursor, page.has_more
        for record in page.records:
            yield record.event_log_entry
