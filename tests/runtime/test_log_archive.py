"""Which of Ray's logs go into the archive of a failure, and what the archive looks like."""

import os
import subprocess
import sys
import tarfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from dagster_rayslurm.archive import install_runtime
from dagster_rayslurm.runtime.node.log_archive import LEFT_OUT, Log, archive_name, select

LOGS = st.lists(
    st.builds(Log, st.text("abc", min_size=1), st.integers(0, 100), st.floats(0, 9)), unique_by=lambda log: log.name, max_size=12
)


@given(LOGS, st.integers(1, 120), st.integers(1, 300))
def test_the_newest_logs_are_kept_up_to_the_limit(logs: list[Log], most_of_file: int, most: int) -> None:
    kept, left_out = select(logs, most_of_file, most)
    sizes = [log.size - offset for log, offset in kept]
    assert sum(sizes) <= most and all(size <= most_of_file for size in sizes)
    assert [log.modified for log, _ in kept] == sorted((log.modified for log, _ in kept), reverse=True)
    complete = {log.name for log, offset in kept if not offset}
    assert len(left_out) == len(logs) - len(complete)  # Each log is complete, or named.
    dropped = [log for log in logs if log.size and log not in [each for each, _ in kept]]
    if dropped:
        assert sum(sizes) == most and max(log.modified for log in dropped) <= min(log.modified for log, _ in kept if log.size)


def test_an_archive_has_the_ends_of_logs_and_says_what_is_missing(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    (logs / "events").mkdir(parents=True)
    (logs / "raylet.out").write_bytes(b"begin" + bytes(5 * 2**20) + b"end")
    (logs / "events" / "event_GCS.log").write_text("one event")
    (logs / "link").symlink_to("/etc/passwd")
    os.mkfifo(logs / "fifo")
    target = tmp_path / "ray-logs-n1.tar.gz"
    assert not subprocess.run([sys.executable, "-I", str(install_runtime(tmp_path)), "archive", logs, target]).returncode
    assert target.stat().st_mode & 0o777 == 0o600
    with tarfile.open(target) as archive:
        content = {name: archive.extractfile(name).read() for name in archive.getnames()}  # type: ignore[union-attr]
    assert set(content) == {"ray-logs/raylet.out", "ray-logs/events/event_GCS.log", f"ray-logs/{LEFT_OUT}"}
    assert content["ray-logs/events/event_GCS.log"] == b"one event"
    assert content["ray-logs/raylet.out"].endswith(b"\0end") and len(content["ray-logs/raylet.out"]) == 4 * 2**20
    assert content[f"ray-logs/{LEFT_OUT}"] == b"raylet.out: the first %d bytes\n" % (2**20 + 8)


def test_the_name_of_an_archive_is_harmless() -> None:
    assert archive_name("c1") == "ray-logs-c1.tar.gz"
    assert archive_name("../c1 (component gpu)") == "ray-logs-..-c1-component-gpu.tar.gz"
