"""An object store that this machine has no memory for is refused in local mode before Ray starts."""

from typing import Any

import pytest

from dagster_rayslurm import ComputeResource, RayLauncher, RunFailure
from dagster_rayslurm.backends import local
from dagster_rayslurm.runtime.node.resources import NodeResources


@pytest.mark.parametrize("local_resources", ["simulate", "strict"])
@pytest.mark.parametrize(
    ("store", "says"), [(20, None), (100, r"object_store_memory_gb=100 asks for more than node n1 grants: 57\.6 GiB; lower it")]
)
def test_memory_is_never_simulated(
    local_resources: str, store: float, says: str | None, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local.resources, "detect", lambda **_: NodeResources("n1", 2, 0, 64 * 2**30, None))
    launcher = RayLauncher(object_store_memory_gb=store)
    compute = ComputeResource(local_resources=local_resources, default_launcher=launcher, local_base=str(tmp_path))
    if says is None:
        assert compute.job_script(payload_path=["true"])
    else:
        with pytest.raises(RunFailure, match=says):
            compute.job_script(payload_path=["true"])
