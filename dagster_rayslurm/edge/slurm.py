"""Finds and runs Slurm's programs on the edge node, without variables that stand for options, and submits a job once.

Users and administrators set environment variables that stand for options of Slurm's programs (squeue(1), sbatch(1) and so on,
"ENVIRONMENT VARIABLES", Slurm 22.05). Some of these variables hide jobs or select another cluster. sbatch passes the variables on
to the job, where srun reads them as options, too (tested with 22.05: SRUN_CPUS_PER_TASK, SLURM_WORKING_DIR, SLURM_TASK_PROLOG,
SLURM_EXCLUSIVE).
"""

import contextlib
import os
import pwd
import re
import shutil
import time

from . import files, processes
from .sessions import ABANDONED, CREATOR, JOB_ID, check_owner

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# Exit codes of `submit`: the run directory cannot be written; another process has made the run directory; there is no sbatch.
CANNOT_WRITE, TAKEN, NO_PROGRAM = 70, 78, 127

_OPTIONS = re.compile("(SLURM|SRUN|SBATCH|SQUEUE|SACCT|SCANCEL|SCONTROL|SINFO)_[A-Za-z0-9_]*")
_HOW_TO_REACH_SLURM = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")
_JOB_MAY_SEE = ("HOME", "USER", "LOGNAME", "SHELL", "PATH", "LANG", "TZ", "SLURM_CONF", "LD_LIBRARY_PATH", "MODULEPATH")
_JOB_MAY_SEE_PREFIXES = ("LC_", "MODULES", "LMOD_")
_LOGIN_TIMEOUT = 60.0  # Seconds for the start-up files of a login shell.
_LOGIN_AGAIN = 60.0  # Seconds after which a login shell that did not find sbatch is run again.

# Least pause between two queries of the queue, as a multiple of the time that slurmctld took to answer the last one.
BACK_OFF = 5.0
_MAX_BYTES = 64 * 1024 * 1024  # Most bytes of the shared answer of squeue.

# After a login shell was run for its PATH: the directory of sbatch on it, or ""; and when the shell ended (`time.monotonic()`).
_login_path = []  # type: list[tuple[str, float]]


def job_environment(environ: "Mapping[str, str]") -> "dict[str, str]":
    """Return the variables in `environ`, the environment of a Dagster process on the edge node, that Slurm jobs may see.

    The result has no secrets of Dagster, no TMPDIR, and of the `SLURM_*` variables only SLURM_CONF. sbatch passes its whole
    environment on to the job, and Slurm may store the environment in the accounting database (slurm.conf(5),
    `AccountingStoreFlags=job_env`).
    """
    return {name: environ[name] for name in environ if name in _JOB_MAY_SEE or name.startswith(_JOB_MAY_SEE_PREFIXES)}


def without_options(environ: "Mapping[str, str]", keep: "Sequence[str]" = ()) -> "dict[str, str]":
    """Return `environ` without the variables that stand for options of Slurm's programs, except the variables named in `keep`."""
    kept = (*keep, *_HOW_TO_REACH_SLURM)
    return {name: environ[name] for name in environ if name in kept or not _OPTIONS.fullmatch(name)}


def login_environment() -> "Mapping[str, str]":
    """Return the environment variables of this process if this process is the agent.

    In a Dagster process, return only the variables that jobs may see (see `job_environment`).
    """
    return os.environ if __name__.startswith("rayslurm_edge.") else job_environment(os.environ)


def now() -> float:
    """Return the time on the edge node, in seconds since the epoch."""
    return time.time()


def run(
    command: "Sequence[str]", stdin: bytes, timeout: "float | None", keep: "Sequence[str]", directory: str = ""
) -> "tuple[int | None, bytes, bytes]":
    """Run a command as `processes.run` does, but with the environment variables that `environment(keep)` returns."""
    return processes.run(command, stdin, timeout, environment(keep), directory)


def environment(keep: "Sequence[str]") -> "dict[str, str]":
    """Return the environment variables for a program of Slurm.

    Variables that stand for options of Slurm's programs are left out, except the `SBATCH_*` variables named in `keep`. If the
    PATH has no sbatch, the directory of sbatch on the PATH of a login shell is added to the PATH of the result (see
    `search_path`). The PATH of a non-interactive login is often shorter than the PATH of an interactive login.
    """
    environ = without_options(login_environment(), keep)
    environ["PATH"] = search_path(environ)
    return environ


