"""`rayslurm session` for the stack, from the environment that `make stack-up` writes."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dagster_rayslurm import ComputeResource, SessionConfig
from dagster_rayslurm.backends.base import sweep_remote

from ..conftest import run_asset, small_ray, wait_until
from .fixtures import Running, Site

pytestmark = pytest.mark.timeout(280)

Cli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def rayslurm(site: Site, base: Path) -> Iterator[Cli]:
    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environ = {**os.environ, **site.stack.env, "RAYSLURM_REMOTE_BASE": site.base, "COLUMNS": "200", **variables}
        command = [str(Path(sys.executable).with_name("rayslurm")), "--base", str(base), "session", *arguments]
        return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)

    yield run
    site.sh("scancel --quiet --me")


def rows(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_session_from_pending_to_its_end(
    rayslurm: Cli, slurm_compute: Callable[..., ComputeResource], script: Callable[..., Path], start: Any, site: Site
) -> None:
    assert rows(rayslurm("list", "--json")) == []
    queue = {"cpus_per_node": 2, "mem": "2500M"}
    session = SessionConfig(name="study", idle_timeout=120)
    compute = slurm_compute(
        queue=queue, mode="slurm-session", session=session, default_launcher=small_ray(), enable_cluster_reuse=True
    )
    text = """
        import os, pathlib, ray, time
        ray.init()
        pathlib.Path(os.environ["RAYSLURM_DATA_DIR"], "up").write_text("x")
        time.sleep(600)
    """
    running: Running = start(compute, script(text), uses_pipes=False)
    job = running.up()

    (row,) = rows(rayslurm("list", "--json"))
    assert row["job_id"] == job and row["state"] == "ready" and (row["running"], row["waiting"], row["served"]) == (1, 0, 1)
    assert row["key"].startswith("study-") and row["generation"] == 1 and row["node"] in ("c1", "c2") and row["time_left"] > 60
    listed = rayslurm("list").stdout
    assert row["cluster_id"] in listed and "ready" in listed and job in listed
    for ident in (job, row["cluster_id"], "study"):
        (shown,) = rows(rayslurm("show", ident, "--json"))
        assert shown["payloads"][0]["step"] == "asset_under_test" and shown["payloads"][0]["state"] == "running"
        assert shown["directory"] == f"{site.base}/sessions/{row['key']}/1" and shown["ray_version"]
    assert "asset_under_test" in rayslurm("show", job).stdout

    stopped = rayslurm("stop", "study")
    assert stopped.returncode == 0 and f"Slurm job {job}" in stopped.stdout and not site.jobs(), stopped.stderr
    assert "its session was stopped, by `rayslurm session stop`" in str(running.result().failure)
    assert rows(rayslurm("list", "--json")) == []
    (ended,) = rows(rayslurm("list", "--all", "--json"))
    assert ended["state"] == "ended" and ended["job_id"] == job
    again = rayslurm("stop", job)
    assert (
        again.returncode == 1
        and again.stderr == f"Error: there is no session {job!r} or has ended; `rayslurm session list` lists them\n"
    )


def test_a_session_in_the_queue(
    rayslurm: Cli, slurm_compute: Callable[..., ComputeResource], script: Callable[..., Path], start: Any, site: Site
) -> None:
    compute = slurm_compute(queue={"extra_sbatch": ["--begin=now+1hour"]}, mode="slurm-session")
    running: Running = start(compute, script("pass"), uses_pipes=False)
    job = running.job("PENDING")
    assert wait_until(lambda: rows(rayslurm("list", "--json")))
    (row,) = rows(rayslurm("list", "--json"))
    assert row["state"] == "pending" and row["reason"].startswith("BeginTime, expected by ") and row["job_id"] == job
    assert "BeginTime" in rayslurm("show", job).stdout
    assert rayslurm("stop", job).returncode == 0 and not site.jobs()
    running.result()


def test_a_session_whose_runtime_is_gone(
    rayslurm: Cli, slurm_compute: Callable[..., ComputeResource], script: Callable[..., Path], site: Site
) -> None:
    """It announces itself, and nobody answers: that is said, and its job can still be ended."""
    compute = slurm_compute(mode="slurm-session", session=SessionConfig(idle_timeout=250))
    ran = run_asset(compute, script("pass"), uses_pipes=False)
    job = ran.completed[0].job_id
    assert job is not None
    directory = site.sh('echo "$1"/sessions/*/1', site.base).strip()
    announced = json.loads(site.connection.read(f"{directory}/session.json", 0, 65536))
    node = announced["hostname"]
    site.stack.exec(node, ["sh", "-c", f"kill -STOP {announced['pid']}"])
    try:
        (row,) = rows(rayslurm("list", "--json"))
        assert row["state"] == "silent" and row["reason"]
    finally:
        site.stack.exec(node, ["sh", "-c", f"kill -CONT {announced['pid']}"], check=False)
    assert rayslurm("stop", job).returncode == 0 and not site.jobs()


def test_another_remote_base_has_no_sessions(rayslurm: Cli) -> None:
    assert rows(rayslurm("list", "--json", RAYSLURM_REMOTE_BASE="/nowhere/at all")) == []
    assert rows(rayslurm("--remote-base", "~/none", "list", "--json")) == []


def test_a_sweep_leaves_a_session_that_lives(
    slurm_compute: Callable[..., ComputeResource], script: Callable[..., Path], site: Site
) -> None:
    """However old its files are, Slurm knows its job; once that is over all of it goes, and its runtime too."""
    compute = slurm_compute(mode="slurm-session", session=SessionConfig(idle_timeout=250))
    run_asset(compute, script("pass"), uses_pipes=False)
    commands, aged = site.connection, 'find "$1" -exec touch -d "20 days ago" {} +'
    site.sh(aged, site.base)
    swept = sweep_remote(commands, site.base, 14, every_minutes=0)
    assert not [path for path in swept if path.startswith(("sessions", "runtime"))], swept
    ran = run_asset(compute, script("pass"), uses_pipes=False)
    assert ran.metadata["Session reused"] is True
    site.sh("scancel --quiet --me")
    assert wait_until(lambda: not site.jobs())
    site.sh(aged, site.base)
    swept = sweep_remote(commands, site.base, 14, every_minutes=0)
    assert {path.partition("/")[0] for path in swept} >= {"sessions", "runtime"}, swept
    assert site.sh('ls "$1/sessions" "$1/runtime"', site.base).split() == [f"{site.base}/runtime:", f"{site.base}/sessions:"]
