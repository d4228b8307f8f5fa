"""Follows payloads: reads the run records while the records grow, and passes output and messages to Dagster."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..fabric import FabricWatch
from ..runtime.protocol.messages import EndReason
from ..runtime.protocol.record import JOURNAL, STDIO, LineReader, Record
from ..ssh.base import ConnectionFailed, Read
from .forward import Evidence, MessageForwarder, OutputWriter

CHUNK = 1024 * 1024  # Most bytes of one read of a record.
# Seconds to wait for data that must have been written already: a network file system may show a file, or a part of a file,
# that late (nfs(5): acregmax is 60 seconds).
VISIBILITY_TIMEOUT = 60.0
# Phases that are warnings in the Dagster log, because the user should fix something.
WARNING_PHASES = ("memory", "metrics", "not-node-local", "own-ray", "unschedulable")
# Most polls after the ends of all records, to wait for a component whose record still ends before the last requeue.
_LATE_POLLS = 10

# Callback that returns how the runtime ended, in words; None while the runtime lives.
RuntimeExit = Callable[[Evidence], "str | None"]


@dataclass(frozen=True)
class Cadence:
    """The pauses between two reads of a run record, in seconds.

    The pause is `busy` while data arrives. While no data arrives, it grows: up to `waiting` before the payload has started, and
    up to `idle` after the start.
    """

    busy: float
    idle: float
    waiting: float

    def pause(self, silence: float, started: bool) -> float:
        """Returns the seconds to wait before the next read, after `silence` seconds without new data.

        `started` says whether the payload has started.
        """
        return min(max(self.busy, 0.1 * silence), self.idle if started else self.waiting)


@dataclass(frozen=True)
class ReattachState:
    """How much of a payload's output and log lines an earlier Dagster process has already shown; by default, nothing."""

    offset: int = 0  # The byte of the recorded output at which to continue.
    # Level and text of log lines in Dagster's event log since the payload started, oldest first.
    logged: Iterator[tuple[int, str]] = field(default_factory=lambda: iter(()))
    note: Callable[[int], None] = lambda _: None  # Called with the offset up to which all output was shown.


@dataclass
class RecordState:
    """How much of one payload's run record was read, and the evidence from the part that was read.

    The caller reads the files, and passes records and errors to the methods. The parameter `now` of the methods is the current
    time by the monotonic clock.
    """

    nonce: str  # A random text that marks the payload; an `end` with another nonce belongs to another payload, and is ignored.
    loss_timeout: float  # Seconds for which the record may be unreachable.
    requeue: bool  # Whether Slurm may requeue the job; then an `end` after a signal from outside is not final.
    output: LineReader = field(default_factory=LineReader)
    journal: LineReader = field(default_factory=LineReader)
    evidence: Evidence = field(default_factory=Evidence)  # A new object after each requeue.
    restarts: int = 0  # How often Slurm has requeued the job, as of the last read.
    # Time of the first failed read since the last successful one, by the monotonic clock; None if the last read succeeded.
    unreachable_since: float | None = None

    def add(self, record: Record) -> bool:
        """Add one line of the run record's journal to the evidence; returns whether the line shows a requeue of the job.

        After a requeue, only two fields of the evidence so far are kept: `last_output` and `interrupted`.
        """
        restarted = record.get("type") == "start" and record.get("attempt", 0) > self.restarts
        if restarted:
            self.restarts = record["attempt"]
            self.journal.damaged = 0
            self.evidence = Evidence(last_output=self.evidence.last_output, interrupted=self.evidence.interrupted)
        self.evidence.add_record(record, self.nonce)
        return restarted

    def read_failed(self, error: OSError, now: float) -> bool:
        """Note a failed read of the record; returns whether this failure is the first since a successful read.

        After more than `loss_timeout` seconds of failures, `error` becomes the evidence's reason why the record is unreachable.
        """
        first = self.unreachable_since is None
        self.unreachable_since = now if self.unreachable_since is None else self.unreachable_since
        if now - self.unreachable_since > self.loss_timeout:
            self.evidence.unreachable = str(error)
            self.evidence.connection_lost = isinstance(error, ConnectionFailed)
        return first

    @property
    def missing_output(self) -> int:
        """The number of bytes of output that were recorded before the `end` but not read yet; 0 until the `end` is read."""
        end = self.evidence.end
        return 0 if end is None else max(0, int(end.get("stdio_bytes", 0)) - self.output.offset)

    def next_read(self, size: int, exited: str | None, cadence: Cadence, now: float, overdue: bool) -> float | None:
        """Returns the seconds to wait before the next read; None if no further read is needed. Called after each read.

        `size` is the number of bytes that the last read returned. `exited` says how the runtime had ended before the last read;
        None if the runtime was alive then. `cadence` has the pauses between reads. `now` is the time of the monotonic clock. If
        `overdue` is True, the caller's deadline has passed, and a record without new data is not read again.

        Changes the evidence: if data was read, `evidence.last_growth` becomes `now`; otherwise `evidence.runtime_exit` becomes
        `exited`, unless `exited` is None.
        """
        evidence, end = self.evidence, self.evidence.end
        if size:
            evidence.last_growth = now
        silence = now - evidence.last_growth
        final = end is not None and not (self.requeue and end["reason"] == EndReason.TERMINATED)
        if (final and not self.missing_output) or evidence.unreachable:
            return None
        if size >= CHUNK or (size and end is not None):
            return 0.0  # More data is there: behind a full chunk, or output that was written before the `end`.
        if not size and exited is not None and self.unreachable_since is None:
            evidence.runtime_exit = exited
            if not self.missing_output or silence >= VISIBILITY_TIMEOUT:
                return None
        return None if overdue else cadence.pause(silence, evidence.started)


