"""The user's jobs in Slurm's queue: one snapshot, from one `squeue`, that all processes share through a file on the cluster.

However many steps, processes and Dagster hosts look at the queue, slurmctld is queried once per `poll_interval`. A process that
finds the snapshot too old claims its renewal, and the others read the result. squeue(1) is that of Slurm 22.05 and 24.11.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
import re
import secrets
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..edge import slurm
from ..ssh.base import Completed, Connection
from ..ssh.local import LocalConnection
from .commands import SlurmUnanswered, unanswered

SNAPSHOT = "snapshot.json"
"""Name of the snapshot's file in the shared directory."""

_VERSION = 1  # Version of the file's format.
_MAX_BYTES = 64 * 1024 * 1024  # Most bytes of the snapshot's file that are read; a larger one is taken for damaged.
_TIMEOUT = 120.0
"""Seconds for one squeue; if slurmctld is down, squeue gives up earlier (MessageTimeout, 10 s, a few times)."""
_BACK_OFF = 5.0  # Least pause between two queries, as a multiple of the time that slurmctld took to answer the last one.
_REREAD = 2.0  # Seconds between two reads of a snapshot that another process is renewing.
_JITTER = 0.1  # Largest delay, as a part of the interval, by which processes spread that find the same snapshot too old.
_KEEP_CLAIMS = 600.0
"""Least seconds for which the mark of a claimed renewal is kept: it must outlive the caches of other hosts (NFS: a minute)."""

_UNIT = "\x1f"
# The name comes last, as it may contain any character. %A is the number of a component or array task itself, %i the label that
# users know; %S of a pending job is when Slurm expects it to start.
_COLUMNS = "".join(_UNIT + column for column in ("%A", "%i", "%T", "%r", "%S", "%V", "%D", "%N", "%P", "%j"))


@dataclass(frozen=True)
class QueueRow:
    """A job, or one component of a heterogeneous job, in the queue. Times are in seconds of the epoch."""

    job_id: int  # The number of the job, or the own number of a component or array task.
    label: str  # The number that users know, such as "12+1" or "12_[1-5]".
    state: str
    reason: str  # Why it waits, or why it ended; "None" for none.
    start: float | None  # When it started, or is expected to; None if Slurm does not know.
    submit: float | None  # When it was submitted or requeued.
    num_nodes: int
    nodes: str  # Its nodes in Slurm's short form; "" while it has none.
    partition: str  # One partition, or several separated by commas while it is pending.
    name: str

    @property
    def is_leader(self) -> bool:
        """Whether the id in this row stands for a whole job: a job without components, or the first component of one."""
        return self.label.partition("+")[2] in ("", "0")

    @property
    def leader_label(self) -> str:
        """The beginning of the label that all components of the job share."""
        return self.label.partition("+")[0]


@dataclass(frozen=True)
class QueueSnapshot:
    """All jobs of the user in one answer of `squeue`, those that ended recently included.

    `began` is when squeue was called, by the cluster's clock, and `took` for how many seconds it ran. Jobs that were submitted
    after `began` may be missing.
    """

    began: float
    rows: tuple[QueueRow, ...]
    took: float = 0.0

    @cached_property
    def _by_id(self) -> dict[int, QueueRow]:
        return {row.job_id: row for row in self.rows}

    def job(self, job_id: int) -> QueueRow | None:
        """The row of a job; None if it is not in the queue."""
        return self._by_id.get(job_id)

    def components(self, job_id: int) -> tuple[QueueRow, ...]:
        """The rows of a job's components, in order; for a job without components, its one row.

        Slurm forgets each component at a time of its own, the first component too.
        """
        row = self.job(job_id)
        if row is not None and "+" not in row.label:
            return (row,)
        leader = str(job_id) if row is None else row.leader_label
        own = [each for each in self.rows if "+" in each.label and each.leader_label == leader]
        return tuple(sorted(own, key=lambda each: each.job_id))

    def named(self, name: str) -> tuple[QueueRow, ...]:
        """The rows of the jobs with this name."""
        return tuple(row for row in self.rows if row.name == name)


def render_snapshot(snapshot: QueueSnapshot) -> bytes:
    """A snapshot as a line of JSON, the content of the shared file."""
    rows = [dataclasses.astuple(row) for row in snapshot.rows]
    content = {"version": _VERSION, "began": snapshot.began, "took": snapshot.took, "rows": rows}
    return json.dumps(content, separators=(",", ":")).encode() + b"\n"


