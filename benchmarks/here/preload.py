"""`local.preload`: a Ray driver on a warm cluster, forked from an interpreter that has imported Ray or from none."""

from __future__ import annotations

import os
import time
from contextlib import redirect_stderr

import dagster as dg

from dagster_rayslurm import ComputeResource, RayLauncher

from ..figures import Figure, Options, Sample
from ..steps import PAYLOADS, alternate, base_dir, below, in_step, instance, settle, timed

_BAR = 0.9
_DRIVER = PAYLOADS / "ray_parts.py"
_STORE_GB = 0.25
PAUSE = 2.0
"""Seconds between two payloads, as between Dagster's steps in processes of their own; Ray gets workers ready meanwhile."""
_PARTS = {
    "first": "until the first line",
    "imports": "imports",
    "init": "ray.init",
    "tasks": "first tasks",
    "end": "all after them",
}
"""The parts of a run by the mark at which each of them ends, which the payload reports."""


class _Runs:
    """Runs of one kind: seconds in all, and of each part."""

    def __init__(self, launcher: RayLauncher) -> None:
        self.launcher = launcher
        self.seconds: list[float] = []
        self.parts: dict[str, list[float]] = {part: [] for part in _PARTS}
        self.preloaded: list[bool] = []

    def run(self, context: dg.AssetExecutionContext, compute: ComputeResource) -> str:
        time.sleep(PAUSE)
        started = time.time()
        seconds, run = timed(lambda: compute.run(context=context, payload_path=_DRIVER, launcher=self.launcher))
        marks = dict(run.get_custom_messages()[0])
        self.preloaded.append(marks["preloaded"])
        marks["end"] = started + seconds
        self.seconds.append(seconds)
        for part, since in zip(_PARTS, (started, *(marks[part] for part in _PARTS)), strict=False):
            self.parts[part].append(marks[part] - since)
        return run.cluster_id


def local_preload(options: Options) -> Figure:
    """The whole of a trivial payload: from `run()` to its return, with and without a fork."""
    plain = RayLauncher(object_store_memory_gb=_STORE_GB)
    fresh, forked = _Runs(plain), _Runs(plain.model_copy(update={"preload": ["ray"]}))

    def body(context: dg.AssetExecutionContext, compute: ComputeResource) -> None:
        around = below()
        with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):  # Drivers tell where they connect to.
            cluster_id = forked.run(context, compute)
            alternate(options.repeat(7), lambda: fresh.run(context, compute), lambda: forked.run(context, compute))
        compute.cleanup_cluster(cluster_id)
        settle(around)

    with base_dir() as base, instance() as dagster:
        in_step(ComputeResource(local_base=base, default_launcher=forked.launcher, enable_cluster_reuse=True), dagster, body)
    as_meant = all(forked.preloaded[1:]) and not any(fresh.preloaded)
    # The first one starts the cluster.
    return Figure(
        name="local.preload",
        by_hand=Sample.of("run() with a fresh interpreter", fresh.seconds),
        ours=Sample.of('run() with preload=["ray"]', forked.seconds[1:]),
        result=Sample.of("run() with preload, in all", forked.seconds[1:]),
        bar=_BAR,
        also=tuple(
            Sample.of(f"{what} ({kind})", runs.parts[part][skipped:])
            for part, what in _PARTS.items()
            for kind, runs, skipped in (("fresh", fresh, 0), ("forked", forked, 1))
        ),
        problem=None if as_meant else "payloads did not run as they should: forked ones fresh, or fresh ones forked",
    )
