"""The `rayslurm` command."""

from __future__ import annotations

import sys
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import click

from .. import __version__
from .options import all_cluster_options

# By command: the module, which is imported when the command is called, and the text in `rayslurm --help`.
_COMMANDS = {
    "attach": ("attach", "Open a shell on the head node of a run, session or job."),
    "cancel": ("logs", "End a run, session or job."),
    "check": ("doctor", "Examine a cluster: warnings and failures only."),
    "dashboard": ("ray", "Show the Ray dashboard of a run, asset, session or job."),
    "doctor": ("doctor", "Examine a cluster, and name what to mend."),
    "env": ("env", "Make the environment of payloads on the cluster."),
    "job": ("ray", "Submit jobs to a Ray cluster that runs, and look at them."),
    "logs": ("logs", "Print the output of a run, or the log of a session."),
    "migrate-check": ("migrate_check", "Say what changes in files that use dagster-slurm."),
    "ps": ("ps", "List runs, sessions and jobs."),
    "script": ("submit", "Print the batch script of a command."),
    "session": ("session", "Start, look at and stop warm sessions."),
    "show": ("ps", "Show a run, session or job."),
    "submit": ("submit", "Run a command on the cluster, with a Ray cluster around it."),
    "top": ("top", "Watch a Ray cluster."),
}


class _Commands(click.Group):
    """A click group that imports the module of a command only when the command is called, because importing Dagster is slow."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = getattr(import_module(f".{_COMMANDS[cmd_name][0]}", __package__), cmd_name.replace("-", "_"))
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the chosen command; if it raises a ClickException, adds the URL of its section of the troubleshooting page.

        The URL is added only if standard error is a terminal. A UsageError stays unchanged, because click itself names `--help`
        then.
        """
        try:
            return super().invoke(ctx)
        except click.UsageError:
            raise
        except click.ClickException as error:
            from .common import with_link

            raise with_link(error) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
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
    from ..backends.layout import Layout

    if isinstance(sys.stdout, TextIOWrapper):  # A terminal of another character set than UTF-8 shows "?" for what it lacks.
        sys.stdout.reconfigure(errors="replace")
    context.obj = Layout(Path(base).expanduser())
