"""Environments in archives that the tools themselves have written. pixi-pack cannot be had from PyPI: a stand-in is tested."""

import subprocess
import sys
import venv
from pathlib import Path

import pytest

from dagster_rayslurm import PackedEnvironment
from dagster_rayslurm.environments import install_conda, wheels

from .conda_channel import PLACEHOLDER, Package, package
from .sending import Cluster, says, wheel

pytest.importorskip("uv")


def run(*words: object) -> None:
    subprocess.run([sys.executable, *map(str, words)], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def test_conda_pack(cluster: Cluster, conda_python: Package, tmp_path: Path) -> None:
    pytest.importorskip("rattler")
    pytest.importorskip("conda_pack")
    tool = package(tmp_path, "tool", files={"site-packages/tool.py": "version = 1\n"}, noarch="python")
    share = package(tmp_path, "share", files={"share/x": f"{PLACEHOLDER}/share"}, placeholders={"share/x": "text"})
    archives = [each.url.removeprefix("file://") for each in (conda_python, tool, share)]
    prefix, archive = tmp_path / "prefix", tmp_path / "environment.tar.gz"
    run(install_conda.__file__, prefix, '{"variables": {}, "scripts": []}', *archives)
    run("-m", "conda_pack.cli", "--prefix", prefix, "--output", archive, "--compress-level", "1")
    made = cluster.send(PackedEnvironment(archive=str(archive)))
    assert says(made, "import sys, tool; print(sys.prefix, tool.version)") == f"{made} 1"
    assert Path(made, "share/x").read_text() == f"{Path(made).resolve()}/share"


def test_venv_pack(cluster: Cluster, tmp_path: Path) -> None:
    pytest.importorskip("venv_pack")
    prefix, archive = tmp_path / "venv", tmp_path / "environment.tar.gz"
    venv.create(prefix)
    install = "pip", "install", "--offline", "--no-index", "--quiet", "--python", str(prefix / "bin/python")
    wheels.run_uv(*install, str(wheel(tmp_path, "left")))
    run("-m", "venv_pack", "--prefix", prefix, "--output", archive)
    made = cluster.send(PackedEnvironment(archive=str(archive)))
    assert says(made, "import sys, left; print(sys.prefix, left.version)") == f"{made} 1.0"


@pytest.mark.parametrize("kind", [[], pytest.param(["--venv"], marks=pytest.mark.thorough)])
def test_pex(cluster: Cluster, tmp_path: Path, kind: list[str]) -> None:
    pytest.importorskip("pex")
    archive = tmp_path / "environment.pex"
    wheel(cluster.index, "left")
    run("-m", "pex", "left", "--no-pypi", "--find-links", cluster.index, "--output-file", archive, "--no-compress", *kind)
    made = cluster.send(PackedEnvironment(archive=str(archive)))
    # Ray starts further processes of the same Python.
    again = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import left; print(left.version)'], check=True)"
    assert says(made, f"import left; {again}") == "1.0"
