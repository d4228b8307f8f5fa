"""Slurm's programs on the edge node: find them, run them without variables that stand for options, and submit a job once.

Users and sites set variables that stand for options (squeue(1), sbatch(1) and so on, "ENVIRONMENT VARIABLES", Slurm 22.05).
Some hide jobs or select another cluster. sbatch hands its variables on to the job, where srun takes them for options as well
(tried on 22.05: SRUN_CPUS_PER_TASK, SLURM_WORKING_DIR, SLURM_TASK_PROLOG, SLURM_EXCLUSIVE).
"""

import contextlib
import os
import pwd
import re
import shutil
import threading
import time

from . import files, processes
from .sessions import ABANDONED, CREATOR, CURRENT, JOB_ID, MANIFEST, owner

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

CANNOT_WRITE, TAKEN, MISSING, NO_PROGRAM = 70, 78, 79, 127
"""Exit codes of `submit`: the run directory cannot be written, another process has made it, a needed file is missing, and sbatch
is not found."""

_OPTIONS = re.compile("(SLURM|SRUN|SBATCH|SQUEUE|SACCT|SCANCEL|SCONTROL|SINFO)_[A-Za-z0-9_]*")
_HOW_TO_REACH_SLURM = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")
_JOB_MAY_SEE = ("HOME", "USER", "LOGNAME", "SHELL", "PATH", "LANG", "TZ", "SLURM_CONF", "LD_LIBRARY_PATH", "MODULEPATH")
_JOB_MAY_SEE_PREFIXES = ("LC_", "MODULES", "LMOD_")
_LOGIN_TIMEOUT = 60.0  # Seconds for the start-up files of a login shell.

_lock = threading.Lock()
_found = {}  # type: dict[int, str]
"""The directory of sbatch on the PATH of a login shell, or "", by process id; empty until a login shell was asked."""


def job_environment(environ: "Mapping[str, str]") -> "dict[str, str]":
    """The variables of Dagster's own environment that a job may see, if Dagster runs on the edge node.

    sbatch hands its whole environment to the job, and sites may keep it in the accounting database (slurm.conf(5),
    `AccountingStoreFlags=job_env`). Dagster's secrets, and `SLURM_*` and TMPDIR of a job in which Dagster runs, stay out.
    """
    return {name: environ[name] for name in environ if name in _JOB_MAY_SEE or name.startswith(_JOB_MAY_SEE_PREFIXES)}


def without_options(environ: "Mapping[str, str]", keep: "Sequence[str]" = ()) -> "dict[str, str]":
    """Variables without those that stand for options of Slurm's programs, except those in `keep`."""
    kept = (*keep, *_HOW_TO_REACH_SLURM)
    return {name: environ[name] for name in environ if name in kept or not _OPTIONS.fullmatch(name)}


def now() -> float:
    """The time on the edge node, in seconds of the epoch."""
    return time.time()


def run(
    command: "Sequence[str]", stdin: bytes, timeout: "float | None", keep: "Sequence[str]", of_dagster: bool, directory: str = ""
) -> "tuple[int | None, bytes, bytes]":
    """As `processes.run`, for a command that is or runs a program of Slurm; `keep` names `SBATCH_*` variables for it.

    The PATH of a non-interactive login is often shorter than that of an interactive one. So if a command is not found (exit
    code 127), a login shell is asked once for its PATH. `of_dagster` says that the environment of this process is Dagster's.
    """
    environ = _environ(keep, of_dagster)
    done = processes.run(command, stdin, timeout, environ, directory)
    if done[0] != NO_PROGRAM or not _asked_login_shell(environ):
        return done
    return processes.run(command, stdin, timeout, _environ(keep, of_dagster), directory)


def _environ(keep: "Sequence[str]", of_dagster: bool) -> "dict[str, str]":
    environ = without_options(job_environment(os.environ) if of_dagster else os.environ, keep)
    found = _found.get(os.getpid())
    if found:
        environ["PATH"] = environ.get("PATH", os.defpath) + ":" + found
    return environ


