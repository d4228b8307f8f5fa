"""Submits runs without following them, follows a submitted run by its handle, and finds submitted runs that have ended."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import dagster as dg
from dagster_pipes import PipesContextData

from ..backends.base import RunningPayload, Step
from ..backends.batch import CLUSTER, BatchBackend, SubmittedBackend
from ..backends.layout import Layout, nonce_of
from ..backends.listing import is_running
from ..backends.ownership import UNCONTESTED, Ownership, owner_file
from ..compute_fields import ComputeFields
from ..edge import submissions
from ..edge.sessions import JOB_ID
from ..errors import FailureKind, StartError
from ..failures import CompletedRun
from ..follow import Evidence
from ..follow.forward import RecordPipes
from ..handle import RunHandle
from ..outcome.metadata import Metadata, run_metadata
from ..outcome.verdict import Verdict, judge, needs_job_facts, with_hint
from ..plan import Plan, run_dir_name
from ..runtime.protocol.messages import EndReason
from ..runtime.protocol.record import JOURNAL, PAYLOAD, RUNTIME, SECRETS, STDIO, LineReader
from ..runtime.protocol.spec import PayloadSpec, RuntimeSpec, from_json
from ..slurm.accounting import fetch_job_facts
from ..slurm.request import job_name
from ..slurm.shared_queue import QueueSnapshot, listed_snapshot, squeue_command
from ..slurm.states import TERMINAL
from ..slurm.submit import cancel_named, find_job
from ..ssh.base import Connection
from .files import discard, sweep_old_files
from .reattach import Launch
from .run import PayloadRun, Steps, start_errors

# Age in seconds from which on a claim without a job is abandoned if its process is on another host, so that nobody can tell
# whether the process lives. A submission takes two minutes at most.
_CLAIM_TIMEOUT = 300.0
_PAUSE = 1.0  # Seconds between two looks at another process's undecided claim.
# Seconds after the submission within which the queue may lack the job; without a job id, the sbatch itself may take that long.
_LATE, _NEVER_SUBMITTED = 60.0, 900.0
# Seconds after Slurm's word that a job is over within which the record may still get its `end`, or a requeued job may come back.
_LATE_END, _LATE_REQUEUE = 60.0, 300.0
# When this process first saw each job over, by name of the run, by the monotonic clock. A look at a place, base directory and
# sensor replaces the entries of the look before, so that a run that goes on, is reported or is removed has none.
_over_since: dict[tuple[str, str, str], dict[str, float]] = {}
_CHUNK = 1024 * 1024
_RESULTS = ("report_asset_materialization", "report_asset_check")  # Pipes messages that become events.
_SQUEUE_TIMEOUT = 120.0
_TAIL = 65536  # Bytes of the end of the recorded output that are read for the sentence of a failure.


# ---- Submit


def submit_and_leave(
    name: str, plan: Plan, backend: BatchBackend, resource: ComputeFields, context: PipesContextData, handle: RunHandle, log: Any
) -> RunHandle:
    """Submit the job of a plan and return its handle; if `handle.key` was used before, return the handle of the earlier job.

    If `handle.key` is None, a job is always submitted. The function does not wait for the job's start or end. Raises RunFailure
    if the job cannot be submitted.

    Args:
        name: A part of the names of the run directory and of the job.
        plan: The plan of the payload.
        backend: The backend that submits the job.
        resource: The settings of the run.
        context: The Pipes context.
        handle: The handle without the fields that are unknown before the submission. The result also has the name of the run, the
            name and id of the job, the id of the Ray cluster, and the time of the submission.
        log: The logger for warnings.
    """
    nonce = plan.payload.nonce
    run = run_dir_name(context["run_id"], name, nonce)
    handle = replace(handle, run=run, job_name=job_name(name, nonce), cluster_id=f"{CLUSTER}{nonce}")
    connection, run_dir = backend.connection, str(backend.layout.runs / run)
    files = {submissions.HANDLE: handle.to_json().encode(), submissions.REPORTER: b""}
    step = Step(context["run_id"], name, handle.partition_key, log, files=files)

    def start() -> RunHandle:
        started: list[RunningPayload] = []
        try:
            running = backend.start(plan, run_dir, context, step, started.append)
        except BaseException:
            if not started:
                discard(connection, run_dir)
            raise
        return replace(handle, job_id=running.job.job_id, submitted_at=running.job.submitted_at)

    with start_errors():
        sweep_old_files(backend, Layout.here(resource.local_base), resource.retention_days)
        if handle.key is None:
            return start()
        directory = str(backend.layout.base / "submissions" / hashlib.sha256(handle.key.encode()).hexdigest()[:32])
        return submit_once(connection, directory, str(backend.layout.runs), handle, start, log)


def submit_once(
    connection: Connection, directory: str, runs: str, own: RunHandle, start: Callable[[], RunHandle], log: Any
) -> RunHandle:
    """Submit a job, unless a job was submitted before for the same key (`own.key`); returns the handle of the key's only job.

    The process that comes first writes a claim into `directory` and submits the job. Any other process finds the claim, and waits
    until the job has an id. If the process with the claim seems to be dead and Slurm has no such job, a waiting process marks the
    claim as abandoned, writes a claim of its own and submits the job. The job id in the result is "" if a job was submitted whose
    id can no longer be found.

    Raises StartError if another process has abandoned the claim of the calling process. Exceptions of `start` and of the
    connection are raised, too.

    Args:
        connection: The connection to the cluster.
        directory: The directory on the cluster for the claims of the key.
        runs: The directory on the cluster that has all run directories.
        own: The handle for the submission by this process, with the key and without a job id.
        start: A function that submits the job, and returns `own` with the job id.
        log: The logger for messages.
    """
    mine = json.dumps({"handle": own.to_json(), "process": [socket.gethostname(), os.getpid()]})
    after = 0
    while True:
        number, state, text, age = connection.call(submissions.claim, directory, after, mine, repeat=True)
        path = os.path.join(directory, str(number))
        decide = partial(connection.call, submissions.decide, path, repeat=True)
        if text == mine:
            try:
                handle = start()
            except BaseException:
                with suppress(OSError):
                    connection.call(submissions.decide, path, submissions.ABANDONED, repeat=True)
                raise
            if connection.call(submissions.decide, path, submissions.SUBMITTED, repeat=True) == submissions.SUBMITTED:
                return handle
            cancel_named(connection, own.job_name, log)
            sentence = f"another process took the submission with the key {own.key!r} for dead and has submitted the job itself"
            raise StartError(FailureKind.SUBMISSION, sentence, retry=True)
        claimed = json.loads(text)
        other = RunHandle.from_json(claimed["handle"])
        if state == submissions.ABANDONED:
            after = number
            continue
        job_id = _job_id(connection, runs, other)
        if job_id is None and (state == submissions.SUBMITTED or age > _CLAIM_TIMEOUT or _is_dead(claimed["process"])):
            job_id = find_job(connection, other.job_name)
        elif job_id is None:
            time.sleep(_PAUSE)
            continue
        if state == submissions.UNDECIDED:
            state = decide(submissions.SUBMITTED if job_id else submissions.ABANDONED)
            if state == submissions.ABANDONED:
                log.warning(f"[rayslurm] the submission of {other.run} died before there was a job: it is submitted anew")
                cancel_named(connection, other.job_name, log)
                discard(connection, os.path.join(runs, other.run))
                after = number
                continue
        job = f"Slurm job {job_id}" if job_id else "a Slurm job that is no longer in the queue"
        log.info(f"[rayslurm] {job} ({other.job_name}) was submitted before with the key {own.key!r}")
        return replace(other, job_id=job_id or "", submitted_at=time.time() - age)


def _job_id(connection: Connection, runs: str, handle: RunHandle) -> str | None:
    return connection.read(os.path.join(runs, handle.run, JOB_ID), 0, 64).decode().strip() or None


def _is_dead(process: Sequence[Any]) -> bool:
    """Returns True if the process `process`, given as [HOST, PID], has certainly ended; False also if it ran on another host."""
    host, pid = process
    return bool(host == socket.gethostname() and not is_running(pid))


# ---- Follow


def reattaching(
    context: dg.OpExecutionContext, handle: RunHandle, backend: BatchBackend, resource: ComputeFields
) -> Steps[CompletedRun]:
    """Generator that follows the submitted run of `handle` to its end, and returns the result for the user's asset.

    The caller must follow the payload that the generator yields, and then continue it, as `drive` does. Raises RunFailure if the
    run fails, or if the run or its job cannot be found.
    """
    connection, run_dir = backend.connection, str(backend.layout.runs / handle.run)
    step_key = context.get_step_execution_context().step.key
    with start_errors():
        plan, handle = _submitted_plan(connection, run_dir, handle)
        owner = Ownership(connection, run_dir, owner_file(context.run_id), lambda: None)
        # An attempt that has judged the run, or began to end it, does not keep this one from reading how the run ended.
        own = owner if owner.take_over() else UNCONTESTED
    step = Step(context.run_id, step_key, handle.partition_key, context.log, reattached=True, owner=own)
    launch = Launch(step, plan, handle.run, submitted=True)
    # The run directory is kept until a sweep removes it, because the next attempt may need it, too.
    kept = resource.model_copy(update={"keep_run_dirs": "all", "on_unhealthy": "fail"})
    follower = SubmittedBackend(
        slurm=backend.slurm, queue=backend.queue, environment=backend.environment, queue_timeout=backend.queue_timeout,
        patience=backend.patience, handle=handle,
    )  # fmt: skip
    pipes = RecordPipes(context)
    run = PayloadRun(context.log, follower, kept, launch, {None: plan}, context)
    with pipes.session(None, plan.uses_pipes) as session:
        try:
            metadata = yield from run.completing(pipes.pipes_context, pipes.handler, lambda _: None)
        finally:
            if run.payloads and run.first.evidence.end is not None and not run.outputs_left:
                with suppress(OSError):
                    connection.write(os.path.join(run_dir, submissions.FETCHED), b"")
    outputs = sorted(path for path in run.outputs.rglob("*") if path.is_file())
    return CompletedRun(session, metadata, handle.cluster_id, handle.job_id, outputs)


def _submitted_plan(connection: Connection, run_dir: str, handle: RunHandle) -> tuple[Plan, RunHandle]:
    """Returns the plan of a submitted run, read from the run directory, and a copy of `handle` that has the job id.

    Raises StartError if the run directory or the job is gone.
    """
    payload, runtime = (connection.read(os.path.join(run_dir, name), 0, _CHUNK).decode() for name in (PAYLOAD, RUNTIME))
    if not payload or not runtime:
        raise StartError(
            FailureKind.RECORD,
            f"the run directory of the handle is gone: {run_dir} on {connection.place}; use the cluster and remote_base that "
            "submitted the run, or submit again with another key",
            retry=False,
        )
    job_id = handle.job_id or _job_id(connection, os.path.dirname(run_dir), handle) or find_job(connection, handle.job_name)
    if not job_id:
        raise StartError(FailureKind.SUBMISSION, f"there is no Slurm job {handle.job_name} on {connection.place}", retry=False)
    spec = from_json(PayloadSpec, payload)
    plan = Plan(spec, from_json(RuntimeSpec, runtime).ray, (), uses_pipes=handle.uses_pipes)
    return plan, replace(handle, job_id=job_id)


# ---- Look


@dataclass(frozen=True)
class EndedRun:
    """A submitted run that has ended, with the verdict on the run."""

    handle: RunHandle
    verdict: Verdict
    metadata: Metadata  # The metadata of the run, without what the payload reported.
    results: Sequence[dg.MaterializeResult | dg.AssetCheckResult]  # What the payload reported through Pipes.


def look_for_ends(
    connection: Connection, base: str, known: Sequence[str], sensor: str, resource: ComputeFields
) -> tuple[list[EndedRun], list[str], int]:
    """Find the submitted runs that have ended, and judge these runs. One remote call lists all runs and Slurm's queue.

    Returns three values: the runs that have ended; the names in `known` whose run directories still exist; the number of runs
    that have not ended. Of several sensors, only the first that finds a run ended reports the end. A run whose end another
    sensor has reported is in none of the three values. Raises OSError if the cluster or Slurm does not answer.

    Args:
        connection: The connection to the cluster.
        base: The base directory on the cluster.
        known: The names of the runs whose ends this sensor has reported before.
        sensor: The name of the sensor that reports the ends.
        resource: The settings by which the runs are judged.
    """
    found = connection.call(
        submissions.listing, base, list(squeue_command()), _SQUEUE_TIMEOUT, list(known), repeat=True, timeout=_SQUEUE_TIMEOUT
    )
    snapshot = listed_snapshot(connection.place, *found["queue"])
    ended, waiting = [], 0
    place, now, over = (connection.place, base, sensor), time.monotonic(), dict[str, float]()
    for each in found["runs"]:
        if each["known"] or each["reporter"] not in ("", sensor):
            continue
        handle = ended_handle(each, snapshot)
        run_dir = os.path.join(base, "runs", each["name"])
        if handle is None:
            waiting += 1
            continue
        evidence, results = _read_record(connection, run_dir, handle)
        over[each["name"]] = _over_since.get(place, {}).get(each["name"], now)
        if not _is_final(evidence, handle, now - over[each["name"]]):
            waiting += 1
        elif connection.call(submissions.take_report, run_dir, sensor, repeat=True) == sensor:
            _complete(evidence, connection, run_dir, handle, snapshot)
            verdict = with_hint(judge(evidence, handle.uses_pipes, resource.require_messages), evidence)
            metadata: Metadata = {"Slurm job ID": handle.job_id, "Run": handle.run}
            metadata.update(run_metadata(evidence.end, resource.mode, handle.cluster_id))
            ended.append(EndedRun(handle, verdict, metadata, results))
    _over_since[place] = over
    return ended, [each["name"] for each in found["runs"] if each["known"]], waiting


def ended_handle(found: Mapping[str, Any], queue: QueueSnapshot) -> RunHandle | None:
    """Returns the handle of a submitted run, with the job id, if the run's job has ended or was never submitted; else None.

    `found` is one run in the result of `edge.submissions.listing`. `queue` is Slurm's queue, listed at the same time as the run.
    If the handle in `found` cannot be read, the result is None.
    """
    try:
        handle = RunHandle.from_json(found["handle"])
    except ValueError:
        return None  # The file is being written, or is of another version.
    number = found["job_id"]
    row = queue.job(int(number)) if number.isdecimal() else next(iter(queue.named(handle.job_name)), None)
    if row is None:
        return replace(handle, job_id=number) if found["age"] > (_LATE if number else _NEVER_SUBMITTED) else None
    parts = queue.components(row.job_id)
    return replace(handle, job_id=str(row.job_id)) if all(part.state in TERMINAL for part in parts) else None


def _is_final(evidence: Evidence, handle: RunHandle, over_for: float) -> bool:
    """Returns whether the record of a submitted run will not change any more.

    Called when the run's job has ended in Slurm or was never submitted; this process first saw this `over_for` seconds ago. A
    network file system may show the `end` of the record late, and Slurm may run a requeued job again. Therefore the result is
    False for a while in two cases: the record has no `end`, or Slurm may requeue the job and the `end` says that the runtime
    received a signal. If the job was never submitted, no record can come, and the result is True.
    """
    end = evidence.end
    if not handle.job_id or (end is not None and not (handle.requeue and end.get("reason") == EndReason.TERMINATED)):
        return True
    return over_for >= (_LATE_REQUEUE if handle.requeue else _LATE_END)


def _read_record(connection: Connection, run_dir: str, handle: RunHandle) -> tuple[Evidence, list[Any]]:
    """Reads the journal of a submitted run; returns the evidence, and the results that the payload reported through Pipes.

    A result that Dagster refuses sets `message_error` of the evidence.
    """
    reader, nowhere = LineReader(), None  # Dagster's handler needs no step for results.
    evidence, handler = Evidence(), dg.PipesMessageHandler(nowhere, RecordPipes(nowhere))  # type: ignore[arg-type]
    while data := connection.read(os.path.join(run_dir, JOURNAL), reader.next_read, _CHUNK):
        for record in reader.feed(data):
            if record.get("type") == "start":
                evidence, handler = Evidence(), dg.PipesMessageHandler(nowhere, RecordPipes(nowhere))  # type: ignore[arg-type]
            evidence.add_record(record, nonce_of(handle.run))
            if record.get("type") == "pipes":
                try:
                    message = json.loads(record["line"])
                    evidence.add_message(message["method"], message.get("params") or {})
                    if message["method"] in _RESULTS:
                        handler.handle_message(message)
                except Exception as error:  # noqa: BLE001 - users' messages may be malformed in any way
                    evidence.message_error = evidence.message_error or f"{type(error).__name__}: {error}"
    return evidence, list(handler.get_reported_results())


def _complete(evidence: Evidence, connection: Connection, run_dir: str, handle: RunHandle, queue: QueueSnapshot) -> None:
    """Add the last facts about a submitted run that has ended to `evidence`, and prepare the run directory for its removal.

    If the record has an `end`, the function adds the last part of the output; otherwise, it adds what `queue`, Slurm's queue
    after the end of the run, says about the job. If the record does not explain the end of the run, the function also adds
    Slurm's accounting of the job.

    The function removes the secrets from the run directory. If the run has no output files to fetch, the function marks the run
    directory so that it may be removed when it is old.
    """
    if evidence.end is not None:
        tail = LineReader(max(0, int(evidence.end.get("stdio_bytes", 0)) - _TAIL))
        for record in tail.feed(connection.read(os.path.join(run_dir, STDIO), tail.next_read, _TAIL)):
            evidence.add_output(record)
    else:
        row = queue.job(int(handle.job_id)) if handle.job_id else None
        state = f"Slurm calls the job {row.state}" if row is not None else "Slurm no longer knows the job"
        evidence.runtime_exit = state if handle.job_id else "its job was never submitted"
    if needs_job_facts(evidence) and handle.job_id:
        with suppress(OSError):
            evidence.job = fetch_job_facts(connection, int(handle.job_id))
    # A job that was cancelled while it waited had no runtime to remove the secrets.
    discard(connection, os.path.join(run_dir, SECRETS))
    if not (evidence.end or {}).get("outputs"):
        with suppress(OSError):
            connection.write(os.path.join(run_dir, submissions.FETCHED), b"")
