"""What would be submitted, as a person asks for it: outside of a run, where Dagster has resolved no variables."""

import dagster as dg
import pytest

from dagster_rayslurm import BashLauncher, ComputeResource, RunFailure, SessionConfig, SlurmQueueConfig, SlurmResource


@pytest.mark.parametrize("mode", ["slurm", "slurm-session"])
def test_job_script_resolves_variables_of_the_resource(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = SlurmQueueConfig(partition=dg.EnvVar("TEST_PARTITION"), num_nodes=dg.EnvVar.int("TEST_NODES"))
    compute = ComputeResource(
        mode=mode,
        slurm=SlurmResource(remote_base="/base", queue=queue),
        default_launcher=BashLauncher(),
        session=SessionConfig(name=dg.EnvVar("TEST_NAME")),
    )
    with pytest.raises(RunFailure, match="partition: the environment variable TEST_PARTITION is not set"):
        compute.job_script(payload_path=["true"])
    for name, value in (("TEST_PARTITION", "gpu"), ("TEST_NODES", "2"), ("TEST_NAME", "team")):
        monkeypatch.setenv(name, value)
    text = compute.job_script(payload_path=["true"])
    assert "--partition=gpu" in text and "--nodes=2" in text
    assert ("rayslurm-session-team-" in text) == (mode == "slurm-session")
