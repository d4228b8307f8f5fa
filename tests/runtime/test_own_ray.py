"""A Ray that a payload starts itself: what it takes by default, and what the user is told of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dagster_rayslurm.runtime.node.resources import NodeResources
from dagster_rayslurm.runtime.payload import environment
from dagster_rayslurm.runtime.ray.ray_node import granted_defaults

from .test_supervisor import Runtime

GIB = 2**30
HERE = NodeResources("c1", num_cpus=4, num_gpus=0, memory=64 * GIB, memory_limit=8 * GIB)


def test_what_a_raylet_counts_stands_in_its_command_line() -> None:
    command = b"raylet\0--raylet_name=x\0--static_resource_list=node:10.0.0.1,1.0,CPU,64,memory,1024,accelerator_type:H200,1\0"
    assert environment.raylet_resources(command) == {
        "node:10.0.0.1": 1.0,
        "CPU": 64.0,
        "memory": 1024.0,
        "accelerator_type:H200": 1.0,
    }
    assert (
        environment.raylet_resources(b"raylet\0")
        == {}
        == environment.raylet_resources(b"raylet\0--static_resource_list=CPU,many\0")
    )


@pytest.mark.parametrize(
    ("resources", "has_cluster", "words"),
    [
        ({"CPU": 4.0, "memory": 4.0 * GIB, "object_store_memory": 2.0 * GIB}, False, None),
        ({}, False, None),
        ({"CPU": 4.0}, True, ["its launcher's cluster idles", "ray.init()"]),
        ({"CPU": 64.0}, True, ["its launcher's cluster idles", "64 CPUs and node c1 grants 4"]),
        ({"CPU": 64.0, "memory": 150.0 * GIB}, False, ["64 CPUs and node c1 grants 4", "150.0 GiB", "grants 8.0"]),
    ],
)
def test_the_warning_about_a_payloads_own_ray(resources: dict[str, float], has_cluster: bool, words: list[str] | None) -> None:
    said = environment.own_ray_warning(resources, HERE, has_cluster)
    assert said is None if words is None else said is not None and all(word in said for word in words)


OWN = """
import json, os, ray, sys, time
ray.init(address="local", log_to_driver=False, include_dashboard=False)
open(%r, "w").write(json.dumps({"resources": ray.cluster_resources(), "nodes": len(ray.nodes())}))
until = time.monotonic() + 60
while "own-ray" not in open(os.path.join(os.environ["RAYSLURM_RUN_DIR"], "journal.jsonl")).read():
    if time.monotonic() > until:
        sys.exit("nobody was told")
    time.sleep(0.1)
"""


@pytest.mark.ray
def test_a_ray_of_the_payloads_own_takes_what_is_granted_and_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1")
    for name, value in {"JOB_ID": "12", "NODEID": "0", "JOB_NODELIST": "localhost", "STEP_NODELIST": "localhost"}.items():
        monkeypatch.setenv("SLURM_" + name, value)
    runtime = Runtime(tmp_path)
    seen = tmp_path / "seen.json"
    runtime.add("own", OWN % str(seen), uses_ray=True)
    runtime.run("""
        from dagster_rayslurm.runtime.node import allocation
        machine.detect = lambda *_, **__: machine.NodeResources("c1", 1, 0, 2**33, 2**30)
        small = RaySpec(num_cpus=1, object_store_memory=100 * 2**20, dashboard=False, startup_timeout=60.0)
        spec = RuntimeSpec("c1", idle_timeout=60.0, ray=small, control_key="00")
        runner = supervisor.Supervisor(loop, spec, scratch.Scratch(), allocation.from_environ(os.environ), base)
        submit("own")
        when_done(loop.stop)
    """)
    assert runtime.end("own")["exit_code"] == 0
    resources: dict[str, Any] = json.loads(seen.read_text())["resources"]
    assert resources["memory"] + resources["object_store_memory"] <= 0.9 * GIB
    [told] = [record["message"] for record in runtime.records("own") if record.get("phase") == "own-ray"]
    assert "its launcher's cluster idles" in told and ("CPUs and node c1 grants 1" in told) == (resources["CPU"] > 1)


def test_defaults_are_what_is_granted() -> None:
    env = granted_defaults(HERE)
    assert env["PYTHON_CPU_COUNT"] == "4"
    memory = json.loads(env["RAY_OVERRIDE_RESOURCES"])["memory"] + int(env["RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES"])
    assert memory == int(0.9 * 8 * GIB)
    unlimited = granted_defaults(NodeResources("c1", 4, 0, GIB, None))
    assert set(unlimited) == {"PYTHON_CPU_COUNT"}
