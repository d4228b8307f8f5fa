"""Tests: Slurm's daemons stop and come back. Running payloads are not affected, and no job is submitted twice."""

import re
import time
from collections.abc import Callable
from typing import Any

import pytest

from dagster_rayslurm import BashLauncher, ComputeResource
from dagster_rayslurm.slurm import submit

from ..conftest import pipes_script, run_asset, wait_until
from ..slurm.fixtures import Running, Site
from .breaking import paused, stopped, without_munge
from .conftest import HETJOB

pytestmark = pytest.mark.timeout(300)

Make = Callable[..., ComputeResource]
Start = Callable[..., Running]

ON_CALL = pipes_script("""
import os, pathlib, time
data = pathlib.Path(os.environ["RAYSLURM_DATA_DIR"])
with open(data / "ran", "a") as ran:
    ran.write(os.environ["SLURM_JOB_ID"] + "\\n")
(data / "up").write_text("x")
while not (data / "go").exists():
    time.sleep(0.05)
pipes.report_asset_materialization(metadata={"job": os.environ["SLURM_JOB_ID"]})
""")
"""Payload that runs until the test lets it end, and writes a line for each start."""


def let_go(site: Site) -> None:
    site.sh('touch "$1/data/go"', site.base)


def names(site: Site) -> list[str]:
    """The names of all jobs of this test that Slurm remembers."""
    rows = site.sh("squeue --me --states=all --noheader --format='%j|%i|%Z'").splitlines()
    return [row.split("|")[1].partition("+")[0] for row in rows if site.base in row]


def test_slurmctld_is_away_while_a_job_waits_runs_and_ends(
    mode: str, make: Make, start: Start, script: Any, site: Site, capfd: pytest.CaptureFixture[str]
) -> None:
    """A controller that is away while a job waits, runs and ends costs the run nothing but what it waits for itself."""
    del mode
    compute = make(queue={"extra_sbatch": ["--begin=now+6"]}, connection_loss_timeout=100)
    running = start(compute, script(ON_CALL))
    running.job("PENDING")
    with stopped(site.stack, "slurmctld"):
        time.sleep(3)
    running.up()
    with stopped(site.stack, "slurmctld"):
        time.sleep(2)
        let_go(site)
        ran = running.result(60)  # Without the controller, which comes back only afterwards.
    assert ran.metadata["job"] == ran.completed[0].job_id
    assert site.lines("ran") == [ran.metadata["job"]]
    assert set(names(site)) <= {ran.metadata["job"]}


@pytest.mark.parametrize("mode", ["slurm", pytest.param("slurm-session", marks=pytest.mark.thorough), HETJOB], indirect=True)
def test_slurmctld_is_away_when_a_job_is_to_be_submitted(
    mode: str, make: Make, script: Any, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that no controller takes fails with one sentence that says so, may be tried again, and leaves no job."""
    del mode
    monkeypatch.setattr(submit, "_GONE_DEADLINE", 3.0)  # For which it tries to cancel what may have been submitted.
    compute = make(connection_loss_timeout=3)
    assert site.connection.home()
    with stopped(site.stack, "slurmctld"):
        failure = run_asset(compute, script(ON_CALL)).failure
    sentence = failure.description or ""
    assert failure.kind in ("submission", "connection") and failure.allow_retries, (failure.kind, sentence)
    assert "\n" not in sentence and re.search("slurm controller|Slurm does not say", sentence), sentence
    time.sleep(2)
    assert names(site) == [] and not site.jobs()


def test_a_submission_that_slurmctld_takes_late_makes_one_job(
    mode: str, make: Make, start: Start, script: Any, site: Site
) -> None:
    """A controller that takes a job after sbatch has given up holds that one job, and it is the run's."""
    del mode
    compute = make(connection_loss_timeout=100)
    assert site.connection.home()
    with paused(site.stack, "slurmctld"):
        running = start(compute, script(ON_CALL))
        asked = lambda: "sbatch" in "".join(site.processes("edge"))  # noqa: E731
        assert wait_until(asked, 60)
        assert wait_until(lambda: not asked(), 60), "sbatch never gives up"
    running.up()
    let_go(site)
    ran = running.result(60)
    assert site.lines("ran") == [ran.metadata["job"]]
    assert set(names(site)) == {ran.metadata["job"]}


def test_accounting_is_away(mode: str, make: Make, start: Start, script: Any, site: Site) -> None:
    """Without slurmdbd and its database runs succeed, and failures are told from the record and by the controller."""
    del mode
    if not site.stack.accounting:
        pytest.skip("this stack has no accounting")
    with stopped(site.stack, "slurmdbd", "database"):
        compute = make()
        began = time.monotonic()
        ran = run_asset(compute, script(pipes_script('pipes.report_asset_materialization(metadata={"x": 1})')))
        failure = run_asset(compute, script("raise SystemExit(3)", "fails.py"), uses_pipes=False).failure
        assert ran.metadata["x"] == 1
        assert failure.kind == "payload" and failure.metadata["Exit code"].value == 3
        assert time.monotonic() - began < 60
        running = start(compute, script(ON_CALL, "cancelled.py"))
        running.up()
        job_id = min(site.jobs(), key=int)
        site.stack.exec("slurmctld", ["scancel", job_id])
        failure = running.result(60).failure
        assert failure.kind == "cancelled" and job_id in (failure.description or ""), failure.description


def test_munge_of_the_edge_node_is_away(mode: str, make: Make, start: Start, script: Any, site: Site) -> None:
    """A run goes on and succeeds though nobody on the edge node can prove who he is; a new job is refused in one sentence."""
    compute = make(default_launcher=BashLauncher(grace_period=2), connection_loss_timeout=3)
    running = start(compute, script(ON_CALL))
    running.up()
    with without_munge(site.stack, "edge"):
        let_go(site)
        ran = running.result(60)
        assert ran.metadata["job"] == ran.completed[0].job_id
        again = run_asset(compute, script(ON_CALL, "again.py"))
        if mode == "slurm-session":
            assert again.metadata["job"] == ran.metadata["job"], "a warm session needs nobody's word but its own"
        else:
            sentence = again.failure.description or ""
            assert again.failure.kind in ("submission", "connection") and again.failure.allow_retries, sentence
            assert "\n" not in sentence and "unge" in sentence, sentence
