"""`rayslurm session`: list, show and stop the warm sessions of this machine and of a Slurm cluster."""

from __future__ import annotations

import json
import os
import posixpath
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import click

from ..backends.run_dir import Layout
from ..backends.sessions.listing import SessionState, end_generations, job_of, state_of
from ..backends.sessions.local import end_session
from ..backends.sessions.local import list_sessions as list_local_sessions
from ..backends.sessions.registry import Generation, list_generations
from ..backends.sessions.request import Unreachable, send_request
from ..errors import StartError
from ..runtime.protocol.messages import Operation
from ..slurm.refusals import most_informative_row
from ..slurm.shared_queue import QueueRow, fetch_queue
from ..ssh.base import Connection, expand_home, is_rooted
from ..ssh.local import LocalConnection
from ..ssh.pool import connection_to
from .common import edge_node, one_sentence_errors, prefix_option, print_table

_THREADS = 8
"""Maximum number of sessions that are asked for their description at the same time."""
_OVER = (SessionState.ENDED, SessionState.DEAD)
"""States of sessions that have ended; `list` shows them only with `--all`."""
_DESCRIBED = ("running", "waiting", "served", "idle", "time_left")
"""What only the session itself knows."""
_COLUMNS = ("session", "state", "job", "node", "run", "wait", "served", "idle", "left")


@dataclass(frozen=True)
class Session:
    """A session of this machine or of the Slurm cluster, with the functions that describe and end it."""

    row: dict[str, Any]
    """The values that `list` prints, by column or JSON key."""
    describe: Callable[[], Mapping[str, Any]]
    """Asks the session for its description; raises `OSError` or `StartError`."""
    end: Callable[[], bool]
    """Ends the session and waits until it has ended; returns False if the session had ended before."""

    def described(self) -> Session:
        """Ask the session for its description, and return a copy with those values in its row.

        A session that has not announced itself yet, or has ended, is not asked and is returned unchanged.
        """
        if self.row["state"] not in (SessionState.UP, SessionState.DRAINING):
            return self
        own: dict[str, Any] = {"state": SessionState.ENDED}
        try:
            answer = self.describe()
        except (OSError, StartError) as error:
            own = {"state": SessionState.SILENT, "reason": str(error)}
        else:
            if answer.get("ok"):
                ready = SessionState.READY if answer.get("ready") else SessionState.STARTING
                own = {name: answer.get(name) for name in _DESCRIBED}
                own |= {"state": SessionState.DRAINING if answer.get("draining") else ready, "reason": answer.get("draining")}
        return replace(self, row={**self.row, **own})


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
def list_sessions(source: tuple[Layout, str, str], everything: bool, as_json: bool) -> None:
    """List the sessions: what they do, and how long they will last."""
    with one_sentence_errors():
        found = [each for each in _sessions(*source) if everything or each.row["state"] not in _OVER]
        with ThreadPoolExecutor(_THREADS) as pool:
            rows = [each.row for each in pool.map(Session.described, found)]
    rows = [row for row in rows if everything or row["state"] not in _OVER]
    if not as_json:
        return print_table(map(_cells, rows), *_COLUMNS)
    for row in rows:
        click.echo(json.dumps(row))


@session.command()
@click.argument("ident", metavar="ID")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def show(source: tuple[Layout, str, str], ident: str, as_json: bool) -> None:
    """Show one session: ID is its cluster id, its job id, or how its name begins."""
    with one_sentence_errors():
        one = _find(ident, _sessions(*source)).described()
        description: dict[str, Any] = {}
        if one.row["state"] not in (*_OVER, SessionState.PENDING, SessionState.SILENT):
            with suppress(Unreachable):  # The session is starting or ending.
                description = {name: value for name, value in one.describe().items() if name != "ok"}
    shown = {**description, **one.row}
    if as_json:
        return click.echo(json.dumps(shown))
    cells = [(name.replace("_", " "), _lines(value)) for name, value in shown.items() if value not in (None, [], {}, "")]
    print_table(cells, show_header=False, box=None, padding=(0, 2, 0, 0))


@session.command()
@click.argument("ident", metavar="ID")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def stop(source: tuple[Layout, str, str], ident: str, as_json: bool) -> None:
    """End one session with all that it runs, and see that confirmed: ID as for `show`."""
    with one_sentence_errors():
        one = _find(ident, _sessions(*source), alive=True)
        name = f"{one.row['key']} on {one.row['place']}"
        if not one.end():
            raise click.ClickException(f"the session {name} had ended already")
    if as_json:
        return click.echo(json.dumps({**one.row, "state": SessionState.ENDED}))
    click.echo(f"ended the session {name}" + (f", Slurm job {one.row['job_id']}" if one.row["job_id"] else ""))


def _sessions(layout: Layout, prefix: str, remote_base: str) -> list[Session]:
    """The sessions of this machine, and of the Slurm cluster if environment variables name its edge node."""
    found = [_local(each) for each in list_local_sessions(layout)]
    if f"{prefix.rstrip('_')}_HOST" in os.environ:
        found += _remote(prefix, remote_base)
    return found


