"""Reattach: continue a payload that an earlier attempt at this step started and did not follow to its end.

A retry of the step may belong to the same run, or to a run that retries from failure. The retry finds the payload's run directory
and the forwarded log messages in Dagster's event log. The retry reads results and custom messages again from the payload's
record: the files in which the runtime writes down everything that happens. A bookmark, a file of this machine, says how much
output was shown, because Dagster keeps output on this machine, too. At most the last batch of output is shown twice.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import dagster as dg

from ..backends.base import Backend, CanReattach, Step
from ..backends.layout import Layout, nonce_of
from ..backends.ownership import FIRST_OWNER, Ownership, owner_file
from ..edge.base_directory import BOOKMARK
from ..follow import ReattachState
from ..plan import Plan, run_dir_name
from ..ssh.local import LocalConnection

try:
    from dagster._core.pipes import reattach
except ImportError:  # A Dagster without reattach: each attempt starts a new payload.
    reattach = None  # type: ignore[assignment]

_CLIENT = "dagster-rayslurm"  # Beginning of a client name; the number of the payload in its step follows.
# Tags of a Dagster run that retries another run from failure.
_IS_RETRY = ("dagster/is_resume_retry", "dagster/is_asset_resume_retry")
_PAGE = 1000  # Most entries of the event log, or runs, in one query.
_BOOKMARK_BYTES = 1024  # Of a bookmark's file, always the same, so that each write replaces the whole text before.

_lock = threading.Lock()  # Guards `_calls` and `_launched`.
# Number of payloads that each attempt at a step has started in this process, by run id, step and retry number.
_calls: collections.Counter[tuple[str, str, int]] = collections.Counter()
# By process id and id of the Dagster run: the results of `AttemptHistory._launched`.
_launched: dict[tuple[int, str], dict[tuple[str, str], str]] = {}


def next_call(context: dg.OpExecutionContext) -> int:
    """Returns the number of the next payload in this attempt at the step: 1 at the first call, then 2, and so on.

    The counter belongs to this process. The payload number N of a retry continues the payload number N of the earlier attempt.
    """
    with _lock:
        key = (context.run.run_id, context.get_step_execution_context().step.key, context.retry_number)
        _calls[key] += 1
        return _calls[key]


@dataclass(frozen=True)
class Launch:
    """What is needed to start a payload in a new run directory, or to continue the payload of an earlier attempt."""

    step: Step  # This attempt at the step; the field `owner` of the step says whether this attempt owns the payload.
    plan: Plan  # The payload's plan; after a reattach, it has the nonce (a random text) of the earlier attempt.
    name: str  # Name of the run directory.
    state: ReattachState = field(default_factory=ReattachState)  # What an earlier attempt already showed in Dagster.
    forget: Callable[[], None] = lambda: None  # Called once no later attempt needs to know what was shown.
    history: AttemptHistory | None = None  # None if no later attempt at the step finds the payload.
    submitted: bool = False  # Whether `ComputeResource.submit` started the payload; then any attempt finds it by its `RunHandle`.

    @property
    def lasts(self) -> bool:
        """Whether a later attempt can take the payload over."""
        return self.history is not None or self.submitted

    def again(self, nonce: str, backend: Backend, home: Layout) -> Launch:
        """Returns a launch that starts the same plan once more; for use if the payload of this launch has never started.

        The new payload has the nonce `nonce` (a random text) and a new run directory, whose name ends with the nonce. `backend`
        is the object that will start the payload, in local mode or on the cluster. `home` has the paths of the base directory on
        this machine.
        """
        step, plan = replace(self.step, reattached=False), replace(self.plan, payload=replace(self.plan.payload, nonce=nonce))
        return _new_launch(step, plan, backend, home, self.history)


def reattach_or_new(
    context: dg.OpExecutionContext,
    plan: Plan,
    backend: Backend,
    home: Layout,
    number: int | None = None,
    writes_results: bool = False,
) -> Launch:
    """Returns a launch that continues the payload of the earlier attempt; if that is impossible, a launch of a new payload.

    The owner of a payload is the attempt that follows the payload; only the owner may end or judge it. The earlier payload is
    continued if it runs the same plan and has not failed, and if its owner has not begun to end or judge it. This attempt then
    becomes the owner. If the owner has begun to do so, this function ends the payload, and returns a launch of a new payload.
    Raises OSError if the cluster does not answer, and StartError if the earlier payload does not end.

    Args:
        context: The context of the step.
        plan: The plan of the payload.
        backend: The backend that starts the payload.
        home: The paths of the base directory on this machine.
        number: The result of `next_call`; None if the caller has not called `next_call` for this payload.
        writes_results: Whether attempts write results before the end of the payload. If True, the earlier attempt writes no more
            results once this function has returned.
    """
    step_key = context.get_step_execution_context().step.key
    step = Step(context.run.run_id, step_key, context.partition_key if context.has_partition_key else None, context.log)
    if not isinstance(backend, CanReattach):
        return _new_launch(step, plan, backend, home, None)
    history = AttemptHistory(context, step_key, number)
    connection, runs = backend.connection, backend.layout.runs
    name = history.earlier_run_dir()
    if name is None:
        return _new_launch(step, plan, backend, home, history)
    same = replace(plan, payload=replace(plan.payload, nonce=nonce_of(name)))
    run_dir = str(runs / name)
    owner = Ownership(connection, run_dir, owner_file(step.run_id), history.successor)
    goes_on = backend.can_reattach(same, run_dir, step)
    taken = goes_on and owner.take_over()
    if goes_on and not taken:
        with contextlib.suppress(FileNotFoundError):  # The run directory was removed, so the payload has ended.
            backend.end_abandoned(run_dir, plan.payload.grace_period)
    if writes_results:
        owner.displace()
    if not taken:
        return _new_launch(step, plan, backend, home, history)
    bookmark = Bookmark(home.runs / f"{name}{BOOKMARK}")
    offset = bookmark.read() if history.output_is_local else 0
    shown = f"from byte {offset} on; at most the last batch is shown twice" if offset else "from its beginning"
    context.log.warning(
        f"[rayslurm] reattached to {name}, a payload that an earlier attempt did not follow to its end; "
        f"its output is shown {shown}"
    )
    state = ReattachState(offset, history.logged_since(name), bookmark.note)
    history.note(name)
    return Launch(replace(step, owner=owner, reattached=True), same, name, state, bookmark.remove, history)


def _new_launch(step: Step, plan: Plan, backend: Backend, home: Layout, history: AttemptHistory | None) -> Launch:
    name = run_dir_name(step.run_id, step.step_key, plan.payload.nonce)
    if history is None:
        return Launch(step, plan, name)
    owner = Ownership(backend.connection, str(backend.layout.runs / name), FIRST_OWNER, history.successor)
    bookmark = Bookmark(home.runs / f"{name}{BOOKMARK}")
    history.note(name)
    return Launch(replace(step, owner=owner), plan, name, ReattachState(note=bookmark.note), bookmark.remove, history)


class AttemptHistory:
    """Finds the earlier and later attempts at one payload of a step, in Dagster's event log and run storage."""

    def __init__(self, context: dg.OpExecutionContext, step_key: str, number: int | None) -> None:
        self._context = context
        self._step_key = step_key
        self._client = f"{_CLIENT} {next_call(context) if number is None else number}"
        self._noted_at = time.time()

    def earlier_run_dir(self) -> str | None:
        """Returns the name of the run directory in which the preceding attempt ran the payload.

        Returns None if there was no preceding attempt, if Dagster's event log has no such name, or if this version of Dagster
        lacks reattach.
        """
        context = self._context
        first = not context.retry_number and not _is_retry(context.run)
        # A new worker that continues a run has the same run id; Dagster starts such workers only if it monitors runs.
        if reattach is None or (first and not context.instance.run_monitoring_enabled):
            return None
        return self._launched().get((self._step_key, self._client))

    def _launched(self) -> dict[tuple[str, str], str]:
        """Returns the name of the last run directory of each payload in this Dagster run, and in the runs that this run retries.

        A key of the dictionary identifies a payload: it is a pair of the step's key and the client name. A step has a client name
        for each of its payloads: "dagster-rayslurm 1", "dagster-rayslurm 2" and so on. `note` writes the name of a run directory
        to Dagster's event log, together with this pair. The function reads the event log once in each process, because a search
        of the whole log for each payload would take minutes for thousands of payloads.
        """
        key = (os.getpid(), self._context.run.run_id)
        with _lock:
            if key not in _launched:
                _launched.clear()  # A process works on one run at a time, except in tests.
                _launched[key] = dict(self._read_launches())
            return _launched[key]

    def _read_launches(self) -> Iterator[tuple[tuple[str, str], str]]:
        for run in retried_runs(self._context):
            for entry in self._context.instance.all_logs(run.run_id, of_type=dg.DagsterEventType.ENGINE_EVENT):
                event = entry.dagster_event
                noted = event and event.engine_event_data.metadata.get(reattach.PIPES_LAUNCH_HANDLE_METADATA_KEY)
                if isinstance(noted, dg.TextMetadataValue):
                    with contextlib.suppress(Exception):  # Another version of Dagster may have written it.
                        handle = dg.deserialize_value(noted.value or "", reattach.PipesLaunchHandle)
                        yield (handle.step_key, handle.client_name), handle.external_run_id

    def note(self, name: str) -> None:
        """Write `name`, the name of the payload's run directory, to Dagster's event log. Called before the payload starts."""
        if reattach is not None:
            handle = reattach.record_external_launch(self._context, client_name=self._client, external_run_id=name)
            self._noted_at = handle.launched_at
            with _lock:
                if (known := _launched.get((os.getpid(), self._context.run.run_id))) is not None:
                    known[self._step_key, self._client] = name

    def successor(self) -> str | None:
        """Returns the id of the Dagster run with the next attempt at this step, which may be the same Dagster run.

        None if there is no next attempt, or if Dagster's storage fails.
        """
        context = self._context
        try:
            handle = reattach and reattach.find_latest_launch_handle(context, client_name=self._client)
            if handle is not None and handle.launched_at > self._noted_at:
                return context.run.run_id
            later = context.instance.get_runs(dg.RunsFilter(job_name=context.run.job_name), limit=_PAGE)
            own = context.run.run_id
            return next((run.run_id for run in later if run.parent_run_id == own and _is_retry(run)), None)
        except Exception:  # noqa: BLE001 - the storage may raise anything
            return None

    def logged_since(self, name: str) -> Iterator[tuple[int, str]]:
        """Yields the log lines of the step, oldest first, each as the number of its level and its text.

        The first line is the first one after `note` wrote `name`, the name of a run directory, to the event log.
        """
        begun = False
        for entry in self._entries():
            if entry.step_key == self._step_key and begun and not entry.is_dagster_event:
                yield int(entry.level), entry.user_message
            begun = begun or (entry.step_key == self._step_key and entry.is_dagster_event and name in entry.message)

    @property
    def output_is_local(self) -> bool:
        """Whether Dagster writes the output of steps to files of this machine, where the output is safe if this process dies."""
        return type(self._context.instance.compute_log_manager).__name__ == "LocalComputeLogManager"

    def _entries(self) -> Iterator[dg.EventLogEntry]:
        """Yields the event log entries of this run and the runs that this run retries, oldest first. Reads one page at a time."""
        instance = self._context.instance
        for run in retried_runs(self._context):
            cursor, more = None, True
            while more:
                page = instance.get_records_for_run(run.run_id, cursor, limit=_PAGE)
                cursor, more = page.cursor, page.has_more
                for record in page.records:
                    yield record.event_log_entry


