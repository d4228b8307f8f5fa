"""`cold` and `slurm.bash`: a job of its own for each payload, all parties by turns."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Optional

import dagster as dg

from dagster_rayslurm import ComputeResource, ContainerEnvironment
from stack.container import IMAGE, MAKE_IMAGE

from ..figures import Figure, Options, Sample
from ..parties.edge import Edge
from ..parties.modes import first_of_session, heterogeneous, local
from ..parties.peer import Peer, peer
from ..parties.runs import Ours, Run, Shape, quiet
from ..parties.scripts import GUIDE, LIMIT, SYMMETRIC, ByScript
from ..steps import base_dir, in_step, instance

# No annotations from the future here: Dagster wants the type of `context` itself, not its name.

_ROUNDS, _SLOW_ROUNDS = 4, 2
"""How often everybody has a turn, and those do whose runs take long."""
_RATIO_BAR, _FIRST_BAR = 1.15, 7.5
_CONTAINER_BAR = 1.3
_EXIT_BAR, _LAST_LINE_BAR, _GONE_BAR, _BASH_BAR = 0.3, 1.3, 2.0, 1.0
_SHAPES = (Shape(1), Shape(2), Shape(4))
OURS, HAND = "slurm", LIMIT.label

Value = Callable[[Run], float]


@dataclass
class Party:
    """Somebody who takes part, with runs by the number of nodes.

    Attributes:
        label: what it is called.
        run: makes a run, or None where it has none for that shape.
        slow: whether it takes part in few rounds only.
        whole: whether its runs tell of all that comes after the first line.
    """

    label: str
    run: Callable[[dg.AssetExecutionContext, Shape], Optional[Run]]
    slow: bool = False
    whole: bool = True
    runs: dict[Shape, list[Run]] = field(default_factory=dict)

    def take_turn(self, context: dg.AssetExecutionContext, shape: Shape) -> None:
        """Make a run of a shape and keep it."""
        run = self.run(context, shape)
        if run is not None:
            self.runs.setdefault(shape, []).append(run)

    def sample(self, shape: Shape, value: Value, unit: str = "s") -> Optional[Sample]:
        """One value of each run."""
        runs = self.runs.get(shape, ())
        return Sample.of(self.label, [value(run) for run in runs], unit) if runs else None


@contextlib.contextmanager
def parties(options: Options, all_of_them: bool) -> Iterator[tuple[Edge, list[Party]]]:
    """Whoever takes part, ready on the stack: this project and the script by hand first."""
    edge = Edge()
    with contextlib.ExitStack() as stack:
        directory, scratch = stack.enter_context(edge.directory()), stack.enter_context(base_dir())
        by_hand = stack.enter_context(edge.by_hand(scratch))
        batch = Ours(edge, directory, options.partition)
        limit, guide, symmetric = (
            ByScript(edge, by_hand, directory, options.partition, script) for script in (LIMIT, GUIDE, SYMMETRIC)
        )
        for script in (limit, guide, symmetric):
            stack.callback(script.tidy)
        taking_part = [
            Party(OURS, lambda context, shape: batch.run(context, batch.resource(shape), shape)),
            Party(HAND, lambda _, shape: limit.run(shape)),
        ]
        if all_of_them:
            taking_part += [
                Party("slurm-session, first step", first_of_session(edge, directory, options.partition), whole=False),
                Party("slurm-hetjob", heterogeneous(edge, directory), slow=True),
                Party("local", local(edge)),
                Party(symmetric.label, lambda _, shape: symmetric.run(shape), slow=True),
                Party(guide.label, lambda _, shape: guide.run(shape), slow=True),
            ]
        if options.peer:
            other: Peer = stack.enter_context(peer(edge, directory, options.partition, scratch))
            taking_part.append(Party(other.label, lambda _, shape: other.run(shape), slow=True))
            if all_of_them:
                shared = f'{other.label}, allocation_scope="run"'
                taking_part.append(Party(shared, lambda _, shape: other.run_shared(shape), slow=True, whole=False))
        yield edge, taking_part


def compete(options: Options, edge: Edge, taking_part: list[Party], shapes: tuple[Shape, ...]) -> None:
    """Everybody's runs by turns, the slow ones' spread over the rounds; the first ones, which fill caches, do not count."""
    rounds = options.repeat(_ROUNDS)
    slow_rounds = {round(number * (rounds - 1) / max(1, _SLOW_ROUNDS - 1)) for number in range(_SLOW_ROUNDS)}

    def take_turn(context: dg.AssetExecutionContext, party: Party, shape: Shape) -> None:
        edge.wait_until_idle()
        party.take_turn(context, shape)

    def body(context: dg.AssetExecutionContext, compute: ComputeResource) -> None:  # noqa: ARG001
        if not options.quick:
            for party in taking_part:
                if not party.slow:
                    take_turn(context, party, shapes[0])
                    party.runs.clear()
        for number in range(rounds):
            for shape in shapes:
                turn = [party for party in taking_part if number in slow_rounds or not party.slow]
                for party in turn if number % 2 == 0 else reversed(turn):
                    take_turn(context, party, shape)

    # What the step gets is not used: each party has resources of its own.
    with instance() as dagster, quiet():
        in_step(ComputeResource(mode="local"), dagster, body)


def cold(options: Options) -> list[Figure]:
    """Ray from nothing: until the payload's first line, from its end on, and until Slurm has its nodes back."""
    shapes = _SHAPES[:2] if options.quick else _SHAPES
    with parties(options, all_of_them=True) as (edge, taking_part):
        compete(options, edge, taking_part, shapes)
        return [figure for shape in shapes for figure in _figures(taking_part, shape, edge)]


