"""The recipes in docs/how-to/ run in local mode, and do what their pages say."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from dagster_rayslurm import BashLauncher, ComputeResource

from ..conftest import pipes_script, wait_until
from ..fake_slurm import FakeSlurm

PAGES = Path(__file__).parents[2] / "docs" / "how-to"


def snippets(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (PAGES / page).read_text(), re.DOTALL)


(SEVERAL, CHOSEN), (RETRIES,) = snippets("clusters.md"), snippets("retry.md")
(POOLS,), (TRAINED, CHECKS) = snippets("pools.md"), snippets("checks.md")
AWAITED, _, SUBMITTED = snippets("long-jobs.md")
REPORT = pipes_script("pipes.report_asset_materialization(metadata={'where': __import__('os').environ['RAYSLURM_DATA_DIR']})\n")
CHECK = "pipes.report_asset_check('{}', {}, asset_key='model')\n"


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dg.Definitions]:
    """A function that returns the definitions of a recipe, whose resources have files of their own and start no Ray."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAYSLURM_MODE", "local")

    def load(snippet: str, **payloads: str) -> dg.Definitions:
        for payload, text in payloads.items():
            (tmp_path / f"{payload}.py").write_text(text)
        here: dict[str, Any] = {"__name__": "recipe"}
        exec(compile(snippet, "recipe.py", "exec"), here)
        defs: dg.Definitions = here["defs"]
        resources = {}
        for key, resource in (defs.resources or {}).items():
            own = {"local_base": str(tmp_path / key), "default_launcher": BashLauncher()}
            given = {each: getattr(resource, each) for each in resource.model_fields_set}
            resources[key] = ComputeResource(**{**given, **own})
        return dg.Definitions(assets=defs.assets, asset_checks=defs.asset_checks, resources=resources)

    return load


def run(defs: dg.Definitions, **arguments: Any) -> dg.ExecuteInProcessResult:
    return defs.resolve_implicit_global_asset_job_def().execute_in_process(raise_on_error=False, **arguments)


def where(result: dg.ExecuteInProcessResult, asset: str) -> str:
    return str(result.asset_materializations_for_node(asset)[0].metadata["where"].value)


def test_several_clusters(recipe: Callable[..., dg.Definitions], tmp_path: Path) -> None:
    result = run(recipe(SEVERAL, features=REPORT, train=REPORT))
    assert where(result, "features") == str(tmp_path / "cpu_cluster" / "data")
    assert where(result, "model") == str(tmp_path / "gpu_cluster" / "data")


def test_a_partition_that_is_chosen(recipe: Callable[..., dg.Definitions]) -> None:
    """Local mode has no partitions; tests/unit/test_partition_choice.py and the stack's tests have."""
    assert run(recipe(CHOSEN, features=REPORT)).success


def test_retries_by_kind(recipe: Callable[..., dg.Definitions], tmp_path: Path) -> None:
    """A payload that fails is not retried: its kind is not named. tests/unit/test_retry_policy.py has the other kinds."""
    defs = recipe(RETRIES, train=f"open({str(tmp_path / 'count')!r}, 'a').write('x')\nraise SystemExit(3)\n")
    assert next(iter(defs.assets or ())).op.retry_policy.max_retries == 3
    assert not run(defs).success
    assert (tmp_path / "count").read_text() == "x"


def test_a_pool(recipe: Callable[..., dg.Definitions]) -> None:
    """Without a place in the pool, a step waits for one; with one, it runs."""
    defs = recipe(POOLS, features=REPORT)
    with dg.instance_for_test() as instance:
        instance.event_log_storage.set_concurrency_slots("cluster", 1)
        claims: list[int] = []
        hooked = instance.event_log_storage.claim_concurrency_slot

        def claim(key: str, *arguments: Any, **more: Any) -> Any:
            claims.append(key == "cluster")
            return hooked(key, *arguments, **more)

        instance.event_log_storage.claim_concurrency_slot = claim
        assert run(defs, partition_key="north", instance=instance).success
        assert claims == [True]


@pytest.mark.parametrize("passed", [True, False])
def test_asset_checks(recipe: Callable[..., dg.Definitions], passed: bool) -> None:
    result = run(recipe(CHECKS, train_and_check=TRAINED, check=pipes_script(CHECK.format("good_enough", passed))))
    assert {each.check_name: each.passed for each in result.get_asset_check_evaluations()} == {
        "converged": True,
        "good_enough": passed,
    }
    assert result.success == passed  # A blocking check that does not pass fails its step.


def test_awaited_payloads(recipe: Callable[..., dg.Definitions]) -> None:
    """tests/faults_without_slurm/test_run_async.py has the executor of the page."""
    result = run(recipe(AWAITED, score=pipes_script("pipes.report_custom_message(__import__('sys').argv[1])\n")))
    assert result.asset_materializations_for_node("scores")[0].metadata["reported"].value == ["north", "south"]


def test_a_submitted_run(fake_slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job submits, the sensor requests a run at the end of the Slurm job, and that run fetches what the payload made."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "train.py").write_text(f"{REPORT}open('model.txt', 'w').close()\n")
    here: dict[str, Any] = {"__name__": "recipe", "BashLauncher": BashLauncher}
    own = f"ComputeResource(default_launcher=BashLauncher(), local_base={str(tmp_path / 'here')!r}, "
    exec(compile(SUBMITTED.replace("ComputeResource(mode", f"{own}mode"), "recipe.py", "exec"), here)
    defs: dg.Definitions = here["defs"]
    for _ in range(2):
        assert defs.resolve_job_def("submission").execute_in_process().success
    assert wait_until(lambda: [fake_slurm.state(job) for job in fake_slurm.jobs()] == ["COMPLETED"])
    with dg.DagsterInstance.ephemeral() as instance:
        with dg.build_sensor_context(instance=instance) as context:
            [request] = here["defs"].sensors[0](context).run_requests
        result = dg.materialize([here["model"]], resources={"compute": here["compute"]}, tags=request.tags, instance=instance)
    assert result.success and result.asset_materializations_for_node("model")
    assert len(list((tmp_path / "here" / "outputs").rglob("model.txt"))) == 1
