"""The follower: reads a record while it grows and hands each part to Dagster, in the step's own thread.

Its whole state is two byte offsets and what the evidence says so far; a read that fails is simply tried again until
the record was out of reach for too long. What another process handed on before it was killed is not handed on again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..errors import without_colours
from ..runtime.protocol.end import EndReason
from ..runtime.protocol.record import JOURNAL, STDIO, LineReader, Record
from ..ssh.base import ConnectionFailed
from .bookmark import ReattachState
from .evidence import Evidence
from .multiplexed_output import MultiplexedOutput

CHUNK = 1024 * 1024

OUT_OF_SIGHT = 60.0
"""Seconds without news for which what must have been written is waited for: a network file system may show one file, or one
part of it, later than another (nfs(5): acregmax is 60 seconds)."""

_WARNINGS = ("memory", "own-ray", "unschedulable")
"""Phases that tell the user of something to mend."""

_TAIL = 65536
"""Bytes of the record of output that were handed on before, and yet belong to the last output."""

_LATE_LOOKS = 10
"""Looks at records whose end is that of an attempt before the last one, once all are at an end."""


class ReadsFiles(Protocol):
    """What the follower needs of a connection."""

    def read(self, path: str, offset: int, limit: int) -> bytes:
        """Bytes of a file from an offset on; b"" at its end or if it is not there yet."""
        ...


@dataclass(frozen=True)
class Cadence:
    """Seconds between two reads: `busy` while data flows, then a share of the silence so far.

    So nobody waits for news longer than a fraction of the time that there were none, and a run that says nothing for
    hours costs next to nothing.

    Attributes:
        busy: the shortest pause.
        idle: the longest one of a run that has started.
        waiting: the longest one before.
    """

    busy: float
    idle: float
    waiting: float
    share: float = 0.1

    def pause(self, silence: float, started: bool) -> float:
        """Seconds until the next read after so many seconds of silence."""
        return min(max(self.busy, self.share * silence), self.idle if started else self.waiting)


def follow_all(followed: Sequence[tuple[Follower, Callable[[Evidence], str | None]]], deadline: float | None = None) -> None:
    """Follow records at once, each at its own pace, until all of them are at their end.

    Args:
        followed: each with what is asked between reads, and says how the runtime ended once it did.
        deadline: `time.monotonic()` at which to stop all the same.
    """
    for follower, _ in followed:
        follower.begin()
    due = dict.fromkeys(range(len(followed)), 0.0)
    at_the_end: set[int] = set()
    looks = _LATE_LOOKS
    while len(at_the_end) < len(followed) or (looks and len({follower.attempt for follower, _ in followed}) > 1):
        looks -= len(at_the_end) == len(followed)  # One whose record tells of the last attempt a moment later.
        next_one = min(due, key=lambda place: due[place])
        wait = due[next_one] - time.monotonic()
        if wait > 0:
            time.sleep(wait)
        follower, runtime_exited = followed[next_one]
        pause = follower.turn(runtime_exited, deadline)
        if pause is not None:
            at_the_end.discard(next_one)
            due[next_one] = time.monotonic() + pause
            continue
        at_the_end.add(next_one)
        if follower.may_begin_anew:  # With the others, should Slurm requeue their job.
            due[next_one] = time.monotonic() + follower.cadence.idle
        else:
            del due[next_one]
    for follower, _ in followed:
        follower.conclude()


class Follower:
    """Follows one record to its `end`.

    Args:
        connection: how to read the record.
        run_dir: where it is.
        nonce: the attempt that counts; the `end` of another one is none.
        handler: Dagster's handler of Pipes messages.
        log: the step's log.
        cadence: how often to read.
        loss_timeout: seconds for which the record may be out of reach.
        requeue: whether Slurm may run the job again. Then results count only once their attempt has ended, and the
            `end` that a signal from outside made is not the last word.
        component: the component whose payload it is, which then stands before each line; None for the only payload.
        handed_on: what of it was handed on before.
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
        handed_on: ReattachState | None = None,
    ) -> None:
        self._whose = "" if component is None else f"{component}: "
        self._shown = None if component is None else MultiplexedOutput(f"[{component}] ")
        self.evidence = Evidence()
        self._connection = connection
        self._nonce = nonce
        self._handler = handler
        self._log = log
        self.cadence = cadence
        self._loss_timeout = loss_timeout
        self._requeue = requeue
        self._attempt = 0
        self._results: list[dict[str, Any]] = []
        self._unreachable_since: float | None = None
        self._output_lost = False
        self._paths = {name: os.path.join(run_dir, name) for name in (JOURNAL, STDIO)}
        self._handed_on = handed_on or ReattachState()
        self._readers = {JOURNAL: LineReader(), STDIO: LineReader(self._handed_on.offset)}

    def _look_back(self) -> None:
        """Take the last output that was shown before as evidence, too."""
        offset = self._handed_on.offset
        reader = LineReader(max(0, offset - _TAIL))
        with contextlib.suppress(OSError):
            for record in reader.feed(self._connection.read(self._paths[STDIO], reader.offset, offset - reader.offset)):
                self.evidence.take_output(record)

    def follow(self, runtime_exited: Callable[[Evidence], str | None], deadline: float | None = None) -> Evidence:
        """Read until the `end`, or until the runtime is gone and nothing is left to read.

        Args:
            runtime_exited: asked between reads; says how the runtime ended once it did.
            deadline: `time.monotonic()` at which to stop all the same.
        """
        follow_all([(self, runtime_exited)], deadline)
        return self.evidence

    def begin(self) -> None:
        """Take note that the record is followed from now on."""
        self.evidence.heard_at = time.monotonic()
        if self._handed_on.offset and not self.evidence.last_output:
            self._look_back()

    def turn(self, runtime_exited: Callable[[Evidence], str | None], deadline: float | None = None) -> float | None:
        """Read once, and see what follows.

        Returns:
            Seconds until the next read is worth it; None if there is to be none.
        """
        # Asked before the read: what a runtime wrote before it ended is then read for sure.
        exited = runtime_exited(self.evidence)
        progress = self.read_once()
        if self._complete() or self.evidence.unreachable:
            return None
        if progress:
            self.evidence.heard_at = time.monotonic()
            # A full chunk has more behind it, and an `end` all that is left; else the next batch is worth a wait.
            if progress >= CHUNK or self.evidence.end is not None:
                return 0.0
        if not progress and exited is not None and self._unreachable_since is None:
            self.evidence.runtime_exit = exited
            missing = self._bytes_missing()
            if missing:
                silence = time.monotonic() - self.evidence.heard_at
                if silence < OUT_OF_SIGHT and (deadline is None or time.monotonic() < deadline):
                    return self.cadence.pause(silence, started=True)
                self._log.warning(f"[rayslurm] {self._whose}{missing} bytes of the recorded output never came into sight")
            return None
        if deadline is not None and time.monotonic() > deadline:
            return None
        return self.cadence.pause(time.monotonic() - self.evidence.heard_at, self.evidence.started)

    def conclude(self) -> None:
        """Hand over what was held back, now that nothing more is read."""
        self.evidence.damaged_lines = self._readers[JOURNAL].damaged
        for message in self._results:
            self._hand_over(message)
        self._results.clear()
        self.show_rest()

    def show_rest(self) -> None:
        """Show the last lines of the output, though they have no end."""
        if self._shown is not None:
            for stream, rest in self._shown.rest():
                self._show(stream, rest)

    @property
    def attempt(self) -> int:
        """How often the job had been requeued when the record was read last."""
        return self._attempt

    @property
    def may_begin_anew(self) -> bool:
        """Whether the job may be run again, of which this is not the only payload."""
        return self._requeue and self._shown is not None

    @property
    def in_reach(self) -> bool:
        """Whether the last read worked."""
        return self._unreachable_since is None

    def read_once(self) -> int:
        """Read what is there; the bytes of the longer of the two reads."""
        # Output first: the message that reports a result then follows the lines that led to it.
        return max(self._read(STDIO, self._take_output), self._read(JOURNAL, self._take))

    def _read(self, name: str, take: Callable[[Record], None]) -> int:
        reader = self._readers[name]
        try:
            data = self._connection.read(self._paths[name], reader.next_read, CHUNK)
            self._unreachable_since = None
        except OSError as error:
            self._out_of_reach(error)
            return 0
        for record in reader.feed(data):
            take(record)
        if name == STDIO and data:
            self._print(lambda: (sys.stdout.flush(), sys.stderr.flush()))
            if self._shown is None or not self._shown.waits:
                self._handed_on.note(reader.offset)
        return len(data)

    def _out_of_reach(self, error: OSError) -> None:
        now = time.monotonic()
        if self._unreachable_since is None:
            self._unreachable_since = now
            self._log.warning(f"[rayslurm] {self._whose}the record cannot be read, the run goes on: {error}")
        elif now - self._unreachable_since > self._loss_timeout:
            self.evidence.unreachable = str(error)
            self.evidence.cut_off = isinstance(error, ConnectionFailed)

    def _complete(self) -> bool:
        """Whether the `end` and all the output before it are in."""
        end = self.evidence.end
        if end is None or (self._requeue and end["reason"] == EndReason.TERMINATED):
            return False
        return not self._bytes_missing()

    def _bytes_missing(self) -> int:
        """How much of the output that was recorded before the `end` has not come yet."""
        end = self.evidence.end
        return 0 if end is None else max(0, int(end.get("stdio_bytes", 0)) - self._readers[STDIO].offset)

    def _take_output(self, record: Record) -> None:
        text = record["d"] if self._shown is None else self._shown.lines(record["s"], record["d"])
        self._show(record["s"], text)
        self.evidence.take_output(record)

    def _show(self, name: str, text: str) -> None:
        stream = sys.stderr if name == "stderr" else sys.stdout
        try:
            self._print(lambda: stream.write(text))
        except UnicodeEncodeError:  # Dagster runs in a locale without UTF-8.
            self._print(lambda: stream.write(text.encode("ascii", "backslashreplace").decode("ascii")))

    def _print(self, write: Callable[[], Any]) -> None:
        """Write to Dagster's own output; a lost terminal or a full disk there is no reason to end a payload."""
        try:
            write()
        except OSError as error:
            if not self._output_lost:
                self._output_lost = True
                self._log.warning(f"[rayslurm] {self._whose}the payload's output cannot be shown: {error}")

    def _take(self, record: Record) -> None:
        kind = record.get("type")
        if kind == "start":
            if record.get("attempt", 0) > self._attempt:
                self._begin_anew(record["attempt"])
            self.evidence.started_at = float(record["at"])
        elif kind == "pipes":
            self._take_message(record["line"])
        elif kind == "phase":
            self.evidence.nodes_lost += record["phase"] == "node-lost"
            self.evidence.queued = record["phase"] == "queued"
            level = logging.WARNING if record["phase"] in _WARNINGS else logging.INFO
            self._say(level, f"{record['phase']}: {record['message']}")
        elif kind == "tail":
            self.evidence.tails[record["name"]] = record["text"]
        elif kind == "context":
            self.evidence.context = record["context"]
        elif kind == "usage":
            self.evidence.take_usage(record["usage"], record["memory"])
        elif kind == "end" and record.get("nonce") == self._nonce:
            self.evidence.end = record

    def _take_message(self, line: str) -> None:
        """Hand one Pipes message to Dagster; one that Dagster refuses is kept as evidence, not swallowed."""
        evidence = self.evidence
        try:
            message = json.loads(line)
            method, params = message["method"], message.get("params") or {}
            if not isinstance(method, str):
                raise TypeError(f"its method is {method!r}")
            evidence.opened += method == "opened"
            evidence.closed += method == "closed"
            if method == "log" or method.startswith("report_"):
                # Its writer has Pipes open still: a forked child that left the context has closed it for its parent.
                evidence.closed = min(evidence.closed, max(0, evidence.opened - 1))
            if method == "closed" and params.get("exception"):
                params["exception"] = _without_colours(params["exception"])
            exception = params.get("exception") if method == "closed" else None
            # Every click or typer main ends with SystemExit; the exit code says what it meant.
            if exception and exception.get("name") != "SystemExit" and evidence.exception is None:
                evidence.exception = exception
        except Exception as error:  # noqa: BLE001 - whatever is wrong with a user's message
            return self._refused(line, error)
        if self._requeue and method.startswith("report_"):
            self._results.append(message)
        else:
            self._hand_over(message)

    def _hand_over(self, message: dict[str, Any]) -> None:
        try:
            if not self._is_logged(message):
                self._handler.handle_message(message)
        except Exception as error:  # noqa: BLE001 - whatever Dagster's handler raises on a user's message
            self._refused(json.dumps(message), error)

    def refuse(self, error: Exception) -> None:
        """Take note that what the payload reported cannot be used after all."""
        self._refused("", error)

    def _refused(self, line: str, error: Exception) -> None:
        why = f"{type(error).__name__}: {error}"
        shown = f"; the message was: {line[:500]}" if line else ""
        self.evidence.message_error = self.evidence.message_error or why + shown
        self._say(logging.ERROR, f"a Pipes message cannot be used: {why}")

    def _say(self, level: int, text: str) -> None:
        """Log what the record tells, unless it was logged before."""
        text = f"[rayslurm] {self._whose}{text}"
        if not self._stands_in_log(level, text):
            self._log.log(level, text)

    def _is_logged(self, message: dict[str, Any]) -> bool:
        """Whether it is a log message that stands in Dagster's event log."""
        if message["method"] != "log":
            return False
        params = message.get("params") or {}
        level = logging.getLevelName(str(params.get("level", "INFO")).upper())
        return isinstance(level, int) and self._stands_in_log(level, params.get("message"))

    def _stands_in_log(self, level: int, text: Any) -> bool:
        # What is below the level that Dagster logs is not to be looked for: it would not be found, and end the search.
        return self._log.isEnabledFor(level) and (level, text) in self._handed_on.logged

    def _begin_anew(self, attempt: int) -> None:
        """Slurm has requeued the job: what the attempt before it reported does not count."""
        dropped = f", {len(self._results)} results of the one before are dropped" if self._results else ""
        self._say(logging.WARNING, f"Slurm has requeued the job: attempt {attempt + 1} begins{dropped}")
        self._attempt = attempt
        self._results.clear()
        self._readers[JOURNAL].damaged = 0
        kept = self.evidence.last_output
        self.evidence = Evidence(last_output=kept, interrupted=self.evidence.interrupted)


def _without_colours(value: Any) -> Any:
    """An exception as Pipes tells of it, without escape codes: Ray's have some in their messages."""
    if isinstance(value, str):
        return without_colours(value)
    if isinstance(value, dict):
        return {key: _without_colours(each) for key, each in value.items()}
    return [_without_colours(each) for each in value] if isinstance(value, list) else value
