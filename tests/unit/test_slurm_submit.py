"""What follows from the answer to a submission; files that a job needs are sent again if somebody removed them."""

import shutil
from pathlib import Path

import pytest

from dagster_rayslurm import BashLauncher
from dagster_rayslurm.backends.payload_files import deliver, pack, required_files
from dagster_rayslurm.plan import make_plan
from dagster_rayslurm.slurm.shared_queue import ClusterClock
from dagster_rayslurm.slurm.submit import JOB_SCRIPT, NextStep, RequiredFiles, SubmissionRefused, next_step, submit
from dagster_rayslurm.ssh.base import Completed, ConnectionLost

from ..fake_slurm import FakeSlurm, job_request
from .lines import Log

FILES = {JOB_SCRIPT: b"#!/bin/sh"}
REFUSED = b"sbatch: error: Batch job submission failed: Invalid partition name specified"
BUSY = b"sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"


@pytest.mark.parametrize(
    ("answer", "step", "at_last"),
    [
        (Completed(0, b"17.5\n12\n", b""), NextStep.DONE, NextStep.DONE),
        (Completed(0, b"17.5\nwelcome\n12;cluster\n", b""), NextStep.DONE, NextStep.DONE),
        (Completed(0, b"17.5\nqueued\n", b""), NextStep.FIND, NextStep.FIND),
        (Completed(1, b"", REFUSED), NextStep.REFUSE, NextStep.REFUSE),
        (Completed(1, b"", BUSY), NextStep.FIND_OR_REPEAT, NextStep.FIND),
        (Completed(1, b"", b"the site's own words"), NextStep.FIND, NextStep.FIND),
        (Completed(137, b"", b""), NextStep.FIND, NextStep.FIND),
        (Completed(70, b"", b"Read-only file system"), NextStep.REFUSE, NextStep.REFUSE),
        (Completed(127, b"", b"sh: sbatch: not found"), NextStep.REFUSE, NextStep.REFUSE),
        (Completed(79, b"", b""), NextStep.SEND_FILES, NextStep.REFUSE),
        (ConnectionLost("it broke"), NextStep.FIND_OR_REPEAT, NextStep.FIND),
        (TimeoutError("too long"), NextStep.FIND, NextStep.FIND),
    ],
)
def test_a_job_that_may_exist_is_looked_for(answer: Completed | OSError, step: NextStep, at_last: NextStep) -> None:
    """Only a refusal in sbatch's own words, or an sbatch that was not called, makes it certain that there is no job."""
    assert [next_step(answer, claim, 1) for claim in (False, True)] == [step, step]
    assert next_step(answer, False, 0) == at_last


def test_a_directory_that_another_process_made_stops_only_a_claim() -> None:
    assert [next_step(Completed(78, b"", b""), claim, 1) for claim in (True, False)] == [NextStep.STOP, NextStep.FIND]


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

    run_dir, request, clock = base / "sessions" / "s" / "1", job_request("n", "c"), ClusterClock(slurm.connection)
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
        submit(slurm.connection, str(tmp_path / "runs" / "1"), FILES, job_request("n", "c"), clock, print, needs=needs)
    assert tries and not slurm.jobs()
