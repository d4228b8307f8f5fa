"""The command `python -m stack`."""

from __future__ import annotations

import shutil
import sys
import time

import click

from . import access
from .cluster import Cluster, find_compose
from .errors import StackError
from .ready import node_states, wait_until_ready
from .settings import DEBIANS, Settings


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Slurm in containers, for development and tests; the variables RAYSLURM_STACK_* choose another one."""


@main.command()
def up() -> None:
    """Start the stack, or bring it up to date, and wait until it takes jobs and logins."""
    begin = time.monotonic()
    settings = Settings.from_environment()
    cluster = Cluster(settings)
    keys = access.ensure_keys(settings)
    access.write_known_hosts(settings)
    if not cluster.image_exists():
        click.echo(f"building the image {settings.image}, a few minutes the first time")
    cluster.build()
    built = time.monotonic()
    if built - begin > 5:
        click.echo(f"image built in {built - begin:.0f} s")
    click.echo(f"starting {', '.join(settings.services)}")
    cluster.up(keys)
    wait_until_ready(cluster)
    access.write_environment(settings)
    click.echo(
        f"Slurm {DEBIANS[settings.debian]} is ready after {time.monotonic() - built:.1f} s: "
        f"`set -a; . {access.environment_file(settings)}`, or\n"
        f"ssh -i {access.keys_directory(settings) / access.CLIENT_KEY} -o UserKnownHostsFile={settings.directory}/known_hosts "
        f"-p {settings.ssh_port} {access.USER}@127.0.0.1"
    )


@main.command()
def down() -> None:
    """Remove the stack: containers, volumes, keys."""
    settings = Settings.from_environment()
    Cluster(settings).down()
    shutil.rmtree(settings.directory, ignore_errors=True)


@main.command()
@click.option("-f", "--follow", is_flag=True, help="Go on until interrupted.")
@click.argument("services", nargs=-1)
def logs(follow: bool, services: tuple[str, ...]) -> None:
    """Print what the services say, all of them or those named."""
    options = ["--follow"] if follow else []
    sys.exit(Cluster(Settings.from_environment()).compose("logs", *options, *services, capture=False).returncode)


@main.command()
def status() -> None:
    """Print a line per service and per node."""
    cluster = Cluster(Settings.from_environment())
    containers = cluster.containers()
    for service in cluster.settings.services:
        container = containers.get(service)
        said = f"{container.state:10}{container.health:12}{container.address}" if container else "absent"
        click.echo(f"{service:12}{said}".rstrip())
    if "edge" in containers and containers["edge"].running:
        for node, state in node_states(cluster).items():
            click.echo(f"node {node:7}{state}")


@main.command()
def available() -> None:
    """Succeed if Docker and Compose can be used here; say otherwise what the tests of the stack lack."""
    try:
        find_compose()
    except StackError as error:
        click.echo(f"The tests of the stack cannot run here. {error.message}")
        sys.exit(1)


if __name__ == "__main__":
    main(prog_name="python -m stack")
