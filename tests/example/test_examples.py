"""The modules of examples/, each materialized as a user would, on this machine and on the Slurm stack."""

import importlib
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from dagster_rayslurm import RunFailure
from dagster_rayslurm.backends.base import Layout
from dagster_rayslurm.backends.sessions import local

from ..stack.access import Stack

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("[!_]*.py"))

pytestmark = pytest.mark.timeout(400)


class Example:
    """One module of examples/, and what its asset reported last."""

    def __init__(self, name: str, home: Path) -> None:
        sys.modules.pop(f"examples.{name}", None)  # The module reads its variables when it is imported.
        self.module = importlib.import_module(f"examples.{name}")
        self.home = home
        self.instance = dg.DagsterInstance.ephemeral()

    def run(self, partition: str | None = None, **config: Any) -> dict[str, Any]:
        """Materialize the asset; its metadata."""
        (asset,) = self.module.defs.resolve_asset_graph().get_all_asset_keys()
        job = self.module.defs.resolve_implicit_global_asset_job_def()
        run_config = {"ops": {asset.to_python_identifier(): {"config": config}}} if config else None
        result = job.execute_in_process(instance=self.instance, partition_key=partition, run_config=run_config)
        self.log = [(entry.timestamp, entry.user_message) for entry in self.instance.all_logs(result.run_id)]
        (materialization,) = result.get_asset_materialization_events()
        return {key: value.value for key, value in materialization.materialization.metadata.items()}


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Example]]:
    """Imports an example in local mode, with its files below `tmp_path`."""
    for name in [name for name in os.environ if name.startswith(("RAYSLURM_", "SLURM_EDGE_NODE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    yield lambda name: Example(name, tmp_path)
    for session in local.list_sessions(Layout(tmp_path / ".dagster_rayslurm")):
        local.end_session(session)


def needs_torch() -> None:
    """Skips a test without PyTorch, or fails it where all tests are to run."""
    if importlib.util.find_spec("torch") is None:
        message = 'PyTorch is not installed; pip install -e ".[examples]"'
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)


def test_every_example_is_listed_and_tested() -> None:
    page = (EXAMPLES.parent / "docs" / "examples.md").read_text()
    listed = re.findall(r"^\| \[`([a-z_]+)`\].* \| `dagster dev -m examples\.\1` \|", page, re.MULTILINE)
    assert sorted(listed) == NAMES and "| [`example_project`]" in page
    assert set(re.findall(r'\bexample\("([a-z_]+)"\)', Path(__file__).read_text())) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_an_example_loads_without_a_cluster_and_its_payload_is_guarded(name: str, example: Callable[[str], Example]) -> None:
    """No variable of Slurm is needed, and a tool that imports payloads starts nothing."""
    dg.Definitions.validate_loadable(example(name).module.defs)
    text = (EXAMPLES / f"{name}.py").read_text()
    for payload in re.findall(r'"(\w+\.py)"', text):
        assert (
            'if __name__ == "__main__":\n    with open_dagster_pipes() as pipes:' in (EXAMPLES / "payloads" / payload).read_text()
        )
    assert "payloads" in text


@pytest.mark.ray
@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_train_goes_on_from_its_last_checkpoint(example: Callable[[str], Example]) -> None:
    needs_torch()
    training = example("torch_train")
    first, second = training.run(epochs=2), training.run(epochs=4)
    assert (first["first epoch"], first["epoch"]) == (0, 1) and (second["first epoch"], second["epoch"]) == (2, 3)
    assert second["loss"] < first["loss"] and second["backend"] == "gloo" and second["workers"] == 2
    assert second["checkpoint"].startswith(str(training.home / ".dagster_rayslurm"))
    assert (Path(second["checkpoint"]) / "state.pt").exists()


@pytest.mark.ray
@pytest.mark.core
def test_tune_stops_poor_trials_and_shows_results_while_it_searches(example: Callable[[str], Example]) -> None:
    search = example("tune_asha")
    found = search.run()
    assert found["trials"] == 8 and found["stopped early"] > 0 and found["iterations"] < 8 * 9
    shown = [when for when, text in search.log if re.search(r"rate [0-9.]+ after \d iterations: loss ", text)]
    assert len(shown) == found["iterations"]
    # An iteration takes a tenth of a second, and the longest trial has nine of them.
    assert max(shown) - min(shown) > 0.5


@pytest.mark.ray
@pytest.mark.core
def test_batches_are_predicted_by_actors(example: Callable[[str], Example]) -> None:
    predicted = example("batch_inference").run()
    assert predicted["rows"] == 10_000
    assert predicted["actors"] in (1, 2)  # An actor that starts late finds nothing left to do.
    rows = range(10_000)
    assert predicted["mean prediction"] == pytest.approx(
        sum(weight * (row % part) for row in rows for weight, part in zip((1, 2, 3, 4), (2, 3, 5, 7), strict=True)) / len(rows)
    )


@pytest.mark.ray
@pytest.mark.thorough
def test_models_share_gpus(example: Callable[[str], Example]) -> None:
    shared = example("fractional_gpus").run()
    assert list(shared["models on each GPU"].values()) == [3, 3]


@pytest.mark.ray
@pytest.mark.core
def test_placement_groups_are_packed_and_spread(example: Callable[[str], Example]) -> None:
    placed = example("placement_groups").run()
    assert placed["STRICT_PACK"] == {"workers": 2, "nodes": 1} and placed["STRICT_SPREAD"] == {"workers": 2, "nodes": 2}


@pytest.mark.parametrize(("group", "size"), [("packed", 3), ("spread", 3)])
def test_a_placement_group_that_no_node_could_hold_is_refused(group: str, size: int, example: Callable[[str], Example]) -> None:
    groups = example("placement_groups")
    with pytest.raises(RunFailure, match=rf"requires: {size} bundles \(STRICT_{'PACK' if group == 'packed' else 'SPREAD'}\)"):
        groups.run(**{group: size})
    assert not list(groups.home.glob(".dagster_rayslurm/runs/*"))


def ranks_are_pinned(ranks: list[dict[str, Any]]) -> None:
    """Asserts that each of four ranks has a GPU of its own, two on each node, and that all have summed up."""
    assert [each["rank"] for each in ranks] == [0, 1, 2, 3] and {each["sum"] for each in ranks} == {0 + 1 + 2 + 3}
    nodes = [each["node"] for each in ranks]
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3]
    assert [each["local_rank"] for each in ranks] == [0, 1] * 2
    devices = [int(each["device"]) for each in ranks]
    assert devices[0] < devices[1] and devices[2] < devices[3]


@pytest.mark.ray
@pytest.mark.thorough
def test_ranks_are_pinned_to_gpus(example: Callable[[str], Example]) -> None:
    needs_torch()
    ranks_are_pinned(example("pinned_ranks").run()["ranks"])


@pytest.mark.ray
@pytest.mark.thorough
def test_tasks_get_packages_and_modules_of_their_own(example: Callable[[str], Example]) -> None:
    """Ray installs the package from the index."""
    sizes = example("runtime_env").run()
    assert sizes["sizes"] == "999 Bytes, 123.0 kB, 7.9 MB" and sizes["in the payload's own Python"] == "[]"


@pytest.mark.ray
@pytest.mark.core
def test_a_learner_and_rollouts_work_together(example: Callable[[str], Example]) -> None:
    learned = example("rollouts").run()
    assert learned["best action"] == 2 and learned["mean reward"] > 0.5
    assert (learned["players"], learned["rounds"]) == (2, 30 * 100)
    assert [record.data["component"] for record in learned["Components"].records] == ["learner", "rollouts"]


@pytest.mark.ray
@pytest.mark.thorough
def test_partitions_share_a_session(example: Callable[[str], Example]) -> None:
    months = example("session_partitions")
    first, second = months.run("2026-01"), months.run("2026-02")
    assert (first["days"], first["working days"], second["days"], second["working days"]) == (31, 22, 28, 20)
    assert first["Ray cluster ID"] == second["Ray cluster ID"] and second["Ray cluster was warm"] is True
    assert Path(first["table"]).parent == Path(second["table"]).parent and Path(second["table"]).exists()


ON_SLURM = {
    "batch_inference": {"rows": 10_000},
    "fractional_gpus": {"models on each GPU": {"0": 3, "1": 3}},
    "placement_groups": {"STRICT_PACK": {"workers": 2, "nodes": 1}, "STRICT_SPREAD": {"workers": 2, "nodes": 2}},
    "rollouts": {"best action": 2, "players": 2, "rounds": 3000},
    "runtime_env": {"sizes": "999 Bytes, 123.0 kB, 7.9 MB", "in the payload's own Python": "[]"},
    "session_partitions": {"days": 31, "working days": 22},
    "tune_asha": {"trials": 8},
}
"""What the examples report whose packages the stack's nodes have; with `runtime_env`, Ray installs one from the index."""


@pytest.mark.thorough
@pytest.mark.parametrize("name", ON_SLURM)
def test_an_example_on_slurm(name: str, example: Callable[[str], Example], stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in {**stack.env, "RAYSLURM_MODE": "slurm"}.items():
        monkeypatch.setenv(variable, value)
    on_slurm = example(name)
    found = on_slurm.run("2026-01" if name == "session_partitions" else None)
    assert {key: found[key] for key in ON_SLURM[name]} == ON_SLURM[name] and found["Execution mode"].startswith("slurm")
    if name == "session_partitions":
        again = on_slurm.run("2026-02")
        assert again["days"] == 28 and again["Ray cluster was warm"] and again["Ray cluster ID"] == found["Ray cluster ID"]
        assert on_slurm.module.compute.cleanup_cluster(found["Ray cluster ID"])


TORCH_ENVIRONMENT = """
from dagster_rayslurm import ComputeResource, SlurmResource, SSHConnectionResource, UvEnvironment

slurm = SlurmResource(ssh=SSHConnectionResource.from_env())
compute = ComputeResource(mode="slurm", slurm=slurm, environment=UvEnvironment(requirements="requirements.txt"))
"""


@pytest.fixture(scope="module")
def torch_on_slurm(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The path on the stack of an environment with the PyTorch and the Ray of this machine, made by `rayslurm env push`."""
    needs_torch()
    versions = {name: importlib.metadata.version(name) for name in ("ray", "torch")}
    directory = tmp_path_factory.mktemp("torch")
    (directory / "made.py").write_text(TORCH_ENVIRONMENT)
    (directory / "requirements.txt").write_text(
        f"ray[default,train]=={versions['ray']}\ntorch=={versions['torch']}\ndagster-pipes\nnumpy\n"
    )
    env = {**os.environ, **{name: value for name, value in stack.env.items() if name != "RAYSLURM_ENV_PATH"}}
    if "PIP_FIND_LINKS" in env:  # uv finds wheels where pip has found them.
        env.setdefault("UV_FIND_LINKS", env["PIP_FIND_LINKS"])
    command = [sys.executable, "-m", "dagster_rayslurm.cli", "env", "--from", "made:compute", "push"]
    said = subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, timeout=900)
    assert said.returncode == 0, said.stderr[-3000:]
    yield said.stdout.split()[-1]
    stack.exec("edge", ["rm", "-rf", "/home/dev/.dagster_rayslurm"])


@pytest.fixture
def torch_example(
    example: Callable[[str], Example], torch_on_slurm: str, stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Example]:
    """Imports an example for the stack, with the environment that has PyTorch."""
    for variable, value in {**stack.env, "RAYSLURM_MODE": "slurm", "RAYSLURM_ENV_PATH": torch_on_slurm}.items():
        monkeypatch.setenv(variable, value)
    return example


@pytest.mark.thorough
@pytest.mark.timeout(1500)
def test_train_spans_two_nodes_of_slurm(torch_example: Callable[[str], Example], stack: Stack) -> None:
    """Three workers do not fit on the two CPUs of one node; the checkpoint that a job leaves is where the next one begins."""
    training = torch_example("torch_train")
    first, second = training.run(epochs=2, workers=3), training.run(epochs=3, workers=3)
    assert (first["first epoch"], first["epoch"], second["first epoch"], second["epoch"]) == (0, 1, 2, 2)
    for found in (first, second):
        assert (found["nodes"], found["workers"], found["backend"]) == (2, 3, "gloo")
    stack.exec("edge", ["test", "-f", f"{second['checkpoint']}/state.pt"])


@pytest.mark.thorough
@pytest.mark.timeout(1500)
def test_ranks_are_pinned_on_two_nodes_of_slurm(torch_example: Callable[[str], Example]) -> None:
    ranks_are_pinned(torch_example("pinned_ranks").run()["ranks"])
