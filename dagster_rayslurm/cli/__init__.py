"""The `rayslurm` command: shows run directories and sessions, ends sessions, and checks the edge node; starts no payloads."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from .. import __version__
from ..backends.base import Layout
from ..runtime.protocol.record import JOURNAL, STATUS, STDIO, LineReader, Record
from ..ssh.base import Connection
from ..ssh.local import connection_to
from .cluster import all_cluster_options, edge_node
from .common import json_option, one_sentence_errors, print_json, print_table
from .ray import dashboard, job
from .session import session
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
    """Look at the runs of dagster-rayslurm, and at the cluster."""
    context.obj = Layout(Path(base).expanduser())


main.add_command(session)
main.add_command(dashboard)
main.add_command(job)
main.add_command(top)


@main.command()
@json_option
@click.pass_obj
def runs(layout: Layout, as_json: bool) -> None:
    """List the run directories that were kept or are in use."""
    rows = [_summary(path) for path in _by_age(layout)]
    if not as_json:
        since = [time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["at"])) if row["at"] else "" for row in rows]
        cells = ([row["run"], row["state"], at, row["says"]] for row, at in zip(rows, since, strict=True))
        return print_table(cells, "run", "state", "since", "says")
    for row in rows:
        print_json(row)


@main.command()
@click.argument("run")
@click.pass_obj
def show(layout: Layout, run: str) -> None:
    """Print the phases and the end of a run, one JSON object per line."""
    for record in _records(_find(layout, run) / JOURNAL):
        click.echo(json.dumps(record, ensure_ascii=False))


@main.command()
@click.argument("run")
@click.pass_obj
def logs(layout: Layout, run: str) -> None:
    """Print the output of a run's payload."""
    for record in _records(_find(layout, run) / STDIO):
        click.echo(record["d"], nl=False, err=record["s"] == "stderr")


def _find(layout: Layout, run: str) -> Path:
    """The only run directory whose name begins with `run`; an error of the command if there is none, or several."""
    found = [path for path in _by_age(layout) if path.name.startswith(run)]
    if len(found) != 1:
        what = "no run" if not found else f"{len(found)} runs"
        raise click.ClickException(f"{what} in {layout.runs} begins with {run!r}; `rayslurm runs` lists them")
    return found[0]


def _by_age(layout: Layout) -> list[Path]:
    """The run directories, the oldest first. Directories that a cleanup removes meanwhile are left out."""
    found = []
    for path in layout.runs.glob("*"):
        with suppress(FileNotFoundError):
            if path.is_dir():
                found.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(found)]


def _records(path: Path) -> Iterator[Record]:
    reader = LineReader()
    try:
        with path.open("rb") as file:
            while data := file.read(2**20):
                yield from reader.feed(data)
    except OSError as error:
        raise click.ClickException(f"{path} cannot be read: {error.strerror}") from None


def _summary(run_dir: Path) -> dict[str, Any]:
    try:
        status = json.loads((run_dir / STATUS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        status = {}
    state, says = status.get("state", "unknown"), status.get("message", "")
    return {"run": run_dir.name, "state": state, "at": status.get("at"), "says": says}


@main.command()
@all_cluster_options
def check() -> None:
    """Log in to the edge node that the environment names, and ask for its Slurm."""
    with one_sentence_errors():
        ssh = edge_node()
        connection = connection_to(ssh)
        seconds = _seconds(connection)
        click.echo(f"{connection.place}: logged in with {ssh.client if ssh else 'no SSH'} in {seconds:.2f} s")
        click.echo(f"a command takes {1000 * _seconds(connection):.0f} ms")
        click.echo(f"home directory: {connection.home()}")
        click.echo(f"Slurm: {_run(connection, 'sinfo', '--version')}")
        click.echo(f"partitions: {', '.join(_run(connection, 'sinfo', '--noheader', '--format=%P (%D nodes)').splitlines())}")


def _seconds(connection: Connection) -> float:
    """The seconds that a trivial command takes on the edge node; for the first command, with the login."""
    started = time.perf_counter()
    connection.run(["true"])
    return time.perf_counter() - started


def _run(connection: Connection, *command: str) -> str:
    """The output of a command on the edge node; raises `OSError` if it does not exist there, or fails."""
    done = connection.run(command, timeout=60)
    if done.returncode == 127:
        raise OSError(f"{command[0]} is not on the PATH that a non-interactive login has on {connection.place}; add it there")
    if done.returncode:
        raise OSError(f"{' '.join(command)} failed on {connection.place}: {done.stderr.decode('utf-8', 'replace').strip()}")
    return done.stdout.decode("utf-8", "replace").strip()
