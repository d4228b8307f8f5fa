"""Keeps the files of Dagster's event log open while a step writes thousands of events.

Dagster's SQLite storage opens and closes a database for each event. At each opening, the storage compiles its SQL again. At each
closing, SQLite copies the write-ahead log into the database. Together, this is most of the time that an event takes (Dagster
1.13: `SqliteEventLogStorage._connect`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from sqlalchemy import create_engine, event
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.pool import StaticPool

_INDEX = "index"  # The database of SqliteEventLogStorage with the events of all assets.
_BUSY_TIMEOUT = 30  # Seconds to wait for other processes that write, like Dagster's own connections.
_METHODS = ("run_connection", "index_connection")  # Methods by which the storage gets a connection for each event.
_lock = threading.Lock()
_opened: dict[int, tuple[int, ExitStack]] = {}  # By id of the storage: how many blocks use it, and what its end closes.


@contextmanager
def open_event_log(storage: Any, run_id: str) -> Iterator[None]:
    """Context manager: inside the block, Dagster's SQLite event log storage writes the events of a run over open connections.

    Each event is a transaction of its own, so all events survive if this process is killed. A power failure may lose the last
    events, because the transactions do not wait for the disk until the block has ended.

    With any other kind of `storage`, the block has no effect. Several threads or tasks may be in such blocks with the same
    `storage` at the same time. Then only the run of the first block is faster, and the last block closes the connections.
    """
    if type(storage).__name__ != "SqliteEventLogStorage" or not all(hasattr(storage, name) for name in _METHODS):
        yield
        return
    with _lock:
        users, stack = _opened.get(id(storage)) or (0, _open(storage, run_id))
        _opened[id(storage)] = users + 1, stack
    try:
        yield
    finally:
        with _lock:
            users, stack = _opened.pop(id(storage))
            if users > 1:
                _opened[id(storage)] = users - 1, stack
            else:
                stack.close()


def _open(storage: Any, run_id: str) -> ExitStack:
    """Make a SQLite event log storage write the events of the Dagster run `run_id` over connections that stay open.

    The caller must close the returned stack. Closing the stack waits for the event that another thread is writing, and then
    closes the connections. The storage opens and closes a connection for each event of any other run, as before.
    """
    lock = threading.Lock()
    original_run, original_index = storage.run_connection, storage.index_connection
    engines: dict[str, Engine] = {}  # Empty once the connections are closed.

    def close() -> None:
        with lock:
            while engines:
                engines.popitem()[1].dispose()

    @contextmanager
    def connection(shard: str, otherwise: Callable[[], AbstractContextManager[Connection]]) -> Iterator[Connection]:
        with lock:
            if shard in engines:
                with engines[shard].begin() as opened:
                    yield opened
                return
        with otherwise() as opened:  # The storage asked for the connection before the connections were closed.
            yield opened

    def run_connection(which: str | None = None) -> AbstractContextManager[Connection]:
        return connection(run_id, lambda: original_run(run_id)) if which == run_id else original_run(which)

    with ExitStack() as stack:
        stack.callback(close)
        engines.update({shard: _engine(storage.conn_string_for_shard(shard)) for shard in (run_id, _INDEX)})
        for name, method in zip(_METHODS, (run_connection, lambda: connection(_INDEX, original_index)), strict=True):
            setattr(storage, name, method)
            stack.callback(delattr, storage, name)
        return stack.pop_all()


def _engine(url: str) -> Engine:
    engine = create_engine(
        url, poolclass=StaticPool, connect_args={"timeout": _BUSY_TIMEOUT, "check_same_thread": False}, future=True
    )

    @event.listens_for(engine, "connect")
    def no_wait_for_the_disk(connection: Any, _: Any) -> None:
        connection.execute("PRAGMA synchronous=NORMAL")

    return engine
