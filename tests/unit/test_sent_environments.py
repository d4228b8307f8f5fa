"""Environments that are made on a cluster, over a connection to this machine, with an index of files."""

import errno
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from packaging.pylock import PackageWheel

from dagster_rayslurm import (
    BashLauncher,
    CommandEnvironment,
    ComputeResource,
    PackedEnvironment,
    PreDeployedEnvironment,
    SessionConfig,
    SlurmQueueConfig,
    SlurmResource,
    UvEnvironment,
)
from dagster_rayslurm.edge import environment as edge
from dagster_rayslurm.edge.base_directory import sweep
from dagster_rayslurm.environments import path_on_cluster, platforms, resolve_environment, send, wheels
from dagster_rayslurm.environments.check import check_environment_on
from dagster_rayslurm.environments.packed import packed_recipe
from dagster_rayslurm.environments.platforms import Platform
from dagster_rayslurm.environments.recipe import Piece
from dagster_rayslurm.environments.uv import _export, uv_recipe
from dagster_rayslurm.errors import StartError
from dagster_rayslurm.ssh.local import LocalConnection

from ..conftest import run_asset, small_disk
from ..fake_slurm import FakeSlurm
from .sending import LOG, MACHINE, Cluster, says, wheel

pytest.importorskip("uv")
VERSION = f"{sys.version_info[0]}.{sys.version_info[1]}"
BACKEND = """
import os, zipfile
def build_wheel(directory, config_settings=None, metadata_directory=None):
    if os.path.exists("broken"):
        raise RuntimeError("the compiler is missing")
    with zipfile.ZipFile(os.path.join(directory, "helper-1.0-py3-none-any.whl"), "w") as wheel:
        wheel.write("helper.py")
        wheel.writestr("helper-1.0.dist-info/METADATA", "Metadata-Version: 2.1\\nName: helper\\nVersion: 1.0\\n")
        lines = "Wheel-Version: 1.0\\nGenerator: x\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"
        wheel.writestr("helper-1.0.dist-info/WHEEL", lines)
        wheel.writestr("helper-1.0.dist-info/RECORD", "")
    return "helper-1.0-py3-none-any.whl"
"""


# -- uv ----------------------------------------------------------------------------------------------------------------


def test_an_environment_from_a_lock_file(cluster: Cluster) -> None:
    for name in ("left", "right", "tool", "old"):
        wheel(cluster.index, name)
    wheel(cluster.index, "native", tag=f"cp{VERSION.replace('.', '')}-abi3-manylinux_2_17_{MACHINE}")
    wheel(cluster.index, "native", tag=f"cp{VERSION.replace('.', '')}-abi3-manylinux_2_39_{MACHINE}")
    more = '[dependency-groups]\nextra = ["tool"]\ndev = ["old"]\n'
    environment = cluster.lock("left", "right", "native", 'old; python_version < "3.8"', more=more)
    environment = environment.model_copy(update={"groups": ["extra"]})
    first = cluster.send(environment)
    assert len(cluster.sent) == 5
    assert f"native-1.0-cp{VERSION.replace('.', '')}-abi3-manylinux_2_17_{MACHINE}.whl" in cluster.sent
    assert says(first, "import left, right, tool, native, sys; print(sys.prefix)") == first
    with pytest.raises(subprocess.CalledProcessError):
        says(first, "import old")
    cluster.sent = []
    assert cluster.send(environment) == first
    assert cluster.sent == []
    wheel(cluster.index, "right", "2.0")
    cluster.lock("left", "right==2.0", "native", more=more)
    second = cluster.send(environment)
    assert cluster.sent == ["right-2.0-py3-none-any.whl"]
    assert says(second, "import right; print(right.version)") == "2.0"
    assert says(first, "import right; print(right.version)") == "1.0"


def write_helper(helper: Path) -> None:
    """A package with a build backend of its own."""
    helper.mkdir(parents=True)
    (helper / "helper.py").write_text("version = 'first'\n")
    (helper / "backend.py").write_text(BACKEND)
    (helper / "pyproject.toml").write_text(
        '[project]\nname = "helper"\nversion = "1.0"\n'
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )


