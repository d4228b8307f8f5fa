"""Tests: Dagster is killed in each phase. The work that it started comes to its end, and the next run is clean."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import dagster as dg
import psutil
import pytest

from ..conftest import pipes_script, wait_until
from ..slurm.fixtures import Site
from .scenarios import (
    AFTER,
    CARRIERS,
    CASES,
    Dagster,
    Queued,
    dagster_on_slurm,  # noqa: F401 - a fixture
    has_ended,
    held_in,
    is_there,
    let_go,
    numbers,
    queued_in_a_session,  # noqa: F401 - a fixture
    run_dirs,
    submitted,
)

pytestmark = pytest.mark.timeout(200)

REATTACHED = "reattached to "

UNDER_WAY = ("cluster-start", "running", "ending")
"""Phases in which a session has accepted the payload. In earlier phases the next run finds the session again."""

WITHOUT_A_JOB = ("connecting", "uploading", "submitting")
"""Phases in which no job is submitted, even after Dagster's death."""

ENOUGH, BATCH = 1000, 400
"""Number of lines shown before Dagster is killed; largest number of lines that arrive at once."""

FLOWING = pipes_script("""
import os, pathlib, time
data = pathlib.Path(os.environ["RAYSLURM_DATA_DIR"])
with open(data / "ran", "a") as file:
    file.write(os.environ["SLURM_JOB_ID"] + "\\n")
began, number = time.monotonic(), 0
while (number % 20 or not (data / "go").exists()) and time.monotonic() - began < 150:
    if number % 20 == 0:
        pipes.log.info("entry %d" % (number // 20))
        pipes.report_custom_message(number // 20)
    print("line", number, flush=True)
    number += 1
    time.sleep(0.002)
(data / "total").write_text(str(number))
pipes.report_asset_materialization()
""")
"""Payload that prints, logs and reports numbers until the test lets it end."""


def old(site: Site) -> None:
    """Make all run directories old enough to be removed, and forget the last sweep."""
    site.sh('find "$1/runs" -exec touch -h -d "15 days ago" {} +; rm -f "$1"/.swept*', site.base)


def quiet(site: Site) -> bool:
    """Whether no job of a single run is left; jobs of sessions may be."""
    return not [job for job in site.jobs() if job not in site.submitted()]


def one_result(dagster: Dagster, killed: str) -> None:
    """Checks that only the last run materialized the asset, with all messages of the payload and each line once."""
    run = dagster.runs()[-1]
    assert dagster.materializations() == [run.run_id] and run.parent_run_id == killed
    shown = numbers("\n".join([*dagster.output(killed), *dagster.output(run.run_id)]))
    assert shown == list(range(AFTER)) if REATTACHED in dagster.said() else shown[-AFTER:] == list(range(AFTER))
    assert f"messages {list(range(AFTER))}" in (said := dagster.said()) and said.count("messages [0, 1,") == 1


@pytest.mark.parametrize(("mode", "phase"), CASES)
def test_dagster_is_killed(mode: str, phase: str, dagster: Dagster, site: Site) -> None:
    """A retry goes on with the job that is there, and begins anew where there is none: one job, one result, all it said."""
    with held_in(phase, dagster, mode) as held:
        os.killpg(held.process.pid, signal.SIGKILL)
        held.process.wait()
        if phase in WITHOUT_A_JOB:
            # What Dagster was about to do ends with its connection, so letting it on comes too late.
            assert wait_until(lambda: not [each for each in site.processes("edge") if site.base in each])
            held.let_on()
            time.sleep(1)
            assert submitted(site) == [] and len(run_dirs(site)) <= (phase == "submitting")
        killed = dagster.mark_failed()
        seen = numbers("\n".join(dagster.output(killed)))
        assert seen == list(range(len(seen))) and dagster.materializations() == []
        dagster.define(mode, **held.fields)
        retry = dagster.start(retry_of=killed)
        if phase in UNDER_WAY or (phase not in WITHOUT_A_JOB and mode != "slurm-session"):
            assert wait_until(lambda: REATTACHED in dagster.log or retry.poll() is not None, 60)
            assert REATTACHED in dagster.log, dagster.log[-4000:]
        held.let_on()
        let_go(site)
        assert retry.wait(90) == 0, dagster.log[-5000:]
    one_result(dagster, killed)
    assert len(submitted(site)) == len(site.lines("ran")) == 1
    if phase == "submitting":  # A run directory that nothing came of is swept when it is old.
        old(site)
        assert dagster.start().wait(90) == 0
    assert wait_until(lambda: run_dirs(site) == []), run_dirs(site)
    assert wait_until(lambda: quiet(site)), site.sh("squeue --me")


