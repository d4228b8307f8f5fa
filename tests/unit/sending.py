"""A cluster in a directory of this machine, to which tests send environments."""

import json
import logging
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from dagster_rayslurm import PreDeployedEnvironment, UvEnvironment
from dagster_rayslurm.edge import environment as edge
from dagster_rayslurm.environments import SentEnvironment, send, wheels
from dagster_rayslurm.errors import StartError
from dagster_rayslurm.ssh.local import LocalConnection
from dagster_rayslurm.upload import deliver

from .conda_channel import Package, interpreter

MACHINE = os.uname().machine
LOG = logging.getLogger(__name__)


def wheel(index: Path, name: str, version: str = "1.0", tag: str = "py3-none-any") -> Path:
    """A wheel with one module that has its version."""
    path, info = index / f"{name}-{version}-{tag}.whl", f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", f"version = {version!r}\n")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: {tag}\n")
        names = f"{name}.py", *(f"{info}/{file}" for file in ("METADATA", "WHEEL", "RECORD"))
        archive.writestr(f"{info}/RECORD", "".join(f"{each},,\n" for each in names))
    return path


class Cluster:
    """A base directory on this machine, and a project with its index."""

    def __init__(self, path: Path) -> None:
        self.bare = False  # Whether it has no Python.
        self.look: Any = None  # What looks at a platform for real.
        self.base, self.index, self.project, self.sent = path / "base", path / "index", path / "a project", [""]
        for directory in (self.index, self.project):
            directory.mkdir()

    def write(self, *dependencies: str, more: str = "", requires: str = ">=3.10") -> UvEnvironment:
        (self.project / "pyproject.toml").write_text(
            f'[project]\nname = "study"\nversion = "1"\nrequires-python = "{requires}"\n'
            f"dependencies = {json.dumps(dependencies)}\n"
            f"[tool.uv]\nno-index = true\nfind-links = [{json.dumps(str(self.index))}]\n{more}"
        )
        return UvEnvironment(project=str(self.project))

    def lock(self, *dependencies: str, more: str = "", requires: str = ">=3.10") -> UvEnvironment:
        environment = self.write(*dependencies, more=more, requires=requires)
        command = [wheels.find_uv(), "lock", "--quiet", "--offline"]
        subprocess.run(command, cwd=self.project, check=True, env={**os.environ, "UV_CACHE_DIR": str(self.base) + "-uv"})
        return environment

    def send(self, environment: SentEnvironment) -> str:
        """The path of the environment, as another process asks for it."""
        send._recipes.clear()
        found = send.send_environment(LocalConnection(), environment, str(self.base), LOG)
        assert isinstance(found, PreDeployedEnvironment)
        return found.path

    def refuses(self, environment: SentEnvironment, says: str) -> None:
        with pytest.raises(StartError, match=says) as error:
            self.send(environment)
        assert "\n" not in str(error.value)
        assert not list(self.base.glob("prefixes/[0-9a-f]*"))


@pytest.fixture(scope="session")
def conda_python(tmp_path_factory: pytest.TempPathFactory) -> Package:
    """The Python that runs the tests, as a conda package."""
    return interpreter(tmp_path_factory.mktemp("channel"), depends=["libx >=1", "__glibc >=2.17,<3.0.a0"])


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = Cluster(tmp_path)
    small, program = tmp_path / "uv", wheels.find_uv()
    small.write_text(f'#!/bin/sh\nexec {program} "$@"\n')
    small.chmod(0o755)
    monkeypatch.setattr(wheels, "uv_program", lambda *_: send.Piece("0" * 64, "uv", lambda: str(small)))
    found = {
        "machine": MACHINE,
        "glibc": "2.28",
        "cpu": "",
        "pythons": [[sys._base_executable, list(sys.version_info[:3]), "cpython", MACHINE]],
    }  # type: ignore[attr-defined]
    made.look = edge.platform
    monkeypatch.setattr(edge, "platform", lambda *_: {**found, "pythons": []} if made.bare else found)
    real = deliver.send_files

    def send_files(connection: Any, base: str, files: dict[str, str], progress: Any) -> None:
        made.sent = sorted(map(os.path.basename, files))
        real(connection, base, files, progress)

    monkeypatch.setattr(send, "send_files", send_files)
    return made


def says(prefix: str, code: str) -> str:
    return subprocess.run([f"{prefix}/bin/python", "-c", code], capture_output=True, text=True, check=True).stdout.strip()
