"""The hub follows many payloads by few calls, fails all of its callers if it breaks, and no cluster holds up another one."""

import asyncio
import logging
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from dagster_rayslurm.execution.asynchronous import drive_async
from dagster_rayslurm.execution.run import Steps, drive
from dagster_rayslurm.follow import Cadence, Evidence, Follower, Following
from dagster_rayslurm.follow import hub as hub_module
from dagster_rayslurm.follow.hub import Hub, hub_of
from dagster_rayslurm.runtime.protocol.record import JOURNAL, STDIO, encode
from dagster_rayslurm.ssh.base import ConnectionFailed
from dagster_rayslurm.ssh.local import LocalConnection

from ..conftest import wait_until

LOG = logging.getLogger("test")


class Counted(LocalConnection):
    """Files of this machine, and how many calls read them."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.failure: BaseException | None = None

    def attempt(self, doing: str, operation: Any, repeat: bool, deadline: float | None = None) -> Any:
        self.calls.append(doing)
        if self.failure is not None:
            raise self.failure
        return super().attempt(doing, operation, repeat, deadline)


def following(connection: Any, directory: Path, exited: Callable[[Evidence], str | None] = lambda _: None) -> Following:
    """A payload whose record is in a directory."""
    cadence = Cadence(busy=0.02, idle=0.02, waiting=0.02)
    return Following([(Follower(connection, str(directory), "n", None, LOG, cadence, loss_timeout=0.0), exited)])


def end(directory: Path) -> None:
    directory.mkdir(exist_ok=True)
    (directory / STDIO).write_bytes(b"")
    (directory / JOURNAL).write_bytes(encode({"type": "end", "nonce": "n", "reason": "exit", "stdio_bytes": 0}))


def waiting(each: Following) -> Steps[str]:
    yield each
    return "ended"


def all_of(runs: list[Any]) -> list[Any]:
    async def body() -> list[Any]:
        return await asyncio.wait_for(asyncio.gather(*(drive_async(*each) for each in runs), return_exceptions=True), 30)

    return asyncio.run(body())


def test_payloads_that_are_due_together_are_read_by_one_call(tmp_path: Path) -> None:
    connection = Counted()
    hub = Hub(connection)
    directories = [tmp_path / str(number) for number in range(200)]
    ended = [hub.follow(following(connection, each), 0.0) for each in directories]
    assert wait_until(lambda: len(connection.calls) > 5)
    for each in directories:
        end(each)
    for each in ended:
        each.ended.result(timeout=30)
    assert set(connection.calls) == {""}  # None reads a file by itself.
    assert wait_until(lambda: not [each for each in threading.enumerate() if each.name == "rayslurm-this machine"])


def test_callers_that_block_and_callers_that_await_share_one_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "_hubs", {})  # Another test may have made the hub of this machine.
    connection = Counted()
    directories = [tmp_path / str(number) for number in range(20)]
    found: list[Any] = []
    with ThreadPoolExecutor(11) as pool:
        blocked = [pool.submit(drive, waiting(following(connection, each))) for each in directories[:10]]
        awaited = pool.submit(all_of, [(waiting(following(connection, each)), hub_of(connection)) for each in directories[10:]])
        assert wait_until(lambda: len(connection.calls) > 50)
        assert [each.name for each in threading.enumerate()].count("rayslurm-this machine") == 1
        for each in directories:
            end(each)
        found = [each.result(30) for each in blocked] + awaited.result(30)
    assert found == ["ended"] * 20
    assert set(connection.calls) == {""}  # None reads a file by itself.


def test_an_interrupt_of_a_caller_that_blocks_waits_for_the_poll_and_ends_no_other_caller(tmp_path: Path) -> None:
    """The second signal of the same Ctrl-C comes while the poll that is under way has not ended."""
    main, polls, interrupted = threading.main_thread(), [], threading.Event()

    def exited(_: Evidence) -> str | None:
        if not polls:
            signal.pthread_kill(main.ident or 0, signal.SIGINT)
            interrupted.wait(0.5)
            signal.pthread_kill(main.ident or 0, signal.SIGINT)
            interrupted.wait(0.5)
        polls.append(threading.current_thread())
        return None

    def steps() -> Steps[str]:
        try:
            yield following(connection, tmp_path / "one", exited)
        except KeyboardInterrupt:
            seen = len(polls)
            interrupted.wait(0.2)
            return f"{seen} polls before, {len(polls) - seen} after"
        return "not interrupted"

    connection = LocalConnection()
    (tmp_path / "one").mkdir()
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(drive, waiting(following(connection, tmp_path / "two")))
        assert drive(steps()) == "1 polls before, 0 after"
        assert not other.done()
        end(tmp_path / "two")
        assert other.result(30) == "ended"


def test_a_read_of_many_files_is_that_of_each(tmp_path: Path) -> None:
    connection = LocalConnection()
    (tmp_path / "a").write_bytes(b"0123456789")
    (tmp_path / "b").mkdir()
    a, gone, unreadable = ((str(tmp_path / name), 2, 4) for name in ("a", "gone", "b"))
    with connection.read_ahead([a, gone, unreadable]):
        (tmp_path / "a").write_bytes(b"")
        assert connection.read(*a) == b"2345"
        assert connection.read(*a) == b""  # An answer counts once.
        assert connection.read(*gone) == b""
        with pytest.raises(IsADirectoryError):
            connection.read(*unreadable)


def test_a_lost_connection_is_noticed_by_one_call_for_all(tmp_path: Path) -> None:
    connection = Counted()
    connection.failure = ConnectionFailed("edge: no answer")
    hub = Hub(connection)
    each = [hub.follow(following(connection, tmp_path / str(number)), 0.0) for number in range(50)]
    for one in each:
        one.ended.result(timeout=30)
    assert all(one.follower.evidence.unreachable == "edge: no answer" for one in each)
    assert len(connection.calls) < 50


def test_a_hub_that_breaks_fails_every_caller_and_then_works_again(tmp_path: Path) -> None:
    connection = Counted()
    hub = Hub(connection)
    connection.failure = RuntimeError("the agent is broken")
    found = all_of([(waiting(following(connection, tmp_path)), hub) for _ in range(3)])
    assert [str(each) for each in found] == ["the agent is broken"] * 3
    connection.failure = None
    end(tmp_path)
    assert all_of([(waiting(following(connection, tmp_path)), hub)]) == ["ended"]


def test_an_error_of_one_poll_is_that_of_its_caller_alone(tmp_path: Path) -> None:
    def fails(_: Evidence) -> str | None:
        raise KeyError("mine")

    hub = Hub(LocalConnection())
    end(tmp_path)
    first, second = following(LocalConnection(), tmp_path, fails), following(LocalConnection(), tmp_path)
    found = all_of([(waiting(first), hub), (waiting(second), hub)])
    assert isinstance(found[0], KeyError) and found[1] == "ended"


def test_a_dead_cluster_does_not_hold_up_another_one() -> None:
    dead, alive, answer = Hub(Counted()), Hub(Counted()), threading.Event()

    def stuck() -> Steps[str]:
        answer.wait(30)
        yield from ()
        return "late"

    def works() -> Steps[str]:
        yield from ()
        return "done"

    async def body() -> None:
        late = [asyncio.ensure_future(drive_async(stuck(), dead)) for _ in range(40)]
        assert await asyncio.wait_for(drive_async(works(), alive), 10) == "done"
        late[-1].cancel()  # It has not begun, so nothing is waited for.
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(asyncio.shield(late[-1]), 10)
        answer.set()
        assert set(await asyncio.gather(*late[:-1])) == {"late"}

    asyncio.run(body())


def test_a_cancellation_during_the_start_ends_what_was_started(tmp_path: Path) -> None:
    began, goes_on, said = threading.Event(), threading.Event(), []

    def run() -> Steps[str]:
        began.set()
        goes_on.wait(30)
        try:
            yield following(LocalConnection(), tmp_path)
        except asyncio.CancelledError:
            said.append("cancelled")
            raise
        return "ended"

    async def body() -> None:
        task = asyncio.ensure_future(drive_async(run(), Hub(LocalConnection())))
        await asyncio.to_thread(began.wait, 10)
        task.cancel()
        await asyncio.sleep(0)
        goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(body())
    assert said == ["cancelled"]


def test_a_captured_interrupt_reaches_each_caller_once_and_then_hurries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[bool] = []
    hub = Hub(LocalConnection())
    monkeypatch.setattr(hub_module, "pop_captured_interrupt", lambda: bool(captured) and captured.pop())
    monkeypatch.setattr(hub_module, "_hubs", {0: hub})
    said: list[str] = []

    def run() -> Steps[str]:
        try:
            yield following(LocalConnection(), tmp_path)
        except dg.DagsterExecutionInterruptedError:
            said.append("interrupted")
            captured.append(True)
            each = following(LocalConnection(), tmp_path, lambda _: "hurried" if "hurry" in said else None)
            yield Following(each.followed, deadline=1e9, hurry=lambda: said.append("hurry"))
            raise

    captured.append(True)
    [found] = all_of([(run(), hub)])
    assert isinstance(found, dg.DagsterExecutionInterruptedError) and said[:2] == ["interrupted", "hurry"]
