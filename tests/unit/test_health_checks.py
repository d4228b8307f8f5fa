"""What each built-in health check says of a node, from what the node says; and of this machine."""

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from dagster_rayslurm import RayLauncher
from dagster_rayslurm.archive import install_runtime
from dagster_rayslurm.runtime.node import health
from dagster_rayslurm.runtime.node.health import Disk, Interface, Order

from ..conftest import small_disk

GIB = 2**30
A, B = "GPU-aaaaaaaa-0000-0000-0000-000000000000", "GPU-bbbbbbbb-0000-0000-0000-000000000000"
TWO_GPUS = f"GPU 0: NVIDIA H200 (UUID: {A})\nGPU 1: NVIDIA H200 (UUID: {B})"
MIG = f"GPU 0: NVIDIA H200 (UUID: {A})\n  MIG 1g.18gb     Device  0: (UUID: MIG-11)\n  MIG 1g.18gb     Device  1: (UUID: MIG-22)"


@pytest.mark.parametrize(
    ("wanted", "listed", "visible", "problem"),
    [
        (2, TWO_GPUS, ["0", "1"], None),
        (1, TWO_GPUS, ["1"], None),
        (2, TWO_GPUS.splitlines()[0], ["0", "1"], "1 of 2 GPUs are there"),
        (1, "", ["0"], "0 of 1 GPUs are there"),
        (1, TWO_GPUS, [B], None),
        (1, TWO_GPUS.splitlines()[0], [B], f"GPU {B} is not there"),
        (2, MIG, ["MIG-11", "MIG-22"], None),
        (2, MIG, ["MIG-11", "MIG-33"], "GPU MIG-33 is not there"),
        (1, MIG, ["0"], None),
    ],
)
def test_gpu_count(wanted: int, listed: str, visible: list[str], problem: str | None) -> None:
    assert health.gpu_count_problem(wanted, listed, visible) == problem


@pytest.mark.parametrize(
    ("errors", "remapped", "problem"),
    [
        ("0, 0\n1, 0", "00000000:18:00.0, 0\n00000000:2A:00.0, 0", None),
        ("0, [N/A]\n1, [Not Supported]", "", None),
        ("0, 0\n1, 3", "", "GPU 1 has 3 uncorrected memory errors"),
        ("0, 0", "00000000:18:00.0, Yes", "GPU 00000000:18:00.0 could not replace a broken row of its memory"),
        ("0, 2", "0, 1", "GPU 0 has 2 uncorrected memory errors; GPU 0 could not replace a broken row of its memory"),
    ],
)
def test_gpu_ecc(errors: str, remapped: str, problem: str | None) -> None:
    assert health.gpu_ecc_problem(errors, remapped) == problem


@pytest.mark.parametrize(
    ("disk", "wanted", "problem"),
    [
        (Disk("/tmp", 100 * GIB, 6 * GIB, 10, 5), None, None),
        (Disk("/tmp", 100 * GIB, 4 * GIB, 10, 5), None, "/tmp has 4.0 GiB free, and 5.0 GiB (5 %) are needed"),
        (Disk("/tmp", 100 * GIB, 20 * GIB, 10, 5), 30 * GIB, "/tmp has 20.0 GiB free, and 30.0 GiB are needed"),
        (Disk("/tmp", 100 * GIB, 1 * GIB, 10, 5), 2**20, None),
        (Disk("/tmp", 100 * GIB, 6 * GIB, 10, 0), None, "/tmp can take no more files: it has no free inodes"),
        (Disk("/tmp", 100 * GIB, 6 * GIB, 0, 0), None, None),
    ],
)
def test_disk_space(disk: Disk, wanted: int | None, problem: str | None) -> None:
    assert health.disk_space_problem(disk, wanted) == problem


@pytest.mark.parametrize(
    ("ahead", "limit", "problem"),
    [
        (0.4, 5.0, None),
        (-4.9, 5.0, None),
        (600.0, 5.0, "its clock is 600.0 s ahead of that of the shared file system, and 5 s are allowed"),
        (-0.2, 0.1, "its clock is 0.2 s behind that of the shared file system, and 0.1 s are allowed"),
    ],
)
def test_clock(ahead: float, limit: float, problem: str | None) -> None:
    assert health.clock_problem(ahead, limit) == problem


@pytest.mark.parametrize(
    ("interfaces", "problem"),
    [
        ([Interface("ib0", "up")], None),
        ([Interface("lo", "unknown")], None),
        ([Interface("mlx5_0 port 1", "ACTIVE"), Interface("mlx5_1 port 1", "INIT")], "interface mlx5_1 port 1 is init"),
        ([Interface("ib0", "down")], "interface ib0 is down"),
        ([Interface("ib0", "up", False)], "interface ib0 has no address"),
        ([Interface("ib7", None)], "there is no interface ib7; there are: eth0, lo"),
        ([], "it has no InfiniBand port; it has: eth0, lo"),
    ],
)
def test_interface(interfaces: list[Interface], problem: str | None) -> None:
    assert health.interface_problem(interfaces, ["eth0", "lo"]) == problem


# ---- This machine


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program `nvidia-smi` whose shell script a test writes."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    program.write_text("#!/bin/sh\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return program


