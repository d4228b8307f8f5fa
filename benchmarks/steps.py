"""What the figures share: a Dagster step to measure in, payloads run by hand, and quiet between two measurements."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import dagster as dg

from dagster_rayslurm import CompletedRun, ComputeResource
from dagster_rayslurm.runtime.process import processes

# No annotations from the future here: Dagster wants the type of `context` itself, not its name.
T = TypeVar("T")

PAYLOADS = Path(__file__).parent / "payloads"
_NO_CONSOLE = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
_SETTLE_DEADLINE = 60.0


def in_step(
    compute: ComputeResource, instance: dg.DagsterInstance, body: Callable[[dg.AssetExecutionContext, ComputeResource], T]
) -> T:
    """What `body` returns inside the step of an asset, where a user's code would be."""
    results: list[T] = []

    @dg.asset
    def measured(context: dg.AssetExecutionContext, compute: ComputeResource) -> dg.MaterializeResult:
        results.append(body(context, compute))
        return dg.MaterializeResult()  # A step that used Pipes must report its result itself.

    dg.materialize([measured], resources={"compute": compute}, instance=instance, run_config=_NO_CONSOLE)
    return results[0]


def timed(call: Callable[[], T]) -> tuple[float, T]:
    """Seconds that a call takes, and what it returns."""
    started = time.perf_counter()
    result = call()
    return time.perf_counter() - started, result


def process_seconds(run: CompletedRun) -> float:
    """Seconds that the payload's process took; metadata rounds them to a hundredth."""
    value = run.metadata["Elapsed (s)"].value
    assert isinstance(value, float)
    return value


def alternate(rounds: int, *measures: Callable[[], object]) -> None:
    """Measure everything in each round, backwards in every second one, so that a drift of the machine cancels out."""
    for number in range(rounds):
        for measure in measures if number % 2 == 0 else reversed(measures):
            measure()


def run_bare(context: dg.AssetExecutionContext, script: Path, env: Mapping[str, str] | None = None) -> float:
    """Seconds from start to end of a payload's process, with Pipes but nothing else around it."""
    injector, reader = dg.PipesTempFileContextInjector(), dg.PipesTempFileMessageReader()
    with dg.open_pipes_session(context, injector, reader) as session:
        full = {**os.environ, **(env or {}), **session.get_bootstrap_env_vars()}
        return timed(lambda: _run_process([sys.executable, str(script)], full))[0]


def _run_process(argv: Sequence[str], env: Mapping[str, str]) -> None:
    subprocess.run(argv, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)


def below() -> set[int]:
    """The processes below this one."""
    return {process.pid for process in processes.descendants(os.getpid())}


def settle(allowed: set[int]) -> None:
    """Wait until nothing but `allowed` runs below this process: what still ends would disturb what is measured next."""
    deadline = time.monotonic() + _SETTLE_DEADLINE
    while not below() <= allowed:
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {sorted(below() - allowed)} of an earlier run do not end")
        time.sleep(0.01)


@contextmanager
def base_dir() -> Iterator[str]:
    """A base directory that nobody else uses, so that no session of the user's own is found and nothing stays."""
    path = tempfile.mkdtemp(prefix="rayslurm-bench-")
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def instance() -> Iterator[dg.DagsterInstance]:
    """A Dagster instance with SQLite storage, as Dagster sets one up by default."""
    with base_dir() as path, dg.DagsterInstance.local_temp(path, overrides={"telemetry": {"enabled": False}}) as temporary:
        yield temporary
