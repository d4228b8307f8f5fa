"""Fractional GPUs: several actors share one GPU, each with a part of it."""

import os
from pathlib import Path

import dagster as dg

from dagster_rayslurm import ComputeResource, RayLauncher, SlurmQueueConfig, SlurmResource, SSHConnectionResource

compute = ComputeResource(
    mode=os.environ.get("RAYSLURM_MODE", "local"),
    slurm=SlurmResource(
        ssh=SSHConnectionResource.from_env(),
        queue=SlurmQueueConfig(partition="gpu", cpus_per_node=2, gpus_per_node=2, mem="3G"),
    ),
    pre_deployed_env_path=os.environ.get("RAYSLURM_ENV_PATH"),
    # A machine without GPUs counts them all the same, in local mode, and the log says so.
    default_launcher=RayLauncher(num_cpus_per_node=2, num_gpus_per_node=2, object_store_memory_gb=0.25, dashboard=False),
)


@dg.asset
def shared_gpus(context: dg.AssetExecutionContext, compute: ComputeResource) -> dg.MaterializeResult:
    """Models that are too small for a GPU of their own."""
    run = compute.run(
        context=context,
        payload_path=Path(__file__).parent / "payloads" / "fractional_gpus.py",
        extras={"models": 6, "share": 0.3},
        requires=[{"GPU": 0.3}] * 6,  # Three on each GPU: a part comes from one GPU, and a tenth of each is left over.
    )
    return run.get_materialize_result()


defs = dg.Definitions(assets=[shared_gpus], resources={"compute": compute})