def command_line(command: "Sequence[str]") -> "list[str]":
    """Return a command line that runs `command`, for a shell of this user, with the environment variables that `run` would set.

    The command line begins with env(1), which removes the variables that stand for options of Slurm's programs, such as
    SQUEUE_FORMAT or SLURM_CLUSTERS, and sets the PATH from `environment`.
    """
    kept = environment(())
    removed = ["--unset=" + name for name in sorted(os.environ) if _OPTIONS.fullmatch(name) and name not in kept]
    return ["env", *removed, "PATH=" + kept.get("PATH", os.defpath), *command]


def search_path(environ: "Mapping[str, str]") -> str:
    """Return the PATH in `environ`, with the directory of sbatch at the end if sbatch is only on the PATH of a login shell.

    The login shell is run once if it finds sbatch. Otherwise, a call after a minute runs it again: the start-up files may only
    have been slow, or may have failed on a file system that was out of reach.
    """
    path = environ.get("PATH", os.defpath)
    if shutil.which("sbatch", path=path):
        return path
    if not _login_path or (not _login_path[0][0] and time.monotonic() - _login_path[0][1] > _LOGIN_AGAIN):
        directory = os.path.dirname(shutil.which("sbatch", path=_path_of_login_shell(environ)) or "")
        _login_path[:] = [(directory, time.monotonic())]
    return path + ":" + _login_path[0][0] if _login_path[0][0] else path


def _path_of_login_shell(environ: "Mapping[str, str]") -> str:
    """Return the PATH in a login shell of this user that starts with the variables `environ`; "" if the shell fails."""
    shell = environ.get("SHELL") or pwd.getpwuid(os.getuid()).pw_shell or "/bin/sh"
    for options in (["-l"], []):  # A csh knows `-l` only alone.
        code, out, _ = processes.run([shell, *options, "-c", 'echo; echo "rayslurm:$PATH"'], b"", _LOGIN_TIMEOUT, environ)
        paths = re.findall("^rayslurm:(.*)$", out.decode("utf-8", "surrogateescape"), re.MULTILINE)
        if code is None or (code == 0 and paths):
            return paths[-1] if code == 0 else ""
    return ""


def submit(
    command: "Sequence[str]",
    stdin: bytes,
    timeout: "float | None",
    keep: "Sequence[str]",
    run_dir: str,
    claim: str,
    texts: "Mapping[str, str]",
) -> "tuple[int | None, bytes, bytes]":
    """Submit a job by the sbatch `command`, unless the run directory already has a file with the id of the submitted job.

    Args:
        command: the command line of sbatch.
        stdin: the standard input of sbatch, which is the job script.
        timeout: seconds that sbatch may take; None for any time.
        keep: names of the `SBATCH_*` variables that sbatch may see.
        run_dir: the path of the run directory; a missing directory is created.
        claim: for the job of a session, the name of the job; "" for any other job. Only one process may use the run directory of
            a session's job.
        texts: contents of the files to write into the run directory before sbatch runs, by name. Each character stands for one
            byte (latin-1).

    Returns the exit code, the output and the error output. The first line of the output is the time on the edge node, in seconds
    since the epoch. The output of sbatch, or the job id from the file, follows. If sbatch fails, the function returns the result
    of `processes.run` for sbatch. The exit code is CANNOT_WRITE if the run directory cannot be written.

    For a session's job, the exit code is TAKEN if the run directory was created for another job, or is marked as abandoned. Of
    several processes, only the one whose `mkdir` succeeds creates the directory, on NFS too. If another process marks the
    directory as abandoned during the submission, the submitted job is cancelled, and the exit code is TAKEN as well.

    An error while the job id is written into the file is ignored, because the job can be found by name.
    """

    def slurm(*words: str) -> "tuple[int | None, bytes, bytes]":
        return run(words, stdin, timeout, keep, run_dir)

    try:
        if claim and not _claimed(run_dir, claim):
            return TAKEN, b"", b""
        files.make_dir(run_dir)
        files.close_to_others(os.path.dirname(run_dir))
        answer = files.read(os.path.join(run_dir, JOB_ID), 0, 1024).strip()
        if not answer:
            for name in texts:
                path = os.path.join(run_dir, name)
                files.make_dir(os.path.dirname(path))
                fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
                with os.fdopen(fd, "wb") as file:
                    file.write(texts[name].encode("latin-1"))
            code, answer, error = slurm(*command)
            if code != 0:
                return code, answer, error
            answer = answer.strip()
            with contextlib.suppress(OSError):
                number = answer.split(b"\n")[-1].split(b";")[0]  # `--parsable` prints "ID" or "ID;CLUSTER" (sbatch(1)).
                files.write(os.path.join(run_dir, JOB_ID), number + b"\n", 0o600)
            if claim and os.path.lexists(os.path.join(run_dir, ABANDONED)):
                slurm("scancel", "--quiet", "--me", "--name=" + claim)
                return TAKEN, b"", b""
        return 0, b"%.9f\n%s\n" % (now(), answer), b""
    except OSError as error:
        return CANNOT_WRITE, b"", ("%s: %s" % (error.filename or run_dir, error.strerror)).encode("utf-8", "surrogateescape")


