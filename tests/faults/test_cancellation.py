"""Somebody cancels a run from Dagster, in each phase and more than once: its job is gone, and Dagster says that it was so."""

import signal
import time
from typing import Any

import dagster as dg
import pytest

from ..conftest import wait_until
from ..slurm.fixtures import NODES, Site
from .scenarios import (
    CASES,
    MODES,
    PHASES,
    Dagster,
    dagster_on_slurm,  # noqa: F401 - a fixture
    held_in,
    submitted,
)

pytestmark = pytest.mark.timeout(200)

EXECUTORS = ("in_process", "multiprocess")
ACCEPTED = ("cluster-start", "running", "ending")
"""Phases in which a session has the payload: it is that which is ended then, not the session."""

STUBBORN = """
import os, pathlib, signal, subprocess, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(["setsid", "sleep", "300"])
for number in range(40):
    print("line", number, flush=True)
(pathlib.Path(os.environ["RAYSLURM_DATA_DIR"]) / "up").write_text("x")
time.sleep(120)
"""


def interrupted(dagster: Dagster) -> bool:
    """Whether Dagster took the only run for one that was interrupted, and nothing for its result."""
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
    """Processes of payloads, and of clusters of theirs."""
    marks = ("payload.py", "sleep 300", "raylet", "gcs_server")
    return [line for node in NODES for line in site.processes(node) if any(mark in line for mark in marks)]


def marked(cases: list[tuple[str, str]]) -> list[Any]:
    """What an interrupt does to a heterogeneous job is looked at with its other tests, too."""
    return [pytest.param(*case, marks=[pytest.mark.thorough] if case[0] == "slurm-hetjob" else []) for case in cases]


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
            assert wait_until(lambda: not site.jobs(), 10), site.sh("squeue --me")
        assert wait_until(lambda: not at_work(site), 10), at_work(site)
    assert interrupted(dagster), dagster.log[-4000:]
    assert len(submitted(site)) <= 1


@pytest.mark.parametrize(("mode", "phase"), marked([("slurm", "unrecorded"), *((mode, "running") for mode in MODES)]))
def test_a_run_is_interrupted_again_and_again(mode: str, phase: str, dagster: Dagster, site: Site, script: Any) -> None:
    """A second and a third interrupt, while the first one is seen to, make it end sooner, and nothing is left all the same."""
    dagster.payload = script(STUBBORN, "stubborn_payload.py")
    fields = {"launcher": "BashLauncher(grace_period=60)", "arguments": {"uses_pipes": False}}
    with held_in(phase, dagster, mode, **fields) as held:
        began = time.monotonic()
        held.process.send_signal(signal.SIGINT)
        if phase == "running":
            assert wait_until(lambda: "ending the payload" in dagster.log, 20)
            time.sleep(1.2)  # Within a second it counts as the same one.
            assert held.process.poll() is None
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            if held.process.poll() is None:
                held.process.send_signal(signum)
            time.sleep(0.3)
        assert held.process.wait(60) != 0
        assert time.monotonic() - began < 40, dagster.log[-4000:]
        if not (mode == "slurm-session" and phase in ACCEPTED):
            assert wait_until(lambda: not site.jobs(), 10), site.sh("squeue --me")
        assert wait_until(lambda: not at_work(site), 10), at_work(site)
    assert interrupted(dagster), dagster.log[-4000:]
