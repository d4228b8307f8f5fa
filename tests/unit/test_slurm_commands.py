"""Slurm's programs: a login shell finds them, they see no variables that stand for options, and jobs see no secrets."""

import os
import shlex
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_rayslurm.slurm.commands import job_environment, run_slurm
from dagster_rayslurm.ssh.base import Completed, ConnectionLost
from dagster_rayslurm.ssh.local import LocalConnection


@pytest.fixture
def hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with an sbatch that only `.profile` puts on the PATH; the profile counts how often it is read."""
    if shutil.which("sbatch") is not None:
        pytest.skip("Slurm is on this machine")
    directory = tmp_path / "slurm's $bin"
    directory.mkdir()
    (directory / "sbatch").write_text('#!/bin/sh\ncat\necho "$0 $* SECRET=$SECRET"\n')
    (directory / "sbatch").chmod(0o755)
    home = tmp_path / "home"
    home.mkdir()
    quoted = str(directory).replace("$", "\\$")
    (home / ".profile").write_text(f'echo hello /bin/sbatch; echo x >>"$HOME/read"; sleep 0.2\nexport PATH="$PATH:{quoted}"\n')
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("SHELL", "/bin/sh")
    monkeypatch.setenv("SECRET", "of Dagster")
    return directory


def times_read() -> int:
    path = Path(os.environ["HOME"], "read")
    return len(path.read_text().split()) if path.exists() else 0


def test_a_login_shell_is_asked_once(hidden: Path) -> None:
    connection = LocalConnection()
    assert run_slurm(connection, ["true"]).returncode == 0 and times_read() == 0
    for _ in range(2):
        done = run_slurm(connection, ["sbatch", "a 'b'"], b"given\n")
        assert done.returncode == 0 and done.stdout.decode() == f"given\n{hidden}/sbatch a 'b' SECRET=\n"
    assert run_slurm(connection, ["no-such-program"]).returncode == 127
    assert times_read() == 1


def test_a_shell_that_is_no_login_shell(hidden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A csh knows `-l` only alone, and `command` not at all."""
    shell = tmp_path / "csh"
    shell.write_text('#!/bin/sh\n[ "$1" = -c ] || { echo "Unknown option: $1" >&2; exit 1; }\n. "$HOME/.profile"; eval "$2"\n')
    shell.chmod(0o755)
    monkeypatch.setenv("SHELL", str(shell))
    assert run_slurm(LocalConnection(), ["sbatch"]).returncode == 0


@pytest.mark.skipif(shutil.which("tcsh") is None, reason="there is no tcsh")
def test_a_real_csh(hidden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHELL", shutil.which("tcsh") or "")
    Path(os.environ["HOME"], ".cshrc").write_text(f"echo hello\nset path = ($path {shlex.quote(str(hidden))})\n")
    assert run_slurm(LocalConnection(), ["sbatch"]).returncode == 0


def test_a_program_that_no_path_has(hidden: Path) -> None:
    (hidden / "sbatch").chmod(0o644)
    connection = LocalConnection()
    assert [run_slurm(connection, ["sbatch"]).returncode for _ in range(2)] == [127, 127]
    assert times_read() == 1


def test_a_connection_that_breaks_meanwhile_is_no_answer(hidden: Path) -> None:
    class Breaks(LocalConnection):
        broken = False

        def run(self, command, stdin=b"", timeout=None):  # type: ignore[no-untyped-def]
            if timeout is not None and not self.broken:
                self.broken = True
                raise ConnectionLost("the connection broke")
            return super().run(command, stdin, timeout)

    connection = Breaks()
    with pytest.raises(ConnectionLost):
        run_slurm(connection, ["sbatch"])
    assert run_slurm(connection, ["sbatch"]).returncode == 0


def test_a_login_shell_that_hangs(hidden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dagster_rayslurm.slurm.commands._LOGIN_TIMEOUT", 0.5)
    Path(os.environ["HOME"], ".profile").write_text("sleep 60\n")
    connection = LocalConnection()
    began = time.monotonic()
    assert [run_slurm(connection, ["sbatch"]).returncode for _ in range(2)] == [127, 127]
    assert time.monotonic() - began < 5


KEPT = {"HOME": "/home/me", "USER": "me", "PATH": "/bin", "LC_ALL": "C", "SLURM_CONF": "/etc/s", "LMOD_DIR": "/l", "TZ": "UTC"}
DROPPED = [
    *("DAGSTER_HOME", "DAGSTER_PG_PASSWORD", "AWS_SECRET_ACCESS_KEY", "PYTHONPATH", "VIRTUAL_ENV", "LS_COLORS", "TMPDIR"),
    *("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_CONF_SERVER", "SBATCH_ACCOUNT", "CUDA_VISIBLE_DEVICES", "RAYSLURM_RUN_DIR", "HOMES"),
]


@given(st.dictionaries(st.sampled_from(DROPPED), st.text()))
def test_what_a_job_may_see(others: dict[str, str]) -> None:
    assert job_environment({**others, **KEPT}) == KEPT


OPTION_VARIABLES = {
    "SQUEUE_PARTITION": "gpu",
    "SACCT_FORMAT": "x",
    "SCANCEL_USER": "root",
    "SINFO_FORMAT": "x\nSQUEUE_NOT_OPTION_VARIABLES=1",
    "SRUN_CPUS_PER_TASK": "3",
    "SLURM_CLUSTERS": "other",
    "SLURM_JOB_ID": "7",
    "SBATCH_PARTITION": "gpu",
    "SBATCH_QOS": "high",
}
OTHER_VARIABLES = {"SLURM_CONF": "/etc/slurm/other.conf", "SLURM_JWT": "token", "MY_SLURM_X": "two\nlines", "SLURMLESS": "x"}


def left_with(command: list[str], keep: Sequence[str] = ()) -> dict[str, str]:
    """The variables that a command which runs `env -0` is left with."""
    variables = {"PATH": os.environ["PATH"], **OPTION_VARIABLES, **OTHER_VARIABLES}

    class Login:
        def run(self, command: Sequence[str], stdin: bytes = b"", timeout: float | None = None) -> Completed:
            return LocalConnection().run(["env", "-i", *(f"{name}={value}" for name, value in variables.items()), *command])

    done = run_slurm(Login(), command, keep=keep)  # type: ignore[arg-type]
    assert done.returncode == 0 and not done.stderr
    found = dict(each.split("=", 1) for each in done.stdout.decode().split("\0") if each)
    return {name: value for name, value in found.items() if (name in variables and name != "PATH") or "SQUEUE" in name}


def test_variables_that_stand_for_options_are_gone_and_all_else_stays() -> None:
    assert left_with(["env", "-0"]) == OTHER_VARIABLES
    assert left_with(["env", "SLURM_CLUSTERS=mine", "env", "-0"]) == {**OTHER_VARIABLES, "SLURM_CLUSTERS": "mine"}
    assert left_with(["env", "-0"], keep=["SBATCH_QOS", "SBATCH_ACCOUNT"]) == {**OTHER_VARIABLES, "SBATCH_QOS": "high"}


def test_arguments_are_passed_unchanged() -> None:
    words = ["a b", "", "$x", "'\"", "*"]
    assert run_slurm(LocalConnection(), ["printf", "%s\\n", *words]).stdout.decode().split("\n")[:-1] == words
