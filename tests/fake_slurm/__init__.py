"""A fake Slurm on this machine, for tests without a Slurm cluster. Begin with `FakeSlurm`.

`model` decides how jobs change and what is printed; `programs` runs the jobs as processes. It is no emulation of Slurm's
scheduler: a job starts at once, or when a test says so.
"""

import json
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dagster_rayslurm import SlurmQueueConfig
from dagster_rayslurm.slurm.request import JobRequest
from dagster_rayslurm.ssh.local import LocalConnection

from . import model, programs

PROGRAMS = ("sbatch", "squeue", "scancel", "srun", "sacct", "scontrol", "sinfo", "sstat")


def job_request(job_name: str, comment: str, component_id: str | None = None, further: Any = (), **queue: Any) -> JobRequest:
    """A request for a job with some fields of the queue."""
    return JobRequest(job_name, comment, SlurmQueueConfig(**queue), component_id, further)


class FakeSlurm:
    """Controls a fake Slurm: puts its programs on the PATH, changes its jobs, and makes programs fail.

    Args:
        base: directory for the state of the fake Slurm.
        monkeypatch: puts the programs on the PATH.
        settings: override entries of `model.FIRST_STATE`. By default jobs start at once and run their scripts.
    """

    def __init__(self, base: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        self.base = base
        self.connection = LocalConnection()
        (base / "bin").mkdir(parents=True)
        (base / "state.json").write_text(json.dumps({**model.FIRST_STATE, **settings}))
        for name in PROGRAMS:
            program = base / "bin" / name
            words = shlex.join([sys.executable, "-IS", programs.__file__, name])
            program.write_text(f'#!/bin/sh\nFAKE_SLURM={shlex.quote(str(base))} exec {words} "$@"\n')
            program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{base}/bin", prepend=os.pathsep)

    def set(self, **settings: Any) -> None:
        """Change settings, which are entries of `model.FIRST_STATE`."""
        with programs.locked(str(self.base)) as state:
            state.update(settings)

    def fault(
        self, program: str, stderr: str = "", code: int | None = 1, delay: float = 0.0, works: bool = False, times: int = 1
    ) -> None:
        """Make the next calls of a program fail.

        Args:
            program: name of the program, such as "sbatch".
            stderr: error message that the program prints.
            code: exit code of the program; None if it succeeds after the delay.
            delay: seconds before the program does anything.
            works: whether the program has its effect although it fails.
            times: number of calls that fail; -1 for all.
        """
        fault = {"stderr": stderr, "code": code, "delay": delay, "works": works, "times": times}
        with programs.locked(str(self.base)) as state:
            state["faults"].setdefault(program, []).append(fault)

    def heal(self) -> None:
        """Make all programs work again, after `fault`."""
        self.set(faults={})

    def job(self, job_id: int, name: str = "job", state: str = "RUNNING", **fields: Any) -> None:
        """Put a job into the queue, or replace the job with that id. `fields` are those of `model.new_job`."""
        with programs.locked(str(self.base)) as content:
            nodes = [] if state == "PENDING" else ["c1"]
            now = time.time()
            job = model.new_job(job_id, now, **{"name": name, "state": state, "nodes": nodes, "start": now, **fields})
            content["jobs"][str(job_id)] = job

    def jobs(self, *states: str) -> list[int]:
        """The ids of the jobs in the given states, or of all jobs if none is given."""
        return [job["id"] for job in programs.read(str(self.base))["jobs"].values() if not states or job["state"] in states]

    def state(self, job_id: int) -> str:
        """The state of a job, such as "RUNNING"; "" if the fake Slurm does not know the job."""
        job = programs.read(str(self.base))["jobs"].get(str(job_id))
        return job["state"] if job else ""

    def release(self, job_id: int) -> None:
        """Start a pending job."""
        with programs.locked(str(self.base)) as state:
            model.start(state, job_id, time.time())

    def end(self, job_id: int, final: str, reason: str = "None") -> None:
        """End a job with a final state such as NODE_FAIL or OUT_OF_MEMORY; with REQUEUED the job starts again."""
        with programs.locked(str(self.base)) as state:
            model.end(state, job_id, final, time.time(), reason)

    def forget(self, job_id: int) -> None:
        """Remove a job, so that no program of the fake Slurm knows it any more."""
        with programs.locked(str(self.base)) as state:
            del state["jobs"][str(job_id)]

    def processes(self) -> list[int]:
        """The process ids of all jobs."""
        return [pid for job_id in self.jobs() for pid in programs.processes(str(self.base), job_id)]

    def calls(self, program: str) -> list[list[str]]:
        """The arguments of each call of a program so far."""
        path = self.base / "calls"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [words for name, *words in lines if name == program]

    @property
    def cancelled(self) -> list[str]:
        """The job ids and job names that scancel was called with so far."""
        words = [word.removeprefix("--name=") for call in self.calls("scancel") for word in call]
        return [word for word in words if not word.startswith("--")]

    def close(self) -> None:
        """End all jobs and their processes."""
        self.heal()
        for job_id in self.jobs("PENDING", "RUNNING", "COMPLETING"):
            self.end(job_id, "CANCELLED")
            programs.kill_job(str(self.base), job_id)
        deadline = time.monotonic() + 10
        while self.jobs("COMPLETING") and time.monotonic() < deadline:
            time.sleep(0.05)
