"""Heterogeneous jobs whose components run a payload each: one job, one step, and what becomes of all when one fails."""

import json
from collections.abc import Callable
from typing import Any

import dagster as dg
import pytest

from dagster_rayslurm import BashLauncher, ComputeResource, HetComponent, RayLauncher, SlurmQueueConfig
from dagster_rayslurm.follow import Follower

from ..conftest import pipes_script, run_asset, small_ray, wait_until
from .fixtures import Running, Site

pytestmark = pytest.mark.timeout(300)

Make = Callable[..., ComputeResource]
Start = Callable[..., Running]

PLAIN = BashLauncher(grace_period=2)
MARK = """
import json, os, pathlib, signal, time
own, data = os.environ["RAYSLURM_COMPONENT"], pathlib.Path(os.environ["RAYSLURM_DATA_DIR"])
others = [name for name in json.loads(os.environ["RAYSLURM_COMPONENTS"]) if name != own]
def ended(*_):
    (data / ("ended-" + own)).write_text("x")
    raise SystemExit(1)
signal.signal(signal.SIGTERM, ended)
(data / ("up-" + own)).write_text("x")
while not all((data / ("up-" + other)).exists() for other in others):
    time.sleep(0.05)
(data / "up").write_text("x")
"""
SLEEPS = MARK + "time.sleep(200)\n"


def component(name: str, partition: str, num_nodes: int = 1, launcher: Any = PLAIN, **queue: Any) -> HetComponent:
    asked = {
        "partition": partition,
        "num_nodes": num_nodes,
        "time_limit": "00:05:00",
        "mem": "2500M",
        "cpus_per_node": 2,
        **queue,
    }
    return HetComponent(component_id=name, queue=SlurmQueueConfig(**asked), launcher=launcher)


@pytest.fixture
def separate(slurm_compute: Make) -> Make:
    """Makes resources for mode "slurm-hetjob" with a payload per component: `cpu` on one node, `gpu` on another."""

    def make(*components: HetComponent, **fields: Any) -> ComputeResource:
        chosen = list(components) or [component("cpu", "compute"), component("gpu", "gpu", gpus_per_node=1)]
        usual = {"mode": "slurm-hetjob", "topology": "separate", "default_launcher": RayLauncher(), "components": chosen}
        return slurm_compute(**{**usual, **fields})

    return make


def test_a_payload_and_a_cluster_each(separate: Make, script: Any, site: Site) -> None:
    """One without Ray, one on a node of a cluster, one on two; all know where the others are, and have what was granted there."""
    text = """
        import json, os, socket
        own = os.environ["RAYSLURM_COMPONENT"]
        there = json.loads(os.environ["RAYSLURM_COMPONENTS"])
        found = {"host": socket.gethostname(), "there": there, "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
                 "partition": os.environ["SLURM_JOB_PARTITION"], "mem": os.environ["SLURM_MEM_PER_NODE"]}
        if own != "plain":
            import ray
            ray.init()
            found["resources"] = {name: amount for name, amount in ray.cluster_resources().items() if name in ("CPU", "GPU")}
            found["nodes"] = sorted(node["NodeManagerHostname"] for node in ray.nodes())
            assert os.environ["RAY_ADDRESS"] == there[own]["ray_address"]
        open("result.txt", "w").write(own)
        pipes.report_asset_materialization(metadata={own: {"raw_value": found, "type": "json"}, "same": "in all"})
    """
    payload = script(pipes_script(text))
    compute = separate(
        component("plain", "compute", mem="2200M"),
        component("one", "compute", launcher=small_ray()),
        component("two", "gpu", 2, small_ray(), gpus_per_node=2),
    )
    ran = run_asset(compute, payload, outputs=["*.txt"])
    metadata, run = ran.metadata, ran.completed[0]
    plain, one, two = (metadata[name] for name in ("plain", "one", "two"))
    assert metadata["same"] == "in all" and plain["there"] == one["there"] == two["there"]
    assert {plain["host"], one["host"]} == {"c1", "c2"} and two["nodes"] == two["there"]["two"]["nodes"] == ["g1", "g2"]
    assert one["nodes"] == [one["host"]] and "GPU" not in one["resources"] and two["resources"] == {"CPU": 4, "GPU": 4}
    assert (plain["partition"], plain["mem"], plain["gpus"]) == ("compute", "2200", None)
    assert (two["partition"], two["mem"], two["gpus"]) == ("gpu", "2500", "0,1")
    assert plain["there"]["plain"]["ray_address"] is None and two["there"]["one"]["host"] == one["host"]
    rows = {record.data["component"]: record.data for record in metadata["Components"].records}
    assert [(rows[name]["Slurm job ID"], rows[name]["partition"]) for name in rows] == [
        (f"{run.job_id}+0", "compute"),
        (f"{run.job_id}+1", "compute"),
        (f"{run.job_id}+2", "gpu"),
    ]
    assert rows["two"]["GPUs"] == 4 and rows["two"]["nodes"] == "g1, g2" and metadata["Slurm job ID"] == run.job_id
    assert [(path.parent.name, path.read_text()) for path in run.outputs] == [(name, name) for name in ("one", "plain", "two")]
    assert site.sh('ls "$1/runs"', site.base).split() == []
    state = wait_until(lambda: site.sh(f"squeue --noheader --states=all --jobs={run.job_id} --format=%T").split())
    assert state and wait_until(lambda: not site.jobs())


