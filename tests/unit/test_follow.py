"""The follower hands on each record once, whatever the reads return, and only its own payload's `end` ends it."""

import contextlib
import io
import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagster_rayslurm.execution.reattach import Bookmark
from dagster_rayslurm.follow import Cadence, Evidence, Follower, ReattachState, follow_all
from dagster_rayslurm.follow import follower as follower_module
from dagster_rayslurm.runtime.protocol.record import JOURNAL, STDIO, encode

LOG = logging.getLogger("test")
FAST = Cadence(busy=0.0, idle=0.0, waiting=0.0)


class Growing:
    """Files that grow between reads, as a slow network file system shows them: late, in pieces, sometimes not at all."""

    def __init__(self, files: dict[str, bytes], seed: int) -> None:
        self.files = files
        self.visible = dict.fromkeys(files, 0)
        self.random = random.Random(seed)

    def read(self, path: str, offset: int, limit: int) -> bytes:
        name = path.rpartition("/")[2]
        content = self.files[name]
        grown = self.visible[name] + self.random.choice([0, 1, 7, 100, 5000])
        # A read may see less than an earlier one did: a stale page of an attribute cache.
        self.visible[name] = min(grown, len(content))
        shown = max(offset, self.visible[name] - self.random.choice([0, 0, 50])) if self.visible[name] > offset else 0
        return content[offset:shown][:limit]


def follow(files: Any, handler: Any = None, log: Any = LOG, exited: str | None = None, **options: Any) -> Evidence:
    """Follow a record to its end; `exited` says how its runtime ended."""
    options = {"nonce": "n", "cadence": FAST, **options}
    follower = Follower(files, "/run", handler=handler or Handler(), log=log, **options)
    follow_all([(follower, lambda _: exited)])
    return follower.evidence


class Handler:
    def __init__(self) -> None:
        self.messages: list[Any] = []

    def handle_message(self, message: Any) -> None:
        if message["method"] == "bad":
            raise KeyError("no such check")
        self.messages.append(message["params"])


def record_of(lines: list[str], messages: int, nonce: str = "n") -> dict[str, bytes]:
    stdio = b"".join(encode({"s": "stdout", "t": 0, "d": line}) for line in lines)
    pipes = [{"type": "pipes", "at": 0, "line": '{"method": "log", "params": {"n": %d}}' % n} for n in range(messages)]
    end = {"type": "end", "nonce": nonce, "reason": "exit", "exit_code": 0, "signal": None, "stdio_bytes": len(stdio)}
    return {STDIO: stdio, JOURNAL: b"".join(map(encode, [*pipes, end]))}


@settings(max_examples=60)
@given(st.lists(st.text(max_size=200), max_size=20), st.integers(0, 20), st.integers())
def test_everything_arrives_once_and_in_order(lines: list[str], messages: int, seed: int) -> None:
    handler, out = Handler(), io.StringIO()
    with contextlib.redirect_stdout(out):
        evidence = follow(Growing(record_of(lines, messages), seed), handler)
    assert out.getvalue() == "".join(lines) and evidence.end is not None
    assert handler.messages == [{"n": n} for n in range(messages)]


def test_an_end_with_another_nonce_is_ignored(capsys: Any) -> None:
    files = record_of(["x"], 0, nonce="old")
    evidence = follow(Growing(files, 1), nonce="new", exited="exit code 1")
    assert evidence.end is None


def test_records_written_before_the_runtime_exited_are_read(capsys: Any) -> None:
    class All(Growing):
        def read(self, path: str, offset: int, limit: int) -> bytes:
            return self.files[path.rpartition("/")[2]][offset : offset + limit]

    files = record_of(["last words\n"], 3)
    files[JOURNAL] = b"".join(files[JOURNAL].splitlines(keepends=True)[:-1])  # No end.
    evidence = follow(All(files, 1), exited="signal 9 (SIGKILL)")
    assert evidence.end is None and evidence.runtime_exit == "signal 9 (SIGKILL)"
    assert capsys.readouterr().out == "last words\n"


@pytest.mark.parametrize("line", ["not json", "[]", "{}", '{"method": "bad", "params": {}}'])
def test_a_refused_message_is_evidence(line: str, capsys: Any) -> None:
    files = record_of([], 0)
    files[JOURNAL] = encode({"type": "pipes", "at": 0, "line": line}) + files[JOURNAL]
    evidence = follow(Growing(files, 1))
    assert evidence.message_error and line in evidence.message_error


