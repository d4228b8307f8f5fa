"""One call of a method of `ComputeResource`: checks its arguments, plans its payloads, and chooses the backend."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import dagster as dg

from .backends.array import ArrayBackend
from .backends.base import Backend
from .backends.batch import BatchBackend
from .backends.layout import Layout
from .backends.local import LocalBackend
from .backends.sessions.backend import SessionBackend
from .backends.sessions.local import LocalSessionBackend
from .backends.sessions.matching import required_head
from .components import Component, arrange, component_specs, on_one_machine, ray_across, request_for, spanning_components
from .compute_fields import EXCLUDE_AND_RETRY, ComputeFields, Payloads
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
from .failures import RunFailure
from .launchers import Launcher, RayLauncher
from .plan import Plan, by_component, check_slurm_mode, make_plan, merge, session_queue
from .requires import check_requires, nodes_of_job, nodes_of_machine
from .runtime.node import resources
from .runtime.protocol.spec import ComponentSpec, RaySpec
from .runtime.ray.node_main import lacks_tokens
from .separate.backend import SeparateBatchBackend, SeparateLocalBackend
from .settings import Layered, Settings
from .slurm.config import HetComponent, SlurmQueueConfig, SlurmResource
from .slurm.request import make_request

SHARED, EACH = "shared", "each"  # Values of the argument `allocation` of `run_partitions`.
_SEPARATE, _SPANNING = f"topology='{Topology.SEPARATE}'", f"'{Topology.SPANNING}'"


@dataclass
class Call:
    """The arguments of one call of a method of `ComputeResource`, and the launcher and components that result from them.

    `resource` is the `ComputeResource`; most other fields are arguments of `ComputeResource.run` with the same names. Creating
    the object checks the arguments, and raises `ValueError` for an invalid argument. Nothing is started.
    """

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
    # The places that set fields of the launcher and the queue, such as {"launcher": {}, "queue": {"num_nodes": "op_tags"}}.
    origins: dict[str, Mapping[str, str]] = field(init=False)
    # The components of the allocation, in the order of the Slurm job; () for an allocation without components.
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
        """Set `launcher`, `queue` and `origins` from the arguments of the call and the settings in tags and metadata.

        `origins` says where each field of the launcher and the queue was set. Arguments override the settings in the metadata and
        `op_tags` of the step. The settings in the tags of the Dagster run override the arguments.
        """
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


def prepare(call: Call, nonce: str) -> tuple[Any, Backend]:
    """Returns two values: the plan of a call's payload, and the backend that runs the plan. Nothing is started.

    A plan has everything that is needed to start a payload. A backend is the object that starts payloads in one mode, for example
    as Slurm jobs. The plan is a `Plan`; with topology "separate", it is a dictionary of one `Plan` for each component, by
    component id. `nonce` is a random text that no other call has; it becomes a part of the names of the run directory and the
    job. Raises `ValueError` if an argument is invalid, or if the backend cannot run the plan.
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
    """Raise `ValueError` if the nodes of the call's Ray cluster could never hold the resources in the argument `requires`.

    `plan` is the first result of `prepare`. Also raises `ValueError` if the call has no Ray cluster, or if each component has a
    Ray cluster of its own.
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
    """Returns the backend (the object that starts payloads) for a call, chosen by the resource's mode and topology.

    Starts nothing. Raises `ValueError` if the environment is invalid. In local mode with `enable_cluster_reuse=True`, also raises
    `ValueError` if the call has no components of its own, and the components of the resource contradict each other.
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
    common: dict[str, Any] = {
        "slurm": call.slurm,
        "environment": environment,
        "queue_timeout": resource.queue_timeout,
        "patience": resource.connection_loss_timeout,
        "avoids_unhealthy": resource.on_unhealthy == EXCLUDE_AND_RETRY,
        "detect_platform": resource.auto_detect_platform,
    }
    if resource.mode == ExecutionMode.SLURM_SESSION:
        return SessionBackend(
            **common,
            own_queue=call.queue,
            session=resource.session,
            launcher=resource.default_launcher,
            reuse=resource.enable_cluster_reuse,
            components=tuple(resource.components),
            own_components=call.components,
            own_launcher=call.merged,
            start_timeout=resource.runtime_start_timeout,
        )
    backend = SeparateBatchBackend if separate else ArrayBackend if call.allocation == EACH else BatchBackend
    return backend(**common, queue=merge(call.slurm.queue, call.queue), components=call.parts)


