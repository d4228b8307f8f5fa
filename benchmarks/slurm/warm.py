"""`session.warm`, `session.preload`, `session.bash`, `session.calls`: a step that finds its session warm."""

import time
from collections.abc import Callable

import dagster as dg

from dagster_rayslurm import ComputeResource

from ..figures import Figure, Options, Sample
from ..here.preload import PAUSE
from ..parties.edge import Edge
from ..parties.peer import peer
from ..parties.runs import Run, Shape, quiet
from ..parties.scripts import ByScript
from ..parties.sessions import HELLO, Session, session
from ..steps import base_dir, in_step, instance, timed

# No annotations from the future here: Dagster wants the type of `context` itself, not its name.

_STEPS, _PEER_STEPS, _BASH_STEPS = 20, 4, 15
_WARM_BAR, _WARM_P95_BAR, _LAST_LINE_BAR, _PRELOAD_BAR, _BASH_BAR = 0.5, 1.0, 1.3, 0.9, 0.5
_COMMANDS_BAR, _CONTROLLER_BAR = 1.0, 0.1
"""Of each step; slurmctld may be asked now and then whether the session's job lives, whatever the number of steps."""
_RAY, _SMALL = Shape(), Shape(ray=False)


def warm(options: Options) -> list[Figure]:
    """Small Ray payloads on a warm cluster, each in an interpreter of its own; logins, commands and calls of Slurm."""
    edge, steps = Edge(), options.repeat(_STEPS)
    runs: list[tuple[Run, float]] = []
    counts: list[tuple[int, int]] = []
    with base_dir() as scratch, edge.directory() as directory, edge.key(scratch, "ours", directory) as key:
        with session(edge, directory, options.partition, _RAY, key=key.path) as warm:

            def body(context: dg.AssetExecutionContext, compute: ComputeResource) -> None:  # noqa: ARG001
                for _ in range(2):  # The first starts it, the second finds all caches full.
                    warm.marked(context)
                counts.append((edge.commands(key), edge.controller_calls()))
                for _ in range(steps):
                    runs.append(warm.marked(context))
                counts.append((edge.commands(key), edge.controller_calls()))

            with instance() as dagster, quiet():
                in_step(warm.compute, dagster, body)
        logins = edge.logins(key.fingerprint)
        by_hand = _by_hand(edge, scratch, directory, options, "ray_driver.py", _RAY)
        peers = _peer_runs(edge, directory, options, scratch) if options.peer else []
        label = peers[0][0] if peers else ""
    ours = Sample.of("run()", [run.returned - run.start for run, _ in runs])
    added = Sample.of("run() - payload process", [run.returned - run.start - process for run, process in runs])
    from_last = Sample.of("run()", [run.from_last_line for run, _ in runs])
    problem = None if len(warm.jobs) == 1 else f"the session had {len(warm.jobs)} jobs"

    def theirs(value: Callable[[Run], float]) -> tuple[Sample, ...]:
        return (Sample.of(f'{label}, allocation_scope="run"', [value(run) for _, run in peers]),) if peers else ()

    works = Sample.of("slurm-session", [run.added for run, _ in runs])
    per_step = [(after - before) / steps for before, after in zip(*counts, strict=True)]
    return [
        Figure("session.warm: median", by_hand, ours, added, _WARM_BAR, problem=problem),
        Figure("session.warm: p95", by_hand, ours, Sample.of("p95", [added.p95]), _WARM_P95_BAR, problem=problem),
        # The peer's payloads end late, so that their processes are no measure of what it adds; their work is.
        Figure("session.warm: total - payload's work", None, works, works, None, others=theirs(lambda run: run.added)),
        Figure(
            "session.warm: payload's last line to the return",
            None,
            from_last,
            from_last,
            _LAST_LINE_BAR,
            others=theirs(lambda run: run.from_last_line),
            also=(Sample.of("p95", [from_last.p95]),),
        ),
        _count("session.warm: commands on the edge", per_step[0], _COMMANDS_BAR, steps),
        _count("session.warm: calls of slurmctld", per_step[1], _CONTROLLER_BAR, steps),
        _count("session.warm: logins in all", float(logins), 1, steps),
    ]


