"""The shared queue: rows with any job name are parsed, and slurmctld is queried rarely."""

import errno
import math
import os
import random
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagster_rayslurm.edge import slurm
from dagster_rayslurm.slurm.shared_queue import (
    SNAPSHOT,
    ClusterClock,
    QueueRow,
    QueueSnapshot,
    SharedQueue,
    SlurmUnanswered,
    fetch_queue,
    listed_snapshot,
    parse_answer,
    parse_count,
    parse_squeue,
    parse_time,
    shared_queue,
)
from dagster_rayslurm.ssh.base import ConnectionLost
from dagster_rayslurm.ssh.local import LocalConnection

from ..conftest import wait_until
from .slurm_said import VERSIONS, said

EPOCH = 1_795_000_000.0
INTERVAL = 30.0

words = st.text(st.characters(exclude_characters="\x1f\n", codec="utf-8"), max_size=12)
times = st.none() | st.integers(1, 2**33).map(float)
rows = st.builds(
    QueueRow,
    job_id=st.integers(1, 2**31),
    label=words,
    state=words,
    reason=words,
    start=times,
    submit=times,
    num_nodes=st.integers(0, 9999),
    nodes=words,
    partition=words,
    name=st.text(st.characters(exclude_characters="\x1e", codec="utf-8"), max_size=40),
)


@pytest.mark.parametrize("version", VERSIONS)
def test_recorded_output_of_squeue(version: str) -> None:
    _, text = said(version, "squeue", "squeue")
    text = text.replace("MARK\x1f", "\x1e\x1f")
    found = {row.name: row for row in parse_squeue(text)}
    assert {"a\nb\x1fc|d", "\ufffdbad \t x", "JobState=X Reason=y", "rs-het", "rs-array"} <= found.keys()
    waits = found["JobState=X Reason=y"]
    assert (waits.state, waits.reason, waits.num_nodes, waits.nodes) == ("PENDING", "BeginTime", 1, "")
    assert waits.start is not None and waits.submit is not None and 3590 < waits.start - waits.submit < 3610
    assert found["a\nb\x1fc|d"].start is None
    components = [row for row in parse_squeue(text) if row.name == "rs-het"]
    leader, other = sorted(components, key=lambda row: row.job_id)
    assert other.job_id == leader.job_id + 1 and leader.label == f"{leader.job_id}+0" and other.label == f"{leader.job_id}+1"


def printed(given_rows: Sequence[QueueRow]) -> str:
    text = ""
    for row in given_rows:
        start, submit = (f"{at:.0f}" if at else "N/A" for at in (row.start, row.submit))
        fields = (row.job_id, row.label, row.state, row.reason, start, submit, row.num_nodes, row.nodes, row.partition, row.name)
        text += "\x1e" + "".join(f"\x1f{field}" for field in fields) + "\n"
    return text


def answer(snapshot: QueueSnapshot) -> bytes:
    return f"{snapshot.began:.3f} {snapshot.began + snapshot.took:.3f}\n{printed(snapshot.rows)}".encode()


@given(st.lists(rows, max_size=5))
def test_rows_of_any_name_are_read_back(given_rows: list[QueueRow]) -> None:
    assert parse_squeue(printed(given_rows)) == tuple(given_rows)


@pytest.mark.parametrize("text", ["slurm_load_jobs error: x\n", "\x1e\x1f1\x1f1\n", "\x1e" + "\x1fx" * 10 + "\n", "x\n\x1e"])
def test_other_output_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="squeue printed"):
        parse_squeue(text)


@pytest.mark.parametrize(("code", "out"), [(1, ""), (0, "JOBID PARTITION\n17 compute\n")])
def test_a_listing_without_an_answer_of_squeue(code: int, out: str) -> None:
    with pytest.raises(SlurmUnanswered, match=r"^login: "):
        listed_snapshot("login", code, out, "")


def test_numbers_as_slurm_prints_them() -> None:
    assert [parse_count(text) for text in ("7", "1K", "2K", "1M", "2-4", "1-1", "", "?")] == [7, 1024, 2048, 1 << 20, 2, 1, 0, 0]
    assert [parse_time(text) for text in ("N/A", "Unknown", "None", "", "0", "17", "2026-01-01T00:00:00")] == [None] * 5 + [
        17,
        None,
    ]


