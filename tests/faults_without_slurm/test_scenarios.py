"""What goes wrong with Slurm, and when → the failure that users see, and what is left behind.

Each row is a whole run: the real submission, batch script, runtime and run record, on the fake Slurm.
"""

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from dagster_rayslurm import BashLauncher, ComputeResource, HetComponent, SlurmQueueConfig, SlurmResource
from dagster_rayslurm.errors import FailureKind

from ..conftest import run_asset, wait_until
from ..fake_slurm import FakeSlurm

pytestmark = pytest.mark.timeout(150)

PAYLOAD = """
import os, pathlib, time
here = pathlib.Path({directory!r})
with open(here / "up", "a") as up:
    up.write(os.environ["SLURM_JOB_ID"] + "\\n")
while not (here / "go").exists():
    time.sleep(0.02)
raise SystemExit(int((here / "go").read_text()))
"""
"""Leaves a line wherever it runs, and ends with the exit code that it is given."""

AWAY = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
NO_ANSWER = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"


class Moment(Enum):
    """When the fault happens."""

    BEFORE = "before the submission"
    WAITING = "while the job waits"
    RUNNING = "while the payload runs"


@dataclass(frozen=True)
class Scenario:
    """A fault and what becomes of it.

    Attributes:
        name: of the row.
        fault: happens to the fake Slurm.
        moment: when it happens.
        kind: the failure's; None for a run that succeeds.
        sentence: a regular expression for its sentence.
        left: states of all jobs afterwards.
        retry: whether Dagster may try again.
        exit_code: what the payload ends with once it may; None if it runs for ever.
        queue: fields of the queue.
        fields: of the resource.
        modes: in which it is the same.
    """

    name: str
    fault: Callable[[FakeSlurm], Any]
    moment: Moment
    kind: FailureKind | None
    sentence: str
    left: tuple[str, ...]
    retry: bool = False
    exit_code: int | None = 0
    queue: dict[str, Any] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)
    modes: tuple[str, ...] = ("slurm",)


def first(slurm: FakeSlurm) -> int:
    return slurm.jobs()[0]


def nothing(_: FakeSlurm) -> None:
    pass


BEFORE, WAITING, RUNNING = Moment
ALL = ("slurm", "slurm-hetjob", "slurm-session")
SCENARIOS = [
    Scenario("no fault", nothing, BEFORE, None, "", ("COMPLETED",)),
    Scenario("the payload fails", nothing, BEFORE, FailureKind.PAYLOAD, "exit code 3", ("FAILED",), retry=True, exit_code=3),
    Scenario(
        "the payload fails without accounting",
        lambda slurm: slurm.set(accounting=False),
        BEFORE,
        FailureKind.PAYLOAD,
        "exit code 3",
        ("FAILED",),
        retry=True,
        exit_code=3,
    ),
    Scenario(
        "an unknown partition",
        nothing,
        BEFORE,
        FailureKind.SUBMISSION,
        r"^Slurm refused the job .*partition to one that `sinfo -s` lists \(asked for: partition='nowhere'",
        (),
        queue={"partition": "nowhere"},
        modes=ALL,
    ),
    Scenario(
        "more CPUs than nodes have",
        nothing,
        BEFORE,
        FailureKind.SUBMISSION,
        "no node of the partition has .*cpus_per_node=99",
        (),
        queue={"cpus_per_node": 99},
        modes=ALL,
    ),
    Scenario(
        "sbatch fails before it submits",
        lambda slurm: slurm.fault("sbatch", NO_ANSWER),
        BEFORE,
        None,
        "",
        ("COMPLETED",),
    ),
    Scenario(
        "the answer of sbatch is lost",
        lambda slurm: slurm.fault("sbatch", NO_ANSWER, works=True),
        BEFORE,
        None,
        "",
        ("COMPLETED",),
    ),
    Scenario("sbatch answers late", lambda slurm: slurm.fault("sbatch", code=None, delay=1.0), BEFORE, None, "", ("COMPLETED",)),
    Scenario(
        "no command can tell whether the job was submitted",
        lambda slurm: (slurm.fault("sbatch", NO_ANSWER, times=-1), slurm.fault("squeue", AWAY, times=-1)),
        BEFORE,
        FailureKind.CONNECTION,
        "Slurm does not say .* whether the job rayslurm-.* was submitted: .*Unable to contact slurm controller",
        (),
        retry=True,
    ),
    Scenario(
        "sbatch is missing",
        lambda slurm: (slurm.base / "bin" / "sbatch").unlink(),
        BEFORE,
        FailureKind.SUBMISSION,
        "sbatch is not found on this machine",
        (),
        modes=ALL,
    ),
    Scenario(
        "a time limit that the partition does not allow",
        lambda slurm: slurm.set(starts=False, reason="PartitionTimeLimit"),
        BEFORE,
        FailureKind.SUBMISSION,
        "job 1 can never start: .*SlurmQueueConfig.time_limit is longer than the partition allows",
        ("CANCELLED",),
    ),
    Scenario(
        "more nodes than the partition has",
        nothing,
        BEFORE,
        FailureKind.SUBMISSION,
        "partition compute has 2 nodes; lower SlurmQueueConfig.num_nodes",
        ("CANCELLED",),
        queue={"num_nodes": 3},
    ),
    Scenario(
        "the queue is long",
        lambda slurm: slurm.set(starts=False, reason="Priority"),
        BEFORE,
        FailureKind.ALLOCATION,
        "was still waiting after queue_timeout=1 s: Priority",
        ("CANCELLED",),
        fields={"queue_timeout": 1},
    ),
    Scenario(
        "a waiting job is cancelled",
        lambda slurm: slurm.end(first(slurm), "CANCELLED"),
        WAITING,
        FailureKind.CANCELLED,
        "Slurm job 1 was cancelled",
        ("CANCELLED",),
    ),
    Scenario(
        "a running job is cancelled",
        lambda slurm: slurm.end(first(slurm), "CANCELLED"),
        RUNNING,
        FailureKind.CANCELLED,
        "Slurm job 1 was cancelled",
        ("CANCELLED",),
        exit_code=None,
    ),
    Scenario(
        "the time limit",
        lambda slurm: slurm.end(first(slurm), "TIMEOUT", "TimeLimit"),
        RUNNING,
        FailureKind.ALLOCATION,
        "^TIMEOUT: Slurm job 1 was ended at its time limit of 01:00:00",
        ("TIMEOUT",),
        exit_code=None,
    ),
    Scenario(
        "a node fails",
        lambda slurm: slurm.end(first(slurm), "NODE_FAIL", "NodeDown"),
        RUNNING,
        FailureKind.ALLOCATION,
        "^NODE_FAIL: Slurm job 1 on c1 is lost, one of its nodes failed",
        ("NODE_FAIL",),
        retry=True,
        exit_code=None,
    ),
    Scenario(
        "the memory limit",
        lambda slurm: slurm.end(first(slurm), "OUT_OF_MEMORY", "OutOfMemory"),
        RUNNING,
        FailureKind.ALLOCATION,
        "^OUT_OF_MEMORY: Slurm job 1 on c1 used more memory than it was granted",
        ("OUT_OF_MEMORY",),
        exit_code=None,
    ),
    Scenario(
        "the controller is away while the payload runs",
        lambda slurm: [slurm.fault(program, AWAY, times=-1) for program in ("squeue", "sacct", "scontrol")],
        RUNNING,
        None,
        "",
        ("COMPLETED",),
    ),
]


