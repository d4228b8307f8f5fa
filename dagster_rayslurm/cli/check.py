"""`rayslurm check`: whether the edge node can be reached as configured, and what is found there."""

from __future__ import annotations

import time

import click
from pydantic import ValidationError

from ..config import resolve_variables
from ..connections.base import Connection
from ..connections.config import SSHConnectionResource
from ..connections.shared import connection_to


@click.command()
@click.option("--prefix", default="SLURM_EDGE_NODE_", show_default=True, help="What the environment variables begin with.")
def check(prefix: str) -> None:
    """Log in to the edge node that the environment names, and ask for its Slurm."""
    try:
        ssh = resolve_variables(SSHConnectionResource.from_env(prefix), "SSHConnectionResource")
        connection = connection_to(ssh)
        seconds = _seconds(connection)
        click.echo(f"{connection.place}: logged in with {ssh.client} in {seconds:.2f} s")
        click.echo(f"a command takes {1000 * _seconds(connection):.0f} ms")
        click.echo(f"home directory: {connection.home()}")
        click.echo(f"Slurm: {_ask(connection, 'sinfo', '--version')}")
        click.echo(f"partitions: {', '.join(_ask(connection, 'sinfo', '--noheader', '--format=%P (%D nodes)').splitlines())}")
    except ValidationError as error:
        problems = (f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors())
        raise click.ClickException("; ".join(problems)) from None
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from None


def _seconds(connection: Connection) -> float:
    started = time.perf_counter()
    connection.run(["true"])
    return time.perf_counter() - started


def _ask(connection: Connection, *command: str) -> str:
    done = connection.run(command, timeout=60)
    if done.returncode == 127:
        raise OSError(f"{command[0]} is not on the PATH that a non-interactive login has on {connection.place}; add it there")
    if done.returncode:
        raise OSError(f"{' '.join(command)} failed on {connection.place}: {done.stderr.decode('utf-8', 'replace').strip()}")
    return done.stdout.decode("utf-8", "replace").strip()
