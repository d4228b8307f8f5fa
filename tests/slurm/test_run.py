"""Runs in Slurm jobs: what the payload gets, what comes back, and what Slurm and Dagster show of it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from dagster_rayslurm import BashLauncher, ComputeResource, SlurmQueueConfig, SSHConnectionResource

from ..conftest import pipes_script, run_asset, small_ray, wait_until
from .fixtures import HEARS_USR1, Site

RAY_MEMORY = {"mem": "2500M", "cpus_per_node": 2}


def test_a_payload_runs_in_a_job(slurm_compute: Callable[..., ComputeResource], script: Any, site: Site) -> None:
    payload = script(
        pipes_script("""
        import os, sys, subprocess
        print("on stdout é", os.uname().nodename)
        print("on stderr", file=sys.stderr)
        pipes.log.info("from the payload")
        pipes.report_asset_materialization(metadata={
            "job": os.environ["SLURM_JOB_ID"],
            "python": sys.executable,
            "value": os.environ["VALUE"],
            "secret": os.environ["SECRET"][::-1],
            "data": os.environ["RAYSLURM_DATA_DIR"],
            "job facts": subprocess.check_output(["scontrol", "show", "job", os.environ["SLURM_JOB_ID"]], text=True),
        })
        """)
    )
    compute = slurm_compute(queue={"cpus_per_node": 2, "mem": "700M"})
    ran = run_asset(compute, payload, extra_env={"VALUE": "a 'b' \"c\" $d\né"}, secret_env={"SECRET": "s3cret-value"})
    metadata, run = ran.metadata, ran.completed[0]
    assert metadata["job"] == run.job_id == metadata["Slurm job ID"]
    assert metadata["python"].startswith(site.env_path) and metadata["value"] == "a 'b' \"c\" $d\né"
    assert metadata["secret"] == "eulav-terc3s" and metadata["data"] == f"{site.base}/data"
    assert metadata["Slurm partition"] == "compute" and metadata["Slurm nodes"] in ("c1", "c2")
    assert metadata["Queue wait (s)"] >= 0 and metadata["Elapsed (s)"] > 0
    facts = metadata["job facts"]
    assert f"Comment=dagster run {ran.result.run_id} step asset_under_test" in facts
    assert "JobName=rayslurm-asset_under_test-" in facts and "s3cret-value" not in facts
    # The job is over as soon as its payload is, and nothing of a success stays.
    assert wait_until(lambda: not site.jobs()), site.sh("squeue --me")
    assert site.sh('ls "$1/runs"', site.base).split() == []


def test_the_ssh_program_does_as_well(
    slurm_compute: Callable[..., ComputeResource], openssh: SSHConnectionResource, script: Any, site: Site
) -> None:
    payload = script(pipes_script("print('hello'); pipes.report_asset_materialization(metadata={'x': 1})"))
    assert run_asset(slurm_compute(slurm={"ssh": openssh}), payload).metadata["x"] == 1


def test_sacct_tells_the_same(slurm_compute: Callable[..., ComputeResource], script: Any, site: Site) -> None:
    payload = script(
        pipes_script("""
        import time
        memory = bytearray(200 * 2**20)
        until = time.process_time() + 2
        while time.process_time() < until:
            pass
        """)
    )
    if not site.stack.accounting:
        pytest.skip("the stack has no accounting")
    ran = run_asset(slurm_compute(queue={"cpus_per_node": 1, "mem": "1G"}), payload)
    job_id = ran.completed[0].job_id
    metadata = ran.metadata

    def accounted() -> list[str]:
        return site.sh(f"sacct -j {job_id}.0 --noheader --parsable2 --format=TotalCPU,MaxRSS,State,ExitCode").split()

    row = wait_until(lambda: [line for line in accounted() if "COMPLETED" in line])
    assert row, accounted()
    cpu, rss, _, exit_code = row[0].split("|")
    minutes, _, seconds = cpu.partition(":")
    assert exit_code == "0:0"
    # sacct counts the runtime itself as well, and samples memory once a second.
    assert float(seconds) + 60 * float(minutes) == pytest.approx(metadata["CPU time (s)"], abs=1.5)
    assert int(rss.removesuffix("K")) / 1024 == pytest.approx(metadata["Peak memory (MiB)"], abs=80)


BURN = 6.0
"""Seconds of CPU time on each node."""

HOLD = 400
"""MiB of memory on each node."""


def test_sacct_tells_the_same_of_ray_on_two_nodes(slurm_compute: Callable[..., ComputeResource], script: Any, site: Site) -> None:
    if not site.stack.accounting:
        pytest.skip("the stack has no accounting")
    payload = script(
        pipes_script(f"""
        import ray, time
        ray.init()
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

        @ray.remote(num_cpus=1)
        def burn():
            held = bytearray({HOLD} * 2**20)
            began = time.process_time()
            while time.process_time() - began < {BURN}:
                pass
            time.sleep(3)  # sacct takes a sample each second, and so may we.
            return len(held)

        nodes = [node["NodeID"] for node in ray.nodes()]
        ray.get([burn.options(scheduling_strategy=On(node, soft=False)).remote() for node in nodes])
        pipes.report_asset_materialization()
        """)
    )
    ran = run_asset(slurm_compute(queue={**RAY_MEMORY, "num_nodes": 2}, default_launcher=small_ray()), payload)
    metadata, job_id = ran.metadata, ran.completed[0].job_id

    def accounted() -> list[str]:
        return site.sh(f"sacct -j {job_id}.0 --noheader --parsable2 --format=TotalCPU,MaxRSS,State").split()

    row = wait_until(lambda: [line for line in accounted() if "COMPLETED" in line])
    assert row, accounted()
    cpu, rss, _ = row[0].split("|")
    minutes, _, seconds = cpu.partition(":")
    total, largest = float(seconds) + 60 * float(minutes), int(rss.removesuffix("K")) / 1024
    used, peak = metadata["CPU time (s)"], metadata["Peak memory (MiB)"]
    rows = [each.data for each in metadata["Nodes"].records]
    # sacct counts the health check and the start of Ray on both nodes, and what ends after our last sample.
    assert 2 * BURN <= used <= total + 1 and total - used < 20, (used, total)
    assert all(each["CPU time (s)"] > 0.8 * BURN and each["peak memory (MiB)"] > HOLD for each in rows), rows
    # Both are of the node that used most; sacct may count what processes share in each of them.
    assert peak == max(each["peak memory (MiB)"] for each in rows) and peak == pytest.approx(largest, rel=0.35)
    assert all(each["memory (GiB)"] == round(2500 / 1024, 1) for each in rows), "what Slurm granted"
    assert metadata["Granted and used"].startswith("granted 4 CPUs, 2500 MiB on c")
    assert all("svg+xml" in metadata[picture] for picture in ("Timeline", "Usage", "Usage by node"))
    assert metadata["Memory efficiency (%)"] == pytest.approx(100 * peak / 2500, abs=0.2)
    held = metadata["Elapsed (s)"] + metadata["Ray bring-up (s)"]
    assert metadata["CPU hours"] == pytest.approx(4 * held / 3600, abs=0.002) and "GPU hours" not in metadata
    assert metadata["Node hours"] == pytest.approx(2 * held / 3600, abs=0.002)


def test_a_failed_payload_is_a_failed_job(slurm_compute: Callable[..., ComputeResource], script: Any, site: Site) -> None:
    payload = script("import sys; print('last words'); sys.exit(7)")
    failure = run_asset(slurm_compute(), payload).failure
    assert failure.kind == "payload" and "exit code 7" in (failure.description or "")
    assert "last words" in str(failure.metadata["Last output"].value)
    where, _, run_dir = str(failure.metadata["Run directory"].value).rpartition(":")
    assert where.startswith("dev@") and site.sh('ls "$1"', run_dir).split()
    job_id = failure.metadata["Slurm job ID"].value
    # The run ends with the record, and Slurm's job a moment later.
    assert wait_until(lambda: "ExitCode=7:0" in site.sh(f"scontrol show job {job_id}"), 60)


def test_a_ray_cluster_spans_all_nodes(slurm_compute: Callable[..., ComputeResource], script: Any, site: Site) -> None:
    payload = script(
        pipes_script("""
        import json, os, ray, socket
        ray.init()
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

        @ray.remote(num_cpus=1)
        def look():
            return socket.gethostname(), os.environ.get("VALUE"), "SECRET" in os.environ, os.environ.get("RAYSLURM_DATA_DIR")

        nodes = ray.nodes()
        seen = ray.get([look.options(scheduling_strategy=On(node["NodeID"], soft=False)).remote() for node in nodes])
        pipes.report_asset_materialization(metadata={
            "seen": json.dumps(seen), "resources": json.dumps(ray.cluster_resources()),
            "alive": sum(node["Alive"] for node in nodes),
            "labels": [node["Labels"].get("tier") for node in nodes],
        })
        """)
    )
    compute = slurm_compute(
        queue={**RAY_MEMORY, "num_nodes": 2}, default_launcher=small_ray(resources={"slot": 2}, labels={"tier": "gold"})
    )
    ran = run_asset(compute, payload, extra_env={"VALUE": "x y"}, secret_env={"SECRET": "s"})
    metadata = ran.metadata
    assert sorted(seen[0] for seen in json.loads(metadata["seen"])) == ["c1", "c2"]
    assert all(seen[1:] == ["x y", False, f"{site.base}/data"] for seen in json.loads(metadata["seen"]))
    assert metadata["alive"] == 2 and metadata["labels"] == ["gold", "gold"]
    resources = json.loads(metadata["resources"])
    assert resources["CPU"] == 4 and resources["slot"] == 4
    # What Slurm granted, not what the machines have: two times 2500 MB, less head-room.
    assert 2 * 2**30 < resources["memory"] < 2 * 2500 * 2**20
    rows = metadata["Nodes"].records
    assert [row.data["node"] for row in rows] == ["c1", "c2"] and all(row.data["peak memory (MiB)"] > 50 for row in rows)
    assert metadata["CPU time (s)"] >= sum(row.data["CPU time (s)"] for row in rows) - 0.02
    # One srun for all nodes.
    steps = site.sh(f"sacct -j {ran.completed[0].job_id} --noheader --parsable2 --format=JobID").split()
    assert not site.stack.accounting or [step for step in steps if step.endswith((".0", ".1"))] == [
        f"{ran.completed[0].job_id}.0"
    ]


def test_gpus_are_those_that_slurm_granted(slurm_compute: Callable[..., ComputeResource], script: Any) -> None:
    payload = script(
        pipes_script("""
        import os, ray
        ray.init()

        @ray.remote(num_gpus=1)
        def look():
            return os.environ["CUDA_VISIBLE_DEVICES"]

        pipes.report_asset_materialization(metadata={
            "gpus": ray.cluster_resources()["GPU"], "seen": ray.get([look.remote() for _ in range(2)]),
            "driver": os.environ["CUDA_VISIBLE_DEVICES"],
        })
        """)
    )
    queue = {"partition": "gpu", "gpus_per_node": 2, "gpu_type": "fake", **RAY_MEMORY}
    metadata = run_asset(slurm_compute(queue=queue, default_launcher=small_ray()), payload).metadata
    assert metadata["gpus"] == 2 and metadata["driver"] == "0,1" and set(metadata["seen"]) <= {"0", "1"}


def test_a_base_directory_that_was_removed_by_hand(
    slurm_compute: Callable[..., ComputeResource], script: Any, site: Site
) -> None:
    """The process that knew it runs the next payload all the same."""
    compute = slurm_compute()
    assert run_asset(compute, script(pipes_script("pass"))).result.success
    site.sh('chmod -R u+w "$1" && rm -rf "$1"', site.base)
    assert run_asset(compute, script(pipes_script("pass"))).result.success


def test_files_travel(slurm_compute: Callable[..., ComputeResource], tmp_path: Path, site: Site) -> None:
    project = tmp_path / "my project"
    (project / "lib é").mkdir(parents=True)
    (project / "main's.py").write_text(
        pipes_script("""
        import os, helper, pathlib
        pathlib.Path("made.txt").write_text("made " + open("extra $1.txt").read() + open("lib é/data.bin").read())
        pathlib.Path("plot.png").write_bytes(b"\\x89PNG")
        pathlib.Path(os.environ["RAYSLURM_DATA_DIR"], "kept.txt").write_text("kept")
        try:
            open("lib é/data.bin", "w")
            changed = True
        except PermissionError:
            changed = False
        seen = {"helper": helper.NAME, "changed": changed, "ignored": os.path.exists("big.dat")}
        pipes.report_asset_materialization(metadata=seen)
        """)
    )
    (project / "helper.py").write_text("NAME = 'helper'\n")
    (project / "lib é" / "data.bin").write_text("data")
    (project / "big.dat").write_text("left out")
    (project / ".rayignore").write_text("*.dat\n")
    extra = tmp_path / "extra $1.txt"
    extra.write_text("extra ")
    compute = slurm_compute(default_launcher=BashLauncher(working_dir=str(project)), keep_run_dirs="none")
    for _ in range(2):
        ran = run_asset(compute, project / "main's.py", extra_files=[extra], outputs=["*.png", "made.txt"])
        assert ran.metadata["helper"] == "helper" and ran.metadata["changed"] is False and ran.metadata["ignored"] is False
        contents = {path.name: path.read_bytes() for path in ran.completed[0].outputs}
        assert contents == {"made.txt": b"made extra data", "plot.png": b"\x89PNG"}
    assert site.sh('cat "$1/data/kept.txt"', site.base) == "kept"
    # Both runs found the same copies, and nobody else can read them.
    assert len(site.sh('ls "$1/bundles"', site.base).split()) == 2
    assert site.sh('find "$1" -maxdepth 2 -perm /077 ! -type l ! -path "*/data*"', site.base).split() == []


@pytest.mark.thorough
def test_two_clusters_share_a_node(slurm_compute: Callable[..., ComputeResource], script: Any) -> None:
    """Two assets at once on one node, each with its own Ray; the end of one does the other no harm."""
    payload = script(
        pipes_script("""
        import os, ray, time
        ray.init()
        time.sleep(float(os.environ["SECONDS"]))

        @ray.remote
        def look():
            return os.environ["SECONDS"]

        pipes.report_asset_materialization(metadata={"saw": ray.get(look.remote()), "cpus": ray.cluster_resources()["CPU"]})
        """)
    )
    compute = slurm_compute(
        queue={"nodelist": "c1", "mem": "1900M", "cpus_per_node": 2}, default_launcher=small_ray(startup_timeout=150)
    )

    def asset(name: str, seconds: str) -> dg.AssetsDefinition:
        @dg.asset(name=name)
        def made(context: dg.AssetExecutionContext, compute: ComputeResource) -> Any:
            return compute.run(context=context, payload_path=payload, extra_env={"SECONDS": seconds}).get_materialize_result()

        return made

    from concurrent.futures import ThreadPoolExecutor

    def materialize(one: dg.AssetsDefinition) -> dg.ExecuteInProcessResult:
        return dg.materialize([one], resources={"compute": compute}, raise_on_error=False)

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(materialize, [asset("brief", "0"), asset("lasting", "6")]))
    for result, name, seconds in zip(results, ("brief", "lasting"), ("0", "6"), strict=True):
        assert result.success
        metadata = result.asset_materializations_for_node(name)[0].metadata
        assert metadata["saw"].value == seconds and metadata["cpus"].value == 2


def test_a_signal_comes_ahead_of_the_time_limit(slurm_compute: Callable[..., ComputeResource], script: Any) -> None:
    payload = script(HEARS_USR1)
    compute = slurm_compute(queue={"time_limit": "00:01:00", "signal_before_timeout": "USR1@52"})
    assert run_asset(compute, payload).metadata["after"] < 20


def test_phases_are_quick(slurm_compute: Callable[..., ComputeResource], script: Any) -> None:
    """A payload without Ray costs little more than its own time once the connection stands."""
    payload = script(pipes_script("pass"))
    compute = slurm_compute()
    run_asset(compute, payload)
    began = time.monotonic()
    run_asset(compute, payload)
    assert time.monotonic() - began < 10  # Generous: figures are for benchmarks.


def test_a_queue_of_the_runs_own(slurm_compute: Callable[..., ComputeResource], script: Any) -> None:
    payload = script(
        pipes_script("""
        import os
        seen = {name: os.environ.get(name, "") for name in ("SLURM_JOB_PARTITION", "SLURM_CPUS_ON_NODE", "SLURM_MEM_PER_NODE")}
        pipes.report_asset_materialization(metadata=seen)
        """)
    )
    compute = slurm_compute(queue={"cpus_per_node": 1, "mem": "300M"})
    queue = SlurmQueueConfig(partition="gpu", cpus_per_node=None, time_limit="2")
    metadata = run_asset(compute, payload, queue=queue, launcher=BashLauncher(num_cpus=3)).metadata
    # Memory is the resource's, and CPUs are those that the launcher wants.
    assert (metadata["SLURM_JOB_PARTITION"], metadata["SLURM_CPUS_ON_NODE"]) == ("gpu", "3")
    assert metadata["SLURM_MEM_PER_NODE"] == "300"


def test_a_cluster_as_its_launcher_says(slurm_compute: Callable[..., ComputeResource], script: Any) -> None:
    """Ports within a range, a network interface, a dashboard, fewer CPUs than granted, an argument of `ray start`."""
    payload = script(
        pipes_script("""
        import json, os, ray, subprocess, urllib.request
        ray.init()
        nodes = ray.nodes()

        def listening():
            said = subprocess.check_output(["ss", "-Hltnp"], text=True).splitlines()
            return [int(line.split()[3].rpartition(":")[2]) for line in said if '"srun"' not in line and "users:" in line]

        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On
        look = ray.remote(num_cpus=0)(listening)
        ports = [ray.get(look.options(scheduling_strategy=On(node["NodeID"], soft=False)).remote()) for node in nodes]
        url = os.environ["RAY_API_SERVER_ADDRESS"] + "/api/gcs_healthz"
        pipes.report_asset_materialization(metadata={
            "ports": json.dumps(ports), "cpus": ray.cluster_resources()["CPU"], "healthz": urllib.request.urlopen(url).status,
            "names": json.dumps(sorted(node["NodeName"] for node in nodes)),
            "addresses": json.dumps(sorted(node["NodeManagerAddress"] for node in nodes)),
        })
        """)
    )
    launcher = small_ray(
        dashboard=True,
        network_interface="eth0",
        port_range="21000-21399",
        num_cpus_per_node=1,
        ray_args=["--node-name=mine"],
        startup_timeout=150,
    )
    ran = run_asset(slurm_compute(queue={**RAY_MEMORY, "num_nodes": 2}, default_launcher=launcher), payload)
    metadata = ran.metadata
    assert metadata["cpus"] == 2 and metadata["healthz"] == 200 and json.loads(metadata["names"]) == ["mine", "mine"]
    for ports in json.loads(metadata["ports"]):
        assert len(ports) > 3 and all(21000 <= port <= 21399 for port in ports), ports
    rows = metadata["Nodes"].records
    assert sorted(row.data["address"] for row in rows) == json.loads(metadata["addresses"])
    assert metadata["Ray dashboard"] == "was there until the run ended"


DEFINITIONS = """
import dagster as dg
from dagster_rayslurm import *

