"""Sessions of several components on the stack: one heterogeneous job for many payloads, and what becomes of it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dagster_rayslurm import BashLauncher, ComputeResource, HetComponent, RayLauncher, SlurmQueueConfig

from ..conftest import Ran, pipes_script, run_asset, small_ray, wait_until
from .fixtures import Running, Site

pytestmark = pytest.mark.timeout(240)

Make = Callable[..., ComputeResource]

PLACED = pipes_script("""
import os, pathlib, ray, socket, time
ray.init()

@ray.remote(num_cpus=1)
def where():
    return [os.environ["SLURM_JOB_PARTITION"], socket.gethostname(), len(ray.get_gpu_ids())]

on_gpu = where.options(num_gpus=2, label_selector={"component": "gpu"}).remote()
on_cpu = where.options(label_selector={"component": "cpu"}).remote()
by_resource = where.options(resources={"component:gpu": 1}).remote()
data = pathlib.Path(os.environ["RAYSLURM_DATA_DIR"])
found = {
    "gpu": ray.get(on_gpu), "cpu": ray.get(on_cpu), "resource": ray.get(by_resource), "driver": socket.gethostname(),
    "job": os.environ["SLURM_JOB_ID"], "address": ray.get_runtime_context().gcs_address, "nodes": len(ray.nodes()),
    "labels": sorted(node["Labels"]["component"] for node in ray.nodes()),
}
(data / "up").write_text("x")
until = time.monotonic() + float(os.environ.get("UP_FOR", "0"))
while time.monotonic() < until and not (data / "go").exists():
    time.sleep(0.05)