def parse_snapshot(data: bytes) -> QueueSnapshot | None:
    """The snapshot in the content of a file; None if it holds none, or one of another version."""
    try:
        content: dict[str, Any] = json.loads(data)
        if content["version"] != _VERSION:
            return None
        rows = tuple(QueueRow(*row) for row in content["rows"])
        return QueueSnapshot(float(content["began"]), rows, float(content["took"]))
    except (ValueError, KeyError, TypeError):
        return None


def parse_squeue(text: str, mark: str) -> tuple[QueueRow, ...]:
    """The rows of `squeue --format` with `mark` before each; raises ValueError if the text has other lines."""
    before, *rows = ("\n" + text.removesuffix("\n")).split(f"\n{mark}{_UNIT}")
    if before.strip():
        raise ValueError(f"squeue printed {before.strip()[:200]!r} where jobs were expected")
    return tuple(map(_row, rows))


def _row(text: str) -> QueueRow:
    try:
        number, label, state, reason, start, submit, num_nodes, *rest = text.split(_UNIT, _COLUMNS.count(_UNIT) - 1)
        times = parse_time(start), parse_time(submit)
        return QueueRow(int(number), label, state, reason, *times, parse_count(num_nodes), *rest)
    except (ValueError, TypeError):
        raise ValueError(f"squeue printed {text[:200]!r} where a job was expected") from None


def parse_time(text: str) -> float | None:
    """A time as Slurm prints it with `SLURM_TIME_FORMAT=%s`; None for "N/A", "Unknown" and such."""
    return float(text) if re.fullmatch(r"[1-9][0-9]*", text) else None


def parse_count(text: str) -> int:
    """A number as Slurm prints it: "1K" for 1024 nodes (convert_num_unit), the first of a range "2-4", 0 for any other text."""
    match = re.match(r"([0-9]+)([KM]?)(?:-|$)", text)
    return int(match[1]) * {"": 1, "K": 1024, "M": 1024 * 1024}[match[2]] if match else 0


@dataclass
class ClusterClock:
    """The clock of the edge node, computed from this machine's clock; times on the cluster are compared with this clock only.

    `local` is this machine's clock, in seconds; it may stand still while the machine sleeps.
    """

    connection: Connection
    local: Callable[[], float] = lambda: time.monotonic()
    _offset: float | None = None

    def now(self) -> float:
        """The time on the edge node, in seconds of the epoch; the edge node is asked for it at most once (OSError)."""
        if self._offset is None:
            sent = self.local()
            stamp = self.connection.call(slurm.now, repeat=True)
            return self.local() + self.observe(stamp, sent, self.local())
        return self.local() + self._offset

    def observe(self, stamp: float, asked: float, answered: float) -> float:
        """Correct the clock by a time stamp from the edge node, asked for and answered at two `local()` times."""
        low, high = stamp - answered, stamp - asked
        before = (low + high) / 2 if self._offset is None else self._offset
        self._offset = min(max(before, low), high)
        return self._offset


def _in_background(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="rayslurm-queue", daemon=True).start()