@pytest.mark.parametrize(
    ("mode", "phase"), [("slurm", "pending"), ("slurm", "running"), ("slurm", "cluster-start"), ("slurm-session", "running")]
)
def test_a_service_that_is_stopped_leaves_its_job_to_the_retry(mode: str, phase: str, dagster: Dagster, site: Site) -> None:
    """With on_service_stop="detach", a retry has the one result, and all output once."""
    with held_in(phase, dagster, mode, on_service_stop="detach") as held:
        held.process.terminate()
        assert held.process.wait(60) != 0 and "goes on: the next attempt at this step" in dagster.said()
        stopped = dagster.mark_failed()
        dagster.define(mode, **held.fields)
        retry = dagster.start(retry_of=stopped)
        assert wait_until(lambda: REATTACHED in dagster.log or retry.poll() is not None, 60)
        held.let_on()
        let_go(site)
        assert retry.wait(90) == 0, dagster.log[-5000:]
    one_result(dagster, stopped)
    assert REATTACHED in dagster.said() and len(submitted(site)) == len(site.lines("ran")) == 1
    assert wait_until(lambda: quiet(site)), site.sh("squeue --me")


@pytest.mark.parametrize("mode", ["slurm", "slurm-session"])
def test_dagster_is_killed_while_output_flows(mode: str, dagster: Dagster, site: Site, script: Any) -> None:
    """Each retry goes on where the one before was killed: no line is lost, nearly none repeated, no message either."""
    dagster.payload = script(FLOWING)
    dagster.define(mode)
    killed: list[str] = []

    def shown() -> int:
        run = ([None, *dagster.runs()])[-1]
        return len(dagster.output(run.run_id)) if run is not None and run.run_id not in killed else 0

    def shows_more_than(number: int) -> bool:
        return bool(wait_until(lambda: shown() > number, 60))

    for retry_of in (None, 0):
        process = dagster.start(retry_of=None if retry_of is None else killed[retry_of])
        assert shows_more_than(ENOUGH), dagster.log[-4000:]
        # The first batch of a retry has all that was written meanwhile; it is noted once a second one is shown.
        assert shows_more_than(shown()), dagster.log[-4000:]
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        killed.append(dagster.mark_failed())
    let_go(site)
    last = dagster.start(retry_of=killed[-1])
    assert last.wait(90) == 0, dagster.log[-4000:]

    total = int(site.connection.read(f"{site.base}/data/total", 0, 100))
    runs = dagster.runs()
    assert [run.run_id for run in runs[:-1]] == killed
    seen = [numbers("\n".join(dagster.output(run.run_id))) for run in runs]
    following = 0
    for lines in seen:
        assert lines == list(range(lines[0], lines[-1] + 1)) and following - BATCH <= lines[0] <= following
        following = lines[-1] + 1
    assert following == total
    entries = [each.user_message for run in runs for each in dagster.events(run.run_id) if each.user_message.startswith("entry ")]
    assert entries == [f"entry {number}" for number in range(total // 20)]
    said = dagster.said()
    assert f"messages {list(range(total // 20))}" in said and said.count("messages [0, 1,") == 1
    assert dagster.materializations() == [runs[-1].run_id] and len(site.lines("ran")) == len(submitted(site)) == 1
    assert said.count("submitted Slurm job") == 1 and said.count("at most the last batch is shown twice") >= 2
    assert "reattached to Slurm job" in said or mode == "slurm-session"
    with dagster.instance() as instance:
        (record,) = instance.fetch_materializations(dg.AssetKey("slow"), limit=10).records
    made = record.asset_materialization
    assert made is not None and "Slurm job ID" in made.metadata and "Queue wait (s)" not in made.metadata
    assert list((dagster.home / "base" / "runs").iterdir()) == []


@CARRIERS
def test_dagster_is_killed_while_its_payload_waits_for_its_turn(
    carrier: str, dagster: Dagster, site: Site, queued: Callable[[str], Queued]
) -> None:
    """A payload that a warm session has queued behind another one's stays there: a retry goes on with it, and it runs once."""
    run = queued(carrier)
    os.killpg(run.process.pid, signal.SIGKILL)
    run.process.wait()
    killed = dagster.mark_failed()
    retry = dagster.start(retry_of=killed)
    assert wait_until(lambda: REATTACHED in dagster.log or retry.poll() is not None, 60)
    assert REATTACHED in dagster.log and not is_there(site, "ran"), dagster.log[-4000:]
    run.give_way()
    let_go(site)
    assert retry.wait(90) == 0, dagster.log[-4000:]
    one_result(dagster, killed)
    assert submitted(site) == site.lines("ran") == site.jobs() == [run.job_id]


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
        assert wait_until(lambda: f"Slurm job {first} still runs with the settings" in dagster.log, 60), dagster.log[-4000:]
        let_go(site)
        assert retry.wait(90) == 0, dagster.log[-4000:]
    one_result(dagster, killed)
    assert len(submitted(site)) == len(site.lines("ran")) == 2
    assert wait_until(lambda: quiet(site)), site.sh("squeue --me")
    assert len(run_dirs(site)) == 1 and has_ended(site)
    old(site)
    assert dagster.start().wait(90) == 0
    assert wait_until(lambda: run_dirs(site) == []), run_dirs(site)


@pytest.mark.parametrize("mode", ["slurm", "slurm-session"])
def test_the_process_of_a_step_is_killed(mode: str, dagster: Dagster, site: Site) -> None:
    """Dagster retries the step of a process that crashed, which goes on with its payload: one result, and one job."""
    with held_in("running", dagster, mode, executor="multiprocess", retries=1) as held:
        step = next(each for each in psutil.Process(held.process.pid).children(True) if "spawn_main" in " ".join(each.cmdline()))
        step.kill()
        assert wait_until(lambda: REATTACHED in dagster.log, 60), dagster.log[-4000:]
        let_go(site)
        assert held.process.wait(90) == 0, dagster.log[-4000:]
    (run,) = dagster.runs()
    assert run.status == dg.DagsterRunStatus.SUCCESS and dagster.materializations() == [run.run_id]
    assert f"messages {list(range(AFTER))}" in (said := dagster.said()) and said.count("messages [0, 1,") == 1
    assert len(submitted(site)) == len(site.lines("ran")) == 1
    assert wait_until(lambda: quiet(site)), site.sh("squeue --me")


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
    assert wait_until(lambda: quiet(site)), site.sh("squeue --me")


def test_a_process_that_was_taken_for_dead_leaves_its_job_to_the_retry(dagster: Dagster, site: Site) -> None:
    """Its run is marked as failed though it lives; when it is evicted at last, the retry's job runs on."""
    dagster.define("slurm")
    old = dagster.start()
    assert wait_until(lambda: dagster.runs() and dagster.output(dagster.runs()[0].run_id), 90), dagster.log[-4000:]
    taken_for_dead = dagster.mark_failed()
    new = dagster.start(retry_of=taken_for_dead)
    assert wait_until(lambda: "reattached to Slurm job" in dagster.log, 60), dagster.log[-4000:]
    old.terminate()
    assert old.wait(60) != 0
    let_go(site)
    assert new.wait(90) == 0, dagster.log[-5000:]
    retry = dagster.runs()[-1]
    assert dagster.materializations() == [retry.run_id] and retry.parent_run_id == taken_for_dead
    said = dagster.said()
    assert f"run {retry.run_id} (process {new.pid} on " in said and "has gone on with this payload" in said
    assert len(submitted(site)) == len(site.lines("ran")) == 1
    assert wait_until(lambda: run_dirs(site) == []), run_dirs(site)
