"""Ray Tune: many trials, of which ASHA stops the poor ones early; each result is in Dagster's log as soon as it is there."""

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


class Search(dg.Config):
    """How large the search is."""

    trials: int = 8
    iterations: int = 9


@dg.asset
def best_settings(context: dg.AssetExecutionContext, config: Search, compute: ComputeResource) -> dg.MaterializeResult:
    """The best of the trials."""
    run = compute.run(
        context=context,
        payload_path=Path(__file__).parent / "payloads" / "tune_asha.py",
        extras={"trials": config.trials, "iterations": config.iterations},
    )
    return run.get_materialize_result()


defs = dg.Definitions(assets=[best_settings], resources={"compute": compute})
