"""Follow payloads: read their records while they grow, and pass output and messages to Dagster in the step's own thread.

The state of a follower is two byte offsets and the evidence so far. A read that fails is repeated until the record has been
unreachable for too long.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..runtime.protocol.end import EndReason
from ..runtime.protocol.record import JOURNAL, STDIO, LineReader, Record
from ..ssh.base import ConnectionFailed
from .evidence import Evidence
from .messages import MessageForwarder
from .output import OutputWriter

CHUNK = 1024 * 1024
"""Most bytes of one read of a record."""

VISIBILITY_TIMEOUT = 60.0
"""Seconds to wait for data that must have been written already: a network file system may show a file, or a part of a file,
that late (nfs(5): acregmax is 60 seconds)."""

_WARNING_PHASES = ("memory", "own-ray", "unschedulable")
"""Phases that are warnings in the Dagster log, because the user should fix something."""

_TAIL = 65536
"""Most bytes of earlier output that become evidence again after a reattach."""

_LATE_POLLS = 10
"""Most polls after the ends of all records, to wait for a component whose record still ends before the last requeue."""

RuntimeExit = Callable[[Evidence], "str | None"]
"""Callback that returns how the runtime ended, in words; None while the runtime lives."""


class ReadsFiles(Protocol):
    """The part of a connection that the follower needs."""

    def read(self, path: str, offset: int, limit: int) -> bytes:
        """Returns bytes of a file from an offset on; b"" at the end of the file, or if the file does not exist yet."""
        ...


@dataclass(frozen=True)
class Cadence:
    """How many seconds to pause between two reads of a record: `busy` while data flows, then a share of the silence so far.

    So new data waits for no longer than a fraction of the silence before it, and a silent run costs next to nothing.

    Attributes:
        busy: the shortest pause.
        idle: the longest pause once the payload has started.
        waiting: the longest pause before the payload starts.
        share: the pause as a fraction of the silence so far.
    """

    busy: float
    idle: float
    waiting: float
    share: float = 0.1

    def pause(self, silence: float, started: bool) -> float:
        """Returns the seconds until the next read, after `silence` seconds without new data."""
        return min(max(self.busy, self.share * silence), self.idle if started else self.waiting)


@dataclass(frozen=True)
class ReattachState:
    """The output and log lines of a payload that an earlier Dagster process showed before it died; empty for a new payload.

    Attributes:
        offset: the byte of the recorded output at which to continue.
        logged: level and text of log lines in Dagster's event log since the payload started, oldest first.
        note: called with the offset up to which all output was shown.
    """

    offset: int = 0
    logged: Iterator[tuple[int, str]] = field(default_factory=lambda: iter(()))
    note: Callable[[int], None] = lambda _: None


def follow_all(followed: Sequence[tuple[Follower, RuntimeExit]], deadline: float | None = None) -> None:
    """Follow the records of several payloads at once, each at its own pace, until all have ended.

    Args:
        followed: followers, each with the callback that reports the end of its runtime.
        deadline: value of `time.monotonic()` at which to stop even before the ends.
    """
    for follower, _ in followed:
        follower.start()
    due = dict.fromkeys(range(len(followed)), 0.0)
    ended: set[int] = set()
    late_polls = _LATE_POLLS
    while len(ended) < len(followed) or (late_polls and len({follower.restarts for follower, _ in followed}) > 1):
        late_polls -= len(ended) == len(followed)
        index = min(due, key=lambda each: due[each])
        time.sleep(max(0.0, due[index] - time.monotonic()))
        follower, runtime_exit = followed[index]
        pause = follower.poll(runtime_exit, deadline)
        if pause is not None:
            ended.discard(index)
            due[index] = time.monotonic() + pause
            continue
        ended.add(index)
        if follower.may_restart:  # If Slurm requeues the job, all of its payloads run again.
            due[index] = time.monotonic() + follower.cadence.idle
        else:
            del due[index]
    for follower, _ in followed:
        follower.finish()


class Follower:
    """Follows one payload's record to its `end`: shows output, forwards messages, and collects evidence.

    Args:
        nonce: the payload's nonce; an `end` with another nonce is ignored.
        loss_timeout: seconds for which the record may be unreachable.
        requeue: whether Slurm may requeue the job. Then results wait until the payload has ended, and an `end` after a
            signal from outside is not final.
        component: the component's name, a prefix of output and log lines; None for a run with one payload.
        reattach: the output and log lines that an earlier Dagster process showed; None for a new payload.

    Attributes:
        evidence: what is known of the payload so far; a new object after each requeue.
        restarts: how often Slurm has requeued the job, as of the last read.
    """

    def __init__(
        self,
        connection: ReadsFiles,
        run_dir: str,
        nonce: str,
        handler: Any,
        log: Any,
        cadence: Cadence,
        loss_timeout: float = 86400.0,
        requeue: bool = False,
        component: str | None = None,
        reattach: ReattachState | None = None,
    ) -> None:
        self.evidence = Evidence()
        self.restarts = 0
        self.cadence = cadence
        self._connection = connection
        self._nonce = nonce
        self._loss_timeout = loss_timeout
        self._requeue = requeue
        self._component = component
        self._log = log
        self._prefix = "[rayslurm] " if component is None else f"[rayslurm] {component}: "
        self._reattach = reattach or ReattachState()
        self._output = OutputWriter(component, self._warn)
        self._messages = MessageForwarder(handler, log, self._prefix, requeue, self._reattach.logged)
        self._unreachable_since: float | None = None
        self._paths = {name: os.path.join(run_dir, name) for name in (JOURNAL, STDIO)}
        self._readers = {JOURNAL: LineReader(), STDIO: LineReader(self._reattach.offset)}

    def start(self) -> None:
        """Prepare for the first poll; after a reattach, the end of the output that was shown before becomes evidence again."""
        self.evidence.last_growth = time.monotonic()
        offset = self._reattach.offset
        if offset and not self.evidence.last_output:
            reader = LineReader(max(0, offset - _TAIL))
            with contextlib.suppress(OSError):
                for record in reader.feed(self._connection.read(self._paths[STDIO], reader.offset, offset - reader.offset)):
                    self.evidence.add_output(record)

    def poll(self, runtime_exit: RuntimeExit, deadline: float | None = None) -> float | None:
        """Read new parts of the record once.

        Returns:
            The seconds until the next read; None if the record has ended, or nothing more will come.
        """
        # The runtime's end is checked before the read, so that the read finds all that a runtime wrote before its end.
        exited = runtime_exit(self.evidence)
        size = self.read_once()
        now = time.monotonic()
        if size:
            self.evidence.last_growth = now
        silence = now - self.evidence.last_growth
        overdue = deadline is not None and now > deadline
        if self._complete() or self.evidence.unreachable:
            return None
        if size >= CHUNK or (size and self.evidence.end is not None):
            return 0.0  # More data is there: behind a full chunk, or output that was written before the `end`.
        if not size and exited is not None and self.reachable:
            self.evidence.runtime_exit = exited
            missing = self._missing_output()
            if missing and silence < VISIBILITY_TIMEOUT and not overdue:
                return self.cadence.pause(silence, started=True)
            if missing:
                self._warn(f"{missing} bytes of the recorded output never came into sight")
            return None
        return None if overdue else self.cadence.pause(silence, self.evidence.started)

    def finish(self) -> None:
        """Called after the last read: forward results that were held back, and show unfinished lines."""
        self.evidence.damaged_lines = self._readers[JOURNAL].damaged
        self._messages.forward_held(self.evidence)
        self.flush_output()

    def flush_output(self) -> None:
        """Show the last lines of output even if they have no line end."""
        self._output.finish()

    def refuse(self, error: Exception) -> None:
        """Called when Dagster refuses a result of this payload after the last read: the refusal becomes evidence."""
        self._messages.refuse(error, self.evidence)

    @property
    def may_restart(self) -> bool:
        """Whether Slurm may requeue the job although this payload has ended, because other components still run."""
        return self._requeue and self._component is not None

    @property
    def reachable(self) -> bool:
        """Whether the last read of the record worked."""
        return self._unreachable_since is None

    def read_once(self) -> int:
        """Read new output and new lines of the journal; returns the size of the longer of both reads."""
        # Output is read first, so that a message about a result follows the output before it.
        return max(self._read(STDIO, self._add_output), self._read(JOURNAL, self._add_record))

    def _read(self, name: str, add: Callable[[Record], None]) -> int:
        """Read new data of one file of the record, and call `add` with each complete line; returns the bytes read."""
        reader = self._readers[name]
        try:
            data = self._connection.read(self._paths[name], reader.next_read, CHUNK)
            self._unreachable_since = None
        except OSError as error:
            self._read_failed(error)
            return 0
        for record in reader.feed(data):
            add(record)
        if name == STDIO and data:
            self._output.flush()
            if not self._output.has_partial_line:
                self._reattach.note(reader.offset)
        return len(data)

    def _read_failed(self, error: OSError) -> None:
        """Called when a read fails: warn the first time, and mark the payload unreachable after `loss_timeout`."""
        now = time.monotonic()
        if self._unreachable_since is None:
            self._unreachable_since = now
            self._warn(f"the record cannot be read, the run goes on: {error}")
        elif now - self._unreachable_since > self._loss_timeout:
            self.evidence.unreachable = str(error)
            self.evidence.connection_lost = isinstance(error, ConnectionFailed)

    def _complete(self) -> bool:
        """Whether the final `end` and all output before the `end` were read."""
        end = self.evidence.end
        if end is None or (self._requeue and end["reason"] == EndReason.TERMINATED):
            return False
        return not self._missing_output()

    def _missing_output(self) -> int:
        """Returns how many bytes of the output before the `end` have not been read."""
        end = self.evidence.end
        return 0 if end is None else max(0, int(end.get("stdio_bytes", 0)) - self._readers[STDIO].offset)

    def _add_output(self, record: Record) -> None:
        self._output.write(record["s"], record["d"])
        self.evidence.add_output(record)

    def _add_record(self, record: Record) -> None:
        """Add a line of the journal to the evidence, and pass a message or phase to Dagster."""
        kind = record.get("type")
        if kind == "start" and record.get("attempt", 0) > self.restarts:
            self._restart(record["attempt"])
        self.evidence.add_record(record, self._nonce)
        if kind == "pipes":
            self._messages.forward(record["line"], self.evidence)
        elif kind == "phase":
            level = logging.WARNING if record["phase"] in _WARNING_PHASES else logging.INFO
            self._messages.log(level, f"{record['phase']}: {record['message']}")

    def _restart(self, attempt: int) -> None:
        """Begin with new evidence after Slurm requeued the job: results from before the requeue do not count."""
        held = self._messages.drop_held()
        dropped = f", {held} results of the one before are dropped" if held else ""
        self._messages.log(logging.WARNING, f"Slurm has requeued the job: attempt {attempt + 1} begins{dropped}")
        self.restarts = attempt
        self._readers[JOURNAL].damaged = 0
        self.evidence = Evidence(last_output=self.evidence.last_output, interrupted=self.evidence.interrupted)

    def _warn(self, text: str) -> None:
        self._log.warning(self._prefix + text)
