"""Which cluster the commands of `rayslurm` work on: options, environment variables, rayslurm.toml, the user's definitions."""

import os
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from dagster_rayslurm.cli import main
from dagster_rayslurm.cli.cluster import Cluster, find_cluster
from dagster_rayslurm.cli.common import one_sentence_errors
from dagster_rayslurm.cli.options import all_cluster_options
from dagster_rayslurm.ssh.pool import connection_to

TOML = """
default = "small"

[clusters.small]
pre_deployed_env_path = "/opt/ray"
slurm.ssh = { host = "small.example", user = "me" }
slurm.queue = { partition = "compute" }

[clusters.large]
environment = { kind = "pre-deployed", path = "~/env" }
default_launcher = { kind = "ray", num_gpus_per_node = 4 }

[clusters.large.slurm]
remote_base = "/scratch/me"

[clusters.large.slurm.ssh]
host = { env = "LARGE_HOST" }
jump_host = { host = "gate" }

[clusters.here]
"""

DEFINITIONS = """
import dagster as dg
from dagster_rayslurm import ComputeResource, SlurmResource, SSHConnectionResource

def cluster(host):
    return ComputeResource(mode=dg.EnvVar("MODE"), slurm=SlurmResource(ssh=SSHConnectionResource(host=host)))

compute = cluster("one")
one = dg.Definitions(resources={"main": cluster("two"), "other": 3})
both = dg.Definitions(resources={"main": cluster("three"), "second": cluster("four")})
local = dg.Definitions(resources={"main": ComputeResource()})

@dg.definitions
def lazy():
    return dg.Definitions(resources={"late": cluster("five")})
"""


