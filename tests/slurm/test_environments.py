"""Environments that are sent to the stack, where nothing is prepared for them, and those of its modules."""

import hashlib
import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from dagster_rayslurm import CommandEnvironment, ComputeResource, SSHConnectionResource, UvEnvironment
from dagster_rayslurm.environments import platforms, send, wheels

from ..conftest import pipes_script, run_asset, small_ray
from ..stack.access import Stack
from ..unit.test_sent_environments import write_helper
from .fixtures import Site

pytestmark = pytest.mark.timeout(400)

SAYS_WHERE = pipes_script("""
import json, ray
ray.init()

@ray.remote
def there() -> list:
    import os, shutil, sys
    import helper
    return [sys.prefix, helper.version, ray.__version__, shutil.which("python"), os.uname().nodename]

wanted = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
found = [ray.get(there.options(scheduling_strategy=wanted(each["NodeID"], soft=False)).remote()) for each in ray.nodes()]
pipes.report_asset_materialization(metadata={"found": json.dumps(sorted(found, key=lambda each: each[-1]))})
""")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of this machine, but for that of uv."""
    asked = subprocess.run([wheels.find_uv(), "cache", "dir"], capture_output=True, text=True, check=True)
    monkeypatch.setenv("UV_CACHE_DIR", asked.stdout.strip())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    send._recipes.clear()
    return tmp_path / "cache"


def project(directory: Path, *dependencies: str) -> UvEnvironment:
    """A project with a package of its own, and its lock."""
    write_helper(directory / "helper")
    (directory / "pyproject.toml").write_text(
        '[project]\nname = "study"\nversion = "1"\nrequires-python = ">=3.10"\n'
        f"dependencies = {json.dumps([*dependencies, 'helper'])}\n[tool.uv.sources]\nhelper = {{ path = 'helper' }}\n"
    )
    subprocess.run([wheels.find_uv(), "lock", "--quiet"], cwd=directory, check=True)
    return UvEnvironment(project=str(directory))


def test_a_lock_file_is_enough(
    slurm_compute: Callable[..., ComputeResource], site: Site, script: Any, tmp_path: Path, cache: Path, capfd: Any
) -> None:
    """Ray on two nodes, out of an environment that nobody prepared; the second run sends nothing."""
    environment = project(tmp_path / "study", f"ray[default]=={ray.__version__}", "dagster-pipes")
    compute = slurm_compute(
        queue={"num_nodes": 2, "mem": "2G"}, pre_deployed_env_path=None, environment=environment, default_launcher=small_ray()
    )
    payload = script(SAYS_WHERE)
    first, second = (run_asset(compute, payload) for _ in range(2))
    (prefix,) = site.sh('find "$1/prefixes" -maxdepth 1 -type l', site.base).split()
    for ran in (first, second):
        assert not ran.failures, ran.failures
        found = json.loads(ran.metadata["found"])
        assert [each[:3] for each in found] == [[prefix, "first", ray.__version__]] * 2
        assert [each[-1] for each in found] == ["c1", "c2"]
    lines = [line for line in capfd.readouterr().err.splitlines() if "[rayslurm] environment: " in line]
    said = [line for line in lines if "environment: fetched " not in line]  # The progress of a slow download.
    assert len(said) == 2 and "environment: sending " in said[0] and f"environment: made {prefix} in " in said[1], said


FAILS_ON_C2 = ["sh", "-c", '[ "$(uname -n)" != c2 ] || { echo "tar: No space left on device" >&2; exit 2; }']


def test_nodes_have_copies(
    slurm_compute: Callable[..., ComputeResource], site: Site, script: Any, tmp_path: Path, cache: Path, capfd: Any
) -> None:
    """Ray runs from each node's own disk; where no copy can be made, from the shared environment, and Dagster says so."""
    environment = project(tmp_path / "study", f"ray[default]=={ray.__version__}", "dagster-pipes")
    compute = slurm_compute(
        queue={"num_nodes": 2, "mem": "2G"},
        pre_deployed_env_path=None,
        environment=environment.model_copy(update={"stage": "node-local"}),
        default_launcher=small_ray(),
    )
    payload = script(SAYS_WHERE)
    ran = run_asset(compute, payload)
    assert not ran.failures, ran.failures
    found = json.loads(ran.metadata["found"])
    assert [each[-1] for each in found] == ["c1", "c2"] and len({each[0] for each in found}) == 2
    assert all(re.fullmatch("/tmp/rs-[0-9a-f]{8}/environment", prefix) for prefix, *_ in found), found
    assert "node-local: node c1 made its own copy in " in capfd.readouterr().err

    (prefix,) = site.sh('find "$1/prefixes" -maxdepth 1 -type l', site.base).split()
    recipe = json.loads(site.connection.read(f"{prefix}/rayslurm.json", 0, 2**20))
    recipe["node_local"].append(FAILS_ON_C2)
    site.connection.write(f"{prefix}/rayslurm.json", json.dumps(recipe).encode(), mode=0o600)
    ran = run_asset(compute, payload)
    assert not ran.failures, ran.failures
    found = json.loads(ran.metadata["found"])
    assert found[0][0].startswith("/tmp/rs-") and found[1][0] == prefix
    said = capfd.readouterr().err
    expected = "node c2 uses the shared environment, as it cannot be copied: tar: No space left on device"
    assert "WARNING" in next(line for line in said.splitlines() if expected in line)


