"""The example study, made for real, and the demo as a newcomer runs it."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import dagster as dg
import pytest

from ..conftest import marked_processes, wait_until
from ..stack.access import Stack

ROOT = Path(__file__).parents[2]
PAYLOADS = sorted((ROOT / "example_project" / "payloads").glob("*.py"))

pytestmark = pytest.mark.timeout(400)


def demo(tmp_path: Path, *assets: str) -> subprocess.CompletedProcess[str]:
    """The demo in local mode, with its Dagster home and base directory below `tmp_path`; it succeeds and leaves no process."""
    env = {**os.environ, "DAGSTER_HOME": str(tmp_path / "home"), "RAYSLURM_BASE": str(tmp_path / "base"), "COLUMNS": "160"}
    env.pop("RAYSLURM_MODE", None)
    command = [sys.executable, "-m", "example_project.demo", *assets]
    said = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=390)
    assert said.returncode == 0, said.stdout + said.stderr
    assert said.stderr == "" and "Done in" in said.stdout
    assert not marked_processes(os.environ["PYTEST_OF_RAYSLURM"])  # Not even the warm cluster is left.
    return said


@pytest.mark.ray
def test_the_demo_materializes_the_first_assets(tmp_path: Path) -> None:
    """A plain step and a Ray step, whose warm cluster the demo ends."""
    said = demo(tmp_path, "digits_raw", "digits_features")
    assert "1797 images" in said.stdout and "71 features" in said.stdout and "digit_classifier" not in said.stdout


@pytest.mark.ray
@pytest.mark.thorough
def test_the_demo_materializes_the_whole_study(tmp_path: Path) -> None:
    said = demo(tmp_path)
    assert "trial 16/16" in said.stdout and "accuracy_above_floor passed" in said.stdout
    pictures = [Path(line) for line in said.stdout.splitlines() if line.endswith(".png")]
    assert {"confusion_matrix.png", "learning_curve.png", "prototype_7.png"} <= {path.name for path in pictures}
    assert all(path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size < 60_000 for path in pictures)

    with dg.DagsterInstance.from_config(str(tmp_path / "home")) as instance:  # What `dagster dev` would show.
        assert {run.status for run in instance.get_runs()} == {dg.DagsterRunStatus.SUCCESS} and len(instance.get_runs()) == 11
        metadata = {}
        for name in ("digit_classifier", "digits_features", "digit_predictions", "digit_network", "report", "model_sweep"):
            event = instance.get_latest_materialization_event(dg.AssetKey(name))
            if event is not None and event.asset_materialization is not None:
                metadata[name] = event.asset_materialization.metadata
        assert metadata["digit_classifier"]["accuracy"].value > 0.95
        assert "data:image/png;base64," in str(metadata["report"]["confusion matrix"].value)
        # One warm cluster served every Ray step.
        ray_steps = [metadata[name]["Ray cluster ID"].value for name in ("digits_features", "model_sweep", "digit_predictions")]
        assert len(set(ray_steps)) == 1
        # The networks had two components, with GPUs that this machine need not have.
        network = metadata["digit_network"]
        assert network["accuracy"].value > 0.9
        assert "gpu: " in str(network["networks"].value) and "cpu: " in str(network["images made"].value)
        assert sorted(record.data["component"] for record in network["Nodes"].records) == ["cpu", "gpu"]
        partitions = instance.get_materialized_partitions(dg.AssetKey("digit_prototypes"))
        assert partitions == {str(digit) for digit in range(10)}


@pytest.mark.parametrize("mode", ["slurm", pytest.param("slurm-hetjob", marks=pytest.mark.thorough)])
def test_the_demo_says_what_failed(mode: str, tmp_path: Path) -> None:
    """A host that is not there: one sentence, exit code 1."""
    env = {**os.environ, "DAGSTER_HOME": str(tmp_path), "RAYSLURM_BASE": str(tmp_path / "base"), "RAYSLURM_MODE": mode}
    env.update(SLURM_EDGE_NODE_HOST="nowhere.invalid", RAYSLURM_ENV_PATH="/opt/ray")
    command = [sys.executable, "-m", "example_project.demo"]
    said = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert said.returncode == 1 and "digits_raw failed: the run cannot be started: " in said.stdout, said.stdout
    assert "nowhere.invalid" in said.stdout


def test_the_assets_on_slurm(tmp_path: Path, stack: Stack) -> None:
    """The same assets: one without Ray and one with it, each in a job of its own, and the one that has components.

    Their environment is the one that `make deploy` has made.
    """
    env = {**os.environ, **stack.env, "DAGSTER_HOME": str(tmp_path), "RAYSLURM_BASE": str(tmp_path / "base")}
    del env["RAYSLURM_ENV_PATH"]
    deploy = [str(Path(sys.executable).with_name("rayslurm")), "env", "--from", "example_project.definitions:compute", "push"]
    said = subprocess.run(deploy, cwd=ROOT, env={**env, "RAYSLURM_MODE": "slurm"}, capture_output=True, text=True, timeout=390)
    assert said.returncode == 0 and "/prefixes/" in said.stdout, said.stdout + said.stderr
    env.update(RAYSLURM_MODE="slurm", DAGSTER_DISABLE_TELEMETRY="yes")
    chosen = "digits_raw,digits_features,digit_network"
    command = [sys.executable, "-m", "dagster", "asset", "materialize", "-m", "example_project.definitions", "--select", chosen]
    said = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=390)
    assert said.returncode == 0, said.stdout + said.stderr
    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        jobs = set()
        for name in chosen.split(","):
            event = instance.get_latest_materialization_event(dg.AssetKey(name))
            assert event is not None and event.asset_materialization is not None
            jobs.add(event.asset_materialization.metadata["Slurm job ID"].value)
        assert len(jobs) == 3
        networks_had_a_job(instance)


@pytest.mark.thorough
def test_the_demo_on_slurm(tmp_path: Path, stack: Stack) -> None:
    """The same assets, each in a job of its own."""
    env = {**os.environ, **stack.env, "DAGSTER_HOME": str(tmp_path / "home"), "RAYSLURM_BASE": str(tmp_path / "base")}
    env.update(RAYSLURM_MODE="slurm", COLUMNS="160")
    command = [sys.executable, "-m", "example_project.demo"]
    said = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=390)
    assert said.returncode == 0, said.stdout + said.stderr
    assert "submitted Slurm job" in said.stdout and "accuracy_above_floor passed" in said.stdout
    pictures = [Path(line) for line in said.stdout.splitlines() if line.endswith(".png")]
    assert {"confusion_matrix.png", "learning_curve.png", "prototype_7.png"} <= {path.name for path in pictures}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)
    assert wait_until(lambda: not stack.exec("edge", ["squeue", "--noheader", "--name=rayslurm-report", "--user=dev"]))
    with dg.DagsterInstance.from_config(str(tmp_path / "home")) as instance:
        networks_had_a_job(instance)


def networks_had_a_job(instance: dg.DagsterInstance) -> None:
    """One heterogeneous job, and each network a GPU of its own."""
    event = instance.get_latest_materialization_event(dg.AssetKey("digit_network"))
    assert event is not None and event.asset_materialization is not None
    network = event.asset_materialization.metadata
    assert network["Execution mode"].value == "slurm-hetjob"
    assert [record.data["component"] for record in network["Components"].records] == ["cpu", "gpu"]
    assert sorted(re.findall(r"\| gpu: (g\d) \| (\d) \|", str(network["networks"].value))) == [("g1", "0"), ("g1", "1")]
    assert re.search(r"\| cpu: c\d \|", str(network["images made"].value))


@pytest.mark.thorough
def test_the_demo_in_a_session(tmp_path: Path, stack: Stack) -> None:
    """The same assets in one warm allocation, which the demo ends."""
    env = {**os.environ, **stack.env, "DAGSTER_HOME": str(tmp_path / "home"), "RAYSLURM_BASE": str(tmp_path / "base")}
    env.update(RAYSLURM_MODE="slurm-session", COLUMNS="160")
    command = [sys.executable, "-m", "example_project.demo"]
    said = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=390)
    assert said.returncode == 0, said.stdout + said.stderr
    # The session's, and the heterogeneous one of the networks.
    assert said.stdout.count("submitted Slurm job") == 2 and "accuracy_above_floor passed" in said.stdout
    pictures = [Path(line) for line in said.stdout.splitlines() if line.endswith(".png")]
    assert {"confusion_matrix.png", "learning_curve.png", "prototype_7.png"} <= {path.name for path in pictures}
    assert not stack.exec("edge", ["squeue", "--noheader", "--user=dev", "--format=%j"]).count("rayslurm-session-demo-")

    with dg.DagsterInstance.from_config(str(tmp_path / "home")) as instance:
        made = [instance.get_latest_materialization_event(dg.AssetKey(name)) for name in ("digits_raw", "model_sweep", "report")]
        jobs = {
            event.asset_materialization.metadata["Slurm job ID"].value for event in made if event and event.asset_materialization
        }
        assert len(jobs) == 1
        networks_had_a_job(instance)


@pytest.mark.ray
def test_ctrl_c_ends_the_demo_and_all_it_started(tmp_path: Path) -> None:
    env = {**os.environ, "DAGSTER_HOME": str(tmp_path / "home"), "RAYSLURM_BASE": str(tmp_path / "base")}
    env.pop("RAYSLURM_MODE", None)
    command = [sys.executable, "-m", "example_project.demo"]
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, start_new_session=True, text=True)
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if "digits_features: running" in line:
            break
    assert "1797 images" in said, said  # The first asset is made.
    os.killpg(process.pid, 2)
    rest = process.stdout.read()
    assert process.wait(60) == 130 and "nothing is left running" in rest
    assert wait_until(lambda: not marked_processes(os.environ["PYTEST_OF_RAYSLURM"]))


def test_definitions_load_without_ray() -> None:
    code = "import example_project.definitions, sys; print([m for m in ('ray', 'sklearn', 'paramiko') if m in sys.modules])"
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"


@pytest.mark.parametrize("payload", PAYLOADS, ids=lambda path: path.name)
def test_payloads_are_plain_user_code(payload: Path) -> None:
    imported = set()
    for node in ast.walk(ast.parse(payload.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").partition(".")[0])
    assert imported.isdisjoint({"dagster", "dagster_rayslurm", "example_project"})
    assert not re.search(r"RAY_ADDRESS|\bSLURM_", payload.read_text())
