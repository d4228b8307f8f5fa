"""`rayslurm session`: the warm sessions of this machine, and of the cluster that the environment names."""

from __future__ import annotations

import json
import os
import posixpath
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import click

from ..backends.run_dir import Layout
from ..backends.sessions import local as local_session
from ..backends.sessions.client import Unreachable
from ..backends.sessions.listing import Generation, ask_session, end_generations, job_of, list_generations, state_of
from ..errors import StartError
from ..runtime.protocol.requests import Operation
from ..slurm.commands import slurm_commands
from ..slurm.pending_reasons import most_informative_row
from ..slurm.queue import fetch_queue
from ..slurm.snapshot import QueueRow
from ..ssh.base import Connection, expand_home, is_rooted
from ..ssh.pool import connection_to
from .edge import edge_node, prefix_option, sentences

_AT_ONCE = 8
"""Sessions that are asked at the same time."""
_OVER = ("ended", "dead")
_SHOWN = ("session", "state", "job", "node", "run", "wait", "served", "idle", "left")


@dataclass(frozen=True)
class Session:
    """A session as it is shown, and what can be done with it.

    Attributes:
        row: what `list` tells of it, by name.
        describe: asks it for more; raises `OSError` or `StartError`.
        end: ends it and sees that confirmed; returns whether there was anything.
    """

    row: dict[str, Any]
    describe: Callable[[], Mapping[str, Any]]
    end: Callable[[], bool]

    def asked(self) -> Session:
        """The session with what it says itself."""
        if self.row["state"] not in ("up", "draining"):
            return self
        try:
            said = self.describe()
        except (OSError, StartError) as error:
            return Session({**self.row, "state": "silent", "reason": str(error)}, self.describe, self.end)
        if not said.get("ok"):
            return Session({**self.row, "state": "ended"}, self.describe, self.end)
        state = "draining" if said.get("draining") else "ready" if said.get("ready") else "starting"
        own = {name: said.get(name) for name in ("running", "waiting", "served", "idle", "time_left")}
        return Session({**self.row, **own, "state": state, "reason": said.get("draining")}, self.describe, self.end)


@click.group()
@prefix_option
@click.option(
    "--remote-base",
    default="~/.dagster_rayslurm",
    show_default=True,
    envvar="RAYSLURM_REMOTE_BASE",
    help="Base directory on the cluster, `remote_base` of the SlurmResource.",
)
@click.pass_context
def session(context: click.Context, prefix: str, remote_base: str) -> None:
    """Look at warm sessions: those of this machine, and of the cluster if the environment names its edge node."""
    context.obj = (context.obj, prefix, remote_base)


@session.command("list")
@click.option("--all", "everything", is_flag=True, help="Also those that have ended and still have a directory.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per session.")
@click.pass_obj
def list_sessions(where: tuple[Layout, str, str], everything: bool, as_json: bool) -> None:
    """List the sessions: what they do, and how long they will last."""
    with sentences():
        found = [each for each in _sessions(*where) if everything or each.row["state"] not in _OVER]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            rows = [each.row for each in pool.map(Session.asked, found)]
    rows = [row for row in rows if everything or row["state"] not in _OVER]
    if as_json:
        for row in rows:
            click.echo(json.dumps(row))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(*_SHOWN)
    for row in rows:
        table.add_row(*(escape(word) for word in _words(row)))
    Console().print(table)


@session.command()
@click.argument("ident", metavar="ID")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def show(where: tuple[Layout, str, str], ident: str, as_json: bool) -> None:
    """Show one session: ID is its cluster id, its job id, or how its name begins."""
    with sentences():
        one = _find(ident, _sessions(*where)).asked()
        said: dict[str, Any] = {}
        if one.row["state"] not in (*_OVER, "pending", "silent"):
            with suppress(Unreachable):  # It is on its way up or down.
                said = {name: value for name, value in one.describe().items() if name != "ok"}
    told = {**said, **one.row}
    if as_json:
        return click.echo(json.dumps(told))
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in told.items():
        if value not in (None, [], {}, ""):
            table.add_row(escape(name.replace("_", " ")), escape(_lines(value)))
    Console().print(table)


@session.command()
@click.argument("ident", metavar="ID")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def stop(where: tuple[Layout, str, str], ident: str, as_json: bool) -> None:
    """End one session with all that it runs, and see that confirmed: ID as for `show`."""
    with sentences():
        one = _find(ident, _sessions(*where), alive=True)
        name = f"{one.row['key']} on {one.row['place']}"
        if not one.end():
            raise click.ClickException(f"the session {name} had ended already")
    if as_json:
        return click.echo(json.dumps({**one.row, "state": "ended"}))
    click.echo(f"ended the session {name}" + (f", Slurm job {one.row['job_id']}" if one.row["job_id"] else ""))


def _sessions(layout: Layout, prefix: str, remote_base: str) -> list[Session]:
    """All sessions that can be seen from here.

    Raises:
        ValueError: the environment names an edge node in a way that cannot be used.
        OSError: the edge node, or Slurm there, does not answer.
    """
    found = [_local(directory, announced) for directory, announced in local_session.living(layout)]
    if f"{prefix.rstrip('_')}_HOST" in os.environ:
        found += _remote(prefix, remote_base)
    return found


