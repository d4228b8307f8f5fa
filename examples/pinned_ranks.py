"""Megatron-style training without torchrun: one actor for each GPU, with rank, local rank and device pinned."""

import os
from pathlib import Path

import dagster as dg

from dagster_rayslurm import (
    ComputeResource,
    HetComponent,
    RayLauncher,
    SlurmQueueConfig,
    SlurmResource,
    SSHConnectionResource,
)

MODE = os.environ.get("RAYSLURM_MODE", "local")
NODES, GPUS = 2, 2
QUEUE = SlurmQueueConfig(partition="gpu", num_nodes=NODES, cpus_per_node=2, gpus_per_node=GPUS, mem="3G")

compute = ComputeResource(
    mode=MODE,
    slurm=SlurmResource(ssh=SSHConnectionResource.from_env(), queue=QUEUE),
    pre_deployed_env_path=os.environ.get("RAYSLURM_ENV_PATH"),
    default_launcher=RayLauncher(object_store_memory_gb=0.25, dashboard=False),
    # On this machine, a component is a Ray node: two of them stand for the two nodes of the job.
    components=[HetComponent(component_id=f"node{each}", queue=QUEUE) for each in range(NODES)] if MODE == "local" else [],
)


@dg.asset
def pretrained(context: dg.AssetExecutionContext, compute: ComputeResource) -> dg.MaterializeResult:
    """What the ranks agreed on in an all-reduce, and where each of them was."""
    run = compute.run(
        context=context,
        payload_path=Path(__file__).parent / "payloads" / "pinned_ranks.py",
        extras={"nodes": NODES, "gpus": GPUS},
        requires={"STRICT_SPREAD": [{"GPU": GPUS}] * NODES},  # A placement group for each node fits onto it.
    )
    return run.get_materialize_result()


defs = dg.Definitions(assets=[pretrained], resources={"compute": compute})
