"""Files that a job needs are sent again before the submission if somebody removed them."""

import shutil
from pathlib import Path

import pytest

from dagster_rayslurm import BashLauncher
from dagster_rayslurm.backends.payload_files import deliver, pack, required_files
from dagster_rayslurm.plan import make_plan
from dagster_rayslurm.slurm.request import JobRequest
from dagster_rayslurm.slurm.shared_queue import ClusterClock
from dagster_rayslurm.slurm.submit import JOB_SCRIPT, RequiredFiles, SubmissionRefused, submit

from ..fake_slurm import FakeSlurm
from .lines import Log

FILES = {JOB_SCRIPT: b"#!/bin/sh"}


@pytest.mark.parametrize("claim", [False, True], ids=["job", "session"])
def test_a_removed_base_directory_is_filled_again(claim: bool, tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    """Within the minutes in which this process does not look for what it has sent."""
    slurm, base, log = fake_slurm, tmp_path / "base", Log()
    (tmp_path / "train.py").write_text("pass")
    plan = make_plan(
        payload_path=tmp_path / "train.py", launcher=BashLauncher(), nonce="0" * 12, max_output_bytes=1, max_stdio_bytes=1
    )
    cargo = pack(plan, str(base), str(base / "data"))
    runtime = Path(deliver(slurm.connection, str(base), cargo, log))
    shutil.rmtree(base)
    assert deliver(slurm.connection, str(base), cargo, log) and not base.exists()

    run_dir, request, clock = base / "sessions" / "s" / "1", JobRequest("n", "c"), ClusterClock(slurm.connection)
    needs = required_files(slurm.connection, str(base), [cargo], log)
    done = submit(slurm.connection, str(run_dir), FILES, request, clock, log.warning, claim, needs=needs)
    assert [done.job_id] == [str(job_id) for job_id in slurm.jobs()]
    assert runtime.is_file() and all(Path(place).is_dir() for place in cargo.places(str(base)))
    assert {path.stat().st_mode & 0o077 for path in base.iterdir()} == {0}
    assert "are gone; sending them again" in "".join(log.lines)


def test_files_that_disappear_again_are_a_configuration_failure(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    slurm, tries = fake_slurm, []
    clock = ClusterClock(slurm.connection)
    needs = RequiredFiles([str(tmp_path / "gone")], lambda: tries.append(1))
    with pytest.raises(SubmissionRefused, match=r"remote_base: files that were sent to .* disappear again"):
        submit(slurm.connection, str(tmp_path / "runs" / "1"), FILES, JobRequest("n", "c"), clock, print, needs=needs)
    assert tries and not slurm.jobs()