pipes.report_asset_materialization(metadata=found)
""")
"""Says where tasks of each component run, and then goes on for UP_FOR seconds or until it may go."""

PLAIN = pipes_script("""
import os, pathlib, socket, time
(pathlib.Path(os.environ["RAYSLURM_DATA_DIR"]) / "up").write_text("x")
time.sleep(float(os.environ.get("UP_FOR", "0")))
found = {"job": os.environ["SLURM_JOB_ID"], "driver": socket.gethostname(), "partition": os.environ["SLURM_JOB_PARTITION"]}
pipes.report_asset_materialization(metadata=found)
""")


def component(name: str, partition: str, launcher: RayLauncher | None = None, **queue: Any) -> HetComponent:
    asked = SlurmQueueConfig(**{"partition": partition, "cpus_per_node": 2, "mem": "2500M", "time_limit": "00:05:00", **queue})
    return HetComponent(component_id=name, queue=asked, launcher=launcher or RayLauncher())


BOTH = [component("cpu", "compute"), component("gpu", "gpu", gpus_per_node=2)]


@pytest.fixture
def het_compute(session_compute: Make) -> Make:
    """Makes resources whose sessions have two components."""

    def make(**fields: Any) -> ComputeResource:
        defaults: dict[str, Any] = {"components": BOTH, "default_launcher": small_ray(), "enable_cluster_reuse": True}
        return session_compute(**{**defaults, **fields})

    return make


@pytest.fixture
def all_back(site: Site) -> Iterator[None]:
    """Nodes that a test has ended are back afterwards."""
    yield

    def idle() -> bool:
        return set(site.sh("sinfo --noheader --Node --format=%t").split()) == {"idle"}

    assert wait_until(idle, 90), site.sh("sinfo --Node")


def value_of(ran: Ran, name: str) -> Any:
    assert not ran.failures, ran.failures[0].description
    return ran.metadata[name]


def leaders(site: Site) -> list[str]:
    """Ids of the user's jobs, of those with components the first one's."""
    labels = site.sh("squeue --me --noheader --format=%i").split()
    return sorted({label.partition("+")[0] for label in labels})


def labels(site: Site) -> list[str]:
    return sorted(site.sh("squeue --me --noheader --format=%i").split())


def test_a_warm_cluster_across_components(het_compute: Make, script: Any, site: Site) -> None:
    """By TCP and by steps in the allocation, with Ray and without: one job, one cluster, tasks where they are wanted."""
    by_tcp = het_compute(session={"carrier": "direct", "name": "both"})
    by_step = het_compute(session={"carrier": "srun", "name": "both"})
    seen = [run_asset(compute, script(PLACED)).metadata for compute in (by_tcp, by_tcp, by_step)]
    assert len({each["job"] for each in seen}) == 1 and len({each["address"] for each in seen}) == 1
    assert [each["Session reused"] for each in seen] == [False, True, True]
    job = seen[0]["job"]
    assert labels(site) == [f"{job}+0", f"{job}+1"] and {each["Slurm job ID"] for each in seen} == {job}
    for each in seen:
        partition, node, gpus = each["gpu"]
        assert partition == "gpu" and node in ("g1", "g2") and gpus == 2
        assert each["resource"][:2] == ["gpu", node] and each["labels"] == ["cpu", "gpu"]
        assert each["cpu"] == ["compute", each["driver"], 0] and each["driver"] in ("c1", "c2")
    plain = run_asset(by_step, script(PLAIN), launcher=BashLauncher()).metadata
    assert (plain["job"], plain["driver"], plain["partition"]) == (job, seen[0]["driver"], "compute")
    assert by_tcp.cleanup_cluster(seen[0]["Ray cluster ID"])
    assert not site.jobs()


def test_a_cluster_of_each_payloads_own(het_compute: Make, script: Any, site: Site) -> None:
    """It spans all components, whichever of them a payload has a word to say of."""
    compute = het_compute(enable_cluster_reuse=False)
    first = run_asset(compute, script(PLAIN, "plain.py"), launcher=BashLauncher())
    word = component("gpu", "gpu", RayLauncher(labels={"zone": "a"}), gpus_per_node=1)
    second = run_asset(compute, script(PLACED), components=[word], launcher=small_ray(num_cpus_per_node=1))
    assert value_of(first, "job") == value_of(second, "job") and leaders(site) == [value_of(first, "job")]
    seen = second.metadata
    assert seen["Session reused"] is True and seen["Ray cluster was warm"] is False
    assert seen["labels"] == ["cpu", "gpu"] and seen["gpu"][0] == "gpu" and seen["driver"] == first.metadata["driver"]


def test_a_payload_that_must_run_elsewhere(het_compute: Make, script: Any, site: Site) -> None:
    """The head is in one component; a payload that asks for another one is refused, or gets a session of its own."""
    compute = het_compute(enable_cluster_reuse=False)
    first = value_of(run_asset(compute, script(PLAIN), launcher=BashLauncher()), "job")
    elsewhere = {"launcher": small_ray(component_id="gpu")}
    strict = het_compute(enable_cluster_reuse=False, session={"on_misfit": "error"})
    failure = run_asset(strict, script(PLACED), **elsewhere).failure
    sentence = failure.description or ""
    assert failure.kind == "configuration" and "component_id='gpu'" in sentence and "in component 'cpu'" in sentence
    assert leaders(site) == [first]
    second = run_asset(compute, script(PLACED), **elsewhere)
    assert value_of(second, "job") != first and second.metadata["driver"] == second.metadata["gpu"][1]
    assert sorted(leaders(site)) == sorted([first, second.metadata["job"]])


@pytest.mark.thorough
def test_the_time_limit(het_compute: Make, script: Any, site: Site, start: Any) -> None:
    """Slurm tells it for each component; what still runs near the end is ended and told why."""
    components = [component("cpu", "compute", time_limit="1"), component("gpu", "gpu", time_limit="1")]
    payload = script(
        'import os, pathlib, time\npathlib.Path(os.environ["RAYSLURM_DATA_DIR"], "up").write_text("x")\ntime.sleep(120)\n'
    )
    running: Running = start(het_compute(components=components), payload, uses_pipes=False, launcher=BashLauncher())
    running.up()
    failure = running.result(100).failure
    sentence = failure.description or ""
    assert "the session's allocation came to its time limit" in sentence and not failure.allow_retries, (failure.kind, sentence)


def test_somebody_cancels_its_first_component(het_compute: Make, script: Any, site: Site, start: Any) -> None:
    compute = het_compute(default_launcher=BashLauncher(grace_period=2), enable_cluster_reuse=False)
    running: Running = start(compute, script(PLAIN), extra_env={"UP_FOR": "120"})
    running.up()
    (job,) = leaders(site)
    site.stack.exec("slurmctld", ["scancel", job])
    failure = running.result(60).failure
    assert failure.kind == "cancelled" and job in (failure.description or ""), failure.description
    second = run_asset(compute, script(PLAIN))
    assert value_of(second, "job") != job and second.metadata["Slurm session"].endswith("/2")


def test_a_node_of_another_component_dies(all_back: None, het_compute: Make, script: Any, site: Site, start: Any) -> None:
    """What runs goes on; the next payload gets a session that is whole."""
    compute = het_compute()
    running: Running = start(compute, script(PLACED), extra_env={"UP_FOR": "120"})
    running.up()
    (job,) = leaders(site)
    node = site.sh(f"squeue --noheader --jobs={job} --format='%i %N'").split(f"{job}+1 ")[1].split()[0]
    site.killed = True
    subprocess.run(["docker", "kill", site.stack.container(node)], check=True, capture_output=True)
    time.sleep(12)  # A node that is silent may yet be heard of for ten seconds.
    subprocess.run(["docker", "start", site.stack.container(node)], check=True, capture_output=True)
    site.sh('touch "$1/data/go"', site.base)
    assert value_of(running.result(60), "job") == job
    assert value_of(run_asset(compute, script(PLAIN, "plain.py"), launcher=BashLauncher()), "job") != job


def test_another_component_is_cancelled(het_compute: Make, script: Any, site: Site, start: Any) -> None:
    """Slurm ends that one alone at first; nobody else comes, and when it kills what is left there, all of the job ends."""
    compute = het_compute()
    running: Running = start(compute, script(PLACED), extra_env={"UP_FOR": "120"})
    running.up()
    (job,) = leaders(site)
    site.killed = True
    site.stack.exec("slurmctld", ["scancel", f"{job}+1"])
    assert wait_until(lambda: json.loads(site.sh('cat "$1"/sessions/*/1/session.json', site.base))["closing"])
    second = run_asset(compute, script(PLAIN, "plain.py"), launcher=BashLauncher())
    assert value_of(second, "job") != job and second.metadata["Slurm session"].endswith("/2")
    failure = running.result(90).failure
    assert failure.kind == "cancelled" and f"component 'gpu' of Slurm job {job}" in (failure.description or ""), (
        failure.description
    )
    assert compute.cleanup_cluster(second.completed[0].cluster_id) and not site.jobs()


@pytest.fixture
def rayslurm(site: Site, base: Path) -> Callable[..., str]:
    """What `rayslurm session` prints."""

    def run(*arguments: str) -> str:
        environ = {**os.environ, **site.stack.env, "RAYSLURM_REMOTE_BASE": site.base, "COLUMNS": "200"}
        command = [str(Path(sys.executable).with_name("rayslurm")), "--base", str(base), "session", *arguments]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_one_that_waits(het_compute: Make, script: Any, site: Site, start: Any, rayslurm: Callable[..., str]) -> None:
    """Nobody has it start once those who waited have given it up, or it was ended by hand."""
    everything = "sbatch --parsable --partition=gpu --exclusive --nodes=2 --time=3 --output=/dev/null --wrap='sleep 150'"
    blocker = site.sh(everything).strip()
    waiting: Running = start(het_compute(queue_timeout=30), script(PLACED))
    assert wait_until(lambda: len(leaders(site)) == 2)
    (job,) = set(leaders(site)) - {blocker}
    listed = wait_until(lambda: rayslurm("list", "--json"))
    (row,) = map(json.loads, listed.splitlines())
    assert (row["job_id"], row["state"], row["partition"]) == (job, "pending", "compute, gpu") and row["reason"]
    failure = waiting.result(90).failure
    assert failure.kind == "allocation" and "queue_timeout=30 s" in (failure.description or ""), failure.description
    assert leaders(site) == [blocker]

    waiting = start(het_compute(), script(PLACED))
    assert wait_until(lambda: len(leaders(site)) == 2 and rayslurm("list", "--json"))
    (job,) = set(leaders(site)) - {blocker}
    assert f"Slurm job {job}" in rayslurm("stop", job) and leaders(site) == [blocker]
    failure = waiting.result(90).failure
    assert failure.kind == "cancelled" and job in (failure.description or ""), failure.description
    site.sh('scancel "$1"', blocker)


def test_it_is_listed_shown_and_stopped(het_compute: Make, script: Any, site: Site, rayslurm: Callable[..., str]) -> None:
    compute = het_compute(session={"name": "mixed"}, default_launcher=BashLauncher(), enable_cluster_reuse=False)
    job = value_of(run_asset(compute, script(PLAIN)), "job")
    (row,) = map(json.loads, rayslurm("list", "--json").splitlines())
    assert (row["job_id"], row["state"], row["partition"]) == (job, "ready", "compute, gpu")
    assert row["components"] == ["cpu", "gpu"] and row["node"] in ("c1", "c2")
    shown = json.loads(rayslurm("show", job, "--json"))
    nodes = [(node["component"], node["name"][0], node["gpus"], node["here"]) for node in shown["nodes"]]
    assert nodes == [("cpu", "c", 0, True), ("gpu", "g", 2, True)]
    text = rayslurm("show", "mixed")
    assert "component cpu" in text and "component gpu" in text
    assert f"Slurm job {job}" in rayslurm("stop", "mixed") and not site.jobs()
