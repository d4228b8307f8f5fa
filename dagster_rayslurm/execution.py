"""One payload from start to verdict, the same for every mode: start, follow, judge, bring back, tidy up."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import dagster as dg
from dagster_pipes import PipesExtras

from .backends.base import Attempt, Backend, Place, Step
from .backends.rundir import Layout, sweep_old
from .connections.base import Connection, ConnectionFailed
from .errors import RunFailure, StartError
from .follow import Evidence, Follower, follow_all
from .interrupts import deferred_interrupts
from .metadata import failure_metadata, run_metadata
from .outcome import Verdict, asks_slurm, judge
from .pipes import RecordContextInjector, RecordReader
from .plan import Plan, run_dir_name
from .runtime.record import SECRETS
from .slurm.log import telling_lines

_CANCEL_MARGIN = 15.0
"""Seconds beyond the grace period that a cancelled run is followed: it still takes its record to the end."""
_RETRY = 5.0
"""Seconds between two tries to bring outputs back over a connection that is lost."""
_SWEEP_INTERVAL = 3600.0
_last_sweep: dict[tuple[str, Path], float] = {}


@dataclass(frozen=True)
class Policy:
    """What the user decided about every run of a resource; see the fields of `ComputeResource`.

    Attributes:
        home: where things are on this machine, wherever payloads run.
    """

    mode: str
    require_messages: bool
    keep_run_dirs: str
    retention_days: float
    connection_loss_timeout: float
    runtime_start_timeout: float
    home: Layout

    def keeps(self, failed: bool) -> bool:
        """Whether a run directory stays."""
        return self.keep_run_dirs == "all" or (self.keep_run_dirs == "failed" and failed)


class CompletedRun(dg.PipesClientCompletedInvocation):
    """A payload that succeeded.

    `get_results()`, `get_materialize_result()`, `get_asset_check_result()` and `get_custom_messages()` give what it
    reported, each with the run's `metadata`.

    Attributes:
        cluster_id: name of the Ray cluster, for `ComputeResource.cleanup_cluster`.
        job_id: Slurm's job id; None in local mode.
        outputs: local paths of the files that `outputs=` asked for.
    """

    def __init__(self, session: Any, metadata: Mapping[str, Any], attempt: Attempt, outputs: list[Path]) -> None:
        super().__init__(session, metadata=metadata)
        self.cluster_id = attempt.cluster_id
        self.job_id = attempt.job_id
        self.outputs = outputs


def execute(
    context: dg.OpExecutionContext, plan: Plan, backend: Backend, policy: Policy, extras: PipesExtras | None
) -> CompletedRun:
    """Run a plan and wait for it.

    Raises:
        RunFailure: it did not succeed.
    """
    step_key = context.get_step_execution_context().step.key
    partition_key = context.partition_key if context.has_partition_key else None
    name = run_dir_name(context.run.run_id, step_key, plan.payload.nonce)
    reader, injector = RecordReader(), RecordContextInjector(context)
    with dg.open_pipes_session(context, injector, reader, extras) as session:
        held: list[Attempt] = []
        follower: Follower | None = None
        run_dir: str | None = None
        try:
            with start_errors():
                sweep(backend, policy)
                run_dir = str(backend.layout.runs / name)
                assert injector.context_data is not None
                step = Step(context.run.run_id, step_key, partition_key, context.log)
                attempt = backend.start(plan, run_dir, injector.context_data, step, held.append)
            follower = Follower(
                backend.connection,
                run_dir,
                plan.payload.nonce,
                reader.handler,
                context.log,
                backend.cadence,
                policy.connection_loss_timeout,
                attempt.requeue,
            )
            follow_to_the_end([Followed(plan, attempt, follower)], policy, context)
            evidence = follower.evidence
        except BaseException:
            if run_dir is not None and not policy.keeps(failed=True):
                discard(backend.connection, run_dir)
            raise
        finally:
            if plan.secret_env and run_dir is not None:
                # The runtime takes them first thing; one that never came to it must not leave them.
                discard(backend.connection, os.path.join(run_dir, SECRETS))
            for each in held:
                each.release(Evidence() if follower is None else follower.evidence)
        outputs = policy.home.outputs / name
        metadata = _conclude(evidence, plan, attempt, backend, policy, run_dir, outputs)
    return CompletedRun(session, metadata, attempt, sorted(path for path in outputs.rglob("*") if path.is_file()))


@dataclass(frozen=True)
class Followed:
    """One payload at work.

    Attributes:
        plan: what runs.
        attempt: its runtime.
        follower: reads its record.
        component: the component that it is the payload of; None for the only one.
    """

    plan: Plan
    attempt: Attempt
    follower: Follower
    component: str | None = None

    @property
    def whose(self) -> str:
        """What a sentence about it begins with."""
        return "" if self.component is None else f"component {self.component!r}: "


def follow_to_the_end(followed: Sequence[Followed], policy: Policy, context: dg.OpExecutionContext) -> None:
    """Follow payloads; when interrupted, end them, take what they still say, and let the interrupt go on.

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
            log = f": {lines[-1]}" if (lines := telling_lines(evidence.runtime_log)) else ""
            sentence = f"{each.whose}the runtime did not start within runtime_start_timeout={limit:g} s{log}"
            metadata = {**each.attempt.metadata(evidence), **failure_metadata(evidence, None)}
            raise RunFailure("runtime", sentence, metadata)
        return each.attempt.ended(evidence)

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
                each.follower.evidence.interrupted = True
            if isinstance(error, (KeyboardInterrupt, dg.DagsterExecutionInterruptedError)) and _has_terminal():
                _mark_canceling(context)
            context.log.warning(f"[rayslurm] ending the payload{'s' * (len(followed) > 1)}: {type(error).__name__}")
            for each in followed:
                each.attempt.cancel()

            def ended(attempt: Attempt, evidence: Evidence) -> str | None:
                if interrupted_again():
                    attempt.cancel(now=True)
                return attempt.ended(evidence)

            grace = max(each.plan.payload.grace_period for each in followed)
            turns = [(each.follower, partial(ended, each.attempt)) for each in followed]
            follow_all(turns, time.monotonic() + grace + _CANCEL_MARGIN)
            for each in followed:
                if each.follower.evidence.end is None:
                    each.attempt.kill()
                verdict = judge(each.follower.evidence, each.plan.uses_pipes, policy.require_messages)
                context.log.info(f"[rayslurm] {each.whose}{verdict.sentence}")
        raise


