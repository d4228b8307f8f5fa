"""Tests: compute nodes are frozen, drained or preempted, or lose processes. A true verdict comes soon, and nothing is left."""

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dagster_rayslurm import BashLauncher, ComputeResource, RunFailure

from ..conftest import pipes_script, run_asset, small_ray, wait_until
from ..slurm.fixtures import NODES, Running, Site
from .breaking import nodes_are_idle, paused, preemption
from .conftest import HETJOB

pytestmark = pytest.mark.timeout(300)

Make = Callable[..., ComputeResource]
Start = Callable[..., Running]

SOON = 30.0
"""Seconds in which a verdict follows the evidence, also on a busy machine; two are usual."""
RECONNECT_GRACE = 10.0
"""Seconds in which a node may reconnect after its connection ended."""

PRELUDE = """
import os, pathlib, socket, sys, time
data = pathlib.Path(os.environ["RAYSLURM_DATA_DIR"])
nodes = [socket.gethostname()]
if os.environ.get("RAY_ADDRESS"):
    import ray
    ray.init()
    nodes += [node["NodeManagerHostname"] for node in ray.nodes() if node["NodeManagerHostname"] != nodes[0]]
"""
COUNTS = pipes_script(
    PRELUDE
    + """
(data / "up").write_text(" ".join(nodes))
lines = 0
while not (data / "go").exists():
    print("line", lines, flush=True)
    lines += 1
    time.sleep(0.05)
pipes.report_asset_materialization(metadata={"lines": lines})
"""
)
"""Payload that prints numbered lines until the test lets it end. It writes its nodes to the file `up`, the head node first."""

ENDS_SLOWLY = (
    pipes_script(PRELUDE + "pipes.report_asset_materialization()\n")
    + '(data / "up").write_text(" ".join(nodes))\nprint("all is well", flush=True)\ntime.sleep(60)\n'
)
"""Payload that has closed Dagster Pipes, but takes time to exit."""


@pytest.fixture(autouse=True)
def all_are_back(site: Site) -> Iterator[None]:
    """Brings nodes that a test has stopped or drained back at its end."""
    yield
    if not nodes_are_idle(site.stack, NODES):
        for node in NODES:
            # A node that answers again needs no resume.
            site.stack.exec("slurmctld", ["scontrol", "update", f"nodename={node}", "state=resume"], check=False)
        assert wait_until(lambda: nodes_are_idle(site.stack, NODES), 90), site.sh("sinfo --Node --long")


def nodes_of(site: Site) -> list[str]:
    """The nodes of the running payload, the head node first."""
    return site.connection.read(f"{site.base}/data/up", 0, 1000).decode().split()


def numbered(text: str) -> list[int]:
    return [int(line.split()[1]) for line in text.splitlines() if line.startswith("line ")]


def process(site: Site, node: str, which: str) -> str:
    """The id of one process of the test's job on a node."""
    rows = [line.split(None, 2) for line in site.stack.exec(node, ["ps", "-eo", "pid=,ppid=,args="]).splitlines()]
    args = {pid: words for pid, _, words in rows}
    roles = (" node ", " session ")
    ours = {pid: parent for pid, parent, words in rows if ".pyz" in words and any(role in words for role in roles)}
    ours = {pid: parent for pid, parent in ours.items() if "python" in args[pid].split()[0]}
    if which in ("keeper", "runtime"):
        keeper = next(pid for pid, parent in ours.items() if parent not in ours)
        return keeper if which == "keeper" else next(pid for pid, parent in ours.items() if parent == keeper)
    if which == "slurmstepd":
        return next(pid for pid, words in args.items() if words.startswith("slurmstepd: [") and words.endswith(".0]"))
    if which == "batch shell":
        return next(pid for pid, words in args.items() if words.endswith("/slurm_script"))
    # Of srun that is the first of its two processes, which started the other one.
    return next((pid for pid, words in args.items() if os.path.basename(words.split()[0]) == which), "")


def kill(site: Site, node: str, which: str) -> float:
    """Kill one process of the test's job on a node; returns the time, by this machine's monotonic clock."""
    pid = wait_until(lambda: process(site, node, which))  # Where a cluster starts, its GCS may be yet to come.
    assert pid, f"there is no {which} on {node}"
    site.killed = True
    began = time.monotonic()
    site.stack.exec(node, ["kill", "-9", pid])
    return began