def made(name):
    @dg.asset(name=name)
    def asset(context: dg.AssetExecutionContext, compute: ComputeResource):
        return compute.run(context=context, payload_path={payload!r}).get_materialize_result()
    return asset

assets = [made(f"asset_{{number}}") for number in range(3)]
slurm = SlurmResource(ssh=SSHConnectionResource(**{ssh!r}), remote_base={base!r}, queue=SlurmQueueConfig(partition="compute"))
compute = ComputeResource(mode="slurm", slurm=slurm, pre_deployed_env_path={env!r}, local_base={local!r},
    default_launcher=BashLauncher())
job = dg.define_asset_job("job", assets, executor_def=dg.multiprocess_executor)
defs = dg.Definitions(assets, jobs=[job], resources={{"compute": compute}})
"""


def test_steps_in_processes_of_their_own(script: Any, site: Site, tmp_path: Path) -> None:
    payload = script(pipes_script("pipes.report_asset_materialization(metadata={'x': 1})"))
    definitions = tmp_path / "definitions.py"
    definitions.write_text(
        DEFINITIONS.format(
            payload=str(payload), ssh=site.ssh.model_dump(), base=site.base, env=site.env_path, local=str(tmp_path / "base")
        )
    )
    env = {**os.environ, "DAGSTER_HOME": str(tmp_path), "DAGSTER_DISABLE_TELEMETRY": "yes"}
    command = [sys.executable, "-m", "dagster", "job", "execute", "-f", str(definitions), "-j", "job"]
    said = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=170)
    assert said.returncode == 0, said.stderr[-3000:]
    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        jobs = set()
        for number in range(3):
            event = instance.get_latest_materialization_event(dg.AssetKey(f"asset_{number}"))
            assert event is not None and event.asset_materialization is not None
            jobs.add(event.asset_materialization.metadata["Slurm job ID"].value)
        assert len(jobs) == 3
    # All of them found one copy of the script.
    assert len(site.sh('ls "$1/bundles"', site.base).split()) == 1
