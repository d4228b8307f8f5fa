"""Figures of GPUs: of the granted ones alone, of NVIDIA's and AMD's, asked for once per node."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dagster_rayslurm.runtime.node import usage
from dagster_rayslurm.runtime.node.resources import GPU_VARIABLES, granted_gpus
from dagster_rayslurm.runtime.node.usage import (
    Gpu,
    GpuMonitor,
    parse_amd,
    parse_nvidia,
    select_granted,
)
from dagster_rayslurm.runtime.process.loop import Loop

NVIDIA = "0, GPU-aaaa-0, 20, 1000\n1, GPU-bbbb-1, 100, 40000\n2, GPU-cccc-2, [N/A], [N/A]\nrubbish\n"

AMD = "WARNING: AMD GPU device(s) is/are in a low-power state.\n" + json.dumps(
    {
        "card0": {
            "Unique ID": "0x9f3a1c",
            "GPU use (%)": "35",
            "VRAM Total Memory (B)": "68702699520",
            "VRAM Total Used Memory (B)": "2147483648",
        },
        "card1": {
            "Unique ID": "0xdeadbeef",
            "GPU use (%)": "90",
            "VRAM Total Memory (B)": "68702699520",
            "VRAM Total Used Memory (B)": "1073741824",
        },
        "card2": {"Unique ID": "N/A"},
        "system": {"Driver version": "6.10.5"},
    }
)
"""What `rocm-smi --showuniqueid --showuse --showmeminfo vram --json` prints (ROCm 6)."""


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*GPU_VARIABLES, *(name for name in os.environ if name.startswith("SLURM_"))]:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("environ", "granted"),
    [
        ({}, None),
        ({"CUDA_VISIBLE_DEVICES": "1"}, ["1"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
        ({"CUDA_VISIBLE_DEVICES": "MIG-GPU-aaaa/1/0"}, ["MIG-GPU-aaaa/1/0"]),
        ({"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "1"}, ["3"]),
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_GPUS": "1"}, ["1"]),
        ({"SLURM_JOB_ID": "7", "SLURM_CPUS_ON_NODE": "0"}, []),
        ({"SLURM_JOB_ID": "7", "SLURM_CPUS_ON_NODE": "100000"}, None),
    ],
)
def test_which_gpus_are_granted(environ: dict[str, str], granted: list[str] | None) -> None:
    assert granted_gpus(environ) == granted


@pytest.mark.parametrize(
    ("granted", "indices"),
    [(None, "01"), (["0"], "0"), (["GPU-bbbb-1"], "1"), (["GPU-b"], "1"), (["MIG-GPU-aaaa-0/1/0"], ""), ([], "")],
)
def test_figures_are_those_of_the_granted_gpus(granted: list[str] | None, indices: str) -> None:
    assert "".join(gpu.number for gpu in select_granted(granted, parse_nvidia(NVIDIA))) == indices


def test_figures_of_amd() -> None:
    assert parse_amd(AMD) == [Gpu("0", "GPU-9f3a1c", 35.0, 2**31), Gpu("1", "GPU-deadbeef", 90.0, 2**30)]
    assert select_granted(["GPU-DEADBEEF"], parse_amd(AMD))[0].percent_busy == 90.0
    assert parse_amd("no GPUs") == parse_amd("{]") == []


def test_figures_add_up() -> None:
    meter = usage.UsageMeter([], started=0.0)
    meter.add_gpus([Gpu("0", "", 50, 100), Gpu("1", "", 100, 300)])
    meter.add_gpus([Gpu("0", "", 0, 10), Gpu("1", "", 0, 10)])
    summary = meter.summary()
    assert (summary["gpu_utilization_mean"], summary["gpu_utilization_max"]) == (37.5, 100)
    assert summary["gpu_memory_max"] == 400


def program(directory: Path, name: str, output: str) -> None:
    directory.mkdir(exist_ok=True)
    (directory / "output").write_text(output)
    (directory / name).write_text(f"#!/bin/sh\necho asked >> {directory}/asked\ncat {directory}/output\n")
    (directory / name).chmod(0o755)


def asked(monkeypatch: pytest.MonkeyPatch, directory: Path) -> list[Gpu]:
    """The figures of a monitor that serves several payloads."""
    monkeypatch.setenv("PATH", str(directory), prepend=os.pathsep)
    loop = Loop()
    gpus = GpuMonitor(loop)

    def look() -> None:
        for _ in range(3):
            gpus.query_if_due()
        if gpus.figures[0]:
            return loop.stop()
        loop.call_later(0.01, look)

    look()
    loop.resume(30.0)
    return gpus.figures[1]


def test_gpus_of_other_jobs_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "bin", "nvidia-smi", NVIDIA)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert asked(monkeypatch, tmp_path / "bin") == [Gpu("0", "GPU-aaaa-0", 20.0, 1000 * 2**20)]


@pytest.mark.parametrize("variable", ["ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"])
def test_gpus_of_amd_are_measured(variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "bin", "rocm-smi", AMD)
    monkeypatch.setenv(variable, "1")
    assert [gpu.percent_busy for gpu in asked(monkeypatch, tmp_path / "bin")] == [90.0]


def test_gpus_are_asked_for_once_for_all_payloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "bin", "nvidia-smi", NVIDIA)
    assert len(asked(monkeypatch, tmp_path / "bin")) == 2
    assert (tmp_path / "bin" / "asked").read_text().count("asked") == 1
