"""Payloads side by side in a warm cluster have separate usage figures."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dagster_rayslurm import ComputeResource, SessionConfig

from ..conftest import end_sessions, pipes_script, run_asset, small_ray

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