MODULE_OF_TCL = "#%Module\nprepend-path PATH {python}/bin\nprepend-path PYTHONPATH {base}/modules\nsetenv STUDY_OF {name}\n"
MODULE_OF_LUA = (
    'prepend_path("PATH", "{python}/bin")\nprepend_path("PYTHONPATH", "{base}/modules")\nsetenv("STUDY_OF", "{name}")\n'
)
SYSTEMS = {
    "modules": ([], "study", MODULE_OF_TCL),
    "lmod": (["source /usr/share/lmod/lmod/init/bash"], "study.lua", MODULE_OF_LUA),
}


@pytest.mark.parametrize("system", SYSTEMS)
def test_modules_that_a_site_has(slurm_compute: Callable[..., ComputeResource], site: Site, script: Any, system: str) -> None:
    """Environment Modules, which a login shell on the stack has, and Lmod."""
    first, name, text = SYSTEMS[system]
    module = text.format(python=site.env_path, base=site.base, name=system)
    texts = {f"modules/{name}": module, "modules/helper.py": "import os\nversion = os.environ['STUDY_OF']\n"}
    site.sh('mkdir -p "$1/modules"', site.base)
    for place, content in texts.items():
        site.connection.write(f"{site.base}/{place}", content.encode(), mode=0o644)
    commands = [*first, f"module use {site.base}/modules", "module load study"]
    compute = slurm_compute(
        queue={"num_nodes": 2, "mem": "2G"},
        pre_deployed_env_path=None,
        environment=CommandEnvironment(commands=commands),
        default_launcher=small_ray(),
    )
    ran = run_asset(compute, script(SAYS_WHERE))
    assert not ran.failures, ran.failures
    found = json.loads(ran.metadata["found"])
    assert [each[:4] for each in found] == [[site.env_path, system, ray.__version__, f"{site.env_path}/bin/python"]] * 2

    missing = CommandEnvironment(commands=[*commands[:-1], "module load nothing-of-the-kind"])
    before = site.jobs()  # The first job may still end.
    failure = run_asset(compute, script(SAYS_WHERE), environment=missing).failure
    assert failure.kind == "environment"
    said = failure.description or ""
    assert " the command `module load nothing-of-the-kind` of the environment failed with exit code 1: " in said, said
    assert "\n" not in said and "nothing-of-the-kind" in said.rpartition("exit code 1: ")[2], said
    assert set(site.jobs()) <= set(before)


@pytest.fixture
def python_of_the_nodes(stack: Stack) -> Iterator[str]:
    """A Python that the edge node lacks."""
    copy = (
        'real=$(readlink -f /usr/bin/python3); mkdir -p "$1/bin" "$1/lib"; cp "$real" "$1/bin/python3"; '
        'cp -r "/usr/lib/${real##*/}" "$1/lib/"'
    )
    for node in ("c1", "c2"):
        stack.exec(node, ["sh", "-c", copy, "sh", "/opt/only"])
    yield "/opt/only/bin/python3"
    for node in ("c1", "c2"):
        stack.exec(node, ["rm", "-rf", "/opt/only"])


