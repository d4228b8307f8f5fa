"""One Dagster process with many steps' payloads at once: says "ready" inside a step, and runs them once it is told to."""

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import dagster as dg

from dagster_rayslurm import ComputeResource

from ..parties.edge import Edge
from ..parties.runs import Shape
from ..parties.sessions import session
from ..steps import PAYLOADS, in_step, instance

# No annotations from the future here: Dagster wants the type of `context` itself, not its name.

WAIT = PAYLOADS / "wait.py"


def main() -> None:
    site, edge = json.loads(sys.argv[1]), Edge()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # Payloads' output goes where the errors go.
    steps, shape = site["steps"], Shape(ray=False, mem="3900M")
    with session(edge, site["directory"], site["partition"], shape, at_once=steps) as warm:

        def body(context: dg.AssetExecutionContext, compute: ComputeResource) -> None:  # noqa: ARG001
            answers.write("ready\n")
            sys.stdin.readline()
            with ThreadPoolExecutor(steps) as pool:
                run = lambda _: warm.run(context, WAIT, extra_env={"BENCH_STOP": site["stop"]}, uses_pipes=False)  # noqa: E731
                list(pool.map(run, range(steps)))
            answers.write("over\n")
            sys.stdin.readline()

        with instance() as dagster:
            in_step(warm.compute, dagster, body)


if __name__ == "__main__":
    main()
