"""Cancellation of jobs, repeated until Slurm confirms that they are over."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from ..ssh.base import Connection
from .commands import without_option_variables
from .shared_queue import fetch_queue
from .states import TERMINAL

ASK_INTERVAL = 1.0
"""Seconds between two direct queries of the queue for a job that is being cancelled."""
_GONE_DEADLINE = 60.0
"""Seconds in which Slurm must confirm that a cancelled job is over; KillWait, after which it sends SIGKILL, is 30."""
_LATE_SUBMISSION = 2.0
"""Seconds for which a job may still appear in the queue after its submission was cut off."""


def wait_until_gone(commands: Connection, job_id: int, patience: float = 0.0) -> bool:
    """Cancel a job repeatedly until Slurm shows it as over or no longer knows it; returns False if Slurm takes over a minute.

    Args:
        commands: runs Slurm's programs.
        job_id: the job.
        patience: seconds in which the job may end by itself before the first cancellation.
    """
    began = time.monotonic()
    pause = 0.1
    while True:
        with contextlib.suppress(OSError):
            rows = [row for row in fetch_queue(commands).components(job_id) if row.state not in TERMINAL]
            if not rows:
                return True
            if time.monotonic() - began >= patience and any(row.state != "COMPLETING" for row in rows):
                # The id of the first component stands for the whole job while that component is not over.
                alive = [str(row.job_id) for row in rows]
                targets = [str(job_id)] if str(job_id) in alive else alive
                commands.run(without_option_variables(["scancel", *targets]), timeout=60)
        if time.monotonic() - began > _GONE_DEADLINE:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 3.0)


def cancel_named(commands: Connection, name: str, log: Any) -> None:
    """Cancel the job with a given name, if there is one: for a submission that was cut off, so that the job's id is not known."""
    try:
        commands.run(without_option_variables(["scancel", "--quiet", "--me", f"--name={name}"]), timeout=60)
        gone = all(wait_until_gone(commands, job_id) for job_id in _jobs_named(commands, name))
        reason = "Slurm has not confirmed its end"
    except OSError as error:
        gone, reason = False, str(error)
    if not gone:
        log.error(
            f"[rayslurm] a Slurm job named {name} may have been submitted ({reason}); run `scancel --name={name}` on "
            f"{commands.place}"
        )


def _jobs_named(commands: Connection, name: str) -> list[int]:
    """Ids of the jobs with a given name, after a short wait for a submission that is still under way."""
    until = time.monotonic() + _LATE_SUBMISSION
    while True:
        jobs = [row.job_id for row in fetch_queue(commands).named(name) if row.is_leader]
        if jobs or time.monotonic() > until:
            return jobs
        time.sleep(ASK_INTERVAL)
