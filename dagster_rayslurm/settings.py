"""Reads and checks settings of queue and launcher in metadata or `op_tags` of an asset, or in tags of a job or Dagster run."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import dagster as dg

from .config import StrictConfig
from .errors import named_errors
from .fields import explain
from .launchers import BashLauncher, Launcher, RayLauncher
from .plan import merge
from .slurm.config import SlurmQueueConfig

C = TypeVar("C", bound=StrictConfig)

KEY = "dagster-rayslurm/config"  # The name of the tag, and the key of the metadata, whose value has the settings.
_SECTIONS = ("queue", "launcher")
_LAUNCHERS: dict[str, type[Launcher]] = {"ray": RayLauncher, "bash": BashLauncher}


@dataclass(frozen=True)
class Settings:
    """The settings of queue and launcher for a step that users wrote in one place, such as the metadata of an asset.

    `queue` or `launcher` is None if users wrote no settings of the queue or of the launcher there.
    """

    place: str  # The name of the place in the log and in error messages, such as "op_tags".
    queue: SlurmQueueConfig | None
    launcher: Mapping[str, Any] | None

    def launcher_after(self, before: type[Launcher]) -> Launcher | None:
        """Returns a launcher with the settings in the field `launcher`; None if this field is None.

        The setting `kind`, "ray" or "bash", chooses the class of the result. Without `kind`, the class is `before`: the class of
        the launcher that the settings override. Raises `ValueError` if the settings are invalid.
        """
        if self.launcher is None:
            return None
        kind = self.launcher.get("kind")
        if kind is not None and kind not in _LAUNCHERS:
            raise ValueError(f"{KEY} in {self.place}: launcher.kind={kind!r} is neither 'ray' nor 'bash'")
        return _make(before if kind is None else _LAUNCHERS[kind], self.launcher, self.place)


@dataclass(frozen=True)
class Layered(Generic[C]):
    """A queue or a launcher, merged from the settings for a step in metadata, `op_tags`, the arguments of `run()` and tags.

    The defaults of the `ComputeResource` are not included; the caller adds them. `own` has only the fields that are set in at
    least one of these places; None if there are no such fields. `origins` has, for each field in `own`, the name of the place
    whose value is used.
    """

    own: C | None
    origins: Mapping[str, str]

    def over(self, place: str, fields: C | None) -> Layered[C]:
        """Returns a copy in which the fields that `fields` sets override the same fields of `own`.

        `place` is the name of the place that `fields` comes from. If `fields` has another class than `own` (another kind of
        launcher), `fields` replaces `own` completely. If `fields` is None, the result is this object.
        """
        if fields is None:
            return self
        given = fields.model_fields_set - {"kind"}
        if type(fields) is not type(self.own) or self.own is None:
            return Layered(fields, dict.fromkeys(given if self.own is None else given | {"kind"}, place))
        merged = merge(self.own, fields)
        names = self.own.model_fields_set | fields.model_fields_set
        # An old field may also change because the old field contradicts a new field, such as `mem` and `mem_per_cpu`.
        changed = given | {name for name in names if getattr(merged, name) != getattr(self.own, name)}
        own = type(fields)(**{name: getattr(merged, name) for name in names})
        return Layered(own, {**self.origins, **dict.fromkeys(changed - {"kind"}, place)})


def parse(value: Any, place: str) -> Settings:
    """Returns the settings in `value`, the value of a tag or a metadata entry with the key `KEY`.

    `value` is a dictionary, the JSON text of a dictionary, or a metadata value that contains a dictionary or JSON text. `place`
    is the name of the place where users wrote `value`, such as "op_tags". Raises `ValueError`, which names `KEY` and `place`, if
    the settings are invalid.
    """
    where = f"{KEY} in {place}"
    value = getattr(value, "value", value)  # The content of a metadata value.
    try:
        sections = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"{where}: the value is not JSON: {error}") from None
    example = '{"queue": {"mem": "64G"}, "launcher": {"num_cpus_per_node": 8}}'
    if not isinstance(sections, Mapping):
        raise ValueError(f"{where}: {sections!r} is no dictionary; write one such as {example}")
    for name, fields in sections.items():
        if name not in _SECTIONS:
            raise ValueError(f"{where}: {explain('the value', str(name), _SECTIONS, 'key')}")
        if not isinstance(fields, Mapping):
            raise ValueError(f"{where}: {name}={fields!r} is no dictionary of fields; write a value such as {example}")
    queue = _make(SlurmQueueConfig, sections["queue"], place) if "queue" in sections else None
    return Settings(place, queue, sections.get("launcher"))


def _make(cls: type[C], fields: Mapping[str, Any], place: str) -> C:
    with named_errors(f"{KEY} in {place}"):
        return cls(**fields)


def of_step(context: dg.OpExecutionContext) -> tuple[list[Settings], list[Settings]]:
    """Returns two lists of settings for a step: those that arguments of `run()` override, and those that override the arguments.

    The first list has the settings in the metadata of the step's assets and asset checks, then those in `op_tags`. The second
    list has the settings in the tags of the Dagster run. Within a list, later settings override earlier ones. Raises `ValueError`
    for invalid settings, and if the metadata of two assets or asset checks of the step contradict each other.
    """
    below = [parse(context.op.tags[KEY], "op_tags")] if KEY in context.op.tags else []
    if context.has_assets_def:
        made = {*context.selected_asset_keys, *context.selected_asset_check_keys}
        below = _agreeing([each for key, each in _of_metadata(context.assets_def) if key in made]) + below
    return below, [parse(context.run.tags[KEY], "the run's tags")] if KEY in context.run.tags else []


def _of_metadata(assets_def: dg.AssetsDefinition) -> Iterator[tuple[Any, Settings]]:
    """Yields, for each asset and asset check with settings in the metadata, the key of the asset or check, and the settings."""
    for what, specs in (("asset", assets_def.specs), ("asset check", assets_def.check_specs)):
        for spec in specs:
            if KEY in (spec.metadata or {}):
                yield spec.key, parse(spec.metadata[KEY], f"the metadata of {what} {spec.key.to_user_string()!r}")


def _agreeing(settings: list[Settings]) -> list[Settings]:
    """Returns `settings` unchanged; raises `ValueError` if two elements of the list have different values for one field."""
    values: dict[str, tuple[Any, str]] = {}
    for each in settings:
        queue = each.queue and {name: getattr(each.queue, name) for name in each.queue.model_fields_set}
        for section, fields in (("queue", queue), ("launcher", each.launcher)):
            for name, value in (fields or {}).items():
                other, place = values.setdefault(f"{section}.{name}", (value, each.place))
                if other != value:
                    raise ValueError(
                        f"{KEY}: {section}.{name} is {other!r} in {place} and {value!r} in {each.place}, which one step makes; "
                        "set it in op_tags instead"
                    )
    return settings


# ---- When definitions load


def check_loading(resource: object, launcher: type[Launcher]) -> None:
    """Raise `ValueError` if the `Definitions` object that Dagster loads now has invalid settings for steps that use `resource`.

    Does nothing if Dagster is loading no `Definitions` object. `launcher` is the class of the resource's default launcher.
    """
    defs = _loading()
    if defs is None:
        return
    resources = dict(defs.resources or {})
    keys = {key for key, each in resources.items() if each is resource}
    alone = sum(type(each) is type(resource) for each in resources.values()) == len(keys)
    for settings in _of_definitions(defs, keys, alone):
        settings.launcher_after(launcher)


def _loading() -> dg.Definitions | None:
    """Returns the `Definitions` object that Dagster is loading; None if Dagster is loading no such object.

    The function searches the call stack for the object, because Dagster 1.13 passes the object to no resource.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if isinstance(found := frame.f_locals.get("self"), dg.Definitions):
            return found
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _of_definitions(defs: dg.Definitions, keys: set[str], alone: bool) -> Iterator[Settings]:
    """Yields the settings in `defs` for the steps that need a resource with a key in `keys`.

    If `alone` is True, the settings in the tags of all jobs are yielded, too. `alone` says that the resource with these keys is
    the only one of its class in `defs`; otherwise the settings of a job may be for another resource.
    """
    for assets_def in (*(defs.assets or ()), *(defs.asset_checks or ())):
        if isinstance(assets_def, dg.AssetsDefinition) and assets_def.is_executable:
            made: list[Any] = [*assets_def.keys, *assets_def.check_keys]
            names = ", ".join(key.to_user_string() for key in made)
            if assets_def.required_resource_keys & keys:
                yield from (settings for _, settings in _of_metadata(assets_def))
            yield from _of_ops(assets_def.node_def, names, keys)
    for job in defs.jobs or ():
        if alone and job.tags and KEY in job.tags:
            yield parse(job.tags[KEY], f"the tags of job {job.name!r}")
        if isinstance(job, dg.JobDefinition):
            yield from _of_ops(job.graph, job.name, keys)


def _of_ops(node: Any, name: str, keys: set[str]) -> Iterator[Settings]:
    for op in node.iterate_op_defs():
        if KEY in op.tags and op.required_resource_keys & keys:
            yield parse(op.tags[KEY], f"the tags of op {op.name!r} of {name!r}")
