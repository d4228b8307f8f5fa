"""Tests: `rayslurm doctor` names each defect of a site by its line and by no other, and says nothing of a healthy site."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

from dagster_rayslurm import SlurmQueueConfig, SlurmResource, SSHConnectionResource
from dagster_rayslurm.ssh.openssh import control_path
from dagster_rayslurm.ssh.pool import close_connections

from ..connections.fixtures import end_master
from ..stack.access import Stack
from .bench import BASE, Bench, environ_of
from .site_defects import ALL, Defect, busy

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def bench(stack: Stack) -> Iterator[Bench]:
    bench = Bench(stack)
    yield bench
    close_connections()
    stack.exec("edge", ["rm", "-rf", BASE])
    assert stack.exec("edge", ["squeue", "--me", "--noheader"], user="dev") == ""


def bad(report: dict[str, Any]) -> list[dict[str, str]]:
    """The lines that are no praise."""
    return [line for line in report["lines"] if line["verdict"] in ("warning", "failure")]


def complaints(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Name and verdict of the lines that are no praise, without the names of nodes; each once."""
    assert all(line["remedy"] for line in bad(report)), bad(report)
    return sorted({(line["name"].rpartition(": ")[2], line["verdict"]) for line in bad(report)})


def pasted(report: dict[str, Any]) -> Any:
    """The resource that can be pasted."""
    return eval(report["resource"], {each.__name__: each for each in (SlurmQueueConfig, SlurmResource, SSHConnectionResource)})


@pytest.mark.parametrize(
    "defect", [pytest.param(each, id=each.name, marks=[pytest.mark.thorough] * each.thorough) for each in ALL]
)
def test_a_defect_is_named_by_its_line(defect: Defect, bench: Bench, tmp_path: Path) -> None:
    changed = {name: value and value.replace("{dir}", str(tmp_path)) for name, value in defect.variables.items()}
    with defect.seed(bench, tmp_path):
        report = bench.doctor(*defect.arguments, **changed)
    assert complaints(report) == [(defect.line, defect.verdict)], bad(report)


def test_there_are_forty_defects_with_names_of_their_own() -> None:
    assert len({defect.name for defect in ALL}) == len(ALL) >= 40


HEALTHY = {
    "as it is": ((), ""),
    "a node": (("--probe", "--env=/opt/ray"), ""),
    "two nodes with GPUs": (("--probe-nodes=2", "--partition=gpu", "--gpus-per-node=2", "--gpu-type=fake"), ""),
    "another shell": ((), "usermod --shell /bin/tcsh dev"),
    "Slurm on the PATH of login shells only": (
        ("--probe",),
        "mkdir -p /opt/slurm && cd /usr/bin && mv sbatch srun squeue scancel sinfo scontrol sacct sacctmgr /opt/slurm/ && "
        "echo 'PATH=$PATH:/opt/slurm' > /etc/profile.d/slurm.sh",
    ),
}
_BACK = """
usermod --shell /bin/bash dev
if [ -d /opt/slurm ]; then mv /opt/slurm/* /usr/bin/; rm -rf /opt/slurm /etc/profile.d/slurm.sh; fi
"""


def test_a_healthy_site_gives_no_alarm_to_the_ssh_program(bench: Bench) -> None:
    report = bench.doctor("--probe", CLIENT="openssh")
    end_master(control_path(pasted(report).ssh))
    assert complaints(report) == [], bad(report)


def test_an_interrupted_probe_leaves_nothing(bench: Bench, tmp_path: Path) -> None:
    with busy(bench, tmp_path):
        command = [Path(sys.executable).with_name("rayslurm"), "doctor", "--probe", f"--remote-base={BASE}"]
        process = subprocess.Popen(command, env=environ_of(bench.stack), stdout=PIPE, stderr=PIPE, text=True)
        assert process.stderr is not None and "is waiting for" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
        assert process.returncode == 1 and "Traceback" not in said
        assert bench.stack.exec("edge", ["squeue", "--user=dev", "--noheader"]) == ""
        assert bench.sh("edge", f"ls {BASE}/runs") == ""


@pytest.mark.parametrize("variant", HEALTHY)
def test_a_healthy_site_gives_no_alarm(variant: str, bench: Bench) -> None:
    arguments, script = HEALTHY[variant]
    with bench.undone("edge", script or "true", _BACK):
        report = bench.doctor(*arguments)
    assert complaints(report) == [], bad(report)
    assert [row["partition"] for row in report["partitions"]] == ["compute*", "gpu", "all"]
    assert [row["GPUs"] for row in report["partitions"]] == ["", "2 fake", "2 fake"]


def test_the_resource_can_be_pasted(bench: Bench) -> None:
    report = bench.doctor("--partition=gpu", "--gpus-per-node=2")
    resource = pasted(report)
    assert resource.queue.partition == "gpu" and resource.queue.gpus_per_node == 2
    assert resource.ssh.host == "127.0.0.1" and resource.remote_base == BASE