def log_origins(call: Call, log: Any) -> None:
    """Log the fields of the launcher and the queue that are set, and for each field the place that set it, such as "op_tags".

    `log` is a Dagster logger. Nothing is logged about a launcher or queue that only the resource configures.
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
    """Returns the settings of the Ray cluster that local mode keeps running between payloads, and the components of this cluster.

    Both come from the resource, not from the arguments of the call. The settings are None if the resource's default launcher has
    no Ray. The list is empty if the resource has no components. Raises `ValueError` if the components of the resource contradict
    each other. If the call has components of its own, the function returns None and [] instead of raising the error.
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


def mode_of(resource: ComputeFields) -> str | None:
    """Returns the mode of the resource, such as "slurm"; for use outside a Dagster run, where Dagster resolves no `EnvVar`.

    If the mode is an `EnvVar`, the function returns the value of the environment variable; None if the variable is not set.
    """
    return resource.mode.get_value() if isinstance(resource.mode, dg.EnvVar) else resource.mode


def _data_dir(resource: ComputeFields) -> str | None:
    """Returns the path of the data directory, which all payloads share.

    In local mode, the result is an absolute path: that of the field `data_dir` or, if the field is None, of the directory `data`
    in the base directory. In other modes, the result is the value of the field; None stands for the default on the cluster.
    """
    if resource.mode != ExecutionMode.LOCAL:
        return resource.data_dir
    return os.path.abspath(os.path.expanduser(resource.data_dir or os.path.join(resource.local_base, "data")))


def _environment(resource: ComputeFields) -> Environment:
    """Returns the Python environment of payloads that the resource sets.

    If the field `pre_deployed_env_path` is set, the result is the environment at this path; otherwise, it is the field
    `environment`. In local mode, if the path does not exist on this machine, the result is Dagster's own environment. Raises
    `ValueError` if the path is set and `environment` is a `PreDeployedEnvironment`.
    """
    path = resource.pre_deployed_env_path
    if path is None:
        return resource.environment
    if isinstance(resource.environment, PreDeployedEnvironment):
        raise ValueError("pre_deployed_env_path: environment is given too; give one of them")
    return InheritedEnvironment() if _is_ignored(resource, path) else PreDeployedEnvironment(path=path)


def _is_ignored(resource: ComputeFields, path: str) -> bool:
    """Returns whether payloads ignore `path`, the field `pre_deployed_env_path`.

    Payloads ignore the path in local mode if the path does not exist on this machine.
    """
    return resource.mode == ExecutionMode.LOCAL and not os.path.exists(os.path.expanduser(path))


def unused_fields(resource: ComputeFields, environment: object) -> str:
    """Returns the settings that local mode ignores, as a part of a sentence, such as "slurm and environment=UvEnvironment(…)".

    Returns "" if local mode ignores no setting, and always in the other modes. `environment` is the environment of the call, or
    the environment of the resource if the call has none.
    """
    unused = ["slurm"] if resource.slurm is not None and resource.mode == ExecutionMode.LOCAL else []
    path = resource.pre_deployed_env_path
    if path is not None and _is_ignored(resource, path):
        unused.append(f"pre_deployed_env_path={path!r}, which is not on this machine: payloads run in Dagster's environment")
    if isinstance(environment, SentEnvironment) and resource.mode == ExecutionMode.LOCAL:
        unused.append(f"environment={type(environment).__name__}(…): payloads run in Dagster's environment")
    return " and ".join(unused)


@contextmanager
def configuration_errors() -> Iterator[None]:
    """Inside the block, turn a ValueError into a RunFailure of the kind "configuration"."""
    try:
        yield
    except ValueError as error:
        raise RunFailure(FailureKind.CONFIGURATION, one_sentence(error)) from None
