"""The `rayslurm` command, on run directories of real runs."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from dagster_rayslurm import ComputeResource
from dagster_rayslurm.cli import main

from ..conftest import run_asset

TROUBLES = Path(__file__).parents[2] / "docs" / "troubleshooting.md"


@pytest.fixture
def kept(compute: ComputeResource, script: Any, base: Path) -> Path:
    run_asset(compute, script("import sys; print('to stdout'); print('to stderr', file=sys.stderr); sys.exit(5)"))
    return next((base / "runs").iterdir())


def invoke(base: Path, *arguments: str) -> Any:
    return CliRunner().invoke(main, ["--base", str(base), *arguments])


def test_runs_are_listed_shown_and_their_output_printed(kept: Path, base: Path) -> None:
    assert kept.name[:12] in invoke(base, "ps", "--all").output
    row = json.loads(invoke(base, "ps", "--all", "--json").stdout)
    assert row["name"] == kept.name and row["state"] == "ended" and invoke(base, "ps", "--json").stdout == ""
    records = [json.loads(line) for line in invoke(base, "show", kept.name[:8], "--json").output.splitlines()]
    types = [record["type"] for record in records if record["type"] != "usage"]
    assert types == ["start", "context", "phase", "end"] and records[-1]["exit_code"] == 5
    logs = invoke(base, "logs", kept.name)
    assert "to stdout" in logs.stdout and "to stderr" in logs.stderr


def test_an_ambiguous_or_unknown_run_is_explained(kept: Path, base: Path) -> None:
    other = base / "runs" / f"{kept.name}x"
    other.mkdir()
    (other / "status.json").write_bytes((kept / "status.json").read_bytes())
    for name, says in (("nope", "nothing on this machine"), (kept.name[:4], "2 runs, sessions or jobs")):
        answer = invoke(base, "logs", name)
        assert answer.exit_code == 1 and says in answer.output and ("rayslurm ps" in answer.output or kept.name in answer.output)


def test_a_run_without_a_record_is_explained(base: Path) -> None:
    (base / "runs" / "empty").mkdir(parents=True)
    assert "cannot be read: No such file" in invoke(base, "show", "empty").output
    assert json.loads(invoke(base, "ps", "--all", "--json").stdout)["state"] == "unknown"


def test_the_command_is_installed() -> None:
    said = subprocess.run([Path(sys.executable).parent / "rayslurm", "--version"], capture_output=True, text=True, check=True)
    assert said.stdout.startswith("rayslurm, version ")


def test_messages_of_runs_are_not_markup(base: Path) -> None:
    run = base / "runs" / "abc-step-0123"
    run.mkdir(parents=True)
    (base / "runs" / "no run").write_text("")
    (run / "status.json").write_text(json.dumps({"state": "ended", "at": 1.0, "message": "it wants [/this] and [red]"}))
    listed = invoke(base, "ps", "--all")
    assert listed.exit_code == 0, listed.exception
    assert "[/this]" in listed.output and "[red]" in listed.output and "no run" not in listed.output


def test_texts_of_a_table_stay_as_they_are_and_fit_the_terminal(base: Path) -> None:
    run = base / "runs" / "abc-step-0123"
    run.mkdir(parents=True)
    (run / "status.json").write_text(json.dumps({"state": "ended", "at": 1.0, "message": "a:b:c → é"}))
    assert "a:b:c → é" in invoke(base, "ps", "--all").output
    for words in (["--json"], []):
        command = [sys.executable, "-m", "dagster_rayslurm.cli", "--base", str(base), "ps", "--all", "--here", *words]
        done = subprocess.run(command, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "latin-1"})
        assert done.returncode == 0 and "a:b:c ? é".encode("latin-1") in done.stdout, done


@pytest.mark.parametrize(("option", "code"), [([], 1), (["-f"], 125)])
def test_logs_that_follow_nothing_do_not_exit_as_the_payload(base: Path, option: list[str], code: int) -> None:
    done = invoke(base, "logs", *option, "nope")
    assert done.exit_code == code and done.stderr.startswith("Error: nothing on this machine is called 'nope' (")


def test_without_a_cluster_the_empty_list_says_how_to_name_one(base: Path) -> None:
    hint = "no cluster is configured; set SLURM_EDGE_NODE_HOST, name a cluster in rayslurm.toml"
    for words in (["ps"], ["show", "nope"], ["dashboard", "nope"]):
        assert hint in invoke(base, *words).stderr, words
    assert hint not in invoke(base, "ps", "--here").stderr


def test_a_run_of_submit_is_below_the_given_base(base: Path) -> None:
    assert invoke(base, "submit", "--mode", "local", "--no-ray", "--name", "burn", "--", "false").exit_code == 1
    row = json.loads(invoke(base, "ps", "--all", "--json").stdout)
    assert row["name"].startswith("submit-burn-") and row["directory"].startswith(f"{base}/runs/")
    shown = invoke(base, "show", row["name"]).stdout
    assert re.search(r"elapsed +\d+\.\d s +\n", shown) and re.search(r"peak memory +\d+ MiB", shown), shown


def test_ctrl_c_before_a_run_is_found_ends_logs(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dagster_rayslurm.cli import ps

    def interrupted(ident: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ps, "entries", interrupted)
    assert invoke(base, "logs", "-f", "abc").exit_code == 130


def test_a_wrong_variable_is_one_sentence(monkeypatch: pytest.MonkeyPatch, base: Path) -> None:
    for name, value in (("HOST", "-bad"), ("USER", "two words")):
        monkeypatch.setenv(f"SLURM_EDGE_NODE_{name}", value)
    for command in (["check"], ["session", "list"]):
        done = invoke(base, *command)
        (line,) = done.stderr.splitlines()
        assert done.exit_code == 1 and line.startswith("Error: SSHConnectionResource.host: ") and "pydantic" not in line
        assert "; SSHConnectionResource.user: " in line


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize(
    ("words", "section"),
    [
        (["logs", "nope"], "errors-of-rayslurm"),
        (["logs", "-f", "nope"], "errors-of-rayslurm"),
        (["session", "stop", "nope"], "errors-of-rayslurm"),
        (["submit", "--mode", "local", "--load-env", "x", "--", "true"], "errors-of-rayslurm"),
        (["--remote-base", "/x", "ps"], "connection"),
        (["submit", "--mode", "local", "--command", "true && true"], "errors-of-rayslurm"),
        (["submit", "--mode", "local", "--mem", "many", "--", "true"], "errors-of-rayslurm"),
        (["submit", "--mode", "local", "--detach", "--", "true"], "configuration"),
        (["submit", "--mode", "local", "--no-ray", "--", "false"], "payload"),
    ],
)
def test_in_a_terminal_an_error_links_to_its_section_of_the_page_of_troubles(
    base: Path, monkeypatch: pytest.MonkeyPatch, terminal: bool, words: list[str], section: str
) -> None:
    monkeypatch.setattr("os.isatty", lambda number: terminal and number == 2)
    if section == "connection":
        monkeypatch.setenv("SLURM_EDGE_NODE_HOST", "127.0.0.1")
        monkeypatch.setenv("SLURM_EDGE_NODE_PORT", "1")
    headings = re.findall("^## (.*)$", TROUBLES.read_text(), re.MULTILINE)
    assert section in [heading.lower().replace(" ", "-").replace("`", "") for heading in headings]
    lines = invoke(base, *words).stderr.partition("Error: ")[2].splitlines()
    page = f"See https://github.com/dagster-rayslurm/dagster-rayslurm/blob/main/docs/troubleshooting.md#{section}"
    assert lines[0] and [line for line in lines if "troubleshooting" in line] == [page] * terminal, lines


def test_an_error_of_the_command_line_names_the_help(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.isatty", lambda number: True)
    said = invoke(base, "logs").stderr
    assert "--help" in said and "troubleshooting" not in said


def test_help_needs_no_dagster_and_names_each_command() -> None:
    program = (
        "import sys; from dagster_rayslurm.cli import main; "
        "main(['--help'], standalone_mode=False); print('dagster' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert said.endswith("False\n")
    context = click.Context(main)
    for name in main.list_commands(context):
        command = main.get_command(context, name)
        assert command is not None and command.name == name and f"  {name} " in said
