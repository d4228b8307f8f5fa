"""Warm clusters on this machine: usage of payloads side by side, and a session that cannot be noted."""

from __future__ import annotations

import errno
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from dagster_rayslurm import ComputeResource, SessionConfig
from dagster_rayslurm.backends.sessions.here import is_alive
from dagster_rayslurm.ssh.local import LocalConnection

from ..conftest import end_sessions, pipes_script, run_asset, small_ray, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

BURN = 6.0
"""Seconds of CPU time."""

BURNER = f"""
import ray, time
ray.init()

@ray.remote
def burn():
    held = bytearray(500 * 2**20)
    began = time.process_time()
    while time.process_time() - began < {BURN}:
        pass
    return len(held)

ray.get(burn.remote())
pipes.report_asset_materialization()
"""

SLEEPER = """
import ray, sys, time
ray.init()

@ray.remote
def sleep():
    time.sleep(8)

ray.get(sleep.remote())
pipes.report_asset_materialization()
"""


@pytest.fixture
def warm(base: Path) -> Iterator[ComputeResource]:
    compute = ComputeResource(
        local_base=str(base),
        enable_cluster_reuse=True,
        session=SessionConfig(max_concurrent_payloads=2, idle_timeout=60),
        default_launcher=small_ray(num_cpus_per_node=2),
    )
    yield compute
    end_sessions(base)


def test_usage_is_measured_per_payload(warm: ComputeResource, script: Any) -> None:
    payloads = [script(pipes_script(code), name) for name, code in (("sleep.py", SLEEPER), ("burn.py", BURNER))]
    with ThreadPoolExecutor() as pool:
        sleeper, burner = pool.map(lambda payload: run_asset(warm, payload).metadata, payloads)
    # A driver and a worker import Ray for some seconds of CPU time. What is used after the last sample is lost.
    assert 0.75 * BURN < burner["CPU time (s)"] < BURN + 6
    assert sleeper["CPU time (s)"] < 0.6 * burner["CPU time (s)"]
    # Without Ray's daemons, which use more than that themselves.
    assert burner["Peak memory (MiB)"] > 500 > 100 + sleeper["Peak memory (MiB)"]
    assert sleeper["Shared memory (MiB)"] > 200 and burner["Shared CPU time (s)"] >= 0


def test_a_session_that_cannot_be_noted_is_ended(
    warm: ComputeResource, base: Path, script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = LocalConnection.write

    def full(connection: LocalConnection, path: str, data: bytes, mode: int = 0o600) -> None:
        if path.endswith("/job_id"):
            raise OSError(errno.ENOSPC, "No space left on device", path)
        write(connection, path, data, mode)

    monkeypatch.setattr(LocalConnection, "write", full)
    failure = run_asset(warm, script("", "nothing.py"), uses_pipes=False).failure
    assert "No space left on device" in (failure.description or ""), failure
    runtimes = lambda: [each for each in psutil.process_iter(["cmdline"]) if str(base) in " ".join(each.info["cmdline"] or ())]  # noqa: E731
    assert wait_until(lambda: not runtimes()), runtimes()


def test_a_process_that_has_just_started_is_alive() -> None:
    """`Popen` may return while execve(2) still runs. The process has no command line then."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(200):
            processes.append(subprocess.Popen(["sleep", "60"], start_new_session=True))
            assert is_alive(processes[-1].pid, "60")
        assert not is_alive(processes[0].pid, "61")
    finally:
        for process in processes:
            process.kill()
    ended = processes[0]
    assert wait_until(lambda: not is_alive(ended.pid, "60")) and ended.returncode is None  # A zombie is not alive.
    for process in processes:
        process.wait()
