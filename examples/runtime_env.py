"""runtime_env: tasks get packages and modules that the environment on the cluster lacks, for this payload alone."""

import os
from pathlib import Path

import dagster as dg

from dagster_rayslurm import ComputeResource, RayLauncher, SlurmQueueConfig, SlurmResource, SSHConnectionResource

PAYLOADS = Path(__file__).parent / "payloads"

compute = ComputeResource(
    mode=os.environ.get("RAYSLURM_MODE", "local"),
    slurm=SlurmResource(
        ssh=SSHConnectionResource.from_env(),
        queue=SlurmQueueConfig(num_nodes=2, cpus_per_node=2, mem="3G"),
    ),
    pre_deployed_env_path=os.environ.get("RAYSLURM_ENV_PATH"),
    # The payload's directory is sent whole, with the directory `library` that the tasks get.
    default_launcher=RayLauncher(working_dir=str(PAYLOADS), object_store_memory_gb=0.25, dashboard=False),
)


@dg.asset
def sizes(context: dg.AssetExecutionContext, compute: ComputeResource) -> dg.MaterializeResult:
    """Sizes in words, by a package that each node installs once. Nodes without internet need an environment that has it."""
    return compute.run(context=context, payload_path=PAYLOADS / "runtime_env.py").get_materialize_result()


defs = dg.Definitions(assets=[sizes], resources={"compute": compute})
