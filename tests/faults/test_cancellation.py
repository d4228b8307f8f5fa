"""Tests: a user cancels a run in Dagster, in each phase and repeatedly. Its Slurm job ends, and Dagster reports the cancel."""

import signal
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import dagster as dg
import pytest

from ..conftest import pipes_script, run_asset, wait_until
from ..slurm.fixtures import NODES, Site
from .breaking import stopped, without_munge
from .scenarios import (
    CARRIERS,
    CASES,
    MODES,
    PHASES,
    Dagster,
    Queued,
    dagster_on_slurm,  # noqa: F401 - a fixture
    has_ended,
    held_in,
    is_there,
    queued_in_a_session,  # noqa: F401 - a fixture
    submitted,
)

pytestmark = pytest.mark.timeout(200)

EXECUTORS = ("in_process", "multiprocess")
ACCEPTED = ("cluster-start", "running", "ending")
"""Phases in which a session has accepted the payload, so that a cancel ends the payload and not the session."""

STUBBORN = """
import os, pathlib, signal, subprocess, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(["setsid", "sleep", "300"])
for number in range(40):
    print("line", number, flush=True)
(pathlib.Path(os.environ["RAYSLURM_DATA_DIR"]) / "up").write_text("x")
time.sleep(120)
"""

POLITE = """
import os, pathlib, signal, sys, time
data = pathlib.Path(os.environ["RAYSLURM_DATA_DIR"])
def leave(*_):
    (data / "told").write_text("x")
    sys.exit(1)
signal.signal(signal.SIGTERM, leave)
for number in range(40):
    print("line", number, flush=True)
(data / "up").write_text("x")
time.sleep(120)
"""
"""Payload that writes a file when it gets a signal to end."""

UNTOLD = "cannot be told to end, which is tried again"

IMPATIENT = """
from dagster_rayslurm.backends.sessions import payload
from dagster_rayslurm.slurm import submit as cancellation
payload._DELIVERY_TIMEOUT = cancellation._GONE_DEADLINE = 3.0
"""
"""Code that shortens the retries of cancel requests from about a minute to 3 seconds."""


def interrupted(dagster: Dagster) -> bool:
    """Whether Dagster recorded the only run as interrupted, without a result."""
    (run,) = dagster.runs()
    errors = [
        event.dagster_event.step_failure_data.error_display_string
        for event in dagster.events(run.run_id)
        if event.dagster_event is not None and event.dagster_event.is_step_failure
    ]
    said = "DagsterExecutionInterruptedError" in "".join(errors)
    canceled = run.status == dg.DagsterRunStatus.CANCELED
    return (said or canceled) and run.status != dg.DagsterRunStatus.SUCCESS and dagster.materializations() == []


def at_work(site: Site) -> list[str]:
    """The running processes of payloads and of their Ray clusters."""
    marks = ("payload.py", "sleep 300", "raylet", "gcs_server")
    return [line for node in NODES for line in site.processes(node) if any(mark in line for mark in marks)]


def marked(cases: Iterable[Any]) -> list[Any]:
    """The cases, with those of heterogeneous jobs marked `thorough`, because other tests of such jobs interrupt them too."""
    return [pytest.param(*each.values, marks=pytest.mark.thorough) if "slurm-hetjob" in each.values else each for each in cases]


@pytest.mark.parametrize(("mode", "phase"), marked(CASES))
def test_a_run_is_interrupted(mode: str, phase: str, dagster: Dagster, site: Site) -> None:
    """An interrupt in any phase, with either executor, ends the run at once, and nothing of it is left on the cluster."""
    executor = EXECUTORS[(MODES.index(mode) + PHASES.index(phase)) % 2]
    with held_in(phase, dagster, mode, executor=executor) as held:
        held.process.send_signal(signal.SIGTERM if executor == "multiprocess" else signal.SIGINT)
        if phase == "ending":
            time.sleep(1)
            held.let_on()  # Out of reach nobody can be told; how long that is waited for is not what is tested here.
        began = time.monotonic()
        code = held.process.wait(60)
        assert code != 0 and time.monotonic() - began < 40, dagster.log[-4000:]
        if not (mode == "slurm-session" and phase in ACCEPTED):
            assert wait_until(lambda: not site.jobs()), site.sh("squeue --me")
        assert wait_until(lambda: not at_work(site)), at_work(site)
    assert interrupted(dagster), dagster.log[-4000:]
    jobs = submitted(site)
    assert len(jobs) <= 1
    if mode != "slurm-session" and phase in ("pending", "cluster-start", "running"):
        assert f"Slurm job {jobs[0]} is cancelled" in dagster.said()
        if site.stack.accounting:
            states = f"sacct -j {jobs[0]} --allocations --noheader --format=State%40"
            assert wait_until(lambda: {line.split()[0] for line in site.sh(states).splitlines()} == {"CANCELLED"})


