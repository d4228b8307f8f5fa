"""The samples of dagster-slurm's page on Ray, with only the import changed."""

import textwrap
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from dagster_rayslurm import ComputeResource, RayLauncher, RunFailure

RESOURCE = """
    import dagster as dg
    from dagster_rayslurm import (
        ComputeResource,
        ExecutionMode,
        RayLauncher,
        SlurmQueueConfig,
        SlurmResource,
        SSHConnectionResource,
    )

    ssh = SSHConnectionResource.from_env(prefix="SLURM_EDGE_NODE_")
    slurm = SlurmResource(
        ssh=ssh,
        queue=SlurmQueueConfig(partition="compute", qos="normal", time_limit="01:00:00"),
    )

    compute = ComputeResource(
        mode=ExecutionMode.SLURM_SESSION,
        slurm=slurm,
        default_launcher=RayLauncher(
            num_cpus_per_node=32,
            num_gpus_per_node=4,
            ray_version="2.9.3",
        ),
        enable_cluster_reuse=True,
    )
"""
ASSET = """
    import dagster as dg
    from dagster_rayslurm import ComputeResource, RayLauncher


    @dg.asset(required_resource_keys={"compute"})
    def train_model(context: dg.AssetExecutionContext) -> None:
        ray_launcher = RayLauncher(
            num_cpus_per_node=16,
            num_gpus_per_node=2,
            working_dir="ray_jobs/train_model",
        )

        completed = context.resources.compute.run(
            context=context,
            payload_path="python -m train.entrypoint",
            launcher=ray_launcher,
            extra_env={"WANDB_MODE": "offline"},
            extras={"experiment": context.run.run_id},
        )
        yield from completed.get_results()
"""
ENTRYPOINT = """
    import ray
    from dagster_pipes import PipesContext, open_dagster_pipes


    @ray.remote(num_gpus=1)
    def train_shard(config: dict[str, str]) -> dict[str, float]:
        # Real training logic goes here
        return {"loss": 0.01, "accuracy": 0.98}


    def main() -> None:
        context = PipesContext.get()
        context.log.info("Launching Ray jobs...")
        handles = [train_shard.remote({"shard": i}) for i in range(4)]
        results = ray.get(handles)
        context.report_asset_materialization(
            metadata={"shards": len(results), "max_accuracy": max(r["accuracy"] for r in results)}
        )
        context.log.info("Training complete")


    if __name__ == "__main__":
        with open_dagster_pipes():
            ray.init(address="auto")  # Connect to the cluster inside the Slurm allocation
            main()
"""


def load(sample: str) -> dict[str, Any]:
    """What a sample defines."""
    found: dict[str, Any] = {"__name__": "definitions"}
    exec(compile(textwrap.dedent(sample), "sample.py", "exec"), found)
    return found


def write_entrypoint(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The payload of the sample, where its asset looks for it."""
    package = directory / "ray_jobs" / "train_model" / "train"
    package.mkdir(parents=True)
    (package / "entrypoint.py").write_text(textwrap.dedent(ENTRYPOINT))
    monkeypatch.chdir(directory)


def check_training(compute: ComputeResource, asset: Any) -> str:
    """Materialize the sample's asset; the id of its cluster."""
    result = dg.materialize([asset], resources={"compute": compute})
    (materialization,) = result.asset_materializations_for_node("train_model")
    assert materialization.metadata["shards"].value == 4 and materialization.metadata["max_accuracy"].value == 0.98
    return str(materialization.metadata["Ray cluster ID"].value)


def test_the_resource_says_what_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no environment, and its version of Ray has no tokens."""
    monkeypatch.setenv("SLURM_EDGE_NODE_HOST", "edge")
    write_entrypoint(tmp_path, monkeypatch)
    with pytest.raises(RunFailure, match=r'Ray 2\.9\.3 has no token authentication.* set auth="disabled"'):
        load(RESOURCE)["compute"].job_script(payload_path="python -m train.entrypoint")
    text = RESOURCE.replace("ray_version=", 'auth="disabled", ray_version=')
    with pytest.raises(RunFailure, match="pre_deployed_env_path="):
        load(text)["compute"].job_script(payload_path="python -m train.entrypoint")
    made = load(text.replace("enable_cluster_reuse", 'pre_deployed_env_path="/opt/ray", enable_cluster_reuse'))["compute"]
    script = made.job_script(payload_path="python -m train.entrypoint")
    assert "--cpus-per-task=32" in script and "--qos=normal" in script


@pytest.mark.ray
@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_the_asset_trains_on_a_small_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 CPUs and 2 GPUs, whatever there is; with flags of `ray start`, on a warm cluster that is cleaned up by its id."""
    write_entrypoint(tmp_path, monkeypatch)
    flags = ["--include-dashboard=true", "--dashboard-host=0.0.0.0"]
    asset = load(ASSET.replace("working_dir=", f"ray_args={flags}, working_dir="))["train_model"]
    compute = ComputeResource(local_base=str(tmp_path / "base"), enable_cluster_reuse=True, auto_detect_platform=True)
    cluster_id = check_training(compute, asset)
    assert compute.cleanup_cluster(cluster_id)


def test_another_version_of_ray_than_there_is_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_entrypoint(tmp_path, monkeypatch)
    compute = ComputeResource(local_base=str(tmp_path / "base"), default_launcher=RayLauncher(ray_version="2.53.1"))

    @dg.asset
    def trained(context: dg.AssetExecutionContext, compute: ComputeResource) -> Any:
        return compute.run(context=context, payload_path="true", launcher=RayLauncher(ray_version="2.53.1"))

    with pytest.raises(
        RunFailure, match=r"Ray [0-9.]+ is installed for .*python.*, and ray_version asks for 2\.53\.1"
    ) as refused:
        dg.materialize([trained], resources={"compute": compute})
    assert refused.value.kind == "environment"
