"""Slurm's programs: a login shell finds them, they see no variables that stand for options, and jobs see no secrets."""

import os
import shlex
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagster_rayslurm.slurm.commands import CLEAN, SlurmCommands, job_environment, slurm_commands, without_option_variables
from dagster_rayslurm.ssh.base import ConnectionLost
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
    commands = SlurmCommands(LocalConnection())
    assert commands.run(["true"]).returncode == 0 and times_read() == 0
    for _ in range(2):
        done = commands.run(["sbatch", "a 'b'"], b"given\n")
        assert done.returncode == 0 and done.stdout.decode() == f"given\n{hidden}/sbatch a 'b' SECRET=\n"
    assert commands.run(["no-such-program"]).returncode == 127
    assert times_read() == 1


def test_threads_wait_for_what_one_of_them_asks(hidden: Path) -> None:
    commands = SlurmCommands(LocalConnection())
    with ThreadPoolExecutor(4) as pool:
        codes = list(pool.map(lambda _: commands.run(["sbatch"]).returncode, range(4)))
    assert codes == [0] * 4 and times_read() == 1


def test_a_shell_that_is_no_login_shell(hidden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A csh knows `-l` only alone, and `command` not at all."""
    shell = tmp_path / "csh"
    shell.write_text('#!/bin/sh\n[ "$1" = -c ] || { echo "Unknown option: $1" >&2; exit 1; }\n. "$HOME/.profile"; eval "$2"\n')
    shell.chmod(0o755)
    monkeypatch.setenv("SHELL", str(shell))
    assert SlurmCommands(LocalConnection()).run(["sbatch"]).returncode == 0


@pytest.mark.skipif(shutil.which("tcsh") is None, reason="there is no tcsh")
def test_a_real_csh(hidden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHELL", shutil.which("tcsh") or "")
    Path(os.environ["HOME"], ".cshrc").write_text(f"echo hello\nset path = ($path {shlex.quote(str(hidden))})\n")
    assert SlurmCommands(LocalConnection()).run(["sbatch"]).returncode == 0


def test_a_program_that_no_path_has(hidden: Path) -> None:
    (hidden / "sbatch").chmod(0o644)
    commands = SlurmCommands(LocalConnection())
    assert [commands.run(["sbatch"]).returncode for _ in range(2)] == [127, 127]
    assert times_read() == 1


def test_a_connection_that_breaks_meanwhile_is_no_answer(hidden: Path) -> None:
    class Breaks(LocalConnection):
        broken = False

        def run(self, command, stdin=b"", timeout=None):  # type: ignore[no-untyped-def]
            if timeout is not None and not self.broken:
                self.broken = True
                raise ConnectionLost("the connection broke")
            return super().run(command, stdin, timeout)

    commands = SlurmCommands(Breaks())
    with pytest.raises(ConnectionLost):
        commands.run(["sbatch"])
    assert commands.run(["sbatch"]).returncode == 0


def test_a_login_shell_that_hangs(hidden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dagster_rayslurm.slurm.commands._LOGIN_TIMEOUT", 0.5)
    Path(os.environ["HOME"], ".profile").write_text("sleep 60\n")
    commands = SlurmCommands(LocalConnection())
    began = time.monotonic()
    assert [commands.run(["sbatch"]).returncode for _ in range(2)] == [127, 127]
    assert time.monotonic() - began < 5


def test_one_object_for_a_connection() -> None:
    connection = LocalConnection()
    assert slurm_commands(connection) is slurm_commands(connection) is not slurm_commands(LocalConnection())


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
SHELLS = [shell for shell in ("sh", "dash", "bash") if shutil.which(shell)]


def left_with(command: list[str]) -> dict[str, str]:
    """The variables that a command which runs `env -0` is left with."""
    done = subprocess.run(
        command,
        env={"PATH": os.environ["PATH"], **OPTION_VARIABLES, **OTHER_VARIABLES},
        capture_output=True,
        text=True,
        check=True,
    )
    assert not done.stderr
    found = dict(each.split("=", 1) for each in done.stdout.split("\0") if each)
    return {
        name: value
        for name, value in found.items()
        if name in {**OPTION_VARIABLES, **OTHER_VARIABLES} or "SLURM" in name or "SQUEUE" in name
    }


def test_variables_that_stand_for_options_are_gone_and_all_else_stays() -> None:
    assert left_with(without_option_variables(["env", "-0"])) == OTHER_VARIABLES
    assert left_with(without_option_variables(["env", "SLURM_TIME_FORMAT=%s", "env", "-0"])) == {
        **OTHER_VARIABLES,
        "SLURM_TIME_FORMAT": "%s",
    }


@pytest.mark.parametrize("shell", SHELLS)
def test_some_variables_may_be_kept(shell: str) -> None:
    script = f'kept_variables="SBATCH_QOS SBATCH_ACCOUNT"\n{CLEAN}exec env -0'
    assert left_with([shell, "-euc", script]) == {**OTHER_VARIABLES, "SBATCH_QOS": "high"}


def test_a_missing_program_is_missing() -> None:
    assert subprocess.run(without_option_variables(["no-such-program"]), capture_output=True).returncode == 127


def test_arguments_are_passed_unchanged() -> None:
    words = ["a b", "", "$x", "'\"", "*"]
    done = subprocess.run(without_option_variables(["printf", "%s\\n", *words]), capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:-1] == words
