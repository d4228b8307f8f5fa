"""Tests: hostile text from users, clusters and payloads is refused with a sentence or stays text. None of it is executed."""

import base64
import contextlib
import glob
import json
import os
import string
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import dagster as dg
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import dagster_rayslurm
from dagster_rayslurm import (
    BashLauncher,
    ComputeResource,
    HetComponent,
    RayLauncher,
    RunFailure,
    SessionConfig,
    SlurmQueueConfig,
    SlurmResource,
)
from dagster_rayslurm.execution.files import fetch_outputs
from dagster_rayslurm.runtime.protocol.record import encode
from dagster_rayslurm.runtime.ray.ray_node import start_arguments
from dagster_rayslurm.ssh.local import LocalConnection

from ..conftest import pipes_script, run_asset
from ..slurm.fixtures import NODES, Site

pytestmark = pytest.mark.timeout(240)

Make = Callable[..., ComputeResource]

MARK = "/tmp/pwned"
HOSTILE = [
    f"$(touch {MARK}-a)",
    f"`touch {MARK}-b`",
    f"'; touch {MARK}-c; '",
    f'"; touch {MARK}-d; "',
    f"x\ntouch {MARK}-e\n",
    f"x\n#SBATCH --wrap=touch\\ {MARK}-f\n",
    f"| touch {MARK}-g & > {MARK}-h",
    "-rf",
    "--version",
    "../../../../etc/passwd",
    "~/x",
    "* ? [a-z] {a,b}",
    "%j%x\\n",
    "é\N{RIGHT-TO-LEFT OVERRIDE}\N{LINE SEPARATOR}\x85",
    "\x1b[2J\x1b]0;title\x07",
    "{0} %s ${HOME} $HOME",
    "",
]
"""Texts with an effect in a shell, a batch script, a terminal, a pattern or a template, if they are not quoted."""

IN_NAMES = [text.replace("/", "_") for text in HOSTILE if text and "\n" not in text]
"""The hostile texts as file names."""

ECHO = pipes_script("""
import json, os, pathlib, sys
names = json.loads(os.environ["NAMES"])
there = sorted(os.listdir("."))
os.mkdir("made")
for name in names:
    pathlib.Path("made", name).write_text(name)
os.symlink("/etc/passwd", "made/link")
os.symlink("/etc", "made/etc")
pipes.report_asset_materialization(metadata={
    "argv": json.dumps(sys.argv[1:]), "there": json.dumps(there),
    "environment": json.dumps({name: value for name, value in os.environ.items() if name[:2] == "V_"}),
})
""")


