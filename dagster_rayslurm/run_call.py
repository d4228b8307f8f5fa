"""Validate a `ComputeResource` call, choose the backend, and run it.

Which backend serves a call, made of the resource's configuration: the one place that knows all of them.

What a call of a `ComputeResource` comes to: what counts for it, whether it can be run, and what runs it.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg
from dagster_pipes import PipesExtras

from . import modes
from .backends.base import Backend, Plans, RunningPayload, RunningPayloads
from .backends.batch import BatchBackend, cancel_cluster
from .backends.local import LocalBackend
from .backends.run_dir import Layout
from .backends.sessions import local as local_session
from .backends.sessions.backend import SessionBackend, end_session
from .backends.sessions.matching import required_head
from .backends.sessions.session_job import SessionSetup
from .completed import CompletedRun
from .components import Component, arrange, component_specs, ray_across, request_for, spanning_components
from .config import SessionConfig, check_environment, resolve_variables
from .environments import Environment, InheritedEnvironment, PreDeployedEnvironment, resolve_environment
from .environments.resolve import path_on_cluster
from .errors import FailureKind, RunFailure, one_sentence
from .execution import RunSettings, execute, start_errors
from .launchers import Launcher, RayLauncher
from .overrides import launcher_origins, merge_launcher, merge_queue, queue_origins, session_queue
from .plan import Plan, make_plan
from .runtime.protocol.spec import ComponentSpec, RaySpec
from .runtime.ray.node_main import lacks_tokens
from .separate.backend import SeparateBatchBackend, SeparateLocalBackend
from .separate.execute import execute_separate
from .slurm.config import HetComponent, SlurmQueueConfig, SlurmResource

if TYPE_CHECKING:
    from .compute import ComputeResource, Context, Payloads


@dataclass(frozen=True)
class Setting:
    """What a resource says of all calls.

    Attributes:
        mode: how payloads run.
        layout: where things are on this machine.
        slurm: the cluster; None for local mode alone.
        environment: the Python environment of payloads.
        simulate: whether local mode simulates CPUs and GPUs that this machine lacks.
        launcher: of payloads that bring none; the cluster that stays warm is its.
        components: of calls that bring none.
        session: how a warm session is shared.
        reuse: whether Ray clusters stay warm.
        queue_timeout: seconds after which a job that still waits is given up; None waits for ever.
        start_timeout: seconds in which a runtime must write something.
        patience: seconds for which a run can be out of reach.
    """

    mode: str
    layout: Layout
    slurm: SlurmResource | None
    environment: Environment
    simulate: bool
    launcher: Launcher
    components: tuple[HetComponent, ...]
    session: SessionConfig
    reuse: bool
    queue_timeout: float | None
    start_timeout: float
    patience: float


@dataclass(frozen=True)
class Call:
    """What counts for one call, every `EnvVar` resolved, and all of it possible in the resource's mode.

    Attributes:
        launcher: the resource's, with what the call changes.
        queue: what the call changes in the resource's; None for nothing.
        parts: the components that count, in the job's order; none where all nodes are alike.
        components: its own; None for the resource's.
    """

    launcher: Launcher
    queue: SlurmQueueConfig | None
    parts: tuple[Component, ...]
    components: tuple[HetComponent, ...] | None


def backend_for(setting: Setting, call: Call) -> Backend[Plan, RunningPayload]:
    """What runs the one payload of a call.

    Raises:
        ValueError: the environment cannot be used, or the components of a warm cluster contradict each other.
    """
    if setting.slurm is None or setting.mode == modes.LOCAL:
        offered, asked = _warm(setting, call) if setting.reuse else (None, [])
        return LocalBackend(
            setting.layout,
            resolve_environment(setting.environment),
            setting.session if setting.reuse else None,
            offered,
            asked,
            required_head(call.launcher, call.components),
            setting.simulate,
        )
    if setting.mode == modes.SESSION:
        setup = SessionSetup(
            slurm=setting.slurm,
            own_queue=call.queue,
            environment=setting.environment,
            session=setting.session,
            launcher=setting.launcher,
            reuse=setting.reuse,
            components=setting.components,
            own_components=call.components,
            own_launcher=call.launcher,
        )
        return SessionBackend(setup, setting.queue_timeout, setting.start_timeout, setting.patience, setting.layout)
    return _batch(setting, setting.slurm, call)


def together_for(setting: Setting, call: Call) -> Backend[Plans, RunningPayloads]:
    """What runs the payloads of a call, one for each component.

    Raises:
        ValueError: the environment cannot be used.
    """
    if setting.slurm is None or setting.mode == modes.LOCAL:
        return SeparateLocalBackend(setting.layout, resolve_environment(setting.environment), call.parts, setting.simulate)
    return SeparateBatchBackend(_batch(setting, setting.slurm, call), call.parts)


def _batch(setting: Setting, slurm: SlurmResource, call: Call) -> BatchBackend:
    queue = merge_queue(slurm.queue, call.queue)
    return BatchBackend(slurm, queue, setting.environment, setting.queue_timeout, setting.patience, call.parts)


def _warm(setting: Setting, call: Call) -> tuple[RaySpec | None, list[ComponentSpec]]:
    """The cluster that stays warm for all payloads, and what is asked for each component of it.

    Raises:
        ValueError: there can be none, and the call brings no components in place of those.
    """
    try:
        usual = spanning_components(setting.launcher, setting.components)
        ray = ray_across(setting.launcher, usual)
        return ray, component_specs(request_for(usual, job_name="rayslurm", comment="")) if usual else []
    except ValueError:
        if call.components is None:
            raise
        return None, []


@dataclass(frozen=True)
class RunArguments:
    """The arguments of a call, as they were given: see `ComputeResource.run`."""

    payload_path: Payloads
    launcher: Launcher | None = None
    queue: Any = None
    components: Sequence[HetComponent] | None = None
    uses_pipes: bool | Mapping[str, bool] = True
    extra_env: Mapping[str, str] | None = None
    secret_env: Mapping[str, str] | None = None
    extra_files: Sequence[str | os.PathLike[str]] | None = None
    outputs: Sequence[str] | None = None


def run(resource: ComputeResource, context: Context, asked: RunArguments, extras: PipesExtras | None) -> CompletedRun:
    """Run what a call asks for, and wait for it.

    Raises:
        RunFailure: it cannot be run, or did not succeed.
    """
    unused = _unused(resource)
    if unused:
        context.log.info(f"[rayslurm] local mode does not use {unused}")
    with _configuration_errors():
        asked = _resolved(asked)
        _check_extras(extras)
        start, _ = _prepared(resource, asked, secrets.token_hex(6))
    settings = RunSettings(
        resource.mode,
        resource.require_messages,
        resource.keep_run_dirs,
        resource.retention_days,
        resource.connection_loss_timeout,
        resource.runtime_start_timeout,
        _layout(resource),
    )
    # Asset and check contexts wrap the one that open_pipes_session takes for all of them.
    op_context = context if isinstance(context, dg.OpExecutionContext) else context.op_execution_context
    for line in _origins(resource, asked):
        op_context.log.info(f"[rayslurm] {line}")
    return start(op_context, settings=settings, extras=extras)


def example(resource: ComputeResource, asked: RunArguments) -> str:
    """What would be started for a call, for a person to read.

    Raises:
        RunFailure: it cannot be run.
    """
    with _configuration_errors():
        # It may well be called outside of a run, where Dagster has resolved no variables.
        mode = resource.mode.get_value() if isinstance(resource.mode, dg.EnvVar) else resource.mode
        unused = ["slurm"] if mode == modes.LOCAL else []
        _, show = _prepared(resolve_variables(resource, type(resource).__name__, unused), _resolved(asked), "NONCE")
        return show()


def end_cluster(resource: ComputeResource, cluster_id: str) -> bool:
    """End a warm cluster, and say whether there was one.

    Raises:
        RunFailure: it does not answer.
    """
    with _configuration_errors(), start_errors():
        if resource.slurm is not None and resource.mode in modes.ON_SLURM:
            # It may well be called outside of a run, where Dagster has resolved no variables.
            slurm = resolve_variables(resource.slurm, "slurm")
            return end_session(slurm, cluster_id) or cancel_cluster(slurm, cluster_id)
        return local_session.stop(_layout(resource), cluster_id)


def _prepared(
    resource: ComputeResource, asked: RunArguments, nonce: str
) -> tuple[Callable[..., CompletedRun], Callable[[], str]]:
    """What runs a call, and what shows it, once it is known that it can be run.

    Raises:
        ValueError: it cannot; the sentence names the field.
    """
    call, setting = _call(resource, asked), _setting(resource)
    make: Callable[..., Plan] = partial(
        make_plan,
        nonce=nonce,
        data_dir=_data_dir(resource),
        env=check_environment(asked.extra_env, "extra_env"),
        secret_env=check_environment(asked.secret_env, "secret_env"),
        extra_files=asked.extra_files,
        outputs=asked.outputs,
        max_output_bytes=resource.max_outputs_mb * 2**20,
        max_stdio_bytes=resource.max_stdio_mb * 2**20,
    )
    if resource.topology == modes.SEPARATE:
        payloads = modes.one_for_each(asked.payload_path, call.parts, "payload_path")
        pipes = modes.one_for_each(asked.uses_pipes, call.parts, "uses_pipes", default=True)
        launchers = {each.component_id: each.launcher for each in call.parts}
        plans = {name: make(payload_path=payloads[name], launcher=own, uses_pipes=pipes[name]) for name, own in launchers.items()}
        together = together_for(setting, call)
        together.check(plans)
        return partial(execute_separate, plans=plans, backend=together), partial(together.example, plans)
    one = modes.for_one(asked.uses_pipes, "uses_pipes")
    plan = make(payload_path=asked.payload_path, launcher=call.launcher, components=call.parts, uses_pipes=one)
    backend = backend_for(setting, call)
    backend.check(plan)
    return partial(execute, plan=plan, backend=backend), partial(backend.example, plan)


def _check_extras(extras: PipesExtras | None) -> None:
    """See whether Pipes extras can travel.

    Raises:
        ValueError: they are not JSON.
    """
    try:
        json.dumps(extras)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"extras: they go to the payload as JSON: {error}; pass only text, numbers, lists and dicts") from None


def _call(resource: ComputeResource, asked: RunArguments) -> Call:
    """What counts for a call, once the mode can do all that is asked for."""
    chosen = modes.chosen_components(asked.components, resource.components)
    settled = merge_launcher(resource.default_launcher, asked.launcher)
    modes.check_mode(
        modes.Wanted(
            mode=resource.mode,
            topology=resource.topology,
            on_slurm=resource.slurm is not None,
            launcher=settled,
            own_launcher=asked.launcher is not None,
            own_queue=asked.queue is not None,
            reuse=resource.enable_cluster_reuse,
            components=chosen,
            payload=asked.payload_path,
        )
    )
    lacks = list(_lacks(resource, settled))
    if lacks:
        raise ValueError("; ".join(lacks))
    separate = resource.topology == modes.SEPARATE
    parts = arrange(chosen) if separate else spanning_components(settled, chosen)
    return Call(settled, asked.queue, parts, None if asked.components is None else chosen)


def _lacks(resource: ComputeResource, launcher: Launcher) -> Iterator[str]:
    """What must be added before anything can run: all of it at once."""
    if resource.mode in modes.ON_SLURM and resource.slurm is not None:
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


def _resolved(asked: RunArguments) -> RunArguments:
    """The arguments with the value of every `EnvVar` of their queue and launcher.

    Raises:
        ValueError: a variable is not set, or one of them is of another type.
    """
    launcher, queue = asked.launcher, asked.queue
    if isinstance(queue, Mapping):
        queue = SlurmQueueConfig(**queue)
    if not isinstance(queue, (SlurmQueueConfig, type(None))):
        raise ValueError(f"queue: {queue!r} is not a queue; pass a SlurmQueueConfig")
    if not isinstance(launcher, (Launcher, type(None))):
        raise ValueError(f"launcher: {launcher!r} is not a launcher; pass a RayLauncher, a BashLauncher or your own")
    return replace(
        asked,
        launcher=launcher and resolve_variables(launcher, "launcher"),
        # Nothing asks Slurm for it in local mode, but a mistake shows there, too.
        queue=queue and resolve_variables(queue, "queue"),
    )


def _origins(resource: ComputeResource, asked: RunArguments) -> Iterator[str]:
    """Lines for the log that say what the call changes in the resource's launcher and queue."""
    if asked.launcher is not None and (line := launcher_origins(resource.default_launcher, asked.launcher)):
        yield line
    if resource.slurm is None or resource.mode == modes.LOCAL or asked.queue is None:
        return
    queue = resource.slurm.queue
    base = session_queue(queue, resource.session) if resource.mode == modes.SESSION else queue
    if line := queue_origins(base, asked.queue):
        yield line


