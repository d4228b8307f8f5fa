"""Dagster is killed without a word, in each phase: what it had begun comes to its own end, and the next run is clean."""

import os
import signal
import time

import dagster as dg
import psutil
import pytest

from ..conftest import wait_until
from ..slurm.fixtures import Site
from .scenarios import (
    AFTER,
    CASES,
    Dagster,
    dagster_on_slurm,  # noqa: F401 - a fixture
    has_ended,
    held_in,
    is_there,
    let_go,
    numbers,
    run_dirs,
    submitted,
)

pytestmark = pytest.mark.timeout(200)

GOES_ON = "going on with "

UNDER_WAY = ("cluster-start", "running", "ending")
"""Phases in which a session has accepted the payload; before, it is the session that is found again."""

WITHOUT_A_JOB = ("connecting", "uploading", "submitting")
"""Phases in which Slurm has not heard of anything yet, nor ever will."""


def old(site: Site) -> None:
    """Let all that there is be as old as may be kept, and unswept."""
    site.sh('find "$1/runs" -exec touch -h -d "15 days ago" {} +; rm -f "$1"/.swept*', site.base)


def quiet(site: Site) -> bool:
    """Whether no job of a single run is left; sessions wait for others."""
    return not [job for job in site.jobs() if job not in site.submitted()]


def one_result(dagster: Dagster, killed: str) -> None:
    """The asset has one materialization, of the last run, which shows and has all that the payload said."""
    run = dagster.runs()[-1]
    assert dagster.materializations() == [run.run_id] and run.parent_run_id == killed
    assert numbers("\n".join(dagster.output(run.run_id))) == list(range(AFTER))
    assert f"messages {list(range(AFTER))}" in dagster.log and dagster.log.count("messages [0, 1,") == 1


@pytest.mark.parametrize(("mode", "phase"), CASES)
def test_dagster_is_killed(mode: str, phase: str, dagster: Dagster, site: Site) -> None:
    """A retry goes on with the job that is there, and begins anew where there is none: one job, one result, all it said."""
    with held_in(phase, dagster, mode) as held:
        os.killpg(held.process.pid, signal.SIGKILL)
        held.process.wait()
        if phase in WITHOUT_A_JOB:
            # What Dagster was about to do ends with its connection, so letting it on comes too late.
            assert wait_until(lambda: not [each for each in site.processes("edge") if site.base in each], 20)
            held.let_on()
            time.sleep(1)
            assert submitted(site) == [] and len(run_dirs(site)) <= (phase == "submitting")
        killed = dagster.mark_failed()
        seen = numbers("\n".join(dagster.output(killed)))
        assert seen == list(range(len(seen))) and dagster.materializations() == []
        dagster.define(mode, **held.fields)
        retry = dagster.start(retry_of=killed)
        if phase in UNDER_WAY or (phase not in WITHOUT_A_JOB and mode != "slurm-session"):
            assert wait_until(lambda: GOES_ON in dagster.log or retry.poll() is not None, 60)
            assert GOES_ON in dagster.log, dagster.log[-4000:]
        held.let_on()
        let_go(site)
        assert retry.wait(90) == 0, dagster.log[-5000:]
    one_result(dagster, killed)
    assert len(submitted(site)) == len(site.lines("ran")) == 1
    if phase == "submitting":  # A run directory that nothing came of is swept when it is old.
        old(site)
        assert dagster.start().wait(90) == 0
    assert wait_until(lambda: run_dirs(site) == [], 20), run_dirs(site)
    assert wait_until(lambda: quiet(site), 20), site.sh("squeue --me")


@pytest.mark.parametrize("mode", ["slurm", "slurm-hetjob"])
def test_something_else_is_asked_for_after_that(mode: str, dagster: Dagster, site: Site) -> None:
    """A retry that asks for something else has its own job; what was left behind is named, ends, and is swept when old."""
    with held_in("running", dagster, mode) as held:
        os.killpg(held.process.pid, signal.SIGKILL)
        held.process.wait()
        (first,) = submitted(site)
        killed = dagster.mark_failed()
        dagster.define(mode, queue={"time_limit": "00:04:00"})
        retry = dagster.start(retry_of=killed)
        assert wait_until(lambda: f"Slurm job {first} goes on with what" in dagster.log, 60), dagster.log[-4000:]
        let_go(site)
        assert retry.wait(90) == 0, dagster.log[-4000:]
    one_result(dagster, killed)
    assert len(submitted(site)) == len(site.lines("ran")) == 2
    assert wait_until(lambda: quiet(site), 20), site.sh("squeue --me")
    assert len(run_dirs(site)) == 1 and has_ended(site)
    old(site)
    assert dagster.start().wait(90) == 0
    assert wait_until(lambda: run_dirs(site) == [], 20), run_dirs(site)


@pytest.mark.parametrize("mode", ["slurm", "slurm-session"])
def test_the_process_of_a_step_is_killed(mode: str, dagster: Dagster, site: Site) -> None:
    """Dagster retries the step of a process that crashed, which goes on with its payload: one result, and one job."""
    with held_in("running", dagster, mode, executor="multiprocess", retries=1) as held:
        step = next(each for each in psutil.Process(held.process.pid).children(True) if "spawn_main" in " ".join(each.cmdline()))
        step.kill()
        assert wait_until(lambda: GOES_ON in dagster.log, 60), dagster.log[-4000:]
        let_go(site)
        assert held.process.wait(90) == 0, dagster.log[-4000:]
    (run,) = dagster.runs()
    assert run.status == dg.DagsterRunStatus.SUCCESS and dagster.materializations() == [run.run_id]
    assert f"messages {list(range(AFTER))}" in dagster.log and dagster.log.count("messages [0, 1,") == 1
    assert len(submitted(site)) == len(site.lines("ran")) == 1
    assert wait_until(lambda: quiet(site), 20), site.sh("squeue --me")


@pytest.mark.parametrize("mode", ["slurm", "slurm-session"])
def test_the_process_of_a_run_is_killed(mode: str, dagster: Dagster, site: Site) -> None:
    """A step whose run's process is gone takes its payload to the end, reports it once, and ends, too."""
    with held_in("running", dagster, mode, executor="multiprocess") as held:
        os.kill(held.process.pid, signal.SIGKILL)
        held.process.wait()
        let_go(site)
        assert wait_until(lambda: dagster.materializations(), 60), dagster.log[-4000:]
    (run,) = dagster.runs()
    assert dagster.materializations() == [run.run_id] and run.status != dg.DagsterRunStatus.SUCCESS
    assert site.lines("ran") == submitted(site)[:1] and is_there(site, "up")
    assert wait_until(lambda: quiet(site), 20), site.sh("squeue --me")