def _asked_login_shell(environ: "Mapping[str, str]") -> bool:
    """Ask a login shell for its PATH, once in this process; whether that has sbatch in a directory that is not in `environ`."""
    with _lock:
        if os.getpid() not in _found:
            _found[os.getpid()] = _directory_of_sbatch(environ)
    found = _found[os.getpid()]
    return bool(found) and not environ.get("PATH", "").endswith(":" + found)


def _directory_of_sbatch(environ: "Mapping[str, str]") -> str:
    """The directory of sbatch on the PATH of a login shell; "" without one. A csh knows `-l` only alone."""
    shell = environ.get("SHELL") or pwd.getpwuid(os.getuid()).pw_shell or "/bin/sh"
    for options in (["-l"], []):
        code, out, _ = processes.run([shell, *options, "-c", 'echo; echo "rayslurm:$PATH"'], b"", _LOGIN_TIMEOUT, environ)
        if code is None:
            return ""
        paths = re.findall("^rayslurm:(.*)$", out.decode("utf-8", "surrogateescape"), re.MULTILINE)
        if code == 0 and paths:
            places = [each for each in paths[-1].split(":") if os.path.isfile(os.path.join(each, "sbatch"))]
            return next((each for each in places if os.access(os.path.join(each, "sbatch"), os.X_OK)), "")
    return ""


