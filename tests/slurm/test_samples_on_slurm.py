"""The samples of dagster-slurm's page on Ray, on the stack's nodes: with an environment, and no more CPUs than there are."""

from pathlib import Path

import pytest

from ..local.test_samples import ASSET, RESOURCE, check_training, load, write_entrypoint
from ..stack.access import Stack


@pytest.mark.parametrize("nodes", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_the_samples_run_in_a_session(tmp_path: Path, stack: Stack, monkeypatch: pytest.MonkeyPatch, nodes: int) -> None:
    for name, value in {**stack.env, "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    write_entrypoint(tmp_path, monkeypatch)
    resource = (
        RESOURCE.replace('partition="compute"', f'partition="gpu", num_nodes={nodes}').replace("=32", "=2").replace("=4", "=2")
    )
    resource = resource.replace('ray_version="2.9.3"', "object_store_memory_gb=0.2")
    resource = resource.replace(
        "enable_cluster_reuse", f'pre_deployed_env_path="{stack.env["RAYSLURM_ENV_PATH"]}", enable_cluster_reuse'
    )
    compute, asset = load(resource)["compute"], load(ASSET.replace("=16", "=2"))["train_model"]
    try:
        cluster_id = check_training(compute, asset)
        assert check_training(compute, asset) == cluster_id
        assert stack.exec("edge", ["squeue", "--noheader", "--user=dev", "--format=%D"]).split() == [str(nodes)]
        assert compute.cleanup_cluster(cluster_id)
    finally:
        stack.exec("edge", ["scancel", "--quiet", "--user=dev"])
