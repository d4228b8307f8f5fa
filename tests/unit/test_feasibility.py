"""`feasible` against all ways to place bundles, and `run(requires=…)`, which refuses what the nodes could never hold."""

import itertools
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagster_rayslurm import (
    BashLauncher,
    ComputeResource,
    HetComponent,
    RayLauncher,
    SessionConfig,
    SlurmQueueConfig,
    SlurmResource,
    feasible,
)
from dagster_rayslurm.call import Call, prepare
from dagster_rayslurm.compute_fields import ComputeFields

from ..conftest import run_asset
from ..fake_slurm import FakeSlurm

STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
BUNDLES = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "CPU": st.sampled_from([0, 0.5, 1, 2, 3]),
            "GPU": st.sampled_from([0, 0.3, 0.4, 0.5, 0.6, 0.7, 1, 2]),
            "disk": st.sampled_from([0.25, 1]),
            "labels": st.dictionaries(st.just("zone"), st.sampled_from(["a", "!a", "in(a, b)", "!in(a,b)"])),
        },
    ),
    max_size=5,
)
NODES = st.lists(
    st.fixed_dictionaries(
        {"CPU": st.integers(0, 4)},
        optional={
            "GPU": st.integers(0, 3),
            "disk": st.sampled_from([0.5, 1, 2]),
            "labels": st.dictionaries(st.just("zone"), st.sampled_from(["a", "b", "c"])),
        },
    ),
    max_size=3,
)
ZONES: dict[str, tuple[str | None, ...]] = {"a": ("a",), "!a": ("b", "c", None), "in(a, b)": ("a", "b"), "!in(a,b)": ("c", None)}


def tenths(bundle: dict[str, Any], name: str) -> int:
    return round(100 * bundle.get(name, 0))


def node_holds(bundles: list[dict[str, Any]], node: dict[str, Any]) -> bool:
    """Whether one node holds these bundles, by trying every choice of GPUs for each."""
    zone = node.get("labels", {}).get("zone")
    if any(zone not in ZONES[each["labels"]["zone"]] for each in bundles if each.get("labels")):
        return False
    if any(sum(tenths(each, name) for each in bundles) > tenths(node, name) for name in ("CPU", "disk")):
        return False
    gpus = range(node.get("GPU", 0))

    def choices(bundle: dict[str, Any]) -> list[dict[int, int]]:
        whole, part = divmod(tenths(bundle, "GPU"), 100)
        found = []
        for chosen in itertools.permutations(gpus, whole + bool(part)):
            found.append(dict.fromkeys(chosen[:whole], 100) | ({chosen[-1]: part} if part else {}))
        return found

    for chosen in itertools.product(*map(choices, bundles)):
        if all(sum(each.get(gpu, 0) for each in chosen) <= 100 for gpu in gpus):
            return True
    return False


def holds(bundles: list[dict[str, Any]], strategy: str, nodes: list[dict[str, Any]]) -> bool:
    """The same question, by trying every node for every bundle."""
    for places in itertools.product(range(len(nodes)), repeat=len(bundles)):
        if strategy == "STRICT_PACK" and len(set(places)) > 1:
            continue
        if strategy == "STRICT_SPREAD" and len(set(places)) < len(places):
            continue
        there = [[bundle for bundle, place in zip(bundles, places, strict=True) if place == at] for at in range(len(nodes))]
        if all(node_holds(own, node) for own, node in zip(there, nodes, strict=True)):
            return True
    return False


@settings(max_examples=400)
@given(BUNDLES, st.sampled_from(STRATEGIES), NODES)
def test_the_answer_is_that_of_trying_everything(bundles: Any, strategy: str, nodes: Any) -> None:
    assert feasible(bundles, strategy, nodes) is holds(bundles, strategy, nodes)


@pytest.mark.parametrize(
    ("bundles", "strategy", "nodes", "answer"),
    [
        ([{"GPU": 0.6}] * 3, "PACK", [{"GPU": 2}], False),
        ([{"GPU": 0.5}] * 4, "PACK", [{"GPU": 2}], True),
        ([{"GPU": part} for part in (0.3, 0.3, 0.7, 0.7)], "STRICT_PACK", [{"GPU": 2}], True),
        ([{"TPU": 0.6}] * 3, "PACK", [{"TPU": 2}], False),
        ([{"CPU": 0.6}] * 3, "PACK", [{"CPU": 2}], True),
        ([{"CPU": 0.1}] * 3, "PACK", [{"CPU": 0.3}], True),  # In binary, three times 0.1 is more than 0.3.
        ([{"CPU": 2}, {"CPU": 3}, {"CPU": 3}], "PACK", [{"CPU": 4}, {"CPU": 4}], False),
        ([{"CPU": 1}, {"CPU": 1, "disk": 1}], "STRICT_SPREAD", [{"CPU": 1, "disk": 1}, {"CPU": 1}], True),
        ([], "STRICT_PACK", [], True),
        ([{}], "PACK", [], False),
        ([{"CPU": 1, "labels": {"component": "gpu"}}], "SPREAD", [{"CPU": 1, "labels": {"component": "cpu"}}], False),
    ],
)
def test_examples(bundles: Any, strategy: str, nodes: Any, answer: bool) -> None:
    assert feasible(bundles, strategy, nodes) is answer


