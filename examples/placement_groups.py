"""Placement groups: workers side by side on one node, and workers each on a node of its own."""

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
NODE = SlurmQueueConfig(cpus_per_node=2, mem="3G")

compute = ComputeResource(
    mode=MODE,
    slurm=SlurmResource(ssh=SSHConnectionResource.from_env(), queue=SlurmQueueConfig(num_nodes=2, cpus_per_node=2, mem="3G")),
    pre_deployed_env_path=os.environ.get("RAYSLURM_ENV_PATH"),
    default_launcher=RayLauncher(object_store_memory_gb=0.25, dashboard=False),
    # On this machine, a component is a Ray node: two of them stand for the two nodes of the job.
    components=[HetComponent(component_id=name, queue=NODE) for name in ("first", "second")] if MODE == "local" else [],
)


class Groups(dg.Config):
    """How many workers each group has."""

    packed: int = 2
    spread: int = 2


@dg.asset
def placed(context: dg.AssetExecutionContext, config: Groups, compute: ComputeResource) -> dg.MaterializeResult:
    """Where the workers of both groups are. A group that the nodes could never hold is refused before a job is submitted."""
    groups = {"STRICT_PACK": [{"CPU": 1}] * config.packed, "STRICT_SPREAD": [{"CPU": 1}] * config.spread}
    run = compute.run(
        context=context,
        payload_path=Path(__file__).parent / "payloads" / "placement_groups.py",
        extras={"groups": groups},
        requires=groups,
    )
    return run.get_materialize_result()


defs = dg.Definitions(assets=[placed], resources={"compute": compute})
