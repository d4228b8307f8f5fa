"""A session with partitions: the runs of a backfill share one warm allocation and its Ray cluster."""

import os
from pathlib import Path

import dagster as dg

from dagster_rayslurm import (
    ComputeResource,
    RayLauncher,
    SessionConfig,
    SlurmQueueConfig,
    SlurmResource,
    SSHConnectionResource,
)

compute = ComputeResource(
    mode="slurm-session" if os.environ.get("RAYSLURM_MODE", "local") != "local" else "local",
    slurm=SlurmResource(
        ssh=SSHConnectionResource.from_env(),
        queue=SlurmQueueConfig(num_nodes=2, cpus_per_node=2, mem="3G"),
    ),
    pre_deployed_env_path=os.environ.get("RAYSLURM_ENV_PATH"),
    default_launcher=RayLauncher(object_store_memory_gb=0.25, dashboard=False),
    enable_cluster_reuse=True,
    session=SessionConfig(name="months", idle_timeout=120, max_concurrent_payloads=2),
)

MONTHS = dg.StaticPartitionsDefinition([f"2026-{month:02d}" for month in range(1, 13)])


@dg.asset(partitions_def=MONTHS)
def monthly(context: dg.AssetExecutionContext, compute: ComputeResource) -> dg.MaterializeResult:
    """One month. The first run waits for the queue and the cluster, and the others start at once."""
    payload = Path(__file__).parent / "payloads" / "session_partitions.py"
    return compute.run(context=context, payload_path=payload).get_materialize_result()


defs = dg.Definitions(assets=[monthly], resources={"compute": compute})
