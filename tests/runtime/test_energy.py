"""The energy of a job's step: what Slurm's answers mean, when Slurm is asked, and that no answer delays a payload for long."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from dagster_rayslurm.runtime.node import energy
from dagster_rayslurm.runtime.node.energy import StepEnergy, is_measured, own_step, parse_joules
from dagster_rayslurm.runtime.process.loop import Loop


@pytest.mark.parametrize(
    ("value", "measured"),
    [
        ("acct_gather_energy/none", False),
        ("(null)", False),
        ("", False),
        ("acct_gather_energy/rapl", True),
        ("acct_gather_energy/gpu,acct_gather_energy/ipmi", True),
        ("xcc", True),
    ],
)
def test_the_configuration_tells_whether_energy_is_measured(value: str, measured: bool) -> None:
    said = f"AccountingStoreFlags    = (null)\nAcctGatherEnergyType    = {value}\nAcctGatherFilesystemType = (null)\n"
    assert is_measured(said) == measured


def test_a_missing_configuration_measures_nothing() -> None:
    assert not is_measured(None) and not is_measured("") and not is_measured("JobAcctGatherParams = (null)\n")


@pytest.mark.parametrize(
    ("text", "joules"),
    [
        ("7200000\n", 7200000),
        ("5000000000\n", 5000000000),
        ("0\n", None),
        ("4294967294\n", None),
        ("18446744073709551614\n", None),
        ("\n", None),
        ("", None),
        (None, None),
        ("12.5K\n", None),
        ("-3\n", None),
        ("17\n18\n", None),
    ],
)
def test_the_figure_of_sstat(text: str | None, joules: int | None) -> None:
    assert parse_joules(text) == joules


def test_only_the_step_of_an_ordinary_job_has_an_energy_of_its_own() -> None:
    step = {"SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0"}
    assert own_step(step) == "17.0" and own_step({**step, "SLURM_HET_SIZE": ""}) == "17.0"
    assert own_step({**step, "SLURM_HET_SIZE": "2"}) is None
    assert own_step({"SLURM_JOB_ID": "17"}) is None and own_step({}) is None


class Slurm:
    """Programs of Slurm on the PATH, which are shell commands, and a step whose energy they tell."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, scontrol: str | None, sstat: str | None) -> None:
        self.calls = directory / "calls"
        self.calls.touch()
        for name, command in (("scontrol", scontrol), ("sstat", sstat)):
            if command is not None:
                (directory / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {self.calls}\n{command}\n')
                (directory / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{directory}{os.pathsep}/usr/bin{os.pathsep}/bin")
        monkeypatch.setenv("SLURM_CONF", str(directory / "slurm.conf"))
        monkeypatch.setattr(energy, "_DELAY", 0.0)
        self.loop = Loop()
        self.step = StepEnergy(self.loop, "17.0")

    def until_idle(self) -> None:
        """Handle events until the programs that were started have ended."""
        self.loop.call_later(0.0, self._stop_if_idle)
        self.loop.resume(30)

    def _stop_if_idle(self) -> None:
        self.loop.call_later(0.01, self._stop_if_idle) if self.loop.children() else self.loop.stop()


RAPL = "echo 'AcctGatherEnergyType    = acct_gather_energy/rapl'"


def test_sstat_is_asked_for_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm, answers = Slurm(tmp_path, monkeypatch, RAPL, "echo 7200000"), []
    assert not slurm.step.query(answers.append)  # The configuration is not known yet.
    slurm.until_idle()
    assert slurm.step.query(answers.append)
    slurm.until_idle()
    sstat = "sstat --jobs=17.0 --format=ConsumedEnergyRaw --noheader --parsable2"
    assert answers == [7200000] and slurm.calls.read_text().splitlines() == ["scontrol show config", sstat]


@pytest.mark.parametrize("scontrol", ["echo 'AcctGatherEnergyType    = (null)'", f"{RAPL}; exit 1", None])
def test_nothing_is_asked_where_no_energy_is_measured(
    scontrol: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = Slurm(tmp_path, monkeypatch, scontrol, "echo 7200000")
    slurm.until_idle()
    assert not slurm.step.query(pytest.fail) and "sstat" not in slurm.calls.read_text()


@pytest.mark.parametrize(
    ("conf", "measured"),
    [
        ("ClusterName=c\nacctgatherenergytype = acct_gather_energy/rapl # yes\n", True),
        ("JobAcctGatherType=jobacct_gather/linux AcctGatherEnergyType=ipmi\n", True),
        ('AcctGatherEnergyType=rapl\nAcctGatherEnergyType="acct_gather_energy/none"#für niemand\n', False),
        ("# AcctGatherEnergyType=acct_gather_energy/rapl\nAcctGatherEnergyType=acct_gather_energy/none\n", False),
        ("ClusterName=c\n" + "".join(f"NodeName=node{number} CPUs=64\n" for number in range(9999)), False),
    ],
    ids=["measured", "two settings in a line", "set twice", "in a comment", "not set, and large"],
)
def test_slurm_conf_spares_slurmctld_the_query(
    conf: str, measured: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slurm.conf").write_text(conf, "latin-1")
    slurm, answers = Slurm(tmp_path, monkeypatch, "exit 1", "echo 7200000"), []
    slurm.until_idle()
    assert slurm.step.query(answers.append) == measured
    slurm.until_idle()
    assert "scontrol" not in slurm.calls.read_text() and answers == [7200000] * measured


@pytest.mark.parametrize("conf", ["ClusterName=c\n Include more.conf\n", None], ids=["include", "a directory"])
def test_slurm_conf_that_does_not_have_all_settings(conf: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slurm.conf").mkdir() if conf is None else (tmp_path / "slurm.conf").write_text(conf)
    slurm = Slurm(tmp_path, monkeypatch, RAPL, "echo 7200000")
    slurm.until_idle()
    assert slurm.step.query([].append) and slurm.calls.read_text().splitlines()[0] == "scontrol show config"


@pytest.mark.parametrize("sstat", ["echo 'sstat: error' >&2; exit 1", "echo 0"])
def test_a_step_without_a_figure_has_none(sstat: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm, answers = Slurm(tmp_path, monkeypatch, RAPL, sstat), []
    slurm.until_idle()
    assert slurm.step.query(answers.append)
    slurm.until_idle()
    assert answers == [None]


def test_a_node_without_sstat_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = Slurm(tmp_path, monkeypatch, RAPL, None)
    slurm.until_idle()
    assert not slurm.step.query(pytest.fail)


def test_a_program_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm, answers = Slurm(tmp_path, monkeypatch, RAPL, "exec sleep 60"), []
    slurm.until_idle()
    monkeypatch.setattr(energy, "_TIMEOUT", 0.2)
    began = time.monotonic()
    assert slurm.step.query(answers.append)
    slurm.until_idle()
    assert answers == [None] and time.monotonic() - began < 30
