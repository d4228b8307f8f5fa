"""The implementation of `ComputeResource`: checks the arguments of a call, plans payloads, chooses a backend, runs the plan."""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import dagster as dg
from dagster_pipes import PipesExtras

from .backends.array import ArrayBackend
from .backends.base import Backend
from .backends.batch import BatchBackend, cancel_cluster
from .backends.layout import Layout, absolute
from .backends.local import LocalBackend
from .backends.sessions import local as local_session
from .backends.sessions.backend import SessionBackend, end_session
from .backends.sessions.here import sessions_base
from .backends.sessions.listing import IdleSessions, stop_sessions_of_run
from .backends.sessions.local import LocalSessionBackend
from .backends.sessions.matching import required_head
from .components import Component, arrange, component_specs, on_one_machine, ray_across, request_for, spanning_components
from .compute_fields import EXCLUDE_AND_RETRY, ComputeFields, Context, Payloads
from .config import ExecutionMode, Topology, check_environment, resolve_variables
from .environments import (
    ContainerEnvironment,
    Environment,
    InheritedEnvironment,
    PreDeployedEnvironment,
    SentEnvironment,
    resolve_environment,
)
from .errors import FailureKind, one_sentence
from .execution import partition_arrays, partitions, submitted, terminal
from .execution.asynchronous import drive_async
from .execution.event_log import open_event_log
from .execution.reattach import next_call
from .execution.run import Steps, drive, executing, start_errors
from .failures import CompletedRun, RunFailure, apply_retry_policy
from .follow.hub import hub_of
from .handle import TAG, RunHandle
from .launchers import Launcher, RayLauncher
from .plan import Plan, by_component, check_slurm_mode, make_plan, merge, session_queue
from .requires import check_requires, nodes_of_job, nodes_of_machine
from .runtime.node import resources
from .runtime.protocol.spec import ComponentSpec, RaySpec
from .runtime.ray.node_main import lacks_tokens
from .separate.backend import SeparateBatchBackend, SeparateLocalBackend
from .settings import Layered, Settings, of_step
from .slurm.config import HetComponent, SlurmQueueConfig, SlurmResource
from .slurm.request import make_request
from .ssh.base import Connection
from .ssh.local import LocalConnection
from .ssh.pool import connection_to

SHARED, EACH = "shared", "each"  # Values of the argument `allocation` of `run_partitions`.
_log = logging.getLogger("rayslurm")
_SEPARATE, _SPANNING = f"topology='{Topology.SEPARATE}'", f"'{Topology.SPANNING}'"


def run(resource: ComputeFields, context: Context, extras: PipesExtras | None, **arguments: Any) -> CompletedRun:
    """Run the payloads of one call of `ComputeResource.run` or `run_partitions`, and wait until all payloads have ended.

    `extras` are the Pipes extras. `arguments` are the other arguments of the call; for `run_partitions`, `arguments` also contain
    `by_partition=True`. Returns the result for the user's asset. Raises `RunFailure` if the call is invalid, or unless all
    payloads succeed.
    """
    return drive(_running(resource, _op_context(context), extras, **arguments))


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


def _running(resource: ComputeFields, context: dg.OpExecutionContext, *arguments: Any, **options: Any) -> Steps[CompletedRun]:
    try:
        return (yield from _steps(resource, context, *arguments, **options))
    except RunFailure as failure:
        apply_retry_policy(failure, context.get_step_execution_context().op_retry_policy)
        raise


def _steps(
    resource: ComputeFields,
    context: dg.OpExecutionContext,
    extras: PipesExtras | None,
    max_concurrent: int | None = None,
    by_partition: bool = False,
    number: int | None = None,
    **arguments: Any,
) -> Steps[CompletedRun]:
    if unused := _unused_fields(resource, arguments["environment"] or resource.environment):
        context.log.info(f"[rayslurm] local mode does not use {unused}")
    with _configuration_errors():
        call = Call(resource, settings=of_step(context), **arguments)
        if by_partition:
            partitions.check_context(context, max_concurrent)
            if resource.topology == Topology.SEPARATE:
                raise ValueError(f"topology: run_partitions has one payload for each partition; use {_SPANNING}")
        try:
            json.dumps(extras)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"extras: they go to the payload as JSON: {error}; pass only text, numbers, lists and dicts"
            ) from None
        plan, backend = _prepare(call, secrets.token_hex(6))
    _log_origins(call, context.log)
    if isinstance(backend, ArrayBackend):
        return partition_arrays.execute_arrays(context, plan, backend, resource, extras, max_concurrent)
    if by_partition:
        return partitions.execute_partitions(context, partitions.with_runner(plan, max_concurrent), backend, resource, extras)
    return (yield from executing(context, plan, backend, resource, extras, number=number))


