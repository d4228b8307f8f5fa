"""Jobs that are ended for sure: asked for until Slurm itself says that they are over."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from ..ssh.base import Connection
from .commands import cleaned
from .queue import ask_queue
from .states import TERMINAL

ASK_INTERVAL = 1.0
"""Seconds between two questions of a run that is being cancelled."""
_GONE_DEADLINE = 60.0
"""Seconds in which Slurm must confirm that a cancelled job is over; KillWait, after which it sends SIGKILL, is 30."""
_LATE = 2.0
"""Seconds in which a submission that was broken off may still come through."""


def wait_until_gone(commands: Connection, job_id: int, patience: float = 0.0) -> bool:
    """Cancel a job until Slurm says that it is over, or no longer knows it.

    Args:
        commands: runs Slurm's programs.
        job_id: the job.
        patience: seconds in which it may end by itself.

    Returns:
        Whether Slurm said so in time.
    """
    began = time.monotonic()
    pause = 0.1
    while True:
        with contextlib.suppress(OSError):
            rows = [row for row in ask_queue(commands).parts(job_id) if row.state not in TERMINAL]
            if not rows:
                return True
            if time.monotonic() - began >= patience and any(row.state != "COMPLETING" for row in rows):
                # The leader of a heterogeneous job stands for all of it, unless it is the first to be over.
                lives = [str(row.job_id) for row in rows]
                commands.run(cleaned(["scancel", *(lives if str(job_id) not in lives else [str(job_id)])]), timeout=60)
        if time.monotonic() - began > _GONE_DEADLINE:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 3.0)


def _jobs_named(commands: Connection, name: str) -> list[int]:
    """The jobs of a name; sbatch may have been at it just now, so one that is not there is looked for a while."""
    until = time.monotonic() + _LATE
    while True:
        jobs = [row.job_id for row in ask_queue(commands).named(name) if row.leads]
        if jobs or time.monotonic() > until:
            return jobs
        time.sleep(ASK_INTERVAL)


def cancel_named(commands: Connection, name: str, log: Any) -> None:
    """Cancel whatever job has a name: its submission was broken off, so its id is not known."""
    try:
        commands.run(cleaned(["scancel", "--quiet", "--me", f"--name={name}"]), timeout=60)
        jobs = _jobs_named(commands, name)
        gone = all(wait_until_gone(commands, job_id) for job_id in jobs)
    except OSError as error:
        gone, why = False, str(error)
    else:
        why = "Slurm has not confirmed its end"
    if not gone:
        log.error(
            f"[rayslurm] a Slurm job named {name} may have been submitted ({why}); run `scancel --name={name}` on "
            f"{commands.place}"
        )