def test_a_malformed_message_is_evidence_in_a_requeueable_job(capsys: Any) -> None:
    end = {"type": "end", "nonce": "n", "reason": "exit", "exit_code": 0, "signal": None, "stdio_bytes": 0}
    files = {STDIO: b"", JOURNAL: encode({"type": "pipes", "at": 0, "line": '{"method": 5}'}) + encode(end)}
    evidence = follow(Growing(files, 1), requeue=True)
    assert evidence.end is not None and "its method is 5" in str(evidence.message_error)


@pytest.mark.parametrize("comes", [True, False])
def test_output_that_appears_after_the_end_is_waited_for(
    comes: bool, capsys: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The runtime is gone, and its `end` in sight; one that never comes is not waited for without limit."""
    monkeypatch.setattr(follower_module, "VISIBILITY_TIMEOUT", 30.0 if comes else 0.05)

    class Later(Growing):
        looks = 0

        def read(self, path: str, offset: int, limit: int) -> bytes:
            self.looks += 1
            late = path.endswith(STDIO) and (self.looks < 40 or not comes)
            return b"" if late else self.files[path.rpartition("/")[2]][offset : offset + limit]

    evidence = follow(Later(record_of(["a", "b"], 1), 1), exited="exit code 0")
    assert evidence.end is not None and capsys.readouterr().out == ("ab" if comes else "")
    assert ("never came into sight" in caplog.text) == (not comes)


def test_the_last_output_is_bounded(capsys: Any) -> None:
    files = record_of(["y" * 100_000 + "\n"] * 200, 0)
    evidence = follow(Growing(files, 1))
    assert sum(len(text) for _, text in evidence.last_output) <= 64 * 4096 and len(evidence.output_tail()) <= 8000


def test_the_exception_that_dagster_shows_has_no_escape_codes(capsys: Any) -> None:
    said = {"name": "RayTaskError(KeyError)", "message": "\x1b[36mray::f()\x1b[39m (pid=1)\n", "stack": ["\x1b[1ma\n"]}
    closed = {"method": "closed", "params": {"exception": {**said, "cause": said, "context": None}}}
    files = record_of([], 0)
    files[JOURNAL] = encode({"type": "pipes", "at": 0, "line": json.dumps(closed)}) + files[JOURNAL]
    handler = Handler()
    evidence = follow(Growing(files, 1), handler)
    plain = {"name": said["name"], "message": "ray::f() (pid=1)\n", "stack": ["a\n"]}
    assert handler.messages == [{"exception": {**plain, "cause": plain, "context": None}}]
    assert evidence.exception == {**plain, "cause": plain, "context": None}


def test_phases_that_the_user_should_fix_are_warnings(caplog: pytest.LogCaptureFixture) -> None:
    files = record_of([], 0)
    phases = ("running", "memory", "own-ray", "unschedulable")
    files[JOURNAL] = (
        b"".join(encode({"type": "phase", "phase": each, "message": "so", "at": 1.0}) for each in phases) + files[JOURNAL]
    )
    with caplog.at_level(logging.INFO, "test"):
        follow(Growing(files, 1))
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING", "WARNING", "WARNING"]


def test_an_unreachable_record_is_waited_for(capsys: Any) -> None:
    class Flaky(Growing):
        def read(self, path: str, offset: int, limit: int) -> bytes:
            if self.random.random() < 0.5:
                raise OSError(116, "Stale file handle")
            return super().read(path, offset, limit)

    assert follow(Flaky(record_of(["x"], 3), 5)).end is not None


def test_a_record_that_stays_unreachable_is_evidence(capsys: Any) -> None:
    class Gone(Growing):
        def read(self, path: str, offset: int, limit: int) -> bytes:
            raise OSError(5, "Input/output error")

    slow = Cadence(busy=0.01, idle=0.01, waiting=0.01)
    evidence = follow(Gone(record_of(["x"], 3), 5), exited="exit code 0", cadence=slow, loss_timeout=0.05)
    assert evidence.end is None and "Input/output error" in (evidence.unreachable or "")


def test_a_lost_terminal_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def write(self, text: str = "") -> None:
            raise BrokenPipeError

        flush = write

    import sys

    monkeypatch.setattr(sys, "stdout", Broken())
    evidence = follow(Growing(record_of(["x"], 3), 5))
    assert evidence.end is not None


def test_the_first_exception_counts_and_every_writer_must_close(capsys: Any) -> None:
    def closed(exception: str) -> dict[str, Any]:
        return {"type": "pipes", "at": 0, "line": '{"method": "closed", "params": %s}' % exception}

    opened = {"type": "pipes", "at": 0, "line": '{"method": "opened", "params": {}}'}
    error, leaving = '{"exception": {"name": "ValueError"}}', '{"exception": {"name": "SystemExit"}}'
    files = record_of([], 0)
    files[JOURNAL] = (
        b"".join(map(encode, [opened, opened, opened, closed(leaving), closed(error), closed("{}")])) + files[JOURNAL]
    )
    evidence = follow(Growing(files, 1))
    assert (evidence.opened, evidence.closed) == (3, 3) and evidence.exception == {"name": "ValueError"}


@pytest.mark.parametrize(
    ("methods", "closed"),
    [
        (["opened", "closed"], 1),
        (["opened", "closed", "report_asset_materialization"], 0),
        (["opened", "closed", "closed", "log"], 0),
        (["opened", "closed", "log", "closed"], 1),
        (["opened", "opened", "closed", "log", "closed"], 2),
        (["opened", "closed", "opened", "log", "closed"], 2),
        (["opened", "closed", "log_external_stream"], 1),
    ],
)
def test_a_message_after_closed_reopens_its_writer(methods: list[str], closed: int, capsys: Any) -> None:
    """A forked child that leaves the context closes Pipes for its parent, which writes on."""
    files = record_of([], 0)
    messages = [{"type": "pipes", "at": 0, "line": json.dumps({"method": each, "params": {}})} for each in methods]
    files[JOURNAL] = b"".join(map(encode, messages)) + files[JOURNAL]
    evidence = follow(Growing(files, 1))
    assert evidence.closed == closed


def requeued(first_end: bool) -> dict[str, bytes]:
    """The record of two attempts: the first was ended from outside, perhaps before it could say so."""
    report = {"type": "pipes", "at": 0, "line": '{"method": "report_custom_message", "params": {"n": 1}}'}
    log = {"type": "pipes", "at": 0, "line": '{"method": "log", "params": {"n": 0}}'}
    terminated = [{"type": "end", "nonce": "n", "reason": "terminated", "stdio_bytes": 0}] if first_end else []
    second = {"type": "pipes", "at": 0, "line": '{"method": "report_custom_message", "params": {"n": 2}}'}
    end = {"type": "end", "nonce": "n", "reason": "exit", "exit_code": 0, "signal": None, "stdio_bytes": 0}
    start = {"type": "start", "nonce": "n", "at": 1.0, "attempt": 0}
    journal = [start, log, report, *terminated, {**start, "attempt": 1, "at": 2.0}, log, second, end]
    return {STDIO: b"", JOURNAL: b"".join(map(encode, journal))}


@pytest.mark.parametrize("first_end", [True, False])
def test_only_the_last_attempt_of_a_requeued_job_counts(first_end: bool) -> None:
    handler = Handler()
    evidence = follow(Growing(requeued(first_end), 3), handler, requeue=True)
    assert evidence.end is not None and evidence.end["reason"] == "exit" and evidence.started_at == 2.0
    assert handler.messages == [{"n": 0}, {"n": 0}, {"n": 2}]


def test_a_job_that_is_not_requeued_ends_with_its_attempt() -> None:
    whole = requeued(True)
    files = {**whole, JOURNAL: b"".join(line + b"\n" for line in whole[JOURNAL].split(b"\n")[:4])}
    handler = Handler()
    evidence = follow(Growing(files, 3), handler)
    assert evidence.end is not None and evidence.end["reason"] == "terminated"


@given(st.floats(0, 1e5), st.booleans())
def test_the_pause_is_a_bounded_share_of_the_silence(silence: float, started: bool) -> None:
    pause = Cadence(busy=0.2, idle=3.0, waiting=15.0).pause(silence, started)
    assert 0.2 <= pause <= (3.0 if started else 15.0) and pause <= max(0.2, 0.1 * silence)


class Killed(BaseException):
    pass


class Everything:
    """Dagster's output and event log, which outlive a process; it is killed after so many lines of either."""

    def __init__(self, level: int) -> None:
        self.output: list[str] = []
        self.log: list[tuple[int, str]] = []
        self.level = level
        self.lives = -1

    def write(self, text: str) -> None:
        self._live()
        self.output.append(text)

    def flush(self) -> None: ...

    def isEnabledFor(self, level: int) -> bool:
        return level >= self.level

    def handle_message(self, message: Any) -> None:
        self.log_at(logging.getLevelName(message["params"]["level"]), message["params"]["message"])

    def log_at(self, level: int, text: str) -> None:
        if self.isEnabledFor(level):
            self._live()
            self.log.append((level, text))

    def _live(self) -> None:
        if self.lives == 0:
            raise Killed
        self.lives -= 1


class StepLog:
    """The step's log, as far as the follower uses it."""

    def __init__(self, dagster: Everything) -> None:
        self.isEnabledFor, self.log = dagster.isEnabledFor, dagster.log_at


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["DEBUG", "INFO"]), st.sampled_from("ab")), max_size=12),
    st.integers(0, 12),
    st.lists(st.integers(0, 12), max_size=3),
    st.sampled_from([logging.DEBUG, logging.INFO]),
    st.integers(),
)
def test_reattach_loses_nothing_and_repeats_one_batch_at_most(
    said: list[tuple[str, str]], lines: int, kills: list[int], level: int, seed: int
) -> None:
    dagster = Everything(level)
    files = record_of([f"{number}\n" for number in range(lines)], 0)
    pipes = [{"method": "log", "params": {"level": each, "message": text}} for each, text in said]
    phase = {"type": "phase", "phase": "running", "message": "now", "at": 1.0}
    records = [phase, *({"type": "pipes", "at": 0, "line": json.dumps(each)} for each in pipes)]
    files[JOURNAL] = b"".join(map(encode, records)) + files[JOURNAL]
    offset = 0

    def note(to: int) -> None:
        nonlocal offset
        offset = to

    for lives in [*kills, -1]:
        dagster.lives = lives
        before, noted = len(dagster.output), files[STDIO][:offset].count(b"\n")
        state = ReattachState(offset, iter(list(dagster.log)), note)
        with contextlib.redirect_stdout(dagster), contextlib.suppress(Killed):  # type: ignore[type-var]
            follow(Growing(files, seed), dagster, StepLog(dagster), reattach=state)
        assert [int(each) for each in dagster.output[before:]] == list(range(noted, noted + len(dagster.output) - before))
    kept = [(logging.getLevelName(each), text) for each, text in said if logging.getLevelName(each) >= level]
    assert dagster.log == [(logging.INFO, "[rayslurm] running: now"), *kept]
    assert list(dict.fromkeys(map(int, dagster.output))) == list(range(lines))


