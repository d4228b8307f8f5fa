"""Ray Data: read rows, let a pool of actors that hold a model predict batches of them, write the result as Parquet."""

import os
from pathlib import Path

import dagster as dg

from dagster_rayslurm import ComputeResource, RayLauncher, SlurmQueueConfig, SlurmResource, SSHConnectionResource

compute = ComputeResource(
    mode=os.environ.get("RAYSLURM_MODE", "local"),
    slurm=SlurmResource(
        ssh=SSHConnectionResource.from_env(),
        queue=SlurmQueueConfig(num_nodes=2, cpus_per_node=2, mem="3G"),
    ),
    pre_deployed_env_path=os.environ.get("RAYSLURM_ENV_PATH"),
    default_launcher=RayLauncher(object_store_memory_gb=0.25, dashboard=False),
)


@dg.asset
def predictions(context: dg.AssetExecutionContext, compute: ComputeResource) -> dg.MaterializeResult:
    """A prediction for each row."""
    run = compute.run(
        context=context,
        payload_path=Path(__file__).parent / "payloads" / "batch_inference.py",
        extras={"rows": 10_000, "actors": 2},
    )
    return run.get_materialize_result()


defs = dg.Definitions(assets=[predictions], resources={"compute": compute})
