"""Which of Ray's logs go into the archive of a failure, and what the archive looks like."""

import os
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_rayslurm.archive import install_runtime
from dagster_rayslurm.runtime.node.log_archive import LEFT_OUT, Log, archive_name, select
from dagster_rayslurm.runtime.node.resources import NodeResources
from dagster_rayslurm.runtime.process.loop import Loop
from dagster_rayslurm.runtime.protocol.messages import NodeEvent
from dagster_rayslurm.runtime.protocol.spec import RaySpec, RuntimeSpec
from dagster_rayslurm.runtime.ray.cluster import RayCluster

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


class Node(SimpleNamespace):
    """A worker node that is connected, and keeps the commands that it is sent."""

    def __init__(self, node_id: int) -> None:
        super().__init__(node_id=node_id, here=True, title=f"n{node_id}", machine=None, joined=True, gone=False, sent=[])

    def send(self, **command: Any) -> None:
        self.sent.append(command)


@pytest.mark.parametrize("event", [NodeEvent.LOST, NodeEvent.GONE])
def test_the_logs_of_the_other_nodes_are_archived_if_one_is_lost(event: NodeEvent) -> None:
    nodes = {number: Node(number) for number in (1, 2, 3)}
    nodes[3].here = False  # Lost before the payload failed.
    head = SimpleNamespace(
        loop=Loop(),
        spec=RuntimeSpec("c1", ray=RaySpec()),
        machine=NodeResources("n0", 1, 0, 2**33, None),
        prepare_ray=lambda *_: SimpleNamespace(end=lambda *_: None),
        archive_logs=lambda key, run_dir, done: done("ray-logs-n0.tar.gz"),
    )
    cluster = RayCluster(head, SimpleNamespace(members=nodes), None, lambda *_: None)  # type: ignore[arg-type]
    names: list[str] = []
    done: list[bool] = []
    cluster.archive_logs("/run", names, lambda: done.append(True))
    assert [bool(node.sent) for node in nodes.values()] == [True, True, False]
    assert names == ["ray-logs-n0.tar.gz"] and not done  # What is written by then counts, if another node never answers.
    cluster.handle(nodes[1], {"event": event, "message": "it is lost"})  # type: ignore[arg-type]
    assert not done
    answer = {"event": NodeEvent.ARCHIVED, "cluster": cluster.key, "run_dir": "/run", "name": "ray-logs-n2.tar.gz"}
    cluster.handle(nodes[2], answer)  # type: ignore[arg-type]
    assert names == ["ray-logs-n0.tar.gz", "ray-logs-n2.tar.gz"] and done == [True]