def submit(
    resource: ComputeFields, name: str, log: logging.Logger, detach: bool = False, **arguments: Any
) -> terminal.Finished | terminal.Detached:
    """Run the payloads of one call from a terminal, without Dagster, until all payloads have ended; returns the result.

    If `detach` is True, the function returns as soon as the payloads have started. In the name of the run directory and in
    messages, `name` stands in place of a step's key. `arguments` are fields of `Call`. Raises `RunFailure` if the call is invalid
    or no payload could be started. If a payload fails after the start, the result has the failure, and nothing is raised.
    """
    if unused := _unused_fields(resource, arguments.get("environment") or resource.environment):
        log.info(f"[rayslurm] local mode does not use {unused}")
    with _configuration_errors():
        # Without Dagster nobody misses a result, so the exit code alone decides.
        plan, backend = _prepare(Call(resource, uses_pipes=False, **arguments), secrets.token_hex(6))
    if not detach:
        return terminal.run_in_terminal(name, plan, backend, resource, log)
    terminal.refuse_to_detach(resource)
    return terminal.start_detached(name, plan, backend, resource, log)


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
    name = (
        asset_key if asset_key is None or isinstance(asset_key, str) else dg.AssetKey.from_coercible(asset_key).to_user_string()
    )
    if op_context is not None:
        if name is None and op_context.has_assets_def and len(op_context.selected_asset_keys) == 1:
            name = next(iter(op_context.selected_asset_keys)).to_user_string()
        if partition_key is None and op_context.has_partition_key:
            partition_key = op_context.partition_key
    with _configuration_errors():
        resource = resolve_variables(resource, type(resource).__name__, [])
        if key is not None and (not isinstance(key, str) or not key):
            raise ValueError(f"key: {key!r} is no text; pass one that stands for the work, such as a date or a partition")
        call = Call(resource, settings=of_step(op_context) if op_context is not None else ((), ()), **arguments)
        plan, backend = _prepare(call, secrets.token_hex(6))
        if not isinstance(backend, BatchBackend):
            hint = "and topology 'spanning'; use run() for other ones"
            raise ValueError(f"submit() needs a Slurm job for each payload: mode '{ExecutionMode.SLURM}' or hetjob {hint}")
    _log_origins(call, log)
    step = name or (op_context.get_step_execution_context().step.key if op_context is not None else "submitted")
    run_id = op_context.run.run_id if op_context is not None else None
    handle = RunHandle(
        run="",
        asset_key=name,
        partition_key=partition_key,
        key=key,
        uses_pipes=plan.uses_pipes,
        requeue=(call.parts[0].queue if call.parts else backend.queue).requeue,
    )
    pipes_context = submitted.pipes_context_of(step, name, partition_key, run_id, extras)
    return submitted.submit_and_leave(step, plan, backend, resource, pipes_context, handle, log)


def reattach(resource: ComputeFields, context: Context, handle: RunHandle | None) -> CompletedRun:
    """Follow a submitted run until the run has ended; returns the result for the user's asset.

    If `handle` is None, the handle of the submitted run is read from the tags of the Dagster run. Raises `RunFailure` if there is
    no valid handle, or if the submitted run failed.
    """
    op_context = _op_context(context)
    with _configuration_errors():
        if handle is None and (text := op_context.run.tags.get(TAG)) is None:
            raise ValueError(f"handle: this run has no tag {TAG}; pass the handle that submit() returned")
        handle = handle or RunHandle.from_json(text or "")
        backend = _submitting_backend(resource)
    return drive(submitted.reattaching(op_context, handle, backend, resource))


