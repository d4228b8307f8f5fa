"""Settings in asset metadata, `op_tags`, and the tags of jobs and runs: merged field by field, and refused before submission."""

import json
import re
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from dagster_rayslurm import BashLauncher, ComputeResource, RayLauncher, SlurmQueueConfig, SlurmResource
from dagster_rayslurm.settings import KEY

from ..fake_slurm import FakeSlurm


def cluster(base: Path, launcher: Any = None, **queue: Any) -> ComputeResource:
    slurm = SlurmResource(remote_base=str(base), poll_interval=1, queue=SlurmQueueConfig(**queue))
    return ComputeResource(mode="slurm", slurm=slurm, default_launcher=launcher or BashLauncher(), local_base=str(base))


def asset_with(tags: Any = None, metadata: Any = None, **arguments: Any) -> dg.AssetsDefinition:
    """An asset with these settings, which calls `run` with these arguments."""

    @dg.asset(op_tags=None if tags is None else {KEY: tags}, metadata=None if metadata is None else {KEY: metadata})
    def features(context: dg.AssetExecutionContext, compute: ComputeResource) -> Any:
        run = compute.run(context=context, payload_path=["true"], uses_pipes=False, **arguments)
        return run.get_materialize_result()

    return features


def materialize(asset: Any, compute: ComputeResource, run: Any = None) -> tuple[dg.ExecuteInProcessResult, list[str]]:
    """The result of a run that has settings in its tags, and the lines of its log."""
    with dg.DagsterInstance.ephemeral() as instance:
        tags = None if run is None else {KEY: run if isinstance(run, str) else json.dumps(run)}
        result = dg.materialize([asset], resources={"compute": compute}, instance=instance, tags=tags, raise_on_error=False)
        return result, [record.user_message for record in instance.all_logs(result.run_id)]


def failure_of(result: dg.ExecuteInProcessResult) -> str:
    [event] = [event for event in result.all_events if event.is_step_failure]
    data: Any = event.event_specific_data
    return str(data.user_failure_data.description)


