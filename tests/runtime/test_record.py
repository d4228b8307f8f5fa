"""The record: every line is whole or not there, whatever is cut, full or altered."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_rayslurm.runtime.protocol import record as r

from ..conftest import open_files, small_disk

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
    max_leaves=10,
)
records = st.dictionaries(st.text().filter(lambda key: key != "crc"), json_values, min_size=1)
small_records = st.dictionaries(
    st.text(max_size=5).filter(lambda key: key != "crc"), st.integers() | st.text(), min_size=1, max_size=3
)
"""Where only the bytes of the lines matter: they are made faster."""


@given(records)
def test_a_record_survives_its_line(record: dict[str, Any]) -> None:
    line = r.encode(record)
    assert line.count(b"\n") == 1 and line.endswith(b"\n")
    assert r.decode(line[:-1]) == record
    assert json.loads(line)["crc"]  # Any JSON tool reads it.


@given(records, st.data())
def test_an_altered_line_is_no_record(record: dict[str, Any], data: st.DataObject) -> None:
    line = bytearray(r.encode(record)[:-1])
    position = data.draw(st.integers(0, len(line) - 1))
    line[position] ^= data.draw(st.integers(1, 255))
    assert r.decode(bytes(line)) is None


@given(st.lists(small_records, max_size=5), st.data())
def test_any_cutting_gives_the_same_records(all_records: list[dict[str, Any]], data: st.DataObject) -> None:
    content = b"".join(map(r.encode, all_records))
    reader, found = r.LineReader(), []
    while reader.next_read < len(content):
        size = data.draw(st.integers(1, len(content)))
        found += reader.feed(content[reader.next_read : reader.next_read + size])
    assert found == all_records
    assert (reader.offset, reader.damaged) == (len(content), 0)


@given(st.lists(small_records, min_size=1, max_size=5), st.data())
def test_a_reader_resumes_from_its_offset(all_records: list[dict[str, Any]], data: st.DataObject) -> None:
    content = b"".join(map(r.encode, all_records))
    first = r.LineReader()
    found = first.feed(content[: data.draw(st.integers(0, len(content)))])
    second = r.LineReader(first.offset)
    assert found + second.feed(content[second.next_read :]) == all_records


def test_a_torn_line_is_counted_and_skipped() -> None:
    reader = r.LineReader()
    torn = r.encode({"a": 1})[:-5] + b"\n"
    assert reader.feed(torn + r.encode({"b": 2})) == [{"b": 2}]
    assert reader.damaged == 1


def test_a_line_whose_beginning_was_truncated_is_read_again() -> None:
    """What a reader saw of a write that failed half way is not there any more."""
    reader = r.LineReader()
    assert reader.feed(r.encode({"torn": "x" * 50})[:30]) == []
    content = r.encode({"a": 1}) + r.encode({"b": 2})
    found = reader.feed(content[reader.next_read :])
    found += reader.feed(content[reader.next_read :])
    assert found == [{"a": 1}, {"b": 2}] and reader.damaged == 0


def test_a_damaged_line_in_pieces_does_not_stop_the_reader() -> None:
    reader, found = r.LineReader(), []
    content = b"x" * 100 + b"\n" + r.encode({"b": 2})
    while reader.next_read < len(content):
        found += reader.feed(content[reader.next_read : reader.next_read + 40])
    assert found == [{"b": 2}] and reader.damaged == 1


def test_a_record_is_written_by_one_runtime_only(tmp_path: Path) -> None:
    record = make_record(tmp_path)
    with pytest.raises(FileExistsError):  # The space that is set aside marks it as taken,
        make_record(tmp_path)
    record.end({"type": "end"})
    with pytest.raises(FileExistsError, match="there is a record already"):  # and so does what was written.
        make_record(tmp_path)


def test_threads_replace_a_file_without_tearing_it(tmp_path: Path) -> None:
    import threading

    path = tmp_path / "f"
    r.write_atomically(str(path), b"0" * 100_000)
    writers = [
        threading.Thread(target=lambda n=n: [r.write_atomically(str(path), b"%d" % n * 100_000) for _ in range(20)])
        for n in range(4)
    ]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        content = path.read_bytes()
        assert len(content) == 100_000 and len(set(content)) == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["f"]


def test_a_very_long_line_of_many_chunks_is_cheap() -> None:
    line = r.encode({"d": "x" * 20_000_000})
    reader = r.LineReader()
    found = [record for at in range(0, len(line), 4096) for record in reader.feed(line[at : at + 4096])]
    assert len(found) == 1 and len(found[0]["d"]) == 20_000_000


def make_record(path: Path, limit: int = 2**30) -> r.RunRecord:
    return r.RunRecord(str(path), limit)


def read_all(path: Path) -> list[dict[str, Any]]:
    reader = r.LineReader()
    found = reader.feed(path.read_bytes())
    assert reader.damaged == 0 and reader.offset == path.stat().st_size
    return found


def test_output_stops_at_the_cap_with_a_marker_and_a_count(tmp_path: Path) -> None:
    record = make_record(tmp_path, limit=500)
    for _ in range(20):
        record.output("stdout", "0123456789" * 5, 1.0)
    record.end({"type": "end"})
    kept = read_all(tmp_path / r.STDIO)
    assert "output limit of 500 bytes" in kept[-1]["d"] and len(kept) < 20
    end = read_all(tmp_path / r.JOURNAL)[-1]
    assert end["stdio_dropped"] == 50 * (20 - (len(kept) - 1))
    assert end["stdio_bytes"] == (tmp_path / r.STDIO).stat().st_size


def test_the_end_is_written_once(tmp_path: Path) -> None:
    record = make_record(tmp_path)
    record.end({"type": "end", "n": 1})
    record.end({"type": "end", "n": 2})
    assert [line["n"] for line in read_all(tmp_path / r.JOURNAL)] == [1]
    assert not (tmp_path / "journal.reserve").exists()


def test_a_full_disk_keeps_whole_lines_and_the_end(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "256k") as disk:
        _fill_it(disk)


def _fill_it(disk: Path) -> None:
    record = make_record(disk)
    for _ in range(100):
        record.output("stdout", "y" * 3000, 1.0)
    with pytest.raises(OSError) as caught:
        for _ in range(1000):
            record.write({"type": "pipes", "line": "z" * 500})
    assert caught.value.errno == errno.ENOSPC
    record.end({"type": "end", "reason": "record", "message": "x" * 2000})
    journal = read_all(disk / r.JOURNAL)
    assert journal[-1]["type"] == "end" and journal[-1]["stdio_dropped"] > 0
    assert all(line["type"] in ("pipes", "end") for line in journal)
    read_all(disk / r.STDIO)


def test_atomic_write_leaves_nothing_behind_when_it_fails(tmp_path: Path) -> None:
    target = tmp_path / "is-a-directory"
    (target / "x").mkdir(parents=True)
    with pytest.raises(OSError):
        r.write_atomically(str(target), b"data")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["is-a-directory"]


def test_atomic_write_is_private(tmp_path: Path) -> None:
    r.write_atomically(str(tmp_path / "f"), b"data")
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o600


@given(st.binary(max_size=300))
def test_tail_of_any_bytes(data: bytes) -> None:
    import tempfile

    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        assert len(r.tail_file(file.name, lines=3).splitlines()) <= 3 + data.count(b"\r")


def test_an_end_that_cannot_be_written_is_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = make_record(tmp_path)
    record.write({"type": "start"})
    away = OSError(errno.ESTALE, "Stale file handle")

    def fail(*_: Any) -> Any:
        raise away

    for name in ("write", "ftruncate", "fsync"):
        with monkeypatch.context() as patch:
            patch.setattr(r.os, name, fail)
            if name == "ftruncate":
                patch.setattr(r.os, "write", fail)
            with pytest.raises(OSError):
                record.end({"type": "end"})
        assert not record.ended
    record.end({"type": "end"})
    assert record.ended and [line["type"] for line in read_all(tmp_path / r.JOURNAL)] == ["start", "end"]


def test_a_record_that_cannot_be_set_up_leaves_no_files(tmp_path: Path) -> None:
    (tmp_path / r.STDIO).mkdir()
    for _ in range(2):
        with pytest.raises(IsADirectoryError):
            make_record(tmp_path)
    assert not open_files(tmp_path)
    (tmp_path / r.STDIO).rmdir()
    make_record(tmp_path).withdraw()
    make_record(tmp_path).end({"type": "end"})
