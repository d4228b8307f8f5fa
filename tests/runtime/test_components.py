"""Components of an allocation: what their nodes are told and known by, and one cluster across two of them on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dagster_rayslurm.archive import install_runtime
from dagster_rayslurm.runtime.node import allocation
from dagster_rayslurm.runtime.node.network import choose_ports, control_ports
from dagster_rayslurm.runtime.node.resources import (
    GPU_VARIABLES,
    NodeResources,
    component_shares,
    count_gpus,
    footprint_error,
    runtime_footprint,
    single_node_share,
    visible_gpus,
)
from dagster_rayslurm.runtime.process import processes
from dagster_rayslurm.runtime.process.loop import Loop
from dagster_rayslurm.runtime.process.scratch import Scratch
from dagster_rayslurm.runtime.protocol.record import JOURNAL, PAYLOAD, RUNTIME, STDIO, LineReader
from dagster_rayslurm.runtime.protocol.spec import ComponentSpec, NodeSpec, PayloadSpec, RaySpec, RuntimeSpec, node_spec, to_json
from dagster_rayslurm.runtime.ray import membership
from dagster_rayslurm.runtime.ray.ray_node import RayNode, start_arguments, symmetric_arguments
from dagster_rayslurm.runtime.supervisor.queue import Claim, capacities_of, claims_of, misfit, room_for

from ..conftest import wait_until
from .test_supervisor import Runtime

TASK = {
    "SLURM_JOB_ID": "17",
    "SLURM_NODEID": "2",
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_NODELIST": "c[1-2],b7",
    "SLURM_STEP_NODELIST": "b7,c[1-2]",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "c[1-2]",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "b7",
    "SLURM_JOB_ID_HET_GROUP_0": "17",
    "SLURM_JOB_ID_HET_GROUP_1": "18",
    "SLURM_JOB_PARTITION": "gpu",
    "SLURM_JOB_PARTITION_HET_GROUP_0": "compute",
    "SLURM_JOB_PARTITION_HET_GROUP_1": "gpu",
    "SLURM_MEM_PER_NODE": "1000",
    "SLURM_MEM_PER_NODE_HET_GROUP_0": "1000",
    "SLURM_MEM_PER_NODE_HET_GROUP_1": "2000",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
}

STORE = 100 * 2**20
CPU = NodeSpec("cpu", num_cpus=1, object_store_memory=STORE)
GPU = NodeSpec("gpu", num_gpus=2, object_store_memory=STORE, resources={"shelf": 1.0}, labels={"disk": "fast"})
RAY = RaySpec(dashboard=False, ray_args=["--no-monitor"], startup_timeout=100.0, components=[CPU, GPU])
C1, G1 = (NodeResources(name, 4, gpus, 2**33, None, component) for name, gpus, component in (("c1", 0, "cpu"), ("g1", 2, "gpu")))


def settled(environ: dict[str, str], *names: str) -> allocation.Allocation:
    here = allocation.from_environ(environ)
    assert here is not None
    return allocation.select_component(environ, here, names)


def test_a_task_knows_its_component() -> None:
    environ = dict(TASK)
    here = settled(environ, "cpu", "gpu")
    assert here.nodes == ["c1", "c2", "b7"]
    assert [here.component_of(node_id) for node_id in range(3)] == ["cpu", "cpu", "gpu"]
    assert environ["SLURM_MEM_PER_NODE"] == "2000" and environ["SLURM_JOB_PARTITION"] == "gpu"
    assert here.facts()["components"] == [
        {"component": "cpu", "job_id": "17+0", "partition": "compute", "nodes": ["c1", "c2"]},
        {"component": "gpu", "job_id": "17+1", "partition": "gpu", "nodes": ["b7"]},
    ]


def test_one_component_is_no_heterogeneous_job() -> None:
    plain = {name: value for name, value in TASK.items() if "HET" not in name}
    here = settled({**plain, "SLURM_NODEID": "1"}, "all")
    assert here.component_of(1) == "all"
    assert here.facts()["components"] == [{"component": "all", "job_id": "17", "partition": "gpu", "nodes": here.nodes}]
    nothing = settled({**plain, "SLURM_NODEID": "1"})
    assert nothing.component_of(0) is None and "components" not in nothing.facts()


@pytest.mark.parametrize("names", [("cpu",), ("cpu", "gpu", "disk")])
def test_components_that_slurm_does_not_know_of_are_an_error(names: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"Slurm's step 2"):
        settled(dict(TASK), *names)


@pytest.mark.parametrize(
    ("leaked", "granted", "count"), [({}, {}, 0), ({}, {"SLURM_GPUS_ON_NODE": "1", "SLURM_STEP_GPUS": "3"}, 1)]
)
def test_gpus_of_the_first_component_are_not_those_of_the_others(
    leaked: dict[str, str], granted: dict[str, str], count: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """srun hands the variables of the job's script on, and sets them anew where there are GPUs."""
    monkeypatch.setenv("PATH", str(tmp_path))  # No nvidia-smi.
    environ = {**TASK, **dict.fromkeys(GPU_VARIABLES, "0,1"), **leaked, **granted}
    if granted:
        environ["CUDA_VISIBLE_DEVICES"] = "3"
    settled(environ, "cpu", "gpu")
    assert count_gpus(environ) == count and ("CUDA_VISIBLE_DEVICES" in environ) == bool(count)