@dataclass
class Follower:
    """Reads one payload's run record up to the `end`: shows output, passes Pipes messages to Dagster, and collects evidence.

    The caller calls `poll` until it returns None, and then `finish`.
    """

    connection: Any
    run_dir: str
    nonce: str  # The random text that marks the payload, also in its `end`.
    handler: Any  # Dagster's handler of Pipes messages.
    log: Any
    cadence: Cadence
    loss_timeout: float = 86400.0
    requeue: bool = False  # Whether Slurm may requeue the job. Then results wait until the payload has ended.
    component: str | None = None  # A prefix of output and log lines; None for a run with one payload.
    reattach: ReattachState = field(default_factory=ReattachState)
    fabric: str = "none"  # The launcher's preset for the network between the nodes.
    # Returns the reads of files by which the next `poll` finds out whether the runtime has ended.
    further_reads: Callable[[], Sequence[Read]] = tuple

    def __post_init__(self) -> None:
        self.state = RecordState(self.nonce, self.loss_timeout, self.requeue, LineReader(self.reattach.offset))
        self._prefix = "[rayslurm] " if self.component is None else f"[rayslurm] {self.component}: "
        self.output = OutputWriter("" if self.component is None else f"[{self.component}] ", self._warn)
        self._fabric = FabricWatch(self.fabric)
        self.messages = MessageForwarder(self.handler, self.log, self._prefix, self.requeue, self.reattach.logged)

    @property
    def evidence(self) -> Evidence:
        """The evidence about the payload so far."""
        return self.state.evidence

    def poll(self, runtime_exit: RuntimeExit, deadline: float = float("inf")) -> float | None:
        """Read the new part of the run record once; returns the seconds to wait before the next poll, None for no more polls.

        `runtime_exit` is called before the read, and returns how the runtime has ended; None while it lives. `deadline` is a time
        of the monotonic clock. After the deadline, the result is None as soon as all data that is already there has been read.
        """
        # The runtime's end is checked before the read, so that the read finds all that a runtime wrote before its end.
        exited = runtime_exit(self.evidence)
        size = self.read_once()
        now = time.monotonic()
        return self.state.next_read(size, exited, self.cadence, now, now > deadline)

    def next_reads(self) -> list[Read]:
        """Returns the reads of files that the next `poll` will do, as tuples of path, offset and number of bytes.

        The caller can then read the files of many payloads by one remote call.
        """
        offsets = (STDIO, self.state.output.next_read), (JOURNAL, self.state.journal.next_read)
        own = [(os.path.join(self.run_dir, name), offset, CHUNK) for name, offset in offsets]
        return [*own, *self.further_reads()]

    def read_once(self) -> int:
        """Read the output and the journal once each, and process the new data; returns the number of bytes of the larger read.

        A failed read counts as 0 bytes. The first of several failures is logged.
        """
        state, note = self.state, self.reattach.note
        # Output is read first, so that a message about a result follows the output before it.
        output, size = self._read(STDIO, state.output)
        for record in output:
            self.output.write(record["s"], record["d"])
            self.evidence.add_output(record)
            self._fabric.feed(record["s"], record["d"])
        if size:
            self.output.flush()
            if not self.output.partial:
                note(state.output.offset)
        journal, journal_size = self._read(JOURNAL, state.journal)
        for record in journal:
            self._add(record)
        if warning := self._fabric.warning(len(self.evidence.context.get("nodes") or ())):
            self.messages.log(logging.WARNING, warning)
        return max(size, journal_size)

    def finish(self) -> None:
        """Pass Dagster the results that were held because Slurm might requeue the job, and show unfinished lines of output.

        Called after the last poll.
        """
        if self.state.missing_output and self.evidence.runtime_exit is not None:
            self._warn(f"{self.state.missing_output} bytes of the recorded output never came into sight")
        self.evidence.damaged_lines = self.state.journal.damaged
        self.messages.forward_held(self.evidence)
        self.flush_output()

    def flush_output(self) -> None:
        """Show the unfinished last line of each output stream."""
        self.output.finish()

    def _read(self, name: str, reader: LineReader) -> tuple[list[Record], int]:
        """Read new data of the file `name` of the run record; returns the records of new lines, and the number of bytes read.

        If the read fails, the result is ([], 0), and the first of several failures is logged.
        """
        try:
            data = self.connection.read(os.path.join(self.run_dir, name), reader.next_read, CHUNK)
        except OSError as error:
            if self.state.read_failed(error, time.monotonic()):
                self._warn(f"the record cannot be read, the run goes on: {error}")
            return [], 0
        self.state.unreachable_since = None
        return reader.feed(data), len(data)

    def _add(self, record: Record) -> None:
        """Add a record of the journal to the evidence; a Pipes message or a phase is also passed to Dagster."""
        if self.state.add(record):
            held = len(self.messages.held)
            self.messages.held.clear()
            dropped = f", {held} results of the one before are dropped" if held else ""
            self.messages.log(logging.WARNING, f"Slurm has requeued the job: attempt {record['attempt'] + 1} begins{dropped}")
        kind = record.get("type")
        if kind == "pipes":
            self.messages.forward(record["line"], self.evidence)
        elif kind == "phase":
            level = logging.WARNING if record["phase"] in WARNING_PHASES else logging.INFO
            self.messages.log(level, f"{record['phase']}: {record['message']}")

    def _warn(self, text: str) -> None:
        self.log.warning(self._prefix + text)


