"""The shape of reinforcement learning: a learner on a GPU and rollouts on a Ray cluster of their own, in one Slurm job."""

import os
import secrets
from pathlib import Path

import dagster as dg

from dagster_rayslurm import (
    BashLauncher,
    ComputeResource,
    HetComponent,
    RayLauncher,
    SlurmQueueConfig,
    SlurmResource,
    SSHConnectionResource,
)

PAYLOADS = Path(__file__).parent / "payloads"

compute = ComputeResource(
    mode="slurm-hetjob" if os.environ.get("RAYSLURM_MODE", "local") != "local" else "local",
    topology="separate",
    slurm=SlurmResource(ssh=SSHConnectionResource.from_env()),
    pre_deployed_env_path=os.environ.get("RAYSLURM_ENV_PATH"),
    components=[
        HetComponent(
            component_id="learner",
            queue=SlurmQueueConfig(partition="gpu", cpus_per_node=1, gpus_per_node=1, mem="2G"),
            launcher=BashLauncher(),
        ),
        HetComponent(
            component_id="rollouts",
            queue=SlurmQueueConfig(partition="compute", cpus_per_node=2, mem="3G"),
            launcher=RayLauncher(num_cpus_per_node=2, object_store_memory_gb=0.25, dashboard=False),
        ),
    ],
)


@dg.asset
def policy(context: dg.AssetExecutionContext, compute: ComputeResource) -> dg.MaterializeResult:
    """A policy that has learned which lever pays best. Both payloads start together, and end together."""
    run = compute.run(
        context=context,
        payload_path={"learner": PAYLOADS / "learner.py", "rollouts": PAYLOADS / "rollouts.py"},
        extras={"port": 20_000 + int(context.run.run_id[:4], 16) % 10_000, "steps": 30},
        secret_env={"ROLLOUTS_KEY": secrets.token_hex()},
    )
    return run.get_materialize_result()


defs = dg.Definitions(assets=[policy], resources={"compute": compute})