def _local(found: Generation) -> Session:
    """A session of this machine."""
    announced = found.announcement
    assert announced is not None  # `list_local_sessions` leaves out the others.
    state = SessionState.DRAINING if announced.closing else SessionState.UP
    row = _row("this machine", found.key, found.directory, found.number, state, announced.cluster_id, announced.hostname)

    def end() -> bool:
        end_session(found)
        return True

    return Session(row, lambda: send_request(LocalConnection(), found, {"op": Operation.DESCRIBE}), end)


def _remote(prefix: str, remote_base: str) -> Iterable[Session]:
    """The sessions of the Slurm cluster whose edge node the environment variables name."""
    ssh = edge_node(prefix)
    if not is_rooted(remote_base):
        raise ValueError(f'--remote-base: {remote_base!r} is relative; write an absolute path, or one that begins with "~/"')
    connection = connection_to(ssh)
    generations = list_generations(connection, posixpath.normpath(expand_home(connection, remote_base)))
    if not generations:
        return []
    snapshot = fetch_queue(connection)
    jobs = [(each, job_of(each, snapshot)) for each in generations]
    return [_on_cluster(connection, each, job, snapshot.components(job.job_id) if job else ()) for each, job in jobs]


def _on_cluster(
    connection: Connection, generation: Generation, job: QueueRow | None, components: tuple[QueueRow, ...]
) -> Session:
    announced = generation.announcement
    state = state_of(generation, job)
    cluster_id = announced.cluster_id if announced else None
    node = announced.hostname if announced else (job.nodes if job else "")
    row = _row(connection.place, generation.key, generation.directory, generation.number, state, cluster_id, node)
    row["job_id"] = str(generation.job_id or (job.job_id if job else "")) or None
    row["partition"] = ", ".join(dict.fromkeys(each.partition for each in components)) or None
    row["components"] = list(generation.components)
    if state == SessionState.PENDING and job is not None:
        row["reason"] = _pending_reason(most_informative_row(components), job, generation.components)
    elif announced is not None and announced.closing:
        row["reason"] = announced.closing
    return Session(
        row,
        lambda: send_request(connection, generation, {"op": Operation.DESCRIBE}),
        lambda: end_generations(connection, [generation]),
    )


def _pending_reason(telling: QueueRow | None, job: QueueRow, components: tuple[str, ...]) -> str:
    """Why a session's job waits in the queue, with the component that is the reason if known, and the expected start."""
    row = telling or job
    number = row.label.partition("+")[2] if telling is not None else ""
    component = f" (component {components[int(number)]})" if number.isdigit() and int(number) < len(components) else ""
    start = time.strftime(", expected by %H:%M UTC", time.gmtime(row.start)) if row.start else ""
    return f"{row.reason}{component}{start}"


def _row(place: str, key: str, path: Any, number: int, state: SessionState, cluster_id: str | None, node: str) -> dict[str, Any]:
    """A row for `list`, with None for all values that only the session itself or the queue knows."""
    row = {"key": key, "generation": number, "cluster_id": cluster_id, "job_id": None, "partition": None, "components": []}
    row |= {"state": state, "reason": None, "node": node or None, **dict.fromkeys(_DESCRIBED)}
    return {**row, "place": place, "directory": str(path)}


def _find(ident: str, found: list[Session], alive: bool = False) -> Session:
    """The session that `ident` names, by cluster id, job id, or how its name begins; of its generations the newest."""
    over = [each for each in found if each.row["state"] in _OVER]
    for candidates in ([each for each in found if each not in over], [] if alive else over):
        exact = [each for each in candidates if ident in (each.row["cluster_id"], each.row["job_id"], each.row["key"])]
        matching = exact or [each for each in candidates if ident and each.row["key"].startswith(ident)]
        names = sorted({f"{each.row['key']} on {each.row['place']}" for each in matching})
        if len(names) > 1:
            raise click.ClickException(f"{len(names)} sessions begin with {ident!r}: {', '.join(names)}; write more of it")
        if matching:
            return max(matching, key=lambda each: int(each.row["generation"]))
    hint = " or has ended" if alive else ""
    raise click.ClickException(f"there is no session {ident!r}{hint}; `rayslurm session list` lists them")


def _cells(row: Mapping[str, Any]) -> list[str]:
    """The texts of one line of the table of sessions, in the order of `_COLUMNS`."""
    state = f"{row['state']} ({row['reason']})" if row["reason"] else str(row["state"])
    name = f"{row['key']}\n{row['cluster_id'] or ''}".rstrip() + (f" #{row['generation']}" if row["generation"] > 1 else "")
    numbers = ("" if row[column] is None else str(row[column]) for column in ("running", "waiting", "served"))
    return [name, state, row["job_id"] or "", row["node"] or "", *numbers, _duration(row["idle"]), _duration(row["time_left"])]


def _duration(seconds: float | None) -> str:
    """Seconds as H:MM:SS or M:SS; "" for None."""
    if seconds is None:
        return ""
    minutes, rest = divmod(int(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _lines(value: Any) -> str:
    """A value of a session's description as text: a list has one line per item."""
    if isinstance(value, dict):
        return "  ".join(f"{name} {item}" for name, item in value.items() if item is not None)
    return "\n".join(map(_lines, value)) if isinstance(value, list) else str(value)