def look(resource: ComputeFields, known: Sequence[str], sensor: str, at: Callable[[str], object]) -> Any:
    """Find the submitted runs of a resource that have ended; returns the three values of `submitted.look_for_ends`.

    `known` has the names of the runs that were reported before. `sensor` is the name of the sensor that reports the ended runs.
    Before the cluster is asked, `at` is called with the name of the cluster. Raises `RunFailure` if the resource has no cluster,
    and OSError if the cluster or Slurm does not answer.
    """
    with _configuration_errors():
        resource = resolve_variables(resource, type(resource).__name__, [])
        backend = _submitting_backend(resource)
    at(backend.connection.place)
    return submitted.look_for_ends(backend.connection, str(backend.layout.base), known, sensor, resource)


def _submitting_backend(resource: ComputeFields) -> BatchBackend:
    """Returns the backend that finds and follows jobs submitted earlier.

    Raises `ValueError` unless the resource has a cluster and the mode slurm or slurm-hetjob.
    """
    if resource.slurm is None or _mode(resource) not in (ExecutionMode.SLURM, ExecutionMode.SLURM_HETJOB):
        raise ValueError(f"submitted runs need mode '{ExecutionMode.SLURM}' or '{ExecutionMode.SLURM_HETJOB}', and a cluster")
    slurm, patience = resource.slurm, resource.connection_loss_timeout
    return BatchBackend(slurm, slurm.queue, InheritedEnvironment(), resource.queue_timeout, patience)


def example(resource: ComputeFields, **arguments: Any) -> str:
    """Returns the batch script or command that a call would start, for display; raises `RunFailure` for an invalid call."""
    with _configuration_errors():
        unused = ["slurm"] if _mode(resource) == ExecutionMode.LOCAL else []
        resource = resolve_variables(resource, type(resource).__name__, unused)
        plan, backend = _prepare(Call(resource, **arguments), "NONCE")
        return backend.example(plan)


def end_cluster(resource: ComputeFields, cluster_id: str) -> bool:
    """End the warm Ray cluster `cluster_id`, and the cluster's session or Slurm job; returns False if no such cluster is found.

    Raises `RunFailure` if the session or the job does not end, or if Slurm or the edge node does not answer.
    """
    with _configuration_errors(), start_errors():
        if resource.slurm is not None and _mode(resource) != ExecutionMode.LOCAL:
            slurm = resolve_variables(resource.slurm, "slurm")
            return end_session(slurm, cluster_id) or cancel_cluster(slurm, cluster_id)
        return local_session.stop(Layout.here(resource.local_base), cluster_id)


def end_run(resource: ComputeFields, context: dg.InitResourceContext) -> None:
    """End the sessions with scope "run" of the Dagster run in `context`, if all steps of the Dagster run have ended.

    Logs a warning if the sessions cannot be ended.
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
        if _mode(resource) == ExecutionMode.LOCAL:
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

    connection: Connection
    base: str
    environment: Environment
    queues: Sequence[SlurmQueueConfig]  # The environment is made for the platform of their nodes; if empty, of the edge node.
    ray: RaySpec | None
    cache_dir: str
    retention_days: int


def environment_site(resource: ComputeFields) -> EnvironmentSite:
    """Returns the machine, the directories and the settings for the environment of a resource's payloads.

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


