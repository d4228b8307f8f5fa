"""When an earlier attempt made the same request, and which job runs its payload."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from dagster_rayslurm import BashLauncher, SlurmQueueConfig, SlurmResource
from dagster_rayslurm.backends.base import Step
from dagster_rayslurm.backends.batch import BatchBackend
from dagster_rayslurm.backends.ownership import reattachable_job, same_request
from dagster_rayslurm.environments import InheritedEnvironment
from dagster_rayslurm.errors import FailureKind, RunFailure
from dagster_rayslurm.execution.run import start_errors
from dagster_rayslurm.plan import make_plan
from dagster_rayslurm.runtime.protocol.record import JOURNAL, PAYLOAD, RUNTIME, encode
from dagster_rayslurm.slurm.submit import JOB_SCRIPT
from dagster_rayslurm.ssh.local import LocalConnection

from ..fake_slurm import FakeSlurm
from .lines import Log

SCRIPT = "#!/bin/sh\n# rayslurm: run {run}\n#SBATCH --comment='run {run}'\n#SBATCH --time={time}\nsrun x\n"


def files(run: str = "a", time: str = "5", key: str = "k", cpus: int = 1, argv: str = "python") -> dict[str, bytes]:
    return {
        PAYLOAD: json.dumps({"argv": [argv], "run_id": run, "want_cpus": cpus}).encode(),
        RUNTIME: json.dumps({"cluster_id": "c", "control_key": key, "control_ports": [len(key)]}).encode(),
        JOB_SCRIPT: SCRIPT.format(run=run, time=time).encode(),
    }


def test_caller_and_random_keys_are_ignored() -> None:
    assert same_request(files(), files(run="b", key="other", cpus=2))


@pytest.mark.parametrize("other", [{"time": "6"}, {"argv": "sh"}])
def test_another_request_is_different(other: dict[str, str]) -> None:
    assert not same_request(files(**other), files())


@pytest.mark.parametrize("damaged", [PAYLOAD, RUNTIME, JOB_SCRIPT])
@pytest.mark.parametrize("content", [b"", b"{"])
def test_a_damaged_file_is_different(damaged: str, content: bytes) -> None:
    assert not same_request({**files(), damaged: content}, files())


START: dict[str, Any] = {"type": "start", "allocation": {"job_id": "12"}}


def end(**fields: Any) -> dict[str, Any]:
    return {"type": "end", "nonce": "n", "reason": "exit", "exit_code": 0, **fields}


@pytest.mark.parametrize(
    ("records", "other", "job"),
    [
        pytest.param([], {}, "13", id="waits"),
        pytest.param([START], {}, "13", id="runs"),
        pytest.param([START], {"time": "6"}, None, id="something else runs"),
        pytest.param([START, end()], {}, "12", id="has succeeded unheard, whatever Slurm still knows"),
        pytest.param([START, end()], {"time": "6"}, None, id="something else has succeeded"),
        pytest.param([START, end(exit_code=1)], {}, None, id="has failed"),
        pytest.param([START, end(reason="terminated")], {}, None, id="was ended"),
        pytest.param([START, end(reason="terminated"), START], {}, "13", id="runs again after a requeue"),
        pytest.param([START, end(nonce="another")], {}, "13", id="another one has ended"),
    ],
)
def test_a_job_is_found_for_the_same_request_only(
    records: list[dict[str, Any]], other: dict[str, str], job: str | None, tmp_path: Path
) -> None:
    for name, content in {**files(**other), JOURNAL: b"".join(map(encode, records))}.items():
        (tmp_path / name).write_bytes(content)
    log = logging.getLogger("test")
    assert reattachable_job(LocalConnection(), str(tmp_path), "n", files(), lambda _: "13", log) == job
    missing = str(tmp_path / "swept")
    assert reattachable_job(LocalConnection(), missing, "n", files(), lambda _: "13", log) is None


def test_a_job_that_slurm_runs_again_is_found(tmp_path: Path) -> None:
    ended = {**files(), JOURNAL: encode(START) + encode(end(reason="terminated"))}
    for name, content in ended.items():
        (tmp_path / name).write_bytes(content)
    found = reattachable_job(LocalConnection(), str(tmp_path), "n", files(), lambda _: "13", Log(), requeue=True)
    assert found == "13", "the job waits to run again"


@pytest.mark.parametrize("patience", [60.0, 0.0])
def test_a_retry_waits_for_a_slurm_that_is_away(patience: float, tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    """The job of the attempt before may go on, so that a new one might be a second one."""
    log, away = Log(), "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
    slurm = SlurmResource(remote_base=str(tmp_path / "base"))
    backend = BatchBackend(slurm, SlurmQueueConfig(), InheritedEnvironment(), None, patience)
    plan = make_plan(payload_path=["true"], launcher=BashLauncher(), nonce="0" * 12, max_output_bytes=1, max_stdio_bytes=1)
    step, run_dir = Step("r", "s", None, log), tmp_path / "base" / "runs" / "r-s-n"
    run_dir.mkdir(parents=True)
    _, request, content = backend._prepare(plan, str(run_dir), step)
    for name in (*content, JOURNAL):
        (run_dir / name).write_bytes(content.get(name, b""))
    fake_slurm.job(7, request.job_name)
    fake_slurm.fault("squeue", away, times=2)
    if patience:
        assert backend.can_reattach(plan, str(run_dir), step)
        assert len([line for line in log.lines if "trying again" in line]) == 1
    else:
        with pytest.raises(RunFailure, match="squeue did not answer") as caught, start_errors():
            backend.can_reattach(plan, str(run_dir), step)
        assert (caught.value.kind, caught.value.allow_retries) == (FailureKind.SUBMISSION, True)
