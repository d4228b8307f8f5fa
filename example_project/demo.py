"""`python -m example_project.demo`: materialize the whole study here, with progress, and show what came of it.

With names of assets, as in `python -m example_project.demo digits_raw digits_features`, it materializes only those.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dagster as dg
from dagster._core.execution.plan.objects import ErrorSource
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dagster_rayslurm import SessionConfig

from .definitions import DIGITS, STUDY, compute_from_env, digit_prototypes, hetero_from_env, recall_of_every_digit

IDLE_TIMEOUT = 120
"""Seconds after which the warm Ray cluster ends itself, should this program be killed before it can do so."""

CHECK = "digit_classifier_recall_of_every_digit"
"""The step of the check that runs a payload of its own."""
PROTOTYPES = "digit_prototypes"


@dataclass
class Row:
    """What is known of one asset."""

    state: str = "waiting"
    since: float = 0.0
    spent: float = 0.0
    says: str = ""
    checks: list[str] = field(default_factory=list)
    pictures: list[str] = field(default_factory=list)

    @property
    def elapsed(self) -> float:
        """Seconds at work so far, over all partitions."""
        return self.spent + (time.monotonic() - self.since if self.state == "running" else 0.0)


class Progress(logging.Handler):
    """Turns Dagster's events into rows; on a terminal they are one live table, elsewhere plain lines."""

    def __init__(self, console: Console, names: list[str]) -> None:
        super().__init__()
        self.console = console
        self.rows = {name: Row() for name in names}
        self.clusters: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Take one record of Dagster's log."""
        meta: dict[str, Any] = getattr(record, "dagster_meta", {})
        event = meta.get("dagster_event")
        row = self.rows.get(str(meta.get("step_key")))
        if row is None:
            return
        if event is None:
            if record.levelno >= logging.INFO:
                self._say(row, str(meta.get("orig_message")))
        elif event.is_step_start and row.state != "running":
            row.state, row.since = "running", time.monotonic()
            self._print(row)
        elif event.is_step_materialization:
            self._take_metadata(row, event.materialization.metadata)
        elif event.event_type == dg.DagsterEventType.ASSET_CHECK_EVALUATION:
            evaluation = event.asset_check_evaluation_data
            row.checks.append(f"{evaluation.check_name} {'passed' if evaluation.passed else 'FAILED'}")
        elif event.is_step_success or event.is_step_failure:
            row.spent = row.elapsed
            row.state = "done" if event.is_step_success else "failed"
            self._print(row)

    def _take_metadata(self, row: Row, metadata: dict[str, Any]) -> None:
        row.pictures += [str(value.value) for name, value in metadata.items() if name.endswith(".png")]
        if "Ray cluster ID" in metadata:
            self.clusters.add(str(metadata["Ray cluster ID"].value))
        if "summary" in metadata:
            row.says = str(metadata["summary"].value)

    def _say(self, row: Row, message: str) -> None:
        if not message.startswith("[pipes]"):
            row.says = message.removeprefix("[rayslurm] ")
            self._print(row)

    def _print(self, row: Row) -> None:
        if not self.console.is_terminal:
            name = next(name for name, each in self.rows.items() if each is row)
            self.console.print(f"{name}: {row.state}  {row.says}", markup=False, highlight=False, soft_wrap=True)

    def __rich__(self) -> Table:
        """The live table."""
        marks = {"waiting": "[dim]·", "running": "[yellow]▶", "done": "[green]✓", "failed": "[red]✗"}
        table = Table(box=None, show_header=False, padding=(0, 1))
        for name, row in self.rows.items():
            shown = "" if row.state == "waiting" else f"{row.elapsed:5.1f} s"
            table.add_row(marks[row.state], name, shown, Text(row.says, style="dim", overflow="ellipsis", no_wrap=True))
        return table


@contextlib.contextmanager
def own_screen() -> Iterator[tuple[Console, Path]]:
    """A console on the real terminal, while all else that is printed goes into a log file."""
    log = Path(tempfile.mkdtemp(prefix="rayslurm-demo-")) / "demo.log"
    saved = os.dup(1), os.dup(2)
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    screen = os.fdopen(os.dup(1), "w", encoding="utf-8")
    try:
        os.dup2(target, 1)
        os.dup2(target, 2)
        yield Console(file=screen, soft_wrap=False), log
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        screen.close()
        for fd, back in zip((1, 2), saved, strict=True):
            os.dup2(back, fd)
            os.close(back)
        os.close(target)


@contextlib.contextmanager
def open_instance() -> Iterator[dg.DagsterInstance]:
    """The instance of DAGSTER_HOME, where `dagster dev` shows the same runs; without it one that is thrown away."""
    home = os.environ.get("DAGSTER_HOME")
    if home:
        settings = Path(home) / "dagster.yaml"
        settings.parent.mkdir(parents=True, exist_ok=True)
        if not settings.exists():
            settings.write_text("telemetry:\n  enabled: false\n")
    with dg.DagsterInstance.get() if home else dg.DagsterInstance.ephemeral() as instance:
        yield instance


