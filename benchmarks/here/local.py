"""`local.bash` and `local.warm`: what `run()` adds to the payload's own process."""

from __future__ import annotations

import os
import sys
from contextlib import redirect_stderr

import dagster as dg

from dagster_rayslurm import BashLauncher, ComputeResource, RayLauncher

from ..figures import Figure, Options, Sample
from ..steps import PAYLOADS, alternate, base_dir, below, in_step, instance, process_seconds, run_bare, settle, timed

_BAR = 0.3
_HELLO = PAYLOADS / "hello.py"
_DRIVER = PAYLOADS / "ray_driver.py"
_ENVIRONMENT = PAYLOADS / "environment.py"
_STORE_GB = 0.25


def local_bash(options: Options) -> Figure:
    """A trivial payload without a cluster, beside Dagster's own client for subprocesses."""
    bare: list[float] = []
    by_hand: list[float] = []
    ours: list[float] = []
    added: list[float] = []
    client = dg.PipesSubprocessClient()

    def body(context: dg.AssetExecutionContext, compute: ComputeResource) -> None:
        around = below()

        def run_ours() -> None:
            seconds, run = timed(lambda: compute.run(context=context, payload_path=_HELLO))
            settle(around)
            ours.append(seconds)
            added.append(seconds - process_seconds(run))

        alternate(
            options.repeat(15) + 1,
            lambda: bare.append(run_bare(context, _HELLO)),
            lambda: by_hand.append(timed(lambda: client.run(context=context, command=[sys.executable, str(_HELLO)]))[0]),
            run_ours,
        )

    with base_dir() as base, instance() as dagster:
        in_step(ComputeResource(local_base=base, default_launcher=BashLauncher()), dagster, body)
    # The first round fills caches: bytecode, the runtime's archive.
    return Figure(
        name="local.bash",
        by_hand=Sample.of("PipesSubprocessClient", by_hand[1:]),
        ours=Sample.of("run()", ours[1:]),
        result=Sample.of("run() - payload process", added[1:]),
        bar=_BAR,
        also=(Sample.of("bare subprocess", bare[1:]),),
    )


def local_warm(options: Options) -> Figure:
    """A Ray driver on a warm cluster, beside the same driver started by hand on the very same cluster."""
    by_hand: list[float] = []
    ours: list[float] = []
    added: list[float] = []

    def compare(context: dg.AssetExecutionContext, compute: ComputeResource, ray_env: dict[str, str]) -> None:
        def run_ours() -> None:
            seconds, run = timed(lambda: compute.run(context=context, payload_path=_DRIVER))
            ours.append(seconds)
            added.append(seconds - process_seconds(run))

        alternate(options.repeat(7) + 1, lambda: by_hand.append(run_bare(context, _DRIVER, ray_env)), run_ours)

    def body(context: dg.AssetExecutionContext, compute: ComputeResource) -> None:
        around = below()
        first = compute.run(context=context, payload_path=_ENVIRONMENT)
        try:
            with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):  # Drivers tell where they connect to.
                compare(context, compute, dict(first.get_custom_messages()[0]))
        finally:
            compute.cleanup_cluster(first.cluster_id)
            settle(around)

    launcher = RayLauncher(object_store_memory_gb=_STORE_GB)
    with base_dir() as base, instance() as dagster:
        in_step(ComputeResource(local_base=base, default_launcher=launcher, enable_cluster_reuse=True), dagster, body)
    # The first drivers find no worker processes yet.
    return Figure(
        name="local.warm",
        by_hand=Sample.of("bare subprocess, same cluster", by_hand[1:]),
        ours=Sample.of("run()", ours[1:]),
        result=Sample.of("run() - payload process", added[1:]),
        bar=_BAR,
    )
