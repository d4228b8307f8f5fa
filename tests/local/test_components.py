"""Components simulated on this machine: a Ray node for each, in one cluster, through Dagster."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from dagster_rayslurm import BashLauncher, ComputeResource, HetComponent, RayLauncher, SessionConfig, SlurmQueueConfig
from dagster_rayslurm.runtime.node import resources

from ..conftest import end_sessions, pipes_script, run_asset, small_ray, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

LOOK = pipes_script("""
    import json, os, ray
    ray.init(address="auto", log_to_driver=False)
    def where():
        context = ray.get_runtime_context()
        return context.get_node_id(), context.get_accelerator_ids().get("GPU"), os.environ.get("CUDA_VISIBLE_DEVICES")
    look = ray.remote(where)
    names = {node["NodeID"]: node["Labels"].get("component") for node in ray.nodes()}
    labelled = ray.get([look.options(label_selector={"component": name}).remote() for name in ("cpu", "gpu")])
    counted = ray.get([look.options(resources={"component:" + name: 1}).remote() for name in ("cpu", "gpu")])
    with_gpu = ray.get(look.options(num_gpus=1).remote())
    pipes.report_asset_materialization(metadata={"seen": {"type": "json", "raw_value": {
        "nodes": sorted(names.values()), "driver": names[ray.get_runtime_context().get_node_id()],
        "labelled": [names[each[0]] for each in labelled], "counted": [names[each[0]] for each in counted],
        "with_gpu": [names[with_gpu[0]], *with_gpu[1:]],
        "resources": {names[node["NodeID"]]: node["Resources"] for node in ray.nodes()},
        "labels": {names[node["NodeID"]]: node["Labels"] for node in ray.nodes()},
    }}})
