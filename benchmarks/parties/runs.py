"""What the Slurm figures share: one measured run, and this project, dagster-slurm and a script by hand to make it."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any, Optional

import dagster as dg

from dagster_rayslurm import BashLauncher, ComputeResource, PreDeployedEnvironment, RayLauncher, SlurmQueueConfig, SlurmResource

from ..steps import PAYLOADS
from .edge import Edge

# No annotations from the future here: Dagster wants the type of `context` itself, not its name.

MARKS = PAYLOADS / "marks.py"
CPUS = 2
RAY_MEMORY, MEMORY = "2500M", "300M"
"""Of each node: a driver and Ray's daemons need more than the stack's 1 GiB per CPU."""
STORE_GB = 0.1


@dataclass(frozen=True)
class Shape:
    """What a run asks for."""

    nodes: int = 1
    ray: bool = True
    mem: Optional[str] = None

    @property
    def memory(self) -> str:
        return self.mem or (RAY_MEMORY if self.ray else MEMORY)

    def environment(self, marks: str) -> dict[str, str]:
        """What the payload wants to know, for all parties."""
        return {"BENCH_MARKS": marks, "BENCH_RAY": "1" if self.ray else "0"}


@dataclass(frozen=True)
class Run:
    """Times of one run, in seconds since the epoch; all containers have the clock of this machine.

    Attributes:
        start: before `run()` was called, or the `ssh` by hand.
        returned: after it.
        marks: what `payloads/marks.py` wrote down.
        gone: when `squeue` did not show the job any more.
        calls: calls of slurmctld that this user's programs have made meanwhile, on whichever node.
    """

    start: float
    returned: float
    marks: dict[str, Any]
    gone: float
    calls: int = 0

    @property
    def to_first_line(self) -> float:
        return float(self.marks["first"] - self.start)

    @property
    def from_exit(self) -> float:
        return float(self.returned - self.marks["exit"])

    @property
    def from_last_line(self) -> float:
        return float(self.returned - self.marks["last"])

    @property
    def added(self) -> float:
        """All but the payload's own work between its first line and the end of its Pipes block."""
        return float(self.returned - self.start - (self.marks["work"] - self.marks["first"]))

    @property
    def to_gone(self) -> float:
        return float(self.gone - self.marks["exit"])

    @property
    def job(self) -> str:
        return str(self.marks["job"])


class Ours:
    """This project, in the step of an asset of this process."""

    label = "run()"

    def __init__(self, edge: Edge, directory: str, partition: str) -> None:
        self._edge = edge
        self._directory = directory
        self._partition = partition
        self._count = 0

    def resource(self, shape: Shape, port: Optional[int] = None, key: Optional[str] = None, **options: Any) -> ComputeResource:
        """The resource as a user of the stack would write it."""
        queue = SlurmQueueConfig(
            partition=self._partition,
            num_nodes=shape.nodes,
            mem=options.pop("mem", shape.memory),
            cpus_per_node=options.pop("cpus", CPUS),
            time_limit="00:10:00",
        )
        launcher = RayLauncher(dashboard=False, object_store_memory_gb=STORE_GB) if shape.ray else BashLauncher()
        return ComputeResource(
            mode="slurm",
            slurm=SlurmResource(ssh=self._edge.resource(port, key=key), queue=queue, remote_base=f"{self._directory}/ours"),
            **{"environment": PreDeployedEnvironment(path=self._edge.env["RAYSLURM_ENV_PATH"]), **options},
            default_launcher=launcher,
        )

    def run(self, context: dg.AssetExecutionContext, compute: ComputeResource, shape: Shape) -> Run:
        """One payload with marks."""
        self._count += 1
        marks = f"{self._directory}/ours-{self._count}.json"
        return measured(
            self._edge,
            marks,
            lambda: clocked(lambda: compute.run(context=context, payload_path=MARKS, extra_env=shape.environment(marks))),
        )


def measured(edge: Edge, marks: str, call: Callable[[], tuple[float, float]]) -> Run:
    """A run of `payloads/marks.py`, once Slurm has its nodes back for the next one.

    Args:
        edge: the stack.
        marks: path of its marks on the edge.
        call: makes the run, and returns the times before and after.
    """
    with edge.queue_watch() as watch:
        before = edge.controller_calls()
        start, returned = call()
        found = edge.read_json(marks)
        gone = watch.gone(str(found["job"]))
        return Run(start, returned, found, gone, max(0, edge.controller_calls() - before))


def clocked(call: Callable[[], object]) -> tuple[float, float]:
    """The times before and after a call."""
    start = time.time()
    call()
    return start, time.time()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Payloads' output is no part of the table."""
    with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere), redirect_stdout(nowhere):
        yield
