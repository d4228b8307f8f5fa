"""Render docs/configuration.md from the fields themselves: `python scripts/configuration.py > docs/configuration.md`."""

import typing

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from dagster_rayslurm import (
    BashLauncher,
    ComputeResource,
    HetComponent,
    PreDeployedEnvironment,
    RayLauncher,
    SessionConfig,
    SlurmQueueConfig,
    SlurmResource,
    SSHConnectionResource,
)

CLASSES = (
    ComputeResource,
    SlurmResource,
    SlurmQueueConfig,
    SSHConnectionResource,
    RayLauncher,
    BashLauncher,
    SessionConfig,
    HetComponent,
    PreDeployedEnvironment,
)

INTRODUCTION = """\
# Configuration

Every field of every class, with its default and what it means. Durations are seconds, unless Slurm's own format is named.
Unknown keys are errors. Strings, integers and values of string dictionaries may be `EnvVar`s.
"""


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


def page() -> str:
    """The page."""
    parts = [INTRODUCTION]
    for each in CLASSES:
        parts.append(f"## {each.__name__}\n\n{each.__doc__.strip().split(chr(10) + chr(10))[0]}\n")
        rows = ["| field | type | default | |", "|---|---|---|---|"]
        for name, field in each.model_fields.items():
            if name != "kind":  # Tells classes apart where Dagster reads a dictionary.
                says = field.description.replace("|", r"\|")
                rows.append(f"| `{name}` | {type_name(field.annotation)} | {default_of(field)} | {says} |")
        parts.append("\n".join(rows) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    print(page(), end="")
