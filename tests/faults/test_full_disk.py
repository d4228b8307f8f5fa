"""Tests: full disks. The end of a run is still reported, or the failure names the disk."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from dagster_rayslurm import ComputeResource

from ..conftest import pipes_script, run_asset, small_disk, small_ray, wait_until
from ..slurm.fixtures import NODES, Site
from .mounts import shown

pytestmark = pytest.mark.timeout(200)

Make = Callable[..., ComputeResource]

FILLS = """
import os, pathlib, time

def fill(place):
    with open(place, "ab", buffering=0) as file:
        for size in (65536, 4096, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError as error:
                assert error.errno == 28, error
"""


@pytest.fixture
def small_base(site: Site, tmp_path: Path) -> Iterator[str]:
    """A base directory on a small file system that the edge node and the compute nodes share."""
    base = f"{site.base}/small"
    site.sh('mkdir -p "$1"', base)
    with small_disk(tmp_path / "shared", "4m") as disk, ExitStack() as mounted:
        os.chown(disk, *(int(site.sh(f"id -{letter}")) for letter in "ug"))
        disk.chmod(0o700)
        for service in ("edge", *NODES):
            mounted.enter_context(shown(site.stack, service, disk, base))
        yield base
        assert wait_until(lambda: not site.jobs(), 60)


def test_the_shared_file_system_is_full(mode: str, make: Make, script: Any, small_base: str, site: Site) -> None:
    """Space for the end is set aside, a lost message is a failure that says so, and so is a run that cannot begin."""
    idle = {"session": {"idle_timeout": 5}} if mode == "slurm-session" else {}
    compute = make(slurm={"remote_base": small_base}, **idle)
    filled = f"{small_base}/data/filled"
    fills = FILLS + f"fill({filled!r})\n"

    ends = script(fills + "print('x' * 50000)\nraise SystemExit(3)\n", "ends.py")
    failure = run_asset(compute, ends, uses_pipes=False).failure
    assert failure.kind == "payload" and failure.metadata["Exit code"].value == 3, failure.description
    site.sh('rm "$1"', filled)

    succeeds = script(fills + "print('x' * 50000)\n", "succeeds.py")
    ran = run_asset(compute, succeeds, uses_pipes=False)
    assert ran.metadata["Output not recorded (characters)"] > 0
    site.sh('rm "$1"', filled)

    body = f"{fills}\nfor number in range(200):\n    pipes.report_custom_message('x' * 1000)\n"
    failure = run_asset(compute, script(pipes_script(body), "reports.py")).failure
    assert failure.kind == "record" and "No space left" in (failure.description or ""), failure.description

    failure = run_asset(compute, script("pass", "late.py"), uses_pipes=False).failure
    assert failure.kind in ("configuration", "record", "submission", "runtime"), (failure.kind, failure.description)
    assert "No space left" in (failure.description or ""), failure.description
    site.sh('rm "$1"', filled)

    assert run_asset(compute, script("pass", "again.py"), uses_pipes=False).result.success


@contextmanager
def small_tmp(site: Site, tmp_path: Path, size: str, full: bool) -> Iterator[None]:
    """Mounts a small /tmp on each compute node, full if asked for."""
    with ExitStack() as mounted:
        for node in NODES:
            disk = mounted.enter_context(small_disk(tmp_path / node, size))
            disk.chmod(0o1777)
            if full:
                _fill(disk)
            mounted.enter_context(shown(site.stack, node, disk, "/tmp"))
        yield
        assert wait_until(lambda: not site.jobs(), 60)


def _fill(disk: Path) -> None:
    with open(disk / "filled", "wb", buffering=0) as file:
        for size in (65536, 4096):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue


USES_RAY = """
import ray
ray.init()
@ray.remote
def add(a, b):
    return a + b
pipes.report_asset_materialization(metadata={"sum": ray.get(add.remote(1, 2))})
"""


def test_the_tmp_of_the_nodes_is_full(mode: str, make: Make, script: Any, site: Site, tmp_path: Path) -> None:
    """Where a node's /tmp is full before the start, its runtime and Ray are elsewhere on that node."""
    idle = {"session": {"idle_timeout": 1}} if mode == "slurm-session" else {}
    with small_tmp(site, tmp_path, "64k", full=True):
        compute = make(queue={"mem": "2500M"}, default_launcher=small_ray(startup_timeout=60), **idle)
        ran = run_asset(compute, script(pipes_script(USES_RAY)))
        assert ran.metadata["sum"] == 3


def test_the_tmp_of_the_nodes_fills_up(mode: str, make: Make, script: Any, site: Site, tmp_path: Path) -> None:
    """If the /tmp of a node fills up during a payload, the error has its exit code, or says that the full disk ended Ray."""
    idle = {"session": {"idle_timeout": 1}} if mode == "slurm-session" else {}
    with small_tmp(site, tmp_path, "96m", full=False):
        compute = make(queue={"mem": "2500M"}, default_launcher=small_ray(startup_timeout=60), **idle)
        payload = f"{FILLS}\nimport ray\nray.init()\nfill('/tmp/filled')\nprint('filled')\nraise SystemExit(4)\n"
        failure = run_asset(compute, script(payload), uses_pipes=False).failure
        if failure.kind == "cluster-lost":
            assert "is full" in str(failure.description)
        else:
            assert failure.kind == "payload" and failure.metadata["Exit code"].value == 4, failure.description
        assert "filled" in str(failure.metadata["Last output"].value)


def test_the_disk_of_the_dagster_host_is_full(mode: str, make: Make, script: Any, tmp_path: Path) -> None:
    """Outputs that the Dagster host has no space for are a failure that names its disk, once the payload has ended."""
    del mode
    with small_disk(tmp_path / "here", "64k") as disk:
        compute = make(local_base=str(disk))
        payload = script("import os; open('big.bin', 'wb').write(os.urandom(300000))")
        failure = run_asset(compute, payload, uses_pipes=False, outputs=["*.bin"]).failure
        sentence = failure.description or ""
        assert "No space left" in sentence and str(disk) in sentence, (failure.kind, sentence)
        assert not list(disk.rglob("*.tmp"))