@pytest.mark.parametrize(
    ("bundles", "strategy", "answer"),
    [
        ([{"CPU": 1, "GPU": 1}] * 4096, "PACK", True),
        ([{"CPU": 1, "GPU": 1}] * 4097, "PACK", False),
        ([{"GPU": 3}] * 1025, "PACK", False),  # Enough GPUs in all, but only one such bundle fits on a node.
        ([{"GPU": 4}] * 1024, "STRICT_SPREAD", True),
        ([{"GPU": 1}] * 1025, "STRICT_SPREAD", False),
        ([{"CPU": 1}] * 9, "STRICT_PACK", False),
    ],
)
def test_a_thousand_nodes(bundles: Any, strategy: str, answer: bool) -> None:
    began = time.process_time()
    assert feasible(bundles, strategy, [{"CPU": 8, "GPU": 4}] * 1024) is answer
    assert time.process_time() - began < 5.0


def test_what_would_take_too_long_is_not_called_impossible() -> None:
    # Enough in all, but no way to cut these sizes: the search would try all of them.
    sizes = [{"CPU": 34 + place / 100} for place in range(58)]
    began = time.process_time()
    assert feasible(sizes, "PACK", [{"CPU": 101}] * 20)
    assert time.process_time() - began < 20.0


@pytest.mark.parametrize(
    ("bundles", "strategy", "nodes", "says"),
    [
        ([{"CPU": "2"}], "PACK", [], r"bundles\[0\]: CPU='2' is no amount of a resource"),
        ([{}, {"CPU": -1}], "PACK", [], r"bundles\[1\]: CPU=-1 is no amount"),
        ([{}], "PACK", [{"CPU": float("nan")}], r"nodes\[0\]: CPU=nan is no amount"),
        ([3], "PACK", [], r"bundles\[0\]: 3 is no dictionary"),
        ([{"labels": {"a": 1}}], "PACK", [], r"labels=\{'a': 1\} is no dictionary of texts"),
        ([], "PACKED", [], "'PACKED' is no placement strategy of Ray; write PACK, SPREAD, STRICT_PACK, STRICT_SPREAD"),
    ],
)
def test_invalid_questions_are_refused(bundles: Any, strategy: str, nodes: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        feasible(bundles, strategy, nodes)


# ---- run(requires=…)

GPU = HetComponent(component_id="gpu", queue=SlurmQueueConfig(num_nodes=2, gpus_per_node=4, cpus_per_node=8, mem="32G"))
CPU = HetComponent(
    component_id="cpu", queue=SlurmQueueConfig(cpus_per_node=64, mem="64G"), launcher=RayLauncher(labels={"z": "1"})
)


def refused(compute: ComputeFields, requires: Any, **arguments: Any) -> str | None:
    """Why a call is refused before submission; None if it is not."""
    try:
        prepare(Call(compute, payload_path=["true"], requires=requires, **arguments), "nonce")
    except ValueError as error:
        return str(error)
    return None


def cluster(launcher: Any = None, mode: str = "slurm", **queue: Any) -> ComputeResource:
    slurm = SlurmResource(queue=SlurmQueueConfig(**queue))
    return ComputeResource(mode=mode, slurm=slurm, default_launcher=launcher or RayLauncher())


@pytest.mark.parametrize(
    ("compute", "requires", "says"),
    [
        (
            cluster(num_nodes=4, gpus_per_node=4),
            [{"GPU": 1}, {"GPU": 8}],
            "requires[1]: {GPU: 8} fits on no node: each of the 4 nodes has GPU 4; raise SlurmQueueConfig.gpus_per_node or "
            "RayLauncher.num_gpus_per_node, or require less",
        ),
        (cluster(num_nodes=4, gpus_per_node=4), [{"GPU": 1}] * 16, None),
        (
            cluster(num_nodes=4, gpus_per_node=4),
            {"STRICT_SPREAD": [{"GPU": 1}] * 5},
            "requires: 5 bundles (STRICT_SPREAD), {GPU: 1}, {GPU: 1}, {GPU: 1}, {GPU: 1}, …, do not fit at once (each of the 4 "
            "nodes: GPU 4); ask for more or larger nodes, or require less",
        ),
        (cluster(RayLauncher(max_workers=1), num_nodes=4, gpus_per_node=4), [{"GPU": 1}] * 9, "9 bundles (PACK)"),
        (cluster(), [{"CPU": 500}], None),  # Slurm chooses the CPUs, and nobody knows them yet.
        (cluster(exclusive=True, cpus_per_node=2), [{"CPU": 500, "GPU": 8}], None),
        (cluster(extra_sbatch=["--gres=gpu:8"]), [{"GPU": 8}], None),
        (cluster(cpus_per_node=64), [{"GPU": 1}], "the node has GPU 0; raise SlurmQueueConfig.gpus_per_node"),
        (cluster(RayLauncher(num_cpus_per_node=2), cpus_per_node=64), [{"CPU": 3}], "the node has CPU 2; raise"),
        (cluster(mem="10G"), [{"memory": 9.5 * 2**30}], "raise SlurmQueueConfig.mem"),
        (cluster(mem="10G"), [{"memory": 8.5 * 2**30}], None),
        (cluster(RayLauncher(resources={"disk": 2})), [{"disk": 1}, {"disk": 1}], None),
        (cluster(RayLauncher(resources={"disk": 2})), [{"disc": 1}], "the node has disc 0; raise RayLauncher.resources"),
        (cluster(RayLauncher(labels={"z": "1"})), [{"labels": {"z": "2"}}], "the node has label z = 1; see RayLauncher.labels"),
        (cluster(), [{"accelerator_type:A100": 0.001, "node:10.0.0.1": 0.1, "TPU": 4, "labels": {"ray.io/zone": "a"}}], None),
        (cluster(RayLauncher(ray_args=["--labels=z=2"])), [{"labels": {"z": "2"}}], None),
        (
            ComputeResource(mode="slurm-hetjob", slurm=SlurmResource(), components=[CPU, GPU]),
            [{"GPU": 1, "CPU": 16}],
            "requires[0]: {GPU: 1, CPU: 16} fits on no node: the node of component 'cpu' has CPU 64, GPU 0; each of the 2 nodes "
            "of component 'gpu' has CPU 8, GPU 4; ask for more, or require less",
        ),
        (
            ComputeResource(mode="slurm-hetjob", slurm=SlurmResource(), components=[CPU, GPU]),
            [{"GPU": 4, "component:gpu": 1, "labels": {"component": "gpu"}}, {"labels": {"z": "1"}}] * 2,
            None,
        ),
        (
            ComputeResource(mode="slurm-session", slurm=SlurmResource(), session=SessionConfig(num_nodes=3)),
            {"STRICT_SPREAD": [{"CPU": 0.1}] * 4},
            "each of the 3 nodes",
        ),
        (cluster(BashLauncher()), [{"CPU": 1}], "requires: the launcher starts no Ray cluster"),
        (cluster(), {"PAKC": [{"CPU": 1}]}, "'PAKC' is no placement strategy of Ray"),
        (cluster(), "GPU", "requires: 'GPU' is no list of bundles"),
        (ComputeResource(default_launcher=RayLauncher(num_gpus_per_node=2)), [{"GPU": 2}], None),
        (ComputeResource(default_launcher=RayLauncher(num_gpus_per_node=2)), [{"GPU": 3}], "the node has GPU 2"),
        (ComputeResource(), [{"CPU": 100000}], "requires[0]: {CPU: 100000} fits on no node: the node has CPU "),
        (ComputeResource(components=[CPU, GPU]), [{"GPU": 5}], "the node of component 'gpu' has GPU 4"),
        (ComputeResource(components=[CPU, GPU], topology="separate"), [{"GPU": 5}], "requires: with topology='separate'"),
    ],
)
def test_what_the_nodes_could_never_hold_is_refused(compute: ComputeResource, requires: Any, says: str | None) -> None:
    problem = refused(compute, requires)
    assert (problem is None) if says is None else says in (problem or ""), problem


def test_nothing_is_submitted(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    slurm = SlurmResource(remote_base=str(tmp_path / "base"), queue=SlurmQueueConfig(cpus_per_node=1))
    failure = run_asset(ComputeResource(mode="slurm", slurm=slurm), ["true"], requires=[{"CPU": 2}]).failure
    assert failure.kind == "configuration" and "requires[0]: {CPU: 2} fits on no node" in str(failure.description)
    assert not fake_slurm.jobs() and not (tmp_path / "base").exists()
