"""`waiting`: what two thousand payloads that are awaited and wait in Slurm's queue cost the process of their run.

Slurm's programs are scripts on this machine, so that the queue has as many jobs. The process is killed and the run re-executed,
which must find each job again.
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

from stack.settings import ROOT

from ..figures import Figure, Options, Sample
from ..steps import base_dir

_COUNT, _QUICK_COUNT = 2000, 50
_WATCHED, _QUICK_WATCHED = 120.0, 20.0  # Seconds for which the processor time is taken.
_SETTLES = 60.0  # Seconds until each step has logged why its job waits, and reads its record at the longest pauses.
_MIB = 2**20
# All jobs are pending; the number of a job is that of its line in the file `jobs`.
_SBATCH = """#!/bin/sh
exec 9>>{base}/lock; flock 9
sed -n 's/^#SBATCH --job-name=//p' job.sh >>{base}/jobs
wc -l <{base}/jobs
"""
_SQUEUE = """#!/bin/sh
echo >>{base}/asked
awk -v "row=\\036\\037%d\\037%d\\037PENDING\\037Priority\\037N/A\\037N/A\\0371\\037\\037compute\\037%s\\n" \\
    '{{printf row, NR, NR, $0}}' {base}/jobs
"""
_CPU, _MEMORY, _FOUND = 10.0, 250.0, 60.0  # Percent of a core, MiB, and seconds, that are promised.


def waiting(options: Options) -> list[Figure]:
    """Processor time and memory while all payloads wait, and the seconds in which a re-execution has found all of them again."""
    count, watched = (_QUICK_COUNT, _QUICK_WATCHED) if options.quick else (_COUNT, _WATCHED)
    with base_dir() as base:
        home = Path(base, "home")
        home.mkdir()
        (home / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
        for name, text in (("sbatch", _SBATCH), ("squeue", _SQUEUE), ("scancel", "#!/bin/sh\n"), ("sacct", "#!/bin/sh\n")):
            program = Path(base, "bin", name)
            program.parent.mkdir(exist_ok=True)
            program.write_text(text.format(base=base))
            program.chmod(0o755)
        with _step(home, count, base) as (process, told):
            told("began")
            resident = _resident(process)
            threads = told("waiting")["threads"]
            time.sleep(0 if options.quick else _SETTLES)
            began, used, asked = time.monotonic(), _used(process), _lines(base, "asked")
            time.sleep(watched)
            seconds = time.monotonic() - began
            cpu, memory = 100 * (_used(process) - used) / seconds, (_resident(process) - resident) / _MIB
            squeues = 60 * (_lines(base, "asked") - asked) / seconds
        with dg.DagsterInstance.from_config(str(home)) as instance:
            [run] = instance.get_runs()
            instance.report_run_failed(run)
        with _step(home, count, base, run.run_id) as (_, told):
            since = told("began")["began"]
            found = told("waiting")["waiting"] - since
        jobs = _lines(base, "jobs")
        problem = None if jobs == count else f"there are {jobs} jobs"
    also = (Sample.of("threads", [threads], ""), Sample.of("squeue in a minute", [squeues], ""))
    figures = (("processor time", cpu, "%", _CPU), ("memory", memory, "MiB", _MEMORY), ("until found again", found, "s", _FOUND))
    return [
        Figure(f"{count:,} jobs wait, {name}", None, each, each, bar, also=also, problem=problem)
        for name, value, unit, bar in figures
        for each in [Sample.of("run_async()", [value], unit)]
    ]


def _used(process: int) -> float:
    """Seconds of processor time that a process has used."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _resident(process: int) -> int:
    """Bytes of memory of a process."""
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _lines(base: str, name: str) -> int:
    path = Path(base, name)
    return len(path.read_text().splitlines()) if path.exists() else 0


@contextlib.contextmanager
def _step(home: Path, *words: Any) -> Iterator[tuple[int, Any]]:
    """Runs the step; yields its process, and a function that waits for an object with some key. The process is killed."""
    env = {**os.environ, "DAGSTER_HOME": str(home), "PYTHONPATH": str(ROOT), "PATH": f"{home.parent}/bin:{os.environ['PATH']}"}
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
        yield process.pid, told
    finally:
        process.kill()
        process.communicate()
