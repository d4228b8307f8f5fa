"""The implementation of `ComputeResource.run`: validates a call, plans its payloads, chooses a backend, and executes."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import dagster as dg
from dagster_pipes import PipesExtras

from .backends.base import Backend
from .backends.batch import BatchBackend, cancel_cluster
from .backends.local import LocalBackend
from .backends.run_dir import Layout
from .backends.sessions import local as local_session
from .backends.sessions.backend import SessionBackend, end_session
from .backends.sessions.idle import make_way_for
from .backends.sessions.matching import required_head
from .backends.sessions.session_job import SessionSetup
from .components import Component, arrange, component_specs, ray_across, request_for, spanning_components
from .config import ExecutionMode, Topology, check_environment, resolve_variables
from .environments import Environment, InheritedEnvironment, PreDeployedEnvironment, path_on_cluster, resolve_environment
from .errors import FailureKind, RunFailure, one_sentence
from .execution import RunSettings, execute, start_errors
from .interface import CompletedRun, ComputeConfig, Context, RunArguments
from .launchers import Launcher, RayLauncher
from .overrides import launcher_origins, merge_launcher, merge_queue, queue_origins, session_queue
from .plan import Plan, make_plan
from .runtime.protocol.spec import ComponentSpec, RaySpec
from .runtime.ray.node_main import lacks_tokens
from .separate.backend import SeparateBatchBackend, SeparateLocalBackend
from .separate.execute import execute_separate
from .slurm.config import HetComponent, SlurmQueueConfig, SlurmResource
from .validation import by_component, check_call, check_uses_pipes

Execute = Callable[..., CompletedRun]
"""The type of `execution.execute`, for one payload, and of `execute_separate`, for one payload per component."""


def run(resource: ComputeConfig, context: Context, arguments: RunArguments, extras: PipesExtras | None) -> CompletedRun:
    """Run the payloads of one call of `ComputeResource.run` and wait for them; returns the result of the call.

    Raises:
        RunFailure: the call is invalid, or the run did not succeed.
    """
    unused = _unused_fields(resource)
    if unused:
        context.log.info(f"[rayslurm] local mode does not use {unused}")
    with _configuration_errors():
        call = _validated(resource, arguments)
        _check_extras(extras)
        function, plan, backend = _prepare(call, secrets.token_hex(6))
    settings = RunSettings(
        resource.mode,
        resource.require_messages,
        resource.keep_run_dirs,
        resource.retention_days,
        resource.connection_loss_timeout,
        resource.runtime_start_timeout,
        _layout(resource),
    )
    # Contexts of assets and checks wrap an op context; `open_pipes_session` accepts the op context in all cases.
    op_context = context if isinstance(context, dg.OpExecutionContext) else context.op_execution_context
    for line in _origins(call):
        op_context.log.info(f"[rayslurm] {line}")
    return function(op_context, plan, backend, settings, extras)


def example(resource: ComputeConfig, arguments: RunArguments) -> str:
    """The batch script or the command that a call would start, for a person to read.

    Raises:
        RunFailure: the call is invalid.
    """
    with _configuration_errors():
        unused = ["slurm"] if _mode(resource) == ExecutionMode.LOCAL else []
        resource = resolve_variables(resource, type(resource).__name__, unused)
        _, plan, backend = _prepare(_validated(resource, arguments), "NONCE")
        return backend.example(plan)


def end_cluster(resource: ComputeConfig, cluster_id: str) -> bool:
    """End a warm Ray cluster, with its session or its Slurm job; returns whether the cluster existed.

    Raises:
        RunFailure: the Ray cluster or Slurm does not answer.
    """
    with _configuration_errors(), start_errors():
        if resource.slurm is not None and _mode(resource) != ExecutionMode.LOCAL:
            slurm = resolve_variables(resource.slurm, "slurm")
            return end_session(slurm, cluster_id) or cancel_cluster(slurm, cluster_id)
        return local_session.stop(_layout(resource), cluster_id)


@dataclass(frozen=True)
class Call:
    """A valid call of `ComputeResource.run`, merged with its resource; every `EnvVar` has its value.

    Attributes:
        arguments: the arguments as the user gave them.
        own_launcher: the launcher argument of the call; None if it has none.
        own_queue: the queue argument of the call; None if it has none.
        own_components: the components argument of the call; None if it has none.
        launcher: the resource's launcher with the fields that the call changes.
        components: the components of the allocation in the job's order; empty where all nodes are alike.
    """

    resource: ComputeConfig
    arguments: RunArguments
    own_launcher: Launcher | None
    own_queue: SlurmQueueConfig | None
    own_components: tuple[HetComponent, ...] | None
    launcher: Launcher
    components: tuple[Component, ...]

    @property
    def slurm(self) -> SlurmResource:
        assert self.resource.slurm is not None  # `check_call` refuses modes on Slurm without it.
        return self.resource.slurm


def _validated(resource: ComputeConfig, arguments: RunArguments) -> Call:
    """The call, checked and merged with its resource.

    Raises:
        ValueError: an argument is invalid, or the resource's mode does not support it; the sentence names the field.
    """
    queue, own_launcher, own_components = arguments.queue, arguments.launcher, arguments.components
    if isinstance(queue, Mapping):
        queue = SlurmQueueConfig(**queue)
    if not isinstance(queue, (SlurmQueueConfig, type(None))):
        raise ValueError(f"queue: {queue!r} is not a queue; pass a SlurmQueueConfig")
    if not isinstance(own_launcher, (Launcher, type(None))):
        raise ValueError(f"launcher: {own_launcher!r} is not a launcher; pass a RayLauncher, a BashLauncher or your own")
    own_launcher = own_launcher and resolve_variables(own_launcher, "launcher")
    # Local mode does not use the queue, but its mistakes should show there too.
    queue = queue and resolve_variables(queue, "queue")
    if own_components is not None:
        own_components = _resolved_components(own_components)
    launcher = merge_launcher(resource.default_launcher, own_launcher)
    chosen = tuple(resource.components) if own_components is None else own_components
    check_call(resource, arguments, launcher, chosen)
    problems = list(_missing_requirements(resource, launcher))
    if problems:
        raise ValueError("; ".join(problems))
    separate = resource.topology == Topology.SEPARATE
    components = arrange(chosen) if separate else spanning_components(launcher, chosen)
    return Call(resource, arguments, own_launcher, queue, own_components, launcher, components)


def _resolved_components(components: object) -> tuple[HetComponent, ...]:
    """The components argument of a call, with the value of every `EnvVar`."""
    if not isinstance(components, Iterable) or not all(isinstance(each, HetComponent) for each in components):
        raise ValueError(f"components: {components!r} is not a list of HetComponent; pass [HetComponent(…), …]")
    return tuple(resolve_variables(each, f"components[{index}]") for index, each in enumerate(components))


def _missing_requirements(resource: ComputeConfig, launcher: Launcher) -> Iterator[str]:
    """Yields one sentence for each reason in the environment or the Ray version why no run can succeed."""
    if resource.slurm is not None and resource.mode != ExecutionMode.LOCAL:
        try:
            path_on_cluster(_environment(resource), resource.slurm.ssh is not None)
        except ValueError as error:
            yield str(error)
    ray = launcher if isinstance(launcher, RayLauncher) else None
    if ray is not None and ray.auth == "token" and ray.ray_version and lacks_tokens(ray.ray_version):
        yield (
            f"launcher: Ray {ray.ray_version} has no token authentication, which came with Ray 2.52; set "
            'auth="disabled" if others may run code as you, or another ray_version'
        )


def _check_extras(extras: PipesExtras | None) -> None:
    """Raise `ValueError` for Pipes extras that JSON cannot represent."""
    try:
        json.dumps(extras)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"extras: they go to the payload as JSON: {error}; pass only text, numbers, lists and dicts") from None


def _prepare(call: Call, nonce: str) -> tuple[Execute, Any, Backend[Any, Any]]:
    """The function that executes a call, the plan (or the plans by component), and the backend, which has checked the plan.

    Raises:
        ValueError: the call cannot be run; the sentence names the field.
    """
    resource, arguments = call.resource, call.arguments
    plan_of: Callable[..., Plan] = partial(
        make_plan,
        nonce=nonce,
        data_dir=_data_dir(resource),
        env=check_environment(arguments.extra_env, "extra_env"),
        secret_env=check_environment(arguments.secret_env, "secret_env"),
        extra_files=arguments.extra_files,
        outputs=arguments.outputs,
        max_output_bytes=resource.max_outputs_mb * 2**20,
        max_stdio_bytes=resource.max_stdio_mb * 2**20,
    )
    plan: Any
    backend: Backend[Any, Any]
    if resource.topology == Topology.SEPARATE:
        launchers = {each.component_id: each.launcher for each in call.components}
        payloads = by_component(arguments.payload_path, list(launchers), "payload_path")
        uses_pipes = by_component(arguments.uses_pipes, list(launchers), "uses_pipes", default=True)
        plan = {
            name: plan_of(payload_path=payloads[name], launcher=launcher, uses_pipes=check_uses_pipes(uses_pipes[name]))
            for name, launcher in launchers.items()
        }
        backend = _separate_backend(call)
    else:
        plan = plan_of(
            payload_path=arguments.payload_path,
            launcher=call.launcher,
            components=call.components,
            uses_pipes=check_uses_pipes(arguments.uses_pipes),
        )
        backend = choose_backend(call)
    backend.check(plan)
    return (execute_separate if isinstance(plan, dict) else execute), plan, backend


def choose_backend(call: Call) -> LocalBackend | BatchBackend | SessionBackend:
    """The backend for a call with a single payload.

    Raises:
        ValueError: the environment cannot be used, or the components of a warm Ray cluster contradict each other.
    """
    resource = call.resource
    if resource.mode == ExecutionMode.LOCAL:
        warm_ray, warm_components = _warm_cluster(call) if resource.enable_cluster_reuse else (None, [])
        return LocalBackend(
            _layout(resource),
            resolve_environment(_environment(resource)),
            resource.session if resource.enable_cluster_reuse else None,
            warm_ray,
            warm_components,
            required_head(call.launcher, call.own_components),
            resource.local_resources == "simulate",
        )
    if resource.mode == ExecutionMode.SLURM_SESSION:
        setup = SessionSetup(
            slurm=call.slurm,
            own_queue=call.own_queue,
            environment=_environment(resource),
            session=resource.session,
            launcher=resource.default_launcher,
            reuse=resource.enable_cluster_reuse,
            components=tuple(resource.components),
            own_components=call.own_components,
            own_launcher=call.launcher,
        )
        timeouts = resource.queue_timeout, resource.runtime_start_timeout, resource.connection_loss_timeout
        return SessionBackend(setup, *timeouts, _layout(resource))
    return _batch_backend(call)


def _separate_backend(call: Call) -> SeparateLocalBackend | SeparateBatchBackend:
    """The backend for a call with one payload per component.

    Raises:
        ValueError: the environment cannot be used.
    """
    resource = call.resource
    if resource.mode == ExecutionMode.LOCAL:
        interpreter = resolve_environment(_environment(resource))
        return SeparateLocalBackend(_layout(resource), interpreter, call.components, resource.local_resources == "simulate")
    return SeparateBatchBackend(_batch_backend(call), call.components)


def _batch_backend(call: Call) -> BatchBackend:
    """The backend that submits one Slurm job for the call."""
    resource, queue = call.resource, merge_queue(call.slurm.queue, call.own_queue)
    timeouts = resource.queue_timeout, resource.connection_loss_timeout
    return BatchBackend(call.slurm, queue, _environment(resource), *timeouts, call.components, make_way_for)


def _warm_cluster(call: Call) -> tuple[RaySpec | None, list[ComponentSpec]]:
    """The Ray cluster that local mode keeps warm for all payloads, and its components.

    Raises:
        ValueError: the resource's components contradict each other, and the call does not replace them.
    """
    resource = call.resource
    try:
        components = spanning_components(resource.default_launcher, resource.components)
        ray = ray_across(resource.default_launcher, components)
        return ray, component_specs(request_for(components, job_name="rayslurm", comment="")) if components else []
    except ValueError:
        if call.own_components is None:
            raise
        return None, []


def _origins(call: Call) -> Iterator[str]:
    """Lines for the Dagster log: where the fields of a merged launcher and of a merged queue come from."""
    resource = call.resource
    if call.own_launcher is not None and (line := launcher_origins(resource.default_launcher, call.own_launcher)):
        yield line
    if resource.mode == ExecutionMode.LOCAL or call.own_queue is None:
        return
    queue = call.slurm.queue
    base = session_queue(queue, resource.session) if resource.mode == ExecutionMode.SLURM_SESSION else queue
    if line := queue_origins(base, call.own_queue):
        yield line


def _mode(resource: ComputeConfig) -> str | None:
    """The resource's mode; a variable is resolved here, because outside of a run Dagster does not resolve it."""
    return resource.mode.get_value() if isinstance(resource.mode, dg.EnvVar) else resource.mode


