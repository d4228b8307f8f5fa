"""Heterogeneous jobs: one Ray cluster across components, each with its own nodes; and what goes wrong with one of them."""

import json
import os
import signal
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dagster_rayslurm import BashLauncher, ComputeResource, HetComponent, RayLauncher, SlurmQueueConfig

from ..conftest import Ran, pipes_script, run_asset, small_ray, wait_until
from .fixtures import HEARS_USR1, Running, Site, dagster_run

pytestmark = pytest.mark.timeout(300)

Make = Callable[..., ComputeResource]
Start = Callable[..., Running]

UP = 'import os, pathlib, time; pathlib.Path(os.environ["RAYSLURM_DATA_DIR"], "up").write_text("x")\n'
SLEEPS = UP + "time.sleep(120)\n"
NODE = {"mem": "2500M", "cpus_per_node": 2}

LOOK = pipes_script("""
    import json, os, socket, ray
    ray.init()

    def here():
        names = ("CUDA_VISIBLE_DEVICES", "SLURM_JOB_PARTITION", "SLURM_MEM_PER_NODE")
        return [socket.gethostname(), ray.get_runtime_context().get_node_labels()["component"], *map(os.environ.get, names)]

    @ray.remote(num_cpus=1)
    def look():
        return here()

    on = lambda component: look.options(label_selector={"component": component}).remote()
    at = lambda component: look.options(resources={"component:" + component: 1}, num_gpus=1 if component == "gpu" else 0).remote()
    nodes = [node for node in ray.nodes() if node["Alive"]]
    pipes.report_asset_materialization(metadata={
        "driver": json.dumps(here()),
        "by label": json.dumps({name: ray.get(on(name)) for name in ("cpu", "gpu")}),
        "by resource": json.dumps({name: ray.get([at(name) for _ in range(2)]) for name in ("cpu", "gpu")}),
        "resources": json.dumps({node["NodeManagerHostname"]: node["Resources"] for node in nodes}),
    })
""")


def component(name: str, partition: str, num_nodes: int = 1, **fields: Any) -> HetComponent:
    """A component of a few nodes; fields of the queue, but for those of `HetComponent` itself."""
    own = {key: fields.pop(key) for key in ("launcher", "head") if key in fields}
    queue = {"partition": partition, "num_nodes": num_nodes, "time_limit": "00:05:00", **NODE, **fields}
    return HetComponent(component_id=name, queue=SlurmQueueConfig(**queue), **own)


def cpu_and_gpu(**of_gpu: Any) -> list[HetComponent]:
    return [component("cpu", "compute"), component("gpu", "gpu", **{"num_nodes": 2, "gpus_per_node": 2, **of_gpu})]


@pytest.fixture
def het_compute(slurm_compute: Make) -> Make:
    """Makes resources for mode "slurm-hetjob"."""

    def make(components: list[HetComponent] | None = None, **fields: Any) -> ComputeResource:
        defaults = {"mode": "slurm-hetjob", "default_launcher": small_ray(), "components": components or cpu_and_gpu()}
        return slurm_compute(**{**defaults, **fields})

    return make


def logged(capfd: pytest.CaptureFixture[str]) -> str:
    return capfd.readouterr().err


# ---- What there is to have


