"""The command `python -m benchmarks`: measure, render a report, tell whether ratios got worse."""

from __future__ import annotations

import sys
import time
import traceback
import warnings
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from stack.settings import ROOT

from . import results
from .catalogue import BENCHMARKS, Benchmark
from .check import compare
from .figures import Figure, Options, Sample, number
from .report import render
from .results import Measured, Part, Results

DOCS = ROOT / "docs"
_FILE = click.Path(dir_okay=False, path_type=Path)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Figures of this project, each measured beside doing the same by hand and beside others."""


@main.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--runs", type=click.IntRange(min=1), help="Measure each figure this often, instead of what suits it.")
@click.option("--quick", is_flag=True, help="Once and with less of everything: whether it all still works.")
@click.option("--messages", default=Options.messages, show_default=True, help="Pipes messages of a figure of their rate.")
@click.option("--lines", default=Options.lines, show_default=True, help="Lines that a payload prints for a figure of output.")
@click.option("--partition", default=Options.partition, show_default=True, help="A partition whose nodes are free.")
@click.option("--peer/--no-peer", default=True, help="Whether dagster-slurm runs beside it; it is installed into .bench once.")
@click.option("--into", type=_FILE, help="Keep every sample in this file; what it holds of the same machine stays.")
@click.option("--report", "write_report", is_flag=True, help="Render the report of that file, too.")
def run(names: tuple[str, ...], into: Path | None, write_report: bool, quick: bool, **options: object) -> None:
    """Measure what has the given NAMEs (`python -m benchmarks list`), or all that is usual.

    Exit status 1 says that a promise was not met, or that a benchmark failed.
    """
    warnings.filterwarnings("ignore", module="dagster")
    chosen = Options(quick=quick, **options)  # type: ignore[arg-type]
    if write_report and into is None:
        raise click.UsageError("--report renders what --into keeps: name a file")
    benchmarks = _asked(names)
    kept = _read(into) if into is not None and into.exists() else Results()
    part = _begun(benchmarks, chosen)
    _together(into, kept, part)  # Better now than after an hour.
    console, failed = Console(), []
    for benchmark in benchmarks:
        # No spinner: its thread would share the interpreter with what is measured.
        console.print(f"measuring {benchmark.name}")
        began = time.monotonic()
        try:
            figures = tuple(benchmark.measure(chosen))
        except Exception as error:  # noqa: BLE001 - what the others have found is worth as much as before.
            traceback.print_exc()
            failed.append(f"{benchmark.name} ({type(error).__name__})")
            continue
        part = replace(part, measured=(*part.measured, Measured(benchmark.name, time.monotonic() - began, figures)))
        if into is not None:
            into.parent.mkdir(parents=True, exist_ok=True)
            into.write_text(_together(into, kept, part).to_json(), encoding="utf-8")
    _tell(part, console)
    if into is not None and write_report:
        _render(into)
    # What was measured once, in a hurry, meets no bars and misses none.
    found = [figure for each in part.measured for figure in each.figures]
    missed = [figure.name for figure in found if (figure.problem if quick else not figure.met)]
    problems = ([f"missed: {', '.join(missed)}"] if missed else []) + ([f"failed: {', '.join(failed)}"] if failed else [])
    if problems:
        sys.exit("; ".join(problems))


def _asked(names: tuple[str, ...]) -> list[Benchmark]:
    """What is to be measured, in the order of the report.

    Raises:
        UsageError: there is no such thing, or no stack for it.
    """
    from .parties import edge

    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        raise click.UsageError(f"{unknown[0]!r} is none of {', '.join(BENCHMARKS)}")
    asked = [each for each in BENCHMARKS.values() if each.name in names or (not names and each.usual)]
    if any(each.on_stack for each in asked) and not edge.available():
        raise click.UsageError("this needs the Slurm stack (`make stack-up`) and the programs of OpenSSH")
    return asked


def _begun(benchmarks: list[Benchmark], options: Options) -> Part:
    from .machine import describe

    machine = describe(any(each.on_stack for each in benchmarks), options.peer)
    now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    return Part(now, machine, {name: value for name, value in asdict(options).items() if value is not None})


def _read(path: Path) -> Results:
    try:
        return results.read(path)
    except results.ResultsError as error:
        raise click.ClickException(str(error))


def _together(path: Path | None, kept: Results, part: Part) -> Results:
    try:
        return kept.with_part(part)
    except results.ResultsError as error:
        raise click.ClickException(f"{path}: {error}")


def _tell(part: Part, console: Console) -> None:
    # Wide enough for the table when the output goes to a file, where there is no width to respect.
    wide = console if console.is_terminal else Console(width=170)
    table = Table(title="medians (smallest-largest)", show_lines=True)
    for heading in ("figure", "by hand", "ours", "others", "ratio", "bar", "met?"):
        table.add_column(heading)
    for figure in (figure for each in part.measured for figure in each.figures):
        table.add_row(*_row(figure))
    wide.print(table)
    wide.print("  ".join(f"{each.benchmark} {each.seconds:.0f} s" for each in part.measured))


def _row(figure: Figure) -> list[str]:
    bar = "" if figure.bar is None else f"{'≥' if figure.at_least else '≤'} {number(figure.bar)} {figure.result.unit}"
    met = f"[bold red]NO[/] {escape(figure.problem or '')}" if not figure.met else "" if figure.bar is None else "[green]yes[/]"
    ours = [_cell(figure.ours), *([_cell(figure.result)] if figure.result != figure.ours else ()), *map(_cell, figure.also)]
    hand = _cell(figure.by_hand) if figure.by_hand else ""
    ratio = "" if figure.ratio is None else number(figure.ratio)
    return [escape(figure.name), hand, "\n".join(ours), "\n".join(map(_cell, figure.others)), ratio, bar, met]


def _cell(sample: Sample) -> str:
    return f"{sample} [dim]{escape(sample.label)}[/]"


@main.command("list")
def list_them() -> None:
    """Tell what can be measured."""
    for benchmark in BENCHMARKS.values():
        click.echo(f"{benchmark.name:22}{'' if benchmark.usual else '(if named) '}{benchmark.about}")


@main.command()
@click.argument("file", type=_FILE)
def report(file: Path) -> None:
    """Render FILE, which `run --into` has made, as docs/benchmarks.md with its charts."""
    _render(file)


def _render(file: Path) -> None:
    where = file.resolve()
    source = where.relative_to(ROOT) if where.is_relative_to(ROOT) else where.name
    render(_read(file), str(source)).write(DOCS)


@main.command()
@click.argument("old", type=_FILE)
@click.argument("new", type=_FILE)
def check(old: Path, new: Path) -> None:
    """Compare the ratios in NEW with those in OLD; exit status 1 if one of them got worse by more than is tolerated."""
    found = compare(_read(old), _read(new))
    for loss in found.losses:
        click.echo(loss)
    click.echo(f"{found.compared} ratios compared, {len(found.losses)} got worse.")
    if found.left_out:
        click.echo(f"In one of the files only: {', '.join(found.left_out)}.")
    if not found.compared:
        raise click.ClickException("the files have no ratio in common, so that nothing is known")
    if found.losses:
        sys.exit(1)


@main.command()
@click.option("--runs", type=click.IntRange(min=1), help="How often, instead of what suits it.")
@click.option("--into", type=_FILE, help="Keep every sample in this file.")
@click.pass_context
def phases(context: click.Context, runs: int | None, into: Path | None) -> None:
    """Tell where the time of a cold run on two nodes goes: the same as `run phases`."""
    context.invoke(run, names=("phases",), runs=runs, into=into, peer=False)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks")