def test_a_member_of_a_workspace_comes_along(cluster: Cluster) -> None:
    write_helper(cluster.project / "parts" / "helper")
    member = cluster.project / "parts" / "member"
    member.mkdir()
    (member / "pyproject.toml").write_text(
        '[project]\nname = "member"\nversion = "1"\ndependencies = ["helper"]\n[tool.uv.sources]\nhelper = { workspace = true }\n'
    )
    cluster.lock(more='[tool.uv.workspace]\nmembers = ["parts/*"]\n')
    environment = UvEnvironment(project=str(member))
    assert says(cluster.send(environment), "import helper; print(helper.version)") == "first"


def test_a_local_package_comes_along_and_is_built_once_for_each_content(cluster: Cluster) -> None:
    helper = cluster.project / "helper"
    write_helper(helper)
    more = '[tool.uv.sources]\nhelper = { path = "helper", editable = true }\n'
    environment = cluster.lock("helper", more=more)
    assert says(cluster.send(environment), "import helper; print(helper.version)") == "first"
    (helper / "helper.py").write_text("version = 'second'\n")
    assert says(cluster.send(environment), "import helper; print(helper.version)") == "second"
    assert cluster.sent == ["helper-1.0-py3-none-any.whl"]
    (helper / "broken").touch()
    with pytest.raises(
        StartError, match=r"environment: helper has no wheel and cannot be built on this machine: .*the compiler is missing"
    ):
        cluster.send(environment)


def test_requirements_stay_as_they_were_resolved(cluster: Cluster) -> None:
    wheel(cluster.index, "left")
    file = cluster.project / "requirements.txt"
    file.write_text(f"--no-index\n--find-links {cluster.index}\nleft\n")
    environment = UvEnvironment(requirements=str(file), python=VERSION)
    first = cluster.send(environment)
    assert says(first, "import left; print(left.version)") == "1.0"
    wheel(cluster.index, "left", "2.0")
    assert cluster.send(environment) == first
    file.write_text(file.read_text() + "left>=2\n")
    assert says(cluster.send(environment), "import left; print(left.version)") == "2.0"


def test_bad_input_is_one_sentence(cluster: Cluster) -> None:
    wheel(cluster.index, "left")
    cluster.refuses(UvEnvironment(project="/nowhere"), "environment: there is no pyproject.toml in /nowhere; name the directory")
    cluster.refuses(cluster.write("left"), "a project has no uv.lock; run there: uv lock")
    environment = cluster.lock("left")
    cluster.refuses(UvEnvironment(project=str(cluster.project), groups=["gpu"]), "Group `gpu` is not defined")
    wheel(cluster.index, "right")
    cluster.write("left", "right")
    cluster.refuses(environment, "uv.lock in .*a project does not fit its pyproject.toml; run there: uv lock")
    for file in (cluster.project / "pyproject.toml", cluster.project / "uv.lock"):
        file.write_text(re.sub('requires-python = ".*"', 'requires-python = ">=3.99"', file.read_text()))
    cluster.refuses(environment, "uv refuses the lock .*; uv needs a Python here that `requires-python` in pyproject.toml allows")
    wheel(cluster.index, "far", tag=f"py3-none-manylinux_2_39_{MACHINE}")
    cluster.refuses(cluster.lock("far"), "wheels of far need a newer glibc than this machine .*, glibc 2.28, .* has; lock")
    wheel(cluster.index, "mac", tag="py3-none-macosx_11_0_arm64")
    cluster.refuses(cluster.lock("mac"), rf"lacks a wheel for this machine \(Python {VERSION}, glibc 2.28, {MACHINE}\): .*'mac'")
    cluster.refuses(UvEnvironment(requirements="/nowhere.txt"), "there is no requirements file /nowhere.txt")
    wanted = UvEnvironment(project=str(cluster.project), python="/nowhere/python")
    cluster.bare = True
    cluster.refuses(wanted, "this machine lacks Python /nowhere/python .*, its PATH has none; name one that is there by its path")