def test_one_cluster_spans_the_components(het_compute: Make, script: Any, site: Site) -> None:
    components = [
        component("cpu", "compute", launcher=RayLauncher(resources={"slot": 2})),
        component("gpu", "gpu", 2, gpus_per_node=2, mem="2200M", launcher=RayLauncher(labels={"tier": "fast"})),
    ]
    ran = run_asset(het_compute(components), script(LOOK))
    metadata, job_id = ran.metadata, ran.completed[0].job_id
    driver = json.loads(metadata["driver"])
    assert driver[0] in ("c1", "c2") and driver[1] == "cpu" and driver[3:] == ["compute", "2500"]
    by_label, by_resource = json.loads(metadata["by label"]), json.loads(metadata["by resource"])
    assert by_label["cpu"][:2] == driver[:2] and by_label["gpu"][0] in ("g1", "g2")
    assert by_label["gpu"][1] == "gpu" and by_label["gpu"][3:] == ["gpu", "2200"]
    assert all(seen[1] == "cpu" and not seen[2] for seen in by_resource["cpu"])
    assert all(seen[1] == "gpu" and seen[2] in ("0", "1") for seen in by_resource["gpu"])
    resources = json.loads(metadata["resources"])
    assert set(resources) == {driver[0], "g1", "g2"}
    assert resources[driver[0]]["slot"] == 2 and "GPU" not in resources[driver[0]] and "slot" not in resources["g1"]
    assert resources["g1"]["GPU"] == resources["g2"]["GPU"] == 2 and resources["g1"]["memory"] < 2200 * 2**20

    assert metadata["Slurm job ID"] == job_id and metadata["Slurm partition"] == "compute, gpu"
    assert metadata["Slurm nodes"] == f"{driver[0]}, g1, g2"
    rows = [row.data for row in metadata["Components"].records]
    assert [(row["component"], row["Slurm job ID"], row["partition"], row["nodes"]) for row in rows] == [
        ("cpu", f"{job_id}+0", "compute", driver[0]),
        ("gpu", f"{job_id}+1", "gpu", "g1, g2"),
    ]
    assert [(row["CPUs"], row["GPUs"]) for row in rows] == [(2, 0), (4, 4)]
    assert all(row["CPU time (s)"] > 0 and row["peak memory (MiB)"] > 50 for row in rows)
    assert [(row.data["node"], row.data["component"]) for row in metadata["Nodes"].records] == [
        (driver[0], "cpu"),
        ("g1", "gpu"),
        ("g2", "gpu"),
    ]
    if site.stack.accounting:
        # One srun: Slurm itself calls it a step of each component.
        steps = site.sh(f"sacct -j {job_id} --noheader --parsable2 --format=JobID").split()
        assert [step for step in steps if step.rpartition(".")[2].isdigit()] == [f"{job_id}+0.0", f"{job_id}+1.0"]
    assert site.sh('ls "$1/runs"', site.base).split() == []


@pytest.mark.parametrize("how", ["head", pytest.param("component_id", marks=pytest.mark.thorough)])
def test_the_head_is_in_the_component_that_says_so(how: str, het_compute: Make, script: Any) -> None:
    components = [component("cpu", "compute"), component("gpu", "gpu", gpus_per_node=1, head=how == "head")]
    launcher = small_ray(component_id="gpu" if how == "component_id" else None)
    metadata = run_asset(het_compute(components), script(LOOK), launcher=launcher).metadata
    driver = json.loads(metadata["driver"])
    assert driver[0] in ("g1", "g2") and driver[1] == "gpu" and driver[2] == "0"
    assert [(row.data["component"], row.data["head"]) for row in metadata["Nodes"].records] == [("gpu", True), ("cpu", False)]
    assert not json.loads(metadata["by label"])["cpu"][2], "the devices of the head are not for others"


def test_a_plain_payload_runs_in_the_first_component(het_compute: Make, script: Any) -> None:
    payload = script(
        pipes_script("""
        import os, socket
        pipes.report_asset_materialization(metadata={
            "host": socket.gethostname(), "gpus": os.environ["CUDA_VISIBLE_DEVICES"], "ray": "RAY_ADDRESS" in os.environ,
        })
        """)
    )
    components = [
        component("cpu", "compute", launcher=BashLauncher()),
        component("gpu", "gpu", head=True, mem="500M", cpus_per_node=None),
    ]
    compute = het_compute(components, default_launcher=BashLauncher(num_gpus=2, grace_period=2))
    metadata = run_asset(compute, payload).metadata
    assert metadata["host"] in ("g1", "g2") and metadata["gpus"] == "0,1" and metadata["ray"] is False
    assert [row.data["component"] for row in metadata["Components"].records] == ["gpu", "cpu"]


