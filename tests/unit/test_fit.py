"""Whether a payload fits a session: every field of a launcher and of a queue has a say."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_rayslurm import BashLauncher, HetComponent, RayLauncher, SlurmQueueConfig
from dagster_rayslurm.backends.sessions.matching import (
    Capacity,
    Requirements,
    across_rooms,
    alike,
    make_offer,
    misfit,
    offer_from_json,
    offer_to_json,
    payload_time_limit,
    wants,
)
from dagster_rayslurm.components import Component, arrange, ray_across, request_for, settle
from dagster_rayslurm.launchers import Launcher
from dagster_rayslurm.runtime.protocol.spec import RaySpec
from dagster_rayslurm.slurm.request import make_request


def offer(launcher: Launcher, reuse: bool = True, **queue: Any) -> Capacity:
    asked = SlurmQueueConfig(**queue)
    request = make_request(asked, launcher.footprint(), job_name="x", comment="")
    return make_offer(launcher.ray_spec(), reuse, asked, request)


def wish(launcher: Launcher, **queue: Any) -> Requirements:
    own = SlurmQueueConfig(**queue) if queue else None
    return Requirements(launcher.ray_spec(), launcher.footprint(), own, own is not None)


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
        # What is the payload's own.
        ({"preload": ["json"], "grace_period": 99, "startup_timeout": 999, "working_dir": "/tmp"}, True),
    ],
    ids=str,
)
def test_a_warm_cluster_is_enough_or_not(wanted: dict[str, Any], fits: bool) -> None:
    problem = misfit(wish(RayLauncher(**wanted)), offer(RayLauncher(**RAY), num_nodes=2))
    assert (problem is None) == fits, problem
    if not fits:
        assert problem and f"RayLauncher.{next(iter(wanted))}=" in problem and "\n" not in problem


def test_what_slurm_grants_is_not_known_here() -> None:
    """A launcher without wishes has a cluster of all that there is; how much that is the session itself knows."""
    assert misfit(wish(RayLauncher(num_cpus_per_node=64)), offer(RayLauncher())) is None
    problem = misfit(wish(RayLauncher(num_cpus_per_node=64)), offer(RayLauncher(), cpus_per_node=8))
    assert problem == "RayLauncher.num_cpus_per_node=64 is more than the session was given on each node: 8 CPUs"
    assert "0 GPUs" in (misfit(wish(RayLauncher(num_gpus_per_node=1)), offer(RayLauncher())) or "")
    by_words = offer(RayLauncher(), extra_sbatch=["--gres=gpu:2"])
    assert misfit(wish(RayLauncher(num_gpus_per_node=1)), by_words) is None
    assert misfit(wish(BashLauncher(num_cpus=3)), offer(BashLauncher(num_cpus=2))) is not None


def test_without_reuse_each_payload_has_its_own_cluster() -> None:
    fresh = offer(RayLauncher(), reuse=False, num_nodes=2)
    assert misfit(wish(RayLauncher(labels={"x": "y"}, dashboard=False, auth="disabled", min_nodes=2)), fresh) is None
    assert "min_nodes=3" in (misfit(wish(RayLauncher(min_nodes=3)), fresh) or "")
    assert misfit(wish(RayLauncher()), offer(BashLauncher(), reuse=False)) is None
    assert "no Ray cluster" in (misfit(wish(RayLauncher()), offer(BashLauncher())) or "")


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
def test_a_queue_of_the_runs_own(wanted: dict[str, Any], fits: bool) -> None:
    problem = misfit(wish(BashLauncher(), **wanted), offer(BashLauncher(), **QUEUE))
    assert (problem is None) == fits, problem
    assert fits or f"SlurmQueueConfig.{next(iter(wanted))}=" in (problem or "")


def test_a_payloads_own_time_limit() -> None:
    session = offer(BashLauncher(), **QUEUE)
    assert payload_time_limit(wish(BashLauncher(), time_limit="30"), session) == 1800
    # It has as long as the session then, of which some has gone by.
    assert payload_time_limit(wish(BashLauncher(), time_limit="02:00:00"), session) is None
    assert payload_time_limit(wish(BashLauncher()), session) is None
    resource_queue = Requirements(None, (), SlurmQueueConfig(time_limit="30"), time_limited=False)
    assert payload_time_limit(resource_queue, session) is None and misfit(resource_queue, session) is None


def test_what_a_payload_claims_beside_others() -> None:
    default = RayLauncher(num_cpus_per_node=4)
    session = offer(default, cpus_per_node=8)
    assert wants(wish(default), session) == (None, None)  # Ray divides the cluster between those who take it as it is.
    assert wants(wish(RayLauncher(num_cpus_per_node=2)), session) == (2, None)
    assert wants(wish(BashLauncher(num_cpus=3, num_gpus=0)), session) == (3, 0)
    assert wants(wish(BashLauncher()), session) == (None, None)
    assert wants(wish(default), offer(default, reuse=False, cpus_per_node=8)) == (4, None)


def test_an_offer_is_read_as_it_was_written() -> None:
    for made in (offer(RayLauncher(**RAY), **QUEUE), offer(BashLauncher(), reuse=False), across(), across(reuse=False)):
        assert offer_from_json(json.loads(json.dumps(offer_to_json(made)))) == made


@pytest.mark.parametrize("field", ["ray", "reuse", "queue", "components"])
@pytest.mark.parametrize("value", [None, 1, "x", [1], [{"component_id": "a"}], [{"component_id": "a", "queue": {}}], {"x": 1}])
def test_a_damaged_offer_is_none(field: str, value: Any) -> None:
    for made in (offer(RayLauncher(**RAY), **QUEUE), across()):
        data = offer_to_json(made)
        if value != data[field] and (field, value) != ("ray", None):
            with pytest.raises((ValueError, TypeError)):
                offer_from_json({**data, field: value})
    data = offer_to_json(across())
    for rooms in (data["components"] * 2, [{**data["components"][0], "more": 1}], [{**data["components"][0], "component_id": 1}]):
        with pytest.raises((ValueError, TypeError)):
            offer_from_json({**data, "components": rooms})


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.dictionaries(st.text(), inner)))
def test_anything_else_is_no_offer(content: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        offer_from_json(content)


# ---- Components

CPU = {"partition": "p", "num_nodes": 2, "cpus_per_node": 8, "mem": "8G"}
GPU = {"partition": "g", "cpus_per_node": 4, "gpus_per_node": 2, "mem": "16G"}


def component(name: str, queue: dict[str, Any], head: bool = False, **launcher: Any) -> HetComponent:
    return HetComponent(component_id=name, queue=SlurmQueueConfig(**queue), launcher=RayLauncher(**launcher), head=head)


def settled(launcher: Launcher, *components: HetComponent) -> tuple[Component, ...]:
    own = launcher.component_id if isinstance(launcher, RayLauncher) else None
    return settle(launcher, arrange(components, own))


BOTH = (component("cpu", CPU), component("gpu", GPU, resources={"disk": 2.0}))


def across(launcher: Launcher = RayLauncher(), *components: HetComponent, reuse: bool = True) -> Capacity:  # noqa: B008
    parts = settled(launcher, *(components or BOTH))
    request = request_for(parts, job_name="x", comment="")
    return make_offer(ray_across(launcher, parts), reuse, parts[0].queue, request, parts)


def wish_across(launcher: Launcher, *components: HetComponent, head: str | None = None, own: bool = True) -> Requirements:
    parts = settled(launcher, *(components or BOTH))
    return Requirements(ray_across(launcher, parts), launcher.footprint(), time_limited=own, components=parts, head=head)


def test_a_payload_takes_the_components_that_there_are() -> None:
    for reuse in (True, False):
        assert misfit(wish_across(RayLauncher(), own=False), across(reuse=reuse)) is None
        assert misfit(wish_across(BashLauncher(), own=False), across(reuse=reuse)) is None
        assert misfit(wish_across(RayLauncher(min_nodes=3), own=False), across(RayLauncher(min_nodes=3), reuse=reuse)) is None
    assert wants(wish_across(RayLauncher()), across()) == (None, None)
    # What nodes of several kinds are to have is no amount for each of them.
    assert wants(wish_across(RayLauncher(num_cpus_per_node=2)), across()) == (None, None)
    assert wants(wish_across(RayLauncher(num_cpus_per_node=2)), across(reuse=False)) == (None, None)
    assert wants(wish_across(BashLauncher(num_cpus=2)), across()) == (2, None)


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ([component("cpu", CPU)], None),  # What there is besides is in nobody's way.
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
def test_components_of_a_payloads_own(wanted: list[HetComponent], says: str | None) -> None:
    problem = misfit(wish_across(RayLauncher(), *wanted), across())
    assert (problem is None) == (says is None), problem
    assert says is None or (problem and says in problem and "\n" not in problem)


def test_what_is_the_clusters_is_compared_as_ever() -> None:
    assert "RayLauncher.dashboard=False is not" in (misfit(wish_across(RayLauncher(dashboard=False)), across()) or "")
    # What the launcher says of each node is what the components have that do not say it themselves.
    problem = misfit(wish_across(RayLauncher(num_cpus_per_node=6), own=False), across())
    assert problem == ("component 'gpu': RayLauncher.num_cpus_per_node=6 is more than the session was given on each node: 4 CPUs")
    several = (component("cpu", CPU, num_cpus_per_node=2), component("gpu", GPU))
    assert misfit(wish_across(RayLauncher(num_cpus_per_node=4), *several, own=False), across(RayLauncher(), *several)) is None
    # Each has a cluster of its own.
    fresh = across(reuse=False)
    assert misfit(wish_across(RayLauncher(dashboard=False, labels={"x": "y"})), fresh) is None
    assert "num_cpus_per_node=6" in (misfit(wish_across(RayLauncher(num_cpus_per_node=6)), fresh) or "")
    assert "more than the session's 3 nodes" in (
        misfit(wish_across(RayLauncher(min_nodes=4), component("cpu", {"num_nodes": 4, "mem": "8G"})), fresh) or ""
    )


def test_where_the_payload_runs() -> None:
    at_gpu = RayLauncher(component_id="gpu")
    assert misfit(wish_across(at_gpu, head="gpu"), across(at_gpu)) is None
    assert misfit(wish_across(RayLauncher(component_id="cpu"), head="cpu"), across()) is None
    for reuse in (True, False):
        problem = misfit(wish_across(at_gpu, head="gpu", own=False), across(reuse=reuse))
        assert problem and "RayLauncher.component_id='gpu'" in problem and "is in component 'cpu'" in problem
    # The payload's own process is where the head is, whichever component it would have that in.
    assert misfit(wish_across(BashLauncher(num_gpus=1), own=False), across(at_gpu)) is None
    problem = misfit(wish_across(BashLauncher(num_gpus=1), own=False), across())
    assert problem == "component 'cpu': BashLauncher.num_gpus=1 is more than the session was given on each node: 0 GPUs"
    assert "num_cpus=8" in (misfit(wish_across(BashLauncher(num_cpus=8), own=False), across(at_gpu)) or "")


def test_nodes_of_one_kind_and_of_several() -> None:
    problem = misfit(wish_across(RayLauncher()), offer(RayLauncher()))
    assert problem == "components: the session has none, and the payload asks for 'cpu', 'gpu'"
    problem = misfit(wish(RayLauncher()), across())
    assert problem and problem.startswith("components: the session has 'cpu', 'gpu', and the payload asks for nodes")


def test_a_time_limit_of_components() -> None:
    hour = across(RayLauncher(), component("cpu", {**CPU, "time_limit": "01:00:00"}))
    short = component("cpu", {**CPU, "time_limit": "30"})
    assert payload_time_limit(wish_across(RayLauncher(), short), hour) == 1800
    assert payload_time_limit(wish_across(RayLauncher(), short, own=False), hour) is None


def test_a_cluster_of_its_own_spans_all_components() -> None:
    some = wish_across(RayLauncher(), component("gpu", {}, labels={"a": "b"})).ray
    spread = across_rooms(some, across(reuse=False))
    assert spread is not None and [each.component_id for each in spread.components] == ["cpu", "gpu"]
    assert spread.components[1].labels == {"a": "b"}
    assert across_rooms(None, across()) is None
    assert across_rooms(RayLauncher().ray_spec(), offer(RayLauncher())) == RayLauncher().ray_spec()


def test_what_is_alike() -> None:
    assert alike(across(), across(RayLauncher(startup_timeout=9)))
    assert not alike(across(), across(RayLauncher(component_id="gpu")))
    assert not alike(across(), across(RayLauncher(), *BOTH[:1]))


def test_a_simulated_cluster_has_components_and_no_allocation() -> None:
    here = Capacity(across().ray, True, None)
    assert misfit(Requirements(wish_across(RayLauncher()).ray, ()), here) is None
    assert misfit(Requirements(wish_across(RayLauncher(min_nodes=2)).ray, ()), here) is None
    assert "min_nodes=3" in (misfit(Requirements(wish_across(RayLauncher(min_nodes=3)).ray, ()), here) or "")
    assert "component_id='gpu'" in (misfit(Requirements(wish_across(RayLauncher()).ray, (), head="gpu"), here) or "")
    assert "has no 'x'" in (misfit(Requirements(wish_across(RayLauncher(), component("x", {})).ray, ()), here) or "")
    assert "asks for none" in (misfit(Requirements(RayLauncher().ray_spec(), ()), here) or "")
    assert "has no 'cpu'" in (misfit(Requirements(wish_across(RayLauncher()).ray, ()), Capacity(RaySpec(), True, None)) or "")
