"""Collects evidence about a payload from the run record, and passes Pipes messages, log lines and output to Dagster."""

from __future__ import annotations

import collections
import contextlib
import json
import logging
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import dagster as dg
from dagster_pipes import PipesContextData, PipesExtras, PipesParams

from ..errors import without_colours
from ..runtime.protocol.record import Record, tail_lines
from ..slurm.accounting import JobFacts

_LINE = re.compile(r"[^\r\n]*(?:\r\n|\n|\r)")  # With its end; a progress bar ends each of its states with a carriage return.
_LONGEST = 65536  # Characters after which a line is shown although it has no end yet.
_OUTPUT_CHUNK = 4096  # Most characters that are kept of each chunk of output; `last_output` has 64 chunks.


@dataclass
class Evidence:
    """The facts about one payload that are known so far, from which `outcome.verdict.judge` makes the verdict."""

    end: Record | None = None  # The last record of the payload, which says how the payload ended.
    started_at: float | None = None  # When the runtime accepted the payload, by the clock of the runtime's node.
    queued: bool = False  # Whether the payload waits in a session and has not started.
    opened: int = 0  # How many processes opened Dagster Pipes: the payload, and perhaps its children.
    closed: int = 0  # How many of these processes closed Pipes.
    exception: dict[str, Any] | None = None  # The first exception that a process reported when it closed Pipes.
    message_error: str | None = None  # Why Dagster refused a Pipes message.
    runtime_exit: str | None = None  # How the runtime ended, in words, if it ended and no `end` was read.
    runtime_log: str = ""  # The last lines of the logs of the job and of the runtime; "" unless they were fetched.
    culprit: str | None = None  # A clause about the runtime whose failure ended the runtimes on the other nodes.
    job: JobFacts | None = None  # Slurm's accounting of the job; fetched only if the record does not explain the end.
    ended_unrecorded: str | None = None  # Why the payload must have ended although its runtime lives and recorded no `end`.
    interrupted: bool = False  # Whether an interrupt of Dagster ended the payload.
    # Usage, and facts about environment, nodes and allocation, so far; the `end` has the final ones.
    usage: dict[str, Any] = field(default_factory=dict)
    context: dict[str, Any] = field(default_factory=dict)
    phases: list[tuple[str, float]] = field(default_factory=list)  # The names of all phases, each with the time of its log line.
    nodes_lost: int = 0
    damaged_lines: int = 0
    unreachable: str | None = None  # Why the record could not be read for `connection_loss_timeout`.
    connection_lost: bool = False  # Whether the cluster is out of reach, and so Slurm, too.
    # When the record last grew, by this machine's monotonic clock.
    last_growth: float = field(default_factory=lambda: time.monotonic())
    tails: dict[str, str] = field(default_factory=dict)  # The ends of log files, by title.
    # The last chunks of output, each with its stream, "stdout" or "stderr".
    last_output: collections.deque[tuple[str, str]] = field(default_factory=lambda: collections.deque(maxlen=64))

    @property
    def started(self) -> bool:
        """Whether the runtime has accepted the payload."""
        return self.started_at is not None

    @property
    def end_or_partial(self) -> Record | None:
        """The `end` line of the run record; before it is read, a dictionary with the context and usage so far.

        None if there is no context either.
        """
        return self.end or ({"context": self.context, "usage": self.usage} if self.context else None)

    def add_record(self, record: Record, nonce: str) -> None:
        """Add one line of the run record's journal to the evidence; ignores an `end` line with another nonce than `nonce`."""
        kind = record.get("type")
        if kind == "start":
            self.started_at = float(record["at"])
        elif kind == "phase":
            self.phases.append((record["phase"], float(record["at"])))
            self.nodes_lost += record["phase"] == "node-lost"
            self.queued = record["phase"] == "queued"
        elif kind == "tail":
            self.tails[record["name"]] = record["text"]
        elif kind == "context":
            self.context = record["context"]
        elif kind == "usage":
            self._add_usage(record["usage"], record["memory"])
        elif kind == "end" and record.get("nonce") == nonce:
            self.end = record

    def add_message(self, method: str, params: Mapping[str, Any]) -> None:
        """Add a Pipes message, which consists of `method` and `params`, to the evidence.

        The evidence counts the messages "opened" and "closed", and keeps the first exception that a message "closed" reports. An
        exception SystemExit is not kept, because the exit code tells success from failure.
        """
        self.opened += method == "opened"
        self.closed += method == "closed"
        if method == "log" or method.startswith("report_"):
            # The sender still has Pipes open: the earlier `closed` came from a forked child that left the parent's context.
            self.closed = min(self.closed, max(0, self.opened - 1))
        exception = params.get("exception") if method == "closed" else None
        # Every main function of click or typer ends with SystemExit; the exit code tells success from failure.
        if exception and exception.get("name") != "SystemExit" and self.exception is None:
            self.exception = exception

    def add_output(self, record: Record) -> None:
        """Add a chunk of the payload's output to the evidence, which keeps only the latest chunks."""
        self.last_output.append((record["s"], record["d"][-_OUTPUT_CHUNK:]))

    def output_tail(self) -> str:
        """Returns the last lines of the output, without colour codes."""
        return tail_lines(without_colours("".join(text for _, text in self.last_output)))

    def last_errors(self) -> str:
        """Returns the last part of the payload's standard error."""
        return "".join(text for stream, text in self.last_output if stream == "stderr")

    def _add_usage(self, usage: dict[str, Any], memory: float) -> None:
        """Replace `self.usage` by `usage`, and append a point to its usage chart.

        The point has the seconds since the start, the busy CPUs, and `memory`, the bytes of memory in use at this time.
        """
        before, points = self.usage, self.usage.get("points", [])
        elapsed = usage["elapsed"] - before.get("elapsed", 0.0)
        busy = (usage["cpu_seconds"] - before.get("cpu_seconds", 0.0)) / elapsed if elapsed > 0 else 0.0
        self.usage = {**usage, "points": [*points, [usage["elapsed"], busy, memory]]}