def submit(
    command: "Sequence[str]",
    stdin: bytes,
    timeout: "float | None",
    keep: "Sequence[str]",
    of_dagster: bool,
    run_dir: str,
    claim: str,
    needs: "Sequence[str]",
    texts: "Mapping[str, str]",
) -> "tuple[int | None, bytes, bytes]":
    """Make a run directory and run `command`, sbatch, in it, unless the directory names a job already.

    With a `claim`, the name of a session's job, the directory must be new: `mkdir` is atomic on NFS too, and only the process
    that makes the directory submits. Others may have taken a slow creator for dead and submitted another job; then this job is
    cancelled. A job id or manifest that cannot be written then does no harm: both only save a search.

    Args:
        needs: files and directories that the job needs.
        texts: the files of the run directory by name; each character is a byte.

    Returns:
        As `run`. The output is the time and, in further lines, what sbatch printed.
    """

    def slurm(*words: str) -> "tuple[int | None, bytes, bytes]":
        return run(words, stdin, timeout, keep, of_dagster, run_dir)

    try:
        if any(not os.path.exists(each) or os.stat(each).st_uid != os.geteuid() for each in needs):
            return MISSING, b"", b""
        if claim and not _claimed(run_dir, claim):
            return TAKEN, b"", b""
        files.make_dir(run_dir)
        os.chmod(os.path.dirname(run_dir), 0o700)
        answer = files.read(os.path.join(run_dir, JOB_ID), 0, 1024).strip()
        if not answer:
            for name in texts:
                fd = os.open(os.path.join(run_dir, name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
                with os.fdopen(fd, "wb") as file:
                    file.write(texts[name].encode("latin-1"))
            code, answer, error = slurm(*command)
            if code != 0:
                return code, answer, error
            with contextlib.suppress(OSError):
                files.write(os.path.join(run_dir, JOB_ID), answer, 0o600)
            if claim and os.path.lexists(os.path.join(run_dir, ABANDONED)):
                slurm("scancel", "--quiet", "--me", "--name=" + claim)
                return TAKEN, b"", b""
            if claim and MANIFEST in texts:
                with contextlib.suppress(OSError):
                    files.write(os.path.join(os.path.dirname(run_dir), CURRENT), texts[MANIFEST].encode("latin-1"), 0o600)
        return 0, b"%.9f\n%s\n" % (now(), answer.strip()), b""
    except OSError as error:
        return CANNOT_WRITE, b"", ("%s: %s" % (error.filename or run_dir, error.strerror)).encode("utf-8", "surrogateescape")


def _claimed(run_dir: str, claim: str) -> bool:
    """Claim the run directory of a session's job; False if another process has, or if this claim was given up."""
    session = os.path.dirname(run_dir)
    files.make_dir(session)
    above = [os.path.dirname(os.path.dirname(session)), os.path.dirname(session), session]
    _, stranger, user = owner(above)
    if stranger:
        raise OSError(0, "belongs to %s, who could change what runs there" % user, stranger)
    os.chmod(above[1], 0o700)
    try:
        os.mkdir(run_dir, 0o700)
    except FileExistsError:
        creator = files.read(os.path.join(run_dir, CREATOR), 0, 1024).decode("utf-8", "replace").strip()
        return creator == claim and not os.path.lexists(os.path.join(run_dir, ABANDONED))
    files.write(os.path.join(run_dir, CREATOR), claim.encode() + b"\n", 0o600)
    return True


def find(
    command: "Sequence[str]", stdin: bytes, timeout: "float | None", keep: "Sequence[str]", of_dagster: bool, *more: str
) -> "tuple[int | None, bytes, bytes]":
    """As `run`; if the command succeeds, the output of the command in `more` follows, even if that one fails."""
    code, out, error = run(command, stdin, timeout, keep, of_dagster)
    if code == 0:
        out += run(more, stdin, timeout, keep, of_dagster)[1]
    return code, out, error


def queue(
    row_format: str, timeout: float, of_dagster: bool, claims: str = "", interval: float = 0.0, keep: float = 0.0
) -> "tuple[int | None, bytes, bytes, float, float]":
    """The jobs of this user as squeue prints them, unless another process has claimed this query.

    Without --all hidden partitions hide jobs. --states=all also shows jobs that ended, for MinJobAge (300 s by default).

    Args:
        claims: the directory for claims; "" for a query that needs no claim.
        interval: seconds between two claims.
        keep: seconds for which the marks of claims are kept.

    Returns:
        Exit code, output and error output as `processes.run`, and the times before and after the query. If another process has
        claimed the query, the exit code is `TAKEN`, and the second time is that of its claim.
    """
    environ = _environ((), of_dagster)
    if not shutil.which("squeue", path=environ.get("PATH")) and _asked_login_shell(environ):
        environ = _environ((), of_dagster)
    began = now()
    if not shutil.which("squeue", path=environ.get("PATH")):  # Such a host must not claim.
        return NO_PROGRAM, b"", b"squeue: not found", began, began
    taken = _claim(claims, began, interval, keep) if claims else None
    if taken is not None:
        return TAKEN, b"", b"", began, taken
    environ.update(LC_ALL="C", SLURM_TIME_FORMAT="%s")
    command = ["squeue", "--me", "--all", "--noheader", "--states=all", "--format=" + row_format]
    code, out, error = processes.run(command, b"", timeout, environ)
    return code, out, error, began, now()


def _claim(directory: str, at: float, interval: float, keep: float) -> "float | None":
    """Claim the query of an interval by making a directory; the time of the claim if another process was first, else None.

    `mkdir` is atomic on NFS too, so there is one claim in each interval of the cluster's clock, whatever clock the callers have.
    A directory in the claim is named by the time of the claim, so that claims in successive intervals are not too close either.
    """
    stamp, length = int(1000 * at), round(1000 * interval)
    files.make_dir(directory)
    number = stamp // length * length
    own, before = (os.path.join(directory, "claim-%d" % each) for each in (number, number - length))
    for claim in (before, own):
        for name in os.listdir(claim) if os.path.isdir(claim) else ():
            if name.isdigit() and stamp - int(name) < length:
                return int(name) / 1000
    try:
        os.mkdir(own, 0o700)
    except FileExistsError:
        return stamp / 1000
    os.mkdir(os.path.join(own, str(stamp)), 0o700)
    for name in os.listdir(directory):
        if re.fullmatch("claim-[0-9]+", name) and int(name[6:]) < stamp - 1000 * keep:
            shutil.rmtree(os.path.join(directory, name), ignore_errors=True)
    return None
