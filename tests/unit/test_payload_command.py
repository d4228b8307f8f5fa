"""Parsing of `payload_path`, and its errors before submission."""

import os
import re
from pathlib import Path

import pytest

from dagster_rayslurm import BashLauncher, Launcher, RayLauncher
from dagster_rayslurm.backends.payload_files import pack
from dagster_rayslurm.config import check_environment
from dagster_rayslurm.plan import Plan, make_plan
from dagster_rayslurm.plan import parse_payload as parse_payload_and_script


def plan_of(payload: str | list[str], launcher: Launcher | None = None, **fields: object) -> Plan:
    limits = {"max_output_bytes": 1, "max_stdio_bytes": 1}
    return make_plan(payload_path=payload, launcher=launcher or BashLauncher(), nonce="n", **limits, **fields)  # type: ignore[arg-type]


def parse_payload(payload: str | list[str]) -> list[str]:
    return parse_payload_and_script(payload)[0]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a b").mkdir()
    for name in ("ok.py", "a b/ok.py"):
        (tmp_path / name).write_text("print(1)")
    return tmp_path


def test_a_script_may_have_arguments(here: Path) -> None:
    assert parse_payload("ok.py --epochs 3 --name 'a b'") == ["python", f"{here}/ok.py", "--epochs", "3", "--name", "a b"]
    assert parse_payload("'a b/ok.py' 3") == ["python", f"{here}/a b/ok.py", "3"]
    assert parse_payload("a b/ok.py") == ["python", f"{here}/a b/ok.py"]
    assert parse_payload_and_script("ok.py --epochs 3")[1] == f"{here}/ok.py"
    assert parse_payload_and_script("python -m ok")[1] is None


def test_a_script_with_arguments_is_sent_to_the_cluster(here: Path) -> None:
    cargo = pack(plan_of(f"{here}/ok.py --epochs 3"), "/base", "/data")
    python, script, *arguments = cargo.plan.payload.argv
    assert "script" in cargo.bundles and (python, arguments) == ("python", ["--epochs", "3"])
    assert script.startswith("/base/") and os.path.basename(script) == "ok.py"


@pytest.mark.parametrize(
    ("payload", "says"),
    [
        ("cd x && python ok.py", """'cd' needs a shell, .* write ["bash", "-c", 'cd x && python ok.py']"""),
        (
            "module load cuda",
            "'module' needs a shell, .*, with \"-lc\" for modules, or load them in the environment's activate.sh",
        ),
        ("EPOCHS=3 python -m train", "'EPOCHS=3' needs a shell, .* or pass variables with extra_env"),
        ("python -m train > log.txt", "'>' needs a shell"),
        ("python -m train 2>&1", "'2>&1' needs a shell"),
        ("python -m train | tee log", "'|' needs a shell"),
        ("python -m train; echo done", "'train;' needs a shell"),
        ("ok.py --data $SCRATCH/x", "'$SCRATCH/x' needs a shell"),
        ('ok.py "${SCRATCH}/x"', "needs a shell"),
        ("echo `date`", "'`date`' needs a shell"),
        ("trian.py --epochs 3", "there is no file 'trian.py'"),
        ("/opt/site/run", "there is no file '/opt/site/run' .*; if it is on the cluster only, write a list: ['/opt/site/run']"),
        ("/opt/site/run.py", "write a list: ['python', '/opt/site/run.py']"),
    ],
)
def test_unusable_payloads_are_refused(here: Path, payload: str, says: str) -> None:
    with pytest.raises(ValueError, match="payload_path") as caught:
        parse_payload(payload)
    assert all(part in str(caught.value) for part in says.split(".*"))


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        ("python -m x --url http://h/?a=1&b=2", ["python", "-m", "x", "--url", "http://h/?a=1&b=2"]),
        ("python -c 'a | b; c > $d'", ["python", "-c", "a | b; c > $d"]),
        ('python -c "a | b; c > d"', ["python", "-c", "a | b; c > d"]),
        ("python -m x --expr='$y z' N=3 ^a$", ["python", "-m", "x", "--expr=$y z", "N=3", "^a$"]),
        (r"echo \$HOME \;", ["echo", "$HOME", ";"]),
        ("/opt/site/run 3", ["/opt/site/run", "3"]),
    ],
)
def test_quoted_text_needs_no_shell(payload: str, words: list[str]) -> None:
    assert parse_payload(payload) == words


def test_a_list_is_used_unchanged() -> None:
    for words in (["cd", "x", "&&"], ["/opt/site/run"], ["bash", "-lc", "cd x && ls > $HOME/a"]):
        assert parse_payload(words) == words


def test_arguments_and_variables_that_are_too_long_are_refused() -> None:
    most = 2**17 - 1
    assert check_environment({"A": "x" * (most - 2)}, "extra_env")
    with pytest.raises(ValueError, match=r"extra_env\['A'\] has 131,072 bytes, and Linux passes at most 131,071 .* extra_files"):
        check_environment({"A": "x" * (most - 1)}, "extra_env")
    with pytest.raises(ValueError, match=r"secret_env\['A'\]"):
        check_environment({"A": "é" * (most // 2)}, "secret_env")
    assert parse_payload(["echo", "x" * most])
    with pytest.raises(ValueError, match="payload_path: word 1 has 131,072 bytes"):
        parse_payload(["echo", "x" * (most + 1)])


def test_the_variables_for_ray_are_limited_together() -> None:
    env = dict.fromkeys("ABCD", "x" * 40000)
    assert plan_of(["true"], env=env)
    with pytest.raises(ValueError, match=r"extra_env: what Ray gets of all variables together has 160,\d+ bytes"):
        plan_of(["true"], RayLauncher(), env=env)
    assert plan_of(["true"], RayLauncher(), env={name: env[name] for name in "ABC"})


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"#!/bin/bash\necho 1\n", "is a shell script; write [\"bash\", 'step'] and extra_files=['PATH']"),
        (b"#!/usr/bin/env -S sh -e\n", "is a shell script"),
        (b"#!/bin/sh\nmodule load cuda\nexec python train.py\n", "is a shell script"),
        (b"\x7fELF\x02\x01", "is a binary; write ['./step'] and extra_files=['PATH']"),
    ],
)
def test_a_file_that_python_cannot_run(content: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "step"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(says.replace("PATH", str(path)))):
        plan_of(str(path))


@pytest.mark.parametrize(
    "content", ["#!/usr/bin/env python3\n", "#!/opt/sh/bin/python\n", "#!/bin/sh\n'''exec' /long/python \"$0\" \"$@\"\n", "1\n"]
)
def test_a_python_script_may_have_any_name(content: str, tmp_path: Path) -> None:
    (tmp_path / "step").write_text(content)
    assert plan_of(str(tmp_path / "step")).payload.argv == ["python", str(tmp_path / "step")]
