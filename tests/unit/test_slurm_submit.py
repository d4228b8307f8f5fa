"""What follows from the answer to a submission; files that a job needs are sent again if somebody removed them."""

import pytest

from dagster_rayslurm.slurm.submit import JOB_SCRIPT, NextStep, next_step
from dagster_rayslurm.ssh.base import Completed, ConnectionLost

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
