"""Environments that each node of a job copies to its own disk, on the fake Slurm. Every test checks that no copy is left."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dagster_rayslurm import (
    BashLauncher,
    ComputeResource,
    SessionConfig,
    SlurmQueueConfig,
    SlurmResource,
    UvEnvironment,
)
from dagster_rayslurm.environments import SentEnvironment

from ..conftest import run_asset, small_disk, wait_until
from ..fake_slurm import FakeSlurm
from .sending import Cluster, wheel

pytest.importorskip("uv")

PAYLOAD = """
import json, os, shutil, sys, left
found = [sys.prefix, left.__file__, shutil.which("python"), sys.executable, os.environ.get("NATIVE_DATA")]
open({said!r}, "w").write(json.dumps(found))
sys.exit({code})
"""


class Run:
    """A resource with such an environment, and what its payload finds."""

    def __init__(
        self,
        slurm: FakeSlurm,
        cluster: Cluster,
        tmp_path: Path,
        environment: SentEnvironment,
        mode: str = "slurm",
        nodes: int = 1,
    ) -> None:
        self.said, self.base, self._slurm = tmp_path / "said", cluster.base, slurm
        self._script = tmp_path / "payload.py"
        self._compute = ComputeResource(
            mode=mode,
            slurm=SlurmResource(
                remote_base=str(cluster.base),
                poll_interval=1,
                site={"TMPDIR": os.environ["TMPDIR"]},
                queue=SlurmQueueConfig(time_limit="00:10:00"),
            ),
            session=SessionConfig(idle_timeout=60),
            default_launcher=BashLauncher(),
            environment=environment,
            local_base=str(tmp_path / "local"),
            keep_run_dirs="all",
        )

    def __call__(self, code: int = 0) -> Any:
        self._script.write_text(PAYLOAD.format(said=str(self.said), code=code))
        return run_asset(self._compute, str(self._script), uses_pipes=False)

    def wait(self) -> None:
        """Wait until the nodes have cleaned up, and their job is over."""
        assert wait_until(lambda: not self._slurm.jobs("RUNNING", "COMPLETING"))

    @property
    def found(self) -> list[str]:
        found: list[str] = json.loads(self.said.read_text())
        return found

    @property
    def shared(self) -> Path:
        (prefix,) = (path for path in self.base.glob("prefixes/*") if path.is_symlink())
        return prefix

    @property
    def log(self) -> str:
        (log,) = self.base.glob("runs/*/node-0.log")
        return log.read_text()


@pytest.fixture
def environment(cluster: Cluster) -> UvEnvironment:
    wheel(cluster.index, "left")
    return cluster.lock("left").model_copy(update={"stage": "node-local"})


@pytest.mark.parametrize("code", [0, 3])
def test_a_node_makes_its_own_copy(
    cluster: Cluster, environment: UvEnvironment, fake_slurm: FakeSlurm, tmp_path: Path, scratch_base: Path, capfd: Any, code: int
) -> None:
    run = Run(fake_slurm, cluster, tmp_path, environment)
    ran = run(code)
    run.wait()
    assert bool(ran.failures) == bool(code)
    prefix, module, python, executable, _ = run.found
    assert Path(prefix).parent.parent == scratch_base and Path(prefix).name == "environment"
    assert module.startswith(f"{prefix}/lib/") and python == executable == f"{prefix}/bin/python"
    assert "made its own copy in" in run.log
    said = [line for line in capfd.readouterr().err.splitlines() if "node-local: " in line]
    assert len(said) == 1 and " made its own copy in " in said[0] and prefix in said[0], said


def test_a_session_keeps_its_copies(cluster: Cluster, environment: UvEnvironment, fake_slurm: FakeSlurm, tmp_path: Path) -> None:
    run = Run(fake_slurm, cluster, tmp_path, environment, "slurm-session")
    assert not run().failures
    first = run.found[0]
    assert not run().failures
    assert run.found[0] == first and first != str(run.shared)
    for job in fake_slurm.jobs("RUNNING"):
        subprocess.run(["scancel", str(job)], check=True)
    run.wait()


def test_without_room_the_shared_environment_is_used(
    cluster: Cluster, environment: UvEnvironment, fake_slurm: FakeSlurm, tmp_path: Path, capfd: Any
) -> None:
    run = Run(fake_slurm, cluster, tmp_path, environment)
    assert not run().failures
    recipe = run.shared / "rayslurm.json"
    known = json.loads(recipe.read_text())
    assert known["bytes"] > os.stat(run.shared / "pyvenv.cfg").st_size
    capfd.readouterr()
    recipe.write_text(json.dumps({**known, "bytes": 2**60}))
    assert not run().failures
    assert run.found[0] == str(run.shared)
    said = [line for line in capfd.readouterr().err.splitlines() if "WARNING" in line and "not-node-local: " in line]
    assert len(said) == 1, said
    assert "uses the shared environment, as it cannot be copied: no private directory" in said[0] and "GiB are free" in said[0]
    run.wait()


def test_a_disk_that_fills_up(
    cluster: Cluster, environment: UvEnvironment, fake_slurm: FakeSlurm, tmp_path: Path, monkeypatch: Any, capfd: Any
) -> None:
    assert not Run(fake_slurm, cluster, tmp_path, environment)().failures
    with small_disk(tmp_path / "s", "1m") as disk:
        monkeypatch.setenv("TMPDIR", str(disk))
        run = Run(fake_slurm, cluster, tmp_path, environment)
        recipe = run.shared / "rayslurm.json"
        known = json.loads(recipe.read_text())
        fill = ["sh", "-c", 'head -c 2000000 /dev/zero >"$1/large"', "sh", "{prefix}"]
        recipe.write_text(json.dumps({**known, "bytes": 1, "node_local": [*known["node_local"], fill]}))
        assert not run().failures
        assert run.found[0] == str(run.shared)
        said = capfd.readouterr().err
        assert "as it cannot be copied: " in said and "No space left on device" in said
        assert wait_until(lambda: not list(disk.iterdir()))


ENTER = """
import os, sys
from dagster_rayslurm.runtime.node import local_copy
sys.executable = sys.argv[1]
local_copy.enter([])
print(local_copy.remark)
"""


def test_a_job_that_is_cancelled_while_it_copies(tmp_path: Path, scratch_base: Path) -> None:
    commands = [["sh", "-c", 'sleep 60 & touch "$1/half"; wait', "sh", "{prefix}"]]
    (tmp_path / "rayslurm.json").write_text(json.dumps({"node_local": commands, "bytes": 1}))
    process = subprocess.Popen([sys.executable, "-c", ENTER, str(tmp_path / "bin/python")])
    assert wait_until(lambda: list(scratch_base.glob("rs-*/environment/half")))
    process.terminate()
    assert process.wait(30) == 128 + 15
    assert not list(scratch_base.glob("rs-*"))