def test_a_python_that_was_installed_since_the_cluster_lacked_it(cluster: Cluster) -> None:
    """The platform is known for a day, but refuses nothing that long."""
    wheel(cluster.index, "left")
    environment = cluster.lock("left").model_copy(update={"python": sys.executable})
    cluster.bare = True
    cluster.refuses(environment, f"this machine lacks Python {sys.executable}")
    cluster.bare = False
    for known in Path(platforms.cached("platforms", "")).iterdir():
        os.utime(known, (time.time() - 60,) * 2)
    assert says(cluster.send(environment), "import left; print(left.version)") == "1.0"


def test_an_interpreter_is_brought_if_the_cluster_has_none(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the documented command line of uv, as its interpreters cannot be fetched in tests."""
    wheel(cluster.index, "left")
    cluster.bare = True
    environment, real, asked = cluster.lock("left"), wheels.run_uv, []
    full = ".".join(map(str, sys.version_info[:3]))

    def install(*words: str, directory: str | None = None) -> str:
        if words[:2] != ("python", "install"):
            return real(*words, directory=directory)
        asked.append(words[-1])
        made = Path(words[-2].partition("=")[2], f"cpython-{full}-linux-{MACHINE}-gnu", "bin")
        made.mkdir(parents=True)
        (made / "python3").symlink_to(sys._base_executable)  # type: ignore[attr-defined]
        return ""

    monkeypatch.setattr(wheels, "run_uv", install)
    first = cluster.send(environment)
    assert asked == [f"cpython-{VERSION}-linux-{MACHINE}-gnu"]
    assert says(first, "import left; print(left.version)") == "1.0"
    assert f"{os.path.realpath(first)}/interpreter/bin" in Path(first, "pyvenv.cfg").read_text()
    assert cluster.send(environment) == first and len(asked) == 1


def test_a_file_that_is_not_the_one_in_the_lock(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel(cluster.index, "left")
    environment = cluster.lock("left")
    monkeypatch.setattr(wheels, "_content", lambda place: iter([b"something else"]))
    cluster.refuses(environment, "left-1.0-py3-none-any.whl is not the file in the lock: its SHA-256 is")
    assert not [each for each in Path(platforms.cached("files", "")).rglob("*") if each.is_file()]


def test_a_file_that_cannot_be_fetched(cluster: Cluster) -> None:
    nobody_listens = PackageWheel(url="http://127.0.0.1:9/left-1.0-py3-none-any.whl", hashes={"sha256": "0" * 64})
    with pytest.raises(
        StartError, match=r"environment: http://127.0.0.1:9/left-1.0-py3-none-any.whl cannot be fetched: .*refused"
    ):
        send.fetch([wheels.fetched("left", nobody_listens, "")], LOG)
    assert not [each for each in Path(platforms.cached("files", "")).rglob("*") if each.is_file()]


@pytest.mark.parametrize("size", ["1m", "12m"])
def test_a_full_disk(cluster: Cluster, tmp_path: Path, size: str) -> None:
    """It takes no files, or takes them, and not what they become."""
    path = wheel(cluster.index, "left")
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("left.data/data/large", os.urandom(2**20) + bytes(20 * 2**20), zipfile.ZIP_DEFLATED)
    environment = cluster.lock("left")
    with small_disk(tmp_path / "small", size) as disk:
        cluster.base = disk / "base"
        cluster.base.mkdir()
        cluster.refuses(
            environment,
            f"environment: it cannot be made in {disk}/base on this machine: .*(No space left|os error 28).*; "
            "make room there, or choose another remote_base",
        )
        left = [each for each in cluster.base.rglob("*") if ".rs-" in each.name]
        assert not left


def test_a_disk_quota(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which no file system has here: the command of the recipe says what tar says of one."""
    wheel(cluster.index, "left")
    environment = cluster.lock("left")
    failing = cluster.base.parent / "uv-of-the-cluster"
    failing.write_text("#!/bin/sh\necho 'error: failed to write: Disk quota exceeded (os error 122)' >&2\nexit 2\n")
    monkeypatch.setattr(wheels, "uv_program", lambda *_: Piece("2" * 64, "uv", lambda: str(failing)))
    cluster.refuses(environment, r"Disk quota exceeded \(os error 122\); make room there, or choose another remote_base")


# -- archives ------------------------------------------------------------------------------------------------------------


def pack(path: Path, files: dict[str, str], mode: str = "w:gz") -> PackedEnvironment:
    """An archive of executable files."""
    source = path.parent / "packed"
    for name, text in files.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text)
        (source / name).chmod(0o755)
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        for each in sorted(source.iterdir()):
            tar.add(each, each.name)
    shutil.rmtree(source)
    return PackedEnvironment(archive=str(path))


