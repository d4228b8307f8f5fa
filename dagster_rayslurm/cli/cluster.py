"""Finds the cluster for a command: by `--from`, `--cluster`, environment variables, or the default of a `rayslurm.toml`.

Each of these sources gives a `ComputeResource`, so that the terminal has the fields of Dagster's resource and no others.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, get_args

import click
import dagster as dg

from ..backends.base import Layout
from ..backends.batch import absolute
from ..compute import ComputeResource
from ..config import ExecutionMode, resolve_variables
from ..errors import one_sentence
from ..slurm.config import HetComponent, SlurmResource
from ..ssh.base import Connection, check_no_variable, is_rooted
from ..ssh.config import SSHConnectionResource
from ..ssh.pool import connection_to
from .common import one_sentence_errors
from .options import FILE, cluster_option, given

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_NONE = (
    "no cluster is configured; set SLURM_EDGE_NODE_HOST, name a cluster in rayslurm.toml, or read one from your definitions "
    "with --from module:resource"
)


@dataclass(frozen=True)
class Cluster:
    """A Slurm cluster as the user configured it, with every `EnvVar` resolved."""

    resource: ComputeResource
    source: str  # Where its configuration comes from, in words.

    @property
    def slurm(self) -> SlurmResource:
        """The `SlurmResource` of the configuration."""
        assert self.resource.slurm is not None  # `_usable` refuses resources without it.
        return self.resource.slurm

    @cached_property
    def connection(self) -> Connection:
        """The connection to the edge node; the login takes place when the connection is first used."""
        return connection_to(self.slurm.ssh)

    @cached_property
    def base(self) -> str:
        """The absolute path of the base directory on the cluster."""
        return absolute(self.connection, self.slurm.remote_base)


# ---- The cluster


def the_cluster() -> Cluster:
    """Returns the cluster that the user chose by an option, a variable or a file; raises ClickException if none is chosen."""
    cluster = find_cluster()
    if cluster is None:
        raise click.ClickException(_NONE)
    return cluster


def find_cluster() -> Cluster | None:
    """Returns the cluster that the user chose by an option, an environment variable or a file; None if none is configured."""
    if cluster_option("source") and cluster_option("cluster"):
        raise click.UsageError("--from and --cluster exclude each other; give one of them")
    with one_sentence_errors():
        found = _found()
        return found and _usable(*found)


def _prefix() -> str:
    return (given("prefix") or "SLURM_EDGE_NODE_").rstrip("_") + "_"


def _found() -> tuple[ComputeResource, str] | None:
    """Returns the resource as configured, and the source of the configuration in words; None if no cluster is configured.

    Options take precedence over environment variables.
    """
    prefix, named = _prefix(), given("cluster")
    source = None if cluster_option("cluster") else given("source")
    if source:
        return load_resource(source), f"--from {source}"
    if named is None and (cluster_option("prefix") or f"{prefix}HOST" in os.environ):
        return _from_environment(prefix), f"the variables {prefix}*"
    path = find_file(Path.cwd())
    if path is None:
        if named is not None:
            raise ValueError(
                f"there is no {FILE} in {Path.cwd()} or above, nor in {_user_file().parent}, to name cluster {named!r}"
            )
        return None
    return from_file(path, named)


def _usable(resource: ComputeResource, source: str) -> Cluster:
    """Returns the cluster of a resource, changed by options and variables; raises `ValueError` if the resource has no cluster."""
    if resource.slurm is None:
        raise ValueError(f"{source}: the resource has no cluster; set ComputeResource(slurm=SlurmResource(…))")
    resource = resolve_variables(resource, "ComputeResource")
    remote_base, layout = given("remote_base"), click.get_current_context().find_root().obj
    assert resource.slurm is not None
    if remote_base is not None:
        check_no_variable(remote_base, "--remote-base")
        if not is_rooted(remote_base):
            raise ValueError(f'--remote-base: {remote_base!r} is relative; write an absolute path, or one that begins with "~/"')
        resource = changed(resource, slurm=changed(resource.slurm, remote_base=remote_base))
    if isinstance(layout, Layout) and _base_was_given():
        resource = changed(resource, local_base=str(layout.base))
    return Cluster(resource, source)


def _base_was_given() -> bool:
    from click.core import ParameterSource

    return click.get_current_context().find_root().get_parameter_source("base") not in (None, ParameterSource.DEFAULT)


C = TypeVar("C", bound=dg.Config)


def changed(config: C, **fields: Any) -> C:
    """Returns a copy of a resource or configuration with new values of `fields`; other fields stay set or unset as they are."""
    return type(config)(**{**{name: getattr(config, name) for name in config.model_fields_set}, **fields})


# ---- Environment variables


def _from_environment(prefix: str) -> ComputeResource:
    ssh = resolve_variables(SSHConnectionResource.from_env(prefix), "SSHConnectionResource")
    path = os.environ.get("RAYSLURM_ENV_PATH") or None
    return ComputeResource(mode=ExecutionMode.SLURM.value, slurm=SlurmResource(ssh=ssh), pre_deployed_env_path=path)


# ---- rayslurm.toml


def _user_file() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "rayslurm" / FILE


def find_file(directory: Path) -> Path | None:
    """Returns the nearest `rayslurm.toml`: in `directory`, in a parent directory, or else in the user's home; None if missing.

    Raises `ValueError` for a file of another user, as that could make commands log in to another host and run code there.
    """
    for path in (*(each / FILE for each in (directory, *directory.parents)), _user_file()):
        if path.is_file():
            if path.stat().st_uid not in (0, os.geteuid()):
                raise ValueError(f"{path} belongs to another user and is not read; use another directory, or --from")
            return path
    return None


def read_file(path: Path) -> dict[str, Any]:
    """Returns the "default" (or None) and the "clusters" of a `rayslurm.toml`; raises `ValueError` if the file is not valid."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from None
    unknown = [name for name in content if name not in ("default", "clusters")]
    if unknown:
        raise ValueError(f"{path}: {unknown[0]!r} is unknown; the file has `default` and tables [clusters.NAME]")
    clusters = content.get("clusters", {})
    if not isinstance(clusters, dict) or not clusters or not all(isinstance(each, dict) for each in clusters.values()):
        raise ValueError(f"{path} has no cluster; add a table [clusters.NAME] with the fields of ComputeResource")
    return {"default": content.get("default"), "clusters": clusters}