class Edge(LocalConnection):
    """This machine with a `squeue`, and a clock that it shares with the functions of the edge; it stands until the test moves it.

    The fake Slurm has the machine's clock, so it cannot stand in for this one.
    """

    def __init__(self, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.base = base
        self.lost = False
        self.commands = 0
        programs = {
            "squeue": 'echo "$$ $(cat {0}/time)" >> {0}/calls\n[ ! -e {0}/slow ] || cat {0}/slow > {0}/time\n'
            'mark="${{5#--format=}}"\necho "${{mark%%\x1f*}}\x1f7\x1f7\x1fRUNNING\x1fNone\x1fN/A\x1fN/A\x1f1\x1fc1\x1fp\x1fx"\n'
            "[ ! -e {0}/broken ] || {{ cat {0}/broken >&2; exit 1; }}",
        }
        for name, text in programs.items():
            path = base / "bin" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("#!/bin/sh\n" + text.format(base))
            path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{base}/bin:/usr/bin:/bin")
        monkeypatch.setattr(slurm, "_login_path", [("", math.inf)])  # No login shell knows another squeue.
        monkeypatch.setattr(slurm, "now", lambda: int((base / "time").read_text()) / 1000)
        self.move(EPOCH)

    def move(self, now: float) -> None:
        (self.base / "time").write_text(f"{1000 * now:.0f}")

    def attempt(self, *args: Any) -> Any:
        self.commands += 1
        if self.lost:
            raise ConnectionLost("the connection broke")
        return super().attempt(*args)

    @property
    def calls(self) -> list[float]:
        """When squeue was called."""
        path = self.base / "calls"
        return [int(line.split()[1]) / 1000 for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def edge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Edge:
    return Edge(tmp_path / "edge", monkeypatch)


def at_once(work: Any) -> None:
    work()


def queue_of(edge: Edge, start: Any = at_once, interval: float = INTERVAL) -> SharedQueue:
    return SharedQueue(edge, str(edge.base / "queue"), interval, start)


def claims(edge: Edge) -> list[str]:
    return sorted(path.name for path in (edge.base / "queue").glob("asked-*"))


def most_per_minute(calls: list[float]) -> int:
    return max(sum(1 for call in calls if start <= call < start + 60) for start in calls)


@pytest.mark.parametrize("seed", range(3))
def test_a_hundred_callers_ask_twice_a_minute_at_most(edge: Edge, seed: int) -> None:
    rand = random.Random(seed)
    queues = [queue_of(edge) for _ in range(100)]
    reckon = [rand.uniform(-1, 1) for _ in queues]  # Nobody knows the clock over there exactly.
    end, now, began = EPOCH + 600, EPOCH, -1.0
    while now < end:
        now += rand.uniform(1, 7)
        edge.move(now)
        for number in rand.sample(range(100), 40):
            snapshot = queues[number].latest(now + reckon[number])
            if snapshot:
                began = max(began, snapshot.began)
        assert now - began < 1.5 * INTERVAL, "the snapshot goes stale although everybody looks"
    assert 15 <= len(edge.calls) <= 21
    assert most_per_minute(edge.calls) <= 2
    assert len(claims(edge)) == 1


def test_a_fresh_snapshot_needs_no_command(edge: Edge) -> None:
    queue_of(edge).latest(EPOCH)
    queue = queue_of(edge)
    assert [queue.latest(EPOCH + second) is not None for second in range(0, 29)] == [True] * 29
    assert (len(edge.calls), edge.commands) == (1, 2), (
        "one of the queue that asked squeue, one of the queue that found its answer"
    )
    assert (edge.base / "queue").stat().st_mode & 0o777 == 0o700


def test_a_snapshot_is_stamped_with_the_time_at_which_squeue_began(edge: Edge) -> None:
    (edge.base / "slow").write_text(f"{1000 * (EPOCH + 4):.0f}")
    snapshot = queue_of(edge).latest(EPOCH + 1)
    assert snapshot is not None
    assert (snapshot.began, snapshot.took) == (EPOCH, 4.0)
    row = snapshot.job(7)
    assert row is not None and (row.state, row.nodes, row.start) == ("RUNNING", "c1", None)
    assert snapshot.job(8) is None


def test_a_slow_controller_is_queried_less_often(edge: Edge) -> None:
    (edge.base / "slow").write_text(f"{1000 * (EPOCH + 20):.0f}")
    queue = queue_of(edge)
    queue.latest(EPOCH)
    (edge.base / "slow").unlink()
    for now in range(20, 100, 2):
        edge.move(EPOCH + now)
        queue.latest(EPOCH + now)
    assert edge.calls == [EPOCH], "5 x 20 s have not passed"
    edge.move(EPOCH + 130)
    queue.latest(EPOCH + 130)
    assert edge.calls == [EPOCH, EPOCH + 130]


def test_a_failing_squeue_leaves_the_last_snapshot(edge: Edge) -> None:
    queues = [queue_of(edge) for _ in range(20)]
    first = queues[0].latest(EPOCH)
    (edge.base / "broken").write_text("slurm_load_jobs error: Socket timed out on send/recv operation\n")
    for now in range(0, 300, 3):
        edge.move(EPOCH + now)
        for queue in queues:
            queue.latest(EPOCH + now)
    assert {queue.latest(EPOCH + now) for queue in queues} == {first}
    told = [queue.error for queue in queues if queue.error]
    assert told and all("Socket timed out" in each and "squeue did not answer (exit code 1)" in each for each in told)
    assert most_per_minute(edge.calls) <= 2 and len(edge.calls) > 8
    (edge.base / "broken").unlink()
    for later in range(now + 3, now + 70, 3):
        edge.move(EPOCH + later)
        fresh = [queue.latest(EPOCH + later) for queue in queues]
    assert min(snapshot.began for snapshot in fresh if snapshot) > EPOCH + now
    assert not any(queue.error for queue in queues)


def test_a_claim_of_a_dead_process_expires(edge: Edge) -> None:
    queue = queue_of(edge)
    (edge.base / "queue").mkdir()
    (edge.base / "queue" / f"asked-{1000 * EPOCH:.0f}").touch()
    for now in range(1, 29):
        edge.move(EPOCH + now)
        assert queue.latest(EPOCH + now) is None
    assert not edge.calls
    for now in range(30, 40):
        edge.move(EPOCH + now)
        queue.latest(EPOCH + now)
    assert len(edge.calls) == 1 and queue.latest(EPOCH + 40) is not None


def test_a_lost_connection_leaves_the_last_snapshot(edge: Edge) -> None:
    queue = queue_of(edge)
    first = queue.latest(EPOCH)
    edge.lost = True
    edge.move(EPOCH + 40)
    assert queue.latest(EPOCH + 40) is first
    assert queue.error == "the connection broke"
    edge.lost = False
    edge.move(EPOCH + 80)
    second = queue.latest(EPOCH + 80)
    assert second is not None and second.began == EPOCH + 80 and queue.error is None


def test_a_directory_that_cannot_be_made_is_an_error(edge: Edge) -> None:
    (edge.base / "queue").write_text("a file")
    queue = queue_of(edge)
    assert queue.latest(EPOCH) is None
    assert queue.error is not None and "queue" in queue.error
    assert not edge.calls


@pytest.mark.parametrize("refused", ["mkdir", "open", "pwrite"])
def test_an_answer_that_cannot_be_shared_is_used(refused: str, edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk refuses a new directory, a new file, or only the content of the file."""
    call = getattr(os, refused)

    def refuse(*arguments: Any, **named: Any) -> Any:
        if refused == "open" and not arguments[1] & os.O_CREAT:
            return call(*arguments, **named)
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, refused, refuse)
    queue = queue_of(edge)
    for now in (EPOCH, EPOCH + 1, EPOCH + 40):
        edge.move(now)
        snapshot = queue.latest(now)
        assert snapshot is not None and snapshot.began == edge.calls[-1] and queue.error is None
    assert edge.calls == [EPOCH, EPOCH + 40]


def test_a_missing_squeue_is_an_error(edge: Edge) -> None:
    (edge.base / "bin" / "squeue").unlink()
    queue = queue_of(edge)
    assert queue.latest(EPOCH) is None
    assert queue.error is not None and "squeue is not on the PATH" in queue.error
    with pytest.raises(SlurmUnanswered, match="squeue is not on the PATH"):
        fetch_queue(edge)


def test_a_direct_query_shares_nothing(edge: Edge) -> None:
    assert fetch_queue(edge).named("x")[0].job_id == 7
    assert not (edge.base / "queue").exists()
    (edge.base / "broken").write_text("slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
    with pytest.raises(SlurmUnanswered, match="Unable to contact slurm controller"):
        fetch_queue(edge)


def test_settings_of_the_user_hide_no_job(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    (edge.base / "bin" / "squeue").write_text(f'#!/bin/sh\nenv > {edge.base}/env; echo "$@" > {edge.base}/words\n')
    monkeypatch.setenv("SQUEUE_PARTITION", "gpu")
    monkeypatch.setenv("SQUEUE_NAMES", "a\nb")
    monkeypatch.setenv("SLURM_CONF", "/etc/site.conf")
    assert fetch_queue(edge).rows == ()
    seen = (edge.base / "env").read_text()
    assert "SQUEUE_" not in seen and "SLURM_CONF=/etc/site.conf" in seen and "SLURM_TIME_FORMAT=%s" in seen
    assert {"--me", "--all", "--states=all", "--noheader"} <= set((edge.base / "words").read_text().split())


def asked(edge: Edge, at: float) -> None:
    """As if another process had begun a query at this time."""
    for path in (edge.base / "queue").glob("asked-*"):
        path.unlink()
    (edge.base / "queue" / f"asked-{1000 * at:.0f}").touch()
    edge.move(at)


def test_an_older_snapshot_is_ignored(edge: Edge) -> None:
    queue = queue_of(edge)
    queue.latest(EPOCH)
    path = edge.base / "queue" / SNAPSHOT
    path.write_bytes(answer(QueueSnapshot(EPOCH - 1000, ())))  # As another host's cache may show it.
    asked(edge, EPOCH + 31)
    shown = queue.latest(EPOCH + 31)
    assert shown is not None and shown.began == EPOCH
    path.write_bytes(answer(QueueSnapshot(EPOCH + 31, ())))
    newer = queue.latest(EPOCH + 34)
    assert newer is not None and newer.began == EPOCH + 31


def test_a_large_queue_is_shared(edge: Edge) -> None:
    row = QueueRow(7, "7", "PENDING", "Priority", None, EPOCH, 1, "", "compute", "x" * 300)
    large = QueueSnapshot(EPOCH, tuple(replace(row, job_id=number) for number in range(6000)))
    path = edge.base / "queue" / SNAPSHOT
    path.parent.mkdir()
    path.write_bytes(answer(large))
    assert queue_of(edge).latest(EPOCH + 1) == large and edge.commands == 1 and not edge.calls


def test_a_snapshot_of_the_future_does_not_stop_the_queue(edge: Edge) -> None:
    path = edge.base / "queue" / SNAPSHOT
    path.parent.mkdir()
    path.write_bytes(answer(QueueSnapshot(EPOCH + 10_000, ())))
    queue = queue_of(edge)
    shown = queue.latest(EPOCH)
    assert shown is not None and shown.began == EPOCH
    assert parse_answer(path.read_bytes()) == shown
    path.write_bytes(answer(QueueSnapshot(EPOCH + 10_000, ())))
    queue = queue_of(edge)
    asked(edge, EPOCH + 40)
    assert queue.latest(EPOCH + 40) is not None
    edge.move(EPOCH + 90)
    shown = queue.latest(EPOCH + 90)
    assert shown is not None and shown.began == EPOCH + 90, "nor when it is all that is known"


def test_latest_never_waits(edge: Edge) -> None:
    (edge.base / "bin" / "squeue").write_text("#!/bin/sh\nwhile ! [ -e " + str(edge.base / "go") + " ]; do sleep 0.05; done\n")
    queue = SharedQueue(edge, str(edge.base / "queue"), INTERVAL)
    assert [queue.latest(EPOCH + step) for step in range(20)] == [None] * 20
    (edge.base / "go").touch()
    assert wait_until(lambda: queue.latest(EPOCH + 20))
    assert edge.commands == 1


def test_threads_of_a_process_share_one_query(edge: Edge) -> None:
    queue = SharedQueue(edge, str(edge.base / "queue"), INTERVAL)
    threads = [threading.Thread(target=lambda: [queue.latest(EPOCH) for _ in range(50)]) for _ in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wait_until(lambda: queue.latest(EPOCH))
    assert (len(edge.calls), edge.commands) == (1, 1)


def test_a_process_has_one_queue_for_a_connection_and_directory(edge: Edge) -> None:
    queue = shared_queue(edge, "/d", 30)
    assert shared_queue(edge, "/d", 30) is queue
    assert shared_queue(edge, "/e", 30) is not queue
    assert shared_queue(edge, "/d", 10) is not queue


def test_the_cluster_clock_is_queried_once_and_corrected_by_every_answer(edge: Edge) -> None:
    local = 100.0
    clock = ClusterClock(edge, lambda: local)
    assert clock.now() == EPOCH and edge.commands == 1
    local = 107.0
    assert clock.now() == EPOCH + 7 and edge.commands == 1
    clock.observe(EPOCH + 8, asked=107, answered=109)  # Agrees with what is reckoned: it was EPOCH + 8 at 108.
    assert clock.now() == EPOCH + 7
    local = 110.0  # This machine slept for an hour, and its clock with it.
    clock.observe(EPOCH + 3610, asked=110, answered=110.5)
    assert EPOCH + 3609 < clock.now() <= EPOCH + 3610
    queue = queue_of(edge)
    queue.clock = clock
    edge.move(EPOCH + 7200)
    queue.latest(clock.now())
    assert abs(clock.now() - (EPOCH + 7200)) < 1, "the answer of squeue carries the time as well"


@settings(max_examples=200)
@given(st.floats(-1e6, 1e6), st.lists(st.tuples(st.floats(0, 100), st.floats(0, 5), st.floats(0, 1)), min_size=1, max_size=8))
def test_the_clock_is_never_wrong_by_more_than_an_answer_takes(offset: float, answers: list[tuple[float, float, float]]) -> None:
    local = 0.0
    clock = ClusterClock(LocalConnection(), lambda: local)
    for pause, took, part in answers:
        asked = local + pause
        local = asked + took
        clock.observe(offset + asked + part * took, asked, local)
        assert abs(clock.now() - (offset + local)) <= took + 1e-6
