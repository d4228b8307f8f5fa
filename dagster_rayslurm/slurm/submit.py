"""Submission of a job: one command makes the run directory and calls sbatch; a lost answer never makes two jobs."""

from __future__ import annotations

import contextlib
import io
import os
import re
import secrets
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import FailureKind, StartError
from ..ssh.base import Backoff, Completed, Connection, ConnectionFailed, ConnectionLost
from .commands import CLEAN, without_option_variables
from .refusals import explain, is_temporary, with_requested_values
from .request import JobRequest
from .shared_queue import ClusterClock, fetch_queue
from .states import TERMINAL

JOB_SCRIPT = "job.sh"
JOB_ID = "job_id"
"""Files in the run directory: the batch script, and the id of its job."""
CREATOR = "creator"
ABANDONED = "abandoned"
MANIFEST = "offer.json"
CURRENT = "current"
"""Files of a session: the name of the job that created the session, the mark that the creator gave up, the session's manifest,
and the copy of the newest manifest in the parent directory, which saves other processes the search."""

_SUBMIT = f"""
kept_variables=$2
{CLEAN}
unset TAR_OPTIONS
old=$(umask)
umask 077
number=0
for each; do
    number=$((number + 1))
    [ "$number" -le 4 ] || [ -O "$each" ] || exit 79
done
if [ -n "$3" ]; then
    session=${{1%/*}}
    mkdir -p -- "$session" || exit 70
    for each in "${{session%/*/*}}" "${{session%/*}}" "$session"; do
        [ -O "$each" ] && continue
        echo "$each belongs to $(stat -L -c %U -- "$each"), who could change what runs there" >&2
        exit 70
    done
    chmod 700 -- "${{session%/*}}" || exit 70
    if mkdir -- "$1" 2>/dev/null; then
        echo "$3" >"$1/creator" || exit 70
    elif [ -e "$1" ]; then
        [ "$(cat -- "$1/creator" 2>/dev/null)" = "$3" ] && ! [ -e "$1/abandoned" ] || exit 78
    fi
fi
mkdir -p -- "$1" && chmod 700 -- "${{1%/*}}" && cd -- "$1" || exit 70
id=$(cat job_id 2>/dev/null)
if [ -z "$id" ]; then
    tar -xf - || exit 71
    id=$(umask "$old"; exec sbatch --parsable job.sh) || exit
    printf '%s\\n' "$id" >job_id.new && mv job_id.new job_id
    if [ -n "$3" ]; then
        if [ -e abandoned ]; then scancel --quiet --me --name="$3"; exit 78; fi
        cp offer.json "../.rs-$4.new" && mv -f -- "../.rs-$4.new" ../current
    fi
fi
date +%s.%N
printf '%s\\n' "$id"
"""
"""Shell script that makes the run directory and submits the job in it.

$1: the run directory. $2: the `SBATCH_*` variables to keep. $3: a job name, or "". $4: a random word. $5 and on: files and
directories that the job needs. Standard input: a tar of the files of the run directory.

With $3 the run directory must be new: `mkdir` is atomic on NFS too, and only the process that makes the directory submits.
Others may have taken a slow creator for dead and submitted another job; then this job is cancelled. Exit code 127 means that
sbatch is missing. `SBATCH_*` variables win over the options in a script (sbatch(1), "INPUT ENVIRONMENT VARIABLES"), so a
user's own variables must not change the request. The job gets sbatch's umask. A `job_id` that cannot be written does no harm:
it only saves the search by name."""
_CANNOT_WRITE = (70, 71)
_TAKEN = 78
_MISSING = 79
_NO_PROGRAM = 127
"""Exit codes of `_SUBMIT`: the run directory cannot be written, another process has made it, a needed file is missing, and sbatch
is not found."""

_FIND = f"""
kept_variables=
{CLEAN}
squeue --me --all --noheader --states=all --name="$1" --format='%i|%T|%r' || exit
sacct --noheader --parsable2 --allocations --name="$1" --starttime=now-1day --format=JobID,State,Reason 2>/dev/null || true
"""
_FOUND = re.compile(r"(?P<job>[0-9]+)(?:\+(?P<component>[0-9]+))?\|(?P<state>.*)")
_REFUSED = "FAILED|BadConstraints"
_GIVEN_UP = "CANCELLED|None"
"""State and reason of a job that Slurm refused (tried on 22.05 and 24.11).

In a refused heterogeneous job, the refused component has `_REFUSED` and a number of its own, and the components before it have
`_GIVEN_UP`."""
_SBATCH_ERROR = re.compile(r"^sbatch: (error|fatal|unrecognized option|option|invalid option|ambiguous option)", re.MULTILINE)
# `--parsable` prints "ID" or "ID;CLUSTER" (sbatch(1), Slurm 22.05); a site's own sbatch may print more before it.
_ANSWER = re.compile(rb"([0-9]+\.[0-9]+)\n(?:.*\n)*([0-9]+)(?:;[^\n]*)?\n*")
_TIMEOUT = 600.0
"""Seconds for making the directory and for sbatch, which retries for minutes if slurmctld is slow."""
_ATTEMPTS = 5
"""Most submissions of one job, and most times that the connection may be lost during one search for the job."""
_PAUSE = 3.0
"""Seconds between two searches for a job whose submission was cut off, as slurmctld may still be at work on it."""


