"""Creates the `ComputeResource` of a cluster from a `rayslurm.toml`, or takes the resource from the user's definitions."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import dagster as dg

from ..compute import ComputeResource
from ..config import ExecutionMode
from ..resource_table import resource_from
from ..ssh.config import SSHConnectionResource
from ..ssh.fields import SSHLogin
from .common import listed
from .options import given_base

C = TypeVar("C", bound=dg.Config)


def changed(config: C, **fields: Any) -> C:
    """Returns a copy of a resource or configuration with the new values `fields`; fields that were unset before stay unset."""
    return type(config)(**{**{name: getattr(config, name) for name in config.model_fields_set}, **fields})


def make_resource(fields: Mapping[str, Any], ssh: SSHLogin | None, remote_base: str, source: str) -> ComputeResource:
    """Returns the `ComputeResource` of a cluster; `fields` are the fields of the resource, as in a `rayslurm.toml`.

    `ssh` and `remote_base` replace the values in `fields`. Raises `ValueError` if a field is wrong; the message begins with
    `source`, which names the file or variables from which the configuration comes.
    """
    # `slurm` may be absent for a Slurm on this machine.
    slurm = {**fields.get("slurm", {}), "remote_base": remote_base, "ssh": _ssh_resource(ssh)}
    return at_base(resource_from({"mode": ExecutionMode.SLURM.value, **fields, "slurm": slurm}, source))


def at_remote_base(resource: ComputeResource, remote_base: str) -> ComputeResource:
    """Returns a copy of the resource with the base directory `remote_base` on the cluster.

    If the user gave `--base` or RAYSLURM_BASE, the copy also has this directory as `local_base`.
    """
    assert resource.slurm is not None
    return at_base(changed(resource, slurm=changed(resource.slurm, remote_base=remote_base)))


def at_base(resource: ComputeResource) -> ComputeResource:
    """Returns a copy of the resource whose `local_base` is the directory given by `--base` or RAYSLURM_BASE.

    Returns the resource itself if neither is given.
    """
    base = given_base()
    return resource if base is None else changed(resource, local_base=base)


def _ssh_resource(login: SSHLogin | None) -> SSHConnectionResource | None:
    """Returns the Dagster resource with the fields of `login`; None if `login` is None."""
    if login is None:
        return None
    fields = {name: getattr(login, name) for name in login.model_fields_set}
    return SSHConnectionResource(**{**fields, "jump_host": _ssh_resource(login.jump_host)})


# ---- The user's own definitions


def load_resource(source: str) -> ComputeResource:
    """Returns the `ComputeResource` that `source` names; `source` is MODULE:RESOURCE, or MODULE alone.

    MODULE is a dotted name or a file, as for `dagster dev`. RESOURCE is a variable of the module, the key of a resource in the
    module's `Definitions`, or VARIABLE.KEY for a key in the `Definitions` of a variable. Without RESOURCE, the definitions must
    have a single `ComputeResource`. Raises `ValueError` if the resource is not found, or if the module cannot be imported.
    """
    module_name, _, name = source.partition(":")
    module = _module(module_name)
    named = getattr(module, name.partition(".")[0], None) if name else None
    if isinstance(named, ComputeResource):
        return named
    if named is None:
        objects, key = list(vars(module).values()), name
    else:
        objects, key = [named], name.partition(".")[2]
        if _definitions(named) is None:
            raise ValueError(f"--from {source}: {type(named).__name__} is neither a ComputeResource nor Definitions")
    found: dict[str, ComputeResource] = {}
    for definitions in filter(None, map(_definitions, objects)):
        found.update((each, value) for each, value in (definitions.resources or {}).items() if isinstance(value, ComputeResource))
    if key in found:
        return found[key]
    if len(found) == 1 and not key:
        return next(iter(found.values()))
    there = f"there are {listed(found)}" if found else "no Definitions there has a ComputeResource"
    raise ValueError(f"--from {source}: {f'there is no resource {key!r}' if key else 'name one resource'}; {there}")


def _definitions(value: Any) -> dg.Definitions | None:
    """Returns `value` if it is a `Definitions`; None if it has nothing to do with `Definitions`.

    If `value` is a function with the decorator `dg.definitions`, calls it, and returns the `Definitions` that it makes. Raises
    `ValueError` if the function raises an error.
    """
    if isinstance(value, dg.Definitions):
        return value
    if type(value).__name__ == "LazyDefinitions":
        try:
            made = value()
        except Exception as error:  # noqa: BLE001 - the user's function may raise anything
            raise ValueError(f"--from: the definitions cannot be loaded: {type(error).__name__}: {error}") from None
        return made if isinstance(made, dg.Definitions) else None
    return None


def _module(name: str) -> ModuleType:
    """Imports and returns a module; `name` is a dotted name, or the path of a file that ends in ".py".

    A dotted name is also looked for in the current directory. Raises `ValueError` if the module cannot be imported.
    """
    try:
        if not name.endswith(".py"):
            if (here := os.getcwd()) not in sys.path:
                sys.path.insert(0, here)
            return importlib.import_module(name)
        path = Path(name).expanduser().resolve()
        if not path.is_file():
            raise ValueError(f"--from: there is no file {path}")
        sys.path.insert(0, str(path.parent))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    except ValueError:
        raise
    except Exception as error:  # noqa: BLE001 - the user's module may raise anything
        raise ValueError(f"--from: {name} cannot be imported: {type(error).__name__}: {error}") from None
