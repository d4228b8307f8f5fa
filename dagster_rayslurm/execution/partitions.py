"""Runs the user's command once for each chunk of a step's partitions.

A chunk is one partition, or several that share a process. All chunks run in one payload, `runtime.payload.partition_runner`,
which runs the user's command for each chunk. The runner reports the end of each chunk by one Pipes message.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg

from ..backends.base import Backend
from ..compute_fields import ComputeFields
from ..failures import CompletedRun, RunFailure
from ..plan import Plan
from ..runtime.payload import partition_runner, preload_child
from ..runtime.payload.preload_server import command_problem
from .event_log import open_event_log
from .partition_results import NO_MATERIALIZATION, PartitionOptions, nothing_missing, results_so_far
from .run import drive, executing

_RUNNER = [Path(partition_runner.__file__), Path(preload_child.__file__)]


def check_context(context: dg.OpExecutionContext, options: PartitionOptions) -> None:
    """Raise ValueError if `run_partitions` cannot run in this step, or if one of the options is invalid.

    The step must make partitions of exactly one asset, which has no checks. `max_concurrent` and `chunk` must be positive
    integers; `max_concurrent` may also be None.
    """
    most = options.max_concurrent
    for name, number in (("max_concurrent", 1 if most is None else most), ("chunk", options.chunk)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(f"{name}: {number!r} is no number of partitions; pass 1 or more, or leave it out")
    if not NO_MATERIALIZATION:
        raise ValueError(f"run_partitions: Dagster {dg.__version__} would materialize each partition twice; use Dagster 1.13")
    if not context.has_assets_def or len(context.selected_asset_keys) != 1:
        raise ValueError("run_partitions: it runs the partitions of one asset; call it in a function with @dg.asset")
    if context.selected_asset_check_keys:
        raise ValueError("run_partitions: the asset has checks, which have no partitions; declare them with @dg.asset_check")
    if not context.has_partition_key and not context.has_partition_key_range:
        raise ValueError("run_partitions: this run has no partitions; choose some in the launchpad or a backfill, or use run()")


def with_runner(plan: Plan, max_concurrent: int | None) -> Plan:
    """Returns a copy of `plan` whose payload is the runner, which runs the command of `plan` once for each chunk.

    `max_concurrent` is the largest number of chunks that run at the same time; None means the number of CPUs of the node.
    """
    payload = plan.payload
    # Linux counts the memory of a forked process to the peak of the command that replaces it. So the runner has no modules to
    # preload if the partitions' command cannot use them.
    preload = [] if command_problem(payload.argv, "python") else payload.preload
    argv = ["python", _RUNNER[0].name, str(max_concurrent or 0), *payload.argv]
    return replace(
        plan, payload=replace(payload, argv=argv, preload=preload, extra_files=[*payload.extra_files, *map(str, _RUNNER)])
    )


def execute_partitions(
    context: dg.OpExecutionContext,
    plan: Plan,
    backend: Backend,
    resource: ComputeFields,
    extras: Any,
    options: PartitionOptions,
) -> CompletedRun:
    """Run one payload for all partitions of a step that are not materialized yet, and wait until all partitions have ended.

    `plan` has the command for one chunk. `extras` are the Pipes extras. Returns the result for the user's asset. Raises
    RunFailure unless all partitions succeeded.
    """
    plan = with_runner(plan, options.max_concurrent)
    results = results_so_far(context, plan, resource, options.chunk)
    if not results.missing:
        return nothing_missing(context, results, extras)
    try:
        with open_event_log(context.instance.event_log_storage, context.run.run_id):
            return drive(executing(context, plan, backend, resource, extras, results))
    except RunFailure as failure:
        raise results.counted_failure(failure) from None