def run(progress: Progress, instance: dg.DagsterInstance, chosen: list[str]) -> dg.ExecuteInProcessResult:
    """Materialize the chosen assets, one partition of the prototypes after the other; the first failure ends it."""
    compute = compute_from_env(SessionConfig(name="demo", idle_timeout=IDLE_TIMEOUT))

    def logger(_: dg.InitLoggerContext) -> logging.Logger:
        made = logging.Logger("demo")
        made.addHandler(progress)
        return made

    defs = dg.Definitions(
        assets=[*STUDY, digit_prototypes],
        asset_checks=[recall_of_every_digit],
        jobs=[
            dg.define_asset_job("demo", dg.AssetSelection.assets(*STUDY)),
            dg.define_asset_job("demo_prototypes", [digit_prototypes]),
        ],
        resources={"compute": compute, "hetero": hetero_from_env()},
        loggers={"progress": dg.logger(logger)},
    )
    config: dict[str, Any] = {"loggers": {"progress": {}}}
    study = [dg.AssetKey(name) for name in chosen if name != PROTOTYPES]
    try:
        demo = defs.resolve_job_def("demo")
        result = demo.execute_in_process(config, instance, raise_on_error=False, asset_selection=study)
        prototypes = defs.resolve_job_def("demo_prototypes")
        for digit in DIGITS if PROTOTYPES in chosen else ():
            if result.success:
                result = prototypes.execute_in_process(config, instance, partition_key=digit, raise_on_error=False)
        if result.success and PROTOTYPES in chosen:
            progress.rows[PROTOTYPES].says = f"{len(DIGITS)} partitions, one for each digit"
        return result
    finally:
        for cluster_id in progress.clusters:
            compute.cleanup_cluster(cluster_id)


def summary(progress: Progress) -> Table:
    """The table at the end: assets, key figures and pictures."""
    table = Table("asset", "time", "result", "checks", title="The study", title_justify="left")
    for name, row in progress.rows.items():
        table.add_row(name, f"{row.elapsed:.1f} s", row.says, "\n".join(row.checks))
    return table


def failure_of(result: dg.ExecuteInProcessResult) -> str:
    """One sentence for what failed, and where to look."""
    for event in result.all_events:
        if event.is_step_failure:
            data = event.step_failure_data
            error = data.error.message.strip() if data.error else "no reason was given"
            reason = data.user_failure_data.description if data.user_failure_data else error
            metadata = data.user_failure_data.metadata if data.user_failure_data else {}
            where = f" (run directory: {metadata['Run directory'].value})" if "Run directory" in metadata else ""
            return f"{event.step_key} failed: {reason}{where}"
    return "the run failed before any asset did"


def main() -> int:
    """Run the demo.

    Returns:
        The exit code: 0, 1 after a failure, 130 after Ctrl-C.
    """
    started = time.monotonic()
    names = [*(asset.key.to_user_string() for asset in STUDY), PROTOTYPES]
    parser = argparse.ArgumentParser(description="Materialize the example study.")
    parser.add_argument("assets", nargs="*", help=f"those of {', '.join(names)}; all of them if none is named")
    chosen = parser.parse_args().assets or names
    if unknown := [name for name in chosen if name not in names]:
        parser.error(f"there is no asset {unknown[0]}")
    with own_screen() as (console, log), open_instance() as instance:
        shown = {*chosen, *([CHECK] if "digit_classifier" in chosen else [])}
        progress = Progress(console, [name for name in (*names[:-1], CHECK, PROTOTYPES) if name in shown])
        console.print("Materializing the example study; the first Ray step brings up a cluster that the others find warm.")
        # What payloads print belongs into the log, which is where the redirected descriptors lead.
        live = Live(progress, console=console, refresh_per_second=8, redirect_stdout=False, redirect_stderr=False)
        try:
            with live if console.is_terminal else contextlib.nullcontext():
                result = run(progress, instance, chosen)
            failures = [event.step_failure_data for event in result.all_events if event.is_step_failure]
            interrupted = any(failure.error_source == ErrorSource.INTERRUPT for failure in failures)
        except (KeyboardInterrupt, dg.DagsterExecutionInterruptedError):
            interrupted = True
        if interrupted:
            console.print("Interrupted; nothing is left running.")
            return 128 + signal.SIGINT
        if not result.success:
            console.print(failure_of(result), markup=False, highlight=False, soft_wrap=True)
            console.print(f"Everything that was printed is in {log}", highlight=False, soft_wrap=True)
            return 1
        console.print(summary(progress))
        for row in progress.rows.values():
            for picture in row.pictures:
                console.print(picture, markup=False, highlight=False, soft_wrap=True)
        console.print(f"\nDone in {time.monotonic() - started:.0f} s.", highlight=False)
        shutil.rmtree(log.parent)  # It is for failures.
    return 0


if __name__ == "__main__":
    sys.exit(main())
