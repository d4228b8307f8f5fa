"""`rayslurm doctor` checks whether runs will work on a cluster, with a remedy for each problem; `check` prints only problems."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import click

from ..doctor import Line, Verdict, Wanted, has_failure
from ..doctor.collect import Report, examine
from ..environments import PreDeployedEnvironment
from ..plan import merge
from ..slurm.config import SlurmQueueConfig
from ..slurm.partitions import COLUMNS
from .cluster import the_cluster
from .common import one_sentence_errors, print_json, print_table
from .options import all_cluster_options
from .resource import changed

_STYLES = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.FAILURE: "bold red", Verdict.SKIPPED: "dim"}
_QUEUE = ("partition", "account", "qos", "reservation", "constraint", "gpu_type", "mem", "time_limit")
_SIZES = ("num_nodes", "cpus_per_node", "gpus_per_node")
_json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


def _options(command: Any) -> Any:
    """Decorator that adds the options of `doctor` and `check` to a command.

    The options choose the cluster, change fields of the queue that jobs use, and name another environment of the payloads.
    """
    for name in reversed((*_QUEUE, *_SIZES)):
        kind = click.IntRange(0) if name in _SIZES else click.STRING
        what = f"`{name}` of the SlurmQueueConfig."
        command = click.option(f"--{name.replace('_', '-')}", type=kind, help=what)(command)
    what = "Path of the payloads' environment on the cluster, instead of the resource's."
    return all_cluster_options(click.option("--env", help=what)(command))


def _wanted(env: str | None, options: dict[str, Any]) -> Wanted:
    """Returns the configuration to examine: the resource of the chosen cluster, changed by the options of the command.

    `env` is the path of the payloads' environment; None for the environment of the resource. `options` maps names of fields of
    the queue to new values; a field with the value None stays unchanged.
    """
    cluster = the_cluster()
    queue = SlurmQueueConfig(**{name: value for name, value in options.items() if value is not None})
    slurm = changed(cluster.slurm, queue=merge(cluster.slurm.queue, queue))
    path = env or cluster.resource.pre_deployed_env_path
    environment = PreDeployedEnvironment(path=path) if path else cluster.resource.environment
    return Wanted(slurm, environment, cluster.resource.default_launcher)


@click.command()
@_options
@click.option("--probe", is_flag=True, help="Look at compute nodes as well, by a job of a minute on one node.")
@click.option("--probe-nodes", type=click.IntRange(1, 16), default=1, help="Nodes of that job; 2 try TCP between nodes.")
@click.option("--wait", type=click.IntRange(1), default=300, show_default=True, help="Seconds that the job may wait to start.")
@_json_option
def doctor(env: str | None, probe: bool, probe_nodes: int, wait: int, as_json: bool, **queue: Any) -> None:
    """Examine a cluster, and print one line for each check: ok, skipped, or a warning or failure with its remedy.

    With --probe, a Slurm job also examines compute nodes. Exits with 1 if there is a failure.
    """
    nodes = probe_nodes if probe or probe_nodes > 1 else 0
    with one_sentence_errors():
        report = examine(_wanted(env, queue), nodes, wait, lambda text: click.echo(text, err=True))
    (_print_json if as_json else _print)(report)
    click.get_current_context().exit(int(has_failure(report.lines)))


@click.command()
@_options
@_json_option
def check(env: str | None, as_json: bool, **queue: Any) -> None:
    """Examine a cluster as `doctor` does, but print only the warnings, the failures and a line with the totals.

    With --json, print the same object as `doctor`, but only with the lines of warnings and failures. Exits with 1 if there is a
    failure.
    """
    with one_sentence_errors():
        report = examine(_wanted(env, queue), 0, 0, lambda text: click.echo(text, err=True))
    problems = [line for line in report.lines if line.verdict in (Verdict.WARNING, Verdict.FAILURE)]
    if as_json:
        _print_json(replace(report, lines=problems))
    else:
        _print_lines(problems)
        click.echo(_summary(report.lines))
    click.get_current_context().exit(int(has_failure(report.lines)))


def _print_json(report: Report) -> None:
    """Prints a report as one JSON object."""
    partitions = [dict(zip(COLUMNS, each.cells(), strict=True)) for each in report.partitions]
    lines = [{**asdict(line), "verdict": line.verdict.value} for line in report.lines]
    print_json({"lines": lines, "partitions": partitions, "resource": report.resource})


def _print(report: Report) -> None:
    """Prints a report: the lines of the checks, a table of the partitions, the totals, and Python code that makes a resource."""
    _print_lines(report.lines)
    click.echo()
    if report.partitions:
        print_table([each.cells() for each in report.partitions], *COLUMNS)
    click.echo(_summary(report.lines))
    if report.resource:
        click.echo(f"\n{report.resource}")


def _print_lines(lines: list[Line]) -> None:
    """Prints one line for each check, with its verdict; a remedy, if there is one, follows on a line of its own."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    for line in lines:
        text = Text.assemble((f"{line.verdict.value:8}", _STYLES[line.verdict]), f"{line.name}: {line.text}")
        console.print(text)
        if line.remedy:
            console.print(Text(f"        → {line.remedy}"))


def _summary(lines: list[Line]) -> str:
    """Returns the number of lines with each verdict as text, such as "12 ok, 1 warning"."""
    counts = [(sum(line.verdict is verdict for line in lines), verdict.value) for verdict in Verdict]
    return ", ".join(f"{count} {word}" for count, word in counts if count)
