"""Dagster's side of Pipes: the context for the payload, and the handler of the payload's messages.

The runtime, not Dagster, tells the payload where context and messages are. So no class here passes parameters to the payload.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import dagster as dg
from dagster_pipes import PipesContextData, PipesExtras, PipesParams


class RecordReader(dg.PipesMessageReader):
    """The message reader of one run, in which followers find Dagster's message handler; it reads nothing itself.

    Args:
        writers: how many payloads are expected to open Pipes.

    Attributes:
        handler: Dagster's message handler, within the Pipes session.
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
        return self._writers  # Dagster's own property is marked as a preview and warns at each run.

    def no_messages_debug_text(self) -> str:
        return "the payload was expected to call dagster_pipes.open_dagster_pipes(), with its default message writer."


class RecordContextInjector(dg.PipesContextInjector):
    """The context injector of one run: keeps the Pipes context, which `start` writes into the run directory.

    Attributes:
        pipes_context: the context, within the Pipes session.
    """

    pipes_context: PipesContextData

    def __init__(self, context: dg.OpExecutionContext) -> None:
        self._context = context

    @contextlib.contextmanager
    def inject_context(self, context_data: PipesContextData) -> Iterator[PipesParams]:
        self.pipes_context = with_partition_range(context_data, self._context)
        yield {}

    def no_messages_debug_text(self) -> str:
        return "the context was written into the run directory."


@contextlib.contextmanager
def pipes_session(
    context: dg.OpExecutionContext,
    injector: RecordContextInjector,
    reader: RecordReader,
    extras: PipesExtras | None,
    uses_pipes: bool,
) -> Iterator[dg.PipesSession]:
    """Open Dagster's Pipes session, without its warning of missing messages if no payload uses Pipes or the run fails."""

    def keep(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("[pipes] did not receive")

    with contextlib.ExitStack() as stack:
        stack.callback(context.log.removeFilter, keep)  # Runs after the session, which warns when it closes.
        session = stack.enter_context(dg.open_pipes_session(context, injector, reader, extras))
        if not uses_pipes:
            context.log.addFilter(keep)
        try:
            yield session
        except BaseException:
            context.log.addFilter(keep)  # The failure says more than the warning.
            raise


def with_partition_range(data: PipesContextData, context: dg.OpExecutionContext) -> PipesContextData:
    """Returns the Pipes context, with partition range and time window if the run is over several partitions.

    Dagster 1.13 fills these two only for a single partition, though `PipesContext` has properties for both.
    """
    if data["partition_key_range"] is not None or not context.has_partition_key_range:
        return data
    keys = context.partition_key_range
    data = {**data, "partition_key_range": {"start": keys.start, "end": keys.end}}
    if context.has_assets_def and isinstance(context.assets_def.partitions_def, dg.TimeWindowPartitionsDefinition):
        window = context.partition_time_window
        data = {**data, "partition_time_window": {"start": window.start.isoformat(), "end": window.end.isoformat()}}
    return data