@pytest.fixture(autouse=True)
def nothing_runs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test in which a hostile text was executed."""
    stack = request.getfixturevalue("stack") if "site" in request.fixturenames else None
    yield
    assert not glob.glob(f"{MARK}*")
    if stack is not None:
        for service in ("edge", "slurmctld", *NODES):
            found = stack.look(service, f"ls -d {MARK}* /home/dev/pwned*")
            assert not found, (service, found)


def materialize(compute: ComputeResource, payload: list[str], partition: str, **arguments: Any) -> tuple[dict[str, Any], Any]:
    """Materialize one partition with a payload; returns what the payload reported, and the run."""
    held = []

    @dg.asset(partitions_def=dg.StaticPartitionsDefinition([partition]))
    def partitioned(context: dg.AssetExecutionContext, compute: ComputeResource) -> Any:
        held.append(compute.run(context=context, payload_path=payload, **arguments))
        return held[-1].get_materialize_result()

    result = dg.materialize([partitioned], resources={"compute": compute}, partition_key=partition)
    found = result.asset_materializations_for_node("partitioned")[0].metadata
    return {name: value.value for name, value in found.items()}, held[0]


def stays_text(compute: ComputeResource, directory: Path) -> Any:
    """Check that the hostile texts stay text in the arguments, variables, partition and file names of a payload."""
    work = directory / IN_NAMES[0]
    work.mkdir()
    (work / "-m.py").write_text(ECHO)
    extra = []
    for name in IN_NAMES:
        extra.append(directory / "extra" / name)
        extra[-1].parent.mkdir(exist_ok=True)
        extra[-1].write_text(name)
    half = {f"V_{number}": text for number, text in enumerate(HOSTILE)}
    metadata, run = materialize(
        compute,
        ["python", "./-m.py", *HOSTILE],
        f"p$(touch {MARK}-p)`touch {MARK}-q`';touch {MARK}-r #SBATCH --wrap=x %j \\ \N{RIGHT-TO-LEFT OVERRIDE}",
        launcher=BashLauncher(working_dir=str(work), grace_period=2),
        extra_env={"NAMES": json.dumps(IN_NAMES), **dict(list(half.items())[::2])},
        secret_env=dict(list(half.items())[1::2]),
        extra_files=extra,
        outputs=["made/*", "made/.*", "$(id)", "made/[!a]*"],
    )
    assert json.loads(metadata["argv"]) == HOSTILE
    assert json.loads(metadata["environment"]) == half
    assert json.loads(metadata["there"]) == sorted([*IN_NAMES, "-m.py"])
    # Neither what links lead to comes back, nor anything beside the directory of outputs.
    assert sorted(path.name for path in run.outputs) == sorted(IN_NAMES)
    assert all(path.read_text() == path.name for path in run.outputs)
    return run


def test_text_stays_text_on_this_machine(compute: ComputeResource, tmp_path: Path) -> None:
    stays_text(compute, tmp_path)


def test_text_stays_text_on_slurm(mode: str, make: Make, site: Site, tmp_path: Path) -> None:
    run = stays_text(make(), tmp_path)
    if mode != "slurm-session":
        shown = site.sh("scontrol show job -dd $1 | grep -a Comment=", run.job_id).splitlines()
        assert len(shown) == (2 if mode == "slurm-hetjob" else 1), shown
        assert all(f"partition p$(touch {MARK}-p)`touch {MARK}-q`'" in line for line in shown)


def test_what_a_payload_prints_is_output_and_nothing_else(compute: ComputeResource, script: Any, capfd: Any) -> None:
    """Neither a record, nor a message, nor an answer, nor the end of one."""
    payload = script(
        pipes_script(f"""
        import os, pathlib, sys
        nonce = pathlib.Path(os.environ["RAYSLURM_RUN_DIR"]).name.rpartition("-")[2] if "RAYSLURM_RUN_DIR" in os.environ else "x"
        end = {encode({"type": "end", "nonce": "NONCE", "exit_code": 0, "reason": "exit", "outputs": []})!r}
        sys.stdout.buffer.write(end.replace(b"NONCE", nonce.encode()))
        print('{{"__dagster_pipes_version": "0.1", "method": "closed", "params": {{}}}}')
        print('rayslurm-answer {{"ok": true}}')
        print('rayslurm-sent')
        print("\\x1b]0;title\\x07\\x1b[2J<script>alert(1)</script>```")
        print("no end of line", end="")
        sys.stdout.flush()
        os.kill(os.getpid(), 9)
        """)
    )
    failure = run_asset(compute, payload).failure
    assert failure.kind == "payload" and failure.metadata["Signal"].value == 9
    said = capfd.readouterr().out
    assert said.count('"type":"end"') == 1 and "rayslurm-answer" in said and said.rstrip().endswith("no end of line")
    shown = failure.metadata["Last output"]
    # Text, in which Dagster interprets nothing.
    assert isinstance(shown, dg.TextMetadataValue) and "<script>" in str(shown.text) and "\x1b" not in str(shown.text)


def test_names_that_are_told_stay_text(base: Path, script: Any) -> None:
    name = "![](http://evil.invalid/x.png)<img src=x onerror=alert(1)>\n# title"
    payload = script(f"import pathlib\npathlib.Path({name.replace('/', '_')!r}).write_bytes(bytes(2 * 2**20))")
    compute = ComputeResource(local_base=str(base), default_launcher=BashLauncher(), max_outputs_mb=1)
    held = []

    @dg.asset
    def big(context: dg.AssetExecutionContext) -> Any:
        held.append(compute.run(context=context, payload_path=payload, outputs=["*evil*"], uses_pipes=False))
        return held[0].get_materialize_result()

    assert dg.materialize([big]).success and not held[0].outputs
    shown = held[0].metadata["Outputs left out"]
    assert isinstance(shown, dg.TextMetadataValue) and "onerror" in str(shown.text)


# ---- What a cluster says


@given(name=st.text(min_size=1) | st.lists(st.sampled_from(["..", ".", "a", "", "~"]), min_size=1, max_size=6).map("/".join))
@example(name="../../escaped")
@example(name="/tmp/pwned-absolute")
@example(name="a/../../../escaped")
@example(name="..")
@settings(max_examples=60, deadline=None)
def test_no_output_is_written_elsewhere(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    """A record is as good as the account over there, and this machine is not that account's to write to."""
    there, here = tmp_path_factory.mktemp("there") / "runs" / "1", tmp_path_factory.mktemp("here") / "a" / "b" / "outputs"
    source = os.path.join(there, "work", name)
    for place in (there / "work", here / "outputs"):
        place.mkdir(parents=True)
    inside = os.path.realpath(source, strict=False) if "\0" not in name else ""
    if inside.startswith(f"{there}/") and not os.path.exists(source):
        try:
            os.makedirs(os.path.dirname(source), exist_ok=True)
            Path(source).write_text("x")
        except (OSError, ValueError):
            pass  # No file can be called so.
    before = set(here.parents[1].rglob("*"))
    with contextlib.suppress(OSError):
        fetch_outputs({"outputs": [{"name": name, "size": 1}]}, LocalConnection(), str(there), here / "outputs", 1)
    made = set(here.parents[1].rglob("*")) - before
    assert all(here / "outputs" in path.parents for path in made), made
    assert not os.path.exists("/tmp/pwned-absolute")


