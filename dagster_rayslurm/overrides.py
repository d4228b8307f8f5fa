"""Merge the queue and the launcher of one call of `run()` with those of the resource; fields that the call sets win.

No function here has side effects.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from .config import SessionConfig, StrictConfig
from .launchers import Launcher
from .slurm.config import SlurmQueueConfig
from .slurm.request import requests_gpus

C = TypeVar("C", bound=StrictConfig)


def merge_queue(base: SlurmQueueConfig, own: SlurmQueueConfig | None) -> SlurmQueueConfig:
    """The queue of a call: the fields that `own` sets, and those of `base` that do not contradict them.

    Args:
        base: the queue of the resource.
        own: the queue argument of the call; None if it has none.
    """
    return base if own is None else _merge(base, own, _contradicted(base, _set_fields(own)))


def session_queue(queue: SlurmQueueConfig, session: SessionConfig) -> SlurmQueueConfig:
    """The queue of a session's allocation: the resource's queue, with `num_nodes` and `time_limit` of the session if set."""
    changes: dict[str, Any] = {"num_nodes": session.num_nodes, "time_limit": session.time_limit}
    return merge_queue(queue, SlurmQueueConfig(**{name: value for name, value in changes.items() if value is not None}))


def merge_launcher(base: Launcher, own: Launcher | None) -> Launcher:
    """The launcher of a call: the fields that `own` sets, and those of `base`; `own` alone if its class is another one.

    Args:
        base: the launcher of the resource.
        own: the launcher argument of the call; None if it has none.
    """
    if own is None:
        return base
    return _merge(base, own, {}) if type(own) is type(base) else own


def queue_origins(base: SlurmQueueConfig, own: SlurmQueueConfig) -> str | None:
    """A line for the Dagster log: which fields of a merged queue come from the call and which from the resource.

    None if the call sets no field.
    """
    return _origins("queue", "the resource", base, own, _contradicted(base, _set_fields(own)))


def launcher_origins(base: Launcher, own: Launcher) -> str | None:
    """A line for the Dagster log: which fields of a merged launcher come from the call and which from the resource.

    None if the call sets no field, or its launcher replaces the resource's.
    """
    return _origins("launcher", "default_launcher", base, own, {}) if type(own) is type(base) else None


def _merge(base: StrictConfig, own: C, replaced: Mapping[str, Any]) -> C:
    """The fields of `base`, overridden by `replaced`, and those by the fields that `own` sets."""
    kept = {name: getattr(base, name) for name in type(base).model_fields}
    return type(own)(**{**kept, **replaced, **_set_fields(own)})


def _set_fields(config: StrictConfig) -> dict[str, Any]:
    """The fields that the user gave, by name with their values, even those equal to the default; in the order of the class."""
    return {name: getattr(config, name) for name in type(config).model_fields if name in config.model_fields_set - {"kind"}}


def _contradicted(base: SlurmQueueConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """New values for the fields of `base` that contradict the `given` fields of the call."""
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
    unwanted = [option for option in base.extra_sbatch if _contradicts(option, given)]
    if unwanted:
        changes["extra_sbatch"] = [option for option in base.extra_sbatch if option not in unwanted]
    return {name: value for name, value in changes.items() if name not in given and value != getattr(base, name)}


def _contradicts(option: str, given: Mapping[str, Any]) -> bool:
    """Whether an option of `extra_sbatch` sets the same as one of the `given` fields of the call."""
    gpus = given.get("gpus_per_node") is not None and requests_gpus(option)
    return gpus or ("exclusive" in given and option.startswith("--exclusive="))


def _origins(what: str, source: str, base: StrictConfig, own: StrictConfig, replaced: Mapping[str, Any]) -> str | None:
    """A line for the Dagster log: the fields that the call sets, those kept from `base`, and those of `base` dropped."""
    given = _set_fields(own)
    if not given:
        return None
    fields = type(base).model_fields
    kept = {
        name: getattr(base, name)
        for name in fields
        if name not in {*given, *replaced, "kind"} and getattr(base, name) != fields[name].default
    }
    parts = [f"{_text(given)} from run({what}=…)"]
    if kept:
        parts.append(f"{_text(kept)} from {source}")
    if replaced:
        dropped = {name: getattr(base, name) for name in replaced}
        parts.append(f"{_text(dropped)} from {source} dropped, as run({what}=…) rules it out")
    return f"{what}: {'; '.join(parts)}"


def _text(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in values.items())
