"""Adds to `rayslurm` commands the options that choose the cluster. Fast to import, because it does not import Dagster."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from ..backends.layout import Layout
from .config_file import FILE, find_file, read_file

F = TypeVar("F", bound=Callable[..., Any])

_KEY = "dagster_rayslurm."  # Prefix of the options in click's `Context.meta`, which nested commands share.
_VARIABLES = {"cluster": "RAYSLURM_CLUSTER", "source": "RAYSLURM_FROM", "remote_base": "RAYSLURM_REMOTE_BASE"}


def _remember(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    """Stores the value of an option in click's context, where `cluster_option` finds the value; does nothing for None."""
    if value is not None:
        context.meta[_KEY + str(parameter.name)] = value


def _option(*names: str, **more: Any) -> Callable[[F], F]:
    """Decorator that adds an option to a command. The command's function does not get the value; `cluster_option` returns it."""
    return click.option(*names, expose_value=False, callback=_remember, **more)


def _cluster_names(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:  # noqa: ARG001
    """Returns the names of clusters that begin with `incomplete`, for shell completion; [] if no `rayslurm.toml` can be read."""
    try:
        path = find_file(Path.cwd())
        return [name for name in (read_file(path)["clusters"] if path else ()) if name.startswith(incomplete)]
    except (OSError, ValueError):
        return []


def cluster_options(command: F) -> F:
    """Decorator that adds the options `--cluster` and `--from` to a command.

    Users may write both options after `rayslurm` or after the command.
    """
    command = _option("--from", "source", metavar="MODULE:RESOURCE", help="A ComputeResource of your definitions.")(command)
    what = f"A cluster of the nearest {FILE}, or of that in ~/.config/rayslurm."
    return _option("--cluster", metavar="NAME", help=what, shell_complete=_cluster_names)(command)


def all_cluster_options(command: F) -> F:
    """Decorator that adds the options `--cluster`, `--from`, `--remote-base` and `--prefix` to a command.

    `--prefix` is the beginning of the names of the environment variables that describe the edge node.
    """
    what = "Base directory on the cluster, `remote_base` of the SlurmResource."
    command = _option("--remote-base", metavar="DIRECTORY", help=what)(command)
    what = "Prefix of the environment variables that describe the edge node.  [default: SLURM_EDGE_NODE_]"
    command = _option("--prefix", metavar="PREFIX", help=what)(command)
    return cluster_options(command)


def cluster_option(name: str) -> str | None:
    """Returns the value of the option `name`; None if the user gave no such option after `rayslurm` or after the command.

    `name` is the Python name of the option: "source" for `--from`, "remote_base" for `--remote-base`.
    """
    return click.get_current_context().meta.get(_KEY + name) or None


def given(name: str) -> str | None:
    """Returns the value of a cluster option, or else of the option's environment variable; None if neither is set.

    `name` is the Python name of the option: "cluster", "source" (for `--from`), "remote_base" or "prefix", which has no variable.
    """
    variable = _VARIABLES.get(name)
    return cluster_option(name) or (os.environ.get(variable) if variable else None) or None


def given_base() -> str | None:
    """Returns the base directory on this machine that `--base` or RAYSLURM_BASE names; None if neither is given."""
    root = click.get_current_context().find_root()
    was_given = root.get_parameter_source("base") not in (None, ParameterSource.DEFAULT)
    return str(root.obj.base) if was_given and isinstance(root.obj, Layout) else None
