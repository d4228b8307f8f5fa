"""`cleanup_cluster` ends the job of the cluster that it is given, and nobody else's."""

from pathlib import Path

import pytest

from dagster_rayslurm import ComputeResource, SlurmResource
from dagster_rayslurm.backends import batch
from dagster_rayslurm.backends.sessions import backend

from ..fake_slurm import FakeSlurm

NONCE = "0123456789ab"
OTHERS = {1: "my-train-job", 2: f"my-job-{NONCE}", 3: "rayslurm-train-0123456789ff", 4: f"rayslurm-train-{NONCE}-copy"}


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    slurm = FakeSlurm(tmp_path / "slurm", monkeypatch)
    for job_id, name in {**OTHERS, 7: f"rayslurm-train-{NONCE}"}.items():
        slurm.job(job_id, name)
    for module in (batch, backend):
        monkeypatch.setattr(module, "connection_to", lambda _: slurm.connection)
    return slurm


@pytest.fixture
def compute(slurm: FakeSlurm, tmp_path: Path) -> ComputeResource:
    resource = SlurmResource(remote_base=str(tmp_path / "base"))
    return ComputeResource(mode="slurm", slurm=resource, pre_deployed_env_path="/opt/ray")


@pytest.mark.parametrize("word", ["slurm-train", "slurm-0", "slurm-ab", "slurm-", "", NONCE, f"slurm-{NONCE}\n", "slurm-job"])
def test_an_invalid_cluster_id_cancels_nothing(word: str, compute: ComputeResource, slurm: FakeSlurm) -> None:
    assert not compute.cleanup_cluster(word)
    assert slurm.cancelled == []


def test_only_the_job_of_the_cluster_is_cancelled(compute: ComputeResource, slurm: FakeSlurm) -> None:
    assert compute.cleanup_cluster(f"slurm-{NONCE}")
    assert slurm.cancelled == ["7"]
    assert not compute.cleanup_cluster(f"slurm-{NONCE}")
