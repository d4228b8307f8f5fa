"""Finds the cluster for a command: by `--from`, `--cluster`, environment variables, or the default of a `rayslurm.toml`.

Each source describes a `ComputeResource`, so the terminal has the same fields as Dagster's resource. The resource is created only
when a command asks for the resource, because many commands need only the connection, and start faster without Dagster.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..backends.layout import absolute
from ..errors import named_errors
from ..fields import BASE, check_text, read_variable
from ..ssh.base import Connection, check_no_variable, is_rooted
from ..ssh.fields import SSHLogin, read_variables
from ..ssh.pool import connection_to
from .common import listed, one_sentence_errors
from .config_file import FILE, find_file, read_file, user_file
from .options import cluster_option, given

if TYPE_CHECKING:
    from ..compute import ComputeResource
    from ..slurm.config import SlurmResource

NO_CLUSTER = (
    "no cluster is configured; set SLURM_EDGE_NODE_HOST, name a cluster in rayslurm.toml, or read one from your definitions "
    "with --from module:resource"
)


@dataclass(frozen=True)
class Cluster:
    """The configuration of a Slurm cluster; references to environment variables in `ssh` and `remote_base` are resolved."""

    ssh: SSHLogin | None  # None if `sbatch` is on this machine.
    remote_base: str  # The base directory on the cluster, as the user wrote it.
    source: str  # The origin of the configuration for error messages, such as "cluster 'a' in rayslurm.toml".
    make: Callable[[Cluster], ComputeResource]  # Makes the resource of this cluster; raises ValueError if a field is wrong.

    @cached_property
    def resource(self) -> ComputeResource:
        """The `ComputeResource` of the configuration; raises ValueError if the resource is not valid."""
        return self.make(self)

    @property
    def slurm(self) -> SlurmResource:
        """The `SlurmResource` of the configuration."""
        assert self.resource.slurm is not None  # Resources without `slurm` are refused.
        return self.resource.slurm

    @cached_property
    def connection(self) -> Connection:
        """The connection to the edge node; the login takes place when the connection is first used."""
        return connection_to(self.ssh)

    @cached_property
    def base(self) -> str:
        """The absolute path of the base directory on the cluster.

        If `remote_base` begins with "~", the property logs in to find the home directory, and raises OSError if the login fails.
        """
        return absolute(self.connection, self.remote_base)


# ---- The cluster


def the_cluster() -> Cluster:
    """Returns the cluster that the user chose by an option, an environment variable or a file.

    Raises ClickException if no cluster is configured, or if the configuration is wrong.
    """
    cluster = find_cluster()
    if cluster is None:
        raise click.ClickException(NO_CLUSTER)
    return cluster


def find_cluster() -> Cluster | None:
    """Returns the cluster that the user chose by an option, an environment variable or a file; None if no cluster is configured.

    Raises ClickException if the configuration is wrong.
    """
    if sum(map(bool, map(cluster_option, ("source", "cluster", "prefix")))) > 1:
        raise click.UsageError("--from, --cluster and --prefix exclude each other; give one of them")
    with one_sentence_errors():
        found, remote_base = _found(), given("remote_base")
        if found is None or remote_base is None:
            return found
        check_no_variable(remote_base, "--remote-base")
        if not is_rooted(remote_base):
            raise ValueError(f'--remote-base: {remote_base!r} is relative; write an absolute path, or one that begins with "~/"')
        return replace(found, remote_base=remote_base)


def _prefix() -> str:
    """Returns the prefix of the environment variables that describe the edge node, with an underscore at the end."""
    return (given("prefix") or "SLURM_EDGE_NODE_").rstrip("_") + "_"


def _found() -> Cluster | None:
    """Returns the configured cluster, before `--remote-base` is applied; None if no cluster is configured.

    Options take precedence over environment variables. Environment variables take precedence over the default cluster of a
    `rayslurm.toml`. Raises ValueError if the configuration is wrong, or if there is no cluster with the given name.
    """
    prefix, named = _prefix(), given("cluster")
    if cluster_option("prefix"):
        return _from_environment(prefix)
    source = None if cluster_option("cluster") else given("source")
    if source:
        return _from_definitions(source)
    if named is None and f"{prefix}HOST" in os.environ:
        return _from_environment(prefix)
    path = find_file(Path.cwd())
    if path is None:
        if named is not None:
            raise ValueError(
                f"there is no {FILE} in {Path.cwd()} or above, nor in {user_file().parent}, to name cluster {named!r}"
            )
        return None
    return from_file(path, named)


# ---- Environment variables


def _from_environment(prefix: str) -> Cluster:
    """Returns the cluster that the environment variables with the prefix `prefix` describe; raises ValueError if one is wrong."""

    def read(variable: str, field: str, integer: bool) -> Any:
        return read_variable(variable, f"SSHConnectionResource.{field}", integer)

    fields = {"pre_deployed_env_path": os.environ.get("RAYSLURM_ENV_PATH") or None}
    where = f"the variables {prefix}*"
    return Cluster(SSHLogin(**read_variables(prefix, read)), BASE, where, lambda cluster: _resource(cluster, fields))


def _resource(cluster: Cluster, fields: Mapping[str, Any]) -> ComputeResource:
    """Returns the `ComputeResource` of `cluster`.

    `fields` are the fields of the resource, as in a `rayslurm.toml`, except for the login and the base directory, which `cluster`
    has.
    """
    from .resource import make_resource

    return make_resource(fields, cluster.ssh, cluster.remote_base, cluster.source)


# ---- The user's own definitions


def _from_definitions(source: str) -> Cluster:
    """Returns the cluster of the `ComputeResource` that `source` names; `source` is MODULE:RESOURCE, as for `load_resource`.

    Raises `ValueError` if the resource is not found, or if the resource has no cluster (no field `slurm`).
    """
    from ..config import resolve_variables
    from .resource import at_remote_base, load_resource

    where = f"--from {source}"
    found = load_resource(source)
    if found.slurm is None:
        raise ValueError(f"{where}: the resource has no cluster; set ComputeResource(slurm=SlurmResource(…))")
    found = resolve_variables(found, "ComputeResource")
    assert found.slurm is not None
    return Cluster(found.slurm.ssh, found.slurm.remote_base, where, lambda cluster: at_remote_base(found, cluster.remote_base))


# ---- rayslurm.toml


def from_file(path: Path, name: str | None) -> Cluster:
    """Returns the cluster `name` of the `rayslurm.toml` at `path`.

    If `name` is None, returns the default cluster of the file, or the only cluster in the file. Raises `ValueError` if the file
    is not valid, has no cluster `name`, or has several clusters and no default cluster while `name` is None.
    """
    content = read_file(path)
    clusters, chosen = content["clusters"], name or content["default"]
    if not chosen and len(clusters) > 1:
        raise ValueError(f"{path} has the clusters {listed(clusters)}; choose one with --cluster, or set `default` there")
    chosen = chosen or next(iter(clusters))
    if chosen not in clusters:
        raise ValueError(f"{path} has no cluster {chosen!r}; there are {listed(clusters)}")
    fields, where = clusters[chosen], f"cluster {chosen!r} in {path}"

    def make(cluster: Cluster) -> ComputeResource:
        with named_errors(where):
            resolved = _resolved(fields, "")
        return _resource(cluster, resolved)

    with named_errors(where):
        slurm = _table(fields, "slurm", "slurm")
        way = {name: _resolved(slurm[name], f"slurm.{name}") for name in ("ssh", "remote_base") if name in slurm}
        login = SSHLogin(**_table(way, "ssh", "slurm.ssh")) if "ssh" in way else None
        return Cluster(login, check_text(way.get("remote_base", BASE)), where, make)


def _table(fields: Mapping[Any, Any], name: str, path: str) -> dict[str, Any]:
    """Returns the table `name` in `fields`, {} if it is missing; raises `ValueError` if the value is no table.

    `path` is the name of the table in the file, such as "slurm.ssh", for the error message.
    """
    found = fields.get(name, {})
    if not isinstance(found, dict):
        raise ValueError(f"{path} is no table; write {path} = {{ … }}, with the fields of its class")
    return found


def _resolved(value: Any, field: str) -> Any:
    """Returns a copy of `value` in which values of environment variables replace tables {env = "NAME"}, at any depth.

    Raises `ValueError` if the variable NAME is not set. `field` is the path of `value` in the file, for error messages.
    """
    if isinstance(value, dict):
        if set(value) == {"env"} and isinstance(value["env"], str):
            return read_variable(value["env"], field)
        return {name: _resolved(each, f"{field}.{name}".lstrip(".")) for name, each in value.items()}
    return [_resolved(each, field) for each in value] if isinstance(value, list) else value
