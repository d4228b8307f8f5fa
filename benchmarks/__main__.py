"""`python -m benchmarks [NAME …]`: measure, print one table, and fail if a bar is missed."""

from __future__ import annotations

import json
import os
import platform
import sys
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from dagster_rayslurm._version import __version__

from .figures import Figure, Options, Sample, number

Measure = Callable[[Options], "Figure | list[Figure]"]


_NEED_THE_STACK = ("connections", "slurm.", "session.", "hetjob.")
"""What names begin with whose figures are measured on the Slurm stack."""


def _measures() -> dict[str, Measure]:
    """The figures by name; imported late, so that `--help` does not wait for Dagster."""
    from . import (
        connections,
        first,
        hetjob,
        imports,
        local,
        messages,
        preload,
        session_first,
        session_load,
        session_warm,
        slurm_calls,
        slurm_first,
        slurm_streams,
        stdout,
    )

    return {
        "import": imports.imports,
        "local.bash": local.local_bash,
        "local.first": first.without_dashboard,
        "local.first.dashboard": first.with_dashboard,
        "local.preload": preload.local_preload,
        "local.warm": local.local_warm,
        "stdout": stdout.stdout,
        "messages": messages.messages,
        "connections": connections.connections,
        "connections.idle": connections.idle_readers,
        "slurm.first": slurm_first.first,
        "slurm.bash": slurm_first.bash,
        "slurm.logins": slurm_calls.logins,
        "slurm.squeue": slurm_calls.squeue,
        "slurm.stdout": slurm_streams.stdout,
        "slurm.messages": slurm_streams.messages,
        "session.first": session_first.first,
        "session.warm": session_warm.warm,
        "session.preload": session_warm.preload,
        "session.bash": session_warm.bash,
        "session.throughput": session_load.throughput,
        "session.race": session_load.race,
        "hetjob.bring_up": hetjob.bring_up,
    }


def _table(figures: list[Figure]) -> Table:
    table = Table(title="medians (smallest-largest)", show_lines=True)
    for heading in ("figure", "by hand", "ours", "ratio or difference", "bar", "met?"):
        table.add_column(heading)
    for figure in figures:
        bar = f"{'≥' if figure.at_least else '≤'} {number(figure.bar)} {figure.result.unit}"
        met = "[green]yes[/]" if figure.met else f"[bold red]NO[/] {figure.problem or ''}"
        by_hand, ours, result = map(_cell, (figure.by_hand, figure.ours, figure.result))
        notes = "".join(f"\n[dim]{sample.label}: {sample}[/]" for sample in figure.also)
        table.add_row(figure.name, by_hand, ours, result + notes, bar, met)
    return table


def _cell(sample: Sample) -> str:
    return f"{sample}\n[dim]{sample.label}[/]"


def _machine() -> dict[str, object]:
    packages = ("dagster", "ray")
    return {
        "cpus": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        **{package: version(package) for package in packages},
        "dagster-rayslurm": __version__,
    }


@click.command()
@click.argument("names", nargs=-1)
@click.option("--runs", type=click.IntRange(min=1), help="Measure each figure this often, instead of what suits it.")
@click.option("--messages", default=20_000, show_default=True, help="Pipes messages of the figure of that name.")
@click.option("--lines", default=1_000_000, show_default=True, help="Lines that the payload of `stdout` prints.")
@click.option("--partition", default="compute", show_default=True, help="Partition of the stack, two nodes of which are free.")
@click.option("--peer/--no-peer", default=True, help="Whether dagster-slurm runs beside it; it is installed into .bench once.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Keep the raw figures here.")
def main(
    names: tuple[str, ...],
    runs: int | None,
    messages: int,
    lines: int,
    partition: str,
    peer: bool,
    json_path: Path | None,
) -> None:
    """Measure the figures, or those with the given NAMES, each beside doing the same by hand."""
    from . import edge

    warnings.filterwarnings("ignore", module="dagster")
    measures = _measures()
    unknown = [name for name in names if name not in measures]
    if unknown:
        raise click.BadParameter(f"{unknown[0]!r} is none of {', '.join(measures)}", param_hint="NAMES")
    console = Console()
    # Wide enough for the table when the output goes to a file, where there is no width to respect.
    wide = console if console.is_terminal else Console(width=150)
    options = Options(runs, messages, lines, partition, peer)
    figures: list[Figure] = []
    for name in names or measures:
        if name.startswith(_NEED_THE_STACK) and not edge.available():
            if names:
                raise click.UsageError(f"{name} needs the Slurm stack (`make stack-up`) and the programs of OpenSSH")
            console.print(f"leaving out {name}: the Slurm stack (`make stack-up`) or the programs of OpenSSH are not there")
            continue
        console.print(f"measuring {name}")  # No spinner: its thread would share the interpreter with what is measured.
        measured = measures[name](options)
        figures += measured if isinstance(measured, list) else [measured]
    if json_path is not None:
        raw = {"machine": _machine(), "figures": [figure.raw() for figure in figures]}
        json_path.write_text(json.dumps(raw, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    wide.print(_table(figures))
    missed = [figure.name for figure in figures if not figure.met]
    if missed:
        sys.exit(f"missed: {', '.join(missed)}")


if __name__ == "__main__":
    main()
