"""`slurm.first` and `slurm.bash`: one Slurm job per asset, beside a script by hand and dagster-slurm, turn by turn."""

import contextlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Optional

import dagster as dg

from dagster_rayslurm import ComputeResource

from .edge import Edge
from .figures import Figure, Options, Sample
from .slurm_limit import Limit
from .slurm_peer import Peer, peer
from .slurm_runs import Ours, Run, Shape, quiet
from .steps import alternate, base_dir, in_step, instance

# No annotations from the future here: Dagster wants the type of `context` itself, not its name.

_ROUNDS = 5
_LONG, _ROUNDS_IF_LONG = 25.0, 3
"""Seconds from which on a run of the peer is a long one, and how many of those must do."""

_FIRST_RATIO_BAR, _FIRST_BAR = 1.15, 7.5
_EXIT_BAR, _LAST_LINE_BAR, _GONE_BAR, _BASH_BAR = 0.3, 1.3, 2.0, 1.0


@dataclass
class Compared:
    """Runs of the same payload by all parties."""

    ours: list[Run]
    limit: list[Run]
    peer: list[Run]
    limit_label: str
    peer_label: str

    def sample(self, party: str, value: Callable[[Run], float], what: str = "") -> Sample:
        """One value of each run of a party."""
        runs: Sequence[Run] = getattr(self, party)
        name = {"ours": Ours.label, "limit": self.limit_label, "peer": f"{self.peer_label}, {len(runs)} runs"}[party]
        return Sample.of(f"{name}{what and ', ' + what}", [value(run) for run in runs])

    def others(self, value: Callable[[Run], float], what: str = "") -> tuple[Sample, ...]:
        """The same of dagster-slurm, if it takes part."""
        return (self.sample("peer", value, what),) if self.peer else ()


@dataclass(frozen=True)
class Parties:
    """Whoever takes part."""

    edge: Edge
    ours: Ours
    limit: Limit
    peer: Optional[Peer]


@contextlib.contextmanager
def parties(options: Options) -> Iterator[Parties]:
    """All parties, ready on the stack."""
    edge = Edge()
    with contextlib.ExitStack() as stack:
        directory, scratch = stack.enter_context(edge.directory()), stack.enter_context(base_dir())
        limit = Limit(edge, stack.enter_context(edge.by_hand(scratch)), directory, options.partition)
        stack.callback(limit.tidy)
        other = stack.enter_context(peer(edge, directory, options.partition, scratch)) if options.peer else None
        yield Parties(edge, Ours(edge, directory, options.partition), limit, other)


def first(options: Options) -> list[Figure]:
    """Ray on one and on two nodes: until the payload's first line, from its end on, and until Slurm has its nodes back."""
    figures: list[Figure] = []
    with parties(options) as all_of_them:
        for nodes in (1, 2):
            compared = compare(options, all_of_them, Shape(nodes))
            figures += ray_figures(compared, nodes, all_of_them.edge)
    return figures


def bash(options: Options) -> Figure:
    """A trivial payload without Ray: all that is not the payload's own work."""
    with parties(options) as all_of_them:
        compared = compare(options, all_of_them, Shape(ray=False))
    ours = compared.sample("ours", lambda run: run.added)
    return Figure(
        name="slurm.bash: total - payload's work",
        by_hand=compared.sample("limit", lambda run: run.added),
        ours=ours,
        result=ours,
        bar=_BASH_BAR,
        also=compared.others(lambda run: run.added),
    )


def compare(options: Options, takes_part: Parties, shape: Shape) -> Compared:
    """Everybody's runs in turns; the first round, which fills caches, does not count."""
    rounds = options.repeat(_ROUNDS)
    found = Compared([], [], [], takes_part.limit.label, takes_part.peer.label if takes_part.peer else "")

    def body(context: dg.AssetExecutionContext, compute: ComputeResource) -> None:
        def run_peer() -> None:
            if takes_part.peer and not _enough(found.peer):
                found.peer.append(takes_part.peer.run(shape))

        alternate(
            rounds + 1,
            lambda: found.ours.append(takes_part.ours.run(context, compute, shape)),
            run_peer,
            lambda: found.limit.append(takes_part.limit.run(shape)),
        )

    with instance() as dagster, quiet():
        in_step(takes_part.ours.resource(shape), dagster, body)
    for runs in (found.ours, found.limit, found.peer):
        del runs[:1]
    return found


def _enough(runs: list[Run]) -> bool:
    """Whether there are enough runs that take long, without the first."""
    seconds = [run.returned - run.start for run in runs[1:]]
    return len(seconds) >= _ROUNDS_IF_LONG and statistics.median(seconds) > _LONG


def ray_figures(compared: Compared, nodes: int, edge: Edge) -> list[Figure]:
    """What is promised of a Ray cluster of so many nodes."""
    where = f"{nodes} node{'s' if nodes > 1 else ''}"
    incomplete = [run.marks["nodes"] for run in compared.ours if run.marks["nodes"] != nodes]
    problem = f"{incomplete[0]} of {nodes} nodes were alive at the payload's first look" if incomplete else None

    def figure(name: str, value: Callable[[Run], float], bar: float, peer_too: bool = True) -> Figure:
        ours = compared.sample("ours", value)
        hand = compared.sample("limit", value)
        also = compared.others(value) if peer_too else ()
        return Figure(f"slurm.first, {where}: {name}", hand, ours, ours, bar, also=also, problem=problem)

    def to_first(run: Run) -> float:
        return run.to_first_line

    hand, ours = compared.sample("limit", to_first), compared.sample("ours", to_first)
    ratio = Sample.of("ratio of medians", [ours.median / hand.median], "x")
    fastest = Sample.of("ratio of the fastest", [min(ours.values) / min(hand.values)], "x")
    also = (fastest, *compared.others(to_first))
    figures = [
        Figure(f"slurm.first, {where}: to the first line", hand, ours, ratio, _FIRST_RATIO_BAR, also=also, problem=problem),
        figure("payload's exit to the return", lambda run: run.from_exit, _EXIT_BAR),
        figure("its last line to the return", lambda run: run.from_last_line, _LAST_LINE_BAR),
        # By the payload's exit instead of the record of it, which comes a little later. Squeue is looked at from the
        # return on, which tells nothing of somebody who returns late.
        figure("payload's exit to gone from squeue", lambda run: run.to_gone, _GONE_BAR, peer_too=False),
    ]
    if edge.accounting:
        figures.append(_steps(compared, where, edge))
    if nodes > 1:
        figures.insert(1, figure("to the first line, in seconds", to_first, _FIRST_BAR))
    return figures


def _steps(compared: Compared, where: str, edge: Edge) -> Figure:
    """How often `srun` was called in each job."""

    def sample(label: str, runs: list[Run]) -> Sample:
        return Sample.of(label, [float(steps) for steps in edge.steps([run.job for run in runs])], "steps")

    ours = sample(Ours.label, compared.ours)
    return Figure(
        name=f"slurm.first, {where}: calls of srun",
        by_hand=sample(compared.limit_label, compared.limit),
        ours=ours,
        result=ours,
        bar=1,
        also=(sample(compared.peer_label, compared.peer),) if compared.peer else (),
    )
