"""`docs/benchmarks.md` and its charts, rendered from a file of results and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .catalogue import BENCHMARKS, SECTIONS
from .charts import Group, bars
from .figures import Figure, Sample, number
from .results import Measured, Results
from .words import PARTIES, REASONS

CHARTS = "charts"
_FACTS = {
    "processor": "processor",
    "cpus": "CPUs that may be used",
    "memory_gib": "memory (GiB)",
    "load": "load average when it began",
    "system": "system",
    "slurm": "Slurm",
    "ray": "Ray",
    "dagster": "Dagster",
    "dagster-slurm": "dagster-slurm",
    "dagster-rayslurm": "dagster-rayslurm",
    "python": "Python",
    "revision": "revision",
}


@dataclass(frozen=True)
class Chart:
    """A chart of some figures.

    Attributes:
        file: its name.
        title: above it.
        figures: names of the figures, each of which is a group.
        notes: whether a figure's notes are the bars, instead of the parties.
    """

    file: str
    title: str
    figures: tuple[str, ...]
    notes: bool = False


def _each(name: str, variants: Sequence[str]) -> tuple[str, ...]:
    return tuple(map(name.format, variants))


_NODES, _STEPS = ("1 node", "2 nodes", "4 nodes"), ("1 step", "10 steps", "50 steps")
DRAWN = {
    "cold": (
        Chart("cold.svg", "Ray from nothing: run() to the payload's first line", _each("cold, {}: to the first line", _NODES)),
        Chart("end.svg", "The payload's exit to the return of run()", _each("cold, {}: payload's exit to the return", _NODES)),
        Chart("calls.svg", "Calls of slurmctld for one run", _each("cold, {}: calls of slurmctld", _NODES)),
    ),
    "phases": (Chart("phases.svg", "A cold run on two nodes, phase by phase", ("phases: run() to the first line",), notes=True),),
    "session.warm": (Chart("warm.svg", "A warm Ray step: all but its work", ("session.warm: total - payload's work",)),),
    "slurm.bash": (Chart("bash.svg", "A job without Ray: all but its work", ("slurm.bash: total - payload's work",)),),
    "slurm.stdout": (Chart("stdout.svg", "Lines from a compute node into the step's output", ("slurm.stdout",)),),
    "slurm.messages": (
        Chart("messages.svg", "Pipes messages into the event log", ("slurm.messages",)),
        Chart("latency.svg", "A message to the event log, at 40/s", ("slurm.messages: to the event log, at 40/s",)),
    ),
    "load": (
        Chart("cpu.svg", "CPU time of the Dagster process", _each("load, {}: CPU", _STEPS)),
        Chart("memory.svg", "Memory of the Dagster process", _each("load, {}: memory", _STEPS)),
    ),
}
"""Charts by benchmark."""


@dataclass(frozen=True)
class Report:
    """A page, and its charts by file name."""

    page: str
    charts: dict[str, str]

    def write(self, directory: Path) -> None:
        """Put it into a directory; charts of an older report that this one lacks are removed."""
        charts = directory / CHARTS
        charts.mkdir(parents=True, exist_ok=True)
        for old in charts.glob("*.svg"):
            old.unlink()
        for name, chart in self.charts.items():
            (charts / name).write_text(chart, encoding="utf-8")
        (directory / "benchmarks.md").write_text(self.page, encoding="utf-8")


def render(results: Results, source: str) -> Report:
    """The report of some results.

    Args:
        results: what was measured.
        source: the file that holds them, as the page names it.
    """
    by_name = {each.benchmark: each for each in results.measured}
    charts: dict[str, str] = {}
    page = [_opening(results, source), _missed(results)]
    for section in SECTIONS:
        here = [by_name[name] for name, benchmark in BENCHMARKS.items() if benchmark.section == section and name in by_name]
        if here:
            page.append(f"## {section}\n")
        for measured in here:
            drawn = _drawn(measured)
            charts.update({chart.file: picture for chart, picture in drawn})
            page.append(f"**`{measured.benchmark}`**: {BENCHMARKS[measured.benchmark].about}\n")
            page += [f"![{chart.title}]({CHARTS}/{chart.file})\n" for chart, _ in drawn]
            page.append(_table(measured.figures))
    page.append(_machine(results))
    return Report("\n".join(page), charts)


def _opening(results: Results, source: str) -> str:
    figures = results.figures
    promised = [figure for figure in figures if figure.bar is not None]
    met = sum(figure.met for figure in promised)
    took = sum(each.seconds for each in results.measured) / 60
    runs = "one call" if len(results.parts) == 1 else f"{len(results.parts)} calls"
    parties = "\n".join(f"- **{name}**: {what}" for name, what in PARTIES.items())
    return f"""# Benchmarks

