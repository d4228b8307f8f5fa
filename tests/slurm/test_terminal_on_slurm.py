"""Tests: what a terminal starts on Slurm, leaves, finds again, enters and ends."""

import json
from pathlib import Path
from typing import Any

import pytest

from dagster_rayslurm.fields import read_variable
from dagster_rayslurm.ssh.fields import SSHLogin, read_variables
from dagster_rayslurm.ssh.openssh import control_path

from ..conftest import wait_until
from ..connections.fixtures import end_master
from .fixtures import Site
from .test_dashboard import dashboard, get

SIZE = ("--nodes", "2", "--mem", "2G", "--time", "5")
WAITS = """
import os, ray, time
ray.init(logging_level="error")
print("up", len(ray.nodes()), flush=True)
while not os.path.exists(os.path.join(os.environ["RAYSLURM_DATA_DIR"], "go")):
    time.sleep(0.1)
raise SystemExit(3)
"""
COUNT = "import ray; ray.init(logging_level='error'); print(len(ray.nodes()), 'nodes'); raise SystemExit(5)"


def listed(site: Site) -> list[dict[str, Any]]:
    return [json.loads(line) for line in site.rayslurm("ps", "--json").stdout.splitlines()]


def test_a_run_is_left_found_again_entered_and_followed(site: Site, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WAITS)
    left = site.rayslurm("submit", "--detach", *SIZE, "--load-env", "export A=b", "--", "python", "train.py", directory=tmp_path)
    assert left.returncode == 0, left.stderr
    name = left.stdout.strip()
    assert wait_until(lambda: site.rayslurm("logs", "train").stdout == "up 2\n", 60)
    (run,) = listed(site)
    assert (run["name"], run["kind"], run["state"], run["job_id"]) == (name, "run", "running", *site.jobs())
    entered = site.rayslurm("attach", name, "--", "python", "-c", f"import os; print(os.environ['A']); {COUNT}")
    assert (entered.returncode, entered.stdout) == (5, "b\n2 nodes\n"), entered
    site.sh('touch "$1/data/go"', site.base)
    followed = site.rayslurm("logs", "-f", name)
    assert (followed.returncode, followed.stdout) == (3, "up 2\n"), followed


def test_a_session_for_interactive_work(site: Site) -> None:
    started = site.rayslurm("session", "start", *SIZE, "--name", "work", "--json")
    assert started.returncode == 0, started.stderr
    entered = site.rayslurm("attach", "work", "--", "python", "-c", COUNT)
    assert (entered.returncode, entered.stdout) == (5, "2 nodes\n"), entered
    assert [each["kind"] for each in listed(site)] == ["session"]
    ended = site.rayslurm("cancel", "work")
    assert ended.returncode == 0 and ended.stdout.startswith("ended the session work-"), ended
    assert not listed(site) and not site.jobs()


def test_the_programs_of_openssh_lead_there_too(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_EDGE_NODE_CLIENT", "openssh")
    started = site.rayslurm("session", "start", *SIZE, "--name", "work", "--json")
    assert started.returncode == 0, started.stderr
    entered = site.rayslurm("attach", "work", "--", "python", "-c", COUNT)
    assert (entered.returncode, entered.stdout) == (5, "2 nodes\n"), entered
    with dashboard(site, "work", tmp_path) as (url, process, said):
        assert get(f"{url}api/version")["ray_version"]
        assert site.rayslurm("session", "stop", "work").returncode == 0
        assert wait_until(lambda: process.poll() == 0), said.read_text()
    examined = json.loads(site.rayslurm("doctor", "--json").stdout)
    for name, value in site.environment.items():
        monkeypatch.setenv(name, value)
    end_master(control_path(SSHLogin(**read_variables("SLURM_EDGE_NODE_", read_variable))))
    assert not [line for line in examined["lines"] if line["verdict"] in ("failure", "warning")], examined


def test_a_job_that_waits_says_why_and_is_cancelled(site: Site, tmp_path: Path) -> None:
    left = site.rayslurm("submit", "--detach", "--no-ray", "--sbatch", "--begin=now+1hour", "--", "true", directory=tmp_path)
    assert left.returncode == 0, left.stderr
    (run,) = listed(site)
    assert run["state"] == "pending" and "BeginTime" in run["says"]
    assert "there is nothing to enter" in site.rayslurm("attach", run["name"]).stderr
    ended = site.rayslurm("cancel", left.stdout.strip())
    assert ended.returncode == 0 and not site.jobs(), ended
