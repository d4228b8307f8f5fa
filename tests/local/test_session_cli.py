"""`rayslurm session` on this machine, and its errors for an edge node that cannot be used."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from dagster_rayslurm import ComputeResource, SessionConfig
from dagster_rayslurm.backends.base import Layout
from dagster_rayslurm.backends.sessions.local import sessions_base
from dagster_rayslurm.cli import main

from ..conftest import run_asset, small_ray

PAYLOAD = "import ray; ray.init()"


def rayslurm(base: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_EDGE_NODE")}
    command = [str(Path(sys.executable).with_name("rayslurm")), "--base", str(base), "session", *arguments]
    return subprocess.run(command, env={**environ, **variables}, capture_output=True, text=True, timeout=100)


def invoke(base: Path, *arguments: str, **variables: str) -> Result:
    """As `rayslurm`, in this process: a process of its own takes seconds to start."""
    without = dict.fromkeys(name for name in os.environ if name.startswith("SLURM_EDGE_NODE"))
    return CliRunner(env={**without, **variables}).invoke(main, ["--base", str(base), "session", *arguments])


@pytest.mark.ray
def test_a_local_session_is_listed_shown_and_stopped(base: Path, script: Any) -> None:
    session = SessionConfig(name="mine", idle_timeout=300)
    compute = ComputeResource(local_base=str(base), default_launcher=small_ray(), enable_cluster_reuse=True, session=session)
    ran = run_asset(compute, script(PAYLOAD), uses_pipes=False)
    cluster_id = ran.completed[0].cluster_id

    (row,) = map(json.loads, invoke(base, "list", "--json").stdout.splitlines())
    assert row["key"].startswith("mine-") and row["cluster_id"] == cluster_id and row["state"] == "ready"
    assert (row["running"], row["waiting"], row["served"], row["place"]) == (0, 0, 1, "this machine")
    assert 0 <= row["idle"] < 30
    listed = rayslurm(base, "list", COLUMNS="200")
    assert listed.returncode == 0 and cluster_id in listed.stdout and "ready" in listed.stdout

    shown = json.loads(invoke(base, "show", "mine", "--json").stdout)
    assert shown["ray_version"] and shown["payloads"] == [] and row["key"] in shown["directory"]
    assert cluster_id in invoke(base, "show", cluster_id).stdout

    stopped = invoke(base, "stop", cluster_id)
    assert stopped.exit_code == 0 and stopped.stdout == f"ended the session {row['key']} on this machine\n"
    assert invoke(base, "list", "--json").stdout == ""
    again = invoke(base, "stop", cluster_id)
    assert again.exit_code == 1 and again.stderr.startswith(f"Error: there is no session '{cluster_id}' or has ended")


@pytest.mark.parametrize("command", [("list",), ("show", "x"), ("stop", "x")])
@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"SLURM_EDGE_NODE_HOST": "127.0.0.1", "SLURM_EDGE_NODE_PORT": "1"}, "nothing listens there"),
        ({"SLURM_EDGE_NODE_HOST": "edge", "SLURM_EDGE_NODE_PORT": "abc"}, "SLURM_EDGE_NODE_PORT is 'abc', not an integer"),
        ({"SLURM_EDGE_NODE_HOST": "-oProxyCommand=x"}, "is not a name of a host"),
        ({"SLURM_EDGE_NODE_HOST": "edge", "RAYSLURM_REMOTE_BASE": "here"}, "--remote-base: 'here' is relative"),
    ],
)
def test_a_bad_edge_node_is_one_sentence(base: Path, command: tuple[str, ...], variables: dict[str, str], says: str) -> None:
    said = invoke(base, *command, SLURM_EDGE_NODE_CONNECT_TIMEOUT="3", **variables)
    assert said.exit_code == 1 and says in said.stderr and said.stdout == ""
    assert said.stderr.startswith("Error: ") and said.stderr.count("\n") == 1


@pytest.mark.parametrize("ident", ["", "nope", "[bold]", "../x"])
def test_an_unknown_session_is_one_sentence(base: Path, ident: str) -> None:
    for command in ("show", "stop"):
        said = invoke(base, command, ident)
        assert said.exit_code == 1 and said.stderr.startswith("Error: there is no session"), said.stderr
    assert invoke(base, "list", "--json").stdout == ""


def test_a_damaged_announcement_is_no_session(base: Path) -> None:
    for number, text in enumerate(("", "{", "[]", '{"port": 5}', '{"key": "/nowhere", "cluster_id": "x"}')):
        directory = Path(sessions_base(Layout(base))) / "sessions" / f"x-{number}" / "1"
        directory.mkdir(parents=True)
        (directory / "session.json").write_text(text)
    said = invoke(base, "list", "--all", "--json")
    assert said.exit_code == 0 and said.stdout == "" and said.stderr == ""
