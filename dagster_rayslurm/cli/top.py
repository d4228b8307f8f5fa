"""`rayslurm top` shows a running Ray cluster live in the terminal."""

from __future__ import annotations

import json
import select
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from http.client import HTTPException
from itertools import cycle
from typing import TYPE_CHECKING, Any

import click

from ..access.find import Found
from ..access.head import ClusterEnded
from ..access.serve import served
from ..access.watch import QUERIES, Node, Snapshot, state_counts
from ..errors import StartError
from ..runtime.protocol.messages import Operation
from .common import duration, json_option, output_console, print_json
from .options import cluster_options
from .ray import find_target, say, target_argument

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

_INTERVAL = 1.0  # Seconds between two requests to the dashboard; each request fetches one part of the snapshot, in turn.
_TIMEOUT = 30.0
_GIB, _MIB = 2**30, 2**20
# Without the proxy that a site sets in http_proxy, which would get the secret of the URL.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
VIEWS = ("nodes", "tasks", "actors", "jobs", "payloads")
KEYS = "j k: move   Enter: details   Tab: next view   t: tasks   q: quit"


@dataclass(frozen=True)
class Screen:
    """What the user has chosen to see on the screen. Immutable: `after` returns the new choices when the user presses a key."""

    view: str = "nodes"  # One of `VIEWS`.
    row: int = 0  # The chosen row; -1 for no row.
    details: bool = False  # Whether the screen shows details of the chosen row.
    over: bool = False  # Whether the user has quit.

    def after(self, key: str, rows: int) -> Screen:
        """Returns the screen after the user has pressed `key` in a view of `rows` rows; an unknown key changes nothing.

        The keys q and Ctrl-C, and "" for the end of the input, set `over`.
        """
        if key in ("q", "\x03", ""):
            return replace(self, over=True)
        if key in ("j", "k"):
            return replace(self, row=max(0, min(rows - 1, self.row + (1 if key == "j" else -1))))
        if key in ("\r", "\n"):
            return replace(self, details=not self.details)
        if key == "\t":
            return Screen(VIEWS[(VIEWS.index(self.view) + 1) % len(VIEWS)])
        return Screen("tasks") if key == "t" else self


@dataclass
class Watch:
    """Data about a Ray cluster for the screen. A separate thread calls the method `run`, which fetches the data."""

    url: str  # The URL of the Ray dashboard on this machine.
    payloads: Callable[[], Sequence[Mapping[str, Any]]] | None  # Asks the session for the payloads; None without a session.
    snapshot: Snapshot = field(default_factory=Snapshot)  # The latest answer to each query.
    problem: str = ""  # Why the last request failed; "" if it did not fail.
    over: threading.Event = field(default_factory=threading.Event)  # Set to end `run`.

    def ask(self, query: str) -> None:
        """Sends one query to the dashboard or session, and stores the answer in `snapshot`, or an error text in `problem`.

        `query` is a key of `QUERIES`, which names a query to the dashboard, or "payloads" for the query to the session.
        """
        try:
            if query == "payloads":
                payloads = tuple(self.payloads()) if self.payloads else ()
                self.snapshot, self.problem = replace(self.snapshot, payloads=payloads), ""
                return
            with _DIRECT.open(self.url + QUERIES[query], timeout=_TIMEOUT) as answer:
                self.snapshot, self.problem = self.snapshot.with_answer(query, json.load(answer)), ""
        except (OSError, ValueError, StartError, HTTPException) as error:
            self.problem = f"{query}: {error}"

    def run(self) -> None:
        """Sends one query after another, one per second, until the event `over` is set.

        Repeats the query "nodes" until an answer has nodes; after that, sends all queries in turn.
        """
        queries = cycle([*QUERIES, *(["payloads"] if self.payloads else [])])
        while True:
            self.ask(next(queries) if self.snapshot.nodes else "nodes")
            if self.over.wait(_INTERVAL):
                break


