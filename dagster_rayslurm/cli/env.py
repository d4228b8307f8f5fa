"""`rayslurm env`: make the environment of a resource on its cluster before any run needs it, look at it, and remove old ones."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import click
import dagster as dg

from ..compute import ComputeResource
from ..config import resolve_variables
from ..edge import base_directory
from ..edge import environment as edge
from ..environments import CommandEnvironment, ContainerEnvironment, Environment, SentEnvironment
from ..environments.check import facts_of
from ..environments.send import fetch, recipe_for, send_environment
from ..run_call import EnvironmentSite, environment_site
from ..ssh.base import Progress
from .session import json_option, one_sentence_errors, print_table

_DAY = 86400.0
_LEAST_AGE = 3600.0  # Seconds for which `prune` leaves an environment alone, because a run may be about to name it.
_TIMEOUT = 600.0


class _Log:
    """Prints what a Dagster log would show."""

    def info(self, text: str) -> None:
        click.echo(text.removeprefix("[rayslurm] "))

    debug = info

    def warning(self, text: str) -> None:
        click.echo(text.removeprefix("[rayslurm] "), err=True)


@click.group()
@click.option(
    "--from",
    "source",
    required=True,
    envvar="RAYSLURM_FROM",
    metavar="MODULE:RESOURCE",
    help="The ComputeResource: a name in a module, or the key of a resource in the module's Definitions.",
)
@click.pass_context
def env(context: click.Context, source: str) -> None:
    """Make the environment of payloads on the cluster, and look at those that are there."""

    def site() -> EnvironmentSite:
        return environment_site(resource_from(source))

    context.obj = site


Site = Callable[[], EnvironmentSite]


def resource_from(source: str) -> ComputeResource:
    """The resource MODULE:RESOURCE, with variables resolved; raises `ValueError` if there is none."""
    module_name, colon, name = source.partition(":")
    if not colon or not name:
        raise ValueError(f"--from {source}: write MODULE:RESOURCE, such as study.definitions:compute")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(f"--from {source}: {module_name} cannot be imported: {error}") from None
    found = getattr(module, name, None)
    for value in vars(module).values():
        if not isinstance(found, ComputeResource) and isinstance(value, dg.Definitions):
            found = (value.resources or {}).get(name)
    if not isinstance(found, ComputeResource):
        raise ValueError(f"--from {source}: neither {module_name} nor its Definitions have a ComputeResource {name!r}")
    return resolve_variables(found, name)


def _sent(site: EnvironmentSite) -> Environment:
    if not isinstance(site.environment, SentEnvironment):
        raise ValueError(
            f"the resource's environment is {type(site.environment).__name__}, which is not sent; give it a UvEnvironment or "
            "another one that is, as ComputeResource(environment=…)"
        )
    return site.environment


@env.command()
@click.pass_obj
def build(site_of: Site) -> None:
    """Fetch and build on this machine what the cluster's platform needs, and send nothing."""
    with one_sentence_errors():
        site = site_of()
        environment = _sent(site)
        if isinstance(environment, (CommandEnvironment, ContainerEnvironment)):
            return click.echo(f"{type(environment).__name__} needs nothing that is fetched or built on this machine")
        pieces = recipe_for(site.connection, environment, site.queues, _Log()).pieces
        size = sum(map(os.path.getsize, fetch(pieces, _Log())))
        click.echo(f"{len(pieces)} files, {size / 2**20:.1f} MiB")


@env.command()
@click.pass_obj
def push(site_of: Site) -> None:
    """Make the environment on the cluster, unless it is there; prints its path."""
    with one_sentence_errors():
        site = site_of()
        environment = _sent(site)
        with _progress() as progress:
            found = send_environment(site.connection, environment, site.base, _Log(), site.queues, progress)
        click.echo(getattr(found, "path", ""))


@contextlib.contextmanager
def _progress() -> Iterator[Progress | None]:
    """A bar in a terminal; elsewhere lines."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    console = Console()
    if not console.is_terminal:
        yield None
        return
    with Bars("sending", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(), console=console) as bars:
        task = bars.add_task("sending", total=None, visible=False)
        yield lambda done, size: bars.update(task, completed=done, total=size, visible=True)


@env.command("list")
@json_option
@click.pass_obj
def list_environments(site_of: Site, as_json: bool) -> None:
    """List the environments that were made on the cluster."""
    with one_sentence_errors():
        site = site_of()
        rows: list[dict[str, Any]] = site.connection.call(edge.made, site.base, repeat=True, timeout=_TIMEOUT)
        if as_json:
            for row in rows:
                click.echo(json.dumps(row))
            return
        cells = []
        for row in rows:
            unused = (time.time() - row["used"]) / _DAY
            cells.append(
                [os.path.basename(row["path"]), row["title"], f"{unused:.1f} days ago", f"{row['bytes'] / 2**20:.0f} MiB"]
            )
        print_table(cells, "environment", "made from", "last used", "size")


@env.command()
@click.pass_obj
def check(site_of: Site) -> None:
    """Look at the environment as a run does before it submits anything; makes nothing."""
    with one_sentence_errors():
        site = site_of()
        located = send_environment(site.connection, site.environment, site.base, _Log(), site.queues, make=False)
        path, facts = facts_of(site.connection, located, site.ray, True, site.cache_dir)
        click.echo(f"path: {path}")
        click.echo(f"Python: {'.'.join(map(str, facts.python))}, {facts.interpreter.python}")
        click.echo(f"Ray: {facts.ray or 'none'}")
        click.echo(f"Dagster Pipes: {facts.pipes if facts.pipes is not None else 'none'}")


@env.command()
@click.option("--days", type=click.IntRange(min=0), help="Days without use; by default the resource's retention_days.")
@click.pass_obj
def prune(site_of: Site, days: int | None) -> None:
    """Remove environments that were not used for long, and that no run or session names."""
    with one_sentence_errors():
        site = site_of()
        age = max((site.retention_days if days is None else days) * _DAY, _LEAST_AGE)
        removed = site.connection.call(base_directory.sweep_environments, site.base, age, repeat=True, timeout=_TIMEOUT)
        for path in removed:
            click.echo(f"removed {path}")
        click.echo(f"{len(removed)} removed")
