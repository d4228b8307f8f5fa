"""Runs each chunk of a step's partitions in an allocation of its own.

A chunk is one partition, or several that share a process. Slurm's job arrays run the chunks: each element of an array is a job
for one chunk. This module submits or finds the job arrays, follows and judges them, and cleans up.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

import dagster as dg

from ..backends.array import ArrayBackend, Arrays, Ended, Superseded
from ..backends.base import deferred_interrupts, noticed_interrupts
from ..backends.layout import Layout
from ..compute_fields import DETACH, ComputeFields
from ..errors import FailureKind, StartError
from ..failures import CompletedRun, RunFailure
from ..follow.follower import WARNING_PHASES
from ..follow.forward import OutputWriter, RecordPipes
from ..outcome.verdict import unhealthy_nodes
from ..plan import Plan
from ..runtime.payload.partition_runner import span_of, title_of
from ..runtime.protocol.record import SECRETS, STATUS
from ..ssh.base import Connection
from .announce import announce
from .event_log import open_event_log
from .files import discard, keeps_run_dir, sweep_old_files
from .interrupts import INTERRUPTS, has_terminal, is_service_stop, mark_canceling
from .partition_results import PartitionOptions, PartitionResults, nothing_missing, results_so_far
from .reattach import Launch, reattach_or_new
from .run import start_errors, superseded
from .unhealthy import remember

_TOLD = "told.json"  # File in the run directory: the failed partitions that the Dagster log has shown.
_MOST_BYTES = 16 * 1024 * 1024  # Most bytes of `_TOLD` that are read.
_MOST_WARNINGS = 20  # Most warnings of runtimes that are logged.


def execute_arrays(
    context: dg.OpExecutionContext,
    plan: Plan,
    backend: ArrayBackend,
    resource: ComputeFields,
    extras: Any,
    options: PartitionOptions,
) -> CompletedRun:
    """Run the partitions of a step that are not materialized yet as elements of job arrays; wait until all have ended.

    Each element runs one chunk of partitions. `extras` are the Pipes extras. Returns the result for the user's asset. Raises
    RunFailure unless all partitions succeeded.
    """
    results = results_so_far(context, plan, resource, options.chunk)
    if not results.missing:
        return nothing_missing(context, results, extras)
    home = Layout.here(resource.local_base)
    with start_errors():
        sweep_old_files(backend, home, resource.retention_days)
        launch = reattach_or_new(context, plan, backend, home, writes_results=True)
    pipes = RecordPipes(context)
    # Dagster's own handler gets no "opened" message, because each partition has a Pipes session of its own.
    with pipes.session(extras, uses_pipes=False) as session:
        pipes_context, _ = results.attach(pipes, lambda: launch.step.owner)
        run = _ArrayRun(context, backend, resource, launch, results, options.max_concurrent)
        with open_event_log(context.instance.event_log_storage, context.run.run_id):
            run.complete(cast("Mapping[str, Any]", pipes_context))
    return CompletedRun(session, {**results.metadata(), **run.metadata()}, run.cluster_id, run.job_ids, [])


@dataclass
class _History:
    """What is known about the ends of one array's elements, to tell a cancelled array from cancelled single elements."""

    waited: bool = False  # Whether Slurm cancelled at once all elements that still waited to start.
    first_cancelled: float = math.inf  # When the first cancelled element ended; infinite if none was.
    last_other: float = -math.inf  # When the last element that was not cancelled ended.

    def add(self, ended: Ended, cancelled: bool) -> None:
        """Add an element that has ended. `cancelled` says whether the verdict on the element is a cancellation."""
        end = ended.evidence.end
        if not cancelled:
            self.last_other = max(self.last_other, -math.inf if end is None else float(end["ended_at"]))
        elif end is not None:
            self.first_cancelled = min(self.first_cancelled, float(end["ended_at"]))
        self.waited |= cancelled and ended.waited

    @property
    def cancelled(self) -> bool:
        """Whether the whole array seems to be cancelled, and not only single elements.

        The value is True if Slurm cancelled at once all elements that still waited to start. The value is also True if at least
        one element was cancelled, and no element has ended in another way since the first cancellation. An element that still
        runs may end in another way later. So this value is certain only when no element runs any more.
        """
        return self.waited or self.last_other < self.first_cancelled < math.inf