def test_each_node_is_told_what_its_component_is() -> None:
    chosen = choose_ports(head=False)
    for spec, machine, expected in (
        (CPU, C1, {"--num-cpus=1", "--num-gpus=0", "--labels=component=cpu", '--resources={"component:cpu": 1000.0}'}),
        (GPU, G1, {"--num-cpus=4", "--num-gpus=2", "--labels=component=gpu,disk=fast"}),
    ):
        own = node_spec(RAY, machine.component)
        started = start_arguments(own, machine, chosen, "/tmp/r", "10.0.0.2", "10.0.0.1:4567")
        assert expected <= set(started), spec
        # `ray symmetric-run` is called on each node, and starts its Ray with what stands there.
        symmetric = symmetric_arguments(started, "10.0.0.1:4567", 2, ["hold", "x"])
        assert expected <= set(symmetric[: symmetric.index("--")]) and "--min-nodes=2" in symmetric
    assert node_spec(RAY, "disk") is RAY and node_spec(RaySpec(), None) == RaySpec()


def test_what_was_asked_for_is_held_against_each_component() -> None:
    spec = RuntimeSpec("c", RAY, components=[ComponentSpec("cpu", 2, 4, None), ComponentSpec("gpu", 1, 2, 4)])
    assert footprint_error(runtime_footprint(spec, "cpu"), C1) is None
    problem = footprint_error(runtime_footprint(spec, "gpu"), G1) or ""
    assert "SlurmQueueConfig.gpus_per_node=4" in problem and "node g1 (component gpu)" in problem
    poor = NodeResources("g2", 4, 1, 2**33, None, "gpu")
    less = RuntimeSpec("c", RAY, components=[ComponentSpec("cpu"), ComponentSpec("gpu")])
    assert "RayLauncher.num_gpus_per_node=2" in (footprint_error(runtime_footprint(less, "gpu"), poor) or "")


def test_payloads_of_a_session_are_held_against_the_nodes_that_they_run_on() -> None:
    machines = [C1, G1]
    plain = PayloadSpec(["x"], "n", want_cpus=3)
    assert misfit(plain, machines) is None
    assert "node c1 (component cpu)" in (misfit(PayloadSpec(["x"], "n", want_gpus=1), machines) or "")
    assert misfit(PayloadSpec(["x"], "n", want_gpus=1), [G1, C1]) is None
    for ray in (RAY, None):
        assert misfit(PayloadSpec(["x"], "n", uses_ray=True, ray=ray, want_gpus=2), machines) is None
    greedy = RaySpec(components=[CPU, NodeSpec("gpu", num_gpus=3)])
    assert "node g1 (component gpu)" in (misfit(PayloadSpec(["x"], "n", uses_ray=True, ray=greedy), machines) or "")

    capacities = capacities_of([C1, NodeResources("c2", 2, 0, 2**33, None, "cpu"), G1])
    assert capacities == {"cpu": Claim(2, 0), "gpu": Claim(4, 2)}
    assert claims_of(plain, False, capacities) == {"cpu": Claim(3, 0)}
    own = claims_of(PayloadSpec(["x"], "n", uses_ray=True, ray=RAY), True, capacities)
    assert own == capacities  # A cluster of its own takes whole nodes, of all components.
    shared = claims_of(PayloadSpec(["x"], "n", uses_ray=True), False, capacities)
    assert shared == {"cpu": Claim(), "gpu": Claim()}
    assert room_for(shared, [own], capacities, 3) and not room_for(own, [own], capacities, 3)
    assert room_for(own, [], capacities, 1) and not room_for(shared, [shared], capacities, 1)
    assert not room_for({"cpu": Claim(1)}, [own], capacities, 9) and room_for(
        {"cpu": Claim(1)}, [{"gpu": Claim(4)}], capacities, 2
    )
    assert capacities_of([NodeResources("n", 4, 1, 1, None), NodeResources("m", 2, 2, 1, None)]) == {None: Claim(2, 1)}


