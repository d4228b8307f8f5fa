"""`import`: what importing this package costs beyond importing Dagster."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from ..figures import Figure, Options, Sample
from ..steps import alternate

_BAR = 0.05
_PROGRAM = """
import json, sys, time
if sys.argv[1:] == ["--no-gc"]:
    import gc
    gc.disable()
times = [time.perf_counter()]
import dagster
times.append(time.perf_counter())
from dagster_rayslurm import ComputeResource
times.append(time.perf_counter())
print(json.dumps(times))
"""
"""Both imports in one fresh process: the difference of two processes would be lost in the noise of Dagster's own time."""


def imports(options: Options) -> Figure:
    """Seconds of `import dagster_rayslurm` in a fresh process that has imported Dagster."""
    by_hand: list[float] = []
    ours: list[float] = []
    beyond: list[float] = []
    uncollected: list[float] = []

    def import_both() -> None:
        begin, middle, end = _import()
        by_hand.append(middle - begin)
        ours.append(end - begin)
        beyond.append(end - middle)

    def import_without_collector() -> None:
        _, middle, end = _import("--no-gc")
        uncollected.append(end - middle)

    alternate(options.repeat(11) + 1, import_both, import_without_collector)
    # The first process writes the bytecode.
    return Figure(
        name="import",
        by_hand=Sample.of("import dagster", by_hand[1:]),
        ours=Sample.of("import dagster_rayslurm", ours[1:]),
        # A full garbage collection of all that Dagster keeps in memory falls into this import or the next one by chance.
        result=Sample.of("difference, without garbage collection", uncollected[1:]),
        bar=_BAR,
        also=(Sample.of("difference", beyond[1:]),),
    )


def _import(*arguments: str) -> list[float]:
    # Bytecode is what an installed package has; where an environment forbids to write it, every import would compile.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", _PROGRAM, *arguments]
    times: list[float] = json.loads(subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True).stdout)
    return times