def test_run_over_asset_over_resource_field_by_field(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    compute = cluster(tmp_path / "base", BashLauncher(grace_period=3), partition="compute", mem="2G", time_limit="05:00")
    asset = asset_with(
        metadata={"queue": {"mem": "3G", "account": "study", "qos": "low"}},
        tags={"queue": {"account": "other", "cpus_per_node": 1}, "launcher": {"num_cpus": 1}},
        queue={"cpus_per_node": 2},
    )
    result, lines = materialize(asset, compute, {"queue": {"mem_per_cpu": "1G"}})
    assert result.success
    text = (fake_slurm.base / "job-1.sh").read_text()
    options = ("partition=compute", "account=other", "qos=low", "cpus-per-task=2", "mem-per-cpu=1G", "time=05:00")
    assert all(f"#SBATCH --{option}\n" in text for option in options) and "--mem=" not in text
    place = "the metadata of asset 'features'"
    assert (
        "[rayslurm] queue: mem=None, mem_per_cpu='1G' from the run's tags; cpus_per_node=2 from run(queue=…); account='other' "
        f"from op_tags; qos='low' from {place}; partition='compute', time_limit='05:00' from the resource"
    ) in lines
    assert "[rayslurm] launcher: num_cpus=1 from op_tags; grace_period=3 from default_launcher" in lines


def test_settings_may_choose_another_launcher(tmp_path: Path) -> None:
    compute = ComputeResource(local_base=str(tmp_path), default_launcher=RayLauncher(num_cpus_per_node=1))
    result, lines = materialize(asset_with({"launcher": {"kind": "bash"}}), compute, {"launcher": {"grace_period": 2}})
    assert result.success and "[rayslurm] launcher: grace_period=2 from the run's tags" in lines


def test_assets_of_one_step_must_agree(tmp_path: Path) -> None:
    def settings(**queue: Any) -> dict[str, Any]:
        return {KEY: {"queue": queue}}

    specs = [
        dg.AssetSpec("one", metadata=settings(mem="1G", qos="low")),
        dg.AssetSpec("two", metadata=settings(mem="2G", account="study"), skippable=True),
    ]

    @dg.multi_asset(specs=specs, can_subset=True)
    def both(context: dg.AssetExecutionContext, compute: ComputeResource) -> Any:
        yield from compute.run(context=context, payload_path=["true"], uses_pipes=False).get_results()

    compute = ComputeResource(local_base=str(tmp_path), default_launcher=BashLauncher())
    result, _ = materialize(both, compute)
    assert failure_of(result) == (
        f"{KEY}: queue.mem is '1G' in the metadata of asset 'one' and '2G' in the metadata of asset 'two', which one step makes; "
        "set it in op_tags instead"
    )
    assert dg.materialize([both], resources={"compute": compute}, selection=["one"]).success


def test_checks_and_ops_have_settings(tmp_path: Path) -> None:
    compute = ComputeResource(local_base=str(tmp_path), default_launcher=BashLauncher())
    metadata, tags = {KEY: {"launcher": {"num_cpus": 1}}}, {KEY: {"launcher": {"grace_period": 4}}}

    @dg.asset_check(asset="features", metadata=metadata, op_tags=tags)
    def good(context: dg.AssetCheckExecutionContext, compute: ComputeResource) -> dg.AssetCheckResult:
        compute.run(context=context, payload_path=["true"], uses_pipes=False)
        return dg.AssetCheckResult(passed=True)

    @dg.op(tags={KEY: {"launcher": {"num_cpus": 1, "grace_period": 1}}})
    def step(context: dg.OpExecutionContext, compute: ComputeResource) -> None:
        compute.run(context=context, payload_path=["true"], uses_pipes=False)

    @dg.job(tags=tags)
    def job() -> None:
        step()

    defs = dg.Definitions(asset_checks=[good], jobs=[job], resources={"compute": compute})
    place = "num_cpus=1 from the metadata of asset check 'features:good'"
    with dg.DagsterInstance.ephemeral() as instance:
        for name, line in (
            ("__ASSET_JOB", f"[rayslurm] launcher: grace_period=4 from op_tags; {place}"),
            ("job", "[rayslurm] launcher: grace_period=4 from the run's tags; num_cpus=1 from op_tags"),
        ):
            result = defs.resolve_job_def(name).execute_in_process(instance=instance)
            assert line in [record.user_message for record in instance.all_logs(result.run_id)]


BAD: list[tuple[Any, str]] = [
    ({"queu": {}}, "the value has no key 'queu'; did you mean queue?"),
    ({"queue": {"num_node": 2}}, "SlurmQueueConfig has no field 'num_node'; did you mean num_nodes?"),
    ({"queue": {"cpus": 2}}, "SlurmQueueConfig has no field 'cpus'; use cpus_per_node"),
    ({"queue": {"mem": 64}}, 'SlurmQueueConfig.mem: 64 has no unit; write "64G" for GiB or "64M" for MiB'),
    ({"queue": 3}, 'queue=3 is no dictionary of fields; write a value such as {"queue": {"mem": "64G"}'),
    ({"launcher": {"num_cpu": 2}}, "BashLauncher has no field 'num_cpu'; did you mean num_cpus?"),
    ({"launcher": {"kind": "rai"}}, "launcher.kind='rai' is neither 'ray' nor 'bash'"),
    ([1], "[1] is no dictionary; write one such as"),
    ("{", "the value is not JSON: Expecting property name"),
]


@pytest.mark.parametrize(("value", "says"), BAD)
def test_run_tags_are_refused_before_submission(value: Any, says: str, tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    result, _ = materialize(asset_with(), cluster(tmp_path / "base"), value)
    assert failure_of(result).startswith(f"{KEY} in the run's tags: {says}")
    assert not fake_slurm.jobs() and not (tmp_path / "base").exists()


@pytest.mark.parametrize(("value", "says"), BAD)
def test_definitions_with_wrong_settings_do_not_load(value: Any, says: str, tmp_path: Path) -> None:
    def load(**definitions: Any) -> None:
        compute = ComputeResource(local_base=str(tmp_path), default_launcher=BashLauncher())
        dg.Definitions.validate_loadable(dg.Definitions(**definitions, resources={"compute": compute}))

    @dg.op(tags={KEY: value})
    def step(compute: ComputeResource) -> None: ...

    @dg.job
    def inside() -> None:
        step()

    asset_job = dg.define_asset_job("nightly", selection="*", tags={KEY: value})
    for place, definitions in (
        ("the tags of op 'features' of 'features'", {"assets": [asset_with(value)]}),
        ("the metadata of asset 'features'", {"assets": [asset_with(metadata=value)]}),
        ("the tags of op 'step' of 'inside'", {"jobs": [inside]}),
        ("the tags of job 'nightly'", {"assets": [asset_with()], "jobs": [asset_job]}),
    ):
        with pytest.raises(ValueError, match=re.escape(f"{KEY} in {place}: {says}")):
            load(**definitions)


def test_each_resource_checks_the_assets_that_need_it() -> None:
    ray = asset_with({"launcher": {"num_cpus_per_node": 2}})

    @dg.asset(op_tags={KEY: {"launcher": {"num_cpus": 2}}})
    def plain(other: ComputeResource) -> None: ...

    resources = {"compute": ComputeResource(), "other": ComputeResource(default_launcher=BashLauncher())}
    dg.Definitions.validate_loadable(dg.Definitions(assets=[ray, plain], resources=resources))
    swapped = {"compute": resources["other"], "other": resources["compute"]}
    with pytest.raises(ValueError, match="BashLauncher has no field 'num_cpus_per_node'"):
        dg.Definitions.validate_loadable(dg.Definitions(assets=[ray, plain], resources=swapped))


def test_the_example_of_the_documentation() -> None:
    text = (Path(__file__).parents[2] / "docs" / "settings.md").read_text()
    [code] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    here: dict[str, Any] = {"__name__": "snippet"}
    exec(compile(code, "settings.md", "exec"), here)
    dg.Definitions.validate_loadable(here["settings_example"])
    with pytest.raises(ValueError, match="has no field 'qso'"):
        exec(code.replace('"qos"', '"qso"') + "dg.Definitions.validate_loadable(settings_example)", {"__name__": "snippet"})