def table(*rows: tuple[str, str, bool, bool, float]) -> membership.Nodes:
    return {
        str(index): {"hostname": host, "component": component, "head": head, "alive": alive, "resources": {"CPU": cpus}}
        for index, (host, component, head, alive, cpus) in enumerate(rows)
    }


def test_nodes_of_two_components_on_one_host_are_two() -> None:
    before = table(("h", "gpu", False, True, 2), ("h", "cpu", True, True, 1), ("i", "gpu", False, True, 2))
    assert membership.present(before) == {("h", "cpu"), ("h", "gpu"), ("i", "gpu")}
    assert membership.in_words(before, RAY) == "3 nodes, the head is h (cpu: 1 node, CPU 1; gpu: 2 nodes, CPU 4)"
    assert [node["component"] for node in membership.in_order(before, RAY)] == ["cpu", "gpu", "gpu"]
    after = {**before, "0": {**before["0"], "alive": False}}
    assert [membership.title(node) for node in membership.lost(before, after)] == ["h (component gpu)"]
    assert membership.lost(after, after) == [] and len(membership.lost(before, {})) == 3
    # A user's own label of that name is none of this cluster's.
    assert membership.present(membership.within(RaySpec(), before)) == {("h", None), ("i", None)}
    assert membership.in_words(membership.within(RaySpec(), before), RaySpec()) == "3 nodes, the head is h (CPU 5)"


def placeholders(*names: str) -> dict[str, str | None]:
    """The variables of a process that sees these of the devices called X, and no others of any maker."""
    return {**dict.fromkeys(GPU_VARIABLES), "X": ",".join(names)}


SIMULATED = "component b: Ray counts 2 GPUs, but this machine has %s for it: the others are simulated, no device is behind them"


@pytest.mark.parametrize(
    ("devices", "wanted", "shown", "simulated"),
    [
        ([], (0, 2), ({}, placeholders("1000", "1001")), {1: SIMULATED % "no GPUs"}),
        (["4", "7", "9"], (1, 2), ({"X": "4"}, {"X": "7,9"}), {}),
        (["4"], (0, 1), ({"X": ""}, {"X": "4"}), {}),
        (["4", "7"], (1, 2), ({"X": "4"}, placeholders("7", "1000")), {1: SIMULATED % "1 GPU"}),
    ],
)
def test_gpus_of_a_machine_are_shared_out(
    devices: list[str], wanted: tuple[int, int], shown: tuple[Any, Any], simulated: dict[int, str]
) -> None:
    components = [ComponentSpec(name, 1, 64, gpus) for name, gpus in zip("ab", wanted, strict=True)]
    here = NodeResources("h", 2, len(devices), 8 * 2**30, None)
    roles = component_shares(RuntimeSpec("c", RaySpec(), components=components), here, ("X", devices))
    assert tuple(role.environ for role in roles) == shown
    assert {place: role.remark for place, role in enumerate(roles) if role.remark} == simulated
    assert [(role.machine.num_cpus, role.machine.num_gpus, role.machine.memory_limit) for role in roles] == [
        (2, gpus, 4 * 2**30) for gpus in wanted
    ]


@pytest.mark.parametrize(
    ("asked", "devices", "counted", "shown", "remark"),
    [
        (RaySpec(num_cpus=1), ["4"], (2, 1), {}, ""),
        (RaySpec(num_cpus=16), [], (16, 0), {}, "16 CPUs, but this machine has 2 CPUs"),
        (
            RaySpec(num_cpus=16, num_gpus=2),
            ["4"],
            (16, 2),
            placeholders("4", "1000"),
            "16 CPUs and 2 GPUs, but this machine has 2 CPUs and 1 GPU",
        ),
    ],
)
def test_ray_counts_what_a_machine_lacks(
    asked: RaySpec, devices: list[str], counted: tuple[int, int], shown: dict[str, str | None], remark: str
) -> None:
    """Nobody is shown a device that was hidden from this process."""
    here = NodeResources("h", 2, len(devices), 2**33, 2**32)
    role = single_node_share(RuntimeSpec("c", asked), here, ("X", devices))
    assert (role.machine.num_cpus, role.machine.num_gpus) == counted and role.machine.memory_limit == here.memory_limit
    assert role.environ == shown
    assert role.remark == (remark and f"Ray counts {remark} for it: the others are simulated, no device is behind them")


