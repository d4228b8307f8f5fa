"""`rayslurm ps`, `show`, `logs` and `cancel`: runs, sessions and jobs, whichever process started them."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import click

from ..backends.base import Layout, write_cancel_request
from ..backends.listing import Entry, Kind, find, list_all, list_runs_here
from ..backends.sessions.listing import end_generations
from ..edge import files as edge_files
from ..execution.terminal import TerminalPipes, exit_code
from ..follow import Cadence, Evidence, Follower, follow_all
from ..outcome import judge
from ..plan import nonce_of
from ..runtime.protocol.record import COMPONENTS, JOURNAL, LineReader, Record, component_dir
from ..slurm.shared_queue import fetch_queue
from ..slurm.states import TERMINAL
from ..slurm.submit import wait_until_gone
from ..ssh.local import LocalConnection
from .cluster import all_cluster_options, cluster_options, find_cluster
from .common import duration, json_option, one_sentence_errors, print_json, print_table, print_values
from .submit import terminal_log

_COLUMNS = ("name", "kind", "state", "job", "node", "since", "says")
_CADENCE = Cadence(busy=0.2, idle=2.0, waiting=5.0)
_CHUNK = 1024 * 1024
_ASK_INTERVAL = 15.0  # Seconds between two looks into the queue while a record is silent.
_END_TIMEOUT = 45.0  # Seconds in which a cancelled run ends; then its job is cancelled.

ident_argument = click.argument("ident", metavar="NAME")


def entries() -> list[Entry]:
    """All runs, sessions and jobs of the cluster that is configured, and the runs of the local mode."""
    cluster, layout = find_cluster(), click.get_current_context().find_root().obj
    base = str(layout.base) if isinstance(layout, Layout) else cluster.resource.local_base if cluster else ""
    found = list_runs_here(base)
    if cluster is None:
        return found
    if isinstance(cluster.connection, LocalConnection) and os.path.realpath(cluster.base) == os.path.realpath(base):
        return list_all(cluster.connection, cluster.base)
    return [*found, *list_all(cluster.connection, cluster.base)]


def entry(ident: str) -> Entry:
    """The run, session or job that a name means."""
    return find(ident, entries())


@click.command()
@click.option("--all", "-a", "everything", is_flag=True, help="Also what has ended and still has a directory.")
@click.option("--here", is_flag=True, help="Only the runs of this machine.")
@json_option
@all_cluster_options
@click.pass_obj
def ps(layout: Layout, everything: bool, here: bool, as_json: bool) -> None:
    """List runs, sessions and jobs: those of the cluster if one is configured, and the runs of the local mode."""
    with one_sentence_errors():
        found = list_runs_here(str(layout.base)) if here else entries()
    shown = [each for each in found if everything or not each.over]
    if as_json:
        for each in shown:
            print_json(each.row())
        return
    print_table(map(_cells, shown), *_COLUMNS)
    if hidden := len(found) - len(shown):
        click.echo(f"{hidden} more have ended; `rayslurm ps --all` lists them", err=True)


def _cells(entry: Entry) -> list[str]:
    state = str(entry.state) + (f" ({entry.exit_code})" if entry.exit_code is not None else "")
    since = duration(time.time() - entry.at) if entry.at else ""
    return [entry.name, entry.kind.value, state, entry.job_id or "", entry.node or "", since, entry.says]


@click.command()
@ident_argument
@json_option
@cluster_options
def show(ident: str, as_json: bool) -> None:
    """Show a run, session or job; of a run with --json its phases and its end, one object per line.

    NAME is a run's or session's name or how it begins, a job id, a cluster id, or the step of which the newest run is meant.
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
            records = list(read_journal(one)) if one.kind == Kind.RUN else []
            values = {**one.row(), **_facts(records)}
    if as_json and one.kind == Kind.RUN:
        for record in records:
            print_json(record)
    elif as_json:
        print_json(values)
    else:
        print_values({**values, "at": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(values["at"])) if values["at"] else None})


def read_journal(run: Entry) -> Iterator[Record]:
    """The records of a run's journal. Raises OSError."""
    if run.connection.modified(f"{run.directory}/{JOURNAL}") is None:
        raise OSError(f"{run.connection.place}: {run.directory}/{JOURNAL} cannot be read: No such file or directory")
    reader = LineReader()
    while data := run.connection.read(f"{run.directory}/{JOURNAL}", reader.next_read, _CHUNK):
        yield from reader.feed(data)


def _facts(records: Sequence[Record]) -> dict[str, Any]:
    """What people want to know of a run's record."""
    facts: dict[str, Any] = {}
    for record in records:
        kind = record["type"]
        if kind == "phase":
            at = time.strftime("%H:%M:%S", time.localtime(record["at"]))
            facts.setdefault("phases", []).append(f"{at} {record['phase']}: {record['message']}")
        context = record.get("context") if kind in ("context", "end") else None
        for name in ("ray_version", "ray_address", "dashboard_url", "python_version"):
            if context and context.get(name):
                facts[name] = context[name]
        if context and context.get("nodes"):
            facts["nodes"] = [each["hostname"] for each in context["nodes"]]
        if kind == "end":
            facts["end"] = record["reason"] + (f": {record['message']}" if record.get("message") else "")
            facts |= {name: record[name] for name in ("exit_code", "signal") if record.get(name) is not None}
            facts |= {name: (record.get("usage") or {}).get(name) for name in ("elapsed", "cpu_seconds", "peak_memory")}
    return facts


# ---- Logs


