"""What to do is said with the exceptions that everybody meets once."""

import pytest

from dagster_rayslurm.follow import Evidence
from dagster_rayslurm.outcome.verdict import Verdict, with_hint


def hint(said: str) -> str:
    evidence = Evidence(end={"context": {"python": "/opt/ray/bin/python", "python_version": "3.8.18"}})
    return with_hint(Verdict("payload", said), evidence).sentence.removeprefix(said)


@pytest.mark.parametrize(
    ("said", "hinted"),
    [
        (
            "ModuleNotFoundError: No module named 'mylib.layers' (train.py:1)",
            "; install it in the environment of /opt/ray/bin/python, or name the directory that has it in the launcher's "
            "working_dir",
        ),
        (
            "ModuleNotFoundError: No module named 'lightgbm' (train.py:1)",
            "; install it in the environment of /opt/ray/bin/python, or name the directory that has it in the launcher's "
            "working_dir",
        ),
        (
            "FileNotFoundError: [Errno 2] No such file or directory: 'data.csv' (train.py:3)",
            "; a payload has a working directory of its own: name it in extra_files=, or its directory in the launcher's "
            "working_dir",
        ),
        (
            "FileNotFoundError: [Errno 2] No such file or directory: 'other.csv' (train.py:3)",
            "; a payload has a working directory of its own: name it in extra_files=, or its directory in the launcher's "
            "working_dir",
        ),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/data/x.csv' (train.py:3)", ""),
        (
            "the payload ended with exit code 2; its standard error ends with: can't open file '/r/work/train.py': [Errno 2] "
            "No such file or directory",
            "; a script is sent if it is the first word (payload_path='train.py --epochs 3') or in the launcher's working_dir",
        ),
        (
            "PermissionError: [Errno 13] Permission denied: 'results/a.csv' (train.py:3)",
            "; directories of working_dir are read-only on the cluster: write into a new directory, or below RAYSLURM_DATA_DIR",
        ),
        (
            "PermissionError: [Errno 13] Permission denied: '/b/bundles/0123456789abcdef0123456789abcdef/plots' (train.py:3)",
            "; directories of working_dir are read-only on the cluster: write into a new directory, or below RAYSLURM_DATA_DIR",
        ),
        ("PermissionError: [Errno 13] Permission denied: '/data/x.csv' (train.py:3)", ""),
        ("PermissionError: [Errno 13] Permission denied: './tool.sh' (train.py:3)", ""),
        ("PermissionError: [Errno 13] Permission denied: 'ffmpeg' (train.py:3)", ""),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'ffmpeg' (train.py:3)", ""),
        (
            "TypeError: Object of type float32 is not JSON serializable (train.py:6)",
            "; convert it with .item() or float(), an array with .tolist()",
        ),
        ("TypeError: Object of type Model is not JSON serializable (train.py:6)", ""),
        (
            "ValueError: When connecting to an existing cluster, num_cpus and num_gpus must not be provided. (train.py:5)",
            "; the cluster runs already: call ray.init() without them, and set num_cpus_per_node and num_gpus_per_node of "
            "RayLauncher",
        ),
        (
            "dagster_pipes.DagsterPipesError: Calling `report_asset_check` without passing an asset key is undefined. Current "
            "step does not target a specific asset. (check.py:3)",
            "; pass asset_key=",
        ),
        ("KeyError: 'momentum' (train.py:6)", ""),
    ],
)
def test_the_hint_fits_the_exception(said: str, hinted: str) -> None:
    assert hint("the payload raised " + said) == hinted


@pytest.mark.parametrize(
    "said", ["SyntaxError: invalid syntax (train.py:2)", "TypeError: unsupported operand type(s) for |: 'type' and 'NoneType'"]
)
def test_an_older_python_is_named(said: str) -> None:
    assert "; the payload's Python is 3.8.18, that of Dagster 3." in hint(said)
    same = with_hint(Verdict("payload", said), Evidence(end={"context": {"python_version": "99.0"}}))
    assert same.sentence == said


def test_only_a_payloads_own_failure_gets_a_hint() -> None:
    verdict = Verdict("environment", "No module named 'ray'")
    assert with_hint(verdict, Evidence()) == verdict


def test_a_module_that_a_made_environment_lacks() -> None:
    python = f"/home/ann/.dagster_rayslurm/prefixes/{32 * 'a'}/bin/python"
    sentence = with_hint(Verdict("payload", "No module named 'x'"), Evidence(end={"context": {"python": python}})).sentence
    assert "; add it to the project or the requirements from which the environment is made (`uv add`, `pixi add`), or" in sentence
