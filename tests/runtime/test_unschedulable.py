"""Demand that no node of the cluster can ever hold is reported, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dagster_rayslurm import feasible
from dagster_rayslurm.runtime.node.worker_nodes import Identity
from dagster_rayslurm.runtime.protocol.messages import End, EndReason
from dagster_rayslurm.runtime.protocol.spec import PayloadSpec, RaySpec
from dagster_rayslurm.runtime.ray.internals import misfits
from dagster_rayslurm.runtime.ray.membership import Member, Membership, Say
from dagster_rayslurm.runtime.supervisor.supervisor import Supervisor

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


def state_of(count: int) -> Any:
    pending = [pb.ResourceRequestByCount(request=request({"GPU": 1.0}), count=count)]
    return pb.ClusterResourceState(node_states=NODES, pending_resource_requests=pending)


def said(*requests: Any, groups: Any = ()) -> list[str]:
    pending = [pb.ResourceRequestByCount(request=each, count=1) for each in requests]
    state = pb.ClusterResourceState(node_states=NODES, pending_resource_requests=pending, pending_gang_resource_requests=groups)
    return list(misfits(state, {b"c1".hex(): "c1", b"c2".hex(): "c2"}).values())


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
        (request({"GPU": 1.0}), "2 tasks or actors wait for GPU: 1 each, and the cluster has no GPU (c1 has CPU: 2, GPU: 0; c2 "),
        (
            request({"CPU": 4.0, "memory": 3.0 * 2**30}),
            "2 tasks or actors wait for CPU: 4, memory: 3.0 GiB each, and no node has that",
        ),
        (request({"CPU": 1.0, "disk": 2.0}), "c2 has CPU: 4, GPU: 0, disk: 1"),
        (request({"CPU": 1.0}, ("region", True, ["west"])), "wait for CPU: 1, label region = west each, and no node has that"),
    ],
)
def test_demand_that_no_node_can_hold_is_reported(wanted: Any, words: str) -> None:
    [told] = said(wanted, wanted)
    assert words in told and "That never starts unless the launcher and the queue" in told


def test_the_key_does_not_change_with_the_number_of_tasks() -> None:
    keys = [misfits(state_of(count), {}).keys() for count in (1, 2)]
    assert keys[0] == keys[1]
    assert next(iter(misfits(state_of(1), {}).values())).startswith("a task or actor waits for GPU: 1, and")


def test_the_key_changes_when_a_node_joins() -> None:
    """Demand that was reported while nodes were missing is reported again; only then can it end the payload."""
    before, after = state_of(1), state_of(1)
    after.node_states.append(node("c4", {}, CPU=8.0))
    assert misfits(before, {}).keys().isdisjoint(misfits(after, {}))


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
        ("SPREAD", [2, 2, 2], True),
        ("SPREAD", [3, 3], False),  # Six CPUs in all, but only one node has three.
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
gpu = ray.remote(num_gpus=1)(lambda: None)
calls = [wait.remote(), wait.remote(), *(gpu.remote() for _ in range(4))]
until = time.monotonic() + 100
while open(os.path.join(os.environ["RAYSLURM_RUN_DIR"], "journal.jsonl")).read().count("unschedulable") < 2:
    if time.monotonic() > until:
        sys.exit("nobody was told")
    time.sleep(0.1)
"""


RAY = "RaySpec(num_cpus=1, object_store_memory=100 * 2**20, dashboard=False, startup_timeout=60.0)"


@pytest.mark.ray
def test_a_payload_learns_of_its_unschedulable_tasks(tmp_path: Path) -> None:
    runtime = Runtime(tmp_path)
    runtime.add("one", ASK, uses_ray=True)
    runtime.run(f"""
        session(ray={RAY})
        submit("one")
        when_done(loop.stop)
    """)
    assert runtime.end("one")["exit_code"] == 0
    told = sorted(record["message"] for record in runtime.records("one") if record.get("phase") == "unschedulable")
    assert (
        len(told) == 2
        and "STRICT_SPREAD" in told[1]
        and "4 tasks or actors wait for CPU: 1, GPU: 1 each, and the cluster has no GPU" in told[0]
    )