def _count(name: str, value: float, bar: float, steps: int) -> Figure:
    ours = Sample.of(f"over {steps} warm steps", [value], "each" if "logins" not in name else "")
    return Figure(name, Sample.of("by hand", [bar if bar >= 1 else 0.0], ours.unit), ours, ours, bar)


def _by_hand(edge: Edge, scratch: str, directory: str, options: Options, driver: str, shape: Shape) -> Sample:
    """The same driver, started on the head of such a cluster by a loop of a person's own."""
    with edge.by_hand(scratch) as by_hand:
        limit = ByScript(edge, by_hand, directory, options.partition)
        try:
            found = limit.run(shape, BENCH_PAYLOAD="raw_drivers.py", BENCH_DRIVER=driver, BENCH_COUNT="8", BENCH_AT_ONCE="1")
        finally:
            limit.tidy()
    return Sample.of("the driver by hand on the head", found.marks["seconds"])


def _peer_runs(edge: Edge, directory: str, options: Options, scratch: str) -> list[tuple[str, Run]]:
    """Its warm runs: all but the first, which starts the cluster."""
    with peer(edge, directory, options.partition, scratch) as other:
        return [(other.label, run) for run in other.run_several(_RAY, 1 + _PEER_STEPS)[1:]]


def preload(options: Options) -> Figure:
    """The same with Ray imported beforehand: the whole of `run()`."""
    edge = Edge()
    preloaded, fresh = [], []
    with edge.directory() as directory:
        with session(edge, directory, options.partition, _RAY, preload=("ray",)) as warm:

            def body(context: dg.AssetExecutionContext, compute: ComputeResource) -> None:  # noqa: ARG001
                for _ in range(2):
                    warm.marked(context)
                for _ in range(options.repeat(_STEPS)):
                    time.sleep(PAUSE)
                    preloaded.append(warm.marked(context)[0])

            with instance() as dagster, quiet():
                in_step(warm.compute, dagster, body)
        with session(edge, directory, options.partition, _RAY) as cold:

            def without(context: dg.AssetExecutionContext, compute: ComputeResource) -> None:  # noqa: ARG001
                for number in range(2 + options.repeat(5)):
                    time.sleep(PAUSE)
                    run = cold.marked(context)[0]
                    if number > 1:
                        fresh.append(run)

            with instance() as dagster, quiet():
                in_step(cold.compute, dagster, without)
    ours = Sample.of('run(), preload=["ray"]', [run.returned - run.start for run in preloaded])
    theirs = Sample.of("run(), fresh interpreter", [run.returned - run.start for run in fresh])
    return Figure("session.preload: total", theirs, ours, ours, _PRELOAD_BAR, also=(Sample.of("p95", [ours.p95]),))


def bash(options: Options) -> Figure:
    """A payload without Ray in a warm session, beside `srun --overlap` by hand into the same job."""
    edge = Edge()
    ours: list[float] = []
    added: list[float] = []
    by_hand: list[float] = []
    with base_dir() as scratch, edge.directory() as directory, edge.by_hand(scratch) as hand:
        edge.upload([HELLO], directory)
        with session(edge, directory, options.partition, _SMALL) as warm:

            def body(context: dg.AssetExecutionContext, compute: ComputeResource) -> None:  # noqa: ARG001
                warm.marked(context)
                (job,) = warm.jobs
                python = f"{edge.env['RAYSLURM_ENV_PATH']}/bin/python"
                srun = f"srun --quiet --overlap --jobid={job} --ntasks=1 --mem=0 {python} {directory}/{HELLO.name}"
                for _ in range(1 + options.repeat(_BASH_STEPS)):
                    by_hand.append(timed(lambda: hand.ssh(srun))[0])
                    ours.append(_added(warm, context, added))

            with instance() as dagster, quiet():
                in_step(warm.compute, dagster, body)
    mine = Sample.of("run()", ours[1:])
    result = Sample.of("run() - payload process", added[1:])
    hands = Sample.of("ssh … srun --overlap", by_hand[1:])
    return Figure("session.bash", hands, mine, result, _BASH_BAR, also=(Sample.of("p95", [result.p95]),))


def _added(warm: Session, context: dg.AssetExecutionContext, added: list[float]) -> float:
    run, process = warm.marked(context)
    added.append(run.returned - run.start - process)
    return run.returned - run.start
