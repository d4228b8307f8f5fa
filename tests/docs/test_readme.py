"""What the README and the pages behind it show is run, and what they name is there."""

import ast
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import time
import urllib.request
from pathlib import Path
from typing import Any

import click
import dagster as dg
import pytest
import tomli
import yaml

import dagster_rayslurm
from dagster_rayslurm import BashLauncher, ComputeResource

from ..stack.access import Stack

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")))
README = "".join((ROOT / page).read_text() for page in PAGES)
STACK = (ROOT / "stack" / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
NAMED = [(match.group(1), block) for block in PYTHON if (match := re.match(r"# (\w+\.py)\n", block))]
FILES = dict(NAMED)


@pytest.mark.ray
def test_the_asset_of_the_readme_runs(tmp_path: Path, base: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    assert all(FILES[name] == block for name, block in NAMED)  # The README has a file of the quickstart.
    program = """
        import train, check  # Nothing happens where they are imported.
        import dagster as dg
        from checks import good_enough
        from definitions import defs
        both = dg.Definitions.merge(defs, dg.Definitions(asset_checks=[good_enough]))
        result = both.resolve_implicit_global_asset_job_def().execute_in_process()
        print("BEST", result.asset_materializations_for_node("model")[0].metadata["best score"].value)
        print("CHECKED", [each.passed for each in result.get_asset_check_evaluations()])
    """
    env = {**os.environ, "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    said = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=170)
    assert "BEST 0.9375" in said.stdout and "CHECKED [True]" in said.stdout, said.stderr[-3000:]


def test_the_configuration_of_the_tutorial_runs_on_a_laptop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    text = FILES["cluster.py"].replace("/opt/ray", "/shared/envs/study")
    for name in [name for name in os.environ if name.startswith("SLURM_EDGE_NODE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("RAYSLURM_MODE", "local")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "definitions.py").write_text(FILES["definitions.py"])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "definitions", raising=False)
    here: dict[str, Any] = {"__name__": "cluster"}
    exec(compile(text, "tutorial.md", "exec"), here)
    monkeypatch.delitem(sys.modules, "definitions")

    @dg.asset
    def word(context: dg.AssetExecutionContext, compute: ComputeResource) -> dg.MaterializeResult:
        said = compute.run(context=context, payload_path=["echo", "hello"], launcher=BashLauncher(), uses_pipes=False)
        return said.get_materialize_result()

    assert dg.materialize([word], resources={"compute": here["compute"]}).success
    assert "local mode does not use slurm and pre_deployed_env_path='/shared/envs/study'" in capfd.readouterr().err


def test_payloads_of_the_how_tos_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A partition reaches its payload; a training that was warned of its time limit goes on in the next attempt."""
    for name in ("month.py", "longer.py"):
        (tmp_path / name).write_text(FILES[name])
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    here: dict[str, Any] = {"__name__": "months"}
    exec(compile(FILES["months.py"], "partitions.md", "exec"), here)
    compute = ComputeResource(default_launcher=BashLauncher(), data_dir=str(tmp_path))
    result = dg.materialize([here["month"]], partition_key="2026-02", resources={"compute": compute})
    assert result.asset_materializations_for_node("month")[0].metadata["month"].value == "2026-02"

    @dg.asset
    def longer(context: dg.AssetExecutionContext, compute: ComputeResource) -> dg.MaterializeResult:
        return compute.run(context=context, payload_path=payload).get_materialize_result()

    # The signal comes in the moment in which the payload can take it.
    early = "import os, signal, longer; on = signal.signal; signal.signal = lambda *to: (on(*to), os.kill(os.getpid(), to[0])); "
    payload: Any = ["python", "-c", f"{early}longer.main()"]
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert not dg.materialize([longer], resources={"compute": compute}, raise_on_error=False).success
    assert (tmp_path / "longer.json").read_text() == '{"epoch": 1}'
    payload = "longer.py"
    result = dg.materialize([longer], resources={"compute": compute})
    assert result.asset_materializations_for_node("longer")[0].metadata["epochs"].value == 100
    assert not (tmp_path / "longer.json").exists()


@pytest.mark.parametrize("block", [block for block in PYTHON if block not in FILES.values()])
def test_other_snippets_run(block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_EDGE_NODE_HOST", "edge")
    exec(compile(block, "README.md", "exec"), {"__name__": "snippet"})


def test_snippets_of_other_languages_are_well_formed() -> None:
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    assert {language for language, _ in blocks} <= {
        *("python", "console", "bash", "toml", "yaml"),
        *("dockerfile", "mermaid", "text", "output"),
    }
    for language, text in blocks:
        if language == "toml":
            tomli.loads(text)
        elif language == "yaml":
            assert yaml.safe_load(text)
    commands = [line[2:] for language, text in blocks if language == "console" for line in text.splitlines() if line[:2] == "$ "]
    script = "\n".join([*commands, *(text for language, text in blocks if language == "bash")])
    said = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
    assert not said.stderr and said.returncode == 0, said.stderr


def materialize_study(compute: ComputeResource) -> Any:
    """The materialization of an asset whose payload is the README's `study.py`."""

    @dg.asset
    def study(context: dg.AssetExecutionContext, compute: ComputeResource) -> dg.MaterializeResult:
        return compute.run(context=context, payload_path="study.py").get_materialize_result()

    result = dg.materialize([study], resources={"compute": compute})
    return result.asset_materializations_for_node("study")[0].metadata


@pytest.mark.ray
@pytest.mark.thorough
def test_the_components_of_the_readme_are_simulated_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its snippet in local mode, with the payload that says where its tasks run."""
    (text,) = (block for block in PYTHON if 'mode="slurm-hetjob"' in block)
    (tmp_path / "study.py").write_text(FILES["study.py"])
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SLURM_EDGE_NODE_HOST", "edge")
    monkeypatch.chdir(tmp_path)
    here: dict[str, Any] = {"__name__": "definitions"}
    text = text.replace('"slurm-hetjob"', '"local"').replace("/shared/envs/study", sys.prefix)
    exec(compile(text, "README.md", "exec"), here)
    found = materialize_study(here["compute"])
    assert found["score"].value == 3.0
    assert sorted(record.data["component"] for record in found["Nodes"].records) == ["cpu", "gpu"]


@pytest.mark.ray
def test_the_separate_components_of_the_readme_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (text,) = (block for block in PYTHON if 'topology="separate"' in block)
    assert "launcher=RayLauncher()" in text
    text = text.replace("RayLauncher()", "RayLauncher(dashboard=False, ray_args=['--no-monitor'])")  # It starts sooner.
    tell = """
        import json, os
        from dagster_pipes import open_dagster_pipes

        with open_dagster_pipes() as pipes:
            own = os.environ["RAYSLURM_COMPONENT"]
            told = json.loads(os.environ["RAYSLURM_COMPONENTS"])
            assert set(told) == {"learner", "simulator"} and set(told[own]) >= {"host", "address", "nodes", "ray_address"}
            assert bool(told[own]["ray_address"]) == ("RAY_ADDRESS" in os.environ) == (own == "learner")
            pipes.report_asset_materialization(metadata={own: "was here"})
    """
    for name in ("learn.py", "simulate.py"):
        (tmp_path / name).write_text(textwrap.dedent(tell))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    here: dict[str, Any] = {"__name__": "definitions"}
    exec(compile(text, "README.md", "exec"), here)
    result = dg.materialize([here["policy"]], resources={"compute": here["compute"]})
    (materialization,) = result.asset_materializations_for_node("policy")
    assert materialization.metadata["learner"].value == materialization.metadata["simulator"].value == "was here"


def test_the_components_of_the_readme_run_on_slurm(tmp_path: Path, stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its snippet with the stack's environment, in one heterogeneous job."""
    (text,) = (block for block in PYTHON if 'mode="slurm-hetjob"' in block)
    (tmp_path / "study.py").write_text(FILES["study.py"])
    for name, value in {**stack.env, "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    here: dict[str, Any] = {"__name__": "definitions"}
    exec(compile(text.replace("/shared/envs/study", stack.env["RAYSLURM_ENV_PATH"]), "README.md", "exec"), here)
    found = materialize_study(here["compute"])
    assert found["score"].value == 3.0
    components = [(record.data["component"], record.data["nodes"]) for record in found["Components"].records]
    assert components == [("cpu", "c1, c2"), ("gpu", "g1")]


def test_the_session_of_the_readme_is_found_warm(tmp_path: Path, stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its snippet with the stack's environment, and the asset above in two runs."""
    (text,) = (block for block in PYTHON if 'mode="slurm-session"' in block)
    (tmp_path / "train.py").write_text(FILES["train.py"])
    for name, value in {**stack.env, "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    here: dict[str, Any] = {"__name__": "definitions"}
    exec(compile(FILES["definitions.py"], "README.md", "exec"), here)
    exec(compile(text.replace("/shared/envs/study", stack.env["RAYSLURM_ENV_PATH"]), "README.md", "exec"), here)
    found = []
    try:
        for _ in range(2):
            result = dg.materialize([here["model"]], resources={"compute": here["compute"]})
            found.append(result.asset_materializations_for_node("model")[0].metadata)
    finally:
        stack.exec("edge", ["scancel", "--quiet", "--user=dev"])
    assert [each["best score"].value for each in found] == [0.9375, 0.9375]
    assert found[0]["Ray cluster ID"].value == found[1]["Ray cluster ID"].value
    assert [each["Session reused"].value for each in found] == [False, True]


@pytest.mark.timeout(400)
def test_the_asset_of_the_readme_runs_where_nothing_is_prepared(
    tmp_path: Path, stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the commands that make a lock, and the resource with `UvEnvironment()`."""
    page = (ROOT / "docs" / "environments.md").read_text()
    (commands,) = re.findall(r"```console\n(\$ uv init.*?)```", page, re.DOTALL)
    (text,) = (block for block in PYTHON if "environment=UvEnvironment()" in block and block not in FILES.values())
    for name in ("train.py", "definitions.py"):
        (tmp_path / name).write_text(FILES[name])
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    subprocess.run(["sh", "-ec", re.sub(r"^\$ ", "", commands, flags=re.MULTILINE)], cwd=tmp_path, env=env, check=True)
    for name, value in stack.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    here: dict[str, Any] = {"__name__": "definitions"}
    exec(compile(FILES["definitions.py"], "README.md", "exec"), here)
    exec(compile(text, "README.md", "exec"), here)
    assert "pre_deployed_env_path" not in text
    result = dg.materialize([here["model"]], resources={"compute": here["compute"]})
    assert result.asset_materializations_for_node("model")[0].metadata["best score"].value == 0.9375
    assert "/prefixes/" in stack.exec("edge", ["sh", "-c", "ls -d /home/dev/.dagster_rayslurm/prefixes/*"])


class Tutorial:
    """The files of the tutorial in a directory, and its commands there as a user types them."""

    def __init__(self, directory: Path, stack: Stack) -> None:
        self.directory = directory
        for name in ("train.py", "definitions.py", "cluster.py", "own_cluster.py"):
            (directory / name).write_text(FILES[name])
        (directory / "dagster.yaml").write_text("telemetry:\n  enabled: false\n")
        page = (ROOT / "docs" / "start" / "tutorial.md").read_text()
        blocks = re.findall(r"```console\n(.*?)```", page, re.DOTALL)
        self.commands = [line.removeprefix("$ ").partition(" #")[0].strip() for block in blocks for line in block.splitlines()]
        ours = {name: value for name, value in stack.env.items() if name != "RAYSLURM_ENV_PATH"}
        self.env = {**os.environ, **ours, "HOME": str(directory), "DAGSTER_HOME": str(directory), "COLUMNS": "200"}
        self.env["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.env["XDG_CACHE_HOME"] = str(directory / "cache")

    def command(self, begin: str) -> str:
        """The command of the page that begins so."""
        (found,) = (each for each in self.commands if each.startswith(begin))
        return found

    def type(self, begin: str, **variables: str) -> str:
        """What that command prints; pressing Materialize in `dagster dev` is a command as well."""
        command = re.sub(r".*\bdagster dev( .*)", r"dagster asset materialize --select model\1", self.command(begin))
        said = subprocess.run(
            ["sh", "-ec", command], cwd=self.directory, env={**self.env, **variables}, capture_output=True, text=True, timeout=400
        )
        assert said.returncode == 0, (command, said.stdout[-3000:], said.stderr[-3000:])
        return said.stdout + said.stderr

    def metadata(self) -> Any:
        """The metadata of the newest materialization, which Dagster's UI shows."""
        code = """if True:
            import json, dagster as dg
            event = dg.DagsterInstance.get().get_latest_materialization_event(dg.AssetKey("model"))
            found = {key: each.value for key, each in event.asset_materialization.metadata.items()}
            print(json.dumps({key: value for key, value in found.items() if isinstance(value, (bool, float, str))}))
        """
        said = subprocess.run([sys.executable, "-c", code], env=self.env, capture_output=True, text=True, check=True, timeout=60)
        return json.loads(said.stdout)


@pytest.fixture
def tutorial(tmp_path: Path, stack: Stack) -> Tutorial:
    return Tutorial(tmp_path, stack)


def test_the_second_stage_of_the_tutorial_runs_on_two_nodes(tutorial: Tutorial) -> None:
    said = tutorial.type("RAYSLURM_MODE=slurm dagster dev", RAYSLURM_MODE="slurm")
    assert re.search(r"submitted Slurm job \d+ \(.*\) to partition compute", said), said[-3000:]
    assert tutorial.metadata()["best score"] == 0.9375
    assert "model" in tutorial.type("rayslurm ps --all") and "c1" in tutorial.type("rayslurm show model")


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_the_third_stage_of_the_tutorial_takes_less_than_ten_minutes(tutorial: Tutorial, stack: Stack) -> None:
    """From nothing on the cluster to the first asset, by the page's commands; then what it says to look at."""
    tutorial.env["RAYSLURM_MODE"] = tutorial.command("export RAYSLURM_MODE").partition("=")[2]
    # The wheels that this machine has fetched before are used again, as the index is not what is tested.
    cache = subprocess.run(
        ["uv", "cache", "dir"], env={**tutorial.env, "HOME": os.environ["HOME"]}, capture_output=True, text=True
    )
    tutorial.env["UV_CACHE_DIR"] = cache.stdout.strip()
    began = time.monotonic()
    said = tutorial.type("rayslurm doctor")
    assert not re.search("^failure", said, re.MULTILINE), said
    queue = re.search(r"queue=(SlurmQueueConfig\(.*?\n    \)),\n", said, re.DOTALL)
    shown = re.search(r"queue=(SlurmQueueConfig\(.*?\)),\n", FILES["own_cluster.py"])
    assert queue is not None and shown is not None
    names = {"SlurmQueueConfig": dagster_rayslurm.SlurmQueueConfig}
    assert eval(queue[1], names).model_dump() == eval(shown[1], names).model_dump()
    try:
        for begin in ("uv init", "uv add", "rayslurm env"):
            tutorial.type(begin)
        script = tutorial.type("python -c 'from own_cluster")
        assert "\n#SBATCH --nodes=2\n" in script
        tutorial.type("dagster dev -f own_cluster.py")
        first = tutorial.metadata()
        assert first["best score"] == 0.9375 and first["Session reused"] is False
        assert time.monotonic() - began < 600
        tutorial.type("dagster dev -f own_cluster.py")
        assert tutorial.metadata()["Session reused"] is True
        assert "default" in tutorial.type("rayslurm session list")
        assert {"c1", "c2"} <= set(re.findall(r"\bc[12]\b", tutorial.type("rayslurm top default")))
        dashboard = tutorial.command("rayslurm dashboard default").replace(" --open", "")
        with subprocess.Popen(
            ["sh", "-c", f"exec {dashboard}"], cwd=tutorial.directory, env=tutorial.env, stdout=subprocess.PIPE, text=True
        ) as served:
            assert served.stdout is not None
            try:
                url = served.stdout.readline().strip()
                with urllib.request.urlopen(f"{url}api/version", timeout=60) as answer:
                    assert "ray_version" in json.load(answer)
            finally:
                served.send_signal(signal.SIGINT)
        tutorial.type("rayslurm session stop")
        assert not stack.exec("edge", ["squeue", "--noheader", "--user=dev"]).strip()
    finally:
        stack.exec("edge", ["scancel", "--quiet", "--user=dev"])
        stack.exec("edge", ["rm", "-rf", "/home/dev/.dagster_rayslurm"])


def test_the_session_settings_of_the_readme_are_those_there_are() -> None:
    rows = re.search(r"\| `SessionConfig` \| default \| meaning \|\n\|---\|---\|---\|\n(.*?)\n\n", README, re.DOTALL)
    assert rows is not None
    told: dict[str, object] = {}
    for names, default in re.findall(r"^\| (`[a-z_`, ]+`) \| (\S+) \|", rows.group(1), re.MULTILINE):
        told.update(dict.fromkeys(re.findall(r"[a-z_]+", names), ast.literal_eval(default.strip("`"))))
    from dagster_rayslurm import SessionConfig

    assert told == {name: field.default for name, field in SessionConfig.model_fields.items()}


def test_the_commands_that_are_shown_exist() -> None:
    from dagster_rayslurm.cli import main

    shown = [line for page in PAGES for line in re.findall(r"^\$ rayslurm (.*)", (ROOT / page).read_text(), re.MULTILINE)]
    assert len(shown) > 20
    for line in shown:
        command: click.Command = main
        context, words = click.Context(main), shlex.split(line, comments=True)
        while isinstance(command, click.Group):
            _, words, _ = command.make_parser(click.Context(command)).parse_args(words)
            found = command.get_command(context, words[0])
            assert found is not None, line
            command, words = found, words[1:]
        command.make_context(command.name, words, context)  # Refuses options that there are not.


def test_the_commands_and_modules_that_are_named_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:`|\$ )make ([a-z-]+)", README + STACK)) <= targets
    architecture = (ROOT / "docs" / "architecture.md").read_text()
    named = re.findall(r"`((?:[a-z_]+/)*[a-z_]+(?:\.py|/))`", architecture)
    assert named
    for module in named:
        assert (ROOT / "dagster_rayslurm" / module).exists(), module


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "stack/README.md"])
def test_links_lead_somewhere(page: str) -> None:
    """The pages of the site are checked when it is built."""
    text = (ROOT / page).read_text()
    headings = {
        re.sub(r"[^a-z0-9 -]", "", line.lower()).replace(" ", "-") for line in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    }
    for path, heading in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", text):
        assert not path or ((ROOT / page).parent / path).exists(), path
        assert path or heading in headings, heading


def test_the_extras_that_are_installed_exist() -> None:
    extras = set(
        re.findall(r"^([a-z]+) = \[", (ROOT / "pyproject.toml").read_text().partition("[project.optional-")[2], re.MULTILINE)
    )
    named = re.findall(r'pip install -e "\.\[([a-z,]+)\]"', README)
    assert {"ray", "ui", "uv", "pixi", "examples"} == set(",".join(named).split(",")) <= extras


def test_messages_say_to_install_as_the_pages_do(monkeypatch: pytest.MonkeyPatch) -> None:
    from dagster_rayslurm.environments import wheels

    monkeypatch.setitem(sys.modules, "uv", None)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ValueError) as lacking:
        wheels.find_uv()
    command = str(lacking.value).partition(": ")[2].replace("'", '"')
    assert command in README and "in the checkout of dagster-rayslurm" in str(lacking.value)


def test_pixi_has_the_tasks_of_the_makefile() -> None:
    pixi = (ROOT / "pixi.toml").read_text()
    for task in ("install", "demo", "dev", "test", "docs", "bench", "stack-up", "stack-down", "stack-logs"):
        assert re.search(rf"^{task} = ", pixi, re.MULTILINE), task


def test_the_stack_is_as_its_readme_says() -> None:
    """The commands of its page work on it; what its choices are is what the settings take."""
    from stack.access import read_environment
    from stack.settings import ACCOUNTING_SERVICES, Settings

    services = set(re.findall(r"`([a-z0-9]+)`", "".join(re.findall(r"^\| (`[a-z0-9`, ]+`) \| ", STACK, re.MULTILINE))))
    settings = Settings.from_environment({})
    assert set(settings.services) <= services and set(ACCOUNTING_SERVICES) <= services
    for variable in re.findall(r"`(RAYSLURM_STACK_[A-Z_]+)`", STACK):
        assert variable in (ROOT / "stack" / "settings.py").read_text(), variable
    environment = read_environment(Settings.from_environment())
    if environment:
        commands = re.search(r"\$ (set -a; .*?)\n\$ make stack-logs", STACK, re.DOTALL)
        assert commands is not None
        script = re.sub(r"^\$ ", "", commands[1], flags=re.MULTILINE)
        env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        said = subprocess.run(["sh", "-ec", script], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
        assert said.returncode == 0 and "compute*" in said.stdout and "gpu" in said.stdout, said.stderr


def test_the_kinds_of_failure_are_all_explained() -> None:
    from dagster_rayslurm.errors import FailureKind
    from dagster_rayslurm.failures import RunFailure

    rows = dict(re.findall(r"^\| `([a-z-]+)` \| .* \| (yes|no) \|$", README, re.MULTILINE))
    assert set(rows) == set(FailureKind)
    assert {kind: RunFailure(kind, "x").allow_retries for kind in rows} == {kind: says == "yes" for kind, says in rows.items()}
