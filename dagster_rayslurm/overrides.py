"""Merge the arguments of one call of `run()` with the fields of the resource, and refuse combinations. No side effects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from .config import ExecutionMode, SessionConfig, StrictConfig, Topology
from .launchers import Launcher
from .slurm.config import HetComponent, SlurmQueueConfig, SlurmResource
from .slurm.request import requests_gpus

C = TypeVar("C", bound=StrictConfig)
T = TypeVar("T")


def merge_queue(base: SlurmQueueConfig, own: SlurmQueueConfig | None) -> SlurmQueueConfig:
    """The queue of a call: the fields that `own` sets, and those of `base` that do not contradict them."""
    return base if own is None else _merge(base, own)


def session_queue(queue: SlurmQueueConfig, session: SessionConfig) -> SlurmQueueConfig:
    """The queue of a session's allocation: the resource's queue, with `num_nodes` and `time_limit` of the session if set."""
    changes: dict[str, Any] = {"num_nodes": session.num_nodes, "time_limit": session.time_limit}
    return merge_queue(queue, SlurmQueueConfig(**{name: value for name, value in changes.items() if value is not None}))


def merge_launcher(base: Launcher, own: Launcher | None) -> Launcher:
    """The launcher of a call: the fields that `own` sets, and those of `base`; `own` alone if its class is another one."""
    if own is None:
        return base
    return _merge(base, own) if type(own) is type(base) else own


def origins(base: StrictConfig, own: StrictConfig | None) -> str | None:
    """A line for the Dagster log: which fields of a merged queue or launcher are the call's, and which the resource's.

    None if the call sets no field, or its launcher replaces the resource's.
    """
    given = {} if own is None or type(own) is not type(base) else _set_fields(own)
    if not given:
        return None
    what, source = ("queue", "the resource") if isinstance(base, SlurmQueueConfig) else ("launcher", "default_launcher")
    dropped = {name: getattr(base, name) for name in _contradicted(base, given)}
    fields = type(base).model_fields
    others = {name: getattr(base, name) for name in fields if name not in {*given, *dropped, "kind"}}
    kept = {name: value for name, value in others.items() if value != fields[name].default}
    parts = [f"{_text(given)} from run({what}=…)"]
    if kept:
        parts.append(f"{_text(kept)} from {source}")
    if dropped:
        parts.append(f"{_text(dropped)} from {source} dropped, as run({what}=…) rules it out")
    return f"{what}: {'; '.join(parts)}"


def _text(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in values.items())


def _merge(base: StrictConfig, own: C) -> C:
    given = _set_fields(own)
    kept = {name: getattr(base, name) for name in type(base).model_fields}
    return type(own)(**{**kept, **_contradicted(base, given), **given})


def _set_fields(config: StrictConfig) -> dict[str, Any]:
    """The fields that the user gave, by name with their values, even those equal to the default; in the order of the class."""
    return {name: getattr(config, name) for name in type(config).model_fields if name in config.model_fields_set - {"kind"}}


def _contradicted(base: StrictConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """New values for the fields of a queue that contradict the `given` fields of the call."""
    if not isinstance(base, SlurmQueueConfig):
        return {}
    changes: dict[str, Any] = {}
    if given.get("mem") is not None:
        changes["mem_per_cpu"] = None
    if given.get("mem_per_cpu") is not None:
        changes["mem"] = None
    options = given.get("extra_sbatch", ())
    if any(map(requests_gpus, options)):
        changes |= {"gpus_per_node": None, "gpu_type": None}
    elif given.get("gpus_per_node", ...) in (0, None):
        changes["gpu_type"] = None
    if any(option.startswith("--exclusive=") for option in options):
        changes["exclusive"] = False
    changes["extra_sbatch"] = [option for option in base.extra_sbatch if not _contradicts(option, given)]
    return {name: value for name, value in changes.items() if name not in given and value != getattr(base, name)}


def _contradicts(option: str, given: Mapping[str, Any]) -> bool:
    """Whether an option of `extra_sbatch` sets the same as one of the `given` fields of the call."""
    gpus = given.get("gpus_per_node") is not None and requests_gpus(option)
    return gpus or ("exclusive" in given and option.startswith("--exclusive="))


def by_component(value: T | Mapping[str, T], names: Sequence[str], argument: str, default: T | None = None) -> dict[str, T]:
    """The value of an argument of `run()` for each component: the same for all, or from a mapping by component.

    Args:
        default: for components that the mapping leaves out; None if it must name all of them.

    Raises:
        ValueError: the mapping names an unknown component, or leaves one out.
    """
    if not isinstance(value, Mapping):
        return dict.fromkeys(names, value)
    known = ", ".join(map(repr, names))
    values = {name: value.get(name, default) for name in names}
    for name in value:
        if name not in names:
            raise ValueError(f"{argument}: there is no component {name!r}; there are {known}")
    for name, each in values.items():
        if each is None:
            raise ValueError(f"{argument}: there is none for component {name!r}; give one for each of {known}")
    return {name: each for name, each in values.items() if each is not None}


def check_uses_pipes(value: object) -> bool:
    """The value of `uses_pipes` for one payload; raises `ValueError` if it is a mapping by component, or not a boolean."""
    if isinstance(value, Mapping):
        raise ValueError(f"uses_pipes: one for each component needs topology='{Topology.SEPARATE}'; pass a single one")
    if not isinstance(value, bool):
        raise ValueError(f"uses_pipes: {value!r} is neither True nor False")
    return value


def check_slurm_mode(mode: str, slurm: SlurmResource | None, components: Sequence[HetComponent]) -> None:
    """Raise `ValueError` if a Slurm mode lacks its SlurmResource, or mode "slurm" has components."""
    if mode != ExecutionMode.LOCAL and slurm is None:
        raise ValueError(f"slurm: mode {mode!r} needs a Slurm cluster; set slurm=SlurmResource(…)")
    if mode == ExecutionMode.SLURM and components:
        raise ValueError(
            f"components: a job of mode {mode!r} has none; use mode '{ExecutionMode.SLURM_HETJOB}', or remove components"
        )


def check_session(session: SessionConfig, components: Sequence[HetComponent]) -> None:
    """Raise `ValueError` if a session's configuration contradicts the components of its allocation."""
    if components and session.num_nodes is not None:
        raise ValueError(
            f"SessionConfig.num_nodes={session.num_nodes} says nothing of which component they are in; leave it out, and set "
            "SlurmQueueConfig.num_nodes in the queue of each component"
        )
