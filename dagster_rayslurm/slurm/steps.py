"""The steps of a running job: srun on its head node, and the exit code of the srun in its batch script. Pure."""

from __future__ import annotations

import re

_EXIT = re.compile(rb"([0-9]+) ([0-9]+) ([0-9]+)")  # A line of the file `exit`: job id, restart count and exit code of srun.


def step_on_head(job_id: str, heterogeneous: bool, node: str | None) -> list[str]:
    """Returns an srun command that starts a task on the head node of a running job: on `node`, or if None on the first node."""
    # Without --overlap the step would wait for the CPUs that the job's own step holds. Without --mem=0 it would request
    # all memory of the job (srun(1), Slurm 22.05). --het-group is needed in a heterogeneous job and fails in any other one
    # (tried on Slurm 22.05 and 24.11).
    return [
        *("srun", "--overlap", f"--jobid={job_id}", *(["--het-group=0"] if heterogeneous else [])),
        *("--nodes=1", "--ntasks=1", *([f"--nodelist={node}"] if node else [])),
        *("--mem=0", "--cpu-bind=none", "--mpi=none", "--quiet"),
    ]


def parse_exit(data: bytes, job_id: int) -> int | None:
    """Returns srun's exit code from the content of the file `exit`, if srun has ended since the job's last requeue; else None.

    The batch script writes the file. Another job may have left lines too, if a submission was repeated after a lost answer.
    """
    lines = map(_EXIT.fullmatch, data.split(b"\n")[:-1])
    ends = [(int(line[2]), int(line[3])) for line in lines if line and int(line[1]) == job_id]
    last = max((restart for restart, _ in ends), default=0)
    return next((code for restart, code in reversed(ends) if restart == last), None)
