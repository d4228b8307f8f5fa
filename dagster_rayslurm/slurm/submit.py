"""Submission: one command makes the run directory and calls sbatch in it, and a lost answer never makes two jobs."""

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

from ..errors import FailureKind
from ..ssh.backoff import Backoff
from ..ssh.base import Completed, Connection, ConnectionFailed, ConnectionLost
from . import component_probe
from .commands import CLEAN, cleaned
from .errors import explain, is_temporary, with_values
from .queue import ClusterClock
from .request import JobRequest

JOB_SCRIPT = "job.sh"
JOB_ID = "job_id"
"""The batch script, and the id of its job once that is known."""
CREATOR = "creator"
ABANDONED = "abandoned"
CURRENT = "current"
OFFER = "offer.json"
"""Of a directory that several may want to make: the name of the job of whoever was first, the mark that it is nobody's
any more, and beside it the copy of what it says of itself, which spares others the search."""

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
"""$1 is the run directory, $2 the `SBATCH_*` variables that may stay, the standard input a tar of what shall be in $1.
What follows $4 must be there.
With a job's name in $3 the directory must be new: whoever makes it is the one who submits, by `mkdir`, which is atomic on
NFS too. Others may have given it up meanwhile because that took so long; then they submit another job, and this one goes.
127 comes from a missing sbatch. Those variables win over what stands in a script (sbatch(1), "INPUT ENVIRONMENT
VARIABLES"), so a user's own must not change what was asked for. The job gets sbatch's umask. A `job_id` that cannot be
written does no harm: it only spares looking for the job by its name."""

_FIND = f"""
kept_variables=
{CLEAN}
squeue --me --all --noheader --states=all --name="$1" --format='%i|%T|%r' || exit
sacct --noheader --parsable2 --allocations --name="$1" --starttime=now-1day --format=JobID,State,Reason 2>/dev/null || true
"""
_FOUND = re.compile(r"(?P<job>[0-9]+)(?:\+(?P<component>[0-9]+))?\|(?P<said>.*)")
_REFUSED = "FAILED|BadConstraints"
_GIVEN_UP = "CANCELLED|None"
"""How Slurm shows a job that it refused to take (tried on 22.05 and 24.11); it was none. Of a heterogeneous one it shows the
component that it refused like this, under a number of its own, and those before it as given up."""
_SPOKEN = re.compile(r"^sbatch: (error|fatal|unrecognized option|option|invalid option|ambiguous option)", re.MULTILINE)
_ANSWER = re.compile(rb"([0-9]+\.[0-9]+)\n(?:.*\n)*([0-9]+)(?:;[^\n]*)?\n*")
_TAKEN = 78
_MISSING = 79
_TIMEOUT = 600.0
"""Seconds in which the directory is made and sbatch answers: it asks slurmctld anew for minutes where that is slow."""
_ATTEMPTS = 5
_PAUSE = 3.0
"""Seconds between two looks for a job whose submission was cut off: slurmctld may still be at it."""


class SubmissionRefused(Exception):
    """Slurm, or the run directory, does not take the job; the message says why.

    Attributes:
        kind: "submission", or "configuration" for a base directory that cannot serve.
        retry: whether the same request may succeed later.
        about: the component that is refused; None if it may be any, or there is none.
    """

    def __init__(self, kind: FailureKind, sentence: str, retry: bool = False, about: JobRequest | None = None) -> None:
        super().__init__(sentence)
        self.kind = kind
        self.retry = retry
        self.about = about

    def with_values(self, request: JobRequest) -> str:
        """The sentence with what was asked for in the fields that it names."""
        return with_values(str(self), self.about or request)


class ClaimTaken(Exception):
    """Somebody else was faster, or has taken this claim to be abandoned; nothing is submitted."""


@dataclass(frozen=True)
class Needs:
    """What a job's script will look for: somebody may have removed it since this process brought it there.

    Attributes:
        paths: where it is.
        restore: brings it there again.
    """

    paths: Sequence[str] = ()
    restore: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Submitted:
    """A job in the queue.

    Attributes:
        job_id: Slurm's id.
        at: when it was submitted, by the cluster's clock, in seconds of the epoch.
    """

    job_id: str
    at: float