PYTHON = f'#!/bin/sh\nexec {sys.executable} "$@"\n'


def test_archives_by_their_content(cluster: Cluster, tmp_path: Path) -> None:
    unpack = "import os, sys; open(os.path.join(os.path.dirname(sys.argv[0]), 'where'), 'w').write(os.path.abspath(sys.argv[0]))"
    conda = pack(tmp_path / "a b.tar.gz", {"bin/python": PYTHON, "bin/conda-unpack": unpack})
    path = cluster.send(conda)
    assert Path(path, "bin/where").read_text() == f"{os.path.realpath(path)}/bin/conda-unpack"
    assert cluster.sent == ["a b.tar.gz"]
    assert says(cluster.send(pack(tmp_path / "plain", {"bin/python": PYTHON}, "w")), "print(1)") == "1"
    pixi = tmp_path / "environment.sh"
    pixi.write_text(f'#!/usr/bin/env bash\n# pixi-pack\nmkdir -p "$2/env/bin"\nln -s {sys.executable} "$2/env/bin/python"\n')
    found = check_environment_on(
        LocalConnection(),
        PreDeployedEnvironment(path=cluster.send(PackedEnvironment(archive=str(pixi)))),
        None,
        False,
        str(cluster.base / "environments"),
    )
    assert found.python.endswith("/env/bin/python")


def test_archives_that_cannot_be_used(cluster: Cluster, tmp_path: Path) -> None:
    cluster.refuses(PackedEnvironment(archive="/nowhere.tar"), "/nowhere.tar cannot be read: No such file or directory; name the")
    (tmp_path / "text").write_text("no archive")
    cluster.refuses(PackedEnvironment(archive=str(tmp_path / "text")), "text is no archive of conda-pack, venv-pack")
    cluster.refuses(
        pack(tmp_path / "pixi.tar", {"pixi-pack.json": "{}"}, "w"), "needs pixi-unpack, which no cluster has; pack it"
    )
    (tmp_path / "half.tar.gz").write_bytes(b"\x1f\x8b\x08and no more")
    cluster.refuses(
        PackedEnvironment(archive=str(tmp_path / "half.tar.gz")), "it cannot be made in .*/base on this machine: .*gzip"
    )


def test_a_pex_gets_the_python_that_it_was_most_likely_made_for(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "environment.pex", "w") as archive:
        archive.writestr("PEX-INFO", "{}")
    own, newer = python("/own", *sys.version_info[:3]), python("/newer", 3, 99)
    environment = PackedEnvironment(archive=str(tmp_path / "environment.pex"))
    for pythons, chosen in (((own, newer), "/own"), ((newer,), "/newer")):
        (command,) = packed_recipe(environment, platform(pythons=pythons)).commands
        assert chosen in command
    with pytest.raises(ValueError, match="is a PEX file, and x has no Python on its PATH to start it"):
        packed_recipe(environment, platform())


# -- commands ------------------------------------------------------------------------------------------------------------


def test_commands_run_as_in_a_login_shell(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / ".bash_profile").write_text("module() { [ $1 = load ] && [ $2 = study ] && export STUDY=1; }\n")
    monkeypatch.setenv("HOME", str(home))
    (home / "a python").symlink_to(sys.executable)
    # conda's `activate` takes the arguments of whoever sources it for its own.
    (home / "activate").write_text("export ACTIVATED=$#\n")
    commands = ["module load study", "greeting='it'\\''s me'; export greeting", "source ~/activate"]
    path = cluster.send(CommandEnvironment(commands=commands, python="~/a python"))
    arguments = None, False, str(cluster.base / "environments")
    found = check_environment_on(LocalConnection(), PreDeployedEnvironment(path=path), *arguments)
    start = found.start("-c", "import os; print(os.environ['STUDY'], os.environ['greeting'], os.environ['ACTIVATED'])")
    assert subprocess.run(start, capture_output=True, text=True, check=True).stdout.strip() == "1 it's me 0"
    failing = cluster.send(CommandEnvironment(commands=["module load other", "export UNSEEN=1"]))
    with pytest.raises(StartError, match="the command `module load other` of the environment failed with exit code 1"):
        check_environment_on(LocalConnection(), PreDeployedEnvironment(path=failing), *arguments)


