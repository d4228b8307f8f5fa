"""`session.first`: the step that starts a session, beside a job of the step's own and dagster-slurm's shared cluster."""

import dagster as dg

from dagster_rayslurm import ComputeResource

from .edge import Edge
from .figures import Figure, Options, Sample
from .session_runs import session
from .slurm_peer import peer
from .slurm_runs import Ours, Run, Shape, quiet
from .steps import alternate, base_dir, in_step, instance

# No annotations from the future here: Dagster wants the type of `context` itself, not its name.

_ROUNDS = 5
_RATIO_BAR = 1.15
_RAY = Shape()


def first(options: Options) -> Figure:
    """Until the payload's first line: a session must not cost more than the job that it is."""
    edge = Edge()
    ours: list[Run] = []
    per_asset: list[Run] = []
    also: tuple[Sample, ...] = ()
    with base_dir() as scratch, edge.directory() as directory:
        batch = Ours(edge, directory, options.partition)

        def body(context: dg.AssetExecutionContext, compute: ComputeResource) -> None:
            def run_first() -> None:
                with session(edge, directory, options.partition, _RAY) as new:
                    ours.append(new.marked(context)[0])

            alternate(options.repeat(_ROUNDS) + 1, run_first, lambda: per_asset.append(batch.run(context, compute, _RAY)))

        with instance() as dagster, quiet():
            in_step(batch.resource(_RAY), dagster, body)
        if options.peer:
            with peer(edge, directory, options.partition, scratch) as other:
                found = [other.run_several(_RAY, 1)[0].to_first_line for _ in range(2)]
                also = (Sample.of(f"{other.label}, allocation_scope='run'", found),)
    mine = Sample.of("first step of a session", [run.to_first_line for run in ours[1:]])
    theirs = Sample.of("mode slurm", [run.to_first_line for run in per_asset[1:]])
    ratio = Sample.of("ratio of medians", [mine.median / theirs.median], "x")
    return Figure("session.first: to the first line", theirs, mine, ratio, _RATIO_BAR, also=also)