def test_a_single_component_is_a_job_like_any_other(het_compute: Make, script: Any) -> None:
    payload = script(
        pipes_script("""
        import ray
        ray.init()
        pipes.report_asset_materialization(metadata={"where": ray.get_runtime_context().get_node_labels()["component"]})
        """)
    )
    ran = run_asset(het_compute([component("only", "compute")]), payload)
    rows = [row.data for row in ran.metadata["Components"].records]
    assert ran.metadata["where"] == "only" and [row["Slurm job ID"] for row in rows] == [ran.completed[0].job_id]


def test_odd_characters_everywhere(het_compute: Make, tmp_path: Path, site: Site) -> None:
    odd = 'it\'s "$HOME"; `id` & é | \\ % * #'
    directory = tmp_path / odd.replace("/", "")
    directory.mkdir()
    (directory / f"{odd}.py").write_text(
        pipes_script("""
        import json, os, ray, sys
        ray.init()

        @ray.remote(resources={"component:b.1-x_Y": 1})
        def there():
            return [os.environ["VALUE"], os.environ["SITE"], ray.get_runtime_context().get_node_labels()["odd"]]

        seen = json.dumps(ray.get(there.remote()))
        pipes.report_asset_materialization(metadata={"argv": json.dumps(sys.argv[1:]), "there": seen})
        """)
    )
    components = [
        component("a", "compute", exclude="c2", extra_sbatch=[f"--mail-user={odd}"]),
        component("b.1-x_Y", "compute", launcher=RayLauncher(labels={"odd": "x.y-z_1"}, resources={odd: 1.0})),
    ]
    compute = het_compute(components, slurm={"remote_base": f"{site.base}/{odd}", "site": {"SITE": odd}})
    argv = ["python", f"{odd}.py", odd, "two\nlines"]
    launcher = small_ray(working_dir=str(directory))
    plain = odd.replace("$", "")  # Ray itself puts in variables in what its workers get.
    metadata = run_asset(compute, argv, launcher=launcher, extra_env={"VALUE": plain + "\n"}).metadata
    assert json.loads(metadata["argv"]) == [odd, "two\nlines"]
    assert json.loads(metadata["there"]) == [plain + "\n", odd, "x.y-z_1"]
    # What the first component excludes is not handed on.
    assert metadata["Slurm nodes"] == "c1, c2"


def test_two_runs_at_once(het_compute: Make, start: Start, script: Any) -> None:
    """On the same nodes: each goes on until both are there."""
    payload = script(
        pipes_script("""
        import os, pathlib, time
        data = pathlib.Path(os.environ["RAYSLURM_DATA_DIR"])
        (data / ("job-" + os.environ["SLURM_JOB_ID"])).touch()
        began = time.monotonic()
        while len(list(data.glob("job-*"))) < 2 and time.monotonic() - began < 60:
            time.sleep(0.1)
        here = sorted(path.name for path in data.glob("job-*"))
        pipes.report_asset_materialization(metadata={"job": os.environ["SLURM_JOB_ID"], "here": " ".join(here)})
        """)
    )
    parts = [component("cpu", "compute", nodelist="c1", mem="500M"), component("gpu", "gpu", nodelist="g1", mem="500M")]
    compute = het_compute(parts, default_launcher=BashLauncher(grace_period=2))
    first, second = start(compute, payload), start(compute, payload)
    results = [running.result().metadata for running in (first, second)]
    jobs = {each["Slurm job ID"] for each in results}
    assert len(jobs) == 2 and {each["job"] for each in results} == jobs
    assert {each["here"] for each in results} == {" ".join(sorted(f"job-{job}" for job in jobs))}


# ---- What Slurm does not grant


@pytest.mark.parametrize(
    ("gpu", "says"),
    [
        ({"partition": "nowhere"}, ["partition='nowhere' of 'gpu'", "sinfo -s"]),
        ({"gpus_per_node": 64}, ["gpus_per_node=64, mem='2500M' of 'gpu'"]),
        ({"num_nodes": 7}, ["'gpu'", "num_nodes=7"]),  # Slurm 22.05 names the component alone, 24.11 what both asked for.
        ({"time_limit": "40-0"}, ["component '", "time_limit='40-0'"]),
    ],
    ids=["partition", "gpus", "nodes", "time"],
)
def test_what_a_component_cannot_have_names_it(gpu: dict[str, Any], says: list[str], het_compute: Make, script: Any) -> None:
    queue = {"partition": "gpu", **gpu}
    components = [component("cpu", "compute", time_limit=queue.get("time_limit", "00:05:00")), component("gpu", **queue)]
    failure = run_asset(het_compute(components), script("pass"), uses_pipes=False).failure
    assert failure.kind == "submission" and not failure.allow_retries
    assert all(word in (failure.description or "") for word in says), failure.description


