"""`rayslurm doctor`: whether runs will work on a cluster, and what to mend; `rayslurm check` is its short form."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import Any

import click

from ..config import resolve_variables
from ..doctor import Line, Verdict, Wanted, has_failure
from ..doctor.collect import Report, examine
from ..doctor.partitions import COLUMNS
from ..slurm.config import SlurmQueueConfig, SlurmResource
from ..ssh.base import check_no_variable, is_rooted
from ..ssh.config import SSHConnectionResource
from .session import one_sentence_errors, prefix_option, print_table

_STYLES = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.FAILURE: "bold red", Verdict.SKIPPED: "dim"}
_QUEUE = ("partition", "account", "qos", "reservation", "constraint")
_SIZES = ("num_nodes", "cpus_per_node", "gpus_per_node")


def the_resource(prefix: str, remote_base: str, **queue: Any) -> SlurmResource:
    """The resource that is examined, from the environment variables that begin with a prefix, and from options."""
    stem = prefix.rstrip("_") + "_"
    names = [name for name in (*_QUEUE, "gpu_type", "mem", "time_limit", *_SIZES) if queue.get(name) is not None]
    here = os.environ.get(f"{stem}HOST") == "localhost" and not os.environ.get(f"{stem}USER")
    ssh = None if here else resolve_variables(SSHConnectionResource.from_env(prefix), "SSHConnectionResource")
    check_no_variable(remote_base, "--remote-base")
    if not is_rooted(remote_base):
        raise ValueError(f'--remote-base: {remote_base!r} is relative; write an absolute path, or one that begins with "~/"')
    return SlurmResource(ssh=ssh, queue=SlurmQueueConfig(**{name: queue[name] for name in names}), remote_base=remote_base)


def _options(command: Any) -> Any:
    """The options that say which cluster is examined, and for which jobs."""
    for name in reversed((*_QUEUE, "gpu_type", "mem", "time_limit")):
        help_text = f"`{name}` of the SlurmQueueConfig."
        command = click.option(f"--{name.replace('_', '-')}", help=help_text)(command)
    for name in reversed(_SIZES):
        command = click.option(f"--{name.replace('_', '-')}", type=click.IntRange(0), help=f"`{name}` of the SlurmQueueConfig.")(
            command
        )
    base = click.option(
        "--remote-base",
        default="~/.dagster_rayslurm",
        show_default=True,
        envvar="RAYSLURM_REMOTE_BASE",
        help="Base directory on the cluster, `remote_base` of the SlurmResource.",
    )
    env = click.option("--env", envvar="RAYSLURM_ENV_PATH", help="Path of the payloads' environment on the cluster.")
    return prefix_option(base(env(command)))


@click.command()
@_options
@click.option("--probe", is_flag=True, help="Look at compute nodes as well, by a job of a minute on one node.")
@click.option("--probe-nodes", type=click.IntRange(1, 16), default=1, help="Nodes of that job; 2 try TCP between nodes.")
@click.option("--wait", type=click.IntRange(1), default=300, show_default=True, help="Seconds that the job may wait to start.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(
    prefix: str, remote_base: str, env: str | None, probe: bool, probe_nodes: int, wait: int, as_json: bool, **queue: Any
) -> None:
    """Examine a cluster: each line is ok, a warning or a failure with its remedy. Exits with 1 if there is a failure."""
    nodes = probe_nodes if probe or probe_nodes > 1 else 0
    with one_sentence_errors():
        wanted = Wanted(the_resource(prefix, remote_base, **queue), env)
        report = examine(wanted, nodes, wait, lambda text: click.echo(text, err=True))
    (_print_json if as_json else _print)(report)
    click.get_current_context().exit(int(has_failure(report.lines)))


@click.command()
@_options
def check(prefix: str, remote_base: str, env: str | None, **queue: Any) -> None:
    """The short form of `doctor`: only warnings and failures, and a line that sums up."""
    with one_sentence_errors():
        wanted = Wanted(the_resource(prefix, remote_base, **queue), env)
        report = examine(wanted, 0, 0, lambda text: click.echo(text, err=True))
    _print_lines([line for line in report.lines if line.verdict in (Verdict.WARNING, Verdict.FAILURE)])
    click.echo(_summary(report.lines))
    click.get_current_context().exit(int(has_failure(report.lines)))


def _print_json(report: Report) -> None:
    partitions = [dict(zip(COLUMNS, each.cells(), strict=True)) for each in report.partitions]
    lines = [{**asdict(line), "verdict": line.verdict.value} for line in report.lines]
    click.echo(json.dumps({"lines": lines, "partitions": partitions, "resource": report.resource}, ensure_ascii=False))


def _print(report: Report) -> None:
    _print_lines(report.lines)
    click.echo()
    if report.partitions:
        print_table([each.cells() for each in report.partitions], *COLUMNS)
    click.echo(_summary(report.lines))
    if report.resource:
        click.echo(f"\n{report.resource}")


def _print_lines(lines: list[Line]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    for line in lines:
        text = Text.assemble((f"{line.verdict.value:8}", _STYLES[line.verdict]), f"{line.name}: {line.text}")
        console.print(text)
        if line.remedy:
            console.print(Text(f"        → {line.remedy}"))


def _summary(lines: list[Line]) -> str:
    counts = [(sum(line.verdict is verdict for line in lines), verdict.value) for verdict in Verdict]
    return ", ".join(f"{count} {word}" for count, word in counts if count)
