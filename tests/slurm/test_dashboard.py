"""Tests: a running Ray cluster on Slurm is within reach of its user, and of nobody else."""

import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dagster_rayslurm import ComputeResource

from ..conftest import pipes_script, small_ray, wait_until
from .fixtures import Running, Site

UP = pipes_script("""
import os, pathlib, ray, time
ray.init()
data = pathlib.Path(os.environ["RAYSLURM_DATA_DIR"])
(data / "up").write_text("x")
while not (data / "go").exists():
    time.sleep(0.1)
""")
RAY_MEMORY = {"mem": "2500M"}


@contextmanager
def dashboard(site: Site, target: str, directory: Path) -> Iterator[tuple[str, "subprocess.Popen[str]", Path]]:
    """The URL that `rayslurm dashboard` prints, its process, and what it says."""
    said = directory / "said"
    with said.open("w") as errors:
        command = [sys.executable, "-m", "dagster_rayslurm.cli", "dashboard", target]
        process = subprocess.Popen(command, env=site.environment, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url, said.read_text()
        yield url, process, said
    finally:
        process.terminate()
        process.communicate()


@contextmanager
def firewall(site: Site, port: int | None) -> Iterator[None]:
    """While it is there, packets from the edge node to a TCP port of any other node are lost without a word; None for no port."""
    if port is None:
        yield
        return
    rule = f"ipproto 6 dport {port} lookup 100"  # TCP; bookworm has no file of the names of protocols.
    nobody = "$(ip -4 -o addr show eth0 | awk '{print $4}' | sed 's/[0-9]*[/].*/251/')"
    lost = f"ip neigh replace {nobody} lladdr 02:00:00:00:00:01 dev eth0 nud permanent"
    route = f"ip route replace default via {nobody} dev eth0 table 100"
    site.stack.exec("edge", ["sh", "-ec", f"{lost}; {route}; ip rule add {rule}"])
    try:
        yield
    finally:
        site.stack.exec("edge", ["sh", "-c", f"ip rule del {rule}"])


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return json.load(answer)


def host_names(url: str) -> set[str]:
    """The nodes that the dashboard shows with their host names, which each node reports a while after it has joined."""
    return {node["hostname"] for node in get(f"{url}nodes?view=summary")["data"]["summary"] if "hostname" in node}


@pytest.mark.parametrize("way", ["tcp", "srun"])
def test_the_dashboard_and_jobs_of_a_running_step(
    way: str,
    site: Site,
    slurm_compute: Callable[..., ComputeResource],
    start: Callable[..., Running],
    script: Callable[[str], Any],
    tmp_path: Path,
) -> None:
    compute = slurm_compute(queue={**RAY_MEMORY, "num_nodes": 2}, default_launcher=small_ray(dashboard=True))
    running = start(compute, script(UP))
    job = running.up()
    path = site.sh('ls "$1"/runs/*/cluster.json', site.base).strip()
    access = json.loads(site.connection.read(path, 0, 10000))
    with firewall(site, access["port"] if way == "srun" else None), dashboard(site, job, tmp_path) as (url, process, said):
        assert get(f"{url}api/version")["ray_version"]
        assert wait_until(lambda: host_names(url) == {"c1", "c2"}, 60), host_names(url)
        steps = site.sh("squeue --me --steps --noheader --format=%i").split()
        assert (f"{job}.1" in steps) == (way == "srun"), steps
        secrets = [access["token"], access["key"], re.split("[/]", url)[3]]
        listed = [*site.stack.processes("edge"), *site.stack.processes("c1"), " ".join(process.args)]  # type: ignore[arg-type]
        assert not [line for line in listed if any(secret in line for secret in secrets)], "a secret among arguments"
        with pytest.raises(urllib.error.HTTPError, match="403"):
            get(url.replace(secrets[2], "x" * len(secrets[2])) + "api/version")

        done = site.rayslurm("job", "submit", "asset_under_test", "--", "python", "-c", "print(6*7)")
        assert done.returncode == 0 and "42" in done.stdout, done
        assert site.rayslurm("job", "submit", job, "--", "python", "-c", "raise SystemExit(3)").returncode != 0
        top = json.loads(site.rayslurm("top", job, "--json").stdout)
        assert len(top["nodes"]) == 2 and top["totals"]["CPU"] == 2 and not top["never"]

        site.sh('touch "$1/data/go"', site.base)
        running.result()
        assert wait_until(lambda: process.poll() is not None), said.read_text()
        assert process.returncode == 0 and said.read_text().count("has ended") == 1, said.read_text()
    refused = site.rayslurm("dashboard", job)
    assert refused.returncode == 1 and refused.stderr.startswith("Error: ") and refused.stderr.count("\n") == 1


def test_a_warm_session_is_reached_again_after_a_lost_link(
    site: Site,
    session_compute: Callable[..., ComputeResource],
    start: Callable[..., Running],
    script: Callable[[str], Any],
    tmp_path: Path,
) -> None:
    compute = session_compute(queue=RAY_MEMORY, enable_cluster_reuse=True, default_launcher=small_ray(dashboard=True))
    running = start(compute, script(UP))
    job = running.up()
    site.sh('touch "$1/data/go"', site.base)
    cluster_id = running.result().metadata["Ray cluster ID"]
    # No payload runs, and the cluster stays.
    (tmp_path / "two").mkdir()
    with dashboard(site, cluster_id, tmp_path) as (url, _, said), dashboard(site, job, tmp_path / "two") as (other, _, _):
        assert get(f"{url}api/version") == get(f"{other}api/version")
        kill = "for p in $(ps -eo pid,args | awk '/sshd: dev/ && !/awk/ {print $1}'); do kill -9 $p; done"
        site.stack.exec("edge", ["sh", "-c", kill])
        assert wait_until(lambda: get(f"{url}api/version")["ray_version"]), said.read_text()
        assert compute.cleanup_cluster(cluster_id)
        assert wait_until(lambda: said.read_text().count("has ended") == 1), said.read_text()