@dataclass(frozen=True)
class Following:
    """Payloads of one run that a caller is to follow together, until all have ended or the deadline has come."""

    # Each payload's follower, and a function that says how the payload's runtime has ended, or None while the runtime lives.
    followed: Sequence[tuple[Follower, RuntimeExit]]
    deadline: float = float("inf")  # A time of the monotonic clock.
    # The caller calls this function at a further interrupt, to end the payloads without their grace periods.
    hurry: Callable[[], object] = lambda: None

    def steps(self) -> Iterator[tuple[Follower, float]]:
        """Generator that follows the payloads: yields the follower to poll next, and the time of the poll by the monotonic clock.

        The caller waits until this time, and then asks for the next item; the generator itself does the poll. When all payloads
        have ended or the deadline has passed, the generator calls `finish` of all followers and ends.
        """
        followed = self.followed
        for follower, _ in followed:
            follower.evidence.last_growth = time.monotonic()
        due = dict.fromkeys(range(len(followed)), 0.0)
        ended: set[int] = set()
        late_polls = _LATE_POLLS
        while len(ended) < len(followed) or (late_polls and len({follower.state.restarts for follower, _ in followed}) > 1):
            late_polls -= len(ended) == len(followed)
            index = min(due, key=lambda each: due[each])
            follower, runtime_exit = followed[index]
            yield follower, due[index]
            pause = follower.poll(runtime_exit, self.deadline)
            (ended.add if pause is None else ended.discard)(index)
            # If Slurm requeues the job because other components still run, all of its payloads run again.
            if pause is not None or (follower.requeue and follower.component is not None):
                due[index] = time.monotonic() + (follower.cadence.idle if pause is None else pause)
            else:
                del due[index]
        for follower, _ in followed:
            follower.finish()


def follow_all(followed: Sequence[tuple[Follower, RuntimeExit]], deadline: float = float("inf")) -> None:
    """Follow several payloads in this thread; blocks until all have ended, or until `deadline` by the monotonic clock.

    `followed` has a follower for each payload, and a function that returns how the runtime of the payload has ended.
    """
    for _, due in Following(followed, deadline).steps():
        time.sleep(max(0.0, due - time.monotonic()))