def retried_runs(context: dg.OpExecutionContext) -> list[dg.DagsterRun]:
    """Returns this Dagster run and the runs that it retries from failure, directly or not, the oldest run first."""
    runs = [context.run]
    while _is_retry(runs[0]) and runs[0].parent_run_id and (parent := context.instance.get_run_by_id(runs[0].parent_run_id)):
        runs.insert(0, parent)
    return runs


def _is_retry(run: dg.DagsterRun) -> bool:
    return any(run.tags.get(tag) == "true" for tag in _IS_RETRY)


@dataclass
class Bookmark:
    """A file of this machine that says how many bytes of a payload's output were shown in Dagster.

    Errors of the file are ignored. After an error, a later attempt may show output again.
    """

    path: Path
    fd: int | None = None

    def read(self) -> int:
        """Returns the offset in bytes that was noted last.

        Returns 0 if the file is missing or malformed, or if another machine wrote the file.
        """
        try:
            noted = json.loads(self.path.read_bytes()[:_BOOKMARK_BYTES])
            return int(noted["offset"]) if noted["where"] == socket.gethostname() else 0
        except (OSError, ValueError, TypeError, KeyError):
            return 0

    def note(self, offset: int) -> None:
        """Note in the file that all output before `offset`, in bytes, was shown."""
        with contextlib.suppress(OSError):
            if self.fd is None:
                LocalConnection().make_dir(str(self.path.parent))
                self.fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            os.pwrite(self.fd, json.dumps({"where": socket.gethostname(), "offset": offset}).encode().ljust(_BOOKMARK_BYTES), 0)

    def remove(self) -> None:
        """Close and remove the file of this bookmark. Called when no later attempt will continue to show the payload's output."""
        if self.fd is not None:
            os.close(self.fd)
        self.fd = None
        with contextlib.suppress(OSError):
            self.path.unlink()
