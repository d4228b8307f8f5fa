"""The `rayslurm` command."""

from __future__ import annotations

from pathlib import Path

import click

from .. import __version__
from ..backends.base import Layout
from .attach import attach
from .cluster import all_cluster_options
from .doctor import check, doctor
from .env import env
from .ps import cancel, logs, ps, show
from .ray import dashboard, job
from .session import session
from .submit import script, submit
from .top import top


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


for command in (session, env, doctor, check, submit, script, ps, show, logs, cancel, attach, dashboard, job, top):
    main.add_command(command)
