"""Submits a job so that a lost answer never leads to two jobs, and cancels jobs repeatedly until Slurm confirms their end."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ..edge import slurm
from ..edge.sessions import JOB_ID
from ..errors import FailureKind, StartError
from ..ssh.base import Completed, Connection, ConnectionFailed, ConnectionLost
from .refusals import explain, is_temporary, lacks_room, with_requested_values
from .request import JobRequest
from .shared_queue import ClusterClock, QueueRow, QueueSnapshot, SlurmUnanswered, ask_patiently, fetch_queue, run_slurm, stderr_of
from .states import TERMINAL

JOB_SCRIPT = "job.sh"
_FOUND = re.compile(r"(?P<job>[0-9]+)(?:\+[0-9]+|_[0-9]+|_\[[^]|]*\])?\|(?P<state>.*)")
# State and reason of a job that Slurm refused, and of components before the refused one (tried on 22.05 and 24.11).
_REFUSED, _GIVEN_UP = "FAILED|BadConstraints", "CANCELLED|None"
_SBATCH_ERROR = re.compile(r"^sbatch: (error|fatal|unrecognized option|option|invalid option|ambiguous option)", re.MULTILINE)
# `--parsable` prints "ID" or "ID;CLUSTER" (sbatch(1), Slurm 22.05); a site's own sbatch may print more before it.
_ANSWER = re.compile(rb"([0-9]+\.[0-9]+)\n(?:.*\n)*([0-9]+)(?:;[^\n]*)?\n*")
_TIMEOUT = 600.0  # Seconds for making the directory and for sbatch, which retries for minutes if slurmctld is slow.
_ATTEMPTS = 5  # Most submissions of one job.
_PAUSE = 3.0  # Seconds between two searches for a job whose submission was cut off, as slurmctld may still be at work on it.

ASK_INTERVAL = 1.0  # Seconds between two direct queries of the queue for a job that is being cancelled.
# Seconds in which Slurm must confirm that a cancelled job is over; KillWait, after which it sends SIGKILL, is 30.
_GONE_DEADLINE = 60.0
_LATE_SUBMISSION = 2.0  # Seconds for which a job may still appear in the queue after its submission was cut off.


class SubmissionRefused(StartError):
    """Raised when Slurm refuses a job or does not answer, or when the run directory cannot be made.

    After an answer that does not tell whether there is a job, `submit` raises this exception only if it has found no job.

    `lacks_room` is True if the job is an array that Slurm refused because the array has too many elements, or because the user
    has too many jobs. Then Slurm may accept a smaller array, or the same array later.
    """

    lacks_room = False


class ClaimTaken(Exception):
    """Raised when several processes try to submit one job, such as the job of a session, and this process must not do so.

    Either another process submits the job, or the attempt of this process took so long that another process has marked the
    attempt as abandoned. In the second case, a job that this process had already submitted was cancelled.
    """


@dataclass(frozen=True)
class SubmittedJob:
    """A job that was submitted: Slurm's id, and the time of submission by the cluster's clock, in seconds since the epoch."""

    job_id: str
    at: float


class NextStep(Enum):
    """The next action after an attempt to submit a job; `next_step` chooses the action."""

    DONE = "nothing: the job is submitted"
    STOP = "stop: another process submits the session's job"
    REFUSE = "raise the error: there is certainly no job"
    FIND = "look for the job; if there is none, give up"
    FIND_OR_REPEAT = "look for the job; if there is none, submit again"


def next_step(answer: Completed | OSError, claim: bool, left: int) -> NextStep:
    """Returns the action after an attempt to submit a job. A pure function.

    `answer` is the result of the attempt: the exit code and the output of `edge.slurm.submit`, which runs sbatch, or the
    exception that ended the attempt. `claim` is True if other processes may submit the same job. `left` is the number of attempts
    that are left.
    """
    if not isinstance(answer, Completed):
        return NextStep.FIND_OR_REPEAT if isinstance(answer, ConnectionLost) and left else NextStep.FIND
    said, code = stderr_of(answer), answer.returncode
    if code == 0 and _ANSWER.fullmatch(answer.stdout):
        return NextStep.DONE
    if code == slurm.TAKEN and claim:
        return NextStep.STOP
    refused = 0 < code < 128 and _SBATCH_ERROR.search(said) and not is_temporary(said)
    if refused or code in (slurm.CANNOT_WRITE, slurm.NO_PROGRAM):
        return NextStep.REFUSE
    return NextStep.FIND_OR_REPEAT if is_temporary(said) and left else NextStep.FIND


def submit(
    connection: Connection,
    run_dir: str,
    files: Mapping[str, bytes],
    request: JobRequest,
    clock: ClusterClock,
    warn: Callable[[str], None],
    claim: bool = False,
    patience: float = 0.0,
) -> SubmittedJob:
    """Creates the run directory `run_dir` with `files`, submits the job exactly once, and returns the job.

    If an answer does not tell whether there is a job, the function searches for the job by its name.

    Args:
        connection: the edge node.
        run_dir: the absolute path of the run directory.
        files: the content of each file in the run directory; the file `job.sh` is the batch script.
        request: the options in the batch script, with a job name that no other job has.
        clock: computes the time on the edge node; the function corrects the clock by the time in the answer.
        warn: called with a message before each search for the job, and if a job that may exist could not be cancelled.
        claim: whether other processes may try to submit the same job from the same run directory, as for a session; then only the
            process that creates the directory submits the job.
        patience: the seconds for which a search for the job is repeated while the edge node is out of reach.

    Raises:
        ClaimTaken: another process submits the job, or has marked this attempt as abandoned. Only if `claim` is True.
        SubmissionRefused: Slurm refuses the job or does not answer, or the run directory cannot be made.
        ConnectionFailed: the edge node cannot be reached. Raised also if a submission was cut off, and the search for the job
            finds no job or gets no answer.
    """
    name = request.job_name
    texts = {each: content.decode("latin-1") for each, content in files.items()}
    options = run_dir, name if claim else "", texts
    command = ["sbatch", "--parsable", JOB_SCRIPT]
    for left in reversed(range(_ATTEMPTS)):
        sent = clock.local()
        answer: Completed | OSError
        try:
            # `SBATCH_*` variables win over the options in a script, so a user's own ones must not change the request.
            answer = run_slurm(connection, command, b"", _TIMEOUT, request.login_variables, slurm.submit, options)
        except (ConnectionLost, TimeoutError) as error:
            answer = error
        step, full = next_step(answer, claim, left), False
        if request.array is not None and isinstance(answer, Completed) and answer.returncode:
            full = lacks_room(stderr_of(answer))
            step = NextStep.REFUSE if full else step
        if step is NextStep.DONE and isinstance(answer, Completed) and (match := _ANSWER.fullmatch(answer.stdout)):
            submitted = SubmittedJob(match[2].decode(), float(match[1]))
            clock.observe(submitted.at, sent, clock.local())
            return submitted
        if step is NextStep.STOP:
            raise ClaimTaken
        failure = answer if isinstance(answer, ConnectionLost) else _refusal(connection, answer, run_dir, request)
        if step is NextStep.REFUSE:
            if isinstance(failure, SubmissionRefused):
                failure.lacks_room = full
            raise failure
        then = "it is submitted again" if step is NextStep.FIND_OR_REPEAT else "it is given up"
        warn(f"[rayslurm] {failure}; the job is looked for before {then}")
        found = find_job(connection, name, patience)
        if found is not None:
            with contextlib.suppress(OSError):
                connection.write(os.path.join(run_dir, JOB_ID), found.encode() + b"\n")
            return SubmittedJob(found, clock.now())
        if step is NextStep.FIND:
            break
    # slurmctld may still take the job. After a lost connection, the caller cancels the job by its name.
    if isinstance(failure, SubmissionRefused) and (problem := end_named(connection, name)):
        warn(f"[rayslurm] {problem}")
    raise failure


def _refusal(connection: Connection, answer: Completed | OSError, run_dir: str, request: JobRequest) -> SubmissionRefused:
    """Returns the exception to raise for a failed submission, with a sentence for the user.

    `answer` has the exit code and the output of `edge.slurm.submit`, which runs sbatch, or is the exception that ended the
    attempt. `run_dir` and `request` are the run directory and the request for the job, for the sentence.
    """
    place, temporary = connection.place, False
    base = re.split("/(?:runs|sessions)/", run_dir)[0]
    if not isinstance(answer, Completed):
        sentence = f"submitting from {run_dir} on {place} took over {_TIMEOUT:g} s and was ended: sbatch, or the file system "
        return SubmissionRefused(FailureKind.SUBMISSION, sentence + "there, does not answer", retry=True)
    said, code = stderr_of(answer), answer.returncode
    if code == slurm.CANNOT_WRITE:
        why = said.splitlines()[-1] if said else "no reason given"
        sentence = f"remote_base: {base} cannot be written on {place}: {why}; choose a directory of your own that the edge and "
        return SubmissionRefused(FailureKind.CONFIGURATION, sentence + "the compute nodes share", retry=False)
    if code == slurm.NO_PROGRAM:
        sentence = f"sbatch is not found on {place}, by a login shell neither; add its directory to PATH there"
    elif code == 0:
        printed = answer.stdout.decode("utf-8", "replace").partition("\n")[2].strip()[:200]
        sentence = f"sbatch on {place} printed {printed!r} where the id of the job was expected {said[-200:]}".rstrip()
    elif code > 128 and not _SBATCH_ERROR.search(said):
        sentence, temporary = f"sbatch was ended by signal {code - 128} on {place}", True
    else:
        temporary = is_temporary(said)
        sentence = with_requested_values(explain(said), request)
    return SubmissionRefused(FailureKind.SUBMISSION, sentence, temporary)


def find_job(connection: Connection, job_name: str, patience: float = 0.0) -> str | None:
    """Searches for a job by its unique name, and returns the job's id; None if two searches, seconds apart, find no such job.

    Each search is repeated for up to `patience` seconds while the edge node is out of reach. Raises ConnectionFailed if the edge
    node or Slurm does not answer.
    """
    for attempt in range(2):
        time.sleep(_PAUSE * attempt)
        try:
            found = parse_jobs_found(ask_patiently(lambda: _named(connection, job_name), patience))
        except (SlurmUnanswered, TimeoutError) as error:  # squeue, or sacct.
            unknown = f"Slurm does not say on {connection.place} whether the job {job_name} was submitted: {error}"
            raise ConnectionFailed(f"{unknown}; look for it before you run the asset again", temporary=True) from None
        if found:
            return found[0]
    return None


def _named(connection: Connection, job_name: str) -> str:
    """Returns a text with a line "ID|STATE|REASON" for each job with the name `job_name`; "" if there is no such job.

    The jobs come from the queue or, if the queue has no such job, from the accounting.
    """
    rows = fetch_queue(connection).named(job_name)
    if rows:
        return "\n".join(f"{row.label}|{row.state}|{row.reason}" for row in rows)
    command = ["sacct", "--noheader", "--parsable2", "--allocations", f"--name={job_name}", "--starttime=now-1day"]
    return run_slurm(connection, [*command, "--format=JobID,State,Reason"], timeout=120).stdout.decode("utf-8", "replace")


def parse_jobs_found(text: str) -> list[str]:
    """Returns the ids of the jobs in the lines "ID|STATE|REASON" of `text`, each id once.

    The result leaves out jobs that Slurm refused after their submission; such a job has failed without a start. The components of
    a heterogeneous job count as one job, with the id of the first component. The elements of an array count as one job, with the
    id of the array.
    """
    rows = [match for match in map(_FOUND.fullmatch, text.splitlines()) if match]
    refused = any(row["state"].startswith(_REFUSED) for row in rows)
    ignored = (_REFUSED, _GIVEN_UP) if refused else ()
    return list(dict.fromkeys(row["job"] for row in rows if not row["state"].startswith(ignored)))


def wait_until_gone(connection: Connection, job: int | str, patience: float = 0.0) -> bool:
    """Cancels a job, again and again, until Slurm shows the job as over or no longer knows the job; returns True then.

    Returns False if Slurm has not confirmed the end a minute after `patience` is over. While squeue does not answer, the function
    cancels the job nevertheless.

    Args:
        connection: the edge node.
        job: the id of a job, the label of one element of an array ("17_3"), or the label of the elements that wait ("17_[3-5]").
        patience: the seconds before the first cancellation, in which the job may end by itself.
    """
    began = time.monotonic()
    pause = 0.1
    while True:
        with contextlib.suppress(OSError):
            try:
                rows, targets = _alive(fetch_queue(connection), str(job))
                if not rows:
                    return True
                ending = all(row.state == "COMPLETING" for row in rows)
            except SlurmUnanswered:
                targets, ending = _targets(str(job)), False
            if time.monotonic() - began >= patience and not ending:
                run_slurm(connection, ["scancel", *targets], timeout=60)
        if time.monotonic() - began > patience + _GONE_DEADLINE:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 3.0)


def _alive(queue: QueueSnapshot, job: str) -> tuple[list[QueueRow], list[str]]:
    """Returns the rows of `queue` in which a job is not over, and the arguments of a scancel that cancels the job.

    `job` is the id of a job or the label of elements of an array, as in `wait_until_gone`. If the job is over or not in the
    queue, the list of rows is empty.
    """
    number, _, element = job.partition("_")
    array = queue.elements(int(number))
    # The last element of an array has the number of the array, which stands for all elements (tried on 22.05).
    if element:
        waiting = element.startswith("[")
        rows = [row for row in array if (row.label.startswith(f"{number}_[") if waiting else row.label == job)]
    else:
        rows = [*(array or queue.components(int(number)))]
    targets, alive = _targets(job), [row for row in rows if row.state not in TERMINAL]
    if not element and not array and number not in (ids := [str(row.job_id) for row in alive]):
        targets = ids  # The id of the first component stands for the whole job only while that component is not over.
    return alive, targets


def _targets(job: str) -> list[str]:
    """Returns the arguments of a scancel that cancels the job with the id or label `job`, as in `wait_until_gone`."""
    number, _, element = job.partition("_")
    return ["--state=PENDING", number] if element.startswith("[") else [job]


def cancel_named(connection: Connection, name: str, log: Any) -> bool:
    """Cancels the job with the name `name`, if there is such a job, and waits up to a minute until Slurm confirms the job's end.

    Returns whether Slurm has confirmed the end. If not, the function logs an error to `log`. The function is for use after an
    interrupted submission, when the job's id is not known.
    """
    problem = end_named(connection, name)
    if problem:
        log.error(f"[rayslurm] {problem}")
    return not problem


def end_named(connection: Connection, name: str) -> str:
    """Cancels the job with the name `name`, if there is one, and waits up to a minute until Slurm confirms the job's end.

    Returns "" if Slurm has confirmed the end. Otherwise returns a sentence that says why the job may still be there.
    """
    reason, began = "Slurm has not confirmed its end", time.monotonic()
    try:
        while time.monotonic() - began < _GONE_DEADLINE:
            run_slurm(connection, ["scancel", "--quiet", "--me", f"--name={name}"], timeout=60)
            alive = [row for row in fetch_queue(connection).named(name) if row.state not in TERMINAL]
            if not alive and time.monotonic() - began > _LATE_SUBMISSION:
                return ""
            time.sleep(ASK_INTERVAL)
    except OSError as error:
        reason = str(error)
    return f"a Slurm job named {name} may have been submitted ({reason}); run `scancel --name={name}` on {connection.place}"
