"""What Slurm's word for the end of a job means for the run in it. Pure; states as in squeue(1), Slurm 22.05."""

from __future__ import annotations

import re

from ..errors import FailureKind
from .accounting import JobFacts, memory_kill

Found = tuple[FailureKind, str, bool | None]
"""Kind of failure, sentence, and whether another attempt may succeed (None for what the kind says)."""

_WHY_IT_WAITED = ("BeginTime", "JobHeldAdmin", "JobHeldUser", "Licenses", "Priority", "Reservation", "Resources")
"""Reasons that Slurm keeps from the time before a job was cancelled."""
_LOST_NODES = {
    "BOOT_FAIL": "its nodes did not boot",
    "NODE_FAIL": "one of its nodes failed",
    "PREEMPTED": "another job took its place",
    "REVOKED": "another cluster took it over",
}

_NOT_STARTED = re.compile(
    r"^(?:slurmstepd\S*: error: execve\(\)|rayslurm: line \d+(?:: exec)?|rayslurm: \d+: exec): (/.*?)(?:: cannot execute)?"
    r": (No such file .*|not found|Permission denied|Exec format error)$",
    re.MULTILINE,
)
"""What slurmstepd (Slurm 22.05 and 24.11) prints where the environment's Python cannot be started, and dash and bash."""
_STEP = re.compile(r"StepId=([0-9]+)")


def explain_job_end(job: JobFacts, log: str, terminated: bool, silent: bool) -> Found | None:
    """What became of a run whose record does not tell, or tells of a signal from outside.

    Args:
        job: what Slurm says of it.
        log: what the batch script, slurmstepd and the runtime printed.
        terminated: whether the record says that a signal from outside ended the runtime.
        silent: whether nothing at all was written into the run directory.

    Returns:
        None if Slurm has nothing to add.
    """
    killed = memory_kill(log)
    told = _told(job, killed)
    which = f"Slurm job {job.job_id}" if told is job else f"{_component(told)} of Slurm job {job.job_id}"
    where = f" on {', '.join(told.nodes[:8])}" if told.nodes else ""
    if job.out_of_memory or killed:
        said = f" ({killed})" if killed else _measured(told)
        sentence = f"OUT_OF_MEMORY: {which}{where} used more memory than it was granted{_granted(told)}{said}"
        return FailureKind.ALLOCATION, f"{sentence}; ask for more with SlurmQueueConfig.mem or mem_per_cpu", False
    state = job.final_state
    if state in ("TIMEOUT", "DEADLINE"):
        what = "time limit" if state == "TIMEOUT" else "deadline"
        limit = f" of {_duration(job.time_limit)}" if job.time_limit else ""
        ran = f" after {_duration(job.elapsed)}" if job.elapsed else ""
        return (
            FailureKind.ALLOCATION,
            f"{state}: {which} was ended at its {what}{limit}{ran}; raise SlurmQueueConfig.time_limit",
            False,
        )
    if state in _LOST_NODES or job.state == "REVOKED":
        lost = state or job.state
        return FailureKind.ALLOCATION, f"{lost}: {which}{where} is lost, {_LOST_NODES[lost]}{_reason(job)}", True
    if state == "CANCELLED":
        return (
            FailureKind.CANCELLED,
            f"{which} was cancelled{_by(job)}{'' if job.reason in _WHY_IT_WAITED else _reason(job)}",
            None,
        )
    if terminated and state is None:
        code = f", exit code {job.exit_code}" if job.exit_code else ""
        ends = f"{which}{where} is {job.state}{_reason(job)}{code}; `sacct -j {job.job_id}` may tell more by now"
        if job.state == "COMPLETING":  # Jobs that fail by themselves have a reason.
            return FailureKind.CANCELLED, f"the job was ended from outside, and Slurm does not say yet by whom: {ends}", None
        return FailureKind.RUNTIME, f"the runtime got a signal from outside, and Slurm does not say why: {ends}", None
    if terminated:
        what = f"the runtime got a signal from outside, though Slurm cancelled nothing: {which}{where} is {state}"
        return (
            FailureKind.RUNTIME,
            f"{what}; the runtime of another node died, or somebody signalled it (see the nodes' logs)",
            None,
        )
    unseen = _NOT_STARTED.search(log)
    if unseen and state == "FAILED":
        what = f"{which}{where} cannot start {unseen[1]}: {unseen[2]}"
        return FailureKind.ENVIRONMENT, f"{what}; name an environment that the compute nodes see at this path, and can run", None
    if silent and state in ("FAILED", "COMPLETED"):
        return (
            FailureKind.ALLOCATION,
            f"{state}: {which}{where} ended before it could write into its run directory{_reason(job)}; "
            "SlurmResource.remote_base must be on a file system that the edge and the compute nodes share",
            False,
        )
    return None


def _told(job: JobFacts, killed: str | None) -> JobFacts:
    """The component that Slurm's word is about; the job itself if it is about all of it."""
    if not job.components:
        return job
    step = _STEP.search(killed or "")
    if step:
        return next((each for each in job.components if each.job_id == int(step[1])), job)
    ends = {(each.final_state, each.out_of_memory) for each in job.components}
    return job if len(ends) == 1 else job.components[job.decisive_component]


def _component(facts: JobFacts) -> str:
    return f"component {facts.component_id!r}" if facts.component_id else f"component {facts.job_id}"


def _by(job: JobFacts) -> str:
    if job.cancelled_by is None:
        return ""
    if job.canceller is not None and job.canceller[0] == job.cancelled_by:
        return f" by user {job.canceller[1]} (id {job.cancelled_by})"
    return f" by user id {job.cancelled_by}"


def _reason(job: JobFacts) -> str:
    return f" ({job.reason})" if job.reason else ""


def _granted(job: JobFacts) -> str:
    return f": {_size(job.memory / max(1, job.num_nodes))} on each node" if job.memory else ""


def _measured(job: JobFacts) -> str:
    return f", of which Slurm saw {_size(job.max_rss)}" if job.max_rss else ""


def _size(amount: float) -> str:
    return f"{amount / 2**20:.0f} MiB"


def _duration(seconds: float) -> str:
    """[D-]HH:MM:SS, as Slurm writes it."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{days}-" * (days > 0) + f"{hour:02}:{minute:02}:{second:02}"
