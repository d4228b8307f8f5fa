"""Runs Slurm's programs on the edge node (login node), and reads the user's jobs from Slurm's queue with `squeue`.

All processes of a user share one answer of `squeue` through a file on the cluster (`SharedQueue`). Together they run `squeue` at
most once in `poll_interval` seconds, for any number of steps, processes and Dagster hosts. `fetch_queue` and `SharedQueue.recent`
run `squeue` in addition. The functions of the package `edge` run on the edge node. Tried on Slurm 22.05 and 24.11.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from ..edge import slurm
from ..ssh.base import Backoff, Completed, Connection, ConnectionFailed
from ..ssh.local import LocalConnection

T = TypeVar("T")

SNAPSHOT = "squeue"  # Name of the file with the shared answer.

_TIMEOUT = 120.0  # Seconds for one squeue; if slurmctld is down, squeue gives up earlier (MessageTimeout, 10 s, a few times).
_PAUSE = 2.0  # Least seconds between two looks at an answer that another process is renewing.

_ROW, _UNIT = "\x1e", "\x1f"
# The name comes last, as it may contain any character. %A is the number of a component or array task itself, %i the label that
# users know; %S of a pending job is when Slurm expects it to start.
_COLUMNS = tuple("AiTrSVDNPj")
# Without --all hidden partitions hide jobs. --states=all also shows jobs that ended, for MinJobAge (300 s by default).
# SLURM_BITSTR_LEN=0 shows all numbers of an array's elements that wait, which squeue cuts otherwise.
_OWN = ("squeue", "--me", "--all", "--noheader", "--states=all")
_SQUEUE = ("env", "LC_ALL=C", "SLURM_TIME_FORMAT=%s", "SLURM_BITSTR_LEN=0", *_OWN)
_FORMAT = _ROW + "".join(f"{_UNIT}%{column}" for column in _COLUMNS)


class SlurmUnanswered(OSError):
    """Raised when a command of Slurm gives no answer, so that the state of jobs is unknown; the message is one sentence."""


def run_slurm(
    connection: Connection,
    command: Sequence[str],
    stdin: bytes = b"",
    timeout: float | None = None,
    keep: Sequence[str] = (),
    function: Callable[..., Any] = slurm.run,
    options: Sequence[Any] = (),
) -> Completed:
    """Runs a command that calls a program of Slurm, and returns its exit code and output. Raises what `Connection.run` raises.

    The command does not see environment variables that stand for options of Slurm's programs, except the variables in `keep`.

    Args:
        connection: the machine on which the command runs.
        command: the words of the command.
        stdin: the command's standard input.
        timeout: the seconds after which the command is killed; None for no limit.
        keep: the names of the variables to keep, such as "SBATCH_PARTITION".
        function: the function that runs the command on the machine, from the package `edge`. Its arguments are the command, the
            standard input, the timeout, `keep` and the items of `options`.
        options: the last arguments of `function`.
    """
    return connection.run(command, stdin, timeout, function, (list(keep), *options))


def stderr_of(done: Completed) -> str:
    """Returns the error output of a command as text, without white space at both ends."""
    return done.stderr.decode("utf-8", "replace").strip()


def unanswered(place: str, program: str, done: Completed) -> SlurmUnanswered:
    """Returns the exception to raise for a program of Slurm that failed.

    `place` names the host, `program` is a name such as "squeue", and `done` has the exit code and the output of the program.
    """
    said = " ".join(stderr_of(done).split())[-500:]
    if done.returncode == 127:
        return SlurmUnanswered(f"{place}: {program} is not on the PATH that a non-interactive login has; add it there ({said})")
    return SlurmUnanswered(f"{place}: {program} did not answer (exit code {done.returncode}): {said or 'it said nothing'}")


def ask_patiently(
    ask: Callable[[], T], patience: float, unanswered_too: bool = False, warn: Callable[[str], None] = lambda _: None
) -> T:
    """Calls `ask` and returns the result; repeats the call for up to `patience` seconds while the edge node is out of reach.

    If `unanswered_too` is True, the call is also repeated after any other OSError, for instance while Slurm or the file system of
    the edge node gives no answer. `warn` is called once with a message, before the first repetition. Raises the OSError of the
    last call.
    """
    outage, warned = Backoff(), False
    while True:
        try:
            return ask()
        except OSError as error:
            pause, again = outage.pause(), error.temporary if isinstance(error, ConnectionFailed) else unanswered_too
            if not again or outage.seconds + pause > patience:
                raise
            if not warned:
                warn(f"[rayslurm] trying again for up to {patience:g} s: {error}")
            warned = True
            time.sleep(pause)


@dataclass(frozen=True)
class QueueRow:
    """A row of squeue: a job, a component of a heterogeneous job, or elements of a job array.

    Times are in seconds since the epoch, by the cluster's clock.
    """

    # Number of the job. Each component, and each element that has started, has a number of its own; the row of the elements that
    # wait has the number of the array.
    job_id: int
    # The number that users see: "12" for a job, "12+1" for a component, "12_3" for an element, "12_[1-5]" for waiting elements.
    label: str
    state: str  # Such as "RUNNING".
    reason: str  # Why the job waits, or why it ended; "None" for none.
    start: float | None  # When the job started, or is expected to start; None if Slurm does not know.
    submit: float | None  # When the job was submitted or requeued; None if Slurm does not know.
    num_nodes: int  # 0 if Slurm does not say.
    nodes: str  # The job's nodes in Slurm's short form, such as "node[1-3]"; "" while the job has none.
    partition: str  # One partition, or several separated by commas while the job is pending.
    name: str

    @property
    def is_leader(self) -> bool:
        """Whether the row is that of a job without components, or of the first component, whose id stands for the whole job."""
        return self.label.partition("+")[2] in ("", "0")

    @property
    def leader_label(self) -> str:
        """The part of the label that all components of the job share: "12" for the label "12+1"."""
        return self.label.partition("+")[0]


@dataclass(frozen=True)
class QueueSnapshot:
    """All jobs of the user in one answer of squeue, including jobs that ended recently.

    `began` is the time when squeue was called, by the cluster's clock, and `took` the seconds that squeue ran. Jobs that were
    submitted after `began` may be missing.
    """

    began: float
    rows: tuple[QueueRow, ...]
    took: float = 0.0

    @cached_property
    def _by_id(self) -> dict[int, QueueRow]:
        return {row.job_id: row for row in self.rows}

    def job(self, job_id: int) -> QueueRow | None:
        """The row of a job; None if the job is not in the queue."""
        return self._by_id.get(job_id)

    def components(self, job_id: int) -> tuple[QueueRow, ...]:
        """The rows of a job's components, in order; for a job without components, the job's one row.

        For a heterogeneous job, `job_id` is the id of the first component. The result is empty if the job is not in the queue.
        Slurm forgets the components of a job at different times, so any component may be missing, also the first.
        """
        row = self.job(job_id)
        if row is not None and "+" not in row.label:
            return (row,)
        leader = str(job_id) if row is None else row.leader_label
        own = [each for each in self.rows if "+" in each.label and each.leader_label == leader]
        return tuple(sorted(own, key=lambda each: each.job_id))

    def elements(self, array_id: int) -> tuple[QueueRow, ...]:
        """The rows of a job array's elements, with one row for all elements that wait; empty if the job is no array."""
        return tuple(row for row in self.rows if row.label.startswith(f"{array_id}_"))

    def named(self, name: str) -> tuple[QueueRow, ...]:
        """The rows of the jobs with the name `name`."""
        return tuple(row for row in self.rows if row.name == name)