class RecordPipes(dg.PipesContextInjector, dg.PipesMessageReader):
    """Dagster's side of the Pipes session of one run, without a channel of its own: messages come through the run record.

    `Follower` reads the messages from the record and passes them to `handler`. `writers` is the number of payloads that report
    through the session.
    """

    # Set within the session: what backends write into the run directory, and Dagster's handler of the payload's messages.
    pipes_context: PipesContextData
    handler: Any

    def __init__(self, context: dg.OpExecutionContext, writers: int = 1) -> None:
        self._context = context
        self._writers = writers

    @contextlib.contextmanager
    def inject_context(self, context_data: PipesContextData) -> Iterator[PipesParams]:
        self.pipes_context = with_partition_range(context_data, self._context)
        yield {}

    @contextlib.contextmanager
    def read_messages(self, handler: Any) -> Iterator[PipesParams]:
        self.handler = handler
        yield {}

    @property
    def expected_writer_count(self) -> int:
        return self._writers  # Dagster's own property is marked as a preview and warns at each run.

    def no_messages_debug_text(self) -> str:
        return ""

    @contextlib.contextmanager
    def session(self, extras: PipesExtras | None, uses_pipes: bool) -> Iterator[dg.PipesSession]:
        """Context manager that yields a Pipes session, and sets `pipes_context` and `handler` for the block.

        `extras` are values for the Pipes context of the payloads. Dagster's warning of missing messages is hidden if the block
        raises an exception, or if `uses_pipes` is False.
        """
        quiet = not uses_pipes

        def keep(record: logging.LogRecord) -> bool:
            return not (quiet and record.getMessage().startswith("[pipes] did not receive"))

        self._context.log.addFilter(keep)
        try:
            with dg.open_pipes_session(self._context, self, self, extras) as session:
                quiet = True  # Unless the run succeeds: a failure says more than the warning.
                yield session
                quiet = not uses_pipes
        finally:
            self._context.log.removeFilter(keep)


def has_time_windows(definition: dg.PartitionsDefinition[Any] | None) -> bool:
    """Returns whether each partition of `definition` has a time window, by itself or by its only dimension of time windows."""
    dimensions = [definition]
    if isinstance(definition, dg.MultiPartitionsDefinition):
        dimensions = [each.partitions_def for each in definition.partitions_defs]
    return sum(isinstance(each, dg.TimeWindowPartitionsDefinition) for each in dimensions) == 1


def with_partition_range(data: PipesContextData, context: dg.OpExecutionContext) -> PipesContextData:
    """Returns the Pipes context `data` with the partition range and the time window of the Dagster run.

    Dagster 1.13 omits both for several partitions. Without partitions, and if `data` has a partition range, `data` is returned
    unchanged.
    """
    if data["partition_key_range"] is not None or not (context.has_partition_key or context.has_partition_key_range):
        return data
    keys = context.partition_key_range
    data = {**data, "partition_key_range": {"start": keys.start, "end": keys.end}}
    if has_time_windows(context.get_step_execution_context().run_partitions_def):
        window = context.partition_time_window
        data = {**data, "partition_time_window": {"start": window.start.isoformat(), "end": window.end.isoformat()}}
    return data


