"""How long the record of a job that is over is waited for."""

import pytest

from dagster_rayslurm.backends.slurm_job import settling
from dagster_rayslurm.follow.follower import OUT_OF_SIGHT
from dagster_rayslurm.slurm.states import JobView

LOST = JobView("lost")


def over(state: str = "", exit_code: int | None = None) -> JobView:
    return JobView("ended", state, exit_code=exit_code)


@pytest.mark.parametrize("view", [over(exit_code=3), over(exit_code=0), over("FAILED", 3), over("FAILED"), over("COMPLETED")])
def test_a_runtime_that_came_to_its_own_end_has_written_one(view: JobView) -> None:
    """It is waited for as long as a network file system may hide it; less if there may be no record at all."""
    assert settling(view, started=True, recorded=True) == settling(view, started=True, recorded=False) == OUT_OF_SIGHT
    assert 10 <= settling(view, started=False, recorded=True) <= 20


@pytest.mark.parametrize("view", [over(exit_code=137), over("CANCELLED", 3), over("NODE_FAIL"), over("TIMEOUT", 143), LOST])
@pytest.mark.parametrize("recorded", [False, True])
def test_one_that_was_ended_may_have_written_nothing(view: JobView, recorded: bool) -> None:
    assert settling(view, started=True, recorded=recorded) < 5
    assert settling(view, started=False, recorded=recorded) < 5


def test_where_nobody_reads_a_record_none_is_waited_for() -> None:
    assert settling(over("FAILED"), started=False, recorded=False) == 0
    assert settling(over(exit_code=1), started=False, recorded=False) < 5