def listed_snapshot(place: str, code: int, out: str, error: str) -> QueueSnapshot:
    """Returns the snapshot of the queue from a finished squeue, whose command line `squeue_command` has returned.

    `code`, `out` and `error` are the exit code, the output and the error output of squeue. `place` names the host in messages. In
    the result, `began` is 0, because `out` does not tell when squeue ran. Raises SlurmUnanswered if squeue failed, or if `out` is
    not a list of jobs.
    """
    if code != 0:
        said = " ".join(error.split())[-300:] or "it said nothing"
        raise SlurmUnanswered(f"{place}: squeue did not answer (exit code {code}): {said}")
    try:
        return QueueSnapshot(0.0, parse_squeue(out))
    except ValueError as problem:
        raise SlurmUnanswered(f"{place}: {problem}") from None


def parse_answer(data: bytes) -> QueueSnapshot:
    """Returns the snapshot of the queue in `data`; raises ValueError if `data` is malformed.

    `data` begins with a line that has two times: when squeue was called, and when squeue ended. The output of squeue follows.
    The output of `edge.slurm.queue` consists of one line with the time of the call, and of `data`.
    """
    times, _, text = data.partition(b"\n")
    began, ended = map(float, times.split())
    return QueueSnapshot(began, parse_squeue(text.decode("utf-8", "replace")), ended - began)


