"""A cluster that has no Python for Ray: the interpreter comes in a conda package, and Ray in wheels."""

import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
import tomli

from dagster_rayslurm import ComputeResource, PixiEnvironment
from dagster_rayslurm.environments import wheels
from dagster_rayslurm.environments.platforms import Platform, Python

from ..conftest import pipes_script, run_asset, small_ray
from ..unit.conda_channel import VERSION, Package, lock_text, package, pypi
from ..unit.sending import MACHINE
from .fixtures import Site

pytest.importorskip("rattler")
pytest.importorskip("uv")
SAYS = pipes_script("""
import ray, sys
ray.init(log_to_driver=False)
where = ray.get(ray.remote(lambda: (sys.prefix, sys.executable)).remote())
pipes.report_asset_materialization(metadata={"prefix": sys.prefix, "worker": where[0], "nodes": len(ray.nodes())})
""")


def locked(directory: Path, python: Python, glibc: tuple[int, ...]) -> list[Package]:
    """Ray and what it needs, as a lock file of pixi names it."""
    requirements = directory / "requirements.txt"
    requirements.write_text(f"ray[default]=={version('ray')}\ndagster-pipes=={version('dagster-pipes')}\n")
    target = wheels.Target(Platform("the stack", MACHINE, glibc, (python,), MACHINE), python)
    text = wheels.compile_requirements(str(requirements), target)
    from packaging.pylock import Pylock

    found = target.select(Pylock.from_dict(tomli.loads(text)))
    return [
        pypi(str(source.url), package.name, str(package.version), sha256=source.hashes["sha256"])  # type: ignore[union-attr]
        for package, source in found
    ]


@pytest.mark.ray
def test_ray_in_an_environment_of_pixi(
    site: Site,
    slurm_compute: Callable[..., ComputeResource],
    conda_python: Package,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = tuple(map(int, os.confstr("CS_GNU_LIBC_VERSION").split()[-1].split(".")))  # type: ignore[union-attr]
    there = tuple(map(int, site.sh("getconf GNU_LIBC_VERSION").split()[-1].split(".")))
    if here > there:
        pytest.skip("the Python that runs the tests needs a newer glibc than the stack has")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    python = Python("", tuple(sys.version_info[:3]), "cpython", MACHINE)
    (tmp_path / "pixi.toml").write_text('[dependencies]\npython = "*"\n[pypi-dependencies]\nray = "*"\n')
    libx = package(tmp_path, "libx")
    (tmp_path / "pixi.lock").write_text(lock_text([conda_python, libx, *locked(tmp_path, python, there)]))
    script = tmp_path / "payload.py"
    script.write_text(SAYS)
    compute = slurm_compute(
        {"num_nodes": 2, "mem": "1500M"},
        environment=PixiEnvironment(manifest=str(tmp_path / "pixi.toml")),
        pre_deployed_env_path=None,
        default_launcher=small_ray(),
    )
    for _ in range(2):  # The second run finds the environment there.
        ran = run_asset(compute, str(script))
        assert not ran.failures, ran.failures
        prefix = ran.metadata["prefix"]
        assert prefix.startswith(f"{site.base}/prefixes/")
        assert ran.metadata["worker"] == prefix
        assert ran.metadata["nodes"] == 2
    assert VERSION in site.sh('"$1"/bin/python --version', prefix)
    assert len(site.sh('ls -d "$1"/prefixes/*-*', site.base).split()) == 1