@click.command()
@cluster_options
@target_argument
@click.option("--once", is_flag=True, help="Print what there is now, and end.")
@json_option
def top(target: str, once: bool, as_json: bool) -> None:
    """Watch a Ray cluster: nodes, GPUs, tasks, actors, jobs, the queue of a session, and what can never be placed.

    TARGET is the id or key of a Dagster run, asset, session or Slurm job, the beginning of such an id or key, or the name of a
    run directory.

    Keys: j and k move, Enter shows details, Tab the next view, t the tasks, q ends.
    """
    found = find_target(target)
    live = not once and not as_json and sys.stdin.isatty() and sys.stdout.isatty()
    said, ended = list[str](), list[str]()
    try:
        with served(found, said.append if live else say, ended=ended.append if live else say) as url:
            watch = Watch(url, _payloads(found))
            if live:
                _live(watch, found.title, said, ended)
            else:
                _print_once(watch, found.title, as_json)
    except ClusterEnded as error:
        raise click.ClickException(str(error)) from None
    for sentence in [*said, *ended][-1:]:
        say(sentence)


def _payloads(found: Found) -> Callable[[], Sequence[Mapping[str, Any]]] | None:
    """Returns a function that asks a cluster's session for the session's payloads; None for a cluster without a session."""
    session = found.session
    if session is None:
        return None
    from ..backends.sessions.request import send_request  # Imports Dagster.

    return lambda: send_request(found.connection, session, {"op": Operation.DESCRIBE}).get("payloads") or ()


def _print_once(watch: Watch, title: str, as_json: bool) -> None:
    """Sends each query once, and prints the answers as tables, or as one JSON object; `title` names the run or session."""
    for query in (*QUERIES, "payloads"):
        watch.ask(query)
        if watch.problem:
            raise click.ClickException(f"the dashboard does not answer: {watch.problem}")
    if as_json:
        found = watch.snapshot
        told = {"totals": dict(found.totals), "never": found.never, "unchecked": found.unchecked}
        return print_json({**asdict(found), **told})
    console = output_console()
    console.print(header(watch.snapshot, title, ""))
    for view in VIEWS:
        if rows(watch.snapshot, view):
            shown = table(watch.snapshot, Screen(view, -1), len(rows(watch.snapshot, view)))
            for column in shown.columns:
                column.overflow = "fold"  # Nothing is cut, unlike on the live screen, where each row has one line.
            console.print(shown)


def _live(watch: Watch, title: str, said: Sequence[str], ended: Sequence[str]) -> None:
    """Shows the cluster in the terminal until the user quits, or the cluster ends or stays out of reach.

    `title` names the run or session. Another thread appends sentences about the connection to `said`, and a sentence about the
    cluster's end to `ended`.
    """
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    console, screen = Console(), Screen()
    threading.Thread(target=watch.run, name="rayslurm-top", daemon=True).start()
    try:
        with _single_keys() as key, Live(console=console, screen=True, auto_refresh=False) as live:
            while not screen.over and not ended:
                height = max(3, console.height - 9 - len(watch.snapshot.never) - len(watch.snapshot.unchecked))
                problem = watch.problem or (said[-1] if said else "")
                body = table(watch.snapshot, screen, height)
                live.update(Group(header(watch.snapshot, title, problem), body, Text(KEYS, style="dim")), refresh=True)
                pressed = key(0.5)
                if pressed is not None:
                    screen = screen.after(pressed, len(rows(watch.snapshot, screen.view)))
    except KeyboardInterrupt:
        pass
    finally:
        watch.over.set()


@contextmanager
def _single_keys() -> Iterator[Callable[[float], str | None]]:
    """Context manager that lets the terminal deliver keys without Enter; yields a function that reads one key.

    The argument of the function is the number of seconds to wait. The function returns the key, "" at the end of the input, or
    None if no key comes in time.
    """
    import os
    import termios
    import tty

    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)

    def key(timeout: float) -> str | None:
        ready, _, _ = select.select([fd], [], [], timeout)
        return os.read(fd, 1).decode("utf-8", "replace") if ready else None

    try:
        yield key
    finally:
        with suppress(termios.error):
            termios.tcsetattr(fd, termios.TCSADRAIN, before)


# ---- The screen


