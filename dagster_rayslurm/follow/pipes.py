"""Dagster's side of Pipes: the context for the payload, and the handler that its messages go to.

The runtime itself tells the payload where both are, so neither class hands out parameters.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import dagster as dg
from dagster_pipes import PipesContextData, PipesExtras, PipesParams


class RecordReader(dg.PipesMessageReader):
    """The message reader of one run: holds the handler that the follower feeds.

    Args:
        writers: payloads that are expected to open Pipes.
    """

    def __init__(self, writers: int = 1) -> None:
        self.handler: Any = None
        self._writers = writers

    @contextlib.contextmanager
    def read_messages(self, handler: Any) -> Iterator[PipesParams]:
        self.handler = handler
        yield {}

    @property
    def expected_writer_count(self) -> int:
        return self._writers  # Dagster's own is marked as a preview and warns at each run.

    def no_messages_debug_text(self) -> str:
        return "the payload was expected to call dagster_pipes.open_dagster_pipes(), with its default message writer."


@contextlib.contextmanager
def pipes_session(
    context: dg.OpExecutionContext,
    injector: RecordContextInjector,
    reader: RecordReader,
    extras: PipesExtras | None,
    expected: bool,
) -> Iterator[dg.PipesSession]:
    """Dagster's Pipes session, which warns of missing messages only where they are expected and nothing else has failed.

    Args:
        context: of the step.
        injector: has the Pipes context.
        reader: takes the messages.
        extras: Pipes extras.
        expected: whether a payload is declared to open Pipes.
    """

    def is_told(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("[pipes] did not receive")

    with contextlib.ExitStack() as stack:
        stack.callback(context.log.removeFilter, is_told)  # After the session, which warns when it is closed.
        session = stack.enter_context(dg.open_pipes_session(context, injector, reader, extras))
        if not expected:
            context.log.addFilter(is_told)
        try:
            yield session
        except BaseException:
            context.log.addFilter(is_told)  # The failure says more.
            raise


class RecordContextInjector(dg.PipesContextInjector):
    """Keeps the Pipes context, which goes into the run directory.

    Args:
        context: the step's context, asked for what Dagster leaves out.
    """

    def __init__(self, context: dg.OpExecutionContext) -> None:
        self._context = context
        self.context_data: PipesContextData | None = None

    @contextlib.contextmanager
    def inject_context(self, context_data: PipesContextData) -> Iterator[PipesParams]:
        self.context_data = with_partition_range(context_data, self._context)
        yield {}

    def no_messages_debug_text(self) -> str:
        return "the context was written into the run directory."


def with_partition_range(data: PipesContextData, context: dg.OpExecutionContext) -> PipesContextData:
    """Add the range and the time window of a run over several partitions.

    Dagster 1.13 hands them over only for a single partition, though `PipesContext` has properties for both.
    """
    if data["partition_key_range"] is not None or not context.has_partition_key_range:
        return data
    keys = context.partition_key_range
    data = {**data, "partition_key_range": {"start": keys.start, "end": keys.end}}
    if context.has_assets_def and isinstance(context.assets_def.partitions_def, dg.TimeWindowPartitionsDefinition):
        window = context.partition_time_window
        data = {**data, "partition_time_window": {"start": window.start.isoformat(), "end": window.end.isoformat()}}
    return data