@pytest.mark.parametrize(("mode", "phase"), marked(map(pytest.param, ("slurm", *MODES), ("unrecorded", *3 * ("running",)))))
def test_a_run_is_interrupted_again_and_again(mode: str, phase: str, dagster: Dagster, site: Site, script: Any) -> None:
    """A second and a third interrupt, while the first one is seen to, make it end sooner, and nothing is left all the same."""
    dagster.payload = script(STUBBORN, "stubborn_payload.py")
    fields = {"launcher": "BashLauncher(grace_period=60)", "arguments": {"uses_pipes": False}}
    with held_in(phase, dagster, mode, **fields) as held:
        began = time.monotonic()
        held.process.send_signal(signal.SIGINT)
        if phase == "running":
            assert wait_until(lambda: "ending the payload" in dagster.log)
            time.sleep(1.2)  # Within a second it counts as the same one.
            assert held.process.poll() is None
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            if held.process.poll() is None:
                held.process.send_signal(signum)
            time.sleep(0.3)
        assert held.process.wait(60) != 0
        assert time.monotonic() - began < 40, dagster.log[-4000:]
        if not (mode == "slurm-session" and phase in ACCEPTED):
            assert wait_until(lambda: not site.jobs()), site.sh("squeue --me")
        assert wait_until(lambda: not at_work(site)), at_work(site)
    assert interrupted(dagster), dagster.log[-4000:]


@pytest.mark.parametrize("mode", ["slurm", pytest.param("slurm-session", marks=pytest.mark.thorough)])
def test_a_run_is_interrupted_out_of_reach(mode: str, dagster: Dagster, site: Site, script: Any) -> None:
    """The order is kept while the edge is out of reach, and given as soon as it is back: the payload ends with its grace."""
    dagster.payload = script(POLITE, "polite_payload.py")
    fields = {"launcher": "BashLauncher(grace_period=40)", "arguments": {"uses_pipes": False}, "ssh": {"connect_timeout": 2}}
    with held_in("running", dagster, mode, **fields) as held:
        held.link.cut()
        held.process.send_signal(signal.SIGINT)
        assert wait_until(lambda: UNTOLD in dagster.log), dagster.log[-4000:]
        assert not is_there(site, "told")
        held.link.mend()
        assert held.process.wait(20) != 0, dagster.log[-4000:]
        assert is_there(site, "told") and has_ended(site)
        assert wait_until(lambda: bool(site.jobs()) == (mode == "slurm-session")), site.sh("squeue --me")
        assert wait_until(lambda: not at_work(site)), at_work(site)
    assert interrupted(dagster), dagster.log[-4000:]
    assert dagster.said().count(UNTOLD) == 1


def test_a_run_is_interrupted_while_slurmctld_is_away(dagster: Dagster, site: Site) -> None:
    """A job that waits is cancelled as soon as there is somebody to take it off the queue, however long a payload's grace is."""

    def asked() -> bool:
        return any(line.startswith("scancel") for line in site.processes("edge"))

    with held_in("pending", dagster, "slurm", launcher="BashLauncher(grace_period=60)") as held:
        with stopped(site.stack, "slurmctld"):
            held.process.send_signal(signal.SIGINT)
            assert wait_until(asked), dagster.log[-4000:]
            assert wait_until(lambda: not asked(), 60), "scancel never gives up"
        assert held.process.wait(30) != 0, dagster.log[-4000:]
        assert not site.jobs(), site.sh("squeue --me")
    assert interrupted(dagster), dagster.log[-4000:]


@pytest.mark.parametrize(
    ("mode", "phase"),
    [
        ("slurm", "pending"),
        ("slurm", "running"),
        pytest.param("slurm-session", "running", marks=pytest.mark.thorough),
        pytest.param("slurm-hetjob", "running", marks=pytest.mark.thorough),
    ],
)
def test_nobody_can_be_told(mode: str, phase: str, dagster: Dagster, site: Site) -> None:
    """A second interrupt waits no longer for an edge, or a Slurm, that stays away; the log has the `scancel` to run, once."""
    fields = {"launcher": "BashLauncher(grace_period=300)", "ssh": {"connect_timeout": 2}, "first": IMPATIENT}
    with held_in(phase, dagster, mode, **fields) as held:
        (job_id,) = submitted(site)
        with ExitStack() as stack:
            if phase == "pending":
                stack.enter_context(without_munge(site.stack, "edge"))
            else:
                held.link.cut()
            held.process.send_signal(signal.SIGINT)
            assert wait_until(lambda: UNTOLD in dagster.log, 40), dagster.log[-4000:]
            held.process.send_signal(signal.SIGINT)
            assert held.process.wait(60) != 0, dagster.log[-4000:]
        said = dagster.said()
        assert said.count(f"`scancel {job_id}`") == 1 and said.count(UNTOLD) == 1, said[-4000:]
        assert submitted(site) == [job_id] and site.jobs(), "it goes on, as the log says"
        site.sh('scancel "$1"', job_id)
    assert interrupted(dagster), dagster.log[-4000:]


@CARRIERS
def test_a_run_is_interrupted_while_its_payload_waits_for_its_turn(
    carrier: str, dagster: Dagster, site: Site, queued: Callable[[str], Queued], session_compute: Any, script: Any
) -> None:
    """A payload that a warm session has queued never runs once its run is interrupted; the session, and the other one's, stay."""
    run = queued(carrier)
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(30) != 0, dagster.log[-4000:]
    assert interrupted(dagster), dagster.log[-4000:]
    run.give_way()
    where = 'import os; pipes.report_asset_materialization(metadata={"job": os.environ["SLURM_JOB_ID"]})'
    after = run_asset(session_compute(session={"carrier": carrier}), script(pipes_script(where), "after.py"))
    assert after.metadata["job"] == run.job_id and site.lines("ran") == []
    assert submitted(site) == site.jobs() == [run.job_id]