def test_a_launcher_goes_before_its_queue_where_components_are_simulated() -> None:
    components = [ComponentSpec("cpu", 1, 64, 0), ComponentSpec("gpu", 1, None, 8)]
    roles = component_shares(RuntimeSpec("c", RAY, components=components), NodeResources("h", 2, 0, 2**33, 2**32), ("X", []))
    assert [(role.machine.name, role.machine.num_cpus, role.machine.num_gpus) for role in roles] == [
        ("h (component cpu)", 1, 0),
        ("h (component gpu)", 2, 2),
    ]
    assert visible_gpus({"ROCR_VISIBLE_DEVICES": "3,5"}, 1) == ("ROCR_VISIBLE_DEVICES", ["3"])
    assert visible_gpus({}, 2) == ("CUDA_VISIBLE_DEVICES", ["0", "1"])


@pytest.mark.parametrize(
    ("environ", "shown"),
    [
        # HIP counts among what ROCr leaves visible: it must not narrow a part of that once more.
        (
            {"ROCR_VISIBLE_DEVICES": "4,5,6", "HIP_VISIBLE_DEVICES": "2,0"},
            [{"ROCR_VISIBLE_DEVICES": each, "HIP_VISIBLE_DEVICES": None} for each in ("6", "4")],
        ),
        (
            {"ROCR_VISIBLE_DEVICES": "4,5"},
            [{"ROCR_VISIBLE_DEVICES": each, "HIP_VISIBLE_DEVICES": None} for each in ("4", "5")],
        ),
        ({"HIP_VISIBLE_DEVICES": "2,3"}, [{"HIP_VISIBLE_DEVICES": each} for each in ("2", "3")]),
        # Tiles of a device are that one device.
        ({"ZE_AFFINITY_MASK": "0.0,0.1,1.0"}, [{"ZE_AFFINITY_MASK": each} for each in ("0.0,0.1", "1.0")]),
    ],
)
def test_gpus_of_any_maker_are_shared_out(environ: dict[str, str], shown: list[dict[str, str | None]]) -> None:
    components = [ComponentSpec(name, 1, None, 1) for name in "ab"]
    count = count_gpus(environ)
    here = NodeResources("h", 2, count, 2**33, None)
    roles = component_shares(RuntimeSpec("c", RaySpec(), components=components), here, visible_gpus(environ, count))
    assert count == 2 and [role.environ for role in roles] == shown
    assert [count_gpus({name: value for name, value in role.environ.items() if value is not None}) for role in roles] == [1, 1]


def test_a_health_check_sees_what_ray_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that is simulated has some of the machine's GPUs, and its check is for these."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "0")
    loop, private = Loop(), Scratch()
    failed: list[str] = []

    def on_event(event: dict[str, Any]) -> None:
        failed.append(str(event["error"]))
        loop.stop()

    spec = RaySpec(health_check='echo "sees $CUDA_VISIBLE_DEVICES ${HIP_VISIBLE_DEVICES-nothing}"; exit 3')
    environ = {"CUDA_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": None}
    RayNode(loop, RuntimeSpec("c", spec), spec, "", G1, private, 1, on_event, environ).start("127.0.0.1:1")
    loop.call_later(20, loop.stop)
    loop.run()
    signal.set_wakeup_fd(-1)
    private.remove()
    assert len(failed) == 1 and "sees 1 nothing" in failed[0]


