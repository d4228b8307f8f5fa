"""The `rayslurm` command."""

from __future__ import annotations

import time
from pathlib import Path

import click

from .. import __version__
from ..backends.base import Layout
from ..ssh.base import Connection
from ..ssh.pool import connection_to
from .attach import attach
from .cluster import all_cluster_options, edge_node
from .common import one_sentence_errors
from .env import env
from .ps import cancel, logs, ps, show
from .session import session
from .submit import script, submit


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="rayslurm")
@click.option(
    "--base",
    default="~/.dagster_rayslurm",
    show_default=True,
    envvar="RAYSLURM_BASE",
    help="Base directory, `local_base` of the ComputeResource.",
)
@all_cluster_options
@click.pass_context
def main(context: click.Context, base: str) -> None:
    """Run commands on a Slurm cluster, and look at what runs there: runs, sessions and jobs."""
    context.obj = Layout(Path(base).expanduser())


for command in (session, env, submit, script, ps, show, logs, cancel, attach):
    main.add_command(command)


@main.command()
@all_cluster_options
def check() -> None:
    """Log in to the edge node that the environment names, and ask for its Slurm."""
    with one_sentence_errors():
        ssh = edge_node()
        connection = connection_to(ssh)
        seconds = _seconds(connection)
        click.echo(f"{connection.place}: logged in with {ssh.client if ssh else 'no SSH'} in {seconds:.2f} s")
        click.echo(f"a command takes {1000 * _seconds(connection):.0f} ms")
        click.echo(f"home directory: {connection.home()}")
        click.echo(f"Slurm: {_run(connection, 'sinfo', '--version')}")
        click.echo(f"partitions: {', '.join(_run(connection, 'sinfo', '--noheader', '--format=%P (%D nodes)').splitlines())}")


def _seconds(connection: Connection) -> float:
    """The seconds that a trivial command takes on the edge node; for the first command, with the login."""
    started = time.perf_counter()
    connection.run(["true"])
    return time.perf_counter() - started


def _run(connection: Connection, *command: str) -> str:
    """The output of a command on the edge node; raises `OSError` if it does not exist there, or fails."""
    done = connection.run(command, timeout=60)
    if done.returncode == 127:
        raise OSError(f"{command[0]} is not on the PATH that a non-interactive login has on {connection.place}; add it there")
    if done.returncode:
        raise OSError(f"{' '.join(command)} failed on {connection.place}: {done.stderr.decode('utf-8', 'replace').strip()}")
    return done.stdout.decode("utf-8", "replace").strip()