class SharedQueue:
    """Access to the one snapshot of the queue that all processes and hosts of a user share.

    Args:
        directory: the directory of the snapshot and the claims, on a file system that all edge nodes share.
        poll_interval: seconds for which a snapshot is good.
        start: runs a renewal of the snapshot, which takes time; by default in a background thread.

    Attributes:
        clock: the cluster's clock, which learns from every answer.
        error: why the last query failed, in one sentence; None after one that succeeded.
    """

    def __init__(
        self,
        connection: Connection,
        directory: str,
        poll_interval: float,
        start: Callable[[Callable[[], None]], None] = _in_background,
        clock: ClusterClock | None = None,
    ) -> None:
        self.clock = clock or ClusterClock(connection)
        self.error: str | None = None
        self._arguments = connection, directory, poll_interval
        self._start = start
        self._lock = threading.Lock()
        self._busy = False
        self._snapshot: QueueSnapshot | None = None
        self._read_at = -math.inf
        self._claimed_until = -math.inf
        self._spread = random.uniform(0, _JITTER)

    def latest(self, now: float) -> QueueSnapshot | None:
        """The newest known snapshot, None before the first; does not wait for Slurm. `now` is the cluster's time.

        If the snapshot is too old, a renewal starts, and a later call returns the new snapshot.
        """
        with self._lock:
            # A `now` before the last read means that a clock was corrected. A snapshot from the future is wrong.
            just_read = 0 <= now - self._read_at < min(_REREAD, self._interval() / 2)
            if self._busy or just_read or abs(self._age(now)) < self._interval():
                return self._snapshot
            self._busy = True
            self._read_at = now
        try:
            self._start(lambda: self._update(now))
        except RuntimeError:  # The interpreter shuts down and starts no more threads.
            self._busy = False
        return self._snapshot

    def wait_for_latest(self, now: float) -> QueueSnapshot | None:
        """As `latest`, but if the newest snapshot is too old, waits for Slurm and returns the new one."""
        return SharedQueue(*self._arguments, lambda work: work(), self.clock).latest(now)

    def _interval(self) -> float:
        return max(self._arguments[2], _BACK_OFF * (self._snapshot.took if self._snapshot else 0.0))

    def _age(self, now: float) -> float:
        return now - self._snapshot.began if self._snapshot else math.inf

    def _update(self, now: float) -> None:
        """Read the shared snapshot; if that is too old and nobody else claims its renewal, query Slurm and write a new one."""
        connection, directory, _ = self._arguments
        path = os.path.join(directory, SNAPSHOT)
        try:
            shared = parse_snapshot(connection.read(path, 0, _MAX_BYTES))
            # The file may hold an older snapshot: from a slow writer, or in another host's cache.
            if shared and (self._snapshot is None or shared.began > self._snapshot.began):
                self._snapshot, self.error = shared, None
            interval = self._interval()
            if abs(self._age(now)) < interval * (1 + self._spread) or now < self._claimed_until <= now + 2 * interval:
                return
            self._claimed_until = now + interval  # If the query fails, any process may try again in the next interval.
            keep = max(_KEEP_CLAIMS, 10 * interval)
            sent = self.clock.local()
            began, answer = _run_squeue(connection, directory, interval, keep)
            self.clock.observe(began, sent, self.clock.local())
            claimed = began if isinstance(answer, QueueSnapshot) else answer
            self._claimed_until = claimed + interval * (1 + self._spread)
            if not isinstance(answer, QueueSnapshot):
                return
            shared = parse_snapshot(connection.read(path, 0, _MAX_BYTES))
            self._snapshot, self.error = answer, None
            # Another process that claimed a later renewal may have written its snapshot earlier.
            if shared is None or not 0 <= shared.began - began < interval:
                connection.write(path, render_snapshot(answer))
        except OSError as error:
            self.error = str(error)
        finally:
            self._busy = False


def fetch_queue(connection: Connection) -> QueueSnapshot:
    """The queue right now, from a `squeue` of its own; for the few decisions that must not rest on the shared snapshot.

    Raises:
        SlurmUnanswered: Slurm did not answer.
        OSError: Slurm cannot be asked.
    """
    _, answer = _run_squeue(connection)
    assert isinstance(answer, QueueSnapshot)
    return answer


def _run_squeue(connection: Connection, *claim: object) -> tuple[float, QueueSnapshot | float]:
    """The cluster's time before the query, and the queue, or the time at which another process claimed the query."""
    mark = secrets.token_hex(8)  # Begins each row, as a job name may contain a newline.
    of_dagster = isinstance(connection, LocalConnection)
    code, out, error, began, ended = connection.call(
        slurm.queue, mark + _COLUMNS, _TIMEOUT, of_dagster, *claim, timeout=2 * _TIMEOUT
    )
    if code == slurm.TAKEN:
        return began, ended
    if code is None:
        raise TimeoutError(f"{connection.place}: squeue took over {_TIMEOUT:g} s and was ended")
    if code:
        raise unanswered(connection.place, "squeue", Completed(code, out, error))
    try:
        return began, QueueSnapshot(began, parse_squeue(out.decode("utf-8", "replace"), mark), ended - began)
    except ValueError as problem:
        raise SlurmUnanswered(f"{connection.place}: {problem}") from None


_queues: weakref.WeakValueDictionary[tuple[int, int, str, float], SharedQueue] = weakref.WeakValueDictionary()


def shared_queue(connection: Connection, directory: str, poll_interval: float) -> SharedQueue:
    """Returns the `SharedQueue` for a connection, directory and interval, one per process; this sends no command yet."""
    # A queue keeps its connection alive, so no other connection has the same id. A forked child has no thread that renews.
    key = (os.getpid(), 0 if isinstance(connection, LocalConnection) else id(connection), directory, poll_interval)
    return _queues.get(key) or _queues.setdefault(key, SharedQueue(connection, directory, poll_interval))