def test_a_payload_sees_the_gpus_of_its_component(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs beside the head; the machine's other GPUs are the other components'."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    runtime = Runtime(tmp_path)
    runtime.add("one", "import os, sys; sys.stdout.write('sees %s\\n' % os.environ['CUDA_VISIBLE_DEVICES'])")
    runtime.run("""
        from dagster_rayslurm.runtime.protocol.spec import ComponentSpec
        machine.detect = lambda *_, **__: machine.NodeResources("n1", 4, 2, 2**33, None)
        session(components=[ComponentSpec("a", 1, None, 1), ComponentSpec("b", 1, None, 1)])
        submit("one")
        when_done(end)
    """)
    assert "sees 4\\n" in (tmp_path / "one" / STDIO).read_text()


# ---- One cluster across two components; this machine is the one node of each

KEY = "dd" * 32

SHOW = """
import json, os, ray
ray.init(log_to_driver=False)
names = {node["NodeID"]: node["Labels"].get("component") for node in ray.nodes()}
look = ray.remote(lambda: ray.get_runtime_context().get_node_id())
where = [names[ray.get(look.options(label_selector={"component": name}).remote())] for name in ("cpu", "gpu")]
seen = {"nodes": sorted(names.values()), "where": where, "driver": names[ray.get_runtime_context().get_node_id()],
        "resources": {names[node["NodeID"]]: node["Resources"] for node in ray.nodes()}}
with open(os.environ["RAYSLURM_RUN_DIR"] + "/seen.json", "w") as file:
    json.dump(seen, file)
"""


class Job:
    """A heterogeneous job of two nodes, both of them this machine under one name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tasks: list[subprocess.Popen[bytes]] = []

    def start(self, ray: RaySpec | None, code: str = SHOW, places: tuple[int, ...] = (0, 1), **fields: Any) -> None:
        runtime = fields.pop("runtime", None) or ["-I", str(install_runtime(self.path)), "node"]
        command = [sys.executable, *runtime, str(self.path)]
        grace_period = fields.pop("grace_period", 1.0)
        components = fields.pop("components", [ComponentSpec("cpu", 1, 1), ComponentSpec("gpu", 1, 1)])
        spec = RuntimeSpec("c1", ray, control_key=KEY, control_ports=control_ports(None, 3), components=components, **fields)
        (self.path / RUNTIME).write_text(to_json(spec))
        payload = PayloadSpec(["python", "-c", code], "n", grace_period=grace_period, uses_ray=ray is not None)
        (self.path / PAYLOAD).write_text(to_json(payload))
        for place in places:
            with open(self.path / f"node-{place}.log", "wb") as log:
                self.tasks.append(subprocess.Popen(command, env=self.environ(place), stdout=log, stderr=log))

    def environ(self, place: int) -> dict[str, str]:
        """As srun makes it: what is the first component's stands for all of them."""
        groups = {}
        for group, memory in enumerate((3000, 2000)):
            mine = {
                "JOB_NODELIST": "localhost",
                "JOB_ID": str(12 + group),
                "JOB_PARTITION": f"p{group}",
                "MEM_PER_NODE": str(memory),
            }
            groups.update({f"SLURM_{name}_HET_GROUP_{group}": value for name, value in mine.items()})
        task = {
            "SLURM_JOB_ID": "12",
            "SLURM_NODEID": str(place),
            "SLURM_HET_SIZE": "2",
            "SLURM_JOB_NODELIST": "localhost",
            "SLURM_STEP_NODELIST": "localhost",
            "SLURM_JOB_PARTITION": "p1",
            "SLURM_MEM_PER_NODE": "3000",
            "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
            "CUDA_VISIBLE_DEVICES": "0,1",
        }
        if place == 1:
            task.update(SLURM_GPUS_ON_NODE="2", SLURM_STEP_GPUS="0,1")
        return {**os.environ, **task, **groups}

    def records(self) -> list[dict[str, Any]]:
        path = self.path / JOURNAL
        return LineReader().feed(path.read_bytes()) if path.exists() else []

    def end(self) -> dict[str, Any]:
        found = wait_until(lambda: [record for record in self.records() if record["type"] == "end"], 150)
        assert found, self.log()
        for task in self.tasks:
            task.wait(30)
        return dict(found[0])

    def log(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.path.glob("node-*.log")))

    def phases(self) -> list[str]:
        return [record["message"] for record in self.records() if record["type"] == "phase"]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    for task in made.tasks:
        if task.poll() is None:
            task.terminate()
            task.wait(30)


