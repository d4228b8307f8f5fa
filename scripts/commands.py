"""Render the page of commands from the commands: `python scripts/commands.py > docs/reference/command-line.md`."""

from collections.abc import Iterator

import click

from dagster_rayslurm.cli import main

INTRODUCTION = """\
# Command line

All commands of `rayslurm`, with their options. `--help` prints the same.
[The cluster from a terminal](../terminal.md) tells how they find the cluster, and what they are for.
"""


def commands(
    command: click.Command, name: str, parent: click.Context | None
) -> Iterator[tuple[str, click.Command, click.Context]]:
    """The command and all below it, each with its full name and context."""
    context = click.Context(command, info_name=name, parent=parent)
    yield context.command_path, command, context
    if isinstance(command, click.Group):
        for each in command.list_commands(context):
            below = command.get_command(context, each)
            assert below is not None
            yield from commands(below, each, context)


def row(option: click.Option, context: click.Context) -> str | None:
    """An option's line of the table; None if it is hidden."""
    found = option.get_help_record(context)
    return found and f"| `{found[0]}` | {found[1].replace('|', chr(92) + '|')} |"


def section(path: str, command: click.Command, context: click.Context) -> str:
    """What is told of one command."""
    usage = " ".join([path, *command.collect_usage_pieces(context)])
    parts = [f"## {path}", f"```text\n{usage}\n```", " ".join((command.help or "").replace("\b", "").split())]
    options = [each for each in command.params if isinstance(each, click.Option)]
    rows = [each for option in options if (each := row(option, context))]
    if rows:
        parts.append("\n".join(["| option | description |", "|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def page() -> str:
    """The page."""
    return "\n".join([INTRODUCTION, *(section(*each) for each in commands(main, "rayslurm", None))])


if __name__ == "__main__":
    print(page(), end="")
