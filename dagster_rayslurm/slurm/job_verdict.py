"""Why a run failed, as far as the end of its Slurm job explains it. Pure; states as in squeue(1), Slurm 22.05."""

from __future__ import annotations

import re
from typing import NamedTuple

from ..errors import FailureKind
from .accounting import JobFacts, memory_kill

_REASONS_FOR_WAITING = ("BeginTime", "JobHeldAdmin", "JobHeldUser", "Licenses", "Priority", "Reservation", "Resources")
"""Pending reasons that Slurm still shows for a cancelled job; they do not explain the cancellation."""
_LOST_NODES = {
    "BOOT_FAIL": "its nodes did not boot",
    "NODE_FAIL": "one of its nodes failed",
    "PREEMPTED": "another job took its place",
    "REVOKED": "another cluster took it over",
}
"""How a job lost its nodes, by its state."""
_NOT_STARTED = re.compile(
    r"^(?:slurmstepd\S*: error: execve\(\)|rayslurm: line \d+(?:: exec)?|rayslurm: \d+: exec): (/.*?)(?:: cannot execute)?"
    r": (No such file .*|not found|Permission denied|Exec format error)$",
    re.MULTILINE,
)
"""Messages of slurmstepd (Slurm 22.05 and 24.11), bash and dash if the environment's Python cannot be started."""
_STEP = re.compile(r"StepId=([0-9]+)")


class JobVerdict(NamedTuple):
    """The failure of a run that the end of its job explains; `retry` is None for the default of the kind."""

    kind: FailureKind
    sentence: str
    retry: bool | None = None


def explain_job_end(job: JobFacts, log: str, terminated: bool, silent: bool) -> JobVerdict | None:
    """The failure of a run as Slurm explains it; None if Slurm explains nothing.

    This is for a run whose own record has no end, or says that a signal from outside ended the run.

    Args:
        job: the job in Slurm.
        log: the output of the batch script, slurmstepd and the runtime.
        terminated: whether the record says that a signal from outside ended the runtime.
        silent: whether nothing was written into the run directory.
    """
    killed = memory_kill(log)
    part = _explaining_part(job, killed)
    which = f"Slurm job {job.job_id}"
    if part is not job:
        which = f"component {part.component_id!r} of {which}" if part.component_id else f"component {part.job_id} of {which}"
    on_nodes = f"{which} on {', '.join(part.nodes[:8])}" if part.nodes else which
    reason = f" ({job.reason})" if job.reason else ""
    state = job.final_state
    if job.out_of_memory or killed:
        granted = f": {_mebibytes(part.memory / max(1, part.num_nodes))} on each node" if part.memory else ""
        measured = f", of which Slurm saw {_mebibytes(part.max_rss)}" if part.max_rss else ""
        sentence = f"OUT_OF_MEMORY: {on_nodes} used more memory than it was granted{granted}"
        sentence += f" ({killed})" if killed else measured
        return JobVerdict(FailureKind.ALLOCATION, f"{sentence}; ask for more with SlurmQueueConfig.mem or mem_per_cpu", False)
    if state in ("TIMEOUT", "DEADLINE"):
        what = "time limit" if state == "TIMEOUT" else "deadline"
        limit = f" of {_duration(job.time_limit)}" if job.time_limit else ""
        ran = f" after {_duration(job.elapsed)}" if job.elapsed else ""
        sentence = f"{state}: {which} was ended at its {what}{limit}{ran}; raise SlurmQueueConfig.time_limit"
        return JobVerdict(FailureKind.ALLOCATION, sentence, False)
    if state in _LOST_NODES or job.state == "REVOKED":
        lost = state or job.state
        return JobVerdict(FailureKind.ALLOCATION, f"{lost}: {on_nodes} is lost, {_LOST_NODES[lost]}{reason}", True)
    if state == "CANCELLED":
        why = "" if job.reason in _REASONS_FOR_WAITING else reason
        return JobVerdict(FailureKind.CANCELLED, f"{which} was cancelled{_by(job)}{why}")
    if terminated and state is None:
        code = f", exit code {job.exit_code}" if job.exit_code else ""
        ends = f"{on_nodes} is {job.state}{reason}{code}; `sacct -j {job.job_id}` may tell more by now"
        if job.state == "COMPLETING":  # Jobs that fail by themselves have a reason.
            what = "the job was ended from outside, and Slurm does not say yet by whom"
            return JobVerdict(FailureKind.CANCELLED, f"{what}: {ends}")
        return JobVerdict(FailureKind.RUNTIME, f"the runtime got a signal from outside, and Slurm does not say why: {ends}")
    if terminated:
        what = f"the runtime got a signal from outside, though Slurm cancelled nothing: {on_nodes} is {state}"
        why = "the runtime of another node died, or somebody signalled it (see the nodes' logs)"
        return JobVerdict(FailureKind.RUNTIME, f"{what}; {why}")
    not_started = _NOT_STARTED.search(log)
    if not_started and state == "FAILED":
        what = f"{on_nodes} cannot start {not_started[1]}: {not_started[2]}"
        advice = "name an environment that the compute nodes see at this path, and can run"
        return JobVerdict(FailureKind.ENVIRONMENT, f"{what}; {advice}")
    if silent and state in ("FAILED", "COMPLETED"):
        what = f"{state}: {on_nodes} ended before it could write into its run directory{reason}"
        advice = "SlurmResource.remote_base must be on a file system that the edge and the compute nodes share"
        return JobVerdict(FailureKind.ALLOCATION, f"{what}; {advice}", False)
    return None


def _explaining_part(job: JobFacts, killed: str | None) -> JobFacts:
    """The component whose end explains the job's end; the job itself if all components ended alike."""
    if not job.components:
        return job
    step = _STEP.search(killed or "")
    if step:
        return next((each for each in job.components if each.job_id == int(step[1])), job)
    ends = {(each.final_state, each.out_of_memory) for each in job.components}
    return job if len(ends) == 1 else job.components[job.decisive_component]


def _by(job: JobFacts) -> str:
    if job.cancelled_by is None:
        return ""
    if job.canceller is not None and job.canceller[0] == job.cancelled_by:
        return f" by user {job.canceller[1]} (id {job.cancelled_by})"
    return f" by user id {job.cancelled_by}"


def _mebibytes(amount: float) -> str:
    return f"{amount / 2**20:.0f} MiB"


def _duration(seconds: float) -> str:
    """A duration as Slurm writes it: "[D-]HH:MM:SS"."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{days}-" * (days > 0) + f"{hour:02}:{minute:02}:{second:02}"