def test_a_component_that_waits_is_named(
    het_compute: Make, start: Start, script: Any, site: Site, capfd: pytest.CaptureFixture[str]
) -> None:
    other = "#!/bin/sh\n#SBATCH --partition=gpu --nodes=2 --exclusive --time=4\nsleep 200\n"
    occupant = site.sh('printf %s "$1" | sbatch --parsable --output=/dev/null', other).strip()
    assert wait_until(lambda: site.sh(f"squeue --noheader --jobs={occupant} --format=%T").strip() == "RUNNING")
    failure = run_asset(het_compute(queue_timeout=40), script("pass"), uses_pipes=False).failure
    site.sh(f"scancel {occupant}")
    assert failure.kind == "allocation" and "queue_timeout=40" in (failure.description or "")
    assert "(component gpu)" in (failure.description or "") and "(component gpu)" in logged(capfd)
    assert not [job for job in site.jobs() if job != occupant]


def test_components_that_want_more_nodes_than_there_are(
    het_compute: Make, script: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """Slurm takes such a job, and never starts it."""
    components = [component("a", "compute", 2), component("b", "compute")]
    failure = run_asset(het_compute(components, queue_timeout=8), script("pass"), uses_pipes=False).failure
    assert failure.kind == "allocation"
    assert "components 'a' and 'b' ask for 3 nodes of partition compute in all, and it has 2" in logged(capfd)


# ---- Cancelled


@pytest.mark.parametrize("phase", ["pending", "running"])
def test_an_interrupted_run_ends_all_components(phase: str, site: Site, script: Any, tmp_path: Path) -> None:
    later = ["--begin=now+1hour"] if phase == "pending" else []
    queue = {"partition": "compute", "extra_sbatch": later, "mem": "500M"}
    compute = (
        f"dict(mode='slurm-hetjob', slurm=SlurmResource(ssh=SSHConnectionResource(**{site.ssh.model_dump()!r}), "
        f"poll_interval=1, remote_base={site.base!r}), pre_deployed_env_path={site.env_path!r}, "
        f"components=[HetComponent(component_id=name, queue=SlurmQueueConfig(**{queue!r})) for name in ('a', 'b')], "
        f"local_base={str(tmp_path / 'base')!r}, default_launcher=BashLauncher(grace_period=3))"
    )
    with dagster_run(tmp_path, compute, script(SLEEPS)) as process:
        if phase == "pending":
            assert wait_until(lambda: len(site.sh("squeue --me --noheader --states=PENDING --format=%A").split()) == 2, 60)
        else:
            assert wait_until(lambda: site.connection.read(f"{site.base}/data/up", 0, 1), 90)
        process.send_signal(signal.SIGINT)
        assert wait_until(lambda: process.poll() is not None, 60), (tmp_path / "log").read_text()
        assert process.returncode != 0, (tmp_path / "log").read_text()
    assert wait_until(lambda: not site.jobs()), site.sh("squeue --me")


@pytest.mark.parametrize(
    ("which", "ray"),
    [
        pytest.param(0, False, id="leader-plain"),
        pytest.param(1, True, id="other-ray"),
        pytest.param(0, True, id="leader-ray", marks=pytest.mark.thorough),
        pytest.param(1, False, id="other-plain", marks=pytest.mark.thorough),
    ],
)
def test_an_admin_cancels_a_component(which: int, ray: bool, het_compute: Make, start: Start, script: Any, site: Site) -> None:
    components = [component("cpu", "compute"), component("gpu", "gpu")]
    launcher = small_ray() if ray else BashLauncher(grace_period=2)
    running = start(het_compute(components), script(SLEEPS), uses_pipes=False, launcher=launcher)
    job_id = running.up()
    job_id = min(site.jobs(), key=int)
    site.stack.exec("slurmctld", ["scancel", str(int(job_id) + which)])
    failure = running.result(100).failure
    said = failure.description or ""
    assert failure.kind == "cancelled", said
    by = " by user id 0" if site.stack.accounting else ""
    assert f"Slurm job {job_id} was cancelled{by}" in said, said
    assert ("component 'gpu'" in said) == (which == 1), said
    rows = [row.data for row in failure.metadata["Slurm components"].records]  # type: ignore[attr-defined]
    assert [row["component"] for row in rows] == ["cpu", "gpu"] and rows[which]["state"] == "CANCELLED"


# ---- What breaks


def test_out_of_memory_in_a_component(het_compute: Make, script: Any, site: Site) -> None:
    """The component that ran out is named, with what it was granted, though another one had more."""
    payload = script(pipes_script("import time; hog = bytearray(700 * 2**20); time.sleep(60)"))
    site.killed = True  # Slurm kills the keeper as well.
    components = [component("cpu", "compute", mem="1500M"), component("gpu", "gpu", mem="300M", head=True)]
    failure = run_asset(het_compute(components, default_launcher=BashLauncher(grace_period=2)), payload).failure
    said = failure.description or ""
    assert failure.kind == "allocation" and not failure.allow_retries, said
    assert "OUT_OF_MEMORY: component 'gpu' of Slurm job " in said, said
    assert "more memory than it was granted: 300 MiB on each node" in said and "SlurmQueueConfig.mem" in said, said


def test_the_time_limit(het_compute: Make, script: Any) -> None:
    components = [component("cpu", "compute", time_limit="1"), component("gpu", "gpu", time_limit="1")]
    payload = script("import time; time.sleep(200)")
    failure = run_asset(het_compute(components), payload, uses_pipes=False, launcher=BashLauncher(grace_period=2)).failure
    said = failure.description or ""
    assert failure.kind == "allocation" and "TIMEOUT" in said and "component" not in said, said


def kill_node(site: Site, node: str) -> str:
    """End a node, slurmd and all that runs below it."""
    site.killed = True
    container = site.stack.container(node)
    subprocess.run(["docker", "kill", container], check=True, capture_output=True)
    return container


@pytest.mark.parametrize("phase", ["bring-up", "run"])
def test_a_node_of_a_component_dies(
    phase: str,
    het_compute: Make,
    start: Start,
    script: Any,
    site: Site,
    back_to_idle: None,
    capfd: pytest.CaptureFixture[str],
) -> None:
    payload = script("import ray\nray.init()\n" + SLEEPS)
    data = f"{site.base}/data"
    health = f"mkdir -p {data}; touch {data}/up; echo x >{data}/up; sleep 60" if phase == "bring-up" else None
    components = [
        component("cpu", "compute"),
        component("gpu", "gpu", nodelist="g2", launcher=RayLauncher(health_check=health)),
    ]
    running = start(het_compute(components), payload, uses_pipes=False, launcher=small_ray(startup_timeout=100))
    running.up()
    container = kill_node(site, "g2")
    try:
        failure = running.result(200).failure
        assert wait_until(lambda: not site.jobs(), 90), "Slurm takes its time to find out, and ends all components"
    finally:
        subprocess.run(["docker", "start", container], check=True, capture_output=True)
    said = failure.description or ""
    if phase == "bring-up":
        assert failure.kind == "cluster-start" and "node g2 (component gpu) was lost while the cluster started" in said, said
    else:
        # Until Slurm notices, the payload goes on.
        assert "node-lost: node g2 (component gpu) is lost" in logged(capfd)
        assert failure.kind == "allocation" and failure.allow_retries, said
        assert said.startswith("NODE_FAIL: ") and "g2 is lost" in said, said
    assert wait_until(lambda: site.sh("sinfo --noheader --Node --partition=gpu --format=%t").split() == ["idle", "idle"], 90)


def test_an_environment_that_a_component_does_not_see(het_compute: Make, script: Any, site: Site) -> None:
    """It is there on the edge node, and on no other."""
    place = f"/var/tmp/env-{os.path.basename(site.base)}"
    site.sh(
        'mkdir "$1" && ln -s "$2/bin" "$1/bin" && ln -s "$2/lib" "$1/lib"; cp "$2/pyvenv.cfg" "$1/" 2>/dev/null || true',
        place,
        site.env_path,
    )
    try:
        compute = het_compute(pre_deployed_env_path=place, default_launcher=BashLauncher())
        failure = run_asset(compute, script("pass"), uses_pipes=False).failure
    finally:
        site.sh('rm -rf "$1"', place)
    assert failure.kind == "environment" and place in (failure.description or ""), failure.description


def test_a_health_check_of_one_component(het_compute: Make, script: Any) -> None:
    components = [
        component("cpu", "compute"),
        component("gpu", "gpu", launcher=RayLauncher(health_check="echo no driver here; exit 3")),
    ]
    failure = run_asset(het_compute(components), script("pass"), uses_pipes=False).failure
    said = failure.description or ""
    assert failure.kind == "cluster-start" and "no driver here" in said and "gpu" in said, said


def test_a_requeued_job_runs_again_on_all_components(het_compute: Make, start: Start, script: Any, site: Site) -> None:
    payload = script(
        textwrap.dedent("""
        import os, pathlib, time
        pathlib.Path(os.environ["RAYSLURM_DATA_DIR"], "up").write_text("x")
        if not os.environ.get("SLURM_RESTART_COUNT", "0") > "0":
            time.sleep(120)
        """)
    )
    components = [component("cpu", "compute", requeue=True, mem="500M"), component("gpu", "gpu", mem="500M")]
    running = start(het_compute(components), payload, uses_pipes=False, launcher=BashLauncher(grace_period=2))
    running.up()
    job_id = min(site.jobs(), key=int)
    site.stack.exec("slurmctld", ["scontrol", "requeue", job_id])
    parts = [job_id, str(int(job_id) + 1)]
    states = lambda: site.sh(f"squeue --noheader --jobs={','.join(parts)} --format=%T").split()  # noqa: E731
    assert wait_until(lambda: states() == ["PENDING"] * 2, 60), states()
    for part in parts:
        site.stack.exec("slurmctld", ["scontrol", "update", f"jobid={part}", "starttime=now"])
    ran: Ran = running.result(150)
    assert ran.result.success and ran.completed[0].job_id == job_id


def test_a_signal_comes_ahead_of_the_time_limit(het_compute: Make, script: Any) -> None:
    payload = script(HEARS_USR1)
    components = [
        component("cpu", "compute", time_limit="1", signal_before_timeout="USR1@52", mem="500M"),
        component("gpu", "gpu", time_limit="1", mem="500M"),
    ]
    ran = run_asset(het_compute(components, default_launcher=BashLauncher(grace_period=2)), payload)
    assert ran.metadata["after"] < 20


def test_a_signalled_job_has_its_grace_period(het_compute: Make, start: Start, script: Any, site: Site) -> None:
    """All tasks are signalled, as before a preemption: none may end, and all others with it, while the payload saves its work."""
    payload = script(
        textwrap.dedent("""
        import os, pathlib, signal, sys, time
        data = pathlib.Path(os.environ["RAYSLURM_DATA_DIR"])
        def end(*_):
            time.sleep(24)
            (data / "saved").write_text("x")
            sys.exit(0)
        signal.signal(signal.SIGTERM, end)
        (data / "up").write_text("x")
        time.sleep(120)
        """)
    )
    components = [component("cpu", "compute", mem="500M"), component("gpu", "gpu", mem="500M")]
    running = start(het_compute(components), payload, uses_pipes=False, launcher=BashLauncher(grace_period=60))
    running.up()
    site.stack.exec("slurmctld", ["scancel", "--signal=TERM", min(site.jobs(), key=int)])
    failure = running.result(100).failure
    assert site.connection.read(f"{site.base}/data/saved", 0, 1), failure.description