`python -m benchmarks report` rendered this page from the file `{source}`, which contains every
measured value. `make bench` runs the benchmarks again, writes the values to a new file, and renders this page
from the new file. `python -m benchmarks check OLD NEW` compares two files of measured values, and lists each ratio that got worse
by more than its tolerance.

All competitors ran on one machine, one after the other. The four nodes of the Slurm cluster are containers that share the CPUs of
this machine. The machine is small and was under load. On another machine, the times differ, but the **ratios** between
competitors should be similar. All benchmarks together took {took:.0f} minutes, in {runs} of `python -m benchmarks run`.

If a value was measured several times, the tables show the median, and in parentheses the smallest and the largest value. The
column "Ratio" shows the quotient of two values: the first value in the column "This project", divided by the value in the column
"By hand". The column "Promised" names the limit that this project promises to keep. If the limit ends with an "x", the limit
applies to the ratio. A limit without an "x" applies to the bold value in the column "This project", or to the first value if no
value is bold. On this page, {met} of {len(promised)} promises were met.

In the benchmarks that run Ray on Slurm, each competitor had 2 CPUs and 2,500 MB of memory on each node, and ran Ray without its
dashboard. By default, dagster-rayslurm starts Ray's dashboard, and needs one or two seconds for this start.
`RayLauncher(dashboard=False)` turns Ray's dashboard off. These are the competitors:

{parties}
"""


def _missed(results: Results) -> str:
    missed = [figure for figure in results.figures if not figure.met]
    if not missed:
        return ""
    return "## What was not met\n\n" + "\n".join(f"- {_why(figure)}" for figure in missed) + "\n"


def _why(figure: Figure) -> str:
    found = f"**{figure.name}**: {figure.problem or f'{figure.result}, promised {_bar(figure)}'}"
    reason = next((why for name, why in REASONS.items() if figure.name.startswith(name)), "")
    return f"{found}. {reason or f'We do not know yet why the benchmark `{figure.name}` misses its promise.'}"


def _bar(figure: Figure) -> str:
    if figure.bar is None:
        return ""
    return f"{'≥' if figure.at_least else '≤'} {number(figure.bar)} {figure.result.unit}".rstrip()


def _table(figures: Sequence[Figure]) -> str:
    lines = [
        "| Figure | This project | By hand | Others | Ratio | Promised | Met |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for figure in figures:
        ours = _cell(figure.ours)
        if figure.result != figure.ours and figure.result.unit != "x":
            ours += f"<br>**{figure.result}** {figure.result.label}"
        met = "" if figure.bar is None and figure.met else "yes" if figure.met else "**no**"
        cells = [
            figure.name,
            "<br>".join([ours, *map(_cell, figure.also)]),
            _cell(figure.by_hand) if figure.by_hand else "",
            "<br>".join(map(_cell, figure.others)),
            number(figure.ratio) if figure.ratio is not None else "",
            _bar(figure),
            met,
        ]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(sample: Sample) -> str:
    return f"{sample} {sample.label}"


def _drawn(measured: Measured) -> list[tuple[Chart, str]]:
    by_name = {figure.name: figure for figure in measured.figures}
    drawn = []
    for chart in DRAWN.get(measured.benchmark, ()):
        figures = [by_name[name] for name in chart.figures if name in by_name]
        groups = [_group(figure, chart, len(figures) > 1) for figure in figures]
        if groups:
            drawn.append((chart, bars(chart.title, groups, parties=not chart.notes)))
    return drawn


def _group(figure: Figure, chart: Chart, named: bool) -> Group:
    samples = figure.also if chart.notes else (figure.ours, *((figure.by_hand,) if figure.by_hand else ()), *figure.others)
    heading = figure.name.partition(":")[0].rpartition(", ")[2] if named else ""
    return Group(heading, samples)


def _machine(results: Results) -> str:
    lines = ["## The machine and the versions\n", "| | " + " | ".join(part.begun for part in results.parts) + " |"]
    lines.append("| --- |" + " --- |" * len(results.parts))
    for fact, name in _FACTS.items():
        told = [str(part.machine.get(fact) or "") for part in results.parts]
        if any(told):
            lines.append(f"| {name} | " + " | ".join(told) + " |")
    measured = [", ".join(f"{each.benchmark} ({each.seconds:.0f} s)" for each in part.measured) for part in results.parts]
    lines.append("| measured | " + " | ".join(measured) + " |")
    return "\n".join(lines) + "\n"