def parse_squeue(text: str) -> tuple[QueueRow, ...]:
    """Returns the rows in `text`, the output of the command from `squeue_command`; raises ValueError for text that is no row."""
    before, *rows = ("\n" + text.removesuffix("\n")).split(f"\n{_ROW}{_UNIT}")
    if before.strip():
        raise ValueError(f"squeue printed {before.strip()[:200]!r} where jobs were expected")
    return tuple(map(_row, rows))


def _row(text: str) -> QueueRow:
    try:
        number, label, state, reason, start, submit, num_nodes, *rest = text.split(_UNIT, len(_COLUMNS) - 1)
        times = parse_time(start), parse_time(submit)
        return QueueRow(int(number), label, state, reason, *times, parse_count(num_nodes), *rest)
    except (ValueError, TypeError):
        raise ValueError(f"squeue printed {text[:200]!r} where a job was expected") from None


def parse_time(text: str) -> float | None:
    """Returns a time that Slurm printed with `SLURM_TIME_FORMAT=%s`, in seconds since the epoch; None for other text."""
    return float(text) if re.fullmatch(r"[1-9][0-9]*", text) else None


def parse_count(text: str) -> int:
    """Returns a number that Slurm printed: 1024 for "1K" (convert_num_unit), 2 for the range "2-4", 0 for any other text."""
    match = re.match(r"([0-9]+)([KM]?)(?:-|$)", text)
    return int(match[1]) * {"": 1, "K": 1024, "M": 1024 * 1024}[match[2]] if match else 0


@dataclass
class ClusterClock:
    """Computes the time on the edge node from this machine's clock, for comparison with other times on the cluster.

    `connection` is the connection to the edge node. `local` returns the time of this machine's clock, in seconds since an
    arbitrary point in time. This clock may stand still while this machine sleeps, so `observe` corrects the difference between
    the two clocks after each answer of the edge node.
    """

    connection: Connection
    local: Callable[[], float] = lambda: time.monotonic()
    _offset: float | None = None  # Seconds to add to a time of `local()`; None before the first answer of the edge node.

    def now(self) -> float:
        """Returns the time on the edge node, in seconds since the epoch.

        The first call queries the edge node and may raise OSError.
        """
        if self._offset is None:
            sent = self.local()
            stamp = self.connection.call(slurm.now, repeat=True)
            return self.local() + self.observe(stamp, sent, self.local())
        return self.local() + self._offset

    def observe(self, stamp: float, asked: float, answered: float) -> float:
        """Corrects this clock after an answer of the edge node that contains the time there.

        `stamp` is the time in the answer, in seconds since the epoch. `asked` and `answered` are the times of `local()` before
        the request and after the answer. Returns the new offset: the seconds to add to a time of `local()`.
        """
        low, high = stamp - answered, stamp - asked
        before = (low + high) / 2 if self._offset is None else self._offset
        self._offset = min(max(before, low), high)
        return self._offset


def _in_background(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="rayslurm-queue", daemon=True).start()