@dataclass
class Call:
    """A call of `ComputeResource.run` with checked arguments, and the launcher and components that the arguments result in."""

    resource: ComputeFields
    payload_path: Payloads
    launcher: Launcher | None = None
    queue: SlurmQueueConfig | None = None
    components: tuple[HetComponent, ...] | None = None
    uses_pipes: bool | Mapping[str, bool] = True
    extra_env: Mapping[str, str] | None = None
    secret_env: Mapping[str, str] | None = None
    extra_files: Sequence[str | os.PathLike[str]] | None = None
    outputs: Sequence[str] | None = None
    environment: Environment | None = None
    requires: Any = None
    allocation: str = "shared"  # "shared" for one allocation of all partitions, "each" for an allocation per partition.
    # Two lists of settings from metadata and tags: settings that arguments override, and settings that override arguments.
    settings: tuple[Sequence[Settings], Sequence[Settings]] = ((), ())
    merged: Launcher = field(init=False)  # The resource's launcher with the changes of the call.
    origins: dict[str, Mapping[str, str]] = field(init=False)  # For "launcher" and "queue", by field: where the value was set.
    # The components of the allocation in the job's order; empty where all nodes are alike.
    parts: tuple[Component, ...] = field(init=False)

    def __post_init__(self) -> None:
        resource, components = self.resource, self.components
        queue = SlurmQueueConfig(**self.queue) if isinstance(self.queue, Mapping) else self.queue
        if not isinstance(queue, (SlurmQueueConfig, type(None))):
            raise ValueError(f"queue: {queue!r} is not a queue; pass a SlurmQueueConfig")
        if not isinstance(self.launcher, (Launcher, type(None))):
            raise ValueError(f"launcher: {self.launcher!r} is not a launcher; pass a RayLauncher, a BashLauncher or your own")
        if not isinstance(self.environment, (SentEnvironment, InheritedEnvironment, PreDeployedEnvironment, type(None))):
            raise ValueError(
                f"environment: {self.environment!r} is not an environment; pass a PreDeployedEnvironment, UvEnvironment, …"
            )
        self.environment = self.environment and resolve_variables(self.environment, "environment")
        self.launcher = self.launcher and resolve_variables(self.launcher, "launcher")
        # Local mode does not use the queue, but mistakes in the queue should show in local mode, too.
        self.queue = queue and resolve_variables(queue, "queue")
        if components is not None:
            if not isinstance(components, Iterable) or not all(isinstance(each, HetComponent) for each in components):
                raise ValueError(f"components: {components!r} is not a list of HetComponent; pass [HetComponent(…), …]")
            self.components = tuple(resolve_variables(each, f"components[{at}]") for at, each in enumerate(components))
        self._take_settings()
        self.merged = merge(resource.default_launcher, self.launcher)
        chosen = tuple(resource.components if self.components is None else self.components)
        self._check(chosen)
        separate = resource.topology == Topology.SEPARATE
        self.parts = arrange(chosen) if separate else spanning_components(self.merged, chosen)

    def _take_settings(self) -> None:
        """Set `launcher`, `queue` and `origins` from the arguments of the call and the settings in tags and metadata."""
        launcher: Layered[Launcher] = Layered(None, {})
        queue: Layered[SlurmQueueConfig] = Layered(None, {})
        below, above = self.settings

        def add(settings: Sequence[Settings]) -> None:
            nonlocal launcher, queue
            for each in settings:
                before = type(self.resource.default_launcher if launcher.own is None else launcher.own)
                launcher = launcher.over(each.place, each.launcher_after(before))
                queue = queue.over(each.place, each.queue)

        add(below)
        launcher, queue = launcher.over("run(launcher=…)", self.launcher), queue.over("run(queue=…)", self.queue)
        add(above)
        self.launcher, self.queue = launcher.own, queue.own
        self.origins = {"launcher": launcher.origins, "queue": queue.origins}

    @property
    def slurm(self) -> SlurmResource:
        assert self.resource.slurm is not None  # `check_slurm_mode` refuses a Slurm mode without a SlurmResource.
        return self.resource.slurm

    def _check(self, components: Sequence[HetComponent]) -> None:
        """Raise `ValueError` if arguments are invalid, or if the resource's mode or topology does not support the call.

        `components` are the components in the call or, if the call leaves out the argument, the components of the resource.
        """
        resource, mode, local = self.resource, self.resource.mode, self.resource.mode == ExecutionMode.LOCAL
        check_slurm_mode(mode, resource.slurm, components)
        ray, slurm = self.merged if isinstance(self.merged, RayLauncher) else RayLauncher(), ExecutionMode.SLURM
        if mode == ExecutionMode.SLURM_HETJOB and not components:
            raise ValueError(f"components: mode {mode!r} needs them; list at least one HetComponent, or use mode '{slurm}'")
        if local and ray.launch_style != "builtin":
            raise ValueError(f"launcher.launch_style: {ray.launch_style!r} needs the nodes of a Slurm allocation; use 'builtin'")
        if ray.component_id is not None and not components:
            raise ValueError(f"launcher.component_id: there is no component {ray.component_id!r}, as there are none; remove it")
        if self.queue is not None and components:
            raise ValueError("queue: each component has its own queue; change it with run(components=…)")
        if self.allocation not in (SHARED, EACH):
            raise ValueError(f"allocation: {self.allocation!r} is neither {SHARED!r} nor {EACH!r}")
        if self.allocation == EACH and mode != slurm:
            raise ValueError(f"allocation: {EACH!r} makes job arrays, for which mode {mode!r} has none; use mode '{slurm}'")
        if resource.topology == Topology.SEPARATE:
            self._check_separate(components)
        elif isinstance(self.payload_path, Mapping):
            raise ValueError(f"payload_path: one payload for each component needs {_SEPARATE}; pass a single one")
        if ray.metrics_dir is not None and not ray.dashboard:
            raise ValueError(
                "launcher.metrics_dir: Ray's dashboard lists the addresses of metrics, and dashboard=False; remove one of them"
            )
        if ray.auth == "token" and lacks_tokens(ray.ray_version or ""):
            raise ValueError(
                f"launcher: Ray {ray.ray_version} has no token authentication, which came with Ray 2.52; set "
                'auth="disabled" if others may run code as you, or another ray_version'
            )

    def _check_separate(self, components: Sequence[HetComponent]) -> None:
        mode, hetjob = self.resource.mode, ExecutionMode.SLURM_HETJOB
        if mode == ExecutionMode.SLURM_SESSION:
            raise ValueError(f"topology: a session has one cluster across its components; use {_SPANNING}, or mode '{hetjob}'")
        if not components:
            raise ValueError(f"topology: '{Topology.SEPARATE}' needs components, and there are none; use {_SPANNING}")
        apart = f"with {_SEPARATE} each component has its own launcher"
        if self.launcher is not None:
            raise ValueError(f"launcher: {apart}; change it with run(components=…)")
        if self.merged != RayLauncher():
            raise ValueError(f"default_launcher: {apart}; set it there")
        if self.resource.enable_cluster_reuse:
            alone = f"with {_SEPARATE} each payload has its own cluster"
            raise ValueError(f"enable_cluster_reuse: {alone}; use {_SPANNING}, or remove it")
        for each in components:
            style = each.launcher.launch_style if isinstance(each.launcher, RayLauncher) else "builtin"
            if mode == ExecutionMode.LOCAL and style != "builtin":
                needs = "needs the nodes of a Slurm allocation; use 'builtin'"
                raise ValueError(f"component {each.component_id!r}: launch_style={style!r} {needs}")