# ---- What configuration says

NEEDED: dict[str, dict[str, Any]] = {
    "SSHConnectionResource": {"host": "e"},
    "HetComponent": {"component_id": "a", "queue": SlurmQueueConfig()},
    "PreDeployedEnvironment": {"path": "/x"},
    "CommandEnvironment": {"commands": ["true"]},
    "PackedEnvironment": {"archive": "x"},
    "ContainerEnvironment": {"image": "/x", "runtime": "podman"},
}
PUBLIC = [getattr(dagster_rayslurm, name) for name in dagster_rayslurm.__all__]
# Components for dg hand their values to these classes.
CLASSES = [kind for kind in PUBLIC if getattr(kind, "model_fields", None) and not issubclass(kind, dg.Component)]
CHECKED_LATER = {"password", "key_passphrase", "site", "resources"}
"""Fields without a check of their own: only SSH uses them, a run checks them as variables, or they travel as JSON."""
WORDLESS = (bool, int, float, type(None), dg.Config)
"""Types of fields that cannot hold text, or that are checked themselves."""
GOOD: dict[str, Any] = {
    "auth": "token",
    "carrier": "srun",
    "client": "openssh",
    "commands": ["true"],
    "extra_sbatch": ["--nice=5"],
    "fabric": "tcp",
    "groups": ["ab"],
    "host_key": "ssh-ed25519 " + base64.b64encode(b"\0\0\0\vssh-ed25519\0\0\0 " + bytes(32)).decode(),
    "host_key_checking": "strict",
    "imports": ["torch.nn"],
    "keep_run_dirs": "all",
    "labels": {"tier": "fast"},
    "launch_style": "symmetric-run",
    "mem": "4G",
    "mem_per_cpu": "500M",
    "metrics_dir": "/x",
    "mode": "slurm",
    "mounts": ["/x"],
    "on_infeasible": "fail",
    "on_misfit": "error",
    "on_service_stop": "detach",
    "on_unhealthy": "exclude-and-retry",
    "options": ["--x"],
    "port_range": "20000-20999",
    "preload": ["torch.nn"],
    "ray_args": ["--verbose"],
    "runtime": "charliecloud",
    "stage": "node-local",
    "scope": "run",
    "signal_before_timeout": "USR1@300",
    "time_limit": "1-00:05:00",
    "local_resources": "strict",
    "topology": "separate",
}
"""A valid value for each field that accepts only certain words."""


LINES = {"health_check"}
"""Fields whose text may have several lines."""


def may_be_text(annotation: Any) -> bool:
    """Whether a field with this annotation may hold text."""
    parts = get_args(annotation)
    if not parts:
        return not (isinstance(annotation, type) and issubclass(annotation, WORDLESS))
    return any(map(may_be_text, parts))


def spoilt(value: Any, characters: str) -> Iterator[Any]:
    """Bad variants of a good value: with each of the characters at its start, inside and at its end."""
    if isinstance(value, list):
        yield from ([each] for text in value for each in spoilt(text, characters))
    elif isinstance(value, dict):
        for name, text in value.items():
            yield from ({each: text} for each in spoilt(name, characters))
            yield from ({name: each} for each in spoilt(text, characters))
    else:
        yield from (value[:at] + bad + value[at:] for bad in characters for at in (0, 1, len(value)))


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_no_field_takes_what_ends_a_line(kind: Any) -> None:
    """None that may be text is left out: one with a form of its own needs a value in `GOOD`."""
    names = {name for name, field in kind.model_fields.items() if may_be_text(field.annotation)}
    assert names
    for name in names - CHECKED_LATER:
        good = kind.model_fields[name].default if name == "kind" else GOOD.get(name, "ab")
        assert takes(kind, name, good), f"{name} takes no {good!r}"
        # These end a line, a string or a command.
        for bad in spoilt(good, "\0\x1b\ud800" if name in LINES else "\n\r\0\x1b\ud800"):
            assert not takes(kind, name, bad), (name, bad)