def _conclude(
    evidence: Evidence, plan: Plan, attempt: Attempt, backend: Backend, policy: Policy, run_dir: str, outputs: Path
) -> dict[str, Any]:
    """Judge the run, bring its outputs back and tidy up.

    Returns:
        The metadata of its results.

    Raises:
        RunFailure: the run did not succeed.
    """
    if asks_slurm(evidence):
        attempt.explain(evidence)
    verdict = judge(evidence, plan.uses_pipes, policy.require_messages)
    metadata = run_metadata(evidence.end, policy.mode, attempt.cluster_id)
    metadata.update(attempt.metadata(evidence))
    stranded = fetch_outputs(evidence, backend.connection, run_dir, outputs, policy)
    if stranded is not None and verdict.kind is None:
        verdict = Verdict("record", f"the payload succeeded, but its outputs cannot be brought back: {stranded}")
    keep = stranded is not None or policy.keeps(verdict.kind is not None)
    if not keep:
        discard(backend.connection, run_dir)
    if verdict.kind is not None:
        where = f"{attempt.place}:{run_dir}" if attempt.place else run_dir
        metadata.update(failure_metadata(evidence, where if keep else None))
        raise RunFailure(verdict.kind, verdict.sentence, metadata, verdict.retry)
    return metadata


def fetch_outputs(evidence: Evidence, connection: Connection, run_dir: str, outputs: Path, policy: Policy) -> OSError | None:
    """Copy the outputs of a payload to this machine; what keeps them from it, or None."""
    try:
        for entry in evidence.end["outputs"] if evidence.end is not None else ():
            source = os.path.join(run_dir, "outputs", entry["name"])
            _bring_back(connection, source, str(outputs / entry["name"]), policy.connection_loss_timeout)
    except OSError as error:
        return error
    return None


def _bring_back(connection: Connection, source: str, target: str, patience: float) -> None:
    """Copy a file to this machine, again and again while the connection is lost.

    Raises:
        OSError: it cannot be had, or not within `patience` seconds.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            return connection.download(source, target)
        except ConnectionFailed as error:
            if not error.temporary or time.monotonic() > deadline:
                raise
            time.sleep(_RETRY)


def discard(connection: Connection, path: str) -> None:
    """Remove something that is of no more use; what stays is swept later, and no run fails because of it."""
    with suppress(OSError):
        connection.remove(path)


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


def sweep(backend: Place, policy: Policy) -> None:
    """Remove what is older than `retention_days`, here and where payloads run, once an hour and process."""
    now, where = time.monotonic(), (backend.connection.place, backend.layout.base)
    if now - _last_sweep.get(where, -_SWEEP_INTERVAL) >= _SWEEP_INTERVAL:
        _last_sweep[where] = now
        sweep_old(policy.home, policy.retention_days)
        backend.sweep(policy.retention_days)


@contextmanager
def start_errors() -> Iterator[None]:
    """Turn what keeps a runtime from starting into one failure."""
    try:
        yield
    except StartError as error:
        raise RunFailure(error.kind, str(error), retry=error.retry) from None
    except ConnectionFailed as error:
        raise RunFailure("connection", f"the run cannot be started: {error}", retry=error.temporary) from error
    except OSError as error:
        raise RunFailure("record", f"the run cannot be started: {error}") from error
