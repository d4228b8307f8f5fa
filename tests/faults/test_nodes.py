"""Compute nodes and what runs on them: frozen, lost, drained, killed in each phase; a true verdict soon, and nothing left."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dagster_rayslurm import BashLauncher, ComputeResource, RunFailure

from ..conftest import pipes_script, run_asset, small_ray, wait_until
from ..slurm.fixtures import NODES, Running, Site
from .breaking import lost, nodes_are_idle, paused, preemption

pytestmark = pytest.mark.timeout(300)

Make = Callable[..., ComputeResource]
Start = Callable[..., Running]

SOON = 5.0
"""Seconds to the verdict where a runtime lives that can write the `end`."""
COMES_BACK = 10.0
"""Seconds in which a node whose connection ended may be heard of again."""
SILENCE = 30.0
"""Seconds of silence after which a node is lost: of the runtime, and of Slurm on the stack."""

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
"""Prints numbered lines until it may go; the file `up` names its nodes, that of the head first."""

ENDS_SLOWLY = (
    pipes_script(PRELUDE + "pipes.report_asset_materialization()\n")
    + '(data / "up").write_text(" ".join(nodes))\nprint("all is well", flush=True)\ntime.sleep(60)\n'
)
"""Has reported all that there is, and closed Dagster Pipes; its exit code is all that is missing."""


@pytest.fixture(autouse=True)
def all_are_back(site: Site) -> Iterator[None]:
    """Nodes that a test has ended, or drained, are back afterwards."""
    yield
    if not nodes_are_idle(site.stack, NODES):
        for node in NODES:
            # One that answers again is back by itself.
            site.stack.exec("slurmctld", ["scontrol", "update", f"nodename={node}", "state=resume"], check=False)
        assert wait_until(lambda: nodes_are_idle(site.stack, NODES), 90), site.sh("sinfo --Node --long")


def nodes_of(site: Site) -> list[str]:
    """The nodes of the payload that is up, that of the head first."""
    return site.connection.read(f"{site.base}/data/up", 0, 1000).decode().split()


def numbered(text: str) -> list[int]:
    return [int(line.split()[1]) for line in text.splitlines() if line.startswith("line ")]


def process(site: Site, node: str, which: str) -> str:
    """The id of one of the processes that our job has on a node."""
    rows = [line.split(None, 2) for line in site.stack.exec(node, ["ps", "-eo", "pid=,ppid=,args="]).splitlines()]
    args = {pid: words for pid, _, words in rows}
    roles = (" node ", " session ")
    ours = {pid: parent for pid, parent, words in rows if ".pyz" in words and any(role in words for role in roles)}
    ours = {pid: parent for pid, parent in ours.items() if "python" in args[pid].split()[0]}
    if which in ("keeper", "runtime"):
        keeper = next(pid for pid, parent in ours.items() if parent not in ours)
        return keeper if which == "keeper" else next(pid for pid, parent in ours.items() if parent == keeper)
    return next(pid for pid, words in args.items() if words.split()[0].endswith(f"/{which}"))


def kill(site: Site, node: str, which: str) -> float:
    """Kill it at once; when that was, by this machine's monotonic clock."""
    pid = process(site, node, which)
    site.killed = True
    began = time.monotonic()
    site.stack.exec(node, ["kill", "-9", pid])
    return began


# ---- Frozen


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


@pytest.mark.parametrize("mode", ["slurm", "slurm-hetjob"], indirect=True)
def test_a_workers_node_freezes_for_good(mode: str, make: Make, start: Start, script: Any, site: Site) -> None:
    """A worker's node that stands still ends the run as lost, by name, once it has been silent for too long."""
    del mode
    running = start(make(2, default_launcher=small_ray()), script(COUNTS))
    running.up()
    _, worker = nodes_of(site)
    with lost(site, worker):
        began = time.monotonic()
        failure = running.result(120).failure
        took = time.monotonic() - began
    assert failure.kind in ("cluster-lost", "allocation") and failure.allow_retries, failure.description
    assert worker in (failure.description or ""), failure.description
    assert took < SILENCE + COMES_BACK + SOON, took


@pytest.mark.parametrize("mode", ["slurm", "slurm-hetjob"], indirect=True)
def test_the_heads_node_freezes_for_good(mode: str, make: Make, start: Start, script: Any, site: Site) -> None:
    """The head's node that stands still makes no false success: Slurm's word that it failed is the verdict."""
    del mode
    running = start(make(), script(COUNTS))
    running.up()
    (head,) = nodes_of(site)
    with lost(site, head):
        site.stack.exec("slurmctld", ["scontrol", "update", f"nodename={head}", "state=down", "reason=test"])
        began = time.monotonic()
        failure = running.result(120).failure
        took = time.monotonic() - began
    assert failure.kind == "allocation" and failure.allow_retries, failure.description
    assert "NODE_FAIL" in (failure.description or "") and head in (failure.description or ""), failure.description
    assert took < 20, took