def test_a_node_that_connects_after_the_end_is_stopped(job: Job) -> None:
    """Its Python starts from a slow disk, say, and the payload takes no time; nobody else would tell it."""
    job.start(None, "print('all there is')", places=(0,))
    assert wait_until(lambda: [record for record in job.records() if record["type"] == "end"], 60), job.log()
    with open(job.path / "node-1.log", "wb") as log:
        command = [sys.executable, "-I", str(install_runtime(job.path)), "node", str(job.path)]
        job.tasks.append(subprocess.Popen(command, env=job.environ(1), stdout=log, stderr=log))
    assert job.end()["exit_code"] == 0
    assert [task.returncode for task in job.tasks] == [0, 0], job.log()


@pytest.mark.ray
@pytest.mark.timeout(300)
@pytest.mark.parametrize("port_range", [pytest.param(None, marks=pytest.mark.thorough), "23000-23399"])
def test_one_cluster_across_two_components_of_one_host(job: Job, port_range: str | None) -> None:
    job.start(replace(RAY, port_range=port_range))
    end = job.end()
    assert end["exit_code"] == 0, (end, job.log())
    seen = json.loads((job.path / "seen.json").read_text())
    assert seen["nodes"] == ["cpu", "gpu"] == seen["where"] and seen["driver"] == "cpu"
    resources = seen["resources"]
    # The GPUs of the job's script are not the first component's, as Slurm grants it none.
    assert resources["cpu"].get("GPU") is None and resources["gpu"]["GPU"] == 2 and resources["gpu"]["shelf"] == 1
    assert resources["cpu"]["component:cpu"] == 1000 and resources["gpu"]["component:gpu"] == 1000
    # Each component's own memory limit.
    assert resources["gpu"]["memory"] < 2000 * 2**20 < resources["cpu"]["memory"] < 3000 * 2**20
    told = job.phases()
    assert "2/2 nodes joined" in told
    assert any("cpu: 1 node, CPU 1; gpu: 1 node, " in text and "GPU 2)" in text for text in told)
    assert any("localhost (component cpu), localhost (component gpu)" in text for text in told)
    context = end["context"]
    assert [(node["component"], node["head"]) for node in context["nodes"]] == [("cpu", True), ("gpu", False)]
    assert [(each["component"], each["job_id"], each["partition"]) for each in context["allocation"]["components"]] == [
        ("cpu", "12+0", "p0"),
        ("gpu", "12+1", "p1"),
    ]
    hostname = context["hostname"]
    assert set(end["usage"]["nodes"]) == {hostname, f"{hostname} (component gpu)"}


@pytest.mark.ray
@pytest.mark.timeout(300)
def test_a_component_that_fails_its_check_is_named(job: Job) -> None:
    ill = replace(GPU, health_check="echo no driver; exit 3")
    job.start(replace(RAY, components=[CPU, ill]))
    end = job.end()
    assert end["reason"] == "cluster-start" and "(component gpu): no driver" in end["message"]


@pytest.mark.timeout(120)
def test_a_component_that_grants_less_is_named(job: Job) -> None:
    job.start(RAY, components=[ComponentSpec("cpu", 1, 1), ComponentSpec("gpu", 1, 1, 4)])
    end = job.end()
    assert end["reason"] == "cluster-start"
    assert "SlurmQueueConfig.gpus_per_node=4" in end["message"] and "(component gpu) grants: 2 GPUs" in end["message"]


HURRIED = """
import sys
from dagster_rayslurm.runtime.node.worker_nodes import WorkerNodes
from dagster_rayslurm.runtime.ray import agent
agent._HEAD_SIGNAL_TIMEOUT, introduced = 0.5, WorkerNodes._introduce
def noted(*args):
    introduced(*args)
    open(sys.argv[1] + "/joined", "w").close()
WorkerNodes._introduce = noted
from dagster_rayslurm.runtime.__main__ import main
sys.exit(main(["node", sys.argv[1]]))
"""
TIDY = """
import os, signal, sys, time
def end(*_):
    time.sleep(3)
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
open(os.environ["RAYSLURM_RUN_DIR"] + "/up", "w").close()
time.sleep(60)
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("both", [True, False])
def test_a_node_that_is_signalled_stays_if_the_head_is_ending_too(job: Job, both: bool) -> None:
    """Its task's exit would have srun end all; but where its component alone is ended, it leaves in time."""
    components = [ComponentSpec("cpu"), ComponentSpec("gpu")]
    job.start(None, TIDY, components=components, runtime=["-c", HURRIED], grace_period=60.0)
    assert wait_until(lambda: (job.path / "up").exists() and (job.path / "joined").exists(), 60), job.log()
    for task in job.tasks if both else job.tasks[1:]:
        task.terminate()
    if both:
        end = job.end()
        assert end["reason"] == "terminated" and end["exit_code"] == 0
        assert "saved" in (job.path / STDIO).read_text()
        assert job.tasks[1].returncode == 0, job.log()
    else:
        assert job.tasks[1].wait(30) == 143 and "the head's goes on" in job.log()
        assert not [record for record in job.records() if record["type"] == "end"]


