"""`local.first`: how long until the Ray cluster of a first step is alive, beside `ray start` with the same options."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import dagster as dg

from dagster_rayslurm import ComputeResource, RayLauncher
from dagster_rayslurm.runtime.node import network, resources
from dagster_rayslurm.runtime.process import processes
from dagster_rayslurm.runtime.process.scratch import Scratch
from dagster_rayslurm.runtime.protocol.record import JOURNAL, LineReader
from dagster_rayslurm.runtime.ray.ray_node import start_arguments

from ..figures import Figure, Options, Sample
from ..steps import PAYLOADS, alternate, base_dir, below, in_step, instance, settle

_BAR = 1.15
_HELLO = PAYLOADS / "hello.py"
_STORE_GB = 0.25
_RAY = "from ray.scripts.scripts import main; main()"
"""What the `ray` command does; it need not be on the PATH."""


def local_first(options: Options, dashboard: bool) -> Figure:
    """The first Ray step of a process, from the call of `run()` on."""
    launcher = RayLauncher(object_store_memory_gb=_STORE_GB, dashboard=dashboard)
    by_hand: list[float] = []
    ours: list[float] = []
    bring_up: list[float] = []

    def body(context: dg.AssetExecutionContext, compute: ComputeResource) -> None:
        around = below()

        def start_by_hand() -> None:
            by_hand.append(_start_by_hand(launcher))
            settle(around)

        def start_ours() -> None:
            seconds, ray_seconds = _start_ours(context, compute)
            ours.append(seconds)
            bring_up.append(ray_seconds)
            settle(around)

        alternate(options.repeat(5) + 1, start_by_hand, start_ours)

    with base_dir() as base, instance() as dagster:
        in_step(ComputeResource(local_base=base, default_launcher=launcher, keep_run_dirs="all"), dagster, body)
    # The first round reads Ray from the disk.
    hand = Sample.of("`ray start` to alive", by_hand[1:])
    our = Sample.of("run() to alive", ours[1:])
    return Figure(
        name="local.first.dashboard" if dashboard else "local.first",
        by_hand=hand,
        ours=our,
        result=Sample.of("ratio", [our.median / hand.median], "x"),
        bar=_BAR,
        also=(
            Sample.of("Ray bring-up as in metadata", bring_up[1:]),
            # Ray's own start varies by a second on a busy machine; the fastest ones vary least.
            Sample.of("ratio of the fastest", [min(our.values) / min(hand.values)], "x"),
        ),
    )


def _start_ours(context: dg.AssetExecutionContext, compute: ComputeResource) -> tuple[float, float]:
    """Seconds from the call of `run()` to the cluster being alive, and those that metadata names."""
    runs = Path(compute.local_base) / "runs"
    before = set(runs.glob("*"))
    called = time.time()
    run = compute.run(context=context, payload_path=_HELLO)
    (run_dir,) = set(runs.glob("*")) - before
    records = LineReader().feed((run_dir / JOURNAL).read_bytes())
    ready = next(record["at"] for record in records if record.get("phase") == "cluster-ready")
    bring_up = run.metadata["Ray bring-up (s)"].value
    assert isinstance(bring_up, float)
    return ready - called, bring_up


def _start_by_hand(launcher: RayLauncher) -> float:
    """Seconds from `ray start` to its head being alive in the GCS."""
    scratch = Scratch()
    try:
        token = Path(scratch.join("token"))
        token.touch(0o600)
        token.write_text(secrets.token_hex(32))
        chosen = network.choose_ports()
        arguments = start_arguments(launcher.ray_spec(), resources.detect(), chosen, scratch.ray_temp_dir, None)
        env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        env.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(token), RAY_USAGE_STATS_ENABLED="0")
        with _probe(chosen.gcs, env) as probe:
            started = time.time()
            with _running([sys.executable, "-c", _RAY, "start", *arguments], env):
                assert probe.stdout is not None
                return float(probe.stdout.readline()) - started
    finally:
        scratch.remove()


@contextmanager
def _probe(port: int, env: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A process that prints when the head is alive; it has paid for its imports when this returns."""
    command = [sys.executable, str(Path(__file__).with_name("probe.py")), f"127.0.0.1:{port}"]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as probe:
        try:
            assert probe.stdout is not None
            probe.stdout.readline()
            yield probe
        finally:
            probe.kill()


@contextmanager
def _running(command: list[str], env: dict[str, str]) -> Iterator[None]:
    """`ray start --block` with everything below it, which ends with the context or with this process."""
    process = subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=processes.die_with_parent(),
    )
    try:
        yield
    finally:
        started = [child.pid for child in processes.descendants(process.pid)]
        processes.signal_group(process.pid, signal.SIGKILL)
        processes.kill_all(started)
        process.wait()


without_dashboard = partial(local_first, dashboard=False)
with_dashboard = partial(local_first, dashboard=True)
