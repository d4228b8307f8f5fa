"""Slurm's programs: a login shell finds them, they see no variables that stand for options, and jobs see no secrets."""

import os
import shlex
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_rayslurm.edge import slurm
from dagster_rayslurm.slurm.shared_queue import run_slurm
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
    monkeypatch.setattr(slurm, "_login_path", [])
    return directory


def times_read() -> int:
    path = Path(os.environ["HOME"], "read")
    return len(path.read_text().split()) if path.exists() else 0


def test_a_login_shell_is_asked_once(hidden: Path) -> None:
    connection = LocalConnection()
    assert run_slurm(connection, ["true"]).returncode == 0
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


def test_a_login_shell_that_failed_is_asked_again_after_a_minute(hidden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = Path(os.environ["HOME"], ".profile")
    text = profile.read_text()
    profile.write_text("exit 1\n")
    connection = LocalConnection()
    assert run_slurm(connection, ["sbatch"]).returncode == 127
    profile.write_text(text)
    monkeypatch.setattr(slurm, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 61))
    assert [run_slurm(connection, ["sbatch"]).returncode for _ in range(2)] == [0, 0]
    assert times_read() == 1


def test_a_login_shell_that_hangs(hidden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "_LOGIN_TIMEOUT", 0.5)
    Path(os.environ["HOME"], ".profile").write_text("sleep 60\n")
    connection = LocalConnection()
    began = time.monotonic()
    assert [run_slurm(connection, ["sbatch"]).returncode for _ in range(2)] == [127, 127]
    assert time.monotonic() - began < 30


KEPT = {"HOME": "/home/me", "USER": "me", "PATH": "/bin", "LC_ALL": "C", "SLURM_CONF": "/etc/s", "LMOD_DIR": "/l", "TZ": "UTC"}
DROPPED = [
    *("DAGSTER_HOME", "DAGSTER_PG_PASSWORD", "AWS_SECRET_ACCESS_KEY", "PYTHONPATH", "VIRTUAL_ENV", "LS_COLORS", "TMPDIR"),
    *("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_CONF_SERVER", "SBATCH_ACCOUNT", "CUDA_VISIBLE_DEVICES", "RAYSLURM_RUN_DIR", "HOMES"),
]


@given(st.dictionaries(st.sampled_from(DROPPED), st.text()))
def test_what_a_job_may_see(others: dict[str, str]) -> None:
    assert slurm.job_environment({**others, **KEPT}) == KEPT


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


def test_variables_that_stand_for_options_are_gone_and_all_else_stays() -> None:
    variables = {**OPTION_VARIABLES, **OTHER_VARIABLES}
    assert slurm.without_options(variables) == OTHER_VARIABLES
    assert slurm.without_options(variables, ["SBATCH_QOS", "SBATCH_ACCOUNT"]) == {**OTHER_VARIABLES, "SBATCH_QOS": "high"}


def test_arguments_are_passed_unchanged() -> None:
    words = ["a b", "", "$x", "'\"", "*"]
    assert run_slurm(LocalConnection(), ["printf", "%s\\n", *words]).stdout.decode().split("\n")[:-1] == words


@pytest.mark.parametrize("printed", ["12", "12;north", "Welcome\n12;north\n"])
def test_the_file_of_a_jobs_id_has_the_id_alone(printed: str, tmp_path: Path) -> None:
    code, answer, _ = slurm.submit(["printf", "%s", printed], b"", None, (), str(tmp_path / "runs" / "run"), "", {})
    assert code == 0 and answer.partition(b"\n")[2].strip() == printed.strip().encode()
    assert (tmp_path / "runs" / "run" / "job_id").read_text().strip() == "12"