def _setting(resource: ComputeResource) -> Setting:
    return Setting(
        mode=resource.mode,
        layout=_layout(resource),
        slurm=resource.slurm,
        environment=_environment(resource),
        simulate=resource.local_resources == "simulate",
        launcher=resource.default_launcher,
        components=tuple(resource.components),
        session=resource.session,
        reuse=resource.enable_cluster_reuse,
        queue_timeout=resource.queue_timeout,
        start_timeout=resource.runtime_start_timeout,
        patience=resource.connection_loss_timeout,
    )


def _layout(resource: ComputeResource) -> Layout:
    return Layout(Path(os.path.abspath(os.path.expanduser(resource.local_base))))


def _data_dir(resource: ComputeResource) -> str | None:
    """The directory that payloads share; as it was given if it is on a cluster."""
    if resource.mode != modes.LOCAL:
        return resource.data_dir
    return os.path.abspath(os.path.expanduser(resource.data_dir)) if resource.data_dir else str(_layout(resource).data)


def _environment(resource: ComputeResource) -> Environment:
    path = resource.pre_deployed_env_path
    if path is None:
        return resource.environment
    if isinstance(resource.environment, PreDeployedEnvironment):
        raise ValueError("pre_deployed_env_path: environment is given too; give one of them")
    return InheritedEnvironment() if _is_elsewhere(resource, path) else PreDeployedEnvironment(path=path)


def _is_elsewhere(resource: ComputeResource, path: str) -> bool:
    """Whether an environment is the cluster's and local mode runs without it."""
    return resource.mode == modes.LOCAL and not os.path.exists(os.path.expanduser(path))


def _unused(resource: ComputeResource) -> str:
    """What a resource has for its other modes, as local mode tells it; "" for nothing."""
    unused = ["slurm"] if resource.slurm is not None and resource.mode == modes.LOCAL else []
    path = resource.pre_deployed_env_path
    if path is not None and _is_elsewhere(resource, path):
        unused.append(f"pre_deployed_env_path={path!r}, which is not on this machine: payloads run in Dagster's environment")
    return " and ".join(unused)


@contextmanager
def _configuration_errors() -> Iterator[None]:
    """Turn what is wrong with the request into one failure, before anything starts."""
    try:
        yield
    except ValueError as error:
        raise RunFailure(FailureKind.CONFIGURATION, one_sentence(error)) from None