def _prepare(call: Call, nonce: str) -> tuple[Any, Backend]:
    """Returns the plan of a call, and the backend for the plan. Raises `ValueError` if the plan or the call is invalid.

    With topology "separate", the plan is a dictionary with one plan for each component. `nonce` is a text that no other call has.
    """
    resource = call.resource
    plan_of: Callable[..., Plan] = partial(
        make_plan,
        nonce=nonce,
        data_dir=_data_dir(resource),
        env=check_environment(call.extra_env, "extra_env"),
        secret_env=check_environment(call.secret_env, "secret_env"),
        extra_files=call.extra_files,
        outputs=call.outputs,
        max_output_bytes=resource.max_outputs_mb * 2**20,
        max_stdio_bytes=resource.max_stdio_mb * 2**20,
        fails_infeasible=resource.on_infeasible == "fail",
    )
    plan: Any
    if resource.topology == Topology.SEPARATE:
        launchers = {each.component_id: each.launcher for each in call.parts}
        payloads = by_component(call.payload_path, list(launchers), "payload_path")
        uses_pipes = by_component(call.uses_pipes, list(launchers), "uses_pipes", default=True)
        plan = {
            name: plan_of(payload_path=payloads[name], launcher=launcher, uses_pipes=uses_pipes[name])
            for name, launcher in launchers.items()
        }
    else:
        payload, uses = call.payload_path, call.uses_pipes
        plan = plan_of(payload_path=payload, launcher=call.merged, components=call.parts, uses_pipes=uses)
    backend = choose_backend(call)
    backend.check(plan)
    if call.requires is not None:
        _check_requires(call, plan)
    return plan, backend