@click.command()
@ident_argument
@click.option("--follow", "-f", is_flag=True, help="Go on until the run ends, and exit with its exit code.")
@cluster_options
def logs(ident: str, follow: bool) -> None:
    """Print the output of a run. With -f Ctrl-C ends only this command, and the exit code is that of `submit`."""
    log = terminal_log(quiet=not follow)
    try:
        with one_sentence_errors():
            run = entry(ident)
            if run.kind != Kind.RUN:
                raise ValueError(
                    f"{run.name} is a {run.kind}, and only runs have output; `rayslurm show {run.name}` shows its runs"
                )
            followed = [_follower(run, component, log) for component in _components(run)]
            if not follow:
                for each in followed:
                    while each.read_once():
                        pass
                    each.finish()
                return
            follow_all([(each, partial(_runtime_exit, _Job(run))) for each in followed])
    except KeyboardInterrupt:
        click.echo(f"\n[rayslurm] {run.name} goes on", err=True)
        sys.exit(130)
    for each in followed:
        verdict = judge(each.evidence, uses_pipes=False, require_messages=False)
        if verdict.kind is not None:
            click.echo(f"Error: {verdict.sentence}", err=True)
    sys.exit(next(filter(None, (exit_code(each.evidence.end) for each in followed)), 0))


def _components(run: Entry) -> list[str | None]:
    """The components of a run, each with a record of its own; or None for the run itself."""
    try:
        return [*sorted(run.connection.call(edge_files.names, f"{run.directory}/{COMPONENTS}", repeat=True))] or [None]
    except FileNotFoundError:
        return [None]


def _follower(run: Entry, component: str | None, log: logging.Logger) -> Follower:
    directory = run.directory if component is None else component_dir(run.directory, component)
    return Follower(run.connection, directory, nonce_of(run.name), TerminalPipes(log), log, _CADENCE, component=component)


class _Job:
    """Whether the job or process of a run is still there, asked for now and then."""

    def __init__(self, run: Entry) -> None:
        self._run, self._asked_at = run, time.monotonic()
        self._over = "it has ended" if run.over else None

    def exit(self) -> str | None:
        """How the runtime has ended, in words; None while it lives."""
        if self._over is None and time.monotonic() - self._asked_at > _ASK_INTERVAL:
            self._asked_at = time.monotonic()
            self._over = self._look()
        return self._over

    def _look(self) -> str | None:
        run = self._run
        if run.job_id is None:
            base = os.path.dirname(os.path.dirname(run.directory))
            now = next((each for each in list_runs_here(base) if each.name == run.name), None)
            return "its process is gone" if now is None or now.over else None
        row = fetch_queue(run.connection).job(int(run.job_id))
        if row is None:
            return "Slurm no longer knows the job"
        return f"Slurm calls the job {row.state}" if row.state in TERMINAL else None


def _runtime_exit(job: _Job, evidence: Evidence) -> str | None:  # noqa: ARG001
    try:
        return job.exit()
    except OSError:  # A lost link says nothing about the job; the follower reports it.
        return None


# ---- Cancel


@click.command()
@ident_argument
@click.option("--now", is_flag=True, help="Leave the payload no grace period.")
@json_option
@cluster_options
def cancel(ident: str, now: bool, as_json: bool) -> None:
    """End a run, session or job, and wait until the end is confirmed."""
    with one_sentence_errors():
        one = entry(ident)
        if one.over:
            raise ValueError(f"{one.name} has ended already")
        _end(one, now)
    if as_json:
        return print_json({**one.row(), "state": "ended"})
    click.echo(f"ended the {one.kind} {one.name}" + (f", Slurm job {one.job_id}" if one.job_id else ""))


def _end(one: Entry, now: bool) -> None:
    """End an entry. Raises StartError or OSError if its end is not confirmed."""
    if one.kind == Kind.SESSION:
        assert one.generation is not None
        end_generations(one.connection, [one.generation])
        return
    if one.kind == Kind.RUN:
        write_cancel_request(one.connection, one.directory, now)
        # A run that waits has no runtime that would read the request. One in a session shares its job with others.
        if one.state != "pending" and _ends(one, _END_TIMEOUT):
            return
        if one.job_id is None or not one.connection.read(f"{one.directory}/job_id", 0, 64):
            raise OSError(f"{one.connection.place}: {one.name} was asked to end and has not within {_END_TIMEOUT:g} s")
    number = (one.job_id or "").partition("_")[0]
    if not wait_until_gone(one.connection, int(number)):
        raise OSError(f"Slurm does not confirm the end of job {one.job_id}; run `scancel {one.job_id}` on {one.connection.place}")


def _ends(run: Entry, timeout: float) -> bool:
    """Whether all records of a run get their `end` in time."""
    records = [_EndOfRecord(run, component) for component in _components(run)]
    deadline = time.monotonic() + timeout
    while not all(each.seen() for each in records):
        if time.monotonic() > deadline:
            return False
        time.sleep(_CADENCE.busy)
    return True


class _EndOfRecord:
    """Looks for the `end` of one record."""

    def __init__(self, run: Entry, component: str | None) -> None:
        directory = run.directory if component is None else component_dir(run.directory, component)
        self._connection, self._path = run.connection, f"{directory}/{JOURNAL}"
        self._reader, self._seen = LineReader(), False

    def seen(self) -> bool:
        """Whether the record has ended."""
        while not self._seen and (data := self._connection.read(self._path, self._reader.next_read, _CHUNK)):
            self._seen = any(record.get("type") == "end" for record in self._reader.feed(data))
        return self._seen