def test_gpus_are_asked_for_by_name(smi: Path, tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    smi.write_text(f'#!/bin/sh\necho "$@" >>{asked}\ncase "$*" in -L) echo "{TWO_GPUS}";; *uncorrected*) echo "1, 4";; esac\n')
    order = Order(["gpu-count", "gpu-ecc"], gpus=1, visible=["1"])
    assert health.first_problem(order) == ("gpu-ecc", "GPU 1 has 4 uncorrected memory errors")
    assert all("--id=1 " in line for line in asked.read_text().splitlines() if line != "-L")
    assert health.first_problem(Order(["gpu-count=3"], gpus=1)) == ("gpu-count=3", "2 of 3 GPUs are there")


def test_a_driver_that_fails_or_hangs_or_is_missing(smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi.write_text("#!/bin/sh\necho 'Unable to determine the device handle: GPU is lost'\nexit 15\n")
    lost = "nvidia-smi ended with exit code 15: Unable to determine the device handle: GPU is lost"
    assert health.first_problem(Order(["gpu-count"], gpus=1)) == ("gpu-count", lost)
    monkeypatch.setattr(health, "_TIMEOUT", 0.2)
    smi.write_text("#!/bin/sh\nexec sleep 60\n")
    assert health.first_problem(Order(["gpu-ecc"], gpus=1)) == ("gpu-ecc", "nvidia-smi does not answer within 0.2 s")
    monkeypatch.setenv("PATH", "/nowhere")
    problem = "nvidia-smi cannot be run: No such file or directory"
    assert health.first_problem(Order(["gpu-count"], gpus=1)) == ("gpu-count", problem)
    assert health.first_problem(Order(["gpu-count", "gpu-ecc"], gpus=0)) is None
    assert health.first_problem(Order(["gpu-count", "gpu-ecc"], gpus=None)) is None


def test_a_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        order = Order([f"disk-space={disk}:1M"])
        assert health.first_problem(order) is None
        (disk / "filled").write_bytes(b"x" * 1000_000)
        name, problem = health.first_problem(order) or ("", "")
        assert name == order.checks[0] and re.fullmatch(rf"{disk} has [\d.]+ KiB free, and 1\.0 MiB are needed", problem)
        assert "(5 %) are needed" in (health.first_problem(Order(["disk-space"], scratch=str(disk))) or ("", ""))[1]
    assert health.first_problem(Order(["disk-space=/nowhere:1M"])) == (
        "disk-space=/nowhere:1M",
        "/nowhere: No such file or directory",
    )


def test_the_clock_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = Order(["clock"], shared=str(tmp_path))
    assert health.first_problem(order) is None and not list(tmp_path.iterdir())
    now = health.time.time
    monkeypatch.setattr(health.time, "time", lambda: now() - 60)
    name, problem = health.first_problem(order) or ("", "")
    assert name == "clock" and problem.endswith(" s behind that of the shared file system, and 5 s are allowed")
    assert health.first_problem(Order(["clock=90"], shared=str(tmp_path))) is None
    assert health.first_problem(Order(["clock"])) is None, "there is nothing to compare with in local mode"


def test_interfaces_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert health.first_problem(Order(["interface=lo"])) is None
    assert health.first_problem(Order(["interface"], interface="lo")) is None
    name, problem = health.first_problem(Order(["interface=nope0"])) or ("", "")
    assert name == "interface=nope0" and problem.startswith("there is no interface nope0; there are: ") and "lo" in problem
    for device, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        (tmp_path / device / "ports" / "1").mkdir(parents=True)
        (tmp_path / device / "ports" / "1" / "state").write_text(state + "\n")
    monkeypatch.setattr(health, "_INFINIBAND", str(tmp_path))
    assert health.first_problem(Order(["interface=mlx5_0"])) is None
    assert health.first_problem(Order(["interface"])) == ("interface", "interface mlx5_1 port 1 is down")


def test_the_program_writes_what_it_found(tmp_path: Path) -> None:
    runtime = install_runtime(tmp_path)
    for order, code, found in (
        (Order(["interface=lo"]), 0, None),
        (Order(["interface=lo", "interface=nope0"]), 1, "interface=nope0"),
    ):
        read, write = os.pipe()
        done = subprocess.run([sys.executable, "-I", str(runtime), "health", order.to_json(), str(write)], pass_fds=[write])
        os.close(write)
        with open(read, "rb") as file:
            said = json.loads(file.read())
        assert done.returncode == code and (said[0] if said else None) == found


@pytest.mark.parametrize(
    ("checks", "kept"),
    [
        (None, None),
        ("nvidia-smi", "nvidia-smi"),
        ("gpu-count", "gpu-count"),
        ("gpu-count\ntest -d /data\n", "gpu-count\ntest -d /data"),
        (
            ["gpu-count=4", "disk-space=/scratch:20G", "clock=0.5", "interface=ib0", "test -d /data"],
            "gpu-count=4\ndisk-space=/scratch:20G\nclock=0.5\ninterface=ib0\ntest -d /data",
        ),
    ],
)
def test_checks_and_commands(checks: object, kept: object) -> None:
    assert RayLauncher(health_check=checks).health_check == kept


@pytest.mark.parametrize(
    ("checks", "problem"),
    [
        ("gpu-counts", "'gpu-counts' is no built-in check; did you mean 'gpu-count'?"),
        (["disk_space"], "'disk_space' is no built-in check; did you mean 'disk-space'?"),
        (["gpu-ecc=1"], "'gpu-ecc=1': gpu-ecc takes no value"),
        (["gpu-count=two"], "'gpu-count=two': 'two' is not a number of GPUs"),
        (["disk-space=20"], "'disk-space=20': '20' is not SIZE or PATH:SIZE with K, M, G or T"),
        (["clock=soon"], "'clock=soon': 'soon' is not seconds"),
        (["interface="], "'interface=': '' is not the name of an interface, such as ib0"),
        ([7], "7 is not a string"),
        (["echo a\necho b"], "contains the control character"),
        ({"gpu-count": 2}, 'write a list of checks, such as ["gpu-count", "clock"]'),
    ],
)
def test_a_wrong_check_is_refused_at_once(checks: object, problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        RayLauncher(health_check=checks)