def _layout(resource: ComputeConfig) -> Layout:
    """The paths below the base directory on this machine."""
    return Layout(Path(os.path.abspath(os.path.expanduser(resource.local_base))))


def _data_dir(resource: ComputeConfig) -> str | None:
    """The data directory of payloads: absolute in local mode; else as the user wrote it, None for the default."""
    if resource.mode != ExecutionMode.LOCAL:
        return resource.data_dir
    return os.path.abspath(os.path.expanduser(resource.data_dir)) if resource.data_dir else str(_layout(resource).data)


def _environment(resource: ComputeConfig) -> Environment:
    """The Python environment of payloads, from `environment` or `pre_deployed_env_path`.

    Raises:
        ValueError: both fields name an environment.
    """
    path = resource.pre_deployed_env_path
    if path is None:
        return resource.environment
    if isinstance(resource.environment, PreDeployedEnvironment):
        raise ValueError("pre_deployed_env_path: environment is given too; give one of them")
    return InheritedEnvironment() if _is_ignored(resource, path) else PreDeployedEnvironment(path=path)


def _is_ignored(resource: ComputeConfig, path: str) -> bool:
    """Whether local mode ignores the environment at `path`, because that path does not exist on this machine."""
    return resource.mode == ExecutionMode.LOCAL and not os.path.exists(os.path.expanduser(path))


def _unused_fields(resource: ComputeConfig) -> str:
    """The resource's fields that local mode ignores, as part of a sentence for the Dagster log; "" for none."""
    unused = ["slurm"] if resource.slurm is not None and resource.mode == ExecutionMode.LOCAL else []
    path = resource.pre_deployed_env_path
    if path is not None and _is_ignored(resource, path):
        unused.append(f"pre_deployed_env_path={path!r}, which is not on this machine: payloads run in Dagster's environment")
    return " and ".join(unused)


@contextmanager
def _configuration_errors() -> Iterator[None]:
    """Turn a `ValueError` inside the block into a `RunFailure` of kind "configuration"."""
    try:
        yield
    except ValueError as error:
        raise RunFailure(FailureKind.CONFIGURATION, one_sentence(error)) from None
