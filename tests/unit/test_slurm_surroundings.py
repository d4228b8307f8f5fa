"""Which of a login's variables Slurm's programs see."""

import os
import shutil
import subprocess

import pytest

from dagster_rayslurm.slurm.commands import CLEAN, without_option_variables

SET = {
    "SQUEUE_PARTITION": "gpu",
    "SACCT_FORMAT": "x",
    "SCANCEL_USER": "root",
    "SINFO_FORMAT": "x\nSQUEUE_NOT_SET=1",
    "SRUN_CPUS_PER_TASK": "3",
    "SLURM_CLUSTERS": "other",
    "SLURM_JOB_ID": "7",
    "SBATCH_PARTITION": "gpu",
    "SBATCH_QOS": "high",
}
KEPT = {"SLURM_CONF": "/etc/slurm/other.conf", "SLURM_JWT": "token", "MY_SLURM_X": "two\nlines", "SLURMLESS": "x"}
SHELLS = [shell for shell in ("sh", "dash", "bash") if shutil.which(shell)]


def seen(command: list[str]) -> dict[str, str]:
    """The variables that a command which runs `env -0` is left with."""
    done = subprocess.run(command, env={"PATH": os.environ["PATH"], **SET, **KEPT}, capture_output=True, text=True, check=True)
    assert not done.stderr
    found = dict(each.split("=", 1) for each in done.stdout.split("\0") if each)
    return {name: value for name, value in found.items() if name in {**SET, **KEPT} or "SLURM" in name or "SQUEUE" in name}


def test_variables_that_stand_for_options_are_gone_and_all_else_stays() -> None:
    assert seen(without_option_variables(["env", "-0"])) == KEPT
    assert seen(without_option_variables(["env", "SLURM_TIME_FORMAT=%s", "env", "-0"])) == {**KEPT, "SLURM_TIME_FORMAT": "%s"}


@pytest.mark.parametrize("shell", SHELLS)
def test_some_may_be_kept(shell: str) -> None:
    script = f'kept_variables="SBATCH_QOS SBATCH_ACCOUNT"\n{CLEAN}exec env -0'
    assert seen([shell, "-euc", script]) == {**KEPT, "SBATCH_QOS": "high"}


def test_a_missing_program_is_missing() -> None:
    assert subprocess.run(without_option_variables(["no-such-program"]), capture_output=True).returncode == 127


def test_words_stay_as_they_are() -> None:
    words = ["a b", "", "$x", "'\"", "*"]
    done = subprocess.run(without_option_variables(["printf", "%s\\n", *words]), capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:-1] == words