def pack(files: Mapping[str, bytes]) -> bytes:
    """A tar of small files that only their owner can read."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode, info.mtime = len(content), 0o600, int(time.time())
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def submit(
    commands: Connection,
    run_dir: str,
    files: Mapping[str, bytes],
    request: JobRequest,
    clock: ClusterClock,
    warn: Callable[[str], None],
    claim: bool = False,
    patience: float = 0.0,
    needs: Needs = Needs(),
) -> Submitted:
    """Make a run directory and submit its `job.sh`.

    Args:
        commands: runs commands on the edge node, see `SlurmCommands`.
        run_dir: absolute path there.
        files: what goes into it, `job.sh` too.
        request: what `job.sh` asks for; no other job has its name.
        clock: the cluster's clock, which learns from the answer.
        warn: told of a submission whose answer was lost.
        claim: whether others may be about to do the same; of all of them only one submits.
        patience: seconds for which the edge node may be out of reach once the job may be there.
        needs: what must be there before; it is restored if it is not.

    Raises:
        ClaimTaken: it is another one.
        SubmissionRefused: the job is not taken.
        ConnectionFailed: the edge node cannot be reached; nothing was submitted as far as can be told.
    """
    archive = pack(files)
    name = request.job_name if claim else ""
    command = ["sh", "-c", _SUBMIT, "sh", run_dir, " ".join(kept_variables(request)), name, secrets.token_hex(8), *needs.paths]
    for left in reversed(range(_ATTEMPTS)):
        asked = clock.local()
        again = True
        try:
            done = commands.run(command, archive, _TIMEOUT)
            submitted = _submitted(done)
            if submitted is not None:
                clock.heard(submitted.at, asked, clock.local())
                return submitted
            if claim and done.returncode == _TAKEN:
                raise ClaimTaken
            if done.returncode == _MISSING and left:
                needs.restore()
                continue
            lost: Exception = _refusal(commands, done, run_dir, request)
            if _certain(done):
                raise lost
            again = is_temporary(done.stderr.decode("utf-8", "replace"))
        except ConnectionLost as error:
            lost = error
        except TimeoutError:
            lost, again = _silent(commands, run_dir), False
        warn(f"[rayslurm] {lost}; the job is looked for before {'it is submitted again' if again and left else 'it is given up'}")
        found = _find(commands, request.job_name, patience)
        if found is not None:
            with contextlib.suppress(OSError):
                commands.write(os.path.join(run_dir, JOB_ID), found.encode() + b"\n")
            return Submitted(found, clock.now())
        if not again:
            break
    with contextlib.suppress(OSError):  # slurmctld may take it yet.
        commands.run(cleaned(["scancel", "--quiet", "--me", f"--name={request.job_name}"]), timeout=60)
    raise lost


def _silent(commands: Connection, run_dir: str) -> SubmissionRefused:
    sentence = f"submitting from {run_dir} on {commands.place} took over {_TIMEOUT:g} s and was ended"
    return SubmissionRefused(FailureKind.SUBMISSION, f"{sentence}: sbatch, or the file system there, does not answer", retry=True)


def kept_variables(request: JobRequest) -> list[str]:
    """Variables of sbatch that stand for what the request leaves open, as a user's shell may set them for good."""
    fields = ("account", "constraint", "partition", "qos", "reservation")
    left = [field for field in fields if all(getattr(part, field) is None for part in request.parts)]
    return [f"SBATCH_{field.upper()}" for field in left]


def _certain(done: Completed) -> bool:
    """Whether a failure leaves no doubt that there is no job: sbatch was never called, or has refused in its own words."""
    said = done.stderr.decode("utf-8", "replace")
    refused = 0 < done.returncode < 128 and bool(_SPOKEN.search(said)) and not is_temporary(said)
    return done.returncode in (70, 71, _MISSING, 127) or refused


def _submitted(done: Completed) -> Submitted | None:
    """The job of an answer; None if there is none, or no id in it."""
    # `--parsable` prints "ID" or "ID;CLUSTER" (sbatch(1), Slurm 22.05); a site's own sbatch may print more before it.
    match = _ANSWER.fullmatch(done.stdout) if done.returncode == 0 else None
    return Submitted(match[2].decode(), float(match[1])) if match else None


