"""When an earlier attempt made the same request, and which job runs its payload."""

import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from dagster_rayslurm import BashLauncher, RayLauncher, SlurmQueueConfig, SlurmResource
from dagster_rayslurm.backends.base import Step
from dagster_rayslurm.backends.batch import BatchBackend
from dagster_rayslurm.backends.ownership import REQUEST_FILE, reattachable_job
from dagster_rayslurm.environments import InheritedEnvironment, PreDeployedEnvironment
from dagster_rayslurm.errors import FailureKind
from dagster_rayslurm.execution.run import start_errors
from dagster_rayslurm.failures import RunFailure
from dagster_rayslurm.plan import make_plan
from dagster_rayslurm.runtime.protocol.record import JOURNAL, encode
from dagster_rayslurm.ssh.local import LocalConnection

from ..fake_slurm import FakeSlurm
from .lines import Log

START: dict[str, Any] = {"type": "start", "allocation": {"job_id": "12"}}


def end(**fields: Any) -> dict[str, Any]:
    return {"type": "end", "nonce": "n", "reason": "exit", "exit_code": 0, **fields}


@pytest.mark.parametrize(
    ("records", "same", "job"),
    [
        pytest.param([], True, "13", id="waits"),
        pytest.param([START], True, "13", id="runs"),
        pytest.param([START], False, None, id="something else runs"),
        pytest.param([START, end()], True, "12", id="has succeeded unheard, whatever Slurm still knows"),
        pytest.param([START, end()], False, None, id="something else has succeeded"),
        pytest.param([START, end(exit_code=1)], True, None, id="has failed"),
        pytest.param([START, end(reason="terminated")], True, None, id="was ended"),
        pytest.param([START, end(reason="terminated"), START], True, "13", id="runs again after a requeue"),
        pytest.param([START, end(nonce="another")], True, "13", id="another one has ended"),
    ],
)
def test_a_job_is_found_for_the_same_request_only(
    records: list[dict[str, Any]], same: bool, job: str | None, tmp_path: Path
) -> None:
    (tmp_path / JOURNAL).write_bytes(b"".join(map(encode, records)))
    (tmp_path / REQUEST_FILE).write_bytes(b"this" if same else b"another")
    log = logging.getLogger("test")
    assert reattachable_job(LocalConnection(), str(tmp_path), "n", b"this", lambda _: "13", log) == job
    missing = str(tmp_path / "swept")
    assert reattachable_job(LocalConnection(), missing, "n", b"this", lambda _: "13", log) is None


@pytest.mark.parametrize(
    ("other", "same"),
    [({}, True), ({"run_id": "b"}, True), ({"argv": ["sh"]}, False), ({"num_nodes": 2}, False), ({"preload": ["json"]}, False)],
)
def test_what_tells_requests_apart(other: dict[str, Any], same: bool, tmp_path: Path) -> None:
    def asked(run_id: str = "a", argv: Any = ("true",), num_nodes: int = 1, preload: Any = ()) -> bytes:
        slurm, queue = SlurmResource(remote_base=str(tmp_path / "base")), SlurmQueueConfig(num_nodes=num_nodes)
        launcher = RayLauncher(preload=list(preload))
        backend = BatchBackend(slurm=slurm, queue=queue, environment=PreDeployedEnvironment(path=sys.prefix), patience=0.0)
        plan = make_plan(payload_path=list(argv), launcher=launcher, nonce="n", max_output_bytes=1, max_stdio_bytes=1)
        return backend._prepare(plan, "/run", Step(run_id, "s", None, Log()))[2][REQUEST_FILE]

    assert (asked() == asked(**other)) == same


def test_a_job_that_slurm_runs_again_is_found(tmp_path: Path) -> None:
    (tmp_path / JOURNAL).write_bytes(encode(START) + encode(end(reason="terminated")))
    (tmp_path / REQUEST_FILE).write_bytes(b"this")
    found = reattachable_job(LocalConnection(), str(tmp_path), "n", b"this", lambda _: "13", Log(), requeue=True)
    assert found == "13", "the job waits to run again"


@pytest.mark.parametrize("patience", [60.0, 0.0])
def test_a_retry_waits_for_a_slurm_that_is_away(patience: float, tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    """The job of the attempt before may go on, so that a new one might be a second one."""
    log, away = Log(), "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
    slurm = SlurmResource(remote_base=str(tmp_path / "base"))
    backend = BatchBackend(slurm=slurm, queue=SlurmQueueConfig(), environment=InheritedEnvironment(), patience=patience)
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