@dataclass
class MessageForwarder:
    """Passes the Pipes messages of one payload to Dagster, and logs lines about the payload.

    Lines that an earlier Dagster process has logged are not logged again. A message that Dagster refuses is logged and noted in
    the evidence; no exception is raised.
    """

    handler: Any
    logger: Any
    prefix: str
    hold_results: bool  # Whether results wait for `forward_held`, because Slurm may requeue the job.
    # Level and text of the lines that an earlier Dagster process logged for this payload, oldest first. A new line is searched
    # only behind the line that was found last. Once a line is not found, this and all later lines are logged.
    logged: Iterator[tuple[int, str]]
    held: list[dict[str, Any]] = field(default_factory=list)

    def forward(self, line: str, evidence: Evidence) -> None:
        """Pass one Pipes message, a line of JSON, to Dagster; if `hold_results` is True, keep a result for `forward_held`.

        If the message is malformed or Dagster refuses the message, the error is logged and noted in the evidence.
        """
        try:
            message = json.loads(line)
            method, params = message["method"], message.get("params") or {}
            if not isinstance(method, str):
                raise TypeError(f"its method is {method!r}")
            if method == "closed":  # Some clients of Pipes leave out parameters without a value; Dagster expects None.
                message.setdefault("params", None)
            if method == "closed" and params.get("exception"):
                params["exception"] = _without_colours(params["exception"])
            evidence.add_message(method, params)
            if self.hold_results and method.startswith("report_"):
                self.held.append(message)
            elif method != "log" or not self._is_logged_message(params):
                self.handler.handle_message(message)
        except Exception as error:  # noqa: BLE001 - users' messages may be malformed in any way, and Dagster raises anything
            self.refuse(error, evidence, line)

    def forward_held(self, evidence: Evidence) -> None:
        """Pass Dagster the results that `forward` has kept. Called when Slurm can no longer requeue the job."""
        held, self.held = self.held, []
        for message in held:
            try:
                self.handler.handle_message(message)
            except Exception as error:  # noqa: BLE001
                self.refuse(error, evidence, json.dumps(message))

    def refuse(self, error: Exception, evidence: Evidence, line: str = "") -> None:
        """Log that a Pipes message cannot be used because of `error`, and note the first such error in the evidence.

        `line` is the message as JSON; "" if the JSON text is not available.
        """
        why = f"{type(error).__name__}: {error}"
        shown = f"; the message was: {line[:500]}" if line else ""
        evidence.message_error = evidence.message_error or why + shown
        self.log(logging.ERROR, f"a Pipes message cannot be used: {why}")

    def log(self, level: int, text: str) -> None:
        """Write `self.prefix` and `text` as a line to the Dagster log, unless an earlier Dagster process has logged this line."""
        if not self._is_logged(level, self.prefix + text):
            self.logger.log(level, self.prefix + text)

    def _is_logged_message(self, params: dict[str, Any]) -> bool:
        level = logging.getLevelName(str(params.get("level", "INFO")).upper())
        return isinstance(level, int) and self._is_logged(level, params.get("message"))

    def _is_logged(self, level: int, text: Any) -> bool:
        """Returns whether an earlier Dagster process already logged the line `text` at `level`.

        Searches `self.logged`, but only behind the line that the last call found. Once a line is not found there, later calls
        find no line either.
        """
        # A line below Dagster's log level is never in the event log, so a search for it would exhaust the iterator.
        return self.logger.isEnabledFor(level) and (level, text) in self.logged


def _without_colours(value: Any) -> Any:
    """Returns a copy of a JSON value without colour codes in texts. Messages of Ray's exceptions contain colour codes."""
    if isinstance(value, str):
        return without_colours(value)
    if isinstance(value, dict):
        return {key: _without_colours(each) for key, each in value.items()}
    return [_without_colours(each) for each in value] if isinstance(value, list) else value


@dataclass
class OutputWriter:
    """Writes a payload's output to Dagster's stdout and stderr; logs the first write error, such as a full disk, and goes on.

    If `needs_reader` is True, a pipe that nobody reads any more is no such error: the write then raises BrokenPipeError.
    """

    prefix: str  # What each line begins with, so that several payloads can share a stream; "" shows the output as it is.
    warn: Callable[[str], None]
    needs_reader: bool = False
    # By stream, a line that is not shown yet, because its end has not come. Without a prefix, unfinished lines are shown at once.
    partial: dict[str, str] = field(default_factory=dict)
    failed: bool = False

    def write(self, stream: str, text: str) -> None:
        """Write new output of the payload; `stream` is "stdout" or "stderr".

        If the writer puts a prefix before each line, it keeps an unfinished line until a later call brings the rest.
        """
        if not self.prefix:
            return self._print(stream, text)
        text = self.partial.pop(stream, "") + text
        # A carriage return as the last character may be the first half of a line end.
        end = 1 + max(text.rfind("\n"), text.rfind("\r", 0, -1))
        self._print(stream, "".join(self.prefix + line for line in _LINE.findall(text[:end])))
        if text[end:]:
            self.partial[stream] = text[end:]
        if len(text) - end > _LONGEST:
            self.finish()

    def flush(self) -> None:
        self._guard(lambda: (sys.stdout.flush(), sys.stderr.flush()))

    def finish(self) -> None:
        """Write the unfinished lines of both streams now, each with a line end."""
        while self.partial:
            stream, text = self.partial.popitem()
            self._print(stream, f"{self.prefix}{text.rstrip()}\n")

    def _print(self, name: str, text: str) -> None:
        stream = sys.stderr if name == "stderr" else sys.stdout
        try:
            self._guard(lambda: stream.write(text))
        except UnicodeEncodeError:  # Dagster runs in a locale without UTF-8.
            self._guard(lambda: stream.write(text.encode("ascii", "backslashreplace").decode("ascii")))

    def _guard(self, write: Callable[[], Any]) -> None:
        try:
            write()
        except OSError as error:
            if self.needs_reader and isinstance(error, BrokenPipeError):
                raise
            if not self.failed:
                self.failed = True
                self.warn(f"the payload's output cannot be shown: {error}")