def _refusal(commands: Connection, done: Completed, run_dir: str, request: JobRequest) -> SubmissionRefused:
    said = done.stderr.decode("utf-8", "replace").strip()
    base = re.split("/(?:runs|sessions)/", run_dir)[0]
    if done.returncode in (70, 71):
        return SubmissionRefused(
            FailureKind.CONFIGURATION,
            f"remote_base: {base} cannot be written on {commands.place}: {said.splitlines()[-1] if said else 'no reason given'}; "
            "choose a directory of your own that the edge and the compute nodes share",
        )
    if done.returncode == _MISSING:
        return SubmissionRefused(
            FailureKind.CONFIGURATION,
            f"remote_base: files that were sent to {base} on {commands.place} disappear again; end what removes them",
        )
    if done.returncode == 127:
        return SubmissionRefused(
            FailureKind.SUBMISSION,
            f"sbatch is not found on {commands.place}, by a login shell neither; add its directory to PATH there",
        )
    if done.returncode == 0:
        answer = done.stdout.decode("utf-8", "replace").partition("\n")[2].strip()[:200]
        return SubmissionRefused(
            FailureKind.SUBMISSION,
            f"sbatch on {commands.place} printed {answer!r} where the id of the job was expected {said[-200:]}".rstrip(),
        )
    if done.returncode > 128 and not _SPOKEN.search(said):
        return SubmissionRefused(
            FailureKind.SUBMISSION, f"sbatch was ended by signal {done.returncode - 128} on {commands.place}", retry=True
        )
    passing = is_temporary(said)
    found = component_probe.ask(commands, request, kept_variables(request), run_dir, alone=bool(request.others) and not passing)
    if found.about is not None:
        sentence = f"component {found.about.component_id!r}: {explain(found.said, found.partitions)}"
        return SubmissionRefused(FailureKind.SUBMISSION, sentence, about=found.about)
    return SubmissionRefused(FailureKind.SUBMISSION, explain(said, found.partitions), retry=passing)


def _find(commands: Connection, job_name: str, patience: float) -> str | None:
    """The id of a job by its name; None if twice there was none."""
    for look in range(2):
        if look:
            time.sleep(_PAUSE)
        done = _ask(commands, ["sh", "-c", _FIND, "sh", job_name], patience)
        if done.returncode:
            said = "; ".join(done.stderr.decode("utf-8", "replace").strip().split("\n")[-4:])[-500:]
            raise ConnectionFailed(
                f"squeue does not say on {commands.place} whether the job {job_name} was submitted: "
                f"{said}; look for it before you run the asset again",
                temporary=True,
            )
        found = jobs_found(done.stdout.decode("utf-8", "replace"))
        if found:
            return found[0]
    return None


def _ask(commands: Connection, question: list[str], patience: float) -> Completed:
    """Run a command that changes nothing, and so may run again while the connection breaks or cannot be had.

    Raises:
        ConnectionFailed: that is so for too long, or will stay so.
    """
    outage, left = Backoff(time.monotonic()), _ATTEMPTS
    while True:
        try:
            return commands.run(question, timeout=120)
        except ConnectionFailed as error:
            left -= isinstance(error, ConnectionLost)
            pause = outage.pause()
            over = outage.seconds + pause > patience
            if not error.temporary or (over and not (left and isinstance(error, ConnectionLost))):
                raise
            time.sleep(pause)


def jobs_found(text: str) -> list[str]:
    """Ids of jobs, of the first component each, in lines of id, state and reason; without those that Slurm refused to take."""
    rows = [match for match in map(_FOUND.fullmatch, text.splitlines()) if match]
    refused = {int(row["job"]) for row in rows if row["said"].startswith(_REFUSED)}
    sizes: dict[str, int] = {}
    for row in rows:
        sizes[row["job"]] = max(sizes.get(row["job"], 0), int(row["component"] or 0) + 1)
    given_up = {row["job"] for row in rows if row["said"] == _GIVEN_UP and int(row["job"]) + sizes[row["job"]] in refused}
    return [job for job in sizes if int(job) not in refused and job not in given_up]