@pytest.mark.parametrize(
    ("commands", "problem"),
    [
        ([], "there is no command"),
        ("module load x", r"write a list of commands, \['module load x'\]"),
        (["a\nb"], "control character"),
    ],
)
def test_commands_that_are_none(commands: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        CommandEnvironment(commands=commands)


@pytest.mark.parametrize("mode", ["slurm", "slurm-session"])
def test_payloads_run_in_the_environment(cluster: Cluster, fake_slurm: FakeSlurm, tmp_path: Path, mode: str) -> None:
    wheel(cluster.index, "left")
    script, said = tmp_path / "payload.py", tmp_path / "said"
    write = f"open({str(said)!r}, 'w').write"
    script.write_text(f"import os, sys, left; {write}(' '.join([sys.prefix, left.version, os.environ.get('STUDY', '')]))")
    queue = SlurmQueueConfig(time_limit="00:10:00")
    compute = ComputeResource(
        mode=mode,
        slurm=SlurmResource(remote_base=str(cluster.base), poll_interval=1, queue=queue),
        session=SessionConfig(idle_timeout=1),
        default_launcher=BashLauncher(),
        environment=cluster.lock("left"),
        local_base=str(tmp_path / "local"),
    )
    ran = run_asset(compute, str(script), uses_pipes=False)
    assert not ran.failures, ran.failures
    (prefix,) = (path for path in cluster.base.glob("prefixes/*") if path.is_symlink())
    assert said.read_text() == f"{prefix} 1.0 "
    path = f"export PYTHONPATH={cluster.index}/left-1.0-py3-none-any.whl"
    commands = CommandEnvironment(commands=["export STUDY=1", path], python=sys.executable)
    ran = run_asset(compute, str(script), uses_pipes=False, environment=commands)
    assert not ran.failures, ran.failures
    assert said.read_text() == f"{sys.prefix} 1.0 1"


# -- the platform --------------------------------------------------------------------------------------------------------


def test_a_python_in_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a python").symlink_to(sys.executable)
    assert len(edge.platform("~/a python", [], 60)["pythons"]) == 1


def platform(**fields: Any) -> Platform:
    usual: dict[str, Any] = {"place": "x", "machine": MACHINE, "glibc": (2, 28), "pythons": (), "level": "x86-64-v3"}
    return Platform(**{**usual, **fields})


def python(path: str, *version: int) -> platforms.Python:
    return platforms.Python(path, version, "cpython", MACHINE)


def test_nodes_of_a_partition_tell_their_platform_once_a_day(
    cluster: Cluster, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edge, "platform", cluster.look)
    queues = [SlurmQueueConfig(partition="compute", account="study", num_nodes=4, mem="64G"), SlurmQueueConfig(partition="gpu")]
    ask: Callable[[float], Platform] = lambda age: platforms.look_at(LocalConnection(), sys.executable, queues, age, LOG)  # noqa: E731
    first = ask(60.0)
    assert first.place == "partition compute of this machine and partition gpu of this machine"
    assert [each.version for each in first.pythons] == [sys.version_info[:3]]
    asked = fake_slurm.calls("srun")
    assert [call[:2] for call in asked] == [["--partition=compute", "--account=study"], ["--partition=gpu", "--nodes=1"]]
    assert not any("64G" in word or word == "--nodes=4" for call in asked for word in call)
    assert ask(60.0) == first and len(fake_slurm.calls("srun")) == 2
    fake_slurm.fault("srun", "srun: error: Unable to allocate resources: Requested nodes are busy", times=-1)
    assert ask(0.0) == first  # The last answer, as there is no newer one.


def test_nodes_that_do_not_answer(cluster: Cluster, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(edge, "platform", cluster.look)
    fake_slurm.fault("srun", "srun: error: Unable to allocate resources: Requested nodes are busy")
    found = platforms.look_at(LocalConnection(), sys.executable, [SlurmQueueConfig()], 60.0, LOG)
    assert found.place == "the edge node this machine" and found.pythons and found.on_node == ()
    assert (
        "made for the platform of the edge node, as that of a node of this machine is not known: srun: error: Unable"
        in caplog.text
    )


def test_an_edge_node_that_does_not_tell_its_platform(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge, "platform", lambda *_: {"problem": "no answer within 60 s"})
    with pytest.raises(ValueError, match="the platform of the edge node this machine cannot be found: no answer within 60 s"):
        platforms.look_at(LocalConnection(), sys.executable, [], 60.0, LOG)


def test_what_several_partitions_have_in_common() -> None:
    both = platforms.common(
        [
            platform(place="one", glibc=(2, 28), pythons=(python("/a", 3, 11), python("/b", 3, 12)), level="x86-64-v4"),
            platform(place="two", glibc=(2, 17), pythons=(python("/b", 3, 12),), level="x86-64-v2"),
        ]
    )
    assert (both.place, both.glibc, both.level) == ("one and two", (2, 17), "x86-64-v2")
    assert [each.path for each in both.pythons] == ["/b"]
    with pytest.raises(ValueError, match=r"one has \w+, and two has riscv, so that no environment runs on both; use"):
        platforms.common([platform(place="one"), platform(place="two", machine="riscv")])


@pytest.mark.parametrize(
    ("glibc", "problem"),
    [((2, 12), "glibc on x is older than 2.17, for which there are no wheels"), ((), "x has another C library than glibc, for")],
)
def test_c_libraries_without_wheels(cluster: Cluster, glibc: tuple[int, ...], problem: str) -> None:
    file = cluster.project / "requirements.txt"
    file.write_text("left\n")
    with pytest.raises(ValueError, match=problem):
        uv_recipe(UvEnvironment(requirements=str(file)), platform(glibc=glibc, pythons=(python("/a", *sys.version_info[:3]),)))


def test_where_an_environment_is_made() -> None:
    here, there = python("/usr/bin/python3", 3, 9, 2), python("/usr/bin/python3", 3, 6, 8)
    srun = ("srun",)
    alike = platform(pythons=(here,), edge_machine=MACHINE, edge_pythons=(here,), on_node=srun)
    assert (alike.runner(here), alike.runner(there), alike.runner(None)) == ((), srun, ())
    assert platform(edge_machine="other", edge_pythons=(here,), on_node=srun).runner(None) == srun
    assert platform(pythons=(there,)).runner(there) == ()  # Nobody looked at compute nodes.


V2 = "cx16 lahf_lm popcnt pni sse4_1 sse4_2 ssse3"
V3 = f"{V2} abm avx avx2 bmi1 bmi2 f16c fma movbe xsave"


@pytest.mark.parametrize(
    ("machine", "flags", "level"),
    [
        ("x86_64", "fpu", "x86-64-v1"),
        ("x86_64", V2, "x86-64-v2"),
        ("x86_64", f"{V2} avx512f avx512bw avx512cd avx512dq avx512vl", "x86-64-v2"),
        ("x86_64", V3, "x86-64-v3"),
        ("aarch64", "fp asimd", "aarch64"),
    ],
)
def test_levels_of_cpus(machine: str, flags: str, level: str) -> None:
    assert platforms.cpu_level(machine, flags.split()) == level


# -- on the cluster --------------------------------------------------------------------------------------------------------

KEY = "0123456789abcdef" * 2


def recipe_of(*commands: list[str]) -> dict[str, Any]:
    return {"title": "a test", "commands": commands, "runner": []}


def test_many_make_a_prefix_once(tmp_path: Path) -> None:
    recipe = recipe_of(["sh", "-c", 'echo made >> "$1/../count"; sleep 0.2; mkdir "$1/bin"', "sh", edge.PREFIX])
    with ThreadPoolExecutor(20) as pool:  # As for processes: a lock of flock(2) belongs to an open file.
        asked = [pool.submit(edge.make, str(tmp_path / "prefixes"), KEY, recipe, 60.0) for _ in range(20)]
        assert [each.result(30) for each in asked] == [""] * 20
    assert (tmp_path / "prefixes/count").read_text() == "made\n"
    assert (tmp_path / "prefixes" / KEY / "bin").is_dir()


def test_a_prefix_whose_making_fails_leaves_nothing(tmp_path: Path) -> None:
    commands = [["sh", "-c", "echo 'tar: Disk quota exceeded' >&2; exit 2"]]
    assert edge.make(str(tmp_path), KEY, recipe_of(*commands), 60.0) == "tar: Disk quota exceeded"
    assert [each.name for each in tmp_path.iterdir()] == [f".lock-{KEY[0]}"]
    assert edge.make(str(tmp_path), KEY, recipe_of(["sleep", "60"]), 0.1) == "sleep took over 0.1 s"


def test_temporary_files_of_the_making_are_private_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "shared"))  # There uv would leave a lock file that every user can write.
    commands = ['touch "$TMPDIR/lock"; stat -c %a "$TMPDIR" > "$1/mode"', 'echo "$TMPDIR" > "$1/path"; ls "$TMPDIR" > "$1/found"']
    recipe = recipe_of(*(["sh", "-c", each, "sh", edge.PREFIX] for each in commands))
    assert edge.make(str(tmp_path / "prefixes"), KEY, recipe, 60.0) == ""
    prefix = tmp_path / "prefixes" / KEY
    assert ((prefix / "mode").read_text(), (prefix / "found").read_text()) == ("700\n", "lock\n")
    path = (prefix / "path").read_text().strip()
    assert path.startswith(str(prefix.resolve())) and not os.path.exists(path)


