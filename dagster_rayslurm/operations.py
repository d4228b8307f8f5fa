"""What the methods of `ComputeResource` do: run, await, submit and follow payloads, and end clusters.

A payload is the user's script or command. To follow a payload means to show its output in Dagster and to wait for its end.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg
from dagster_pipes import PipesExtras

from .backends.array import ArrayBackend
from .backends.base import Backend
from .backends.batch import BatchBackend, cancel_cluster
from .backends.layout import Layout, absolute
from .backends.sessions import local as local_session
from .backends.sessions.backend import end_session
from .backends.sessions.here import sessions_base
from .backends.sessions.listing import stop_sessions_of_run
from .call import Call, configuration_errors, log_origins, mode_of, prepare, unused_fields
from .compute_fields import ComputeFields, Context
from .config import ExecutionMode, Topology, resolve_variables
from .environments import (
    Environment,
    InheritedEnvironment,
    PreDeployedEnvironment,
)
from .execution import partition_arrays, partitions, submitted, terminal
from .execution.announce import announce, drop_inherited_tags
from .execution.asynchronous import drive_async
from .execution.event_log import open_event_log
from .execution.partition_results import PartitionOptions
from .execution.reattach import next_call
from .execution.run import Steps, drive, executing, start_errors
from .failures import CompletedRun, RunFailure, apply_retry_policy
from .follow.forward import with_partition_range
from .follow.hub import hub_of
from .handle import TAG, RunHandle
from .runtime.protocol.spec import RaySpec
from .settings import of_step
from .slurm.config import SlurmQueueConfig
from .slurm.request import FROM_TERMINAL
from .ssh.base import Connection
from .ssh.local import LocalConnection
from .ssh.pool import connection_to

_log = logging.getLogger("rayslurm")


def run(resource: ComputeFields, context: Context, extras: PipesExtras | None, **arguments: Any) -> CompletedRun:
    """Run the payloads of one call of `ComputeResource.run`, and wait until all payloads have ended.

    `extras` are the Pipes extras. `arguments` are the other arguments of the call. Returns the result for the user's asset.
    Raises `RunFailure` if the call is invalid, or if a payload fails.
    """
    return drive(_running(resource, _op_context(context), extras, **arguments))


def run_partitions(
    resource: ComputeFields,
    context: Context,
    extras: PipesExtras | None,
    options: PartitionOptions,
    **arguments: Any,
) -> CompletedRun:
    """Run the partitions of one call of `ComputeResource.run_partitions`, and wait until all partitions have ended.

    `options` and `arguments` together are the arguments of the call besides `context` and `extras`. Returns the result for the
    user's asset. Raises `RunFailure` if the call is invalid, or unless all partitions succeeded.
    """
    op_context = _op_context(context)
    with _in_step(resource, op_context):
        with configuration_errors():
            partitions.check_context(op_context, options)
            if resource.topology == Topology.SEPARATE:
                raise ValueError(f"topology: run_partitions has one payload for each partition; use '{Topology.SPANNING}'")
        plan, backend = _prepare(resource, op_context, extras, **arguments)
        if isinstance(backend, ArrayBackend):
            return partition_arrays.execute_arrays(op_context, plan, backend, resource, extras, options)
        return partitions.execute_partitions(op_context, plan, backend, resource, extras, options)


async def run_async(resource: ComputeFields, context: Context, extras: PipesExtras | None, **arguments: Any) -> CompletedRun:
    """Run the payloads of one call of `ComputeResource.run_async`, and await the end of all payloads.

    The parameters, the result and the exceptions are the same as for the function `run`. In this process, one thread follows the
    payloads of all calls on the same cluster.
    """
    op_context = _op_context(context)
    # Count the call here, in the order of the calls, because the steps of several calls begin in any order.
    number = next_call(op_context)
    remote = resource.slurm is not None and resource.mode != ExecutionMode.LOCAL
    hub = hub_of(connection_to(resource.slurm.ssh if remote and resource.slurm is not None else None))
    with open_event_log(op_context.instance.event_log_storage, op_context.run.run_id):
        return await drive_async(_running(resource, op_context, extras, number=number, **arguments), hub)


def _op_context(context: Context) -> dg.OpExecutionContext:
    """Returns the op context of a step: `context` itself, or the op context inside the context of an asset or asset check."""
    return context if isinstance(context, dg.OpExecutionContext) else context.op_execution_context


@contextmanager
def _in_step(resource: ComputeFields, context: dg.OpExecutionContext | None) -> Iterator[None]:
    """Context manager for a block that runs a step's payloads: applies the step's retry policy to a `RunFailure` of the block.

    Before the block, the tags that a re-executed Dagster run has inherited from its parent's Slurm job are set to "none". Without
    a step, `context` is None, and only the block runs.
    """
    if context is None:
        yield
        return
    drop_inherited_tags(context, Layout.here(resource.local_base).base)
    try:
        yield
    except RunFailure as failure:
        apply_retry_policy(failure, context.get_step_execution_context().op_retry_policy)
        raise


def _running(
    resource: ComputeFields,
    context: dg.OpExecutionContext,
    extras: PipesExtras | None,
    number: int | None = None,
    **arguments: Any,
) -> Steps[CompletedRun]:
    with _in_step(resource, context):
        plan, backend = _prepare(resource, context, extras, **arguments)
        return (yield from executing(context, plan, backend, resource, extras, number=number))


def _prepare(
    resource: ComputeFields, context: dg.OpExecutionContext, extras: PipesExtras | None, **arguments: Any
) -> tuple[Any, Backend]:
    """Returns the plan and the backend for a step's call, as `prepare` does; raises `RunFailure` if the call is invalid.

    Also logs where the settings of the call come from, and which settings local mode does not use.
    """
    if unused := unused_fields(resource, arguments["environment"] or resource.environment):
        context.log.info(f"[rayslurm] local mode does not use {unused}")
    with configuration_errors():
        call = Call(resource, settings=of_step(context), **arguments)
        try:
            json.dumps(extras)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"extras: they go to the payload as JSON: {error}; pass only text, numbers, lists and dicts"
            ) from None
        plan, backend = prepare(call, secrets.token_hex(6))
    log_origins(call, context.log)
    return plan, backend


def submit(
    resource: ComputeFields, name: str, log: logging.Logger, detach: bool = False, **arguments: Any
) -> terminal.Finished | terminal.Detached:
    """Run the payloads of one call from a terminal, without Dagster, until all payloads have ended; returns the result.

    If `detach` is True, the function returns as soon as the payloads have started. `name` stands for the payloads in messages and
    in the name of the run directory. `log` gets the messages. `arguments` are further fields of `Call`. Raises `RunFailure` if
    the call is invalid or no payload could be started. If a payload fails after the start, the result has the failure, and
    nothing is raised.
    """
    if unused := unused_fields(resource, arguments.get("environment") or resource.environment):
        log.info(f"[rayslurm] local mode does not use {unused}")
    with configuration_errors():
        # Without Dagster nobody misses a result, so the exit code alone decides.
        plan, backend = prepare(Call(resource, uses_pipes=False, **arguments), secrets.token_hex(6))
        if detach and resource.mode == ExecutionMode.LOCAL:
            raise ValueError("--detach: in mode 'local' a payload ends with this command; use another mode")
    if detach:
        return terminal.start_detached(name, plan, backend, resource, log)
    return terminal.run_in_terminal(name, plan, backend, resource, log)


def submit_and_leave(
    resource: ComputeFields,
    context: Any,
    asset_key: Any,
    partition_key: str | None,
    key: str | None,
    extras: PipesExtras | None,
    **arguments: Any,
) -> RunHandle:
    """Submit the job of one call of `ComputeResource.submit`, and return the handle of the submitted run without waiting.

    The parameters mean the same as in `ComputeResource.submit`. Raises `RunFailure` if the call is invalid, or if the job cannot
    be submitted.
    """
    in_step = isinstance(context, (dg.OpExecutionContext, dg.AssetExecutionContext, dg.AssetCheckExecutionContext))
    op_context = _op_context(context) if in_step else None
    log = context.log if context is not None else _log
    with _in_step(resource, op_context):
        name = (
            asset_key
            if asset_key is None or isinstance(asset_key, str)
            else dg.AssetKey.from_coercible(asset_key).to_user_string()
        )
        if op_context is not None:
            if name is None and op_context.has_assets_def and len(op_context.selected_asset_keys) == 1:
                name = next(iter(op_context.selected_asset_keys)).to_user_string()
            if partition_key is None and op_context.has_partition_key:
                partition_key = op_context.partition_key
        with configuration_errors():
            resource = resolve_variables(resource, type(resource).__name__, [])
            if key is not None and (not isinstance(key, str) or not key):
                raise ValueError(f"key: {key!r} is no text; pass one that stands for the work, such as a date or a partition")
            call = Call(resource, settings=of_step(op_context) if op_context is not None else ((), ()), **arguments)
            plan, backend = prepare(call, secrets.token_hex(6))
            if not isinstance(backend, BatchBackend):
                hint = "and topology 'spanning'; use run() for other ones"
                raise ValueError(f"submit() needs a Slurm job for each payload: mode '{ExecutionMode.SLURM}' or hetjob {hint}")
        log_origins(call, log)
        step = name or (op_context.get_step_execution_context().step.key if op_context is not None else "submitted")
        run_id = op_context.run.run_id if op_context is not None else FROM_TERMINAL
        handle = RunHandle(
            run="",
            asset_key=name,
            partition_key=partition_key,
            key=key,
            uses_pipes=plan.uses_pipes,
            requeue=(call.parts[0].queue if call.parts else backend.queue).requeue,
        )
        pipes_context = terminal.pipes_context(step, partition_key, run_id, extras or {})
        if op_context is not None and partition_key == (op_context.partition_key if op_context.has_partition_key else None):
            pipes_context = with_partition_range(pipes_context, op_context)
        handle = submitted.submit_and_leave(step, plan, backend, resource, pipes_context, handle, log)
        if op_context is not None:
            base = Layout.here(resource.local_base).base
            announce(op_context, base, handle.job_id, handle.cluster_id, plan.ray, handle.run, backend.connection)
        return handle


def reattach(resource: ComputeFields, context: Context, handle: RunHandle | None) -> CompletedRun:
    """Follow a submitted run until the run has ended; returns the result for the user's asset.

    If `handle` is None, the handle of the submitted run is read from the tags of the Dagster run. Raises `RunFailure` if there is
    no valid handle, or if the submitted run failed.
    """
    op_context = _op_context(context)
    with _in_step(resource, op_context):
        with configuration_errors():
            if handle is None and (text := op_context.run.tags.get(TAG)) is None:
                raise ValueError(f"handle: this run has no tag {TAG}; pass the handle that submit() returned")
            handle = handle or RunHandle.from_json(text or "")
            backend = _submitting_backend(resource)
        return drive(submitted.reattaching(op_context, handle, backend, resource))


def look(resource: ComputeFields, known: Sequence[str], sensor: str, at: Callable[[str], object]) -> Any:
    """Find the submitted runs of a resource that have ended, by one remote call; blocks until the cluster answers.

    `known` has the names of the runs whose ends were reported before, and `sensor` is the name of the Dagster sensor that reports
    ends. Before the remote call, the function calls `at` with the name of the cluster. Returns three values: a list with an
    `EndedRun` for each run that has ended, unless its name is in `known` or another sensor reports its end; the names in `known`
    whose run directories still exist; and the number of runs that have not ended. Raises `RunFailure` if the resource has no
    cluster, or is in a mode without submitted runs, and OSError if the cluster or Slurm does not answer.
    """
    with configuration_errors():
        resource = resolve_variables(resource, type(resource).__name__, [])
        backend = _submitting_backend(resource)
    at(backend.connection.place)
    return submitted.look_for_ends(backend.connection, str(backend.layout.base), known, sensor, resource)


def _submitting_backend(resource: ComputeFields) -> BatchBackend:
    """Returns the backend that finds and follows jobs which `ComputeResource.submit` has submitted.

    Raises `ValueError` unless the resource has a cluster and the mode slurm or slurm-hetjob.
    """
    if resource.slurm is None or mode_of(resource) not in (ExecutionMode.SLURM, ExecutionMode.SLURM_HETJOB):
        raise ValueError(f"submitted runs need mode '{ExecutionMode.SLURM}' or '{ExecutionMode.SLURM_HETJOB}', and a cluster")
    return BatchBackend(
        slurm=resource.slurm,
        queue=resource.slurm.queue,
        environment=InheritedEnvironment(),
        queue_timeout=resource.queue_timeout,
        patience=resource.connection_loss_timeout,
    )


def example(resource: ComputeFields, **arguments: Any) -> str:
    """Returns the batch script or command that a call would start, for a person to read. Starts nothing.

    `arguments` are fields of `Call`. Raises `RunFailure` if the call is invalid.
    """
    with configuration_errors():
        unused = ["slurm"] if mode_of(resource) == ExecutionMode.LOCAL else []
        resource = resolve_variables(resource, type(resource).__name__, unused)
        plan, backend = prepare(Call(resource, **arguments), "NONCE")
        return backend.example(plan)


def end_cluster(resource: ComputeFields, cluster_id: str) -> bool:
    """End the Ray cluster with the id `cluster_id`, and the session or Slurm job that contains it; wait for the end.

    Returns False if no such Ray cluster is found, and True otherwise. Raises `RunFailure` if the session or the job does not end,
    or if Slurm or the edge node does not answer.
    """
    with configuration_errors(), start_errors():
        if resource.slurm is not None and mode_of(resource) != ExecutionMode.LOCAL:
            slurm = resolve_variables(resource.slurm, "slurm")
            return end_session(slurm, cluster_id) or cancel_cluster(slurm, cluster_id)
        return local_session.stop(Layout.here(resource.local_base), cluster_id)


def end_run(resource: ComputeFields, context: dg.InitResourceContext) -> None:
    """End the sessions with scope "run" that belong to the Dagster run in `context`, if all steps of this run have ended.

    If a step of the run has not ended or never started, the function does nothing. If the cluster cannot be reached, the function
    logs a warning. In both cases, the sessions end by themselves when they have been idle for `idle_timeout`.
    """
    run, instance = context.run, context.instance
    if run is None or instance is None or run.execution_plan_snapshot_id is None:
        return
    planned = instance.get_execution_plan_snapshot(run.execution_plan_snapshot_id).step_keys_to_execute
    stats = instance.get_run_step_stats(run.run_id)
    ended = {each.step_key for each in stats if each.status is not None and each.status.value != "IN_PROGRESS"}
    if not ended.issuperset(planned):
        return
    try:
        if mode_of(resource) == ExecutionMode.LOCAL:
            stop_sessions_of_run(LocalConnection(), sessions_base(Layout.here(resource.local_base)), run.run_id)
        elif resource.slurm is not None:
            slurm = resolve_variables(resource.slurm, "slurm")
            connection = connection_to(slurm.ssh)
            stop_sessions_of_run(connection, absolute(connection, slurm.remote_base), run.run_id)
    except (OSError, ValueError) as error:
        _log.warning(f"[rayslurm] the session of the run ends after its idle_timeout: {error}")


@dataclass(frozen=True)
class EnvironmentSite:
    """The machine and directories where the environment of payloads is installed, and the settings of the installation."""

    connection: Connection  # The connection to the edge node of the cluster.
    base: str  # Absolute path of the base directory on the cluster.
    environment: Environment
    # The environment is made for the nodes that these configurations request; without any, for the edge node.
    queues: Sequence[SlurmQueueConfig]
    ray: RaySpec | None  # Settings of the Ray cluster that the environment must be able to run; None for no Ray.
    cache_dir: str  # Directory on the cluster with the results of earlier checks of environments.
    retention_days: int  # Days after which unused environments are removed.


def environment_site(resource: ComputeFields) -> EnvironmentSite:
    """Returns where and how the environment of a resource's payloads is installed.

    Every `EnvVar` of the resource must be resolved. Raises `ValueError` if the resource has no cluster.
    """
    if resource.slurm is None:
        raise ValueError("the resource has no cluster; give it one as ComputeResource(slurm=…)")
    connection = connection_to(resource.slurm.ssh)
    base, path = absolute(connection, resource.slurm.remote_base), resource.pre_deployed_env_path
    queues = [each.queue for each in resource.components] or [resource.slurm.queue] if resource.auto_detect_platform else []
    return EnvironmentSite(
        connection=connection,
        base=base,
        environment=PreDeployedEnvironment(path=path) if path else resource.environment,
        queues=queues,
        ray=resource.default_launcher.ray_spec(),
        cache_dir=str(Layout(Path(base)).environments),
        retention_days=resource.retention_days,
    )
