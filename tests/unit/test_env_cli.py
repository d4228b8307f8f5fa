"""`rayslurm env`, for a cluster that is this machine."""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dagster_rayslurm.cli import main

from .sending import Cluster, says, wheel

DEFINITIONS = """
import dagster as dg
from dagster_rayslurm import *
other = 1
compute = ComputeResource(
    slurm=SlurmResource(remote_base={base!r}), environment=UvEnvironment(project={project!r}{more}), auto_detect_platform=False,
    default_launcher=BashLauncher(),
)
prepared = ComputeResource(slurm=SlurmResource(remote_base={base!r}), pre_deployed_env_path="/opt/x")
inside = ComputeResource(
    slurm=SlurmResource(remote_base={base!r}), environment=ContainerEnvironment(image="/no.sif", runtime="apptainer")
)
defs = dg.Definitions(resources={{"in_definitions": compute}})
"""

Invoke = Callable[..., Any]


@pytest.fixture
def invoke(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Calls the command for a resource of a module in the current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    wheel(cluster.index, "dagster_pipes")
    cluster.lock("dagster_pipes")

    def call(*words: str, resource: str = "compute", more: str = "") -> Any:
        name = f"study_{time.monotonic_ns()}"
        texts = {"base": str(cluster.base), "project": str(cluster.project), "more": more}
        (tmp_path / f"{name}.py").write_text(DEFINITIONS.format(**texts))
        return CliRunner().invoke(main, ["env", "--from", f"{name}:{resource}", *words])

    return call


def test_an_environment_from_its_files_to_its_end(invoke: Invoke, cluster: Cluster) -> None:
    missing = invoke("check")
    assert missing.exit_code == 1 and "not on this machine yet; run: rayslurm env push" in missing.output
    built = invoke("build")
    assert built.exit_code == 0 and built.output.startswith("2 files, "), built.output
    assert not cluster.base.exists()
    pushed = invoke("push", resource="in_definitions")
    assert pushed.exit_code == 0, pushed.output
    *said, path = pushed.output.splitlines()
    assert said[0].startswith("environment: sending 2 of 2 files") and said[1].startswith(f"environment: made {path} in ")
    assert says(path, "import dagster_pipes; print(dagster_pipes.version)") == "1.0"
    assert invoke("push").output.splitlines() == [path]
    checked = invoke("check")
    assert checked.exit_code == 0 and f"path: {path}\nPython: {sys.version.split()[0]}, {path}/bin/python" in checked.output
    assert "Ray: none\nDagster Pipes: 1.0\n" in checked.output
    (row,) = map(json.loads, invoke("list", "--json").output.splitlines())
    assert (row["path"], row["title"]) == (path, f"uv project={cluster.project}") and row["bytes"] > 1000
    assert os.path.basename(path)[:6] in invoke("list").output

    assert invoke("prune", "--days", "0").output == "0 removed\n"  # It was in use a moment ago.
    for each in (os.path.realpath(path), *map(str, cluster.base.glob("files/*")), *map(str, cluster.base.glob("files/*/*"))):
        os.utime(each, (1, 1))
    pruned = invoke("prune", "--days", "0")
    assert pruned.output.splitlines()[-1] == "4 removed", pruned.output
    assert not list(cluster.base.glob("files/*")) and not list(cluster.base.glob("prefixes/[0-9a-f]*"))


def test_imports_are_tried(invoke: Invoke) -> None:
    assert invoke("push").exit_code == 0
    assert invoke("check", more=", imports=['dagster_pipes', 'json']").exit_code == 0
    failed = invoke("check", more=", imports=['json', 'torch.nn']")
    assert failed.exit_code == 1
    assert "lacks what its `imports` list: ModuleNotFoundError: No module named 'torch'; add it, or take it off" in failed.output


def test_a_container_needs_nothing_of_this_machine(invoke: Invoke, cluster: Cluster) -> None:
    assert (
        invoke("build", resource="inside").output
        == "ContainerEnvironment needs nothing that is fetched or built on this machine\n"
    )
    missing = invoke("check", resource="inside")
    assert missing.exit_code == 1 and "it is not on this machine yet; run: rayslurm env push" in missing.output
    pushed = invoke("push", resource="inside")
    assert pushed.exit_code == 0 and Path(pushed.output.splitlines()[-1], "bin/python").is_file()
    absent = invoke("check", resource="inside")
    assert absent.exit_code == 1 and "there is no program apptainer on " in absent.output


@pytest.mark.parametrize(
    ("words", "resource", "problem"),
    [
        (["push"], "prepared", "PreDeployedEnvironment, which is not sent; give it a UvEnvironment"),
        (["push"], "other", "int is neither a ComputeResource nor Definitions"),
        (["list"], "nothing", "there is no resource 'nothing'; there are 'in_definitions'"),
        (["check"], "prepared", "there is no directory /opt/x"),
    ],
)
def test_what_it_cannot_do(invoke: Invoke, words: list[str], resource: str, problem: str) -> None:
    failed = invoke(*words, resource=resource)
    assert failed.exit_code == 1 and problem in failed.output and failed.output.count("\n") == 1, failed.output


def test_a_module_that_is_not_there() -> None:
    failed = CliRunner().invoke(main, ["env", "--from", "nowhere.at_all:compute", "list"])
    assert (
        failed.exit_code == 1
        and "nowhere.at_all cannot be imported: ModuleNotFoundError: No module named 'nowhere'" in failed.output
    )