def from_file(path: Path, name: str | None) -> tuple[ComputeResource, str]:
    """Returns the resource that a `rayslurm.toml` has for the cluster `name` (None: the default one), and its origin in words."""
    content = read_file(path)
    clusters, chosen = content["clusters"], name or content["default"]
    if chosen is None and len(clusters) > 1:
        raise ValueError(f"{path} has the clusters {_listed(clusters)}; choose one with --cluster, or set `default` there")
    chosen = chosen or next(iter(clusters))
    if chosen not in clusters:
        raise ValueError(f"{path} has no cluster {chosen!r}; there are {_listed(clusters)}")
    where, fields = f"cluster {chosen!r} in {path}", _variables(clusters[chosen])
    try:
        # Dagster turns tables into resources and configurations; `slurm` may be absent for a Slurm on this machine.
        slurm = fields.pop("slurm", {})
        ssh = slurm.pop("ssh", None) if isinstance(slurm, dict) else None
        login = None if ssh is None else _login(ssh)
        fields = _chosen(ComputeResource, fields)
        fields["components"] = [HetComponent(**_chosen(HetComponent, each)) for each in fields.get("components", [])]
        return ComputeResource(**{"mode": ExecutionMode.SLURM.value, **fields, "slurm": SlurmResource(ssh=login, **slurm)}), where
    except TypeError as error:
        raise ValueError(f"{where}: {error}") from None
    except ValueError as error:
        raise ValueError(f"{where}: {one_sentence(error)}") from None


def _login(fields: Mapping[str, Any]) -> SSHConnectionResource:
    jump = fields.get("jump_host")
    return SSHConnectionResource(**{**fields, **({"jump_host": _login(jump)} if isinstance(jump, Mapping) else {})})


def _chosen(cls: type[Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields for an object of class `cls`; a table with a `kind`, such as a launcher, is replaced by an object."""
    made = dict(fields)
    for name, value in fields.items():
        field = cls.model_fields.get(name)
        if field is not None and field.discriminator is not None and isinstance(value, dict):
            kinds = {each.model_fields["kind"].default: each for each in get_args(field.annotation)}
            kind = value.get("kind", field.default.kind)
            if kind not in kinds:
                raise ValueError(f"{name}.kind: {kind!r} is not one of {_listed(kinds)}")
            made[name] = kinds[kind](**value)
    return made


def _variables(value: Any) -> Any:
    """Returns a value of the file with a `dg.EnvVar` for each {env = "NAME"}, the form of Dagster's own configuration files."""
    if isinstance(value, dict):
        if set(value) == {"env"} and isinstance(value["env"], str):
            return dg.EnvVar(value["env"])
        return {name: _variables(each) for name, each in value.items()}
    return [_variables(each) for each in value] if isinstance(value, list) else value


def _listed(names: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, names))


# ---- The user's own definitions


def load_resource(source: str) -> ComputeResource:
    """Returns the `ComputeResource` that MODULE:RESOURCE names: an object of a module, or a resource of its `Definitions`.

    MODULE is a dotted name or a file, as for `dagster dev`. Without RESOURCE the definitions must have a single one. Raises
    `ValueError` if the resource is not found, or the module cannot be imported.
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
    there = f"there are {_listed(found)}" if found else "no Definitions there has a ComputeResource"
    raise ValueError(f"--from {source}: {f'there is no resource {key!r}' if key else 'name one resource'}; {there}")


def _definitions(value: Any) -> dg.Definitions | None:
    """Returns `value` if it is `Definitions`, or calls it if it has the decorator `dg.definitions`; None for another value."""
    if isinstance(value, dg.Definitions):
        return value
    if type(value).__name__ == "LazyDefinitions":
        made = value()
        return made if isinstance(made, dg.Definitions) else None
    return None


def _module(name: str) -> ModuleType:
    """Imports and returns a module, given its dotted name (also in the current directory) or the path of its file."""
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
