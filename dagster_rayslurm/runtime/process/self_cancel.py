"""The end of this task's own job where nobody else sees to it: srun waits for ever for a task whose slurmstepd was killed."""

from __future__ import annotations

import subprocess
import time
from typing import Callable, Mapping

_EXPLAINED = 25.0
"""Seconds in which nothing is done: whoever follows a payload asks Slurm meanwhile why it ended, and would be told of this."""
_PATIENCE = 60.0
"""Seconds in which scancel must answer."""
_TRIES = 10
_PAUSE = 30.0


def cancel(environ: Mapping[str, str], sleep: Callable[[float], None] = time.sleep) -> None:
    """Have Slurm end the job, if this is its first task, which leads the others; tried again where slurmctld does not answer.

    Args:
        environ: the task's environment.
        sleep: waits.
    """
    if environ.get("SLURM_NODEID") != "0":
        return
    sleep(_EXPLAINED)
    for _ in range(_TRIES):
        if _cancelled(environ["SLURM_JOB_ID"]):
            return
        sleep(_PAUSE)


def _cancelled(job_id: str) -> bool:
    """Whether nothing more is to be done; nobody reads what is printed here."""
    command, nothing = ["scancel", "--quiet", job_id], subprocess.DEVNULL
    try:
        return subprocess.run(command, stdin=nothing, stdout=nothing, stderr=nothing, timeout=_PATIENCE).returncode == 0
    except subprocess.TimeoutExpired:
        return False
    except OSError:
        return True  # There is none on this node.
