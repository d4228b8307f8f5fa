"""Idle Ray workers: recognized by their logs, and kept ready by a warm cluster of real Ray."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dagster_rayslurm import ComputeResource, SessionConfig
from dagster_rayslurm.runtime.node.usage import started_ahead
from dagster_rayslurm.runtime.ray import internals, node_main

from ..conftest import pipes_script, run_asset, small_ray, wait_until

DRIVER = pipes_script("""
    import os, time, ray
    ray.init()
    @ray.remote
    def pid():
        return os.getpid()
    began = time.time()
    worker = ray.get(pid.remote())
    pipes.report_asset_materialization(metadata={"worker": worker, "seconds": time.time() - began})
""")


@pytest.fixture
def worker() -> Iterator[subprocess.Popen[bytes]]:
    """A process that calls itself as workers of Ray do."""
    process = subprocess.Popen(["ray::IDLE", "60"], executable="/bin/sleep")
    # Popen returns a moment before the kernel shows the new command line.
    assert wait_until(lambda: Path(f"/proc/{process.pid}/cmdline").read_bytes().startswith(b"ray::"))
    yield process
    process.kill()
    process.wait()


def test_a_worker_is_idle_until_its_log_names_a_job(tmp_path: Path, worker: subprocess.Popen[bytes]) -> None:
    assert started_ahead(str(tmp_path / "none")) == (0, set())
    log = tmp_path / f"worker-ab12-ffffffff-{worker.pid}.out"
    log.touch()
    # The test itself is none of Ray's, one had a job from the start, and of one there is only the log.
    for other in (f"ffffffff-{os.getpid()}", f"01000000-{worker.pid}", "ffffffff-999999999"):
        (tmp_path / f"worker-ab12-{other}.out").touch()
    assert started_ahead(str(tmp_path))[1] == {worker.pid}
    log.write_text(":job_id:01000000\n:task_name:f\n")
    assert started_ahead(str(tmp_path))[1] == set()


class Raylet:
    """Starts as many workers as it is told, or none."""

    def __init__(self, logs: Path, heeds: bool) -> None:
        self.logs, self.heeds = logs, heeds
        self.asked: list[int] = []

    def take(self, _: Any, workers: int) -> None:
        self.asked.append(workers)
        for _ in range(workers if self.heeds else 0):
            (self.logs / f"worker-ab12-ffffffff-{10**9 + len(list(self.logs.iterdir()))}.out").touch()


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[Raylet, Callable[[], int]]]]:
    """Serves requests with a raylet of the test's own; that, and a function that requests idle workers."""
    monkeypatch.delenv(internals.PRESTART_AT_FIRST_DRIVER, raising=False)
    monkeypatch.setattr(node_main, "_START_TIMEOUT", 0.3)
    pipes: list[int] = []

    def serve(cpus: int, heeds: bool = True, connect: Any = lambda _: None) -> tuple[Raylet, Callable[[], int]]:
        raylet = Raylet(tmp_path, heeds)
        monkeypatch.setattr(internals, "connect_raylet", connect)
        monkeypatch.setattr(internals, "start_workers", raylet.take)
        reader, writer = os.pipe()
        pipes.append(writer)
        node_main.serve(reader, "none:1", str(tmp_path), cpus, print)
        return raylet, lambda: os.write(writer, b'{"prestart": true}\n')

    yield serve
    for writer in pipes:
        os.close(writer)


def test_only_missing_workers_are_started(served: Any, tmp_path: Path, worker: subprocess.Popen[bytes]) -> None:
    raylet, request = served(3)
    (tmp_path / f"worker-ab12-ffffffff-{worker.pid}.out").touch()
    request()
    assert wait_until(lambda: raylet.asked == [2])
    time.sleep(0.2)
    request()
    assert wait_until(lambda: len(raylet.asked) > 1) and raylet.asked == [2, 2]
    assert os.environ.pop(internals.PRESTART_AT_FIRST_DRIVER) == "0"


def test_on_a_large_node_few_workers_are_idle_and_ray_starts_its_own_as_well(served: Any) -> None:
    raylet, request = served(64)
    request()
    assert wait_until(lambda: raylet.asked == [node_main.MOST_IDLE_WORKERS])
    assert internals.PRESTART_AT_FIRST_DRIVER not in os.environ


def test_no_more_workers_are_started_if_they_cannot_be_counted(served: Any) -> None:
    raylet, request = served(2, heeds=False)
    request()
    assert wait_until(lambda: raylet.asked == [2])
    time.sleep(0.6)
    request()
    time.sleep(0.2)
    assert raylet.asked == [2]


def test_an_error_of_ray_only_disables_idle_workers(served: Any, capfd: pytest.CaptureFixture[str]) -> None:
    def connect(_: str) -> None:
        raise RuntimeError("no such node")

    raylet, request = served(2, connect=connect)
    request()
    said: list[str] = []
    assert wait_until(lambda: said.append(capfd.readouterr().err) or "RuntimeError: no such node" in "".join(said))
    assert raylet.asked == []


@pytest.mark.parametrize(("cpus", "has_grpc"), [(0, True), (2, False)])
def test_without_cpus_or_grpc_nothing_is_done(served: Any, monkeypatch: pytest.MonkeyPatch, cpus: int, has_grpc: bool) -> None:
    if not has_grpc:
        monkeypatch.setitem(sys.modules, "grpc", None)
    raylet, request = served(cpus)
    request()
    time.sleep(0.2)
    assert raylet.asked == [] and internals.PRESTART_AT_FIRST_DRIVER not in os.environ


@pytest.mark.ray
@pytest.mark.timeout(300)
def test_the_first_task_finds_an_idle_worker(base: Path, scratch_base: Path, script: Any) -> None:
    compute = ComputeResource(
        local_base=str(base),
        enable_cluster_reuse=True,
        session=SessionConfig(idle_timeout=60),
        default_launcher=small_ray(num_cpus_per_node=2, preload=["ray"]),
    )

    def waiting() -> set[int]:
        """The waiting workers, once they are two."""
        found = [started_ahead(str(logs))[1] for logs in scratch_base.glob("**/session_latest/logs")]
        return found[0] if found and len(found[0]) == 2 else set()

    run_asset(compute, script("pass\n", "idle.py"))  # It waits for the cluster, and uses none of its workers.
    ready = wait_until(waiting, 60)
    assert ready, "nobody waits when the cluster is ready"
    payload = script(DRIVER)
    for _ in range(2):
        ran = run_asset(compute, payload)
        assert ran.metadata["worker"] in ready and "leaks" not in ran.metadata
        again = wait_until(waiting, 60)
        assert again and again != ready, "nobody waits after a payload"
        ready = again
    # Those that nobody used count for nobody.
    assert ran.metadata["CPU time (s)"] < 2
    for announced in base.rglob("session.json"):
        compute.cleanup_cluster(json.loads(announced.read_text())["cluster_id"])
    assert wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ready))