@dataclass(eq=False)
class SharedQueue:
    """Access to the last output of `squeue`, which is in a file on the cluster that all processes of the user share.

    The processes, on any host, read the output from the file. One process runs `squeue` again when the output is older than
    `poll_interval`. So the load on Slurm does not grow with the number of processes.
    """

    connection: Connection
    directory: str  # Directory of the shared answer, on a file system that all edge nodes share.
    poll_interval: float  # Seconds after which an answer is too old.
    start: Callable[[Callable[[], None]], None] = _in_background  # Calls a function in the background.
    # The time on the cluster, which each answer corrects. None in the constructor makes a new clock.
    clock: ClusterClock = None  # type: ignore[assignment]
    error: str | None = None  # Why the last query failed, in one sentence; None before the first query, and after a success.
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _recent: threading.Lock = field(default_factory=threading.Lock)  # Held by a thread while it checks and renews `_own`.
    _own: QueueSnapshot | None = None  # The last snapshot of `recent`, which this process got from squeue itself.
    _busy: bool = False  # Whether a query for `_snapshot` is under way.
    _asked_at: float = -math.inf  # When the last query for `_snapshot` began.
    _snapshot: QueueSnapshot | None = None  # The newest snapshot from the file that all processes share.

    def __post_init__(self) -> None:
        self.clock = self.clock or ClusterClock(self.connection)

    def latest(self, now: float) -> QueueSnapshot | None:
        """Returns the newest known snapshot at once; None if there is no snapshot yet. `now` is the time on the cluster.

        If the snapshot is older than `poll_interval` seconds, a query of the queue starts in the background, and a later call
        returns the new snapshot. While squeue takes long, the interval between two queries is longer than `poll_interval`.
        """
        with self._lock:
            newest = self._snapshot
            age, took = (now - newest.began, newest.took) if newest else (math.inf, 0.0)
            interval = max(self.poll_interval, slurm.BACK_OFF * took)
            # A `now` before the last query means that a clock was corrected. A snapshot from the future is wrong.
            just_asked = 0 <= now - self._asked_at < min(_PAUSE, interval / 2)
            if self._busy or just_asked or abs(age) < interval:
                return newest
            self._busy, self._asked_at = True, now
        try:
            self.start(self._query)
        except RuntimeError:  # The interpreter shuts down and starts no more threads.
            self._busy = False
        return self._snapshot

    def recent(self) -> QueueSnapshot | None:
        """Returns a snapshot that this process itself got from squeue less than `poll_interval` seconds ago.

        If there is no such snapshot, the function runs squeue and waits for the answer. Returns None if the cluster or Slurm does
        not answer. Snapshots of other processes are not used, because they may lack jobs that were submitted just before this
        process began.
        """
        with self._recent, contextlib.suppress(OSError):
            if self._own is None or abs(self.clock.now() - self._own.began) >= self.poll_interval:
                self._own = fetch_queue(self.connection)
            return self._own
        return None

    def _query(self) -> None:
        try:
            sent, known = self.clock.local(), self._snapshot.began if self._snapshot else 0.0
            at, snapshot = _ask(self.connection, os.path.join(self.directory, SNAPSHOT), self.poll_interval, known)
            self.clock.observe(at, sent, self.clock.local())
            if snapshot:
                self._snapshot, self.error = snapshot, None
        except OSError as error:
            self.error = str(error)
        finally:
            self._busy = False


def squeue_command() -> list[str]:
    """Returns the squeue command whose output `parse_squeue` reads."""
    return [*_SQUEUE, f"--format={_FORMAT}"]


def fetch_queue(connection: Connection) -> QueueSnapshot:
    """Runs squeue and returns a snapshot of the queue now. Raises OSError if the cluster or Slurm does not answer.

    This function is for the few decisions that must not rest on the shared snapshot.
    """
    _, snapshot = _ask(connection)
    assert snapshot
    return snapshot


def _ask(connection: Connection, *shared: object) -> tuple[float, QueueSnapshot | None]:
    """Returns the time on the cluster, in seconds since the epoch, and a snapshot of the queue.

    Without `shared`, squeue runs in any case. Otherwise `shared` has three values: the path of the file with the answer that all
    processes share; the age in seconds at which this answer is too old; and the time of the answer that the caller has already
    (0.0 for none). Then squeue runs only if the shared answer is too old. If there is no answer newer than the caller's, the
    second result is None.

    Raises SlurmUnanswered if squeue fails, and another OSError if the cluster does not answer.
    """
    try:
        done = run_slurm(connection, squeue_command(), timeout=_TIMEOUT, function=slurm.queue, options=shared)
    except TimeoutError as error:
        raise SlurmUnanswered(str(error)) from None
    if done.returncode:
        raise unanswered(connection.place, "squeue", done)
    at, _, answer = done.stdout.partition(b"\n")
    try:
        return float(at), parse_answer(answer) if answer else None
    except ValueError as error:
        raise SlurmUnanswered(f"{connection.place}: {error}") from None


_queues: weakref.WeakValueDictionary[tuple[int, int, str, float], SharedQueue] = weakref.WeakValueDictionary()


def shared_queue(connection: Connection, directory: str, poll_interval: float) -> SharedQueue:
    """Returns the `SharedQueue` for a connection, directory and interval, without a command on the cluster.

    Calls with equal arguments return the same object within a process. `directory` is the directory of the shared answer of
    squeue. An answer is renewed after `poll_interval` seconds.
    """
    # A queue keeps its connection alive, so no other connection has the same id. A forked child has no thread that renews.
    key = (os.getpid(), 0 if isinstance(connection, LocalConnection) else id(connection), directory, poll_interval)
    return _queues.get(key) or _queues.setdefault(key, SharedQueue(connection, directory, poll_interval))