# ---- Frozen


@pytest.mark.parametrize("mode", ["slurm", pytest.param("slurm-session", marks=pytest.mark.thorough), HETJOB], indirect=True)
def test_nodes_freeze_for_seconds(
    mode: str, make: Make, start: Start, script: Any, site: Site, capfd: pytest.CaptureFixture[str]
) -> None:
    """A worker's node and the head's may both stand still for some seconds: the run succeeds, each line comes once."""
    del mode
    running = start(make(2, default_launcher=small_ray()), script(COUNTS))
    running.up()
    head, worker = nodes_of(site)
    for node in (worker, head):
        with paused(site.stack, node):
            time.sleep(6)
        time.sleep(1)
    site.sh('touch "$1/data/go"', site.base)
    ran = running.result(60)
    assert numbered(capfd.readouterr().out) == list(range(ran.metadata["lines"]))


# ---- While the cluster starts


def in_the_start(site: Site, make: Make, start: Start, script: Any) -> tuple[Running, str, str]:
    """Start a run on two nodes that waits in the worker's health check; returns the run, the head node and the worker node."""
    checked = f"{site.base}/data/checked"
    check = f'mkdir -p {site.base}/data; hostname >>{checked}; [ "$(wc -l <{checked})" = 1 ] || sleep 60'
    running = start(make(2, default_launcher=small_ray(health_check=check)), script(COUNTS))
    names = lambda: site.connection.read(checked, 0, 1000).decode().split()  # noqa: E731
    assert wait_until(lambda: len(names()) == 2, 90)
    head, worker = names()
    return running, head, worker


STARTS = [
    ("slurm", "head", "runtime", "runtime"),
    ("slurm-session", "worker", "runtime", "cluster-start"),
    pytest.param("slurm", "worker", "runtime", "cluster-start", marks=pytest.mark.thorough),
    pytest.param("slurm-session", "head", "runtime", "runtime", marks=pytest.mark.thorough),
    pytest.param("slurm-session", "head", "keeper", "runtime", marks=pytest.mark.thorough),
    pytest.param("slurm", "head", "gcs_server", "cluster-start", marks=pytest.mark.thorough),
]


@pytest.mark.parametrize(("mode", "where", "which", "kind"), STARTS, indirect=["mode"])
def test_a_process_is_killed_while_the_cluster_starts(
    where: str, which: str, kind: str, mode: str, make: Make, start: Start, script: Any, site: Site
) -> None:
    """Whichever is killed during the bring-up ends it soon, and never makes a success."""
    del mode
    running, head, worker = in_the_start(site, make, start, script)
    began = kill(site, head if where == "head" else worker, which)
    failure = running.result(120).failure
    # `ray start` takes a minute to see that its GCS is gone if that never answered.
    _has(failure, kind, time.monotonic() - began, 100.0 if which == "gcs_server" else RECONNECT_GRACE + SOON)


# ---- Drained, and to be rebooted


def test_nodes_are_drained_and_to_be_rebooted(mode: str, make: Make, start: Start, script: Any, site: Site) -> None:
    """An administrator who drains a node, or asks for its reboot, ends nothing that runs there."""
    compute = make(connection_loss_timeout=30)
    running = start(compute, script(COUNTS))
    job_id = running.up()
    (node,) = nodes_of(site)
    try:
        site.stack.exec("slurmctld", ["scontrol", "update", f"nodename={node}", "state=drain", "reason=test"])
        site.stack.exec("slurmctld", ["scontrol", "reboot", "nextstate=resume", node], check=False)
        time.sleep(2)
        site.sh('touch "$1/data/go"', site.base)
        ran = running.result(60)
        assert ran.result.success
        if mode == "slurm-session":
            assert run_asset(compute, script(COUNTS, "again.py")).completed[0].job_id == job_id
    finally:
        site.stack.exec("slurmctld", ["scontrol", "cancel_reboot", node], check=False)
        site.stack.exec("slurmctld", ["scontrol", "update", f"nodename={node}", "state=resume"], check=False)


