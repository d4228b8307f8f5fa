"""Components for `dg`: YAML becomes assets and a resource, mistakes are refused with their line, and scaffolds run at once."""

import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml
from dagster.components.core.package_entry import discover_package_objects
from dagster.components.testing import create_defs_folder_sandbox
from dagster.components.testing.utils import DefsFolderSandbox

from dagster_rayslurm import ComputeResource, ComputeResourceComponent, RaySlurmScriptComponent

ROOT = Path(__file__).parents[2]
SCRIPT, RESOURCE = "dagster_rayslurm.RaySlurmScriptComponent", "dagster_rayslurm.ComputeResourceComponent"
PAGES = {
    match[1]: match[2] for match in re.finditer(r"```yaml\n# (\S+)\n(.*?)```", (ROOT / "docs" / "dg.md").read_text(), re.DOTALL)
}
TELL = """
    import os, sys
    from dagster_pipes import open_dagster_pipes

    with open_dagster_pipes() as pipes:
        told = {"args": sys.argv[1:], "partition": pipes.partition_key if pipes.is_partition_step else "", **{
            name: os.environ.get(name, "") for name in ("PLAIN", "SECRET")}}
        if os.path.exists("data.txt"):
            open("told.txt", "w").write(open("data.txt").read())
        for key in pipes.asset_keys:
            pipes.report_asset_materialization(metadata=told, asset_key=key)
        pipes.report_asset_check("good", True, asset_key=pipes.asset_keys[0])
"""


@pytest.fixture
def sandbox() -> Iterator[DefsFolderSandbox]:
    with create_defs_folder_sandbox() as made:
        yield made


@pytest.fixture
def write(sandbox: DefsFolderSandbox, base: Path) -> Callable[..., Path]:
    """A function that writes a component of one asset, its script and a resource that runs it without Ray."""

    def component(name: str, attributes: dict[str, Any], type_: str = SCRIPT) -> Path:
        directory = sandbox.defs_folder_path / name
        directory.mkdir()
        (directory / "defs.yaml").write_text(yaml.safe_dump({"type": type_, "attributes": attributes}))
        (directory / "tell.py").write_text(textwrap.dedent(TELL))
        return directory

    def all_of_it(resource: dict[str, Any] | None = None, **attributes: Any) -> Path:
        fields = {"local_base": str(base), "default_launcher": {"kind": "bash"}, **(resource or {})}
        component("compute", {"resource": fields}, RESOURCE)
        return component("model", {"script": "tell.py", "assets": [{"key": "model"}], **attributes})

    return all_of_it


def load(sandbox: DefsFolderSandbox) -> dg.Definitions:
    with sandbox.build_all_defs() as defs:
        dg.Definitions.validate_loadable(defs)
        return defs


def refused(sandbox: DefsFolderSandbox) -> str:
    """The messages of the error with which the definitions do not load."""
    with pytest.raises(Exception, match=r"(?s)") as caught:
        load(sandbox)
    chain, error = [], caught.value
    while error is not None:
        chain.append(str(error))
        error = error.__cause__ or error.__context__
    return "\n".join(chain)


def materialize(sandbox: DefsFolderSandbox, **arguments: Any) -> dg.ExecuteInProcessResult:
    return load(sandbox).resolve_implicit_global_asset_job_def().execute_in_process(**arguments)


def told(result: dg.ExecuteInProcessResult, key: str = "model") -> dict[str, Any]:
    """The metadata that the script reported with an asset."""
    (event,) = (each for each in result.get_asset_materialization_events() if each.asset_key == dg.AssetKey(key))
    return {name: value.value for name, value in event.materialization.metadata.items()}


