"""Checks of resources and of calls of `run()`, before anything starts; no check has side effects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from .config import ExecutionMode, SessionConfig, Topology, has_variables
from .environments import PreDeployedEnvironment, path_on_cluster
from .interface import ComputeConfig, RunArguments
from .launchers import Launcher, RayLauncher
from .overrides import session_queue
from .slurm.config import HetComponent, SlurmQueueConfig
from .slurm.request import check_queue

T = TypeVar("T")


def check_definition(resource: ComputeConfig) -> None:
    """Check that a resource can be used by some run; called when Dagster loads definitions.

    Fields with an `EnvVar` have no value yet and are checked when a run starts.

    Raises:
        ValueError: the sentence names the field, and what to do.
    """
    mode, slurm = resource.mode, resource.slurm
    if mode == ExecutionMode.LOCAL:
        return  # Local mode ignores the fields that only a Slurm cluster needs.
    for each in resource.components:
        _check_queue(each.queue)
    queue = None if slurm is None else slurm.queue
    if mode == ExecutionMode.SLURM_SESSION and queue is not None and not has_variables((queue, resource.session)):
        queue = session_queue(queue, resource.session)
    if queue is not None and not resource.components:
        _check_queue(queue)
    if has_variables(mode):
        return
    _check_cluster(mode, slurm is not None, resource.components)
    if mode == ExecutionMode.SLURM_SESSION and not has_variables(resource.session):
        check_session(resource.session, resource.components)
    if slurm is not None:
        _check_environment(resource, over_ssh=slurm.ssh is not None)


def _check_queue(queue: SlurmQueueConfig) -> None:
    """Raise `ValueError` for a queue whose fields contradict each other, unless a variable has no value yet."""
    if not has_variables(queue):
        check_queue(queue)


def _check_environment(resource: ComputeConfig, over_ssh: bool) -> None:
    """Raise `ValueError` for an environment that cannot be on the Slurm cluster, unless a variable has no value yet."""
    path, environment = resource.pre_deployed_env_path, resource.environment
    if path is None and not has_variables(environment):
        path_on_cluster(environment, over_ssh)
    elif path is not None and not has_variables(path):
        path_on_cluster(PreDeployedEnvironment(path=path), over_ssh)


def _check_cluster(mode: str, has_slurm: bool, components: Sequence[HetComponent]) -> None:
    """Raise `ValueError` if a Slurm mode lacks its SlurmResource, or mode "slurm" has components."""
    if mode != ExecutionMode.LOCAL and not has_slurm:
        raise ValueError(f"slurm: mode {mode!r} needs a Slurm cluster; set slurm=SlurmResource(…)")
    if mode == ExecutionMode.SLURM and components:
        raise ValueError(
            f"components: a job of mode {mode!r} has none; use mode '{ExecutionMode.SLURM_HETJOB}', or remove components"
        )


def check_session(session: SessionConfig, components: Sequence[HetComponent]) -> None:
    """Check that a session's configuration is compatible with the components of its allocation.

    Raises:
        ValueError: the sentence names the field, and what to do.
    """
    if components and session.num_nodes is not None:
        raise ValueError(
            f"SessionConfig.num_nodes={session.num_nodes} says nothing of which component they are in; leave it out, and set "
            "SlurmQueueConfig.num_nodes in the queue of each component"
        )


def check_call(resource: ComputeConfig, arguments: RunArguments, launcher: Launcher, components: Sequence[HetComponent]) -> None:
    """Check that the resource's mode and topology support a call of `run()`.

    Args:
        resource: the resource, every `EnvVar` resolved.
        arguments: the arguments of the call.
        launcher: the launcher of the call, merged with the resource's.
        components: the components of the call, or the resource's.

    Raises:
        ValueError: the sentence names the field, and what to do.
    """
    mode = resource.mode
    _check_cluster(mode, resource.slurm is not None, components)
    if mode == ExecutionMode.SLURM_HETJOB and not components:
        raise ValueError(
            f"components: mode {mode!r} needs them; list at least one HetComponent, or use mode '{ExecutionMode.SLURM}'"
        )
    ray = launcher if isinstance(launcher, RayLauncher) else None
    if mode == ExecutionMode.LOCAL and ray is not None and ray.launch_style != "builtin":
        raise ValueError(f"launcher.launch_style: {ray.launch_style!r} needs the nodes of a Slurm allocation; use 'builtin'")
    if ray is not None and ray.component_id is not None and not components:
        raise ValueError(f"launcher.component_id: there is no component {ray.component_id!r}, as there are none; remove it")
    if arguments.queue is not None and components:
        raise ValueError("queue: each component has its own queue; change it with run(components=…)")
    if resource.topology == Topology.SEPARATE:
        _check_separate(resource, arguments, launcher, components)
    elif isinstance(arguments.payload_path, Mapping):
        raise ValueError(f"payload_path: one payload for each component needs topology='{Topology.SEPARATE}'; pass a single one")


def _check_separate(
    resource: ComputeConfig, arguments: RunArguments, launcher: Launcher, components: Sequence[HetComponent]
) -> None:
    """Raise `ValueError` for a call that topology "separate" does not support."""
    separate, spanning = f"topology='{Topology.SEPARATE}'", f"'{Topology.SPANNING}'"
    if resource.mode == ExecutionMode.SLURM_SESSION:
        hetjob = ExecutionMode.SLURM_HETJOB
        raise ValueError(f"topology: a session has one cluster across its components; use {spanning}, or mode '{hetjob}'")
    if not components:
        raise ValueError(f"topology: '{Topology.SEPARATE}' needs components, and there are none; use {spanning}")
    if arguments.launcher is not None:
        raise ValueError(f"launcher: with {separate} each component has its own launcher; change it with run(components=…)")
    if launcher != RayLauncher():
        raise ValueError(f"default_launcher: with {separate} each component has its own launcher; set it there")
    if resource.enable_cluster_reuse:
        raise ValueError(f"enable_cluster_reuse: with {separate} each payload has its own cluster; use {spanning}, or remove it")
    for each in components:
        style = each.launcher.launch_style if isinstance(each.launcher, RayLauncher) else "builtin"
        if resource.mode == ExecutionMode.LOCAL and style != "builtin":
            raise ValueError(
                f"component {each.component_id!r}: launch_style={style!r} needs the nodes of a Slurm allocation; use 'builtin'"
            )


def check_uses_pipes(value: object) -> bool:
    """Check the value of `uses_pipes` for one payload; returns the value unchanged.

    Raises:
        ValueError: the value is a mapping by component, or not a boolean.
    """
    if isinstance(value, Mapping):
        raise ValueError(f"uses_pipes: one for each component needs topology='{Topology.SEPARATE}'; pass a single one")
    if not isinstance(value, bool):
        raise ValueError(f"uses_pipes: {value!r} is neither True nor False")
    return value


def by_component(value: T | Mapping[str, T], names: Sequence[str], argument: str, default: T | None = None) -> dict[str, T]:
    """The value of an argument of `run()` for each component: the same for all, or from a mapping by component.

    Args:
        value: the argument.
        names: the components, in the job's order.
        argument: the argument's name, for error messages.
        default: for components that the mapping leaves out; None if it must name all of them.

    Raises:
        ValueError: the mapping names an unknown component, or leaves one out.
    """
    if not isinstance(value, Mapping):
        return dict.fromkeys(names, value)
    known = ", ".join(map(repr, names))
    unknown = [name for name in value if name not in names]
    if unknown:
        raise ValueError(f"{argument}: there is no component {unknown[0]!r}; there are {known}")
    values = {name: value.get(name, default) for name in names}
    missing = [name for name, each in values.items() if each is None]
    if missing:
        raise ValueError(f"{argument}: there is none for component {missing[0]!r}; give one for each of {known}")
    return {name: each for name, each in values.items() if each is not None}
