"""Slurm's programs on the edge node: where they are, and which variables of the login they see.

Users and sites set variables that stand for options (squeue(1), sbatch(1) and so on, "ENVIRONMENT VARIABLES", Slurm 22.05).
Some hide jobs or select another cluster. sbatch hands its variables on to the job, where srun takes them for options as well
(tried on 22.05: SRUN_CPUS_PER_TASK, SLURM_WORKING_DIR, SLURM_TASK_PROLOG, SLURM_EXCLUSIVE).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from ..ssh.base import Completed, Connection
from ..ssh.local import LocalConnection

CLEAN = r"""
for name in $(env | sed -nE 's/^((SLURM|SRUN|SBATCH|SQUEUE|SACCT|SCANCEL|SCONTROL|SINFO)_[A-Za-z0-9_]*)=.*/\1/p'); do
    case " $kept_variables SLURM_CONF SLURM_CONF_SERVER SLURM_JWT " in *" $name "*) ;; *) unset "$name" ;; esac
done
"""
"""Shell text that unsets the variables that stand for options of Slurm's programs.

It keeps the variables that say how Slurm is reached, and those named in `$kept_variables`."""


def without_option_variables(command: Sequence[str]) -> list[str]:
    """A command line that runs the given command without the variables that stand for options of Slurm's programs.

    The command is a program of Slurm, or `env` with variables for one. See `CLEAN`.
    """
    return ["sh", "-c", f'kept_variables=\n{CLEAN}exec "$@"', "sh", *command]


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

A csh accepts no command as a login shell, but reads its start-up file for any command.
"""

_KEPT = ("HOME", "USER", "LOGNAME", "SHELL", "PATH", "LANG", "TZ", "SLURM_CONF", "LD_LIBRARY_PATH", "MODULEPATH")
_KEPT_PREFIXES = ("LC_", "MODULES", "LMOD_")
"""Names, and beginnings of names, of the variables that `job_environment` keeps."""

_LOGIN_TIMEOUT = 60.0
"""Seconds for the start-up files of a login shell."""


def job_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of Dagster's own environment that a job may see, if Dagster runs on the edge node.

    sbatch hands its whole environment to the job, and sites may keep it in the accounting database (slurm.conf(5),
    `AccountingStoreFlags=job_env`). Dagster's secrets, and `SLURM_*` and TMPDIR of a job in which Dagster runs, stay out.
    """
    return {name: value for name, value in environ.items() if name in _KEPT or name.startswith(_KEPT_PREFIXES)}


class SlurmCommands:
    """A connection whose commands find Slurm's programs.

    The PATH of a non-interactive login is often shorter than that of an interactive one. If a program is missing, a login
    shell is asked once for its PATH. All other methods are those of the connection.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._path_prefix: list[str] = []
        self._lock = threading.Lock()
        self._searched = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def run(self, command: Sequence[str], stdin: bytes = b"", timeout: float | None = None) -> Completed:
        """As `Connection.run`, but a command that is not found (exit code 127) runs again with the PATH of a login shell.

        Raises:
            OSError: as `Connection.run`.
        """
        environment = []
        if isinstance(self._connection, LocalConnection):
            environment = ["env", "-i", *(f"{name}={value}" for name, value in job_environment(os.environ).items())]
        tried = self._path_prefix
        done = self._connection.run([*environment, *tried, *command], stdin, timeout)
        if done.returncode != 127 or not self._extend_path(tried):
            return done
        return self._connection.run([*environment, *self._path_prefix, *command], stdin, timeout)

    def _extend_path(self, tried: list[str]) -> bool:
        """Whether a command is worth another try: this or another thread has found a longer PATH than the one tried."""
        with self._lock:
            if not self._searched:
                try:
                    found = self._connection.run(["sh", "-c", _FIND], timeout=_LOGIN_TIMEOUT).stdout
                except TimeoutError:
                    found = b""
                self._searched = True
                if found:
                    extend = 'PATH="$PATH:$1" && export PATH && shift && exec "$@"'
                    self._path_prefix = ["sh", "-c", extend, "sh", found.decode("utf-8", "surrogateescape")]
            return self._path_prefix is not tried


class SlurmUnanswered(OSError):
    """Raised when a command of Slurm gives no answer, which says nothing about any job. The message is one sentence."""


def unanswered(place: str, program: str, done: Completed) -> SlurmUnanswered:
    """The error to raise for a program of Slurm that gave no answer; `place` names the host."""
    said = " ".join(done.stderr.decode("utf-8", "replace").split())[-500:]
    if done.returncode == 127:
        return SlurmUnanswered(f"{place}: {program} is not on the PATH that a non-interactive login has; add it there ({said})")
    return SlurmUnanswered(f"{place}: {program} did not answer (exit code {done.returncode}): {said or 'it said nothing'}")


def slurm_commands(connection: Connection) -> SlurmCommands:
    """Returns the `SlurmCommands` of a connection, one per process, so that a login shell is asked only once."""
    with _lock:
        if connection not in _commands:
            _commands[connection] = SlurmCommands(connection)
        return _commands[connection]


_lock = threading.Lock()
_commands: dict[Connection, SlurmCommands] = {}


def _reset_after_fork() -> None:
    """Called in a forked child, which has no thread that could release the lock."""
    global _lock
    _lock = threading.Lock()
    _commands.clear()


os.register_at_fork(after_in_child=_reset_after_fork)