def _figures(taking_part: list[Party], shape: Shape, edge: Edge) -> list[Figure]:
    where = f"cold, {shape.nodes} node{'s' if shape.nodes > 1 else ''}"
    ours, hand, *others = taking_part
    counts = [run.marks["nodes"] for party in taking_part if party.label.startswith("slurm") for run in party.runs.get(shape, ())]
    incomplete = [count for count in counts if count != shape.nodes]
    problem = f"{incomplete[0]} of {shape.nodes} nodes were alive at the payload's first look" if incomplete else None
    # Four nodes on few CPUs tell of the CPUs: nothing is promised of them.
    promised = shape.nodes <= 2

    def figure(name: str, value: Value, bar: Optional[float], whole: bool = True, unit: str = "s", **more: object) -> Figure:
        mine, by_hand = ours.sample(shape, value, unit), hand.sample(shape, value, unit)
        assert mine is not None and by_hand is not None
        found = (party.sample(shape, value, unit) for party in others if party.whole or not whole)
        return Figure(
            name=f"{where}: {name}",
            by_hand=by_hand,
            ours=mine,
            result=more.pop("result", mine),  # type: ignore[arg-type]
            bar=bar if promised else None,
            others=tuple(filter(None, found)),
            problem=problem,
            **more,  # type: ignore[arg-type]
        )

    def to_first(run: Run) -> float:
        return run.to_first_line

    first = figure("to the first line", to_first, _RATIO_BAR, whole=False, tolerance=0.15)
    assert first.by_hand is not None
    ratio = Sample.of("ratio of medians", [first.ours.median / first.by_hand.median], "x")
    fastest = Sample.of("ratio of the fastest", [min(first.ours.values) / min(first.by_hand.values)], "x")
    figures = [figure("to the first line", to_first, _RATIO_BAR, whole=False, tolerance=0.15, result=ratio, also=(fastest,))]
    if shape.nodes == 2:
        figures.append(figure("to the first line, in seconds", to_first, _FIRST_BAR, whole=False))
    figures += [
        figure("payload's exit to the return", lambda run: run.from_exit, _EXIT_BAR, tolerance=1.0),
        figure("its last line to the return", lambda run: run.from_last_line, _LAST_LINE_BAR),
        # By the payload's exit instead of the record of it, which comes a little later. Squeue is looked at from the
        # return on, which tells nothing of somebody who returns late.
        figure("payload's exit to gone from squeue", lambda run: run.to_gone, _GONE_BAR, tolerance=1.0),
        figure("calls of slurmctld", lambda run: float(run.calls), None, whole=False, unit="calls", tolerance=0.5),
    ]
    if edge.accounting:
        figures.append(_steps(ours, hand, shape, where, edge))
    return figures


def _steps(ours: Party, hand: Party, shape: Shape, where: str, edge: Edge) -> Figure:
    """How often `srun` was called in each job."""

    def sample(party: Party) -> Sample:
        return Sample.of(party.label, [float(steps) for steps in edge.steps([run.job for run in party.runs[shape]])], "steps")

    mine = sample(ours)
    return Figure(f"{where}: calls of srun", sample(hand), mine, mine, 1)


def container(options: Options) -> list[Figure]:
    """The same run with the runtime, Ray and the payload in containers, and outside."""
    edge, shapes = Edge(), _SHAPES[:2]
    inside = ContainerEnvironment(image=IMAGE, runtime="charliecloud", mounts=["/opt/ray"], python="/opt/ray/bin/python")
    with edge.directory() as directory:
        edge.shell(f"set -- {IMAGE}\n{MAKE_IMAGE}")
        batch = Ours(edge, directory, options.partition)

        def run(**fields: Any) -> Callable[[dg.AssetExecutionContext, Shape], Run]:
            return lambda context, shape: batch.run(context, batch.resource(shape, **fields), shape)

        outside, within = Party("outside", run()), Party("in a container", run(environment=inside))
        compete(options, edge, [outside, within], shapes)
    figures = []
    for shape in shapes:
        plain, contained = (party.sample(shape, lambda run: run.to_first_line) for party in (outside, within))
        assert plain is not None and contained is not None
        ratio = Sample.of("ratio of medians", [contained.median / plain.median], "x")
        name = f"container, {shape.nodes} node{'s' if shape.nodes > 1 else ''}: to the first line"
        figures.append(Figure(name, plain, contained, ratio, _CONTAINER_BAR))
    return figures


def bash(options: Options) -> Figure:
    """A trivial payload without Ray: all that is not the payload's own work."""
    shape = Shape(ray=False)
    with parties(options, all_of_them=False) as (edge, taking_part):
        compete(options, edge, taking_part, (shape,))
    found = [party.sample(shape, lambda run: run.added) for party in taking_part]
    mine, hand, *others = (sample for sample in found if sample is not None)
    return Figure(
        "slurm.bash: total - payload's work", hand, mine, mine, _BASH_BAR, others=tuple(others), also=_end_lag(taking_part, shape)
    )


def _end_lag(taking_part: list[Party], shape: Shape) -> tuple[Sample, ...]:
    """From the payload's exit to the return, of everybody."""
    lags = ((party.label, party.sample(shape, lambda run: run.from_exit)) for party in taking_part)
    return tuple(Sample.of(f"payload's exit to the return, {label}", lag.values) for label, lag in lags if lag is not None)