def takes(kind: Any, name: str, value: Any) -> bool:
    try:
        kind(**{**NEEDED.get(kind.__name__, {}), name: value})
    except Exception:  # noqa: BLE001 - Dagster's own refusals are of many kinds.
        return False
    return True


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"A": "a\nb"}, r"SlurmResource.site['A']: the value contains the control character '\n'; remove it"),
        ({"A\n": "x"}, "not a name"),
        ({"A;id": "x"}, "not a name"),
        ({"A": "\ud800"}, "surrogate"),
        ({"A": "a\0"}, "NUL"),
    ],
)
def test_variables_of_jobs_are_refused_before_there_is_one(variables: dict[str, str], words: str) -> None:
    slurm = SlurmResource(site=variables, remote_base="/b")
    compute = ComputeResource(mode="slurm", slurm=slurm, pre_deployed_env_path="/e", default_launcher=BashLauncher())
    with pytest.raises(RunFailure) as caught:
        compute.job_script(payload_path="python -V")
    assert caught.value.kind == "configuration" and words in (caught.value.description or "")


@pytest.mark.parametrize(
    "arguments",
    [
        {"extra_env": {"A": "\ud800"}},
        {"extra_env": {"A\n": "x"}},
        {"secret_env": {"A": "\ud800"}},
        {"secret_env": {"A=B": "x"}},
        {"outputs": ["\ud800"]},
        {"outputs": ["/etc/*"]},
        {"outputs": ["a/../../*"]},
        {"payload_path": ["python", "\ud800"]},
        {"payload_path": ["python", "-c", "\0"]},
    ],
    ids=repr,
)
def test_what_no_process_can_have_is_refused_before_anything_starts(
    arguments: dict[str, Any], compute: ComputeResource, base: Path
) -> None:
    failure = run_asset(compute, arguments.pop("payload_path", "python -V"), **arguments).failure
    assert failure.kind == "configuration" and len((failure.description or "").splitlines()) == 1
    assert not failure.allow_retries and not (base / "runs").exists()


@given(
    labels=st.dictionaries(st.text(string.printable, min_size=1, max_size=8), st.text(max_size=8), max_size=3),
    resources=st.dictionaries(st.text(max_size=8), st.floats(0, 9), max_size=3),
)
@example(labels={"a": "b,c=d"}, resources={})
@example(labels={"a=b": "c"}, resources={'"': 1.0, "--x": 2.0})
@settings(max_examples=60, deadline=None)
def test_labels_and_resources_are_the_ones_that_ray_gets(labels: dict[str, str], resources: dict[str, float]) -> None:
    from dagster_rayslurm.runtime.node.network import Ports
    from dagster_rayslurm.runtime.node.resources import detect

    try:
        launcher = RayLauncher(labels=labels, resources=resources)
    except ValueError:
        return
    found = start_arguments(launcher.ray_spec(), detect({}), Ports(1, 2, ()), "/tmp/r", None)
    given_labels = [word.partition("=")[2] for word in found if word.startswith("--labels=")]
    assert dict(pair.split("=") for text in given_labels for pair in text.split(",")) == labels
    given_resources = [json.loads(word.partition("=")[2]) for word in found if word.startswith("--resources=")]
    assert (given_resources or [{}]) == [resources]


@pytest.mark.parametrize("field", ["component_id", "name"])
@pytest.mark.parametrize("text", [text for text in HOSTILE if text])
def test_names_that_are_parts_of_paths_are_names(field: str, text: str) -> None:
    kind: Any = HetComponent if field == "component_id" else SessionConfig
    with pytest.raises(ValueError, match=r"is not a name|control character"):
        kind(**{field: text})


# ---- What Slurm makes of it

ASKED: dict[str, str | list[str]] = {
    "account": "{}",
    "constraint": "{}",
    "exclude": "{}",
    "nodelist": "{}",
    "partition": "{}",
    "qos": "{}",
    "reservation": "{}",
    "extra_sbatch": ["--mail-user={}", "--mail-type={}"],
    "switches": "{}",
}


@pytest.mark.parametrize("field", list(ASKED))
def test_slurm_refuses_what_it_does_not_know_in_a_sentence(field: str, site: Site, slurm_compute: Make, script: Any) -> None:
    hostile = f"$(touch {MARK}-{field})`id`' #SBATCH --wrap=x"
    form = ASKED[field]
    value = form.format(hostile) if isinstance(form, str) else [each.format(hostile) for each in form]
    ran = run_asset(slurm_compute({field: value}, queue_timeout=60), script("pass"), uses_pipes=False)
    if not ran.failures:
        return  # Slurm takes anything where it has no use for it, such as an account without accounting.
    sentence = ran.failure.description or ""
    assert ran.failure.kind in ("submission", "configuration") and not ran.failure.allow_retries, sentence
    assert len(sentence.splitlines()) == 1 and "Traceback" not in sentence, sentence
