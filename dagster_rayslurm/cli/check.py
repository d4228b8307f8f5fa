"""`rayslurm check`: log in to the edge node that environment variables name, and show its Slurm version and partitions."""

from __future__ import annotations

import time

import click

from ..ssh.base import Connection
from ..ssh.pool import connection_to
from .common import edge_node, one_sentence_errors, prefix_option


@click.command()
@prefix_option
def check(prefix: str) -> None:
    """Log in to the edge node that the environment names, and ask for its Slurm."""
    with one_sentence_errors():
        ssh = edge_node(prefix)
        connection = connection_to(ssh)
        seconds = _seconds(connection)
        click.echo(f"{connection.place}: logged in with {ssh.client} in {seconds:.2f} s")
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
    """The output of a command on the edge node.

    Raises:
        OSError: the command does not exist there, or failed.
    """
    done = connection.run(command, timeout=60)
    if done.returncode == 127:
        raise OSError(f"{command[0]} is not on the PATH that a non-interactive login has on {connection.place}; add it there")
    if done.returncode:
        raise OSError(f"{' '.join(command)} failed on {connection.place}: {done.stderr.decode('utf-8', 'replace').strip()}")
    return done.stdout.decode("utf-8", "replace").strip()