def test_a_job_is_preempted(mode: str, make: Make, start: Start, script: Any, site: Site) -> None:
    """A run whose nodes are given to a more urgent job fails as preempted, and may be tried again."""
    del mode
    with preemption(site.stack) as partition:
        running = start(make(default_launcher=BashLauncher(grace_period=2)), script(COUNTS))
        running.up()
        (node,) = nodes_of(site)
        job = "#!/bin/sh\n#SBATCH --exclusive --time=1 --output=/dev/null\nsleep 30\n"
        urgent = site.sh('printf %s "$1" | sbatch --parsable -p "$2" -w "$3"', job, partition, node).strip()
        try:
            failure = running.result(90).failure
        finally:
            site.sh(f"scancel {urgent}")
    assert failure.kind == "allocation" and failure.allow_retries, (failure.kind, failure.description)
    assert "PREEMPTED" in (failure.description or ""), failure.description


# ---- Killed

HEADS = [
    ("slurm", "gcs_server", "cluster-lost"),
    ("slurm", "slurmstepd", "runtime"),
    ("slurm", "srun", "runtime"),
    ("slurm", "batch shell", "runtime"),
    ("slurm-session", "gcs_server", "cluster-lost"),
    ("slurm-session", "runtime", "runtime"),
    ("slurm-session", "keeper", "runtime"),
    pytest.param("slurm-session", "raylet", "cluster-lost", marks=pytest.mark.thorough),
    pytest.param("slurm-hetjob", "gcs_server", "cluster-lost", marks=pytest.mark.thorough),
    pytest.param("slurm-hetjob", "runtime", "runtime", marks=pytest.mark.thorough),
    pytest.param("slurm-hetjob", "slurmstepd", "runtime", marks=pytest.mark.thorough),
    pytest.param("slurm-hetjob", "srun", "runtime", marks=pytest.mark.thorough),
    pytest.param("slurm-hetjob", "batch shell", "runtime", marks=pytest.mark.thorough),
]


@pytest.mark.parametrize(("mode", "which", "kind"), HEADS, indirect=["mode"])
def test_a_process_of_the_head_is_killed(
    mode: str, which: str, kind: str, make: Make, start: Start, script: Any, site: Site
) -> None:
    """Whichever of our processes is killed on the head's node, the run fails soon and by its right name."""
    del mode
    running = start(make(2, default_launcher=small_ray()), script(COUNTS))
    running.up()
    began = kill(site, nodes_of(site)[0], which)
    failure = running.result(120).failure
    # Without its slurmstepd a job ends some time after KillWait only.
    _has(failure, kind, time.monotonic() - began, 90.0 if which == "slurmstepd" else SOON)


WORKERS = [
    ("slurm", "raylet"),
    ("slurm", "runtime"),
    ("slurm-session", "runtime"),
    pytest.param("slurm-session", "raylet", marks=pytest.mark.thorough),
    pytest.param("slurm-hetjob", "raylet", marks=pytest.mark.thorough),
    pytest.param("slurm-hetjob", "runtime", marks=pytest.mark.thorough),
]


@pytest.mark.parametrize(("mode", "which"), WORKERS, indirect=["mode"])
def test_a_process_of_a_worker_is_killed(
    which: str, mode: str, make: Make, start: Start, script: Any, site: Site, capfd: pytest.CaptureFixture[str]
) -> None:
    """A worker whose Ray or runtime is killed is told of by name, and what the payload does without it goes on to its end."""
    del mode
    running = start(make(2, default_launcher=small_ray()), script(COUNTS))
    running.up()
    worker = nodes_of(site)[1]
    began = kill(site, worker, which)
    heard: list[str] = []

    def told() -> bool:
        heard.append(capfd.readouterr().err)
        return any("node-lost" in line and worker in line for line in "".join(heard).splitlines())

    assert wait_until(told, RECONNECT_GRACE + SOON), time.monotonic() - began
    site.sh('touch "$1/data/go"', site.base)
    assert running.result(60).result.success


def _has(failure: RunFailure, kind: str, took: float, limit: float) -> None:
    assert failure.kind == kind, (failure.kind, failure.description, took)
    assert took < limit, (took, failure.description)


@pytest.mark.parametrize("which", ["runtime", "keeper"])
def test_a_runtime_is_killed_while_the_run_ends(which: str, mode: str, make: Make, start: Start, script: Any, site: Site) -> None:
    """A payload that has closed Pipes and not exited yet is no success where its runtime is killed."""
    del mode
    running = start(make(), script(ENDS_SLOWLY))
    running.up()
    (head,) = nodes_of(site)
    began = kill(site, head, which)
    failure = running.result(60).failure
    _has(failure, "runtime", time.monotonic() - began, 30)