def test_a_script_gets_what_its_component_says(
    sandbox: DefsFolderSandbox, write: Callable[..., Path], base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REGION", "north west")
    monkeypatch.setenv("PASS", "hidden")
    directory = write(
        args=["--rows", 10, "1.10", "{{ env.REGION }}", '{"a": 1}'],
        assets=[{"key": key, "partitions_def": {"type": "static", "partition_keys": ["a", "b"]}} for key in ("model", "report")],
        checks=[{"name": "good", "asset": "model"}],
        queue={"num_nodes": 2},
        extra_env={"PLAIN": 1},
        secret_env={"SECRET": {"env": "PASS"}},
        extra_files=["data.txt"],
        outputs=["told.txt"],
    )
    (directory / "data.txt").write_text("some")
    result = materialize(sandbox, partition_key="b")
    found = told(result)
    assert found["args"] == ["--rows", "10", "1.10", "north west", '{"a": 1}']
    assert (found["partition"], found["PLAIN"], found["SECRET"]) == ("b", "1", "hidden")
    assert told(result, "report")["partition"] == "b"
    assert [each.passed for each in result.get_asset_check_evaluations()] == [True]
    assert {path.read_text() for path in base.rglob("told.txt")} == {"some"}


def test_fields_of_queue_and_launcher_are_settings_of_the_step(sandbox: DefsFolderSandbox, write: Callable[..., Path]) -> None:
    write(launcher={"kind": "bash", "grace_period": 3}, queue={"mem": "2G"}, pool="cluster", name="fit")
    op = load(sandbox).get_assets_def("model").op
    assert op.name == "fit" and op.pool == "cluster"
    assert op.tags["dagster-rayslurm/config"] == '{"launcher": {"grace_period": 3, "kind": "bash"}, "queue": {"mem": "2G"}}'


@pytest.mark.parametrize(
    ("kind", "attributes"),
    [
        (SCRIPT, "{script: tell.py, assets: [{key: model}], queue: {time_limit: LIMIT}}"),
        (RESOURCE, "{resource: {slurm: {queue: {time_limit: LIMIT}}}}"),
        (RESOURCE, "{resource: {session: {time_limit: LIMIT}}}"),
    ],
)
def test_a_time_limit_without_quotes_is_no_number_of_minutes(sandbox: DefsFolderSandbox, kind: str, attributes: str) -> None:
    """YAML reads 12:30:00 as 45000."""
    directory = sandbox.defs_folder_path / "model"
    directory.mkdir()
    (directory / "tell.py").write_text("")
    (directory / "defs.yaml").write_text(f"type: {kind}\nattributes: {attributes.replace('LIMIT', '12:30:00')}\n")
    assert re.search("time_limit: 45000 .* in quotes", refused(sandbox))


@pytest.mark.parametrize("limit", ["30", '"90"', "01:30:00", '"12:30:00"', "\"{{ env('LIMIT', '90') }}\""])
def test_a_clear_time_limit_is_taken(sandbox: DefsFolderSandbox, limit: str) -> None:
    directory = sandbox.defs_folder_path / "compute"
    directory.mkdir()
    attributes = f"{{resource: {{slurm: {{queue: {{time_limit: {limit}}}}}}}}}"
    (directory / "defs.yaml").write_text(f"type: {RESOURCE}\nattributes: {attributes}\n")
    slurm = (load(sandbox).resources or {})["compute"].slurm
    assert slurm.queue.time_limit == {"\"{{ env('LIMIT', '90') }}\"": "90"}.get(limit, limit.strip('"'))


def test_a_module_and_checks_alone(sandbox: DefsFolderSandbox, write: Callable[..., Path], tmp_path: Path) -> None:
    checks = [{"name": "good", "asset": "elsewhere"}]
    write(script=None, module="json.tool", args=["--help"], assets=[], checks=checks, uses_pipes=False)
    (check,) = load(sandbox).asset_checks or ()
    assert "compute" in check.required_resource_keys
    assert check.op.name == "elsewhere_good"


def test_two_clusters_in_one_project(sandbox: DefsFolderSandbox, write: Callable[..., Path], tmp_path: Path) -> None:
    """Each asset runs on the resource that it names; their records are in different places."""
    write()
    for key in ("far",):
        for name, type_, attributes in (
            (key, RESOURCE, {"resource_key": key, "resource": {"local_base": str(tmp_path / key)}}),
            (f"on_{key}", SCRIPT, {"script": "tell.py", "assets": [{"key": f"on_{key}"}], "resource_key": key}),
        ):
            directory = sandbox.defs_folder_path / name
            shutil.copytree(sandbox.defs_folder_path / "model", directory)
            (directory / "defs.yaml").write_text(yaml.safe_dump({"type": type_, "attributes": attributes}))
    defs = load(sandbox)
    resources = defs.resources or {}
    assert resources["compute"].local_base != resources["far"].local_base == str(tmp_path / "far")
    assert defs.get_assets_def("on_far").required_resource_keys - {"io_manager"} == {"far"}


@pytest.mark.parametrize(
    ("attributes", "says"),
    [
        ({"queue": {"num_node": 2}}, "SlurmQueueConfig has no field 'num_node'; did you mean num_nodes?"),
        ({"launcher": {"kind": "bash", "num_cpu": 2}}, "BashLauncher has no field 'num_cpu'; did you mean num_cpus?"),
        ({"launcher": {"kind": "rey"}}, "launcher.kind='rey' is neither 'ray' nor 'bash'"),
        ({"launcher": {"num_cpus_per_node": 2}}, "in the tags of op 'model'.*BashLauncher has no field 'num_cpus_per_node'"),
        ({"environment": {"kind": "uvv"}}, "environment.kind: 'uvv' is not one of 'inherited', 'pre-deployed'"),
        ({"environment": {"kind": "uv", "projekt": "."}}, "UvEnvironment has no field 'projekt'; did you mean project?"),
        ({"retry_policy": {"kinds": ["alocation"]}}, "'alocation' is no kind of failure .* did you mean 'allocation'?"),
        ({"retry_policy": {"kind": ["allocation"]}}, "retry_policy_for.* unexpected keyword argument 'kind'"),
        ({"script": "nothing.py"}, "script: there is no Python script '.*nothing.py'"),
        ({"script": "defs.yaml"}, "script: there is no Python script '.*defs.yaml'"),
        ({"module": "json.tool"}, "give either script or module"),
        ({"args": "--epochs 3"}, "write a list of arguments"),
        ({"args": ["--fast", True]}, r"\[1\]: True is no text"),
        ({"extra_env": {"FAST": True}}, r"\[FAST\]: True is no text"),
        ({"secret_env": {"FAST": None}}, r"\[FAST\]: None is no text"),
        ({"assets": []}, "assets and checks are empty; list at least one"),
        ({"queues": {}}, "queues"),
        ({"resource": {"modus": "local"}}, "ComputeResource has no field 'modus'; did you mean mode?"),
        ({"resource": {"slurm": {"queue": {"mem": "lots"}}}}, "'lots' is not a Slurm memory size"),
        ({"resource": {"mode": "slurm"}}, "mode 'slurm' needs a Slurm cluster"),
    ],
)
def test_mistakes_are_refused_when_definitions_load(
    sandbox: DefsFolderSandbox, write: Callable[..., Path], attributes: dict[str, Any], says: str
) -> None:
    write(**attributes)
    found = refused(sandbox)
    assert re.search(says, found), found


@pytest.mark.parametrize("scaffold_format", ["yaml", "python"])
def test_a_scaffold_loads(sandbox: DefsFolderSandbox, scaffold_format: Any) -> None:
    """With a resource for the first component alone."""
    for name, params in (("squares", None), ("more", {"asset_key": "raw/cubes"})):
        sandbox.scaffold_component(RaySlurmScriptComponent, name, params, scaffold_format)
    defs = load(sandbox)
    assert {spec.key.to_user_string() for each in defs.assets or () for spec in each.specs} == {"squares", "raw/cubes"}
    resource = (defs.resources or {})["compute"]
    assert isinstance(resource, ComputeResource) and resource.mode == "local"
    assert (sandbox.defs_folder_path / "more" / "raw_cubes.py").is_file()
    if scaffold_format == "python":
        shutil.rmtree(sandbox.defs_folder_path / "compute_resource")
        sandbox.scaffold_component(ComputeResourceComponent, "resource", None, "python")
        assert "compute" in (load(sandbox).resources or {})


def test_the_components_of_the_docs_load(sandbox: DefsFolderSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in PAGES.items():
        path = sandbox.defs_folder_path / name
        path.parent.mkdir()
        path.write_text(text)
        (path.parent / "train.py").write_text("")
    defs = load(sandbox)
    assert defs.get_assets_def("model").partitions_def == dg.DailyPartitionsDefinition("2026-01-01")
    assert (defs.resources or {})["compute"].slurm.ssh.host == "login.example.org"


def test_dg_finds_the_components_and_nobody_else_imports_them() -> None:
    assert {key.name for key in discover_package_objects(["dagster_rayslurm"])} == {
        SCRIPT.partition(".")[2],
        RESOURCE.partition(".")[2],
    }
    code = "from dagster_rayslurm import ComputeResource; import sys; print('dagster_rayslurm.dg_components' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


@pytest.mark.ray
def test_a_project_of_create_dagster(tmp_path: Path) -> None:
    """The way of docs/dg.md, with the programs: create a project, scaffold an asset, look at it, run it, and break it."""
    pytest.importorskip("create_dagster")
    pytest.importorskip("dagster_dg_cli")
    paths = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(tmp_path), "PYTHONPATH": "src"}
    env = {**os.environ, **paths, "DAGSTER_DISABLE_TELEMETRY": "1", "DAGSTER_DG_UPDATE_CHECK_ENABLED": "0", "COLUMNS": "200"}

    def run(*command: str, at: Path = tmp_path / "study", fails: bool = False) -> str:
        done = subprocess.run(command, cwd=at, env=env, capture_output=True, text=True, timeout=200)
        assert bool(done.returncode) == fails, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout + done.stderr

    run("create-dagster", "project", "study", "--no-uv-sync", at=tmp_path)
    listed = run("dg", "list", "components")
    assert SCRIPT in listed and RESOURCE in listed
    run("dg", "scaffold", "defs", SCRIPT, "squares")
    run("dg", "check", "yaml")
    run("dg", "check", "defs")
    shown = run("dg", "list", "defs")
    assert "squares" in shown and "compute" in shown
    assert "the sum of 100 squares is 328350" in run("dg", "launch", "--assets", "squares")
    yaml_file = tmp_path / "study/src/study/defs/squares/defs.yaml"
    yaml_file.write_text(yaml_file.read_text() + "  queue: {num_node: 2}\n")
    said = run("dg", "check", "yaml", fails=True)
    assert "defs.yaml:10 - " in said and "'num_node' was unexpected" in said