def _local(directory: Any, announced: dict[str, Any]) -> Session:
    row = _row("this machine", directory.name, directory, 1, "up", announced["cluster_id"], socket.gethostname())

    def end() -> bool:
        local_session.end_directory(directory)
        return True

    return Session(row, partial(local_session.ask, directory, announced, Operation.DESCRIBE), end)


def _remote(prefix: str, remote_base: str) -> Iterable[Session]:
    ssh = edge_node(prefix)
    if not is_rooted(remote_base):
        raise ValueError(f'--remote-base: {remote_base!r} is relative; write an absolute path, or one that begins with "~/"')
    connection = connection_to(ssh)
    generations = list_generations(connection, posixpath.normpath(expand_home(connection, remote_base)))
    if not generations:
        return []
    snapshot = fetch_queue(slurm_commands(connection))
    jobs = [(each, job_of(each, snapshot)) for each in generations]
    return [_on_cluster(connection, each, job, snapshot.components(job.job_id) if job else ()) for each, job in jobs]


def _on_cluster(connection: Connection, generation: Generation, job: QueueRow | None, parts: tuple[QueueRow, ...]) -> Session:
    announced = generation.announcement
    state = state_of(generation, job)
    if state == "ended" and generation.exit_code is None and announced is not None and announced.closing is None:
        state = "dead"  # Nobody said goodbye.
    row = _row(
        connection.place,
        generation.key,
        generation.directory,
        generation.number,
        state,
        announced.cluster_id if announced else None,
        announced.hostname if announced else (job.nodes if job else ""),
    )
    row["job_id"] = str(generation.job_id or (job.job_id if job else "")) or None
    row["partition"] = ", ".join(dict.fromkeys(part.partition for part in parts)) or None
    row["components"] = list(generation.components)
    if state == "pending" and job is not None:
        row["reason"] = _waits(most_informative_row(parts), job, generation.components)
    elif announced is not None and announced.closing:
        row["reason"] = announced.closing
    return Session(
        row,
        lambda: ask_session(connection, generation, {"op": Operation.DESCRIBE}),
        lambda: end_generations(connection, [generation]),
    )


def _waits(telling: QueueRow | None, job: QueueRow, components: tuple[str, ...]) -> str:
    """Why a job waits, and which component for, if one of them tells more than the others."""
    row = telling or job
    number = row.label.partition("+")[2]
    known = telling is not None and number.isdigit() and int(number) < len(components)
    of = f" (component {components[int(number)]})" if known else ""
    start = time.strftime(", expected by %H:%M UTC", time.gmtime(row.start)) if row.start else ""
    return f"{row.reason}{of}{start}"


def _row(place: str, key: str, path: Any, number: int, state: str, cluster_id: str | None, node: str) -> dict[str, Any]:
    named = {"key": key, "generation": number, "cluster_id": cluster_id, "job_id": None, "partition": None, "components": []}
    named |= {"state": state, "reason": None}
    unknown = dict.fromkeys(("running", "waiting", "served", "idle", "time_left"))
    return {**named, "node": node or None, **unknown, "place": place, "directory": str(path)}


def _find(ident: str, found: list[Session], alive: bool = False) -> Session:
    """The one session with a cluster id, a job id, or a name that begins so; of its allocations the newest."""
    over = [each for each in found if each.row["state"] in _OVER]
    for candidates in ([each for each in found if each not in over], [] if alive else over):
        exact = [each for each in candidates if ident in (each.row["cluster_id"], each.row["job_id"], each.row["key"])]
        fitting = exact or [each for each in candidates if ident and each.row["key"].startswith(ident)]
        names = sorted({f"{each.row['key']} on {each.row['place']}" for each in fitting})
        if len(names) > 1:
            raise click.ClickException(f"{len(names)} sessions begin with {ident!r}: {', '.join(names)}; write more of it")
        if fitting:
            return max(fitting, key=lambda each: int(each.row["generation"]))
    hint = " or has ended" if alive else ""
    raise click.ClickException(f"there is no session {ident!r}{hint}; `rayslurm session list` lists them")


def _words(row: Mapping[str, Any]) -> list[str]:
    state = f"{row['state']} ({row['reason']})" if row["reason"] else row["state"]
    name = f"{row['key']}\n{row['cluster_id'] or ''}".rstrip() + (f" #{row['generation']}" if row["generation"] > 1 else "")
    numbers = ("" if row[column] is None else str(row[column]) for column in ("running", "waiting", "served"))
    return [name, state, row["job_id"] or "", row["node"] or "", *numbers, _duration(row["idle"]), _duration(row["time_left"])]


def _duration(seconds: float | None) -> str:
    """Seconds as people read them."""
    if seconds is None:
        return ""
    minutes, rest = divmod(int(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _lines(value: Any) -> str:
    if isinstance(value, dict):
        return "  ".join(f"{name} {item}" for name, item in value.items() if item is not None)
    return "\n".join(map(_lines, value)) if isinstance(value, list) else str(value)
