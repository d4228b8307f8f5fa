"""What each mode of a resource can do, and what is refused before anything starts. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .config import ExecutionMode, SessionConfig, resolve_variables
from .launchers import Launcher, RayLauncher
from .slurm.config import HetComponent

if TYPE_CHECKING:
    from .components import Component

LOCAL = ExecutionMode.LOCAL.value
SLURM = ExecutionMode.SLURM.value
SESSION = ExecutionMode.SLURM_SESSION.value
HETJOB = ExecutionMode.SLURM_HETJOB.value
MODES = (LOCAL, SLURM, SESSION, HETJOB)
ON_SLURM = MODES[1:]

SPANNING = "spanning"
SEPARATE = "separate"
TOPOLOGIES = (SPANNING, SEPARATE)


@dataclass(frozen=True)
class Wanted:
    """What a call of `run()` wants of its resource, as far as modes tell it apart.

    Attributes:
        mode: of the resource.
        topology: of the resource.
        on_slurm: whether the resource has a Slurm cluster.
        launcher: what counts for this payload: its own, or the resource's.
        own_launcher: whether the call brought it.
        own_queue: whether the call brought a queue.
        reuse: whether the resource keeps clusters warm.
        components: what counts for this payload: its own, or the resource's.
        payload: the payload, or one for each component.
    """

    mode: str
    topology: str
    on_slurm: bool
    launcher: Launcher
    own_launcher: bool
    own_queue: bool
    reuse: bool
    components: tuple[HetComponent, ...]
    payload: Any


def chosen_components(own: Sequence[HetComponent] | None, usual: Sequence[HetComponent]) -> tuple[HetComponent, ...]:
    """The components that count for one payload, with every `EnvVar` of its own resolved.

    Raises:
        ValueError: it is no list of components, or a variable is not set.
    """
    if own is None:
        return tuple(usual)
    if isinstance(own, (str, Mapping)) or not all(isinstance(each, HetComponent) for each in own):
        raise ValueError(f"components: {own!r} is not a list of HetComponent; pass [HetComponent(…), …]")
    return tuple(resolve_variables(each, f"components[{index}]") for index, each in enumerate(own))


def check_mode(wanted: Wanted) -> None:
    """Refuse what a mode cannot do.

    Raises:
        ValueError: naming the field, and what to do.
    """
    mode, components = wanted.mode, wanted.components
    check_cluster(mode, wanted.on_slurm, components)
    check_components(mode, components)
    ray = wanted.launcher if isinstance(wanted.launcher, RayLauncher) else None
    if mode == LOCAL and ray is not None and ray.launch_style != "builtin":
        raise ValueError(f"launcher.launch_style: {ray.launch_style!r} needs the nodes of a Slurm allocation; use 'builtin'")
    if ray is not None and ray.component_id is not None and not components:
        raise ValueError(f"launcher.component_id: there is no component {ray.component_id!r}, as there are none; remove it")
    if wanted.own_queue and components:
        raise ValueError("queue: each component has its own queue; change it with run(components=…)")
    if wanted.topology == SEPARATE:
        _check_separate(wanted)
    elif isinstance(wanted.payload, Mapping):
        raise ValueError(f"payload_path: one payload for each component needs topology={SEPARATE!r}; pass a single one")


def check_cluster(mode: str, on_slurm: bool, components: Sequence[HetComponent]) -> None:
    """Check that a mode has the cluster that it needs, and no components that it cannot have.

    Raises:
        ValueError: naming the field, and what to do.
    """
    if mode != LOCAL and not on_slurm:
        raise ValueError(f"slurm: mode {mode!r} needs a Slurm cluster; set slurm=SlurmResource(…)")
    if mode == SLURM and components:
        raise ValueError(f"components: a job of mode {mode!r} has none; use mode {HETJOB!r}, or remove components")


def check_components(mode: str, components: Sequence[HetComponent]) -> None:
    """Check that a mode has the components that it needs, from the resource or from `run(components=…)`.

    Raises:
        ValueError: naming the field, and what to do.
    """
    if mode == HETJOB and not components:
        raise ValueError(f"components: mode {mode!r} needs them; list at least one HetComponent, or use mode {SLURM!r}")


def check_session(session: SessionConfig, components: Sequence[HetComponent]) -> None:
    """Whether a session's configuration goes with the components of its allocation.

    Raises:
        ValueError: naming the field, and what to do.
    """
    if components and session.num_nodes is not None:
        raise ValueError(
            f"SessionConfig.num_nodes={session.num_nodes} says nothing of which component they are in; leave it out, and set "
            "SlurmQueueConfig.num_nodes in the queue of each component"
        )


def _check_separate(wanted: Wanted) -> None:
    if wanted.mode == SESSION:
        raise ValueError(f"topology: a session has one cluster across its components; use {SPANNING!r}, or mode {HETJOB!r}")
    if not wanted.components:
        raise ValueError(f"topology: {SEPARATE!r} needs components, and there are none; use {SPANNING!r}")
    if wanted.own_launcher:
        raise ValueError(
            f"launcher: with topology={SEPARATE!r} each component has its own launcher; change it with run(components=…)"
        )
    if wanted.launcher != RayLauncher():
        raise ValueError(f"default_launcher: with topology={SEPARATE!r} each component has its own launcher; set it there")
    if wanted.reuse:
        raise ValueError(
            f"enable_cluster_reuse: with topology={SEPARATE!r} each payload has its own cluster; use {SPANNING!r}, or remove it"
        )
    for each in wanted.components:
        style = each.launcher.launch_style if isinstance(each.launcher, RayLauncher) else "builtin"
        if wanted.mode == LOCAL and style != "builtin":
            raise ValueError(
                f"component {each.component_id!r}: launch_style={style!r} needs the nodes of a Slurm allocation; use 'builtin'"
            )


def for_one(value: bool | Mapping[str, bool], what: str) -> bool:
    """An argument of the only payload.

    Raises:
        ValueError: it is one for each component, or neither True nor False.
    """
    if isinstance(value, Mapping):
        raise ValueError(f"{what}: one for each component needs topology={SEPARATE!r}; pass a single one")
    _check_bool(value, what)
    return value


def _check_bool(value: Any, what: str) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{what}: {value!r} is neither True nor False")


def one_for_each(value: Any, components: Sequence[Component], what: str, default: Any = None) -> dict[str, Any]:
    """What each component gets of an argument that is the same for all of them, or a mapping by component.

    Args:
        value: the argument.
        components: in the job's order.
        what: the argument's name.
        default: what a component gets that is not in the mapping; None if it must be there. A boolean wants booleans.

    Raises:
        ValueError: the mapping names a component that there is not, or leaves one out; or a boolean is none.
    """
    names = [each.component_id for each in components]
    if isinstance(default, bool):
        for each in value.values() if isinstance(value, Mapping) else [value]:
            _check_bool(each, what)
    if not isinstance(value, Mapping):
        return dict.fromkeys(names, value)
    there = ", ".join(map(repr, names))
    unknown = [name for name in value if name not in names]
    if unknown:
        raise ValueError(f"{what}: there is no component {unknown[0]!r}; there are {there}")
    missing = [name for name in names if name not in value]
    if missing and default is None:
        raise ValueError(f"{what}: there is none for component {missing[0]!r}; give one for each of {there}")
    return {name: value.get(name, default) for name in names}