def test_the_platform_of_this_machine() -> None:
    found = edge.platform(sys.executable, [], 60.0)
    path, version, name, machine = found["pythons"][0]
    assert (version, name, machine) == (list(sys.version_info[:3]), sys.implementation.name, MACHINE)
    assert not os.path.exists(os.path.join(os.path.dirname(path), "../pyvenv.cfg"))


def test_unused_prefixes_and_their_files_are_swept(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"x").hexdigest()[:32]
    wheel_file = tmp_path / "files" / digest / "x.whl"
    wheel_file.parent.mkdir(parents=True)
    wheel_file.touch()
    edge.make(str(tmp_path / "prefixes"), KEY, recipe_of(["true", str(wheel_file)]), 60.0)
    prefix, long_ago = (tmp_path / "prefixes" / KEY).resolve(), time.time() - 1000

    def age(*paths: Path) -> None:
        for path in paths:
            os.utime(path, (long_ago, long_ago))

    age(wheel_file, wheel_file.parent)
    sweep(str(tmp_path), 500.0, 0.0, None)
    assert wheel_file.exists()  # The prefix is in use, and the next one may need the file as well.
    run = tmp_path / "runs" / "step-0123456789ab"
    run.mkdir(parents=True)
    (run / "job.sh").write_text(f"{tmp_path}/prefixes/{KEY}/bin/python")
    age(prefix)
    sweep(str(tmp_path), 500.0, 0.0, None)
    assert prefix.exists()
    shutil.rmtree(run)
    sweep(str(tmp_path), 500.0, 0.0, None)
    assert not os.path.lexists(prefix)
    assert not os.path.lexists(tmp_path / "prefixes" / KEY)
    sweep(str(tmp_path), 500.0, 0.0, None)
    assert not wheel_file.exists()


def test_local_mode_uses_the_python_of_dagster() -> None:
    environment = UvEnvironment()
    assert resolve_environment(environment).python == sys.executable
    assert path_on_cluster(environment, over_ssh=True) == ""


def test_a_full_disk_leaves_no_piece_of_an_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "study"\nversion = "1"\nrequires-python = ">=3.8"\n')
    wheels.run_uv("lock", directory=str(tmp_path))
    for name in ("rename", "replace"):
        monkeypatch.setattr(os, name, full)
    with pytest.raises(OSError, match="No space left"):
        _export(str(tmp_path), ())
    assert not [path for path in (tmp_path / "cache" / "dagster-rayslurm").rglob("*") if path.is_file()]
