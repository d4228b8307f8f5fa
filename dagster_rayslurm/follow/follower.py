"""Read records while they grow, and hand them to Dagster in the step's own thread.

A follower's state is two byte offsets and the evidence so far. A read that fails is repeated until the record was
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

VISIBILITY_TIMEOUT = 60.0
"""Seconds to wait for data that must have been written: a network file system may show one file, or one part of it, later
than another (nfs(5): acregmax is 60 seconds)."""

_WARNING_PHASES = ("memory", "own-ray", "unschedulable")
"""Phases that name something the user should fix."""

_TAIL = 65536
"""Bytes of output before the reattach offset that still belong to the last output."""

_LATE_POLLS = 10
"""Polls after all records ended, while one of them still belongs to an earlier run of a requeued job."""

RuntimeExit = Callable[[Evidence], "str | None"]
"""Says how the runtime ended, in words; None while it lives."""


class ReadsFiles(Protocol):
    """The part of a connection that the follower needs."""

    def read(self, path: str, offset: int, limit: int) -> bytes:
        """Bytes of a file from an offset on; b"" at its end, or if the file does not exist yet."""
        ...


@dataclass(frozen=True)
class Cadence:
    """Seconds between two reads: `busy` while data flows, then a share of the silence so far.

    So news waits for no longer than a fraction of the silence before it, and a silent run costs next to nothing.

    Attributes:
        busy: the shortest pause.
        idle: the longest pause of a run that has started.
        waiting: the longest pause before the start.
    """

    busy: float
    idle: float
    waiting: float
    share: float = 0.1

    def pause(self, silence: float, started: bool) -> float:
        """Seconds until the next read after so many seconds of silence."""
        return min(max(self.busy, self.share * silence), self.idle if started else self.waiting)


@dataclass(frozen=True)
class ReattachState:
    """What an earlier Dagster process handed to Dagster before it died; empty for a new payload.

    Attributes:
        offset: where in the recorded output to continue.
        logged: level and text of log lines in Dagster's event log since the payload started, oldest first.
        note: called with the offset up to which output is shown.
    """

    offset: int = 0
    logged: Iterator[tuple[int, str]] = field(default_factory=lambda: iter(()))
    note: Callable[[int], None] = lambda _: None


def follow_all(followed: Sequence[tuple[Follower, RuntimeExit]], deadline: float | None = None) -> None:
    """Follow several records at once, each at its own pace, until all have ended.

    Args:
        followed: followers, each with the callback that reports the end of its runtime.
        deadline: `time.monotonic()` at which to stop in any case.
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
    """Follows one record to its `end`.

    Args:
        nonce: the payload's nonce; an `end` with another nonce is ignored.
        loss_timeout: seconds for which the record may be unreachable.
        requeue: whether Slurm may run the job again. Then results count only once their attempt has ended, and an
            `end` after a signal from outside is not final.
        component: prefix of output and log lines; None for a run with one payload.
        reattach: what an earlier Dagster process handed on.

    Attributes:
        evidence: what is known so far; a new object after each requeue.
        restarts: how often Slurm had requeued the job at the last read.
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
        """Start to follow; after a reattach, output that was shown before becomes evidence again."""
        self.evidence.last_growth = time.monotonic()
        offset = self._reattach.offset
        if offset and not self.evidence.last_output:
            reader = LineReader(max(0, offset - _TAIL))
            with contextlib.suppress(OSError):
                for record in reader.feed(self._connection.read(self._paths[STDIO], reader.offset, offset - reader.offset)):
                    self.evidence.add_output(record)

    def poll(self, runtime_exit: RuntimeExit, deadline: float | None = None) -> float | None:
        """Read once.

        Returns:
            Seconds until the next read; None if the record has ended, or nothing more will come.
        """
        # Asked before the read, so that everything is read that a runtime wrote before it ended.
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
            return 0.0  # More is waiting: behind a full chunk, and before an `end`.
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
        """Forward what was held back, after the last read."""
        self.evidence.damaged_lines = self._readers[JOURNAL].damaged
        self._messages.forward_held(self.evidence)
        self.flush_output()

    def flush_output(self) -> None:
        """Show the last lines of output even if they are unfinished."""
        self._output.finish()

    def refuse(self, error: Exception) -> None:
        """Record that a reported result cannot be used after all."""
        self._messages.refuse(error, self.evidence)

    @property
    def may_restart(self) -> bool:
        """Whether Slurm may run the job again, which has other payloads, too."""
        return self._requeue and self._component is not None

    @property
    def reachable(self) -> bool:
        """Whether the last read worked."""
        return self._unreachable_since is None

    def read_once(self) -> int:
        """Read what has arrived; returns the bytes of the longer of both reads."""
        # Output first: then a message that reports a result follows the lines that led to it.
        return max(self._read(STDIO, self._add_output), self._read(JOURNAL, self._add_record))

    def _read(self, name: str, add: Callable[[Record], None]) -> int:
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
        now = time.monotonic()
        if self._unreachable_since is None:
            self._unreachable_since = now
            self._warn(f"the record cannot be read, the run goes on: {error}")
        elif now - self._unreachable_since > self._loss_timeout:
            self.evidence.unreachable = str(error)
            self.evidence.connection_lost = isinstance(error, ConnectionFailed)

    def _complete(self) -> bool:
        """Whether the final `end` and all output before it were read."""
        end = self.evidence.end
        if end is None or (self._requeue and end["reason"] == EndReason.TERMINATED):
            return False
        return not self._missing_output()

    def _missing_output(self) -> int:
        """Bytes of output that were recorded before the `end` and have not been read."""
        end = self.evidence.end
        return 0 if end is None else max(0, int(end.get("stdio_bytes", 0)) - self._readers[STDIO].offset)

    def _add_output(self, record: Record) -> None:
        self._output.write(record["s"], record["d"])
        self.evidence.add_output(record)

    def _add_record(self, record: Record) -> None:
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
        """Begin with new evidence after Slurm requeued the job: results of the attempt before do not count."""
        held = self._messages.drop_held()
        dropped = f", {held} results of the one before are dropped" if held else ""
        self._messages.log(logging.WARNING, f"Slurm has requeued the job: attempt {attempt + 1} begins{dropped}")
        self.restarts = attempt
        self._readers[JOURNAL].damaged = 0
        self.evidence = Evidence(last_output=self.evidence.last_output, interrupted=self.evidence.interrupted)

    def _warn(self, text: str) -> None:
        self._log.warning(self._prefix + text)