@pytest.mark.timeout(120)
def test_a_node_that_is_signalled_before_it_reached_the_head_ends_the_step(job: Job) -> None:
    """The head may never hear of it, and would go on without the component."""
    job.start(None, TIDY, components=[ComponentSpec("cpu"), ComponentSpec("gpu")], runtime=["-c", HURRIED], places=(1,))
    assert wait_until(lambda: "the head's runtime cannot be reached" in job.log(), 60), job.log()
    job.tasks[0].terminate()
    assert job.tasks[0].wait(30) == 143 and "the head's goes on" in job.log()


@pytest.mark.timeout(120)
def test_a_node_that_is_signalled_after_its_head_was_killed_ends(job: Job) -> None:
    """Slurm signals it because the head's task has failed: nobody is left to wait for."""
    patient = HURRIED.replace("0.5", "1000.0")
    job.start(None, TIDY, components=[ComponentSpec("cpu"), ComponentSpec("gpu")], runtime=["-c", patient])
    assert wait_until(lambda: (job.path / "up").exists() and (job.path / "joined").exists(), 60), job.log()
    for each in processes.descendants(job.tasks[0].pid):
        os.kill(each.pid, signal.SIGKILL)
    assert job.tasks[0].wait(30) != 0 and wait_until(lambda: "the head's runtime cannot be reached" in job.log()), job.log()
    job.tasks[1].terminate()
    assert job.tasks[1].wait(30) == 0, job.log()


@pytest.mark.timeout(120)
def test_a_start_record_of_another_job_is_refused(job: Job) -> None:
    job.start(RAY, components=[ComponentSpec("cpu")], places=(0,))
    assert job.tasks[0].wait(30) != 0 and "Slurm's step 2" in job.log()


@pytest.mark.ray
@pytest.mark.timeout(300)
def test_clusters_of_payloads_own_have_the_components_too(tmp_path: Path) -> None:
    """Simulated on one machine: each ends with its payload, and one that does not come up ends nobody else's."""
    runtime = Runtime(tmp_path)
    ill = replace(RAY, components=[CPU, replace(GPU, health_check="echo no driver; false")])
    enough = replace(ill, min_nodes=1)
    for name, ray, code in (
        ("one", RAY, SHOW),
        ("two", ill, SHOW),
        ("three", enough, "import ray; ray.init(); assert len(ray.nodes()) == 1"),
    ):
        runtime.add(name, code, uses_ray=True, ray=ray, run_id=name)
    runtime.add("four", "pass", want_cpus=1)
    runtime.add("five", "pass", want_gpus=1)
    said = runtime.run("""
        from dagster_rayslurm.runtime.protocol.spec import ComponentSpec
        session(components=[ComponentSpec("cpu"), ComponentSpec("gpu", 1, None, 2)])
        said["nodes"] = [(node["component"], node["cpus"], node["gpus"]) for node in describe(runner)["nodes"]]
        [submit(name) for name in ("one", "two", "three", "four", "five")]
        def go():
            said["here"] = len(processes.descendants(os.getpid()))
            said["left"] = os.listdir(runner.scratch.path)
            said["draining"] = runner.queue.closing
            loop.stop()
        when_done(lambda: loop.call_later(2.0, go))
    """)
    assert said["nodes"] == [["cpu", 4, 0], ["gpu", 4, 2]] and (said["here"], said["draining"]) == (0, None)
    assert said["left"] == [".rayslurm-scratch"]
    assert said["five"].startswith("Misfit: ") and "(component cpu) grants: 0 GPUs" in said["five"]
    assert json.loads((tmp_path / "one" / "seen.json").read_text())["where"] == ["cpu", "gpu"]
    assert [runtime.end(name)["exit_code"] for name in ("one", "three", "four")] == [0, 0, 0]
    assert "(component gpu): no driver" in runtime.end("two")["message"]
    told = [record["message"] for record in runtime.records("three") if record["type"] == "phase"]
    assert any("the cluster starts without node n1 (component gpu)" in text for text in told)
