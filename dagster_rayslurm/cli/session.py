"""`rayslurm session` starts, lists, shows and stops the warm sessions of this machine and of a Slurm cluster."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import click

from ..backends.layout import Layout
from ..backends.sessions.here import list_sessions as list_local_sessions
from ..backends.sessions.listing import end_generations
from ..backends.sessions.local import end_session
from ..backends.sessions.registry import Generation, list_generations
from ..backends.sessions.request import send_request
from ..backends.sessions.state import SessionState, job_of, state_of
from ..config import ExecutionMode
from ..errors import StartError
from ..execution.terminal import Finished
from ..operations import submit
from ..plan import merge
from ..runtime.protocol.messages import Operation
from ..slurm.pending import most_informative_row
from ..slurm.shared_queue import QueueRow, fetch_queue
from ..ssh.base import Connection
from ..ssh.local import LocalConnection
from .cluster import find_cluster, the_cluster
from .common import duration, json_option, one_sentence_errors, print_json, print_table, print_values, terminal_log
from .options import all_cluster_options, cluster_options
from .resource import changed
from .submit import allocation_options, loaded, queue_of

_THREADS = 8  # Maximum number of sessions that are asked for their description at the same time.
_OVER = (SessionState.ENDED, SessionState.DEAD)  # States of sessions that have ended; `list` shows them only with `--all`.
_DESCRIBED = ("running", "waiting", "served", "idle", "time_left")  # What only the session itself knows.
_COLUMNS = ("session", "state", "job", "node", "run", "wait", "served", "idle", "left")


@dataclass
class Session:
    """A session of this machine or of the Slurm cluster, for the commands that list or show sessions."""

    connection: Connection
    generation: Generation  # The allocation (Slurm job) of the session.
    row: dict[str, Any]  # The values that `list` prints, by column or JSON key; see `_row`.
    description: Mapping[str, Any] = field(default_factory=dict)  # The session's answer about itself; empty before `refresh`.
    here: bool = False  # Whether the session is a process of this machine, without Slurm.

    def refresh(self) -> None:
        """Asks the session about itself, and updates `description` and `row` with the answer.

        Does nothing if the state in `row` is neither UP nor DRAINING. If the session does not answer, `row` gets the state SILENT
        and the error as the reason; if the session has just ended, `row` gets the state ENDED.
        """
        if self.row["state"] not in (SessionState.UP, SessionState.DRAINING):
            return
        try:
            answer = dict(send_request(self.connection, self.generation, {"op": Operation.DESCRIBE}))
        except (OSError, StartError) as error:
            self.row |= {"state": SessionState.SILENT, "reason": str(error)}
            return
        if not answer.pop("ok", False):
            self.row["state"] = SessionState.ENDED
            return
        state = SessionState.READY if answer.get("ready") else SessionState.STARTING
        self.description = answer
        self.row |= {name: answer.get(name) for name in _DESCRIBED}
        self.row |= {"state": SessionState.DRAINING if answer.get("draining") else state, "reason": answer.get("draining")}


@click.group()
@all_cluster_options
def session() -> None:
    """Look at warm sessions: those of this machine, and of the cluster if one is configured."""


@session.command("list")
@click.option("--all", "everything", is_flag=True, help="Also list sessions that have ended, as long as their directories exist.")
@json_option
@cluster_options
@click.pass_obj
def list_sessions(layout: Layout, everything: bool, as_json: bool) -> None:
    """List the sessions, with their state and work, and the time that they will last; with --all, also those that have ended."""
    with one_sentence_errors():
        found = [each for each in _sessions(layout) if everything or each.row["state"] not in _OVER]
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(Session.refresh, found))
    rows = [each.row for each in found if everything or each.row["state"] not in _OVER]
    if not as_json:
        return print_table(map(_cells, rows), *_COLUMNS)
    for row in rows:
        print_json(row)


@session.command()
@click.option("--name", help="Name of the session.  [default: the resource's]")
@click.option(
    "--idle-timeout",
    type=click.IntRange(1),
    metavar="SECONDS",
    help="Seconds without a payload after which the session ends.  [default: the resource's]",
)
@allocation_options
@json_option
@cluster_options
def start(name: str | None, idle_timeout: int | None, as_json: bool, **options: Any) -> None:
    """Start a session with a warm Ray cluster for interactive work, and wait until it is up; `rayslurm attach` enters it.

    Assets of the same resource use this session too, unless an option of this command changes the resource. The session ends when
    it has been idle for --idle-timeout seconds.
    """
    with one_sentence_errors():
        cluster = the_cluster()
        changes = {"name": name, "idle_timeout": idle_timeout, "num_nodes": options["nodes"], "time_limit": options["time_limit"]}
        changes = {field: value for field, value in changes.items() if value is not None}
        resource = changed(
            cluster.resource,
            mode=ExecutionMode.SLURM_SESSION.value,
            enable_cluster_reuse=True,
            session=changed(cluster.resource.session, **changes),
            slurm=changed(cluster.slurm, queue=merge(cluster.slurm.queue, queue_of(options))),
        )
        environment = loaded(resource, options["load_env"])
        done = submit(resource, "session-start", terminal_log(as_json), payload_path=["true"], environment=environment)
        assert isinstance(done, Finished)  # Only a detached submission has another result.
        if done.failure is not None:
            raise ValueError(done.failure.description)
        one = _find(str(done.job_id), _sessions(Layout.here(resource.local_base)))
    if as_json:
        return print_json(one.row)
    key = one.row["key"]
    click.echo(f"the session {key} is up in Slurm job {done.job_id}; `rayslurm attach {key}`, `rayslurm dashboard {key}`")


@session.command()
@click.argument("ident", metavar="ID")
@json_option
@cluster_options
@click.pass_obj
def show(layout: Layout, ident: str, as_json: bool) -> None:
    """Show one session: ID is its cluster id, its job id, its name, or the beginning of its name."""
    with one_sentence_errors():
        one = _find(ident, _sessions(layout))
        one.refresh()
    shown = {**one.description, **one.row}
    if as_json:
        return print_json(shown)
    print_values(shown)


@session.command()
@click.argument("ident", metavar="ID")
@json_option
@cluster_options
@click.pass_obj
def stop(layout: Layout, ident: str, as_json: bool) -> None:
    """End one session and all its payloads, and wait until the end is confirmed. ID is as for `rayslurm session show`."""
    with one_sentence_errors():
        one = _find(ident, _sessions(layout), alive=True)
        name = f"{one.row['key']} on {one.row['place']}"
        if one.here:
            end_session(one.generation)
        elif not end_generations(one.connection, [one.generation]):
            raise click.ClickException(f"the session {name} had ended already")
    if as_json:
        return print_json({**one.row, "state": SessionState.ENDED})
    click.echo(f"ended the session {name}" + (f", Slurm job {one.row['job_id']}" if one.row["job_id"] else ""))


def _sessions(layout: Layout) -> list[Session]:
    """Returns the sessions of this machine, and the sessions of the cluster if a cluster is configured."""
    here = LocalConnection()
    found = [
        Session(here, each, {**_row(here, each, SessionState.UP), "job_id": None}, here=True)
        for each in list_local_sessions(layout)
    ]
    cluster = find_cluster()
    if cluster is None:
        return found
    connection = cluster.connection
    generations = list_generations(connection, cluster.base)
    snapshot = fetch_queue(connection) if generations else None
    for each in generations:
        job = job_of(each, snapshot) if snapshot else None
        components = snapshot.components(job.job_id) if snapshot and job else ()
        row = _row(connection, each, state_of(each, job), job)
        row["partition"] = ", ".join(dict.fromkeys(part.partition for part in components)) or None
        row["components"] = each.manifest.capacity.components if each.manifest is not None else []
        if row["state"] == SessionState.PENDING and job is not None:
            told = most_informative_row(components) or job
            row["reason"] = told.reason + (
                time.strftime(", expected by %H:%M UTC", time.gmtime(told.start)) if told.start else ""
            )
        found.append(Session(connection, each, row))
    return found


def _row(connection: Connection, generation: Generation, state: SessionState, job: QueueRow | None = None) -> dict[str, Any]:
    """Returns the values that `list` prints for one allocation of a session, by column or JSON key.

    `generation` is the allocation, and `state` its state. `job` is the session's job in the queue; None if there is no job. The
    partition and the values that only the session itself knows are None, and the list of components is empty, until the caller
    sets them.
    """
    announced = generation.announcement
    return {
        "key": generation.key,
        "generation": generation.number,
        "cluster_id": announced.cluster_id if announced else None,
        "job_id": str(generation.job_id or (job.job_id if job else "")) or None,
        "partition": None,
        "components": [],
        "state": SessionState.DRAINING if state == SessionState.UP and announced and announced.closing else state,
        "reason": announced.closing if announced else None,
        "node": (announced.hostname if announced else job.nodes if job else "") or None,
        **dict.fromkeys(_DESCRIBED),
        "place": connection.place,
        "directory": generation.directory,
    }


def _find(ident: str, found: list[Session], alive: bool = False) -> Session:
    """Returns the session in `found` whose cluster id, job id, name or beginning of the name is `ident`.

    If several allocations (generations) of one session match, returns the newest. Sessions that have ended count only if no
    other session matches; if `alive` is True, they never count. Raises ClickException if no session, or several sessions, match.
    """
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
    """Returns the cells of one row of the table of sessions, in the order of `_COLUMNS`."""
    state = f"{row['state']} ({row['reason']})" if row["reason"] else str(row["state"])
    name = f"{row['key']}\n{row['cluster_id'] or ''}".rstrip() + (f" #{row['generation']}" if row["generation"] > 1 else "")
    numbers = ("" if row[column] is None else str(row[column]) for column in ("running", "waiting", "served"))
    return [name, state, row["job_id"] or "", row["node"] or "", *numbers, duration(row["idle"]), duration(row["time_left"])]