def test_a_node_is_lost_while_the_cluster_starts(mode: str, make: Make, start: Start, script: Any, site: Site) -> None:
    """A node that is lost during the bring-up ends it within `startup_timeout`, and is named."""
    del mode
    launcher = small_ray(
        startup_timeout=20, health_check=f"mkdir -p {site.base}/data; hostname >>{site.base}/data/checked; sleep 4"
    )
    running = start(make(2, default_launcher=launcher), script(COUNTS))
    checked = lambda: sorted(site.connection.read(f"{site.base}/data/checked", 0, 1000).decode().split())  # noqa: E731
    assert wait_until(lambda: len(checked()) == 2, 90)
    began = time.monotonic()
    worker = checked()[1]
    with lost(site, worker):
        failure = running.result(120).failure
        took = time.monotonic() - began
    assert failure.kind == "cluster-start" and worker in (failure.description or ""), failure.description
    assert took < 20 + SOON + COMES_BACK, took


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

HEAD_LOST = ("cluster-lost", SOON)
RUNTIME_GONE = ("runtime", 15.0)
NODE_LOST = ("cluster-lost", COMES_BACK + SOON)

KILLED = [
    ("slurm", "head", "gcs_server", HEAD_LOST),
    ("slurm", "worker", "raylet", HEAD_LOST),
    ("slurm", "worker", "runtime", NODE_LOST),
    ("slurm", "worker", "keeper", NODE_LOST),
    ("slurm-session", "head", "gcs_server", HEAD_LOST),
    ("slurm-session", "head", "runtime", RUNTIME_GONE),
    ("slurm-session", "worker", "raylet", HEAD_LOST),
    ("slurm-session", "worker", "runtime", NODE_LOST),
    ("slurm-hetjob", "head", "gcs_server", HEAD_LOST),
    ("slurm-hetjob", "head", "runtime", RUNTIME_GONE),
    ("slurm-hetjob", "worker", "raylet", HEAD_LOST),
    ("slurm-hetjob", "worker", "runtime", NODE_LOST),
]


@pytest.mark.parametrize(
    ("mode", "where", "which", "verdict"), KILLED, indirect=["mode"], ids=["-".join(each[:3]) for each in KILLED]
)
def test_a_process_is_killed_while_the_payload_runs(
    mode: str, where: str, which: str, verdict: tuple[str, float], make: Make, start: Start, script: Any, site: Site
) -> None:
    """Whichever of our processes is killed on whichever node, the run fails soon and by its right name."""
    del mode
    running = start(make(2, default_launcher=small_ray()), script(COUNTS))
    running.up()
    node = nodes_of(site)[where == "worker"]
    began = kill(site, node, which)
    failure = running.result(120).failure
    took = time.monotonic() - began
    _has(failure, verdict[0], took, verdict[1])
    assert where == "head" or node in (failure.description or ""), failure.description


def _has(failure: RunFailure, kind: str, took: float, limit: float) -> None:
    assert failure.kind == kind, (failure.kind, failure.description, took)
    assert took < limit, (took, failure.description)


@pytest.mark.parametrize("where", ["head", "worker"])
def test_a_runtime_is_killed_while_the_cluster_starts(
    where: str, mode: str, make: Make, start: Start, script: Any, site: Site
) -> None:
    """A runtime that is killed during the bring-up ends it soon, and never makes a success."""
    check = f"mkdir -p {site.base}/data; hostname >>{site.base}/data/checked; sleep 30"
    running = start(make(2, default_launcher=small_ray(health_check=check)), script(COUNTS))
    checked = lambda: sorted(site.connection.read(f"{site.base}/data/checked", 0, 1000).decode().split())  # noqa: E731
    assert wait_until(lambda: len(checked()) == 2, 90)
    began = kill(site, checked()[where == "worker"], "runtime")
    failure = running.result(120).failure
    took = time.monotonic() - began
    assert failure.kind in ("cluster-start", "cluster-lost", "runtime"), (mode, failure.kind, failure.description)
    assert took < COMES_BACK + 15, (took, failure.description)


@pytest.mark.parametrize("which", ["runtime", "keeper"])
def test_a_runtime_is_killed_while_the_run_ends(which: str, mode: str, make: Make, start: Start, script: Any, site: Site) -> None:
    """A payload that has closed Pipes and not exited yet is no success where its runtime is killed."""
    del mode
    running = start(make(), script(ENDS_SLOWLY))
    running.up()
    (head,) = nodes_of(site)
    began = kill(site, head, which)
    failure = running.result(60).failure
    _has(failure, "runtime", time.monotonic() - began, 15)