def header(snapshot: Snapshot, title: str, problem: str) -> RenderableType:
    """Returns the lines above the table: `title`, totals, states of tasks and actors, what can never be placed, and `problem`.

    `problem` is an error text; "" if there is none.
    """
    from rich.console import Group
    from rich.text import Text

    alive = [node for node in snapshot.nodes if node.alive]
    totals = snapshot.totals
    lines = [Text(f"{title}   {len(alive)} of {len(snapshot.nodes)} nodes alive", style="bold")]
    cpu = sum(node.cpu for node in alive) / len(alive) if alive else 0.0
    parts = [f"CPU {totals.get('CPU', 0):g} ({cpu:.0f} % busy)", f"GPU {totals.get('GPU', 0):g}"]
    parts.append("memory " + _of(*map(sum, zip(*(node.memory for node in alive), strict=True)))) if alive else None
    parts.append("object store " + _of(*map(sum, zip(*(node.store for node in alive), strict=True)))) if alive else None
    lines.append(Text("   ".join(parts)))
    for name, counts in (("tasks", snapshot.tasks), ("actors", snapshot.actors)):
        states = state_counts(counts)
        lines.append(Text(f"{name}: " + (", ".join(f"{number} {state}" for state, number in states.most_common()) or "none")))
    lines += [Text(f"never: {sentence}", style="bold red") for sentence in snapshot.never]
    lines += [Text(sentence, style="yellow") for sentence in snapshot.unchecked]
    if problem:
        lines.append(Text(problem, style="yellow"))
    return Group(*lines)


def rows(snapshot: Snapshot, view: str) -> list[list[str]]:
    """Returns the rows of the view `view`, one of `VIEWS`; a row is a list of texts, one for each cell."""
    if view == "nodes":
        return [_node_row(node) for node in snapshot.nodes]
    if view in ("tasks", "actors"):
        counts = snapshot.tasks if view == "tasks" else snapshot.actors
        return [
            [name, ", ".join(f"{n} {state}" for state, n in sorted(states.items()))] for name, states in sorted(counts.items())
        ]
    if view == "jobs":
        return [
            [str(job.get("submission_id") or job.get("job_id")), str(job["status"]), str(job["entrypoint"])]
            for job in snapshot.jobs
        ]
    place, found = 0, []
    for each in snapshot.payloads:
        place += each["state"] == "waiting"
        state = f"place {place} in the queue" if each["state"] == "waiting" else str(each["state"])
        found.append([str(each["step"]), str(each["run_id"])[:8], state, duration(each["age"])])
    return found


_HEADERS = {
    "nodes": ("node", "state", "CPU %", "memory", "object store", "GPUs"),
    "tasks": ("task", "by state"),
    "actors": ("class", "by state"),
    "jobs": ("job", "state", "command"),
    "payloads": ("step", "run", "state", "since"),
}


def table(snapshot: Snapshot, screen: Screen, height: int) -> Table:
    """Returns a table of the rows of `screen.view` that fit into `height` lines, around the chosen row."""
    from rich.table import Table
    from rich.text import Text

    cells = rows(snapshot, screen.view)
    chosen = min(screen.row, len(cells) - 1)
    first = max(0, min(chosen - height // 2, len(cells) - height))
    shown = Table(*_HEADERS[screen.view], title=f"{screen.view} ({len(cells)})", title_justify="left", expand=True)
    for number, row in list(enumerate(cells))[first : first + height]:
        shown.add_row(*map(Text, row), style="reverse" if number == chosen else "")
        if screen.details and number == chosen and screen.view == "nodes":
            for line in details(snapshot.nodes[number]):
                shown.add_row("", *[""] * (len(row) - 2), Text(line))
    return shown


def details(node: Node) -> list[str]:
    """Returns further lines about a node: the address, the Ray resources, and each GPU."""
    bytes_of = ("memory", "objectStoreMemory")
    shown = {name: amount for name, amount in sorted(node.resources.items()) if not name.startswith("node:")}
    amounts = [f"{name} {amount / _GIB:.1f} GiB" if name in bytes_of else f"{name} {amount:g}" for name, amount in shown.items()]
    gpus = [f"GPU {n}: {gpu.name}, {gpu.percent:.0f} %, {gpu.used:.0f}/{gpu.total:.0f} MiB" for n, gpu in enumerate(node.gpus)]
    return [node.address, ", ".join(amounts), *gpus]


def _node_row(node: Node) -> list[str]:
    """Returns the cells of a node in the view "nodes"."""
    busy = " ".join(f"{gpu.percent:.0f}%" for gpu in node.gpus)
    state = ("head" if node.head else "alive") if node.alive else "dead"
    return [node.name, state, f"{node.cpu:.0f}", _of(*node.memory), _of(*node.store), busy or "-"]


def _of(used: float, total: float) -> str:
    """Returns two numbers of bytes as text, such as "1.5/8.0 GiB"."""
    unit, name = (_GIB, "GiB") if total >= _GIB else (_MIB, "MiB")
    return f"{used / unit:.1f}/{total / unit:.1f} {name}"
