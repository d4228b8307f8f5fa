"""Payloads that share a Ray cluster are told apart by Ray's jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from dagster_rayslurm.runtime.node.usage import Attribution, RayJobs, UsageMeter
from dagster_rayslurm.runtime.process.processes import Process

PARENTS = {10: 1, 11: 10, 20: 1, 21: 20, 30: 21, 31: 30, 32: 21, 33: 21, 34: 21}
"""The driver 10 with a child; Ray below 20, its raylet 21, its workers 30, which has a child, to 34."""
EVERYTHING = {pid: Process(pid, parent, 1.0) for pid, parent in PARENTS.items()}


def log(logs: Path, name: str, text: str = "") -> None:
    (logs / name).write_text(text)


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    log(tmp_path, f"python-core-driver-02000000{'f' * 48}_10.log")
    log(tmp_path, f"python-core-driver-01000000{'f' * 48}_99.log")
    log(tmp_path, "worker-aa-02000000-30.out")
    log(tmp_path, "worker-bb-ffffffff-32.out", ":job_id:01000000\n:task_name:f\n")
    log(tmp_path, "worker-cc-ffffffff-33.out")
    log(tmp_path, "worker-dd-01000000-34.out")
    log(tmp_path, "worker-ee-ffffffff-34.out", ":job_id:02000000\n")
    return tmp_path


def pids(parts: Attribution) -> tuple[set[int], set[int], set[int]]:
    own, shared, foreign = parts
    return {process.pid for process in own}, {process.pid for process in shared}, foreign


def test_workers_belong_to_the_payload_whose_driver_has_their_job(logs: Path) -> None:
    jobs = RayJobs(str(logs), lambda: 20)
    parts = jobs.attribute(EVERYTHING.values(), EVERYTHING)
    # The system has used the number 34 twice, and the later job counts.
    assert pids(parts) == ({10, 11, 30, 31, 34}, {20, 21, 33}, {32})
    assert jobs.job_ids == {"02000000"}


def test_another_node_is_told_the_jobs(logs: Path) -> None:
    jobs = RayJobs(str(logs), lambda: 20)
    ray = {pid: process for pid, process in EVERYTHING.items() if pid >= 20}
    assert pids(jobs.attribute(ray.values(), ray)) == (set(), {20, 21, 33}, {30, 31, 32, 34})
    jobs.job_ids.add("01000000")
    assert pids(jobs.attribute(ray.values(), ray)) == ({32}, {20, 21, 33}, {30, 31, 34})


def test_a_cluster_without_logs_is_shared(tmp_path: Path) -> None:
    parts = RayJobs(str(tmp_path / "none"), lambda: 20).attribute(EVERYTHING.values(), EVERYTHING)
    assert pids(parts) == ({10, 11}, {20, 21, 30, 31, 32, 33, 34}, set())


def test_a_waiting_worker_becomes_the_payloads_that_takes_it() -> None:
    meter = UsageMeter([], 0.0)
    waiting = [Process(1, 0, 2.0), Process(2, 0, 3.0), Process(3, 0, 1.0)]
    meter.add(1.0, Attribution([], waiting, set()), 0, 100)
    assert (meter.usage.cpu_seconds, meter.usage.shared_cpu_seconds) == (0, 6.0)
    meter.add(2.0, Attribution([Process(1, 0, 2.5)], [Process(3, 0, 1.5)], {2}), 10, 50)
    usage = meter.usage
    assert (usage.cpu_seconds, usage.peak_memory) == (2.5, 10)
    assert (usage.shared_cpu_seconds, usage.shared_peak_memory) == (1.5, 100)