@pytest.fixture(autouse=True)
def no_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("SLURM_EDGE_NODE_", "RAYSLURM_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    (tmp_path / "project" / "below").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "project" / "below")


Find = Callable[..., Any]


@pytest.fixture
def find() -> Find:
    """A function that finds the cluster for a command line; returns it, or the text of the error."""

    def run(*arguments: str) -> Any:
        found: list[Cluster | None] = []

        @click.group()
        @all_cluster_options
        def group() -> None: ...

        @group.command()
        @all_cluster_options
        def command() -> None:
            with one_sentence_errors():
                cluster = find_cluster()
                found.append(cluster)
                assert cluster is None or cluster.resource  # Made when it is asked for.

        done = CliRunner().invoke(group, list(arguments))
        assert isinstance(done.exception, (SystemExit, type(None))), done.exception
        return found[0] if done.exit_code == 0 else done.output

    return run


def host(cluster: Any) -> str:
    assert isinstance(cluster, Cluster), cluster
    return cluster.slurm.ssh.host if cluster.slurm.ssh else ""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    path = tmp_path / "project" / "rayslurm.toml"
    path.write_text(TOML)
    return path


def test_without_configuration_there_is_no_cluster(find: Find) -> None:
    assert find("command") is None
    done = CliRunner().invoke(main, ["check"])
    assert done.exit_code == 1 and "no cluster is configured; set SLURM_EDGE_NODE_HOST" in done.output


def test_environment_variables_name_a_cluster(find: Find, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SLURM_EDGE_NODE_HOST": "edge", "RAYSLURM_ENV_PATH": "/opt/ray", "RAYSLURM_REMOTE_BASE": "~/b"}.items():
        monkeypatch.setenv(name, value)
    found = find("command")
    assert host(found) == "edge" and found.resource.pre_deployed_env_path == "/opt/ray" and found.resource.mode == "slurm"
    assert found.slurm.remote_base == "~/b" and find("command", "--remote-base", "/c").slurm.remote_base == "/c"
    assert host(find("command", "--cluster", "small")) == "small.example"
    assert "is relative; write an absolute path" in find("--remote-base", "c", "command")
    monkeypatch.setenv("OTHER_HOST", "other")
    assert host(find("--prefix", "OTHER", "command")) == "other"
    assert "the environment variable THIRD_HOST is not set" in find("command", "--prefix", "THIRD_")
    monkeypatch.setenv("RAYSLURM_CLUSTER", "small")
    assert host(find("command")) == "small.example" and host(find("command", "--prefix", "OTHER")) == "other"
    monkeypatch.setenv("RAYSLURM_FROM", "nowhere:compute")
    assert host(find("command", "--prefix", "OTHER")) == "other"


def test_a_file_names_clusters(find: Find, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = find("command")
    assert host(found) == "small.example" and found.slurm.queue.partition == "compute" and "small" in found.source
    assert "LARGE_HOST is not set" in find("--cluster", "large", "command")
    monkeypatch.setenv("LARGE_HOST", "large.example")
    for arguments in (("--cluster", "large", "command"), ("command", "--cluster", "large")):
        found = find(*arguments)
        assert host(found) == "large.example" and found.slurm.ssh.jump_host.host == "gate"
        assert found.resource.environment.path == "~/env" and found.resource.default_launcher.num_gpus_per_node == 4
    assert find("--cluster", "here", "command").slurm.ssh is None
    monkeypatch.setenv("RAYSLURM_CLUSTER", "here")
    assert find("command").slurm.ssh is None and host(find("command", "--cluster", "small")) == "small.example"


def test_the_file_of_the_documentation_is_valid(find: Find, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "terminal.md").read_text()
    (text,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    project.write_text(text)
    monkeypatch.setenv("KEY_PASSPHRASE", "s3cret")
    found = find("command")
    assert found.ssh.host == "login.example.org" and found.ssh.key_passphrase == "s3cret" and found.remote_base.startswith("/")
    assert found.slurm.queue.account == "study" and found.resource.environment.kind == "uv"
    assert find("--cluster", "here", "command").resource.pre_deployed_env_path == "/opt/ray"


def test_the_way_to_a_cluster_and_its_resource_share_a_connection(find: Find, project: Path) -> None:
    project.write_text("[clusters.a]\nslurm.ssh = { host = 'a', port = 2222, jump_host = { host = 'gate', user = 'me' } }\n")
    found = find("command")
    assert connection_to(found.slurm.ssh) is found.connection


def test_the_users_own_file_counts_last(find: Find, tmp_path: Path) -> None:
    own = tmp_path / "home" / ".config" / "rayslurm"
    own.mkdir(parents=True)
    (own / "rayslurm.toml").write_text('[clusters.own]\nslurm.ssh.host = "own.example"\n')
    assert host(find("command")) == "own.example"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = ", "is not TOML"),
        ("[cluster.a]", "'cluster' is unknown; the file has `default` and tables [clusters.NAME]"),
        ("default = 'a'", "has no cluster; add a table [clusters.NAME]"),
        ("default = 'b'\n[clusters.a]", "has no cluster 'b'; there are 'a'"),
        ("default = ['a']\n[clusters.a]", "`default` is ['a']; write the name of a cluster there"),
        ("default = ''\n[clusters.a]\n[clusters.b]", "has the clusters 'a', 'b'; choose one with --cluster"),
        ("[clusters.a]\nslurm = 3", "slurm is no table"),
        ("[clusters.a]\nslurm.ssh = 'login'", "slurm.ssh is no table"),
        ("[clusters.a]\n[clusters.b]", "has the clusters 'a', 'b'; choose one with --cluster"),
        ("[clusters.a]\nslurm.hosts = 'x'", "cluster 'a' in "),
        ("[clusters.a]\nslurm.ssh.host = 'x:1'", "SSHConnectionResource.host: 'x:1' is more than a host"),
        ("[clusters.a]\ndefault_launcher.kind = 'r'", "default_launcher.kind: 'r' is not one of 'ray', 'bash'"),
        ("[clusters.a]\nmodes = 'slurm'", "ComputeResource has no field 'modes'; did you mean mode?"),
    ],
)
def test_mistakes_in_a_file_are_one_sentence(find: Find, project: Path, text: str, says: str) -> None:
    project.write_text(text)
    (line,) = find("command").splitlines()
    assert line.startswith("Error: ") and says in line and "pydantic" not in line


def test_the_file_of_another_user_is_refused(find: Find, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid():
        pytest.skip("giving a file away needs root")
    os.chown(project, 12345, 12345)
    assert "belongs to another user and is not read" in find("command")


@pytest.fixture
def definitions(monkeypatch: pytest.MonkeyPatch) -> str:
    Path("my_definitions.py").write_text(textwrap.dedent(DEFINITIONS))
    monkeypatch.setenv("MODE", "local")
    return "my_definitions.py"


@pytest.mark.parametrize(
    ("name", "which"),
    [(":compute", "one"), (":one", "two"), (":both.second", "four"), (":lazy", "five"), (":late", "five")],
)
def test_definitions_name_a_resource(find: Find, definitions: str, name: str, which: str) -> None:
    found = find("command", "--from", definitions + name)
    assert host(found) == which and found.resource.mode == "local"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("my_definitions.py:both", "name one resource; there are 'main', 'second'"),
        ("my_definitions.py:nothing", "there is no resource 'nothing'; there are 'main', 'second', 'late'"),
        ("my_definitions.py:local", "the resource has no cluster; set ComputeResource(slurm=SlurmResource(…))"),
        ("no_such_module:x", "no_such_module cannot be imported: ModuleNotFoundError"),
        ("no/file.py:x", "there is no file"),
        ("broken.py:lazy", "--from: the definitions cannot be loaded: KeyError: 'HOST'"),
    ],
)
def test_definitions_that_name_none(find: Find, definitions: str, source: str, says: str) -> None:
    Path("broken.py").write_text(DEFINITIONS.replace("def lazy():\n", "def lazy():\n    {}['HOST']\n"))
    (line,) = find("command", "--from", source).splitlines()
    assert line.startswith("Error: ") and says in line


def test_two_sources_exclude_each_other(find: Find, definitions: str, project: Path) -> None:
    for other in (("--from", "my_definitions.py:one"), ("--prefix", "OTHER")):
        assert "--from, --cluster and --prefix exclude each other" in find("--cluster", "small", "command", *other)
