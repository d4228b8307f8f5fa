"""`rayslurm migrate-check` on files that use dagster-slurm."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dagster_rayslurm.cli import main

# The calls of the page "Ray on Slurm" of dagster-slurm.
DEFINITIONS = """
import dagster as dg
from dagster_slurm import (
    ComputeResource,
    ExecutionMode,
    RayLauncher,
    SlurmQueueConfig,
    SlurmResource,
    SSHConnectionResource,
)

ssh = SSHConnectionResource.from_env(prefix="SLURM_EDGE_NODE_")
slurm = SlurmResource(ssh=ssh, queue=SlurmQueueConfig(partition="compute", qos="normal", time_limit="01:00:00"))
compute = ComputeResource(
    mode=ExecutionMode.SLURM_SESSION,
    slurm=slurm,
    default_launcher=RayLauncher(num_cpus_per_node=32, num_gpus_per_node=4, ray_version="2.9.3"),
    enable_cluster_reuse=True,
)
"""
ASSET = """
from dagster_slurm import ComputeResource, RayLauncher

def train_model(context):
    ray_launcher = RayLauncher(num_cpus_per_node=16, num_gpus_per_node=2, working_dir="ray_jobs/train_model")
    completed = context.resources.compute.run(
        context=context,
        payload_path="python -m train.entrypoint",
        launcher=ray_launcher,
        extra_env={"WANDB_MODE": "offline"},
        extras={"experiment": context.run.run_id},
    )
    yield from completed.get_results()
"""


def check(*arguments: object) -> Any:
    return CliRunner().invoke(main, ["migrate-check", *map(str, arguments)])


@pytest.fixture
def found(tmp_path: Path) -> Any:
    """A function that checks a text, and returns the lines, what stands there and the advice."""

    def rows(text: str) -> list[tuple[int, str, str]]:
        (path := tmp_path / "assets.py").write_text(text)
        said = check(path, "--json")
        parsed = [json.loads(line) for line in said.stdout.splitlines()]
        assert said.exit_code == bool(parsed) and {row["file"] for row in parsed} <= {str(path)}
        return [(row["line"], row["found"], row["advice"]) for row in parsed]

    return rows


@pytest.mark.parametrize(("text", "line"), [(DEFINITIONS, 3), (ASSET, 2)])
def test_of_the_samples_only_the_import_changes(text: str, line: int, found: Any) -> None:
    ((where, _, advice),) = found(text)
    assert where == line and advice.startswith("from dagster_rayslurm import ComputeResource, ") and "RayLauncher" in advice
    assert found(text.replace("dagster_slurm", "dagster_rayslurm")) == []


HEAD = "import dagster_slurm as ds\nfrom dagster_slurm import ComputeResource, SlurmResource, SlurmSessionResource as Warm\n"


@pytest.mark.parametrize(
    ("text", "name", "advice"),
    [
        ("ds.SparkLauncher()", "SparkLauncher", "has no name 'SparkLauncher'; write a Launcher whose command is spark-submit"),
        (
            "ds.SlurmAllocationScope.RUN",
            "SlurmAllocationScope",
            'use mode="slurm-session" with session=SessionConfig(scope="run")',
        ),
        ("ds.ExecutionMode.SPARK", "ExecutionMode.SPARK", "modes are LOCAL, SLURM, SLURM_HETJOB, SLURM_SESSION"),
        ("Warm(max_concurrent_jobs=1)", "max_concurrent_jobs=", "use max_concurrent_payloads"),
        ("ComputeResource(pack_on_remote=True)", "pack_on_remote=", "use environment=UvEnvironment(…) or PackedEnvironment(…)"),
        ("ds.SlurmQueueConfig(cpus=2)", "cpus=", "SlurmQueueConfig has no field 'cpus'; use cpus_per_node"),
        ("ds.RayLauncher(**fields)", "RayLauncher with **", "compare the keys with"),
        ("SlurmResource.from_env()", ".from_env()", "use ssh=SSHConnectionResource.from_env()"),
        ("compute.run_hetjob(context, assets)", ".run_hetjob()", "components=[HetComponent(…)]"),
        ("compute.run(context=c, payload_path=p, poll_timeout=9)", "poll_timeout=", "use ComputeResource(queue_timeout=…)"),
        ("compute.run(payload_path=p, slurm_metrics=m)", "slurm_metrics=", "each run has such figures as metadata"),
        ("compute.run(payload_path=p, extra_slurm_opts={'nodes': 2, 'mem': '1G'})", "'nodes'", "use num_nodes"),
        ("metadata = {'slurm_extra_files': []}", "'slurm_extra_files'", "give run() the argument extra_files="),
    ],
)
def test_what_has_another_name_or_none(text: str, name: str, advice: str, found: Any) -> None:
    assert [(line, each) for line, each, said in found(HEAD + text) if advice in said] == [(3, name)]


def test_an_import_inside_a_function_counts_before_it_is_used(found: Any) -> None:
    rows = found("def compute():\n    if here:\n        import dagster_slurm as ds\n    return ds.SlurmQueueConfig(nodes=1)\n")
    assert [row[:2] for row in rows] == [(3, "import dagster_slurm"), (4, "nodes=")]


def test_a_file_whose_resource_is_made_elsewhere_is_checked(found: Any) -> None:
    rows = found(
        "def a(context, compute):\n    compute.run(context=context, payload_path='a.py', config=1)\n    compute.run_hetjob()\n"
    )
    assert [row[:2] for row in rows] == [(2, "config="), (3, ".run_hetjob()")]


def test_other_files_have_nothing_to_change(tmp_path: Path, found: Any) -> None:
    assert found("from dagster import asset\nfrom .dagster_slurm import x\nsubprocess.run(args, env={})\nx.from_env()\n") == []
    answer = check(tmp_path)
    assert answer.exit_code == 0 and answer.stderr == "0 to change, 0 names are the same\n"


def test_files_below_a_directory_are_read_and_never_imported(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "a.py").write_text("import dagster_slurm\nopen('ran', 'w')\n")
    (tmp_path / "b.txt").write_text("import dagster_slurm\n")
    answer = check(tmp_path)
    assert answer.stdout == f"{tmp_path}/below/a.py:1: import dagster_slurm → import dagster_rayslurm\n"
    assert answer.exit_code == 1 and not Path("ran").exists()


@pytest.mark.parametrize("content", [b"def (:\n", b"\xff\xfe\x00", b"x = '\0'\n", None])
def test_a_file_that_cannot_be_read_is_named_and_the_others_are_checked(tmp_path: Path, content: bytes | None) -> None:
    bad, good = tmp_path / "bad.py", tmp_path / "good.py"
    good.write_text("import dagster_slurm\n")
    if content is not None:
        bad.write_bytes(content)
    answer = check(bad, good)
    assert answer.exit_code == 2 and f"Error: {bad} cannot be read: " in answer.stderr and f"{good}:1: " in answer.stdout
