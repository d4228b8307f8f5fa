"""Render docs/configuration.md from the fields themselves: `python scripts/configuration.py > docs/configuration.md`."""

import typing

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from dagster_rayslurm import (
    BashLauncher,
    CommandEnvironment,
    ComputeResource,
    ContainerEnvironment,
    HetComponent,
    InheritedEnvironment,
    PackedEnvironment,
    PixiEnvironment,
    PreDeployedEnvironment,
    RayLauncher,
    SessionConfig,
    SlurmQueueConfig,
    SlurmResource,
    SSHConnectionResource,
    UvEnvironment,
)
from dagster_rayslurm.fields import _INSTEAD

CLASSES = (
    ComputeResource,
    SlurmResource,
    SlurmQueueConfig,
    SSHConnectionResource,
    RayLauncher,
    BashLauncher,
    SessionConfig,
    HetComponent,
    InheritedEnvironment,
    PreDeployedEnvironment,
    CommandEnvironment,
    UvEnvironment,
    PixiEnvironment,
    PackedEnvironment,
    ContainerEnvironment,
)

INTRODUCTION = """\
# Configuration

Every field of every class, with its default and what it means. Durations are seconds, unless Slurm's own format is named.
Unknown keys are errors. Strings, integers, and strings in lists and dictionaries may be `EnvVar`s.
In Dagster's launchpad, write the name of the class above its fields: `ray` or `bash` for a launcher; `inherited`, `pre-deployed`,
`command`, `uv`, `pixi`, `packed` or `container` for an environment.
[Configuration classes](reference/classes.md) has the same fields without tables, which suits narrow screens.
"""
# Fields that take more types than they store.
ACCEPTED = {"health_check": "str or list[str]"}


def type_name(kind: object) -> str:
    """A type as a user would write it; None among the choices shows in the default."""
    choices = [choice for choice in typing.get_args(kind) if choice is not type(None)]
    if typing.get_origin(kind) is typing.Union:
        return " or ".join(map(type_name, choices))
    if choices:
        return f"{kind.__name__}[{', '.join(map(type_name, choices))}]"
    return kind.__name__


def default_of(field: FieldInfo) -> str:
    """The default as code."""
    if field.is_required():
        return "required"
    plain = isinstance(field.default, BaseModel)
    return f"`{type(field.default).__name__}()`" if plain else f"`{field.default!r}`"


def row(name: str, field: FieldInfo) -> str:
    """A field's line of the table."""
    says = field.description.replace("|", r"\|")
    return f"| `{name}` | {ACCEPTED.get(name) or type_name(field.annotation)} | {default_of(field)} | {says} |"


def other_names() -> str:
    """The section on names of other tools that are refused with advice."""
    table = [
        f"| `{owner}` | {', '.join(f'`{name}`' for name in names.split())} | {advice} |"
        for owner, by_names in _INSTEAD.items()
        for names, advice in by_names.items()
    ]
    return "\n".join(
        [
            "## Names of other tools",
            "",
            "These names, mainly of dagster-slurm, are refused with the advice beside them.",
            "`rayslurm migrate-check` finds them in files.",
            "",
            "| of | name | advice |",
            "|---|---|---|",
            *table,
            "",
        ]
    )


def page() -> str:
    """The page."""
    parts = [INTRODUCTION]
    for each in CLASSES:
        parts.append(f"## {each.__name__}\n\n{each.__doc__.strip().split(chr(10) + chr(10))[0]}\n")
        # `kind` tells classes apart where Dagster reads a dictionary.
        rows = [row(name, field) for name, field in each.model_fields.items() if name != "kind"]
        parts.append(
            "\n".join(["| field | type | default | description |", "|---|---|---|---|", *rows] if rows else ["It has no fields."])
            + "\n"
        )
    return "\n".join([*parts, other_names()])


if __name__ == "__main__":
    print(page(), end="")