def test_output_before_the_bookmark_is_not_repeated(capsys: Any) -> None:
    files = record_of([f"{number}\n" for number in range(3)], 0)
    notes: list[int] = []
    follow(Growing(files, 1), reattach=ReattachState(note=notes.append))
    assert notes[-1] == len(files[STDIO]) and capsys.readouterr().out == "0\n1\n2\n"
    second = files[STDIO].index(b"\n") + 1
    evidence = follow(AtOnce(files), reattach=ReattachState(second))
    assert capsys.readouterr().out == "1\n2\n" and evidence.output_tail() == "1\n2"


def test_an_unfinished_line_is_not_bookmarked(capsys: Any) -> None:
    files = record_of(["whole\n", "begun "], 0)
    files[JOURNAL] = b""
    notes: list[int] = []
    follower = Follower(
        AtOnce(files), "/run", "n", Handler(), LOG, FAST, component="a", reattach=ReattachState(note=notes.append)
    )
    follower.read_once()
    assert capsys.readouterr().out == "[a] whole\n" and notes == []


class AtOnce(Growing):
    """All of it at once."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(files, 0)

    def read(self, path: str, offset: int, limit: int) -> bytes:
        return self.files[path.rpartition("/")[2]][offset : offset + limit]


def test_a_bookmark_counts_only_on_its_machine_and_ignores_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "runs" / "name.followed"
    bookmark = Bookmark(path)
    assert bookmark.read() == 0
    for offset in (10**9, 7):
        bookmark.note(offset)
        assert Bookmark(path).read() == offset
    with monkeypatch.context() as patch:
        patch.setattr("socket.gethostname", lambda: "another")
        assert Bookmark(path).read() == 0
    path.write_text("{")
    assert Bookmark(path).read() == 0
    bookmark.remove()
    assert not path.exists()
    (tmp_path / "file").write_text("")
    elsewhere = Bookmark(tmp_path / "file" / "name.followed")
    elsewhere.note(1)
    assert elsewhere.read() == 0
