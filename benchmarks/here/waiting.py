"""`waiting`: what two thousand payloads that are awaited and wait in Slurm's queue cost the process of their run.

The Slurm is a fake one on this machine, so that the queue has as many jobs. The process is killed and the run re-executed, which
must find each job again.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import psutil
import pytest

from stack.settings import ROOT
from tests.fake_slurm import FakeSlurm

from ..figures import Figure, Options, Sample
from ..steps import base_dir

_COUNT, _QUICK_COUNT = 2000, 50
_WATCHED, _QUICK_WATCHED = 120.0, 20.0  # Seconds for which the processor time is taken.
_MIB = 2**20
_CPU, _MEMORY, _FOUND = 10.0, 250.0, 60.0  # Percent of a core, MiB, and seconds, that are promised.


def waiting(options: Options) -> list[Figure]:
    """Processor time and memory while all payloads wait, and the seconds in which a re-execution has found all of them again."""
    count, watched = (_QUICK_COUNT, _QUICK_WATCHED) if options.quick else (_COUNT, _WATCHED)
    with base_dir() as base, pytest.MonkeyPatch.context() as patch:
        home = Path(base, "home")
        home.mkdir()
        (home / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
        slurm = FakeSlurm(Path(base, "slurm"), patch, starts=False, runs=False)
        with _step(home, count, base) as (process, told):
            told("began")
            resident = process.memory_info().rss
            threads = told("waiting")["threads"]
            began, used, asked = time.monotonic(), _used(process), len(slurm.calls("squeue"))
            time.sleep(watched)
            seconds = time.monotonic() - began
            cpu, memory = 100 * (_used(process) - used) / seconds, (process.memory_info().rss - resident) / _MIB
            squeues = 60 * (len(slurm.calls("squeue")) - asked) / seconds
        with dg.DagsterInstance.from_config(str(home)) as instance:
            [run] = instance.get_runs()
            instance.report_run_failed(run)
        with _step(home, count, base, run.run_id) as (_, told):
            found = told("began")["began"]
            found = told("waiting")["waiting"] - found
        jobs = len(slurm.jobs())
        problem = None if jobs == count else f"there are {jobs} jobs"
    also = (Sample.of("threads", [threads], ""), Sample.of("squeue in a minute", [squeues], ""))
    figures = (("processor time", cpu, "%", _CPU), ("memory", memory, "MiB", _MEMORY), ("until found again", found, "s", _FOUND))
    return [
        Figure(f"{count:,} jobs wait, {name}", None, each, each, bar, also=also, problem=problem)
        for name, value, unit, bar in figures
        for each in [Sample.of("run_async()", [value], unit)]
    ]


def _used(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@contextlib.contextmanager
def _step(home: Path, *words: Any) -> Iterator[tuple[psutil.Process, Any]]:
    """Runs the step; yields its process, and a function that waits for an object with some key. The process is killed."""
    env = {**os.environ, "DAGSTER_HOME": str(home), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "benchmarks.here.waiting_step", *map(str, words)]
    process = subprocess.Popen(command, env=env, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert process.stderr is not None
    said: list[str] = []

    def told(key: str) -> Any:
        assert process.stderr is not None
        for line in process.stderr:
            with contextlib.suppress(ValueError, TypeError):
                found = json.loads(line)
                if key in found:
                    return found
            said.append(line)
        raise RuntimeError(f"the step has ended: {''.join(said[-20:])}")

    try:
        yield psutil.Process(process.pid), told
    finally:
        process.kill()
        process.communicate()
