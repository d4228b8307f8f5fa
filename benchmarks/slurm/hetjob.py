"""`hetjob.bring_up`: a Ray cluster over the components of a heterogeneous job, beside the same in a homogeneous one."""

from collections.abc import Callable
from dataclasses import dataclass

import dagster as dg

from dagster_rayslurm import ComputeResource, HetComponent, SlurmQueueConfig

from ..figures import Figure, Options, Sample
from ..parties.edge import Edge
from ..parties.runs import CPUS, MARKS, Ours, Run, Shape, clocked, measured, quiet
from ..steps import alternate, in_step, instance

# No annotations from the future here: Dagster wants the type of `context` itself, not its name.

_ROUNDS = 7
_RATIO_BAR = 1.3
_SHAPE = Shape(nodes=3)
_HOMOGENEOUS, _HETEROGENEOUS = "three nodes of one kind", "1 + 2 nodes of two components"
_EVERY_NODE = "all"
"""Partition with three nodes and more."""


@dataclass(frozen=True)
class _Up:
    """A run, and when its cluster came up.

    Attributes:
        run: its marks.
        bring_up: "Ray bring-up (s)" of its metadata.
        job_start: when its job began on the first node: Slurm makes the log of the batch script then.
    """

    run: Run
    bring_up: float
    job_start: float

    @property
    def from_job(self) -> float:
        """From the job's start to the payload's first line."""
        return float(self.run.marks["first"] - self.job_start)


class _Party:
    """One way to get three nodes."""

    def __init__(self, edge: Edge, directory: str, **fields: object) -> None:
        self._edge = edge
        self._directory = directory
        resource = Ours(edge, directory, _EVERY_NODE).resource(_SHAPE, keep_run_dirs="all")
        self.compute = resource.model_copy(update=fields)
        self.ups: list[_Up] = []

    def run(self, context: dg.AssetExecutionContext) -> None:
        """One payload with marks."""
        marks = f"{self._directory}/{self.compute.mode}-{len(self.ups)}.json"
        bring_up: list[float] = []

        def call() -> None:
            ran = self.compute.run(context=context, payload_path=MARKS, extra_env=_SHAPE.environment(marks))
            bring_up.append(float(str(ran.metadata["Ray bring-up (s)"].value)))

        run = measured(self._edge, marks, lambda: clocked(call))
        newest = f"$(ls -t {self._directory}/ours/runs/*/slurm.log | head -n 1)"
        born = float(self._edge.shell(f"stat --format=%.W {newest}"))
        self.ups.append(_Up(run, bring_up[0], born))


def bring_up(options: Options) -> list[Figure]:
    """One `srun` over two components must cost about what one over as many nodes of one kind does."""
    edge = Edge()
    with edge.directory() as directory:
        first = SlurmQueueConfig(partition="compute", num_nodes=1, cpus_per_node=CPUS, mem=_SHAPE.memory)
        second = SlurmQueueConfig(partition="gpu", num_nodes=2, cpus_per_node=CPUS, mem=_SHAPE.memory, gpus_per_node=1)
        components = [HetComponent(component_id="cpu", queue=first), HetComponent(component_id="gpu", queue=second)]
        one_kind = _Party(edge, directory)
        two_kinds = _Party(edge, directory, mode="slurm-hetjob", components=components)

        def body(context: dg.AssetExecutionContext, compute: ComputeResource) -> None:  # noqa: ARG001
            alternate(options.repeat(_ROUNDS) + 1, lambda: two_kinds.run(context), lambda: one_kind.run(context))

        with instance() as dagster, quiet():
            in_step(one_kind.compute, dagster, body)
        # The first round fills caches.
        return _figures(one_kind.ups[1:], two_kinds.ups[1:], edge)


def _figures(one_kind: list[_Up], two_kinds: list[_Up], edge: Edge) -> list[Figure]:
    incomplete = [up.run.marks["nodes"] for up in (*one_kind, *two_kinds) if up.run.marks["nodes"] != _SHAPE.nodes]
    problem = f"{incomplete[0]} of {_SHAPE.nodes} nodes were alive at the payload's first look" if incomplete else None

    def compared(name: str, value: Callable[[_Up], float], also: tuple[Sample, ...] = ()) -> Figure:
        hand = Sample.of(_HOMOGENEOUS, [value(up) for up in one_kind])
        ours = Sample.of(_HETEROGENEOUS, [value(up) for up in two_kinds])
        ratio = Sample.of("ratio of medians", [ours.median / hand.median], "x")
        return Figure(f"hetjob.bring_up: {name}", hand, ours, ratio, _RATIO_BAR, also=also, problem=problem)

    # Slurm's backfill scheduler, which alone starts heterogeneous jobs, looks at the queue only now and then.
    queued = tuple(
        Sample.of(f"from run() to the job's start, {label}", [up.job_start - up.run.start for up in ups])
        for label, ups in ((_HOMOGENEOUS, one_kind), (_HETEROGENEOUS, two_kinds))
    )
    figures = [
        compared("Ray bring-up", lambda up: up.bring_up),
        compared("job's start to the payload's first line", lambda up: up.from_job, queued),
    ]
    if edge.accounting:
        figures.append(_calls(one_kind, two_kinds, edge))
    return figures


def _calls(one_kind: list[_Up], two_kinds: list[_Up], edge: Edge) -> Figure:
    """How often `srun` was called: a step that spans components is one in each of them, with one number."""

    def sample(label: str, ups: list[_Up]) -> Sample:
        return Sample.of(label, [float(calls) for calls in edge.steps([up.run.job for up in ups])], "calls")

    ours = sample(_HETEROGENEOUS, two_kinds)
    return Figure("hetjob.bring_up: calls of srun", sample(_HOMOGENEOUS, one_kind), ours, ours, 1)
