"""How the nodes of a Ray cluster find its head: by a host name, or by IPv6 alone."""

import contextlib
import json
import subprocess
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dagster_rayslurm import ComputeResource

from ..conftest import pipes_script, run_asset, small_ray
from ..stack.access import Stack

LOOK = pipes_script("""
    import json, os, ray
    ray.init()
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On
    where = ray.remote(lambda: os.uname().nodename)
    found = [where.options(scheduling_strategy=On(node["NodeID"], soft=False)).remote() for node in ray.nodes()]
    pipes.report_asset_materialization(metadata={
        "head": os.environ["RAY_ADDRESS"],
        "addresses": json.dumps(sorted(node["NodeManagerAddress"] for node in ray.nodes())),
        "ran_on": json.dumps(sorted(ray.get(found))),
    })
""")
QUEUE = {"num_nodes": 2, "cpus_per_node": 2, "mem": "3G"}


def docker(*words: str) -> str:
    return subprocess.run(["docker", *words], check=True, capture_output=True, text=True, timeout=60).stdout.strip()


@pytest.fixture
def addresses(stack: Stack) -> Iterator[dict[str, str]]:
    """IPv6 addresses of the nodes, in a network that lasts for one test."""
    name = f"rayslurm-v6-{uuid.uuid4().hex[:8]}"
    nodes = {service: stack.container(service) for service in ("c1", "c2")}
    try:
        docker("network", "create", "--internal", "--ipv6", f"--subnet=fd{name[-8:-6]}:{name[-6:-2]}::/64", name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"Docker has no IPv6: {error.stderr}")
    try:
        for container in nodes.values():
            docker("network", "connect", name, container)
        form = f'{{{{(index .NetworkSettings.Networks "{name}").GlobalIPv6Address}}}}'
        yield {service: docker("inspect", f"--format={form}", container) for service, container in nodes.items()}
    finally:
        for container in nodes.values():
            with contextlib.suppress(subprocess.CalledProcessError):
                docker("network", "disconnect", name, container)
        docker("network", "rm", name)


def test_a_head_that_is_named_by_its_host(slurm_compute: Callable[..., ComputeResource], script: Any) -> None:
    ran = run_asset(slurm_compute(QUEUE, default_launcher=small_ray(head_node_address="c1")), script(LOOK))
    assert json.loads(ran.metadata["ran_on"]) == ["c1", "c2"]
    assert len(set(json.loads(ran.metadata["addresses"]))) == 2


def test_a_cluster_of_ipv6_addresses_alone(
    addresses: dict[str, str], slurm_compute: Callable[..., ComputeResource], script: Any
) -> None:
    """Of Ray's own: Slurm and the runtimes talk by IPv4 as before. Its network outlasts the job."""
    launcher = small_ray(head_node_address=addresses["c1"], dashboard=True)
    ran = run_asset(slurm_compute(QUEUE, default_launcher=launcher), script(LOOK))
    assert json.loads(ran.metadata["ran_on"]) == ["c1", "c2"]
    assert json.loads(ran.metadata["addresses"]) == sorted(addresses.values())
    assert str(ran.metadata["head"]).startswith(f"[{addresses['c1']}]:")
