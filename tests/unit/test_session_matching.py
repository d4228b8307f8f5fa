"""Whether a payload fits a session: every field of a launcher and of a queue counts."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_rayslurm import BashLauncher, HetComponent, RayLauncher, SlurmQueueConfig
from dagster_rayslurm.backends.sessions.matching import (
    Capacity,
    Requirements,
    adapted,
    capacity_from_json,
    misfit,
)
from dagster_rayslurm.components import Component, arrange, merge_launchers, ray_across
from dagster_rayslurm.launchers import Launcher
from dagster_rayslurm.runtime.protocol.spec import PayloadSpec, RaySpec


def required(launcher: Launcher, **queue: Any) -> Requirements:
    return Requirements(launcher.ray_spec(), launcher.footprint(), SlurmQueueConfig(**queue), time_limited=bool(queue))


def capacity(launcher: Launcher, reuse: bool = True, **queue: Any) -> Capacity:
    return required(launcher, **queue).capacity(reuse)


def in_session(needs: Requirements, session: Capacity) -> PayloadSpec:
    return adapted(PayloadSpec(argv=["true"], nonce="n"), needs.ray, needs, session)


def claimed_resources(needs: Requirements, session: Capacity) -> tuple[int | None, int | None]:
    payload = in_session(needs, session)
    return payload.want_cpus, payload.want_gpus


def payload_time_limit(needs: Requirements, session: Capacity) -> float | None:
    return in_session(needs, session).time_limit


RAY = {
    "num_cpus_per_node": 4,
    "num_gpus_per_node": 2,
    "object_store_memory_gb": 2.0,
    "resources": {"disk": 2.0},
    "labels": {"zone": "a", "rack": "1"},
    "ray_args": ["--node-name=x"],
    "network_interface": "ib0",
    "min_nodes": 2,
}


@pytest.mark.parametrize(
    ("wanted", "fits"),
    [
        ({}, True),
        (RAY, True),
        ({"num_cpus_per_node": 4}, True),
        ({"num_cpus_per_node": 5}, False),
        ({"num_cpus_per_node": 0}, True),
        ({"num_gpus_per_node": 2}, True),
        ({"num_gpus_per_node": 3}, False),
        ({"object_store_memory_gb": 1.5}, True),
        ({"object_store_memory_gb": 2.5}, False),
        ({"resources": {"disk": 1.0}}, True),
        ({"resources": {"disk": 3.0}}, False),
        ({"resources": {"tape": 1.0}}, False),
        ({"labels": {"zone": "a"}}, True),
        ({"labels": {"zone": "b"}}, False),
        ({"ray_args": ["--node-name=y"]}, False),
        ({"network_interface": "eth0"}, False),
        ({"network_interface": "ib0"}, True),
        ({"min_nodes": 2}, True),
        ({"min_nodes": 3}, False),
        ({"dashboard": False}, False),
        ({"auth": "disabled"}, False),
        ({"ray_version": "2.60.0"}, False),
        ({"max_workers": 1}, False),
        ({"port_range": "20000-20200"}, False),
        ({"health_check": "true"}, False),
        ({"launch_style": "symmetric-run"}, False),
        # Fields of the payload itself.
        ({"preload": ["json"], "grace_period": 99, "startup_timeout": 999, "working_dir": "/tmp"}, True),
    ],
    ids=str,
)
def test_a_warm_cluster_meets_the_fields_of_a_launcher(wanted: dict[str, Any], fits: bool) -> None:
    problem = misfit(required(RayLauncher(**wanted)), capacity(RayLauncher(**RAY), num_nodes=2))
    assert (problem is None) == fits, problem
    if not fits:
        assert problem and f"RayLauncher.{next(iter(wanted))}=" in problem and "\n" not in problem


def test_memory_is_told_in_gigabytes() -> None:
    problem = misfit(required(RayLauncher(object_store_memory_gb=2.5)), capacity(RayLauncher(**RAY), num_nodes=2))
    assert problem == "RayLauncher.object_store_memory_gb=2.5 is not what the session has: 2.0"


@pytest.mark.parametrize(("wanted", "offered", "fits"), [("4:00:00", "UNLIMITED", True), ("UNLIMITED", "4:00:00", False)])
def test_a_session_without_a_time_limit(wanted: str, offered: str, fits: bool) -> None:
    own = replace(required(BashLauncher(), time_limit=wanted), time_limited=True)
    assert (misfit(own, capacity(BashLauncher(), time_limit=offered)) is None) == fits


def test_a_launcher_without_numbers_has_all_that_slurm_grants() -> None:
    assert misfit(required(RayLauncher(num_cpus_per_node=64)), capacity(RayLauncher())) is None
    problem = misfit(required(RayLauncher(num_cpus_per_node=64)), capacity(RayLauncher(), cpus_per_node=8))
    assert problem == "RayLauncher.num_cpus_per_node=64 is more than the session was given on each node: 8 CPUs"
    assert "0 GPUs" in (misfit(required(RayLauncher(num_gpus_per_node=1)), capacity(RayLauncher())) or "")
    by_words = capacity(RayLauncher(), extra_sbatch=["--gres=gpu:2"])
    assert misfit(required(RayLauncher(num_gpus_per_node=1)), by_words) is None
    assert misfit(required(BashLauncher(num_cpus=3)), capacity(BashLauncher(num_cpus=2))) is not None


def test_without_reuse_each_payload_gets_a_cluster_of_its_own() -> None:
    fresh = capacity(RayLauncher(), reuse=False, num_nodes=2)
    assert misfit(required(RayLauncher(labels={"x": "y"}, dashboard=False, auth="disabled", min_nodes=2)), fresh) is None
    assert "min_nodes=3" in (misfit(required(RayLauncher(min_nodes=3)), fresh) or "")
    assert misfit(required(RayLauncher()), capacity(BashLauncher(), reuse=False)) is None
    assert "no Ray cluster" in (misfit(required(RayLauncher()), capacity(BashLauncher())) or "")


@st.composite
def requirements(draw: st.DrawFn) -> Requirements:
    """What a launcher and a queue that agree with each other require."""
    cpus, gpus, memory = draw(st.integers(1, 64)), draw(st.integers(0, 8)), draw(st.integers(8, 256))
    nodes = draw(st.integers(1, 8))
    some = st.fixed_dictionaries
    launcher = draw(
        some(
            {},
            optional={
                "num_cpus_per_node": st.integers(0, cpus),
                "num_gpus_per_node": st.integers(0, gpus),
                "object_store_memory_gb": st.floats(0.1, memory / 4),
                "resources": st.dictionaries(st.sampled_from("ab"), st.floats(0, 4)),
                "labels": st.dictionaries(st.sampled_from("ab"), st.sampled_from("xy")),
                "min_nodes": st.integers(1, nodes),
                "dashboard": st.booleans(),
            },
        )
    )
    optional = {
        "cpus_per_node": st.just(cpus),
        "gpus_per_node": st.just(gpus),
        "partition": st.sampled_from("pq"),
        "time_limit": st.sampled_from(["00:10:00", "02:00:00", "UNLIMITED"]),
        "exclusive": st.booleans(),
        "extra_sbatch": st.just(["--nice=5"]),
    }
    memories = st.sampled_from([{}, {"mem": f"{memory}G"}, {"cpus_per_node": cpus, "mem_per_cpu": f"{memory}G"}])
    queue = {**draw(some({"num_nodes": st.just(nodes)}, optional=optional)), **draw(memories)}
    return required(RayLauncher(**launcher), **queue)


@given(requirements(), st.booleans())
def test_a_session_created_for_a_payload_fits_it(needs: Requirements, reuse: bool) -> None:
    assert misfit(needs, needs.capacity(reuse)) is None


@given(requirements(), requirements(), st.booleans(), st.integers(0, 3))
def test_more_resources_never_turn_a_fit_into_a_misfit(
    payload: Requirements, other: Requirements, reuse: bool, more: int
) -> None:
    for less in (payload.capacity(reuse), other.capacity(reuse)):
        queue = dict(less.queues[None])
        queue |= {name: queue[name] + more for name in ("num_nodes", "cpus_per_node", "gpus_per_node") if queue[name] is not None}
        names = ("num_cpus", "num_gpus", "object_store_memory")
        larger = {name: value + more for name in names if (value := getattr(less.ray, name, None)) is not None}
        greater = replace(less, ray=less.ray and replace(less.ray, **larger), queues={None: queue})
        assert misfit(payload, less) is not None or misfit(payload, greater) is None


QUEUE = {
    "partition": "p",
    "num_nodes": 4,
    "cpus_per_node": 8,
    "gpus_per_node": 2,
    "mem": "64G",
    "time_limit": "02:00:00",
    "extra_sbatch": ["--licenses=a:1", "--nice=5"],
}


@pytest.mark.parametrize(
    ("wanted", "fits"),
    [
        (QUEUE, True),
        ({"partition": "q"}, False),
        ({"num_nodes": 4}, True),
        ({"num_nodes": 5}, False),
        ({"cpus_per_node": 9}, False),
        ({"gpus_per_node": 1}, True),
        ({"gpus_per_node": 3}, False),
        ({"gpu_type": "a100", "gpus_per_node": 1}, False),
        ({"mem": "65536M"}, True),
        ({"mem": "65G"}, False),
        ({"mem": "0"}, False),
        ({"mem_per_cpu": "1G"}, False),
        ({"time_limit": "120"}, True),
        ({"time_limit": "121"}, False),
        ({"time_limit": "UNLIMITED"}, False),
        ({"exclusive": True}, False),
        ({"account": "a"}, False),
        ({"extra_sbatch": ["--nice=5"]}, True),
        ({"extra_sbatch": ["--nice=6"]}, False),
        ({"requeue": True}, True),  # Never asked for a session.
    ],
    ids=str,
)
def test_an_allocation_meets_the_fields_of_a_queue(wanted: dict[str, Any], fits: bool) -> None:
    problem = misfit(required(BashLauncher(), **wanted), capacity(BashLauncher(), **QUEUE))
    assert (problem is None) == fits, problem
    assert fits or f"SlurmQueueConfig.{next(iter(wanted))}=" in (problem or "")


def test_a_payloads_own_time_limit() -> None:
    session = capacity(BashLauncher(), **QUEUE)
    assert payload_time_limit(required(BashLauncher(), time_limit="30"), session) == 1800
    # As long as the session lives.
    assert payload_time_limit(required(BashLauncher(), time_limit="02:00:00"), session) is None
    assert payload_time_limit(required(BashLauncher()), session) is None
    resource_queue = Requirements(None, (), SlurmQueueConfig(time_limit="30"), time_limited=False)
    assert payload_time_limit(resource_queue, session) is None and misfit(resource_queue, session) is None


def test_resources_that_a_payload_claims_beside_others() -> None:
    default = RayLauncher(num_cpus_per_node=4)
    session = capacity(default, cpus_per_node=8)
    assert claimed_resources(required(default), session) == (
        None,
        None,
    )
    assert claimed_resources(required(RayLauncher(num_cpus_per_node=2)), session) == (2, None)
    assert claimed_resources(required(BashLauncher(num_cpus=3, num_gpus=0)), session) == (3, 0)
    assert claimed_resources(required(BashLauncher()), session) == (None, None)
    assert claimed_resources(required(default), capacity(default, reuse=False, cpus_per_node=8)) == (4, None)


def test_a_capacity_survives_json() -> None:
    for made in (capacity(RayLauncher(**RAY), **QUEUE), capacity(BashLauncher(), reuse=False), across(), across(reuse=False)):
        assert capacity_from_json(json.loads(json.dumps(made.to_json()))) == made


@pytest.mark.parametrize("field", ["ray", "queues"])
@pytest.mark.parametrize("value", [1, "x", [1], [["a", {"nodes": 1}]], [["a", 3]], {"x": 1}])
def test_a_damaged_capacity_is_refused(field: str, value: Any) -> None:
    for made in (capacity(RayLauncher(**RAY), **QUEUE), across()):
        with pytest.raises((ValueError, TypeError)):
            capacity_from_json({**made.to_json(), field: value})


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.dictionaries(st.text(), inner)))
def test_other_json_is_no_capacity(content: Any) -> None:
    with pytest.raises((ValueError, TypeError, KeyError)):
        capacity_from_json(content)


# ---- Components

CPU = {"partition": "p", "num_nodes": 2, "cpus_per_node": 8, "mem": "8G"}
GPU = {"partition": "g", "cpus_per_node": 4, "gpus_per_node": 2, "mem": "16G"}


def component(name: str, queue: dict[str, Any], head: bool = False, **launcher: Any) -> HetComponent:
    return HetComponent(component_id=name, queue=SlurmQueueConfig(**queue), launcher=RayLauncher(**launcher), head=head)


def settled(launcher: Launcher, *components: HetComponent) -> tuple[Component, ...]:
    own = launcher.component_id if isinstance(launcher, RayLauncher) else None
    return merge_launchers(launcher, arrange(components, own))


BOTH = (component("cpu", CPU), component("gpu", GPU, resources={"disk": 2.0}))


def across(launcher: Launcher = RayLauncher(), *components: HetComponent, reuse: bool = True) -> Capacity:  # noqa: B008
    return required_across(launcher, *components).capacity(reuse)


def required_across(launcher: Launcher, *components: HetComponent, head: str | None = None, own: bool = True) -> Requirements:
    parts = settled(launcher, *(components or BOTH))
    ray = ray_across(launcher, parts)
    return Requirements(ray, launcher.footprint(), parts[0].queue, parts, time_limited=own, head=head)


def test_a_payload_fits_the_components_of_the_default_session() -> None:
    for reuse in (True, False):
        assert misfit(required_across(RayLauncher(), own=False), across(reuse=reuse)) is None
        assert misfit(required_across(BashLauncher(), own=False), across(reuse=reuse)) is None
        assert misfit(required_across(RayLauncher(min_nodes=3), own=False), across(RayLauncher(min_nodes=3), reuse=reuse)) is None
    assert claimed_resources(required_across(RayLauncher()), across()) == (None, None)
    # Nodes of several components have no common amount.
    assert claimed_resources(required_across(RayLauncher(num_cpus_per_node=2)), across()) == (None, None)
    assert claimed_resources(required_across(RayLauncher(num_cpus_per_node=2)), across(reuse=False)) == (None, None)
    assert claimed_resources(required_across(BashLauncher(num_cpus=2)), across()) == (2, None)


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ([component("cpu", CPU)], None),  # Further components do not matter.
        ([component("gpu", GPU), component("cpu", CPU)], None),
        ([component("gpu", {}, num_gpus_per_node=2)], None),
        ([component("gpu", {}, resources={"disk": 1.0})], None),
        ([component("big", CPU)], "components: the session has no 'big'; it has 'cpu', 'gpu'"),
        ([component("cpu", {"num_nodes": 3})], "component 'cpu': SlurmQueueConfig.num_nodes=3 is not what the session has: 2"),
        ([component("gpu", {"partition": "p"})], "component 'gpu': SlurmQueueConfig.partition='p' is not"),
        ([component("cpu", {"gpus_per_node": 1})], "component 'cpu': SlurmQueueConfig.gpus_per_node=1 is not"),
        ([component("cpu", {}, num_cpus_per_node=9)], "component 'cpu': RayLauncher.num_cpus_per_node=9 is more than"),
        ([component("cpu", {}, num_gpus_per_node=1)], "component 'cpu': RayLauncher.num_gpus_per_node=1 is more than"),
        ([component("cpu", {}, resources={"disk": 1.0})], "component 'cpu': RayLauncher.resources={'disk': 1.0} is not"),
        ([component("gpu", {}, labels={"a": "b"})], "component 'gpu': RayLauncher.labels={'a': 'b'} is not"),
        ([component("gpu", {"time_limit": "02:00:00"})], "SlurmQueueConfig.time_limit='02:00:00' is not"),
    ],
    ids=str,
)
def test_an_allocation_meets_the_components_of_a_payload(wanted: list[HetComponent], says: str | None) -> None:
    problem = misfit(required_across(RayLauncher(), *wanted), across())
    assert (problem is None) == (says is None), problem
    assert says is None or (problem and says in problem and "\n" not in problem)


def test_cluster_wide_fields_are_compared_with_components_too() -> None:
    assert "RayLauncher.dashboard=False is not" in (misfit(required_across(RayLauncher(dashboard=False)), across()) or "")
    # Components take from the launcher what they leave at its default.
    problem = misfit(required_across(RayLauncher(num_cpus_per_node=6), own=False), across())
    assert problem == ("component 'gpu': RayLauncher.num_cpus_per_node=6 is more than the session was given on each node: 4 CPUs")
    several = (component("cpu", CPU, num_cpus_per_node=2), component("gpu", GPU))
    assert misfit(required_across(RayLauncher(num_cpus_per_node=4), *several, own=False), across(RayLauncher(), *several)) is None
    fresh = across(reuse=False)
    assert misfit(required_across(RayLauncher(dashboard=False, labels={"x": "y"})), fresh) is None
    assert "num_cpus_per_node=6" in (misfit(required_across(RayLauncher(num_cpus_per_node=6)), fresh) or "")
    assert "more than the session's 3 nodes" in (
        misfit(required_across(RayLauncher(min_nodes=4), component("cpu", {"num_nodes": 4, "mem": "8G"})), fresh) or ""
    )


def test_a_payload_runs_where_the_head_is() -> None:
    at_gpu = RayLauncher(component_id="gpu")
    assert misfit(required_across(at_gpu, head="gpu"), across(at_gpu)) is None
    assert misfit(required_across(RayLauncher(component_id="cpu"), head="cpu"), across()) is None
    for reuse in (True, False):
        problem = misfit(required_across(at_gpu, head="gpu", own=False), across(reuse=reuse))
        assert problem and "RayLauncher.component_id='gpu'" in problem and "is in component 'cpu'" in problem
    # The payload's own process runs where the session has its head.
    assert misfit(required_across(BashLauncher(num_gpus=1), own=False), across(at_gpu)) is None
    problem = misfit(required_across(BashLauncher(num_gpus=1), own=False), across())
    assert problem == "component 'cpu': BashLauncher.num_gpus=1 is more than the session was given on each node: 0 GPUs"
    assert "num_cpus=8" in (misfit(required_across(BashLauncher(num_cpus=8), own=False), across(at_gpu)) or "")


def test_an_allocation_with_components_and_one_without_never_fit() -> None:
    problem = misfit(required_across(RayLauncher()), capacity(RayLauncher()))
    assert problem == "components: the session has none, and the payload asks for 'cpu', 'gpu'"
    problem = misfit(required(RayLauncher()), across())
    assert problem and problem.startswith("components: the session has 'cpu', 'gpu', and the payload asks for nodes")


def test_a_time_limit_of_components() -> None:
    hour = across(RayLauncher(), component("cpu", {**CPU, "time_limit": "01:00:00"}))
    short = component("cpu", {**CPU, "time_limit": "30"})
    assert payload_time_limit(required_across(RayLauncher(), short), hour) == 1800
    assert payload_time_limit(required_across(RayLauncher(), short, own=False), hour) is None


def test_a_cluster_of_its_own_spans_all_components() -> None:
    some = required_across(RayLauncher(), component("gpu", {}, labels={"a": "b"}))
    spread = in_session(some, across(reuse=False)).ray
    assert spread is not None and [each.component_id for each in spread.components] == ["cpu", "gpu"]
    assert spread.components[1].labels == {"a": "b"}
    assert in_session(required_across(BashLauncher()), across(reuse=False)).ray is None
    fresh = capacity(RayLauncher(), reuse=False)
    assert in_session(required(RayLauncher()), fresh).ray == RayLauncher().ray_spec()
    assert in_session(required(RayLauncher()), capacity(RayLauncher())).ray is None


def test_a_simulated_cluster_has_components_and_no_allocation() -> None:
    here = Capacity(across().ray, True)
    assert misfit(Requirements(required_across(RayLauncher()).ray, ()), here) is None
    assert misfit(Requirements(required_across(RayLauncher(min_nodes=2)).ray, ()), here) is None
    assert "min_nodes=3" in (misfit(Requirements(required_across(RayLauncher(min_nodes=3)).ray, ()), here) or "")
    assert "component_id='gpu'" in (misfit(Requirements(required_across(RayLauncher()).ray, (), head="gpu"), here) or "")
    assert "has no 'x'" in (misfit(Requirements(required_across(RayLauncher(), component("x", {})).ray, ()), here) or "")
    assert "asks for none" in (misfit(Requirements(RayLauncher().ray_spec(), ()), here) or "")
    assert "has no 'cpu'" in (misfit(Requirements(required_across(RayLauncher()).ray, ()), Capacity(RaySpec(), True)) or "")