@dataclass
class _ArrayRun:
    """Runs the partitions of one step in job arrays, from the submission of the arrays to the verdicts."""

    context: dg.OpExecutionContext
    backend: ArrayBackend
    resource: ComputeFields
    launch: Launch
    results: PartitionResults
    max_concurrent: int | None
    arrays: Arrays | None = None  # None until the files for the cluster are prepared.
    stopped: str = ""  # Why no further array is submitted, in words.
    warnings: int = 0  # Number of warnings of runtimes that were logged.
    _lost_since: float | None = None  # Since when the cluster is out of reach, by the monotonic clock; None while it answers.
    _told: set[str] = field(default_factory=set)  # The failed partitions that the Dagster log has shown.
    _history: dict[int, _History] = field(default_factory=dict)  # By number of the array.

    @property
    def log(self) -> Any:
        return self.context.log

    @property
    def connection(self) -> Connection:
        return self.backend.connection

    @property
    def run_dir(self) -> str:
        """The path of the run directory on the cluster."""
        return str(self.backend.layout.runs / self.launch.name)

    @property
    def cluster_id(self) -> str:
        return self.arrays.cluster_id if self.arrays is not None else ""

    @property
    def job_ids(self) -> str | None:
        return (self.arrays.job_ids if self.arrays is not None else "") or None

    def metadata(self) -> dict[str, Any]:
        """Returns the execution mode and the ids of the job arrays, as Dagster metadata of the step's result or failure.

        The ids are left out if no array was submitted.
        """
        return {"Execution mode": self.resource.mode, **({"Slurm job arrays": self.job_ids} if self.job_ids else {})}

    def complete(self, pipes_context: Mapping[str, Any]) -> None:
        """Run the missing partitions and wait until all have ended; raises RunFailure unless all partitions succeeded.

        `pipes_context` is the Pipes context with the chunks of the partitions. If an interrupt or another exception comes,
        the arrays are cancelled, unless they shall go on for a later attempt.
        """
        detached = False
        try:
            with noticed_interrupts() as raise_ignored:
                with start_errors():
                    self._start(pipes_context)
                    self.arrays_made.submit_next()
                self._announce()
                self._follow(raise_ignored)
        except Superseded:
            raise self._superseded() from None
        except BaseException as error:
            with deferred_interrupts():
                detached = self._detaches(error)
                if not detached:
                    self._end(error)
            if isinstance(error, RunFailure):
                raise self.results.counted_failure(error, self.metadata()) from None
            raise
        finally:
            if not detached:
                self._clean_up()
        if self.results.missing:
            raise self._failure()

    @property
    def arrays_made(self) -> Arrays:
        assert self.arrays is not None
        return self.arrays

    # ---- From the start to the end

    def _start(self, pipes_context: Mapping[str, Any]) -> None:
        launch = self.launch
        args = launch.plan, self.run_dir, pipes_context, launch.step, self.max_concurrent
        self.arrays = self.backend.arrays(*args)
        if launch.step.reattached:
            with suppress(ValueError):
                self._told = set(json.loads(self.connection.read(os.path.join(self.run_dir, _TOLD), 0, _MOST_BYTES) or b"[]"))
            self.results.told = set(self._told)

    def _announce(self) -> None:
        arrays = self.arrays_made
        if arrays.running:
            base, job_id = Layout.here(self.resource.local_base).base, arrays.running[-1].job.job_id
            # Each element of the array has a Ray cluster of its own, so the event names none.
            announce(self.context, base, job_id, arrays.cluster_id, None, self.launch.name, self.connection)

    def _follow(self, raise_ignored: Any) -> None:
        """Watch the arrays and submit further arrays, until all partitions have ended or a whole array was cancelled.

        Raises RunFailure if an array cannot be submitted or can never start, if an array waits longer than the queue timeout, or
        if the run directory was removed. Raises RunFailure, too, if the cluster does not answer for `connection_loss_timeout`
        seconds. Raises Superseded if a later attempt has taken the arrays over.

        `raise_ignored` raises the exception of an interrupt that Python has ignored (see `noticed_interrupts`).
        """
        arrays, grown = self.arrays_made, time.monotonic()
        while arrays.open or arrays.waiting:
            raise_ignored()
            try:
                submitted = not self.stopped and arrays.submit_next()
                ended = arrays.poll()
                self._lost_since = None
            except StartError as error:
                raise RunFailure(error.kind, str(error), retry=error.retry) from None
            except FileNotFoundError as error:
                raise RunFailure(FailureKind.RECORD, f"the run directory was removed while the job arrays ran: {error}") from None
            except OSError as error:
                self._out_of_reach(error)
                submitted, ended = False, []
            if submitted:
                self._announce()
            self._conclude(ended)
            if submitted or ended:
                grown = time.monotonic()
            if self.stopped and not arrays.open:
                break
            if not ended:
                time.sleep(self.backend.cadence.pause(time.monotonic() - grown, arrays.begun))

    def _out_of_reach(self, error: OSError) -> None:
        """Log the OSError of a request to the cluster, or raise RunFailure if requests have failed for too long.

        Only the first of several failures is logged. Too long means more than `connection_loss_timeout` seconds, a setting of the
        resource.
        """
        now = time.monotonic()
        if self._lost_since is None:
            self._lost_since = now
            self.log.warning(f"[rayslurm] the records cannot be read, the job arrays go on: {error}")
        if now - self._lost_since > self.resource.connection_loss_timeout:
            sentence = f"the records were out of reach for too long, and the job arrays may go on: {error}"
            raise RunFailure(FailureKind.CONNECTION, sentence, retry=False)

    def _conclude(self, ended: Sequence[Ended]) -> None:
        """Judge chunks that have ended, show their output, and materialize the partitions that succeeded.

        If an earlier attempt has already logged in Dagster that a chunk failed, the chunk's output is not shown again. If a whole
        array was cancelled, this method also sets `stopped`, so that no further array is submitted. The method also stores the
        nodes that failed a health check, so that later arrays can avoid these nodes.
        """
        failed, unhealthy = False, dict[str, Any]()
        for each in ended:
            fresh, end = self._told.isdisjoint(each.keys), each.evidence.end or {}
            facts = end.get("context") or {}
            if fresh:
                self._show(each)
                unhealthy.update({row["node"]: row for row in facts.get("unhealthy") or ()})
            nodes = (facts.get("allocation") or {}).get("nodes") or []
            own: dict[str, Any] = {"Slurm job ID": each.label, **({"Slurm nodes": ", ".join(nodes)} if nodes else {})}
            usage = {"cpu_seconds": 0.0, "peak_memory": 0, **(end.get("usage") or {})}
            verdict = self.results.conclude(each.keys, each.evidence, each.messages, usage, own)
            if verdict.kind is not None:
                self._told.update(self.results.failed.keys() & set(each.keys))
                failed = failed or fresh
            history = self._history.setdefault(each.array, _History())
            history.add(each, verdict.kind == FailureKind.CANCELLED)
        remember(unhealthy_nodes(list(unhealthy.values())), self.backend, self.log)
        if failed:
            with suppress(OSError):  # Without the file, a retry shows some failures again.
                self.connection.write(os.path.join(self.run_dir, _TOLD), json.dumps(sorted(self._told)).encode())
        for array in self.arrays_made.running:
            history = self._history.get(array.number, _History())
            if history.cancelled and not array.open and not self.stopped:
                self.stopped = f"job array {array.job.job_id} was cancelled"
                if self.arrays_made.waiting:
                    self.log.warning(f"[rayslurm] {self.stopped}, so that no further one is submitted")

    def _show(self, ended: Ended) -> None:
        """Show a chunk's stdout and stderr in Dagster, each below a title line; log the warnings of the chunk's runtime.

        A run logs at most `_MOST_WARNINGS` such warnings for all of its chunks.
        """
        writer = OutputWriter("", lambda text: self.log.warning(f"[rayslurm] {text}"))
        if ended.output:
            end, streams = ended.evidence.end or {}, dict.fromkeys(record["s"] for record in ended.output)
            how = "no end is recorded"
            if end:
                by_signal, code = end.get("signal"), end.get("exit_code")
                how = f"killed by signal {by_signal}" if by_signal else f"exit code {code}" if code is not None else end["reason"]
                how += f", {end['ended_at'] - (end.get('started_at') or end['ended_at']):.1f} s"
            for stream in streams:
                text = "".join(record["d"] for record in ended.output if record["s"] == stream)
                writer.write(stream, f"{title_of(ended.keys, how)}{text}" + ("" if text.endswith("\n") else "\n"))
            writer.flush()
        for name, text in ended.phases:
            if name in WARNING_PHASES and self.warnings < _MOST_WARNINGS:
                self.warnings += 1
                self.log.warning(f"[rayslurm] [{span_of(ended.keys)}] {name}: {text}")

    # ---- Interrupts and failures

    def _detaches(self, interrupt: BaseException) -> bool:
        """Returns whether the arrays go on although `interrupt` ends this Dagster process. If so, logs a warning.

        The result is True only if four conditions hold: the Dagster process is stopped from outside, and not by a person who ends
        the run (see `is_service_stop`); `on_service_stop` of the resource is "detach"; an array was submitted; and a later
        attempt can find the arrays.
        """
        wanted = self.resource.on_service_stop == DETACH and self.launch.history is not None and self.job_ids
        if not wanted or not is_service_stop(self.context, interrupt):
            return False
        self.log.warning(
            f"[rayslurm] this Dagster process is stopped, and Slurm job array {self.job_ids} goes on: the next attempt at this "
            "step takes it over, if it asks for the same"
        )
        return True

    def _end(self, error: BaseException) -> None:
        """Cancel all arrays because of `error`, and materialize the partitions that have succeeded by then.

        `error` is the failure or the interrupt that ended this attempt. The arrays go on if the cluster is out of reach, or if a
        later attempt owns the arrays. If `error` is a Ctrl-C, the method first marks the Dagster run as "canceling".
        """
        if isinstance(error, INTERRUPTS) and has_terminal():
            mark_canceling(self.context)
        lost = isinstance(error, RunFailure) and error.kind == FailureKind.CONNECTION
        if self.arrays is None or lost or not self.launch.step.owner.confirm_or_assume():
            return
        if self.arrays.open:
            self.log.warning(f"[rayslurm] ending Slurm job array {self.job_ids}: {type(error).__name__}")
        self.arrays.cancel()
        with suppress(OSError, RunFailure, Superseded):
            for ended in self.arrays.poll():
                if ended.evidence.end is not None and ended.evidence.end.get("exit_code") == 0:
                    self._conclude([ended])

    def _failure(self) -> RunFailure:
        """Returns the failure of the step. Called when all arrays have ended, and some partitions are not materialized."""
        verdicts = list(self.results.failed.values())
        kinds = {each.kind for each in verdicts if each.kind is not None}
        kind = FailureKind.CANCELLED if self.stopped else kinds.pop() if len(kinds) == 1 else FailureKind.PAYLOAD
        retry = False if verdicts and all(each.retry is False for each in verdicts) else None
        why = f"{self.stopped}: " if self.stopped else ""
        metadata = {**self.metadata(), **self.results.failures_metadata()}
        return RunFailure(kind, f"{why}{self.results.sentence()}", metadata, retry)

    def _superseded(self) -> RunFailure:
        owner = self.launch.step.owner
        with suppress(OSError):
            owner.confirm()
        return superseded(owner.new_owner or "another attempt")

    def _clean_up(self) -> None:
        """Remove the run directory on the cluster or, if `keep_run_dirs` of the resource keeps it, only the secrets in it.

        A directory that is kept gets a status, by which `rayslurm ps` shows how the step ended. The method does nothing if the
        cluster is out of reach, or if a later attempt owns the run directory. It also does nothing if this attempt wanted to
        continue the arrays of an earlier attempt, but could not read the state of these arrays.
        """
        owner, failed = self.launch.step.owner, bool(self.results.missing)
        if self._lost_since is not None or (self.arrays is None and self.launch.step.reattached):
            return
        try:
            if not owner.confirm():
                return
        except OSError:
            return
        self.launch.forget()
        if not keeps_run_dir(self.resource, failed):
            discard(self.connection, self.run_dir)
            return
        status = {"state": "ended", "message": self.results.counted(), "at": time.time()}
        with suppress(OSError):
            self.connection.write(os.path.join(self.run_dir, STATUS), json.dumps(status).encode())
        if self.launch.plan.secret_env and self.arrays is not None:
            for array in self.arrays.running:
                discard(self.connection, os.path.join(array.directory, SECRETS))