class SubmissionRefused(StartError):
    """Raised when Slurm does not take the job, or the run directory cannot be made; nothing was submitted."""


class ClaimTaken(Exception):
    """Raised when another process creates this session, or has marked this process's attempt at it as abandoned.

    No job remains submitted.
    """


@dataclass(frozen=True)
class RequiredFiles:
    """Files on the cluster that a job needs, which somebody may have removed since they were sent.

    Attributes:
        paths: the files and directories.
        restore: sends them again.
    """

    paths: Sequence[str] = ()
    restore: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class SubmittedJob:
    """A job in the queue: Slurm's id, and the time of submission by the cluster's clock, in seconds of the epoch."""

    job_id: str
    at: float


def submit(
    commands: Connection,
    run_dir: str,
    files: Mapping[str, bytes],
    request: JobRequest,
    clock: ClusterClock,
    warn: Callable[[str], None],
    claim: bool = False,
    patience: float = 0.0,
    needs: RequiredFiles = RequiredFiles(),
) -> SubmittedJob:
    """Make a run directory and submit its `job.sh` exactly once.

    Args:
        commands: runs commands on the edge node, see `SlurmCommands`.
        run_dir: absolute path there.
        files: files of the run directory, with `job.sh`.
        request: the options in `job.sh`; the job name is unique.
        clock: the cluster's clock, which learns from the answer.
        warn: receives a warning if the answer of a submission was lost.
        claim: whether other processes may make the same directory; only one of them submits.
        patience: seconds for which the edge node may be unreachable once the job may exist.
        needs: files that must exist before sbatch is called; missing ones are sent again.

    Raises:
        ClaimTaken: another process has made the directory and submits the job.
        SubmissionRefused: Slurm refuses the job or does not answer, or the run directory cannot be made.
        ConnectionFailed: the edge node cannot be reached; as far as is known, nothing was submitted.
    """
    archive = _pack(files)
    name = request.job_name if claim else ""
    words = [run_dir, " ".join(request.login_variables), name, secrets.token_hex(8), *needs.paths]
    for left in reversed(range(_ATTEMPTS)):
        sent = clock.local()
        again = True
        try:
            done = commands.run(["sh", "-c", _SUBMIT, "sh", *words], archive, _TIMEOUT)
            match = _ANSWER.fullmatch(done.stdout) if done.returncode == 0 else None
            if match:
                submitted = SubmittedJob(match[2].decode(), float(match[1]))
                clock.observe(submitted.at, sent, clock.local())
                return submitted
            if claim and done.returncode == _TAKEN:
                raise ClaimTaken
            if done.returncode == _MISSING and left:
                needs.restore()
                continue
            failure: Exception = _refusal(commands, done, run_dir, request)
            if _is_certain(done):
                raise failure
            again = is_temporary(_stderr(done))
        except ConnectionLost as error:
            failure = error
        except TimeoutError:
            sentence = f"submitting from {run_dir} on {commands.place} took over {_TIMEOUT:g} s and was ended"
            failure = SubmissionRefused(
                FailureKind.SUBMISSION, f"{sentence}: sbatch, or the file system there, does not answer", retry=True
            )
            again = False
        then = "it is submitted again" if again and left else "it is given up"
        warn(f"[rayslurm] {failure}; the job is looked for before {then}")
        found = _find(commands, request.job_name, patience)
        if found is not None:
            with contextlib.suppress(OSError):
                commands.write(os.path.join(run_dir, JOB_ID), found.encode() + b"\n")
            return SubmittedJob(found, clock.now())
        if not again:
            break
    with contextlib.suppress(OSError):  # slurmctld may still take the job, so it is cancelled by its name.
        commands.run(without_option_variables(["scancel", "--quiet", "--me", f"--name={request.job_name}"]), timeout=60)
    raise failure


