"""Makes the srun command for a further step of a running job, and reads how the srun in the job's batch script ended.

The functions have no side effects.
"""

from __future__ import annotations

import re

_EXIT = re.compile(rb"([0-9]+) ([0-9]+) ([0-9]+)")  # A line of the file `exit`: job id, restart count and exit code of srun.


def step_on_head(job_id: str, heterogeneous: bool, node: str | None) -> list[str]:
    """Returns the beginning of an srun command that starts a task on the head node of a running job.

    The caller appends the task's command. `node` is Slurm's name of the head node; None for the first node of the job.
    `heterogeneous` is True for a heterogeneous job; then the node must be in the first component.
    """
    # Without --overlap the step would wait for the CPUs that the job's own step holds. Without --mem=0 it would request
    # all memory of the job (srun(1), Slurm 22.05). --het-group is needed in a heterogeneous job and fails in any other one
    # (tried on Slurm 22.05 and 24.11).
    return [
        *("srun", "--overlap", f"--jobid={job_id}", *(["--het-group=0"] if heterogeneous else [])),
        *("--nodes=1", "--ntasks=1", *([f"--nodelist={node}"] if node else [])),
        *("--mem=0", "--cpu-bind=none", "--mpi=none", "--quiet"),
    ]


def parse_exit(data: bytes, job_id: int) -> int | None:
    """Returns the exit code of the srun in a job's batch script; None if `data` has no line of the job.

    `data` is the content of the file `exit` in the run directory, to which the batch script appends a line each time srun has
    ended. After a requeue, the last run that has a line counts. Lines of another job, left by a repeated submission, are ignored.
    """
    lines = map(_EXIT.fullmatch, data.split(b"\n")[:-1])
    ends = [(int(line[2]), int(line[3])) for line in lines if line and int(line[1]) == job_id]
    last = max((restart for restart, _ in ends), default=0)
    return next((code for restart, code in reversed(ends) if restart == last), None)