def _claimed(run_dir: str, claim: str) -> bool:
    """Create the run directory `run_dir` for the job of a session; returns True if the job may be submitted.

    `claim` is the name of the job. If the directory exists already, returns True only if the directory was created for the same
    job and is not marked as abandoned. Raises PermissionError if a directory above belongs to another user.
    """
    session = os.path.dirname(run_dir)
    files.make_dir(session)
    above = [os.path.dirname(os.path.dirname(session)), os.path.dirname(session), session]
    check_owner(*above)
    files.close_to_others(above[1])
    try:
        os.mkdir(run_dir, 0o700)
    except FileExistsError:
        creator = files.read(os.path.join(run_dir, CREATOR), 0, 1024).decode("utf-8", "replace").strip()
        return creator == claim and not os.path.lexists(os.path.join(run_dir, ABANDONED))
    files.write(os.path.join(run_dir, CREATOR), claim.encode() + b"\n", 0o600)
    return True


def queue(
    command: "Sequence[str]",
    stdin: bytes,
    timeout: "float | None",
    keep: "Sequence[str]",
    path: str = "",
    interval: float = 0.0,
    known: float = 0.0,
) -> "tuple[int | None, bytes, bytes]":
    """Return the output of the squeue `command`, or a recent output from a file that all processes of this user share.

    Args:
        command: the command line of squeue.
        stdin: the standard input of squeue.
        timeout: seconds that squeue may take; None for any time.
        keep: names of the `SBATCH_*` variables that squeue may see.
        path: the path of the shared file; "" to run squeue in any case.
        interval: seconds for which the output in the file is used. If slurmctld takes long to answer, the time is longer.
        known: tells which output the caller already has: the time at which that run of squeue began; 0.0 if the caller has none.

    Returns the exit code, the output and the error output. The first line of the output is the time of this call. If the caller
    already has the latest output, nothing follows. Otherwise the second line has the times at which squeue began and ended, and
    the output of squeue follows. All times are in seconds since the epoch. If squeue fails, the function returns the result of
    `run` for squeue. If the file or its directory cannot be written, the function returns the output of squeue all the same.
    """
    at = now()
    stamp = b"%.3f\n" % at
    if path:
        shared = files.read(path, 0, _MAX_BYTES)
        began, ended = _times(shared)
        interval = max(interval, BACK_OFF * (ended - began))
        if abs(at - began) < interval or not _claim(os.path.dirname(path), at, interval):
            return 0, stamp + (shared if began > known or known > at else b""), b""
    code, out, error = run(command, stdin, timeout, keep)
    if code != 0:
        return code, out, error
    answer = b"%.3f %.3f\n" % (at, now()) + out
    if path:
        with contextlib.suppress(OSError):  # A full disk must not hide from the caller that a job has ended.
            files.write(path, answer, 0o600)
    return 0, stamp + answer, b""


def _times(answer: bytes) -> "tuple[float, float]":
    """Return the times at which squeue began and ended, from the first line of the shared file; zeros if the line is damaged."""
    match = re.match(rb"([0-9]+\.[0-9]+) ([0-9]+\.[0-9]+)\n", answer)
    return (float(match.group(1)), float(match.group(2))) if match else (0.0, 0.0)


def _claim(directory: str, at: float, interval: float) -> bool:
    """Claim the next run of squeue for this process; returns False if another process claimed a run within `interval` seconds.

    `at` is the present time, in seconds since the epoch. The name of a file in `directory` contains the time of the last claim.
    Only one process can rename this file, on NFS too, so that all processes together run squeue once in each interval. A missing
    `directory` is created. If the directory or the file cannot be made, for example on a full disk, each process may run squeue.
    """
    try:
        files.make_dir(directory)
        stamps = [int(name[6:]) for name in os.listdir(directory) if re.fullmatch("asked-[0-9]+", name)]
        last = max(stamps, default=0)
        if abs(1000 * at - last) < 1000 * interval:
            return False
        old, new = (os.path.join(directory, "asked-%d" % stamp) for stamp in (last, 1000 * at))
        if not stamps:
            os.close(os.open(old, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError:
        return True
    try:
        os.rename(old, new)
    except OSError as error:
        return not isinstance(error, FileNotFoundError)
    return True