@pytest.mark.parametrize("failing", ["cpu", "gpu"])
def test_the_first_failure_ends_all(failing: str, separate: Make, script: Any, site: Site) -> None:
    """The others have their grace period, and Slurm's books tell the same."""
    other = "gpu" if failing == "cpu" else "cpu"
    payloads = {failing: script(MARK + "raise SystemExit(3)", "failing.py"), other: script(SLEEPS, "sleeps.py")}
    failure = run_asset(separate(), payloads, uses_pipes=False).failure
    assert failure.kind == "payload"
    assert failure.description == (
        f"component {failing!r}: the payload ended with exit code 3; component {other!r} was ended because of that"
    )
    assert site.lines(f"ended-{other}") == ["x"]
    job_id = failure.metadata["Slurm job ID"].value
    assert wait_until(lambda: not site.jobs())
    assert f"{job_id} FAILED 3:0" in site.sh(
        f"scontrol show job {job_id} --oneliner | tr ' ' '\\n' | grep -E '^(JobState|ExitCode)=' "
        f"| head -2 | cut -d= -f2 | xargs echo {job_id}"
    )


def test_a_runtime_that_is_killed(separate: Make, start: Start, script: Any, site: Site) -> None:
    """srun ends what is left, and the component whose runtime it was is the one that is named."""
    site.killed = True
    running = start(separate(), script(SLEEPS), uses_pipes=False)
    running.up()
    find = 'for p in $(pgrep -u dev -f "[ ]part /home/dev"); do tr "\\0" " " </proc/$p/cmdline; echo "|$p"; done'
    pids = [line.rpartition("|")[2] for line in site.stack.exec("g1", ["sh", "-c", find], check=False).splitlines()]
    node = "g1" if pids else "g2"
    site.stack.exec(node, ["sh", "-c", 'kill -9 $(pgrep -u dev -f "[ ]part /home/dev")'])
    failure = running.result(100).failure
    said = failure.description or ""
    assert failure.kind == "runtime" and f"component 'gpu': the runtime on node {node} ended" in said, said
    assert "component 'cpu' was ended because of that" in said


def test_a_cluster_that_does_not_start(separate: Make, script: Any, site: Site) -> None:
    gpu = component("gpu", "gpu", 2, small_ray(health_check='test "$(hostname)" != g2'), gpus_per_node=1)
    failure = run_asset(separate(component("cpu", "compute"), gpu), script(SLEEPS), uses_pipes=False).failure
    said = failure.description or ""
    assert failure.kind == "cluster-start" and "component 'gpu': the Ray cluster did not start: " in said and "g2" in said
    assert said.endswith("component 'cpu' was ended because of that")
    assert site.lines("up-cpu") == []


@pytest.mark.parametrize("phase", ["pending", "running"])
def test_a_cancelled_run_ends_all(phase: str, separate: Make, script: Any, site: Site, monkeypatch: Any) -> None:
    """While it waits in the queue, or once both payloads are at work."""
    later = ["--begin=now+1hour"] if phase == "pending" else []
    compute = separate(component("cpu", "compute", extra_sbatch=later), component("gpu", "gpu", extra_sbatch=later))
    turn, turns = Follower.poll, []

    def interrupted(self: Follower, *arguments: Any) -> Any:
        turns.extend([self] * self.evidence.started)
        pending = site.sh("squeue --me --noheader --states=PENDING --format=%A").split() if phase == "pending" else []
        if len(pending) == 2 or (len(turns) > 4 and site.lines("up")):
            monkeypatch.setattr(Follower, "poll", turn)
            raise KeyboardInterrupt
        return turn(self, *arguments)

    @dg.asset
    def slow(context: dg.AssetExecutionContext, compute: ComputeResource) -> None:
        compute.run(context=context, payload_path=script(SLEEPS), uses_pipes=False)

    monkeypatch.setattr(Follower, "poll", interrupted)
    with pytest.raises(KeyboardInterrupt):
        dg.materialize([slow], resources={"compute": compute})
    assert wait_until(lambda: not site.jobs()), site.sh("squeue --me")
    if phase == "running":
        assert site.lines("ended-cpu") == site.lines("ended-gpu") == ["x"]
        assert "cancelled from Dagster" in site.sh('cat "$1"/runs/*/components/gpu/journal.jsonl', site.base)


def test_an_admin_cancels_a_component(separate: Make, start: Start, script: Any, site: Site) -> None:
    running = start(separate(), script(SLEEPS), uses_pipes=False)
    job_id = running.up()
    leader = min(site.jobs(), key=int)
    assert job_id in site.jobs()
    site.stack.exec("slurmctld", ["scancel", str(int(leader) + 1)])
    failure = running.result(100).failure
    assert failure.kind == "cancelled" and "component 'gpu'" in (failure.description or ""), failure.description


def test_the_script_is_shown(separate: Make) -> None:
    shown = separate().job_script(payload_path={"cpu": "a", "gpu": "b"})
    assert "#SBATCH hetjob" in shown and " part " in shown and "--het-group=0-1" in shown
    assert json.dumps("b") not in shown
