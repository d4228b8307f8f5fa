"""Asks Slurm of one job: for failures, and never in the way of a result."""

from __future__ import annotations

from dataclasses import replace

from ..ssh.base import Connection
from .commands import cleaned
from .errors import unanswered
from .facts import SACCT_FIELDS, JobFacts, merge_facts, parse_sacct, parse_scontrol

_TIMEOUT = 120.0
_ENVIRONMENT = ("env", "LC_ALL=C")
# Messages of Slurm 22.05 and 24.11.
_UNKNOWN = b"Invalid job id specified"
_DISABLED = b"accounting storage is disabled"


def ask_job(connection: Connection, job_id: int) -> JobFacts | None:
    """What slurmctld and, if there is any, accounting say of a job.

    Args:
        connection: the edge node.
        job_id: the job; the first component of a heterogeneous one.

    Returns:
        None if Slurm does not know it, or no longer: without accounting that is so MinJobAge after its end.

    Raises:
        SlurmUnanswered: neither of them knows the job, and one did not answer.
        OSError: they cannot be asked.
    """
    place = connection.place
    # A job in a hidden partition shows with --all only.
    scontrol = connection.run(cleaned([*_ENVIRONMENT, "scontrol", "--all", "show", "job", str(job_id)]), timeout=_TIMEOUT)
    options = ("--noheader", "--parsable2", "--duplicates", f"--format={','.join(SACCT_FIELDS)}")
    sacct = connection.run(cleaned([*_ENVIRONMENT, "sacct", f"--jobs={job_id}", *options]), timeout=_TIMEOUT)
    controller = None if scontrol.returncode else parse_scontrol(scontrol.stdout.decode("utf-8", "replace"))
    accounting = None if sacct.returncode else parse_sacct(sacct.stdout.decode("utf-8", "replace"), job_id)
    facts = merge_facts(controller, accounting)
    if facts is None and scontrol.returncode and _UNKNOWN not in scontrol.stderr:
        raise unanswered(place, "scontrol", scontrol)
    # Where there is no accounting, sacct may well not be installed.
    if facts is None and sacct.returncode not in (0, 127) and _DISABLED not in sacct.stderr:
        raise unanswered(place, "sacct", sacct)
    return facts and _with_canceller(connection, facts)


def _with_canceller(connection: Connection, facts: JobFacts) -> JobFacts:
    """Add the name of the user who cancelled the job, which the edge node knows; Slurm tells only the id."""
    users = [each.cancelled_by for each in (facts, *facts.components) if each.cancelled_by is not None]
    if not users:
        return facts
    done = connection.run(["id", "-nu", str(users[0])], timeout=_TIMEOUT)
    name = done.stdout.decode("utf-8", "replace").strip()
    return replace(facts, canceller=(users[0], name)) if done.returncode == 0 and name else facts