def _check_requires(call: Call, plan: Any) -> None:
    """Raise `ValueError` if the nodes of the call's Ray cluster could not hold the bundles in the call's argument `requires`.

    Also raises `ValueError` if the call has no Ray cluster, or a Ray cluster for each component.
    """
    if not isinstance(plan, Plan):
        raise ValueError(f"requires: with {_SEPARATE} each component has a cluster of its own; leave it out")
    if plan.ray is None:
        raise ValueError("requires: the launcher starts no Ray cluster; use a RayLauncher, or leave it out")
    mode = call.resource.mode
    if mode == ExecutionMode.LOCAL:
        ray = on_one_machine(plan.ray, plan.components, resources.count_cpus(os.environ))
        return check_requires(call.requires, nodes_of_machine(ray, resources.detect(with_gpus=ray.num_gpus is None)))
    queue = call.slurm.queue
    queue = merge(session_queue(queue, call.resource.session) if mode == ExecutionMode.SLURM_SESSION else queue, call.queue)
    names = {"job_name": "rayslurm", "comment": ""}
    request = request_for(call.parts, **names) if call.parts else make_request(queue, plan.footprint, **names)
    check_requires(call.requires, nodes_of_job(plan.ray, request))


def choose_backend(call: Call) -> Backend:
    """Returns the backend that runs the payloads of a call.

    Raises `ValueError` if the environment is invalid, or if the components of a warm cluster contradict each other.
    """
    resource, environment = call.resource, call.environment or _environment(call.resource)
    if isinstance(environment, ContainerEnvironment) and resource.data_dir is not None:
        environment = environment.model_copy(update={"mounts": [*environment.mounts, resource.data_dir]})
    separate, simulate = resource.topology == Topology.SEPARATE, resource.local_resources == "simulate"
    if resource.mode == ExecutionMode.LOCAL:
        interpreter = resolve_environment(environment)
        where: dict[str, Any] = {"layout": Layout.here(resource.local_base), "interpreter": interpreter, "simulate": simulate}
        if separate:
            return SeparateLocalBackend(**where, components=call.parts)
        if not resource.enable_cluster_reuse:
            return LocalBackend(**where)
        warm_ray, warm_components = _warm_cluster(call)
        head = required_head(call.merged, call.components)
        session = resource.session
        return LocalSessionBackend(**where, session=session, offered=warm_ray, components=warm_components, head=head)
    avoids = resource.on_unhealthy == EXCLUDE_AND_RETRY
    if resource.mode == ExecutionMode.SLURM_SESSION:
        return SessionBackend(
            slurm=call.slurm,
            own_queue=call.queue,
            environment=environment,
            session=resource.session,
            launcher=resource.default_launcher,
            reuse=resource.enable_cluster_reuse,
            components=tuple(resource.components),
            own_components=call.components,
            own_launcher=call.merged,
            queue_timeout=resource.queue_timeout,
            start_timeout=resource.runtime_start_timeout,
            patience=resource.connection_loss_timeout,
            detect_platform=resource.auto_detect_platform,
            avoids_unhealthy=avoids,
        )
    queue = merge(call.slurm.queue, call.queue)
    backend = SeparateBatchBackend if separate else ArrayBackend if call.allocation == EACH else BatchBackend
    return backend(
        slurm=call.slurm,
        queue=queue,
        environment=environment,
        queue_timeout=resource.queue_timeout,
        patience=resource.connection_loss_timeout,
        components=call.parts,
        make_way=IdleSessions,
        detect_platform=resource.auto_detect_platform,
        avoids_unhealthy=avoids,
    )


