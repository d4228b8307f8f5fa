"""Ray Train: several workers train one network with PyTorch, and a later run goes on from the last checkpoint."""

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
    default_launcher=RayLauncher(num_cpus_per_node=2, object_store_memory_gb=0.25, dashboard=False),
)


class Training(dg.Config):
    """How long, and on how many workers."""

    epochs: int = 4
    workers: int = 2


@dg.asset
def network(context: dg.AssetExecutionContext, config: Training, compute: ComputeResource) -> dg.MaterializeResult:
    """A network with its checkpoints in the data directory; materialize it with more epochs, and it is trained further."""
    run = compute.run(
        context=context,
        payload_path=Path(__file__).parent / "payloads" / "torch_train.py",
        extras={"epochs": config.epochs, "workers": config.workers},
        requires=[{"CPU": 1}] * config.workers,
    )
    return run.get_materialize_result()


defs = dg.Definitions(assets=[network], resources={"compute": compute})
