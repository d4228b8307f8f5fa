"""Runs a payload from a terminal, without Dagster, but with the same backends, records and verdicts as in Dagster.

Pipes messages of the payload become lines of the log. No later run can reattach to the payload, because this needs Dagster's
event log.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from dagster_pipes import PipesContextData

from ..backends.base import Backend, RunningPayload, Step
from ..backends.layout import Layout
from ..compute_fields import ComputeFields
from ..failures import RunFailure
from ..plan import Plan, run_dir_name
from ..runtime.protocol.messages import EndReason
from ..runtime.protocol.record import Record
from ..slurm.request import FROM_TERMINAL
from .files import discard, sweep_old_files
from .reattach import Launch
from .run import PayloadRun, drive, start_errors

# Exit codes besides those of the payload: for a time limit as of timeout(1), for what is not the program's fault as of
# docker run(1), and after Ctrl-C as of a shell.
TIMED_OUT, NOT_THE_PAYLOAD, INTERRUPTED = 124, 125, 130
_SIGNAL = 128


@dataclass(frozen=True)
class Finished:
    """The result of a payload that was followed to its end."""

    run: str  # The name of its run directory.
    exit_code: int  # The exit code for the `rayslurm` process; 0 if the payload succeeded.
    failure: RunFailure | None  # None if the payload succeeded.
    job_id: str | None  # Slurm's job id; None in local mode.
    outputs: list[str]  # Paths on this machine of the output files, which the plan selects by patterns.


@dataclass(frozen=True)
class Detached:
    """A payload that was started, and that goes on after the `rayslurm` process has ended."""

    run: str  # The name of the run directory.
    directory: str  # The path of the run directory on the cluster.
    job_id: str | None  # Slurm's job id; None without Slurm.
    cluster_id: str  # The id of the Ray cluster.


class TerminalPipes:
    """Handles the Pipes messages of a payload that runs without Dagster: writes log messages and reported results to a logger."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log

    def handle_message(self, message: Mapping[str, Any]) -> None:
        """Write a Pipes message of the payload to the log as one line.

        Messages other than log messages and results are ignored.
        """
        method, params = str(message["method"]), dict(message.get("params") or {})
        if method == "log":
            level = logging.getLevelName(str(params.get("level", "INFO")).upper())
            self._log.log(level if isinstance(level, int) else logging.INFO, str(params.get("message")))
        elif method.startswith("report_"):
            what = method.removeprefix("report_").replace("_", " ")
            told = {name: _plain(value) for name, value in params.items() if value is not None}
            self._log.info(f"[rayslurm] {what}: {json.dumps(told, default=str, ensure_ascii=False)}")


def _plain(value: Any) -> Any:
    """Returns a metadata value of a Pipes message without type names: `{"type": "int", "raw_value": 5}` becomes 5.

    Values inside dictionaries are changed in the same way, at any depth.
    """
    if isinstance(value, dict):
        return (
            _plain(value["raw_value"])
            if set(value) == {"type", "raw_value"}
            else {key: _plain(each) for key, each in value.items()}
        )
    return value


def pipes_context(
    name: str, partition_key: str | None = None, run_id: str = FROM_TERMINAL, extras: Mapping[str, Any] = MappingProxyType({})
) -> PipesContextData:
    """Returns the Dagster Pipes context of a payload that no step follows. In the context, the asset is called `name`.

    `run_id` is the id of the Dagster run that submits the payload; without such a run, it is `FROM_TERMINAL`.
    """
    return {
        "asset_keys": [name],
        "code_version_by_asset_key": {name: None},
        "provenance_by_asset_key": {name: None},
        "partition_key": partition_key,
        "partition_key_range": None,
        "partition_time_window": None,
        "run_id": run_id,
        "job_name": None,
        "retry_number": 0,
        "extras": dict(extras),
    }


def _prepare(name: str, plan: Any, backend: Backend, resource: ComputeFields, log: logging.Logger) -> PayloadRun:
    plans: Mapping[Any, Plan] = plan if isinstance(plan, Mapping) else {None: plan}
    first = next(iter(plans.values()))
    step = Step(FROM_TERMINAL, name, None, log)
    launch = Launch(step, first, run_dir_name(FROM_TERMINAL, name, first.payload.nonce))
    with start_errors():
        sweep_old_files(backend, Layout.here(resource.local_base), resource.retention_days)
        return PayloadRun(log, backend, resource, launch, plans)


def run_in_terminal(name: str, plan: Any, backend: Backend, resource: ComputeFields, log: logging.Logger) -> Finished:
    """Run a plan (for several components, a mapping of plans) without Dagster, wait for its end, and return the result.

    If a payload was started and failed, the result has the failure. Raises RunFailure only if no payload was started. `name`
    becomes a part of the name of the run directory.
    """
    run = _prepare(name, plan, backend, resource, log)
    failure = None
    try:
        drive(run.completing(pipes_context(name), TerminalPipes(log), lambda _: None))
    except RunFailure as error:
        if not run.payloads:
            raise
        failure = error
    ends = [each.evidence.end for each in run.payloads.values()]
    code = 0 if failure is None else next(filter(None, map(exit_code, ends)), NOT_THE_PAYLOAD)
    outputs = sorted(str(path) for path in run.outputs.rglob("*") if path.is_file())
    return Finished(run.launch.name, code, failure, run.first.running.job_id, outputs)


def start_detached(name: str, plan: Any, backend: Backend, resource: ComputeFields, log: logging.Logger) -> Detached:
    """Start a plan on the cluster without Dagster, and return without waiting for its end.

    The payload's output files are never copied to this machine. Its run directory is removed when it is old. Raises RunFailure if
    the plan cannot be started. If an interrupt comes once the payload is started, the function logs the name of the run before it
    raises.
    """
    run = _prepare(name, plan, backend, resource, log)
    started: list[RunningPayload] = []
    try:
        with start_errors():
            backend.start(plan, run.run_dir, pipes_context(name), run.launch.step, started.append)
        return Detached(run.launch.name, run.run_dir, started[0].job_id, started[0].cluster_id)
    except BaseException:
        if not started:
            discard(backend.connection, run.run_dir)
        else:
            told = f"{run.launch.name} is submitted as job {started[0].job_id}"
            log.warning(f"[rayslurm] {told}, and goes on; end it by `rayslurm cancel {run.launch.name}`")
        raise


def exit_code(end: Record | None) -> int:
    """Returns the exit code of `rayslurm` for a payload whose record has the `end` record `end`.

    If the payload's process exited, the result is the exit code of the process. If a signal ended the process, the result is 128
    + the number of the signal. If the runtime ended the payload, the result is TIMED_OUT at the time limit, INTERRUPTED after a
    cancellation, and NOT_THE_PAYLOAD for any other reason. If `end` is None, because the record has no end, the result is
    NOT_THE_PAYLOAD.
    """
    if end is None:
        return NOT_THE_PAYLOAD
    if end["reason"] == EndReason.EXIT:
        signum = end.get("signal")
        return _SIGNAL + int(signum) if signum else int(end.get("exit_code") or 0)
    return {EndReason.TIMEOUT.value: TIMED_OUT, EndReason.CANCEL.value: INTERRUPTED}.get(end["reason"], NOT_THE_PAYLOAD)
