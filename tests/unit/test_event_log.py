"""Dagster's SQLite event log, held open: events are written as before, over connections that stay open."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from sqlalchemy import event, text
from sqlalchemy.engine import Engine
from sqlalchemy.pool import Pool

from dagster_rayslurm.execution.event_log import open_event_log

COUNT = 20


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.local_temp(str(tmp_path), overrides={"telemetry": {"enabled": False}}) as made:
        yield made


@contextlib.contextmanager
def opened() -> Iterator[list[Any]]:
    """Lists the connections that SQLAlchemy opens inside the block."""
    found: list[Any] = []

    def note(*connection: Any) -> None:
        found.append(connection)

    event.listen(Engine, "connect", note)
    yield found
    event.remove(Engine, "connect", note)


def in_step(instance: dg.DagsterInstance, body: Callable[[dg.AssetExecutionContext], None]) -> None:
    def step(context: dg.AssetExecutionContext) -> None:
        body(context)

    dg.materialize([dg.asset(name="scores")(step)], instance=instance)


def write(context: dg.AssetExecutionContext) -> None:
    for number in range(COUNT):
        context.log_event(dg.AssetMaterialization("other", partition=str(number)))


def test_events_are_in_sight_of_other_processes_at_once_and_few_connections_are_opened(
    instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    def body(context: dg.AssetExecutionContext) -> None:
        storage: Any = context.instance.event_log_storage
        with opened() as before:
            write(context)
        before_block = dict(vars(storage))
        with opened() as connections, open_event_log(storage, context.run.run_id):
            write(context)
            context.log.info("a line of the log")
            with contextlib.suppress(ZeroDivisionError), open_event_log(storage, context.run.run_id):  # As another thread may do.
                raise ZeroDivisionError
            write(context)
            assert len(connections) == 2 and len(before) >= 2 * COUNT
            with dg.DagsterInstance.local_temp(str(tmp_path)) as other:
                assert len(other.get_materialized_partitions(dg.AssetKey("other"))) == COUNT
                logged = [each.user_message for each in other.all_logs(context.run.run_id)]
                assert "a line of the log" in logged
                assert sum(each.startswith("Materialized value other") for each in logged) == 3 * COUNT
        assert vars(storage) == before_block

    in_step(instance, body)
    assert len(instance.fetch_materializations(dg.AssetKey("other"), limit=1000).records) == 3 * COUNT


def insert(connection: Any, name: str) -> None:
    connection.execute(text("INSERT INTO asset_keys (asset_key) VALUES (:name)"), {"name": name})


def keys(storage: Any) -> list[str]:
    with storage.index_connection() as connection:
        return sorted(row[0] for row in connection.execute(text("SELECT asset_key FROM asset_keys")))


def test_the_end_of_the_block_waits_for_an_event_that_another_thread_writes(instance: dg.DagsterInstance) -> None:
    storage: Any = instance.event_log_storage
    block = contextlib.ExitStack()
    block.enter_context(open_event_log(storage, "run"))
    closing = threading.Thread(target=block.close)
    with storage.index_connection() as connection:
        insert(connection, "first")
        closing.start()
        closing.join(0.5)
        insert(connection, "second")
    closing.join(30)
    assert not closing.is_alive() and keys(storage) == ["first", "second"]


def test_an_event_whose_connection_was_asked_for_in_the_block_is_written_after_it(instance: dg.DagsterInstance) -> None:
    storage: Any = instance.event_log_storage
    closed: list[Any] = []

    def note(*connection: Any) -> None:
        closed.append(connection)

    event.listen(Pool, "close", note)
    with opened() as connections:
        with open_event_log(storage, "run"):
            late = storage.index_connection()
        with late as connection:
            insert(connection, "late")
    event.remove(Pool, "close", note)
    assert len(closed) == len(connections)
    assert keys(storage) == ["late"]


def test_events_of_other_runs_are_written_to_their_own_file(instance: dg.DagsterInstance) -> None:
    def body(context: dg.AssetExecutionContext) -> None:
        with open_event_log(context.instance.event_log_storage, context.run.run_id):
            in_step(context.instance, lambda inner: inner.log.info("a line of the inner run"))

    in_step(instance, body)
    inner, outer = ([each.user_message for each in instance.all_logs(run.run_id)] for run in instance.get_runs())
    assert "a line of the inner run" in inner and "a line of the inner run" not in outer


def test_other_storages_are_left_alone() -> None:
    with dg.DagsterInstance.ephemeral() as ephemeral:
        storage = ephemeral.event_log_storage
        before = dict(vars(storage))
        with open_event_log(storage, "run"):
            assert vars(storage) == before
