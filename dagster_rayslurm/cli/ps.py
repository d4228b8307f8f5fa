"""`rayslurm ps` lists runs, sessions and jobs that any process started; `rayslurm show` describes a run, session or job."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import click

from ..backends.layout import Layout
from ..backends.listing import Entry, Kind, find, list_all, list_here, named
from ..runtime.protocol.record import JOURNAL, LineReader, Record, component_dir
from ..ssh.local import LocalConnection
from .cluster import NO_CLUSTER, find_cluster
from .common import duration, json_option, one_sentence_errors, print_json, print_table, print_values
from .options import all_cluster_options, cluster_options

_COLUMNS = ("name", "kind", "state", "job", "node", "since", "says")
_CHUNK = 1024 * 1024
# Functions that turn values of `show` into text, by the name of the value.
_TEXTS: Mapping[str, Callable[[float], str]] = {
    "at": lambda at: time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at)),
    "elapsed": "{:.1f} s".format,
    "cpu_seconds": "{:.1f}".format,
    "peak_memory": lambda size: f"{size / 2**20:.0f} MiB",
}

ident_argument = click.argument("ident", metavar="NAME")


def entries(ident: str = "") -> list[Entry]:
    """Returns runs and sessions of the local mode, and runs, sessions and jobs of the cluster if a cluster is configured.

    `ident` is the name that the caller will look for in the result; "" for no name. The result has all entries in any case.
    Raises ClickException if `ident` is not "", no cluster is configured, and nothing on this machine has this name.
    """
    cluster, layout = find_cluster(), click.get_current_context().find_root().obj
    base = str(layout.base)
    found = list_here(base)
    if cluster is None:
        if ident and not named(ident.partition("/")[0], found):
            listed = "`rayslurm ps --all` lists what is there"
            raise click.ClickException(f"nothing on this machine is called {ident!r} ({listed}), and {NO_CLUSTER}")
        return found
    if isinstance(cluster.connection, LocalConnection) and os.path.realpath(cluster.base) == os.path.realpath(base):
        found = [each for each in found if each.kind == Kind.SESSION]
    return [*found, *list_all(cluster.connection, cluster.base)]


def entry(ident: str) -> Entry:
    """Returns the run, session or job with the name or id `ident`; raises ValueError if none, or more than one, matches."""
    return find(ident, entries(ident))


@click.command()
@click.option(
    "--all",
    "-a",
    "everything",
    is_flag=True,
    help="Also list runs and sessions that have ended, as long as their directories exist.",
)
@click.option("--here", is_flag=True, help="Only the runs of this machine.")
@json_option
@all_cluster_options
@click.pass_obj
def ps(layout: Layout, everything: bool, here: bool, as_json: bool) -> None:
    """List the runs and sessions of this machine, and the runs, sessions and jobs of the cluster if a cluster is configured.

    The list leaves out what has ended, unless --all is given.
    """
    with one_sentence_errors():
        found = list_here(str(layout.base)) if here else entries()
    shown = [each for each in found if everything or not each.over]
    if as_json:
        for each in shown:
            print_json(each.row())
        return
    print_table(map(_cells, shown), *_COLUMNS)
    if hidden := len(found) - len(shown):
        click.echo(f"{hidden} more have ended; `rayslurm ps --all` lists them", err=True)
    if not shown and not here and find_cluster() is None:
        click.echo(f"Only this machine was searched: {NO_CLUSTER}", err=True)


def _cells(entry: Entry) -> list[str]:
    """Returns the cells of an entry's row in the table, in the order of `_COLUMNS`."""
    state = str(entry.state) + (f" ({entry.exit_code})" if entry.exit_code is not None else "")
    since = duration(time.time() - entry.at) if entry.at else ""
    return [entry.name, entry.kind.value, state, entry.job_id or "", entry.node or "", since, entry.says]


@click.command()
@ident_argument
@json_option
@cluster_options
def show(ident: str, as_json: bool) -> None:
    """Show one run, session or job.

    NAME is the name of a run or session, the beginning of such a name, a job id, a cluster id, or a step. A step stands for its
    only run that has not ended, or else for its newest run. For a run, --json prints the records of the run's journal, one
    object per line. If each component of the run has a payload of its own, each record names its component. A run with job arrays
    has no journal, so --json prints one object.
    """
    with one_sentence_errors():
        one = entry(ident)
        if one.kind == Kind.SESSION:
            from .session import Session

            assert one.generation is not None
            described = Session(one.connection, one.generation, {**one.row(), "reason": None})
            described.refresh()
            values = {**described.description, **described.row}
        else:
            names = components_of(one) if one.kind == Kind.RUN and not one.has_arrays else []
            journals = {name: list(read_journal(one, name)) for name in names}
            values = one.row()
            for name, records in journals.items():
                values |= {key if name is None else f"{key} ({name})": value for key, value in _facts(records).items()}
    if as_json and one.kind == Kind.RUN and not one.has_arrays:
        for name, records in journals.items():
            for record in records:
                print_json(record if name is None else {"component": name, **record})
    elif as_json:
        print_json(values)
    else:
        print_values({name: _text(name, value) for name, value in values.items()})


def _text(name: str, value: Any) -> Any:
    """Returns a value that `show` prints, as text if `_TEXTS` has a function for it; `name` may end with " (COMPONENT)"."""
    text = _TEXTS.get(name.partition(" ")[0])
    return text(value) if text and value else value


def refuse_arrays(run: Entry) -> None:
    """Raise ValueError if a run has job arrays, because each of its elements has a payload and a record of its own."""
    if run.has_arrays:
        raise ValueError(f"a run with job arrays has a payload for each element; their files are in {run.directory}/array-*/*")


def components_of(run: Entry) -> list[str | None]:
    """Returns the names of a run's components; [None] for a run without components. Each component has a journal of its own."""
    return [*run.components] or [None]


def record_dir(run: Entry, component: str | None) -> str:
    """Returns the directory with the record of a run, or of the component `component` of a run."""
    return run.directory if component is None else component_dir(run.directory, component)


def read_journal(run: Entry, component: str | None) -> Iterator[Record]:
    """Yields the records of the journal, the file of the runtime's events, of a run or of the component `component` of a run.

    Raises OSError if the journal cannot be read.
    """
    path = f"{record_dir(run, component)}/{JOURNAL}"
    if run.connection.modified(path) is None:
        raise OSError(f"{run.connection.place}: {path} cannot be read: No such file or directory")
    reader = LineReader()
    while data := run.connection.read(path, reader.next_read, _CHUNK):
        yield from reader.feed(data)


def _facts(records: Sequence[Record]) -> dict[str, Any]:
    """Returns values from the `records` of a run's journal, by name, for `show` to print: phases, versions, nodes, end, usage."""
    facts: dict[str, Any] = {}
    for record in records:
        kind = record["type"]
        if kind == "phase":
            at = time.strftime("%H:%M:%S", time.localtime(record["at"]))
            facts.setdefault("phases", []).append(f"{at} {record['phase']}: {record['message']}")
        context = record.get("context") if kind in ("context", "end") else None
        for name in ("ray_version", "ray_address", "python_version"):
            if context and context.get(name):
                facts[name] = context[name]
        if context and context.get("nodes"):
            facts["nodes"] = [each["hostname"] for each in context["nodes"]]
        if kind == "end":
            facts["end"] = record["reason"] + (f": {record['message']}" if record.get("message") else "")
            facts |= {name: record[name] for name in ("exit_code", "signal") if record.get(name) is not None}
            facts |= {name: (record.get("usage") or {}).get(name) for name in ("elapsed", "cpu_seconds", "peak_memory")}
    return facts
