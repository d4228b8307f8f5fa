"""`rayslurm env` creates and checks the payloads' environment on a cluster ahead of runs, and lists and removes environments."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any

import click

from ..edge import base_directory
from ..edge import environment as edge
from ..environments import CommandEnvironment, ContainerEnvironment, Environment, SentEnvironment
from ..environments.check import facts_of
from ..environments.send import fetch, recipe_for, send_environment
from ..operations import EnvironmentSite, environment_site
from ..ssh.base import Progress
from .cluster import the_cluster
from .common import json_option, one_sentence_errors, print_json, print_table
from .options import all_cluster_options, cluster_options

_DAY = 86400.0
_LEAST_AGE = 3600.0  # Seconds for which `prune` leaves an environment alone, because a run may be about to use the environment.
_TIMEOUT = 600.0


class _Log:
    """A logger that prints messages in the terminal, without the prefix "[rayslurm] " of messages in a Dagster log."""

    def info(self, text: str) -> None:
        click.echo(text.removeprefix("[rayslurm] "))

    debug = info

    def warning(self, text: str) -> None:
        click.echo(text.removeprefix("[rayslurm] "), err=True)


@click.group()
@all_cluster_options
def env() -> None:
    """Create the environment of payloads on the cluster, and list, check and remove the environments there."""


def _site() -> EnvironmentSite:
    """Returns the environment of the chosen cluster's resource, with the connection and directories to create it."""
    return environment_site(the_cluster().resource)


def _sent(site: EnvironmentSite) -> Environment:
    """Returns the environment of `site`; raises ValueError if dagster-rayslurm does not create environments of this class."""
    if not isinstance(site.environment, SentEnvironment):
        raise ValueError(
            f"the resource's environment is {type(site.environment).__name__}, which is not sent; give it a UvEnvironment or "
            "another one that is, as ComputeResource(environment=…)"
        )
    return site.environment


@env.command()
@cluster_options
def build() -> None:
    """Fetch and build the environment's files on this machine, for the platform of the cluster; send nothing."""
    with one_sentence_errors():
        site = _site()
        environment = _sent(site)
        if isinstance(environment, (CommandEnvironment, ContainerEnvironment)):
            return click.echo(f"{type(environment).__name__} needs nothing that is fetched or built on this machine")
        pieces = recipe_for(site.connection, environment, site.queues, _Log()).pieces
        size = sum(map(os.path.getsize, fetch(pieces, _Log())))
        click.echo(f"{len(pieces)} files, {size / 2**20:.1f} MiB")


@env.command()
@cluster_options
def push() -> None:
    """Create the environment on the cluster, unless it exists there, and print its path."""
    with one_sentence_errors():
        site = _site()
        environment = _sent(site)
        with _progress() as progress:
            found = send_environment(site.connection, environment, site.base, _Log(), site.queues, progress)
        click.echo(getattr(found, "path", ""))


@contextlib.contextmanager
def _progress() -> Iterator[Progress | None]:
    """Context manager that shows a progress bar, and yields a function that updates the bar; yields None without a terminal.

    Whoever sends files calls the function with the number of bytes that have arrived and the total number of bytes.
    """
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
@cluster_options
@json_option
def list_environments(as_json: bool) -> None:
    """List the environments that runs or `push` created on the cluster."""
    with one_sentence_errors():
        site = _site()
        rows: list[dict[str, Any]] = site.connection.call(edge.made, site.base, repeat=True, timeout=_TIMEOUT)
        if as_json:
            for row in rows:
                print_json(row)
            return
        cells = []
        for row in rows:
            unused = (time.time() - row["used"]) / _DAY
            cells.append(
                [os.path.basename(row["path"]), row["title"], f"{unused:.1f} days ago", f"{row['bytes'] / 2**20:.0f} MiB"]
            )
        print_table(cells, "environment", "made from", "last used", "size")


@env.command()
@cluster_options
def check() -> None:
    """Check the environment as a run does before the submission of a job; creates nothing."""
    with one_sentence_errors():
        site = _site()
        located = send_environment(site.connection, site.environment, site.base, _Log(), site.queues, make=False)
        path, facts = facts_of(site.connection, located, site.ray, True, site.cache_dir)
        click.echo(f"path: {path}")
        click.echo(f"Python: {'.'.join(map(str, facts.python))}, {facts.interpreter.python}")
        click.echo(f"Ray: {facts.ray or 'none'}")
        click.echo(f"Dagster Pipes: {facts.pipes if facts.pipes is not None else 'none'}")


@env.command()
@cluster_options
@click.option("--days", type=click.IntRange(min=0), help="Days without use; by default the resource's retention_days.")
def prune(days: int | None) -> None:
    """Remove the environments that were not used for --days days, and that no run or session refers to.

    An environment that was used within the last hour always stays.
    """
    with one_sentence_errors():
        site = _site()
        age = max((site.retention_days if days is None else days) * _DAY, _LEAST_AGE)
        removed = site.connection.call(base_directory.sweep_environments, site.base, age, repeat=True, timeout=_TIMEOUT)
        for path in removed:
            click.echo(f"removed {path}")
        click.echo(f"{len(removed)} removed")