class FakePayload:
    """Notes what is said to it, and how it is ended."""

    def __init__(self, fails: bool) -> None:
        self.spec = PayloadSpec(["true"], "n", fails_infeasible=fails)
        self.said: list[Any] = []

    def phase(self, name: str, message: str) -> None:
        self.said.append(message)

    def end_early(self, end: End) -> None:
        self.said.append(end.reason)


@pytest.mark.parametrize(
    ("fails", "complete", "ended"),
    [([True], True, True), ([True], False, False), ([False], True, False), ([True, False], True, False), ([], True, False)],
)
def test_only_a_payload_whose_demand_it_must_be_fails(fails: list[bool], complete: bool, ended: bool) -> None:
    payloads = [FakePayload(each) for each in fails]
    cluster: Any = SimpleNamespace(complete=complete)
    Supervisor._report_demand(cast(Any, None), cluster, cast(Any, payloads), Say("unschedulable", "no GPU"))
    assert [each.said for each in payloads] == [["no GPU", EndReason.INFEASIBLE] if ended else ["no GPU"] for _ in fails]


def test_a_cluster_is_complete_when_no_node_may_join() -> None:
    state = Membership(RaySpec(min_nodes=1), "c1", {1: Member("c2", Identity("c2", None))})
    there = {"alive": True, "head": False, "hostname": "c2", "component": None}
    assert not state.complete and replace(state, nodes={"b": there}).complete
    assert replace(state, members={1: Member("c2", given_up=True)}).complete


# Each case asks Ray for a placement group on two nodes, and prints whether it is there after some seconds.
CASES = """
import json, sys, ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group, remove_placement_group
nodes, cases = json.loads(sys.argv[1])
cluster = Cluster()
try:
    for node in nodes:
        cluster.add_node(
            num_cpus=node["CPU"], num_gpus=node.get("GPU", 0), labels=node.get("labels"), object_store_memory=80 * 2**20,
            include_dashboard=False, env_vars={"CUDA_VISIBLE_DEVICES": "0,1"},
        )
    ray.init(address=cluster.address, log_to_driver=False)
    answers = []
    for bundles, strategy in cases:
        selectors = [bundle.pop("labels", {}) for bundle in bundles]
        group = placement_group(bundles, strategy, bundle_label_selector=selectors)
        answers.append(group.wait(4))
        remove_placement_group(group)
    print("ANSWERS", json.dumps(answers))
finally:
    ray.shutdown()
    cluster.shutdown()
"""


@pytest.mark.ray
def test_feasible_says_what_ray_does() -> None:
    nodes: list[dict[str, Any]] = [{"CPU": 2, "GPU": 2}, {"CPU": 4, "labels": {"zone": "a"}}]
    cases: list[tuple[list[dict[str, Any]], str]] = [
        ([{"CPU": 2}, {"CPU": 4}], "STRICT_SPREAD"),
        ([{"CPU": 1}] * 3, "STRICT_SPREAD"),
        ([{"GPU": 0.5}] * 4, "STRICT_PACK"),
        ([{"GPU": 0.6}] * 3, "PACK"),
        ([{"CPU": 2, "labels": {"zone": "a"}}] * 2, "PACK"),
        ([{"CPU": 1, "labels": {"zone": "!a"}}] * 3, "SPREAD"),
        ([{"CPU": 3}, {"CPU": 1, "GPU": 1}], "SPREAD"),
        ([{"CPU": 3}, {"CPU": 2}], "STRICT_PACK"),
    ]
    expected = [feasible(bundles, strategy, nodes) for bundles, strategy in cases]
    assert expected == [True, False, True, False, True, False, True, False]
    command = [sys.executable, "-c", CASES, json.dumps([nodes, cases])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert f"ANSWERS {json.dumps(expected)}" in done.stdout, done.stdout + done.stderr[-3000:]
