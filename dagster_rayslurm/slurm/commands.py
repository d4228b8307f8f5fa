"""Slurm's programs on the edge node: where they are, and which variables of the login they see.

Users and sites set variables that stand for options (squeue(1), sbatch(1) and so on, "ENVIRONMENT VARIABLES", Slurm 22.05).
Some hide jobs or select another cluster. sbatch hands its variables on to the job, where srun takes them for options as well
(tried on 22.05: SRUN_CPUS_PER_TASK, SLURM_WORKING_DIR, SLURM_TASK_PROLOG, SLURM_EXCLUSIVE).
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence

from ..ssh.base import Completed, Connection
from ..ssh.local import LocalConnection

_CLEAN = r"""
kept_variables=$1
[ -z "$2" ] || export PATH="$PATH:$2"
shift 2
for name in $(env | sed -nE 's/^((SLURM|SRUN|SBATCH|SQUEUE|SACCT|SCANCEL|SCONTROL|SINFO)_[A-Za-z0-9_]*)=.*/\1/p'); do
    case " $kept_variables SLURM_CONF SLURM_CONF_SERVER SLURM_JWT " in *" $name "*) ;; *) unset "$name" ;; esac
done
exec "$@"
"""
"""Shell script that runs a command without the variables that stand for options of Slurm's programs.

$1: the variables to keep, besides those that say how Slurm is reached. $2: further directories of the PATH, or "". $3 and on:
the command."""

_FIND = r"""
shell=${SHELL:-$(getent passwd "$(id -u)" | cut -d: -f7)}
path=$(
    for login in -l ''; do "${shell:-/bin/sh}" $login -c 'echo; echo "rayslurm:$PATH"' </dev/null 2>/dev/null && break; done |
        sed -n 's/^rayslurm://p' | tail -n 1
)
IFS=:
set -f
for directory in $path; do
    if [ -f "$directory/sbatch" ] && [ -x "$directory/sbatch" ]; then printf '%s' "$directory"; exit; fi
done
"""
"""Shell script that prints the directory of sbatch on the PATH of a login shell, whatever else that shell prints.

A csh accepts no command as a login shell, but reads its start-up file for any command."""

_KEPT = ("HOME", "USER", "LOGNAME", "SHELL", "PATH", "LANG", "TZ", "SLURM_CONF", "LD_LIBRARY_PATH", "MODULEPATH")
_KEPT_PREFIXES = ("LC_", "MODULES", "LMOD_")

_LOGIN_TIMEOUT = 60.0  # Seconds for the start-up files of a login shell.

_found: weakref.WeakKeyDictionary[Connection, str] = weakref.WeakKeyDictionary()
"""The directory of sbatch on the PATH of a login shell, by connection; "" if the search was in vain."""


class SlurmUnanswered(OSError):
    """Raised when a command of Slurm gives no answer, which says nothing about any job. The message is one sentence."""


def run_slurm(
    connection: Connection, command: Sequence[str], stdin: bytes = b"", timeout: float | None = None, keep: Sequence[str] = ()
) -> Completed:
    """As `Connection.run`, for a command that is or runs a program of Slurm; `keep` names `SBATCH_*` variables for it.

    The PATH of a non-interactive login is often shorter than that of an interactive one. So if a command is not found (exit
    code 127), a login shell is asked once for its PATH.
    """
    environment = []
    if isinstance(connection, LocalConnection):
        environment = ["env", "-i", *(f"{name}={value}" for name, value in job_environment(os.environ).items())]

    def run(directory: str) -> Completed:
        words = [" ".join(keep), directory, *command]
        return connection.run([*environment, "sh", "-c", _CLEAN, "sh", *words], stdin, timeout)

    known = _found.get(connection)
    done = run(known or "")
    if done.returncode != 127 or known is not None:
        return done
    try:
        answer = connection.run([*environment, "sh", "-c", _FIND], timeout=_LOGIN_TIMEOUT).stdout
    except TimeoutError:
        answer = b""
    _found[connection] = answer.decode("utf-8", "surrogateescape")
    return run(_found[connection]) if answer else done


def job_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of Dagster's own environment that a job may see, if Dagster runs on the edge node.

    sbatch hands its whole environment to the job, and sites may keep it in the accounting database (slurm.conf(5),
    `AccountingStoreFlags=job_env`). Dagster's secrets, and `SLURM_*` and TMPDIR of a job in which Dagster runs, stay out.
    """
    return {name: value for name, value in environ.items() if name in _KEPT or name.startswith(_KEPT_PREFIXES)}


def stderr_of(done: Completed) -> str:
    """The error output of a command, as text."""
    return done.stderr.decode("utf-8", "replace").strip()


def unanswered(place: str, program: str, done: Completed) -> SlurmUnanswered:
    """The error to raise for a program of Slurm that gave no answer; `place` names the host."""
    said = " ".join(stderr_of(done).split())[-500:]
    if done.returncode == 127:
        return SlurmUnanswered(f"{place}: {program} is not on the PATH that a non-interactive login has; add it there ({said})")
    return SlurmUnanswered(f"{place}: {program} did not answer (exit code {done.returncode}): {said or 'it said nothing'}")