def test_it_is_made_for_the_compute_nodes(
    slurm_compute: Callable[..., ComputeResource],
    site: Site,
    script: Any,
    tmp_path: Path,
    cache: Path,
    python_of_the_nodes: str,
    capfd: Any,
) -> None:
    """With a Python that only they have: the environment is made and looked at there."""
    environment = project(tmp_path / "study", "dagster-pipes").model_copy(update={"python": python_of_the_nodes})
    compute = slurm_compute(pre_deployed_env_path=None, environment=environment)
    payload = script(pipes_script("import sys; pipes.report_asset_materialization(metadata={'base': sys.base_prefix})"))
    ran = run_asset(compute, payload)
    assert not ran.failures, ran.failures
    assert ran.metadata["base"] == "/opt/only"
    said = capfd.readouterr().err
    assert "it is made on a compute node" in said

    of_the_edge = slurm_compute(pre_deployed_env_path=None, environment=environment, auto_detect_platform=False)
    failure = run_asset(of_the_edge, payload).failure
    assert f"lacks Python {python_of_the_nodes} " in (failure.description or ""), failure.description
    elsewhere = run_asset(
        slurm_compute({"partition": "gpu"}, pre_deployed_env_path=None, environment=environment), payload
    ).failure
    assert f"partition gpu of {site.connection.place} lacks Python" in (elsewhere.description or ""), elsewhere.description
    assert not site.jobs()


def test_nodes_that_are_busy(
    slurm_compute: Callable[..., ComputeResource],
    site: Site,
    script: Any,
    tmp_path: Path,
    cache: Path,
    capfd: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody waits for them: the environment is for the platform of the edge node then, and the log says so."""
    monkeypatch.setattr(platforms, "_PATIENCE", 1)
    site.sh("sbatch --quiet --partition=compute --nodes=2 --exclusive --time=1 --output=/dev/null --wrap='sleep 6'")
    ran = run_asset(
        slurm_compute(pre_deployed_env_path=None, environment=project(tmp_path / "study", "dagster-pipes")),
        script(pipes_script("import helper")),
    )
    assert not ran.failures, ran.failures
    assert "it is made for the platform of the edge node, as that of partition compute" in capfd.readouterr().err


PACK = """
real=$(readlink -f /usr/bin/python3); made=$(mktemp -d); mkdir -p "$made/python/bin" "$made/python/lib"
cp "$real" "$made/python/bin/"; ln -s "${real##*/}" "$made/python/bin/python3"; cp -r "/usr/lib/${real##*/}" "$made/python/lib/"
find "$made" -type l -lname '/*' -delete
"$real" -c 'import platform; print(platform.python_version(), platform.machine())'
tar -C "$made" -czf "$1" python; chmod a+r "$1"; rm -rf "$made"
"""


def test_an_interpreter_is_brought(
    slurm_compute: Callable[..., ComputeResource],
    site: Site,
    script: Any,
    tmp_path: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By uv, whose list of interpreters names one that the test has packed, to a cluster without a Python on the PATH."""
    site.sh('mkdir -p "$1/bin" && ln -s /usr/bin/* /bin/* "$1/bin/" 2>/dev/null; rm "$1"/bin/python*', site.base)
    version, machine = site.sh(f"set -e; {PACK}", f"{site.base}/python.tar.gz").split()
    archive = tmp_path / "python.tar.gz"
    site.connection.download(f"{site.base}/python.tar.gz", str(archive))
    major, minor, patch = map(int, version.split("."))
    name = f"cpython-{version}-linux-{machine}-gnu"
    arch = {"family": machine, "variant": None}
    entry = {"name": "cpython", "arch": arch, "os": "linux", "libc": "gnu", "major": major, "minor": minor, "patch": patch}
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    entry |= {"prerelease": "", "url": archive.as_uri(), "sha256": digest, "variant": None}
    (tmp_path / "downloads.json").write_text(json.dumps({name: entry}))
    monkeypatch.setenv("UV_PYTHON_DOWNLOADS_JSON_URL", str(tmp_path / "downloads.json"))

    start = f'#!/bin/sh\nexport PATH={site.base}/bin\nexec /usr/bin/python3 "$@"\n'
    site.connection.write(f"{site.base}/python-of-the-agent", start.encode(), mode=0o700)
    ssh = SSHConnectionResource(**{**site.ssh.model_dump(), "python": f"{site.base}/python-of-the-agent"})
    environment = project(tmp_path / "study", "dagster-pipes").model_copy(update={"python": f"{major}.{minor}"})
    compute = slurm_compute(slurm={"ssh": ssh}, pre_deployed_env_path=None, environment=environment)
    payload = script(
        pipes_script("import sys; pipes.report_asset_materialization(metadata={'base': sys.base_prefix, 'v': sys.version})")
    )
    ran = run_asset(compute, payload)
    assert not ran.failures, ran.failures
    assert ran.metadata["v"].split()[0] == version
    assert ran.metadata["base"].startswith(f"{site.base}/prefixes/") and ran.metadata["base"].endswith("/interpreter")