""")


def queue(**fields: Any) -> SlurmQueueConfig:
    return SlurmQueueConfig(**fields)


def cpu_and_gpu(**of_gpu: Any) -> list[HetComponent]:
    return [
        HetComponent(
            component_id="cpu", queue=queue(cpus_per_node=1, num_nodes=4), launcher=RayLauncher(labels={"disk": "fast"})
        ),
        HetComponent(
            component_id="gpu",
            queue=queue(cpus_per_node=64, gpus_per_node=2),
            launcher=RayLauncher(**{"resources": {"shelf": 3.0}, **of_gpu}),
        ),
    ]


@pytest.fixture
def het(base: Path) -> ComputeResource:
    return ComputeResource(local_base=str(base), default_launcher=small_ray(), components=cpu_and_gpu())


def messages(base: Path) -> list[str]:
    """What the runtime told the user, of the one run whose directory is kept."""
    (journal,) = (base / "runs").glob("*/journal.jsonl")
    records = [json.loads(line) for line in journal.read_text().splitlines()]
    return [record["message"] for record in records if record["type"] == "phase"]


def test_tasks_find_the_component_that_they_ask_for(base: Path, script: Any) -> None:
    compute = ComputeResource(local_base=str(base), default_launcher=small_ray(), components=cpu_and_gpu(), keep_run_dirs="all")
    ran = run_asset(compute, script(LOOK))
    seen = ran.metadata["seen"]
    assert seen["nodes"] == ["cpu", "gpu"] and seen["driver"] == "cpu"
    assert seen["labelled"] == ["cpu", "gpu"] and seen["counted"] == ["cpu", "gpu"]
    assert seen["with_gpu"][0] == "gpu" and len(seen["with_gpu"][1]) == 1
    of_node = seen["resources"]
    assert (of_node["cpu"]["CPU"], of_node["cpu"].get("GPU")) == (1, None)
    assert (of_node["gpu"]["CPU"], of_node["gpu"]["GPU"], of_node["gpu"]["shelf"]) == (os.cpu_count(), 2, 3)
    assert "shelf" not in of_node["cpu"] and seen["labels"]["cpu"]["disk"] == "fast" and "disk" not in seen["labels"]["gpu"]
    table = ran.metadata["Nodes"] if isinstance(ran.metadata["Nodes"], list) else ran.metadata["Nodes"].records
    assert len(table) == 2 and len({record.data["node"] for record in table}) == 1
    said = messages(base)
    if resources.detect().num_gpus == 0:
        assert any(text.startswith("component gpu: Ray counts 2 GPUs") for text in said)
    assert "2/2 nodes joined" in said
    (up,) = [text for text in said if " is up on 2 nodes" in text]
    assert "(cpu: 1 node, CPU 1; gpu: 1 node, " in up and "GPU 2)" in up
    (end,) = [
        record
        for record in map(json.loads, next((base / "runs").glob("*/journal.jsonl")).read_text().splitlines())
        if record["type"] == "end"
    ]
    assert [(node["component"], node["head"]) for node in end["context"]["nodes"]] == [("cpu", True), ("gpu", False)]
    usage = end["usage"]["nodes"]
    hostname = end["context"]["hostname"]
    assert set(usage) == {hostname, f"{hostname} (component gpu)"} and all(each["peak_memory"] > 2**20 for each in usage.values())


@pytest.mark.thorough
def test_the_head_is_where_it_is_wanted(het: ComputeResource, script: Any) -> None:
    """By the payload's launcher; what a component's launcher says of GPUs goes before its queue."""
    components = cpu_and_gpu(num_gpus_per_node=1)
    ran = run_asset(het, script(LOOK), components=components, launcher=small_ray(component_id="gpu"))
    seen = ran.metadata["seen"]
    assert seen["driver"] == "gpu" and seen["labelled"] == ["cpu", "gpu"] and seen["resources"]["gpu"]["GPU"] == 1


def test_a_component_that_is_not_well_is_named(het: ComputeResource, script: Any) -> None:
    failure = run_asset(het, script(LOOK), components=cpu_and_gpu(health_check="echo no driver; exit 3")).failure
    assert failure.kind == "cluster-start"
    description = failure.description or ""
    assert "(component gpu): no driver" in description and "exit code 3" in description


def test_a_component_without_a_resource_of_the_machine_is_refused(het: ComputeResource, script: Any) -> None:
    failure = run_asset(het, script(LOOK), components=cpu_and_gpu(num_cpus_per_node=4096)).failure
    assert failure.kind == "configuration"
    assert "component 'gpu'" in (failure.description or "") and "num_cpus_per_node=4096" in (failure.description or "")


@pytest.mark.thorough
def test_a_component_that_is_lost_is_no_failure(base: Path, script: Any) -> None:
    payload = script(
        pipes_script("""
        import os, ray, signal, time
        ray.init(address="auto", log_to_driver=False)
        mine = os.environ["RAY_AUTH_TOKEN_PATH"]
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                words = open(f"/proc/{pid}/cmdline").read()
            except OSError:
                continue
            # Siblings have a corner of the head's scratch directory.
            if "raylet/raylet" in words.split("\\0")[0] and os.path.dirname(mine) in words and "gpu" in words:
                os.kill(int(pid), signal.SIGKILL)
                break
        else:
            raise LookupError("no victim")
        while sum(node["Alive"] for node in ray.nodes()) > 1:
            time.sleep(0.1)
        time.sleep(1)
        pipes.report_asset_materialization(metadata={"left": len([node for node in ray.nodes() if node["Alive"]])})
        """)
    )
    compute = ComputeResource(local_base=str(base), default_launcher=small_ray(), components=cpu_and_gpu(), keep_run_dirs="all")
    ran = run_asset(compute, payload)
    assert ran.metadata["left"] == 1
    assert any("(component gpu)" in text for text in messages(base) if "dead" in text or "ended" in text)


@pytest.fixture
def warm(base: Path) -> Iterator[ComputeResource]:
    compute = ComputeResource(
        local_base=str(base),
        enable_cluster_reuse=True,
        session=SessionConfig(max_concurrent_payloads=2, idle_timeout=60),
        default_launcher=small_ray(),
        components=cpu_and_gpu(),
    )
    yield compute
    end_sessions(base)


@pytest.mark.thorough
def test_a_warm_cluster_keeps_its_components(warm: ComputeResource, script: Any, base: Path) -> None:
    payload = script(LOOK)
    first, second = run_asset(warm, payload), run_asset(warm, payload)
    for ran in (first, second):
        assert ran.metadata["seen"]["nodes"] == ["cpu", "gpu"] and ran.metadata["seen"]["counted"] == ["cpu", "gpu"]
    assert first.metadata["Ray cluster ID"] == second.metadata["Ray cluster ID"]
    assert second.metadata["Ray cluster was warm"] is True

    # A session that lost a component takes no more payloads; the next one is whole.
    (session,) = base.glob("local/*/sessions/*/1/session.json")
    runtime = psutil.Process(json.loads(session.read_text())["pid"])
    raylets = [
        process
        for process in runtime.children(recursive=True)
        if process.name() == "raylet" and any('"component":"gpu"' in word.replace(" ", "") for word in process.cmdline())
    ]
    (victim,) = raylets
    victim.send_signal(signal.SIGKILL)
    assert wait_until(lambda: not runtime.is_running() or runtime.status() == psutil.STATUS_ZOMBIE)
    third = run_asset(warm, payload)
    assert third.metadata["seen"]["nodes"] == ["cpu", "gpu"]
    assert third.metadata["Ray cluster ID"] != first.metadata["Ray cluster ID"]


def test_a_payload_without_ray_runs_as_it_is(het: ComputeResource) -> None:
    """Nothing is simulated around it; GPUs of other components are none of its business."""
    ran = run_asset(
        het, ["python", "-c", "import os; print(os.environ.get('RAY_ADDRESS'))"], launcher=BashLauncher(), uses_pipes=False
    )
    assert "Ray version" not in ran.metadata and ran.completed
