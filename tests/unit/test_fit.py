"""Whether a payload fits a session: every field of a launcher and of a queue has a say."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_rayslurm import BashLauncher, RayLauncher, SlurmQueueConfig
from dagster_rayslurm.fit import (
    Offer,
    Wish,
    make_offer,
    misfit,
    offer_from_json,
    offer_to_json,
    payload_time_limit,
    wants,
)
from dagster_rayslurm.launchers import Launcher
from dagster_rayslurm.slurm.request import make_request


def offer(launcher: Launcher, reuse: bool = True, **queue: Any) -> Offer:
    asked = SlurmQueueConfig(**queue)
    request = make_request(asked, launcher.footprint(), job_name="x", comment="")
    return make_offer(launcher.ray_spec(), reuse, asked, request)


def wish(launcher: Launcher, **queue: Any) -> Wish:
    own = SlurmQueueConfig(**queue) if queue else None
    return Wish(launcher.ray_spec(), launcher.footprint(), own, own is not None)


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
    resource_queue = Wish(None, (), SlurmQueueConfig(time_limit="30"), time_limited=False)
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
    for made in (offer(RayLauncher(**RAY), **QUEUE), offer(BashLauncher(), reuse=False)):
        assert offer_from_json(json.loads(json.dumps(offer_to_json(made)))) == made


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.dictionaries(st.text(), inner)))
def test_anything_else_is_no_offer(content: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        offer_from_json(content)
