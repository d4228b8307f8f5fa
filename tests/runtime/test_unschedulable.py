"""Demand that no node of the cluster can ever hold is reported, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dagster_rayslurm.runtime.ray.internals import misfits

from .test_supervisor import Runtime

pb = pytest.importorskip("ray.core.generated.autoscaler_pb2")
common = pytest.importorskip("ray.core.generated.common_pb2")


def node(name: str, labels: dict[str, str], **resources: float) -> Any:
    return pb.NodeState(node_id=name.encode(), total_resources=resources, labels=labels)


NODES = [
    node("c1", {"region": "north"}, **{"CPU": 2.0, "memory": 4.0 * 2**30, "node:10.0.0.1": 1.0}),
    node("c2", {}, CPU=4.0, memory=2.0 * 2**30, disk=1.0),
    pb.NodeState(node_id=b"c3", total_resources={"CPU": 99.0, "GPU": 9.0}, status=pb.DEAD),
]


def request(resources: dict[str, float], *alternatives: Any) -> Any:
    """A request; each alternative is a label, whether it must or must not have one of the values, and the values, or None."""
    selectors = [
        common.LabelSelector(
            label_constraints=[
                common.LabelSelectorConstraint(label_key=key, operator=1 if wanted else 2, label_values=values)
                for key, wanted, values in ([rule] if rule else [])
            ]
        )
        for rule in alternatives
    ]
    return pb.ResourceRequest(resources_bundle=resources, label_selectors=selectors)


def said(*requests: Any, groups: Any = ()) -> list[str]:
    pending = [pb.ResourceRequestByCount(request=each, count=1) for each in requests]
    state = pb.ClusterResourceState(node_states=NODES, pending_resource_requests=pending, pending_gang_resource_requests=groups)
    return misfits(state, {b"c1".hex(): "c1", b"c2".hex(): "c2"})


@pytest.mark.parametrize(
    "wanted",
    [
        request({"CPU": 4.0}),
        request({"CPU": 2.0, "memory": 3.0 * 2**30}),
        request({"node:10.0.0.1": 0.01}),
        request({"CPU": 1.0}, ("region", True, ["north", "south"])),
        request({"CPU": 4.0}, ("region", False, ["north"])),
        request({"CPU": 4.0}, ("region", True, ["west"]), None),
        request({"CPU_group_0_ab12": 9.0, "bundle_group_ab12": 0.1}),
    ],
)
def test_demand_that_a_node_can_hold_is_not_reported(wanted: Any) -> None:
    assert said(wanted) == []


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (request({"GPU": 1.0}), "asks for GPU 1, and no node has that (c1 has CPU 2, GPU 0; c2 has CPU 4, GPU 0)."),
        (request({"CPU": 4.0, "memory": 3.0 * 2**30}), "asks for CPU 4, memory 3.0 GiB, and no node has that"),
        (request({"CPU": 1.0, "disk": 2.0}), "c2 has CPU 4, GPU 0, disk 1"),
        (request({"CPU": 1.0}, ("region", True, ["west"])), "asks for CPU 1, label region = west, and no node"),
    ],
)
def test_demand_that_no_node_can_hold_is_reported(wanted: Any, words: str) -> None:
    [told] = said(wanted, wanted)
    assert words in told and "waits forever" in told


@pytest.mark.parametrize(
    ("strategy", "cpus", "possible"),
    [
        ("PACK", [2, 4], True),
        ("PACK", [4, 4], False),
        ("PACK", [5], False),
        ("SPREAD", [1, 1, 1], True),
        ("STRICT_SPREAD", [1, 1, 1], False),
        ("STRICT_SPREAD", [2, 4], True),
        ("STRICT_PACK", [2, 2], True),
        ("STRICT_PACK", [2, 3], False),
    ],
)
def test_placement_groups(strategy: str, cpus: list[int], possible: bool) -> None:
    bundles = [request({"CPU": float(each)}) for each in cpus]
    told = said(groups=[pb.GangResourceRequest(requests=bundles, details=f"ab12:{strategy}|PENDING")])
    assert not told if possible else (strategy in told[0] and "cannot hold" in told[0])


ASK = """
import os, ray, sys, time
from ray.util.placement_group import placement_group
ray.init(log_to_driver=False)
group = placement_group([{"CPU": 1}, {"CPU": 1}], strategy="STRICT_SPREAD")
@ray.remote(num_cpus=1)
def wait(): time.sleep(600)
calls = [wait.remote(), wait.remote(), ray.remote(num_gpus=1)(lambda: None).remote()]
until = time.monotonic() + 100
while open(os.path.join(os.environ["RAYSLURM_RUN_DIR"], "journal.jsonl")).read().count("unschedulable") < 2:
    if time.monotonic() > until:
        sys.exit("nobody was told")
    time.sleep(0.1)
"""


@pytest.mark.ray
def test_a_payload_learns_of_its_unschedulable_tasks(tmp_path: Path) -> None:
    runtime = Runtime(tmp_path)
    runtime.add("one", ASK, uses_ray=True)
    runtime.run("""
        session(ray=RaySpec(num_cpus=1, object_store_memory=100 * 2**20, dashboard=False, startup_timeout=60.0))
        submit("one")
        when_done(loop.stop)
    """)
    assert runtime.end("one")["exit_code"] == 0
    told = sorted(record["message"] for record in runtime.records("one") if record.get("phase") == "unschedulable")
    assert len(told) == 2 and "STRICT_SPREAD" in told[0] and "asks for CPU 1, GPU 1, and no node has that" in told[1]