def _log_origins(call: Call, log: Any) -> None:
    """Write to `log` the values of the launcher and the queue, and for each value the place where the value was set.

    Nothing is written about a launcher or queue that no argument, tag or metadata of the call changes.
    """
    merged: list[tuple[str, Any, Any, str]] = [("launcher", call.resource.default_launcher, call.launcher, "default_launcher")]
    if call.resource.mode != ExecutionMode.LOCAL:
        queue, by_session = call.slurm.queue, call.resource.mode == ExecutionMode.SLURM_SESSION
        merged.append(("queue", session_queue(queue, call.resource.session) if by_session else queue, call.queue, "the resource"))
    below, above = ([each.place for each in settings] for settings in call.settings)
    for what, base, own, resource in merged:
        origins = call.origins[what]
        places: dict[str, list[str]] = {each: [] for each in (*above, f"run({what}=…)", *reversed(below), resource)}
        for name, value in merge(base, own) if origins else ():
            if name in origins:
                places[origins[name]].append(f"{name}={value!r}")
            elif type(own) is type(base) and name != "kind" and value != type(own).model_fields[name].default:
                places[resource].append(f"{name}={value!r}")
        if origins:
            named = "; ".join(f"{', '.join(values)} from {place}" for place, values in places.items() if values)
            log.info(f"[rayslurm] {what}: {named}")


def _warm_cluster(call: Call) -> tuple[RaySpec | None, list[ComponentSpec]]:
    """Returns two values: the settings of the Ray cluster that local mode keeps warm for all payloads, and the components.

    The settings are None for a launcher without Ray. If the components of the resource contradict each other, the function
    returns None and [] for a call with components of its own; for any other call, the function raises `ValueError`.
    """
    launcher = call.resource.default_launcher
    try:
        components = spanning_components(launcher, call.resource.components)
        ray = ray_across(launcher, components)
        return ray, component_specs(request_for(components, job_name="rayslurm", comment="")) if components else []
    except ValueError:
        if call.components is None:
            raise
        return None, []


def _mode(resource: ComputeFields) -> str | None:
    """Returns the mode of the resource; if the mode is an `EnvVar`, returns the variable's value, or None for an unset variable.

    Dagster resolves an `EnvVar` only within a run.
    """
    return resource.mode.get_value() if isinstance(resource.mode, dg.EnvVar) else resource.mode


def _data_dir(resource: ComputeFields) -> str | None:
    """Returns the directory that payloads share: an absolute path in local mode, the field `data_dir` in other modes.

    In other modes, None stands for the default directory on the cluster.
    """
    if resource.mode != ExecutionMode.LOCAL:
        return resource.data_dir
    return os.path.abspath(os.path.expanduser(resource.data_dir or os.path.join(resource.local_base, "data")))


def _environment(resource: ComputeFields) -> Environment:
    """Returns the payloads' Python environment: the environment at `pre_deployed_env_path` or, without a path, `environment`.

    Returns Dagster's environment if local mode ignores the path. Raises `ValueError` if the path is set and `environment` is a
    `PreDeployedEnvironment`.
    """
    path = resource.pre_deployed_env_path
    if path is None:
        return resource.environment
    if isinstance(resource.environment, PreDeployedEnvironment):
        raise ValueError("pre_deployed_env_path: environment is given too; give one of them")
    return InheritedEnvironment() if _is_ignored(resource, path) else PreDeployedEnvironment(path=path)


def _is_ignored(resource: ComputeFields, path: str) -> bool:
    """Returns True if the resource has local mode, and ignores the environment at `path` because `path` does not exist here."""
    return resource.mode == ExecutionMode.LOCAL and not os.path.exists(os.path.expanduser(path))


def _unused_fields(resource: ComputeFields, environment: object) -> str:
    """Returns the settings that local mode ignores, in words for a sentence; "" if there are none, and in other modes.

    The settings are fields of the resource, and `environment`, which is the environment of the call or else of the resource.
    """
    unused = ["slurm"] if resource.slurm is not None and resource.mode == ExecutionMode.LOCAL else []
    path = resource.pre_deployed_env_path
    if path is not None and _is_ignored(resource, path):
        unused.append(f"pre_deployed_env_path={path!r}, which is not on this machine: payloads run in Dagster's environment")
    if isinstance(environment, SentEnvironment) and resource.mode == ExecutionMode.LOCAL:
        unused.append(f"environment={type(environment).__name__}(…): payloads run in Dagster's environment")
    return " and ".join(unused)


@contextmanager
def _configuration_errors() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise RunFailure(FailureKind.CONFIGURATION, one_sentence(error)) from None