def resource(mode: str, base: Path, queue: dict[str, Any], fields: dict[str, Any]) -> ComputeResource:
    plain = {"slurm": SlurmResource(remote_base=str(base), poll_interval=1), "default_launcher": BashLauncher(grace_period=1)}
    if mode != "slurm-hetjob":
        plain["slurm"] = SlurmResource(remote_base=str(base), poll_interval=1, queue=SlurmQueueConfig(**queue))
        return ComputeResource(mode=mode, **{**plain, **fields})
    queues = [SlurmQueueConfig(), SlurmQueueConfig(**queue)]
    components = [HetComponent(component_id=name, queue=each) for name, each in zip("ab", queues, strict=True)]
    return ComputeResource(mode=mode, components=components, **{**plain, **fields})


@pytest.mark.parametrize(
    ("scenario", "mode"),
    [pytest.param(each, mode, id=f"{each.name}-{mode}".replace(" ", "_")) for each in SCENARIOS for mode in each.modes],
)
def test_a_fault_has_one_sentence_and_leaves_nothing_running(
    scenario: Scenario, mode: str, fake_slurm: FakeSlurm, tmp_path: Path, script: Callable[..., Path]
) -> None:
    """The table above, row by row."""
    here = tmp_path / "here"
    here.mkdir()

    def strike() -> None:
        reached = (here / "up").exists if scenario.moment is RUNNING else lambda: fake_slurm.jobs("PENDING")
        assert wait_until(reached, 60)
        scenario.fault(fake_slurm)
        go()

    def go() -> None:
        if scenario.exit_code is not None:
            (here / "new").write_text(str(scenario.exit_code))
            (here / "new").rename(here / "go")

    payload = script(PAYLOAD.format(directory=str(here)))
    striker = threading.Thread(target=strike)
    if scenario.moment is BEFORE:
        scenario.fault(fake_slurm)
        go()
    else:
        fake_slurm.set(starts=scenario.moment is RUNNING)
        striker.start()
    ran = run_asset(resource(mode, tmp_path / "base", scenario.queue, scenario.fields), payload, uses_pipes=False)
    if striker.ident is not None:
        striker.join()

    if scenario.kind is None:
        assert ran.completed and (here / "up").read_text().splitlines() == [ran.metadata["Slurm job ID"]]
    else:
        said = ran.failure.description or ""
        assert ran.failure.kind == scenario.kind and "\n" not in said, said
        assert re.search(scenario.sentence, said), said
        assert ran.failure.allow_retries == scenario.retry, said
    assert wait_until(lambda: not fake_slurm.processes()), "processes of the job go on"
    assert wait_until(lambda: states(fake_slurm) == scenario.left), states(fake_slurm)


def states(slurm: FakeSlurm) -> tuple[str, ...]:
    return tuple(slurm.state(job_id) for job_id in slurm.jobs())
