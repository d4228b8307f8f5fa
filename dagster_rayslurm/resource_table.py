"""Makes a `ComputeResource` from a table: a dictionary with the fields of the resource, as read from a TOML or YAML file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import dagster as dg

from .compute import ComputeResource
from .errors import named_errors
from .slurm.config import HetComponent, SlurmResource
from .ssh.config import SSHConnectionResource


def resource_from(table: Mapping[str, Any], where: str) -> ComputeResource:
    """Returns the resource with the fields in `table`; raises `ValueError` for invalid fields.

    `where` is the origin of the table for the error message, such as the name of a file. In `table`, `{"env": "NAME"}` stands for
    `dg.EnvVar("NAME")`. In the table of a launcher or environment, the key `kind`, such as "ray", selects the class of the
    object.
    """
    fields = with_variables(dict(table))
    with named_errors(where):
        # Dagster turns tables into resources and configurations.
        if isinstance(slurm := fields.get("slurm"), dict):
            ssh = slurm.get("ssh")
            fields["slurm"] = SlurmResource(**{**slurm, "ssh": _login(ssh) if isinstance(ssh, dict) else ssh})
        fields = with_kinds(ComputeResource, fields)
        fields["components"] = [HetComponent(**with_kinds(HetComponent, each)) for each in fields.get("components", [])]
        return ComputeResource(**fields)


def _login(fields: Mapping[str, Any]) -> SSHConnectionResource:
    jump = fields.get("jump_host")
    return SSHConnectionResource(**{**fields, **({"jump_host": _login(jump)} if isinstance(jump, Mapping) else {})})


def with_kinds(cls: type[Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of `fields` with an object in place of each table (dictionary) of a launcher or an environment.

    `fields` has values for fields of the class `cls`, by name. The key `kind` of a table names the class of the object; without
    `kind`, the class is the class of the field's default. Raises `ValueError` if a `kind` does not exist, or if the fields of a
    table are invalid.
    """
    made = dict(fields)
    for name, value in fields.items():
        field = cls.model_fields.get(name)
        if field is not None and field.discriminator is not None and isinstance(value, dict):
            kinds = {each.model_fields["kind"].default: each for each in get_args(field.annotation)}
            kind = value.get("kind", field.default.kind)
            if kind not in kinds:
                raise ValueError(f"{name}.kind: {kind!r} is not one of {', '.join(map(repr, kinds))}")
            made[name] = kinds[kind](**value)
    return made


def with_variables(value: Any) -> Any:
    """Returns a copy of `value` with `dg.EnvVar("NAME")` in place of each dictionary {"env": "NAME"}, at any depth.

    `value` is a value that was read from a file: a dictionary, a list, a text or a number.
    """
    if isinstance(value, dict):
        if set(value) == {"env"} and isinstance(value["env"], str):
            return dg.EnvVar(value["env"])
        return {name: with_variables(each) for name, each in value.items()}
    return [with_variables(each) for each in value] if isinstance(value, list) else value
