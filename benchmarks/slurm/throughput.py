"""`session.throughput` and `session.race`: many payloads at once in one session, and many callers at once for one."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dagster as dg

from dagster_rayslurm import ComputeResource
from stack.settings import ROOT

from ..figures import Figure, Options, Sample
from ..parties.edge import Edge
from ..parties.runs import Shape, quiet
from ..parties.scripts import ByScript
from ..parties.sessions import DRIVER, HELLO, session
from ..steps import base_dir, in_step, instance

# No annotations from the future here: Dagster wants the type of `context` itself, not its name.

_AT_ONCE = 8
_COUNT, _SMALL_COUNT = 32, 64
_RATIO_BAR, _RATE_BAR = 0.8, 5.0
_RAY = Shape(mem="3900M")
"""Eight drivers with their workers need more than one."""
_SMALL = Shape(ray=False, mem="1500M")
_CALLERS = 20


def throughput(options: Options) -> list[Figure]:
    """Payloads per second, eight at once, beside a loop of eight drivers at once on the head of such a cluster."""
    edge = Edge()
    figures = []
    with base_dir() as scratch, edge.directory() as directory, edge.by_hand(scratch) as by_hand:
        limit = ByScript(edge, by_hand, directory, options.partition)
        for shape, payload, count in ((_RAY, DRIVER, _COUNT), (_SMALL, HELLO, _SMALL_COUNT)):
            theirs = [_raw(limit, shape, payload, count) for _ in range(options.repeat(2))]
            rates: list[float] = []
            with session(edge, directory, options.partition, shape, at_once=_AT_ONCE) as warm:

                def body(context: dg.AssetExecutionContext, compute: ComputeResource) -> None:  # noqa: ARG001
                    warm.several(context, payload, _AT_ONCE, _AT_ONCE)  # noqa: B023
                    for _ in range(options.repeat(2)):
                        rates.append(warm.several(context, payload, count, _AT_ONCE))  # noqa: B023

                with instance() as dagster, quiet():
                    in_step(warm.compute, dagster, body)
            hand, ours = Sample.of("loop by hand", theirs, "per s"), Sample.of("run()", rates, "per s")
            ratio = Sample.of("ratio of medians", [ours.median / hand.median], "x")
            if shape.ray:
                figures.append(Figure("session.throughput: Ray", hand, ours, ratio, _RATIO_BAR, at_least=True))
            else:
                figures.append(Figure("session.throughput: no Ray", hand, ours, ours, _RATE_BAR, at_least=True, also=(ratio,)))
        limit.tidy()
    return figures


def _raw(limit: ByScript, shape: Shape, payload: Path, count: int) -> float:
    variables = {"BENCH_DRIVER": payload.name, "BENCH_COUNT": str(count), "BENCH_AT_ONCE": str(_AT_ONCE)}
    return count / float(limit.run(shape, BENCH_PAYLOAD="raw_drivers.py", **variables).marks["total"])


def race(options: Options) -> list[Figure]:
    """Processes that ask for a session at the same time: one submits, and all payloads run in its job."""
    edge = Edge()
    seconds: list[float] = []
    alone: list[float] = []
    submitted: list[int] = []
    problem = None
    with edge.directory() as directory:
        for number in range(options.repeat(1)):
            for callers, found in ((1, alone), (_CALLERS, seconds)):
                base = f"{directory}/race-{number}-{callers}"
                answers = at_once("race_step", callers, {"base": base, "partition": options.partition})
                found.append(max(answer["returned"] for answer in answers) - min(answer["start"] for answer in answers))
                submitted.append(len(edge.jobs_below(base)))
                if len({answer["job"] for answer in answers}) != 1:
                    problem = f"payloads ran in the jobs {sorted({answer['job'] for answer in answers})}"
                edge.end_jobs_below(base)
    jobs = Sample.of(f"{_CALLERS} processes at once", [float(max(submitted))], "jobs")
    one, all_of_them = Sample.of("one process", alone), Sample.of(f"{_CALLERS} processes at once", seconds)
    each = Sample.of("for each caller more", [(all_of_them.median - one.median) / (_CALLERS - 1)])
    return [
        Figure("session.race: jobs submitted", Sample.of("the least", [1], "jobs"), jobs, jobs, 1, problem=problem),
        Figure("session.race: until all have run", one, all_of_them, each, 1.0, problem=problem),
    ]


def at_once(program: str, callers: int, site: dict[str, Any]) -> Sequence[dict[str, Any]]:
    """What processes of a program tell that all begin at the same moment, once each of them is ready."""
    command = [sys.executable, "-m", f"{__package__}.{program}", json.dumps(site)]
    with base_dir() as scratch:
        log = Path(scratch) / "log"
        with log.open("w") as output:
            processes = [
                subprocess.Popen(
                    command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, text=True, bufsize=1
                )
                for _ in range(callers)
            ]
            try:
                answers = []
                for process in processes:
                    assert process.stdout is not None
                    if process.stdout.readline() != "ready\n":
                        raise RuntimeError(f"a caller ended early:\n{log.read_text()[-4000:]}")
                for process in processes:
                    assert process.stdin is not None
                    process.stdin.write("go\n")
                for process in processes:
                    line = process.communicate(timeout=300)[0].strip()
                    if not line:
                        raise RuntimeError(f"a caller failed:\n{log.read_text()[-4000:]}")
                    answers.append(json.loads(line))
                return answers
            finally:
                for process in processes:
                    if process.poll() is None:
                        process.kill()
                    process.wait()
