"""A launcher made for a cluster runs on a small machine: Ray counts CPUs and GPUs that are not there."""

import os
from pathlib import Path
from typing import Any

import pytest

from dagster_rayslurm import BashLauncher, ComputeResource, HetComponent, RayLauncher, SlurmQueueConfig

from ..conftest import pipes_script, run_asset, small_ray

pytestmark = [pytest.mark.timeout(300)]

CPUS = (os.cpu_count() or 1) + 14

LOOK = pipes_script("""
    import os, ray
    ray.init(address="auto", log_to_driver=False)

    @ray.remote(num_cpus=3, num_gpus=2)
    def where():
        return [os.environ["CUDA_VISIBLE_DEVICES"], os.environ["RAY_prestart_worker_first_driver"]]

    pipes.report_asset_materialization(metadata={"seen": {"type": "json", "raw_value": {
        "resources": ray.cluster_resources(), "task": ray.get(where.remote()),
    }}})
""")


def check_look(ran: Any) -> None:
    seen = ran.metadata["seen"]
    assert (seen["resources"]["CPU"], seen["resources"]["GPU"]) == (CPUS, 2)
    gpus, prestarted = seen["task"]
    assert len(gpus.split(",")) == 2 and prestarted == "0"
    assert seen["resources"]["memory"] < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.ray
def test_ray_counts_cpus_and_gpus_that_are_not_there(base: Path, script: Any, capfd: pytest.CaptureFixture[str]) -> None:
    launcher = small_ray(num_cpus_per_node=CPUS, num_gpus_per_node=2)
    check_look(run_asset(ComputeResource(local_base=str(base), default_launcher=launcher), script(LOOK)))
    said = [line for line in capfd.readouterr().err.splitlines() if "no device is behind them" in line]
    assert len(said) == 1 and f"Ray counts {CPUS} CPUs and 2 GPUs" in said[0], said


@pytest.mark.ray
@pytest.mark.thorough
def test_a_payload_that_is_too_large_for_the_warm_cluster_gets_a_simulated_one(base: Path, script: Any) -> None:
    """The warm cluster has what the machine has, and goes on beside it."""
    warm = ComputeResource(local_base=str(base), default_launcher=small_ray(), enable_cluster_reuse=True)
    plain = script(pipes_script("import ray\nray.init()"), "plain.py")
    first = run_asset(warm, plain)
    second = run_asset(warm, script(LOOK), launcher=small_ray(num_cpus_per_node=CPUS, num_gpus_per_node=2))
    check_look(second)
    third = run_asset(warm, plain)
    own, large, again = (ran.completed[0].cluster_id for ran in (first, second, third))
    assert own == again != large
    for cluster_id in (own, large):
        assert warm.cleanup_cluster(cluster_id)


@pytest.mark.ray
@pytest.mark.thorough
@pytest.mark.parametrize("topology", ["spanning", "separate"])
def test_components_may_be_larger_than_the_machine(base: Path, script: Any, topology: str) -> None:
    launcher = small_ray(num_cpus_per_node=CPUS, num_gpus_per_node=2)
    fields = {} if topology == "separate" else {"default_launcher": launcher}
    own = launcher if topology == "separate" else RayLauncher()
    large = HetComponent(component_id="large", queue=SlurmQueueConfig(), launcher=own)
    check_look(run_asset(ComputeResource(local_base=str(base), topology=topology, components=[large], **fields), script(LOOK)))


@pytest.mark.parametrize("launcher", [RayLauncher(num_cpus_per_node=CPUS), BashLauncher(num_cpus=CPUS)])
def test_strict_refuses_what_the_machine_lacks(base: Path, launcher: Any) -> None:
    strict = ComputeResource(local_base=str(base), default_launcher=launcher, local_resources="strict")
    (failure,) = run_asset(strict, ["true"]).failures
    assert failure.kind == "configuration"
    assert failure.description is not None and failure.description.endswith('set ComputeResource(local_resources="simulate")')


def test_a_payload_without_ray_runs_with_what_there_is(compute: ComputeResource, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_asset(compute, ["true"], launcher=BashLauncher(num_cpus=CPUS), uses_pipes=False).completed
    assert f"num_cpus={CPUS} asks for more than node" in capfd.readouterr().err