def _pack(files: Mapping[str, bytes]) -> bytes:
    """A tar of files that only their owner can read."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode, info.mtime = len(content), 0o600, int(time.time())
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def _stderr(done: Completed) -> str:
    return done.stderr.decode("utf-8", "replace").strip()


def _is_certain(done: Completed) -> bool:
    """Whether a failed submission certainly made no job: sbatch was never called, or refused in its own words."""
    said = _stderr(done)
    refused = 0 < done.returncode < 128 and bool(_SBATCH_ERROR.search(said)) and not is_temporary(said)
    return done.returncode in (*_CANNOT_WRITE, _MISSING, _NO_PROGRAM) or refused


def _refusal(commands: Connection, done: Completed, run_dir: str, request: JobRequest) -> SubmissionRefused:
    """The error to raise for a failed submission, from its exit code and output."""
    said, place = _stderr(done), commands.place
    base = re.split("/(?:runs|sessions)/", run_dir)[0]
    if done.returncode in _CANNOT_WRITE:
        return SubmissionRefused(
            FailureKind.CONFIGURATION,
            f"remote_base: {base} cannot be written on {place}: {said.splitlines()[-1] if said else 'no reason given'}; "
            "choose a directory of your own that the edge and the compute nodes share",
            retry=False,
        )
    if done.returncode == _MISSING:
        sentence = f"remote_base: files that were sent to {base} on {place} disappear again; end what removes them"
        return SubmissionRefused(FailureKind.CONFIGURATION, sentence, retry=False)
    temporary = False
    if done.returncode == _NO_PROGRAM:
        sentence = f"sbatch is not found on {place}, by a login shell neither; add its directory to PATH there"
    elif done.returncode == 0:
        answer = done.stdout.decode("utf-8", "replace").partition("\n")[2].strip()[:200]
        sentence = f"sbatch on {place} printed {answer!r} where the id of the job was expected {said[-200:]}".rstrip()
    elif done.returncode > 128 and not _SBATCH_ERROR.search(said):
        sentence, temporary = f"sbatch was ended by signal {done.returncode - 128} on {place}", True
    else:
        temporary = is_temporary(said)
        sentence = with_requested_values(explain(said, () if temporary else _partitions(commands)), request)
    return SubmissionRefused(FailureKind.SUBMISSION, sentence, temporary)


def _partitions(commands: Connection) -> list[str]:
    """The partitions of the cluster; none if Slurm does not list them."""
    with contextlib.suppress(OSError):
        done = commands.run(without_option_variables(["sinfo", "--noheader", "--format=%R"]), timeout=60)
        return done.stdout.decode("utf-8", "replace").split() if done.returncode == 0 else []
    return []


def _find(commands: Connection, job_name: str, patience: float) -> str | None:
    """The id of a job by its name; None if two searches find no job."""
    for attempt in range(2):
        if attempt:
            time.sleep(_PAUSE)
        done = _run_repeatedly(commands, ["sh", "-c", _FIND, "sh", job_name], patience)
        if done.returncode:
            said = "; ".join(_stderr(done).split("\n")[-4:])[-500:]
            raise ConnectionFailed(
                f"squeue does not say on {commands.place} whether the job {job_name} was submitted: "
                f"{said}; look for it before you run the asset again",
                temporary=True,
            )
        found = parse_jobs_found(done.stdout.decode("utf-8", "replace"))
        if found:
            return found[0]
    return None


def _run_repeatedly(commands: Connection, command: list[str], patience: float) -> Completed:
    """Run a command that may safely run twice; after a lost or failed connection, run it again.

    Raises:
        ConnectionFailed: the connection cannot be made for longer than `patience`, or never will be.
    """
    outage, left = Backoff(), _ATTEMPTS
    while True:
        try:
            return commands.run(command, timeout=120)
        except ConnectionFailed as error:
            left -= isinstance(error, ConnectionLost)
            pause = outage.pause()
            over = outage.seconds + pause > patience
            if not error.temporary or (over and not (left and isinstance(error, ConnectionLost))):
                raise
            time.sleep(pause)


def parse_jobs_found(text: str) -> list[str]:
    """The ids of jobs in the output of `_FIND`: for each job that of its first component, without jobs that Slurm refused."""
    rows = [match for match in map(_FOUND.fullmatch, text.splitlines()) if match]
    refused = {int(row["job"]) for row in rows if row["state"].startswith(_REFUSED)}
    sizes: dict[str, int] = {}
    for row in rows:
        sizes[row["job"]] = max(sizes.get(row["job"], 0), int(row["component"] or 0) + 1)
    given_up = {row["job"] for row in rows if row["state"] == _GIVEN_UP and int(row["job"]) + sizes[row["job"]] in refused}
    return [job for job in sizes if int(job) not in refused and job not in given_up]


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
