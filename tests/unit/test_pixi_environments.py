"""Environments from lock files of pixi, from a channel of files that holds an interpreter too."""

import json
import os
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dagster_rayslurm import PixiEnvironment
from dagster_rayslurm.environments import install_conda, recipe, send, wheels
from dagster_rayslurm.environments.check import check_environment_on
from dagster_rayslurm.environments.pixi import pixi_recipe
from dagster_rayslurm.environments.platforms import Platform
from dagster_rayslurm.ssh.local import LocalConnection

from ..fake_slurm import FakeSlurm
from .conda_channel import PLACEHOLDER, SUBDIR, VERSION, Package, lock_text, package, pypi
from .sending import MACHINE, Cluster, says, wheel
from .test_node_local import Run

rattler = pytest.importorskip("rattler")
pytest.importorskip("uv")
PLATFORM = Platform("here", MACHINE, (2, 28), (), MACHINE)


@pytest.fixture(scope="module")
def channel(tmp_path_factory: pytest.TempPathFactory, conda_python: Package) -> dict[str, Package]:
    """Packages by name; `python` is an interpreter, and depends on one in the old format."""
    path = tmp_path_factory.mktemp("channel")
    binary = b"\x7fELF\0" + f"{PLACEHOLDER}/share:{PLACEHOLDER}/etc".encode() + b"\0end"
    made = [
        package(path, "libx", files={"lib/libx.data": binary}, placeholders={"lib/libx.data": "binary"}, old=True),
        conda_python,
        package(
            path,
            "native",
            files={
                "bin/native": f"#!{PLACEHOLDER}/bin/python\nimport sys; print(sys.prefix)\n",
                "share/native.conf": f"directory = {PLACEHOLDER}/share\n",
                "etc/conda/activate.d/native.sh": 'export NATIVE_DATA="$CONDA_PREFIX/share"\n',
                "bin/.native-post-link.sh": "#!/bin/sh\ntouch $PREFIX/was-run\n",
            },
            executable=["bin/native", "bin/.native-post-link.sh"],
            placeholders={"bin/native": "text", "share/native.conf": "text"},
            depends=["python"],
        ),
        package(
            path,
            "tool",
            files={"site-packages/tool.py": "version = '1.0'\ndef main(): print('the tool')\n"},
            noarch="python",
            entry_points=["tool = tool:main"],
            depends=["python >=3.8"],
            purls=["pkg:pypi/other-tool"],
        ),
    ]
    return {each.name: each for each in made}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of py-rattler, out of what is installed here."""
    top, path = Path(rattler.__file__).parent, tmp_path_factory.mktemp("rattler") / "py_rattler.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for each in top.rglob("*"):
            if "__pycache__" not in each.parts:
                archive.write(each, each.relative_to(top.parent))
    return path


class Project:
    """A project of pixi."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()
        self.environment = PixiEnvironment(manifest=str(path / "pixi.toml"))

    def write(self, packages: list[Package], manifest: str = "", **options: Any) -> PixiEnvironment:
        (self.path / "pixi.toml").write_text(manifest)
        (self.path / "pixi.lock").write_text(lock_text(packages, **options))
        return self.environment


@pytest.fixture
def project(tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    piece = recipe.Piece("1" * 64, library.name, lambda: str(library))
    monkeypatch.setattr(wheels, "tool_wheel", lambda *_: piece)
    return Project(tmp_path / "a pixi project")


MANIFEST = """
[workspace]
name = "study"
channels = ["https://conda.example/study"]
platforms = ["linux-64", "linux-aarch64"]
[dependencies]
python = ">=3.8"
native = "1.*"
tool = { version = ">=1", build = "0" }
[pypi-dependencies]
left = ">=1,<3"
other_tool = "*"
[activation]
scripts = ["more.sh"]
env = { STUDY = "of $USER_NAME", EDITOR = "none" }
"""


def test_an_environment_with_its_interpreter(
    cluster: Cluster, project: Project, channel: dict[str, Package], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.bare, fetched, read = True, [], wheels._content
    monkeypatch.setattr(wheels, "_content", lambda place: (fetched.append(place), read(place))[1])
    wheel(project.path, "left")
    (project.path / "more.sh").write_text("prefix=too; export MORE=$STUDY,${prefix}")
    packages = [*channel.values(), pypi("./left-1.0-py3-none-any.whl", "left")]
    environment = project.write(packages, MANIFEST)
    first = cluster.send(environment)
    archives = [Path(each.url).name for each in channel.values()]
    sent = [*archives, "left-1.0-py3-none-any.whl", "py_rattler.whl", "interpreter.tar.gz", "install_conda.py", "uv"]
    assert cluster.sent == sorted(sent)
    assert len(fetched) == len(set(fetched)) == len(packages)

    real = os.path.realpath(first)
    assert says(first, "import sys, left, tool; print(sys.prefix, left.version, tool.version)") == f"{first} 1.0 1.0"
    assert subprocess.check_output([f"{first}/bin/tool"], text=True) == "the tool\n"
    assert subprocess.check_output([f"{first}/bin/native"], text=True) == f"{real}\n"
    assert Path(first, "share/native.conf").read_text() == f"directory = {real}/share\n"
    data = Path(first, "lib/libx.data").read_bytes()
    assert data.split(b"\0")[1] == f"{real}/share:{real}/etc".encode()
    assert len(data) == len(b"\x7fELF\0") + 2 * len(PLACEHOLDER) + len("/share:/etc") + len(b"\0end")
    assert {each.name for each in Path(first, "conda-meta").glob("*.json")} >= {"tool-1.0-0.json", "libx-1.0-0.json"}
    assert list(Path(first, f"lib/python{VERSION}/site-packages/__pycache__").glob("tool.*.pyc"))
    assert not Path(first, "was-run").exists() and not Path(first, ".installer").exists()

    found = check_environment_on(
        LocalConnection(), send.PreDeployedEnvironment(path=first), None, False, str(cluster.base / "environments")
    )
    start = found.start("-c", "import os; print([os.environ.get(name) for name in ('NATIVE_DATA', 'MORE', 'PATH')])")
    seen = subprocess.check_output(start, text=True, env={"PATH": os.environ["PATH"], "USER_NAME": "me"})
    assert seen.startswith(f"['{real}/share', 'of me,too', '{real}/bin:")

    cluster.sent = []
    assert cluster.send(environment) == first and cluster.sent == []
    newer = package(project.path, "tool", "2.0", {"site-packages/tool.py": "version = '2.0'"}, noarch="python")
    second = cluster.send(project.write([*packages[:3], newer, packages[-1]], MANIFEST.replace('other_tool = "*"', "")))
    assert cluster.sent == ["tool-2.0-0.conda"]
    assert [says(each, "import tool; print(tool.version)") for each in (first, second)] == ["1.0", "2.0"]


def test_what_its_activation_sets_leads_to_the_copy_of_a_node(
    cluster: Cluster, project: Project, channel: dict[str, Package], fake_slurm: FakeSlurm, tmp_path: Path
) -> None:
    cluster.bare = True
    wheel(project.path, "left")
    environment = project.write([*channel.values(), pypi("./left-1.0-py3-none-any.whl", "left")])
    run = Run(fake_slurm, cluster, tmp_path, environment.model_copy(update={"stage": "node-local"}))
    ran = run()
    assert not ran.failures, ran.failures
    prefix, module, python, executable, data = run.found
    assert not prefix.startswith(str(cluster.base)) and module.startswith(f"{prefix}/lib/")
    assert (python, executable, data) == (f"{prefix}/bin/python", f"{prefix}/bin/python", f"{prefix}/share")
    run.wait()


@pytest.mark.parametrize("version", [5, 7])
def test_formats_of_the_lock_file(project: Project, channel: dict[str, Package], cluster: Cluster, version: int) -> None:
    wheel(project.path, "left")
    packages = [*channel.values(), pypi("./left-1.0-py3-none-any.whl", "left")]
    expected = pixi_recipe(project.write(packages), PLATFORM)
    assert pixi_recipe(project.write(packages, version=version), PLATFORM).key == expected.key


def test_features_of_an_environment(project: Project, channel: dict[str, Package], cluster: Cluster) -> None:
    manifest = f"""
[dependencies]
absent = "*"
[feature.base.dependencies]
python = "<3"
[feature.base.target.{SUBDIR}.dependencies]
python = ">=3"
[feature.base.activation.env]
LEVEL = "base"
PLACE = "anywhere"
[feature.base.target.linux.activation.env]
PLACE = "linux"
[feature.gpu.target.linux.pypi-dependencies]
windows-tool = {{ version = "*", env-markers = "sys_platform == 'win32'" }}
tool = ">=9"
[feature.gpu.activation.env]
LEVEL = "gpu"
[environments]
gpu = {{ features = ["gpu", "base"], no-default-feature = true }}
"""
    project.write([channel["python"], channel["libx"], channel["tool"]], manifest, environment="gpu")
    recipe = pixi_recipe(project.environment.model_copy(update={"environment": "gpu"}), PLATFORM)
    (project_words,) = (word for words in recipe.commands for word in words if isinstance(word, str) and word.startswith('{"var'))
    assert json.loads(project_words) == {"variables": {"LEVEL": "gpu", "PLACE": "linux"}, "scripts": []}


def test_platforms_with_names_of_their_own(project: Project, channel: dict[str, Package], cluster: Cluster) -> None:
    packages = [channel["libx"], channel["python"]]
    environment = project.write(packages, "[target.gpu.dependencies]\nabsent = '*'", version=7)
    expected, lock = pixi_recipe(environment, PLATFORM), json.loads((project.path / "pixi.lock").read_text())
    locked = lock["environments"]["default"]["packages"]
    lock["platforms"].append({"name": "gpu", "subdir": SUBDIR, "virtual-packages": ["__cuda=12"]})
    locked["gpu"] = locked[SUBDIR]
    (project.path / "pixi.lock").write_text(json.dumps(lock))
    assert pixi_recipe(environment, PLATFORM).key == expected.key
    del locked[SUBDIR]
    (project.path / "pixi.lock").write_text(json.dumps(lock))
    cluster.refuses(environment, "does not fit the manifest beside it: it lacks absent")


def test_the_manifest_can_be_a_pyproject(project: Project, channel: dict[str, Package], cluster: Cluster) -> None:
    project.write([*channel.values(), pypi("git+https://git.example/left@0123456789", "left")])
    manifest = project.path / "pyproject.toml"
    environment = PixiEnvironment(manifest=str(manifest))
    manifest.write_text("[project]\nname = 'study'\n")
    cluster.refuses(environment, "pyproject.toml has no table tool.pixi; name the manifest of a pixi project")
    manifest.write_text(
        "[project]\nname = 'study'\ndependencies = ['left', 'right>=2']\n[tool.pixi.dependencies]\npython = '*'\n"
    )
    cluster.refuses(environment, "pixi.lock does not fit the manifest beside it: it lacks right; run there: pixi lock")
    manifest.write_text("[project]\nname = 'study'\n[tool.pixi.dependencies]\npython = '*'\n")
    cluster.refuses(environment, "left 1.0 comes from a repository, https://git.example/left@0123456789; name a wheel of it")


def test_a_lock_that_cannot_be_used(project: Project, channel: dict[str, Package], cluster: Cluster) -> None:
    environment, packages = project.environment, list(channel.values())
    cluster.refuses(environment, "pixi.toml cannot be read: No such file or directory; name the pixi.toml or pyproject")
    (project.path / "pixi.toml").write_text("[")
    cluster.refuses(environment, "pixi.toml is not TOML: ")
    (project.path / "pixi.toml").write_text("")
    cluster.refuses(environment, "there is no .*/a pixi project/pixi.lock; run beside it: pixi lock")
    (project.path / "pixi.lock").write_text("version: 99\n")
    cluster.refuses(environment, "pixi.lock cannot be read: found newer lockfile format version 99")
    project.write(packages, "[environments]\ngpu = ['gpu']\n")
    other = environment.model_copy(update={"environment": "cpu"})
    cluster.refuses(other, "the manifest has no environment 'cpu'; it has default, gpu")
    other = environment.model_copy(update={"environment": "gpu"})
    cluster.refuses(other, "pixi.lock does not fit pixi.toml: it lacks the environment 'gpu'; run: pixi lock")
    project.write(packages, subdir="osx-arm64")
    cluster.refuses(
        environment,
        f"pixi.lock has no packages of the environment 'default' for {SUBDIR}, the platform of this machine, but for osx-arm64; "
        f"run: pixi workspace platform add {SUBDIR}",
    )
    project.write(packages, "[dependencies]\nnative = '>=2'\n")
    cluster.refuses(
        environment, "does not fit the manifest .*: it has native 1.0 where the manifest wants >=2; run there: pixi lock"
    )
    project.write(packages, "[dependencies]\nnumpy = '*'\n")
    cluster.refuses(environment, "does not fit the manifest .*: it lacks numpy; run there: pixi lock")
    project.write([channel["libx"]])
    cluster.refuses(environment, "pixi.lock has no Python from conda; add it: pixi add python")
    old = replace(channel["python"], record={**channel["python"].record, "version": "3.9.18"})
    project.write([channel["libx"], old])
    cluster.refuses(environment, "pixi.lock has Python 3.9.18, and an environment of pixi needs 3.10 or newer; lock a newer one")


def test_packages_that_do_not_run_there(project: Project, channel: dict[str, Package], cluster: Cluster) -> None:
    new = replace(channel["native"], record={**channel["native"].record, "constrains": ["__glibc >=2.34"]})
    environment = project.write([channel["libx"], channel["python"], new])
    cluster.refuses(
        environment,
        r"packages in pixi.lock need another glibc than 2.28, which this machine has: native \(__glibc >=2.34\); lock older "
        r'versions, with \[system-requirements\] libc = "2.28"',
    )
    far = wheel(project.path, "far", tag=f"py3-none-manylinux_2_39_{MACHINE}").name
    project.write([channel["libx"], channel["python"], pypi(f"./{far}", "far")])
    cluster.refuses(environment, r"wheels in pixi.lock do not run on this machine \(Python .*, glibc 2.28, .*\): far 1.0; lock")


def test_packages_for_newer_cpus(project: Project, channel: dict[str, Package], cluster: Cluster) -> None:
    """By the package of conda-forge whose version is the level."""
    level = package(project.path, "_x86_64-microarch-level", "3", noarch="generic")
    environment = project.write([channel["libx"], channel["python"], level])
    assert pixi_recipe(environment, replace(PLATFORM, level="x86-64-v3")).commands
    with pytest.raises(ValueError, match="has packages for CPUs of the level x86-64-v3, and here has x86-64-v2; lock others, or"):
        pixi_recipe(environment, replace(PLATFORM, level="x86-64-v2"))


def test_a_package_that_is_not_the_one_in_the_lock(project: Project, channel: dict[str, Package], cluster: Cluster) -> None:
    wrong = replace(channel["native"], record={**channel["native"].record, "sha256": "a" * 64})
    environment = project.write([channel["libx"], channel["python"], wrong])
    cluster.refuses(environment, "native-1.0-0.conda is not the file in the lock: its SHA-256 is")
    half = package(project.path, "half", files={"x": "y"})
    archive = Path(half.url.removeprefix("file://"))
    archive.write_bytes(archive.read_bytes()[:-100])
    record = {**half.record, "sha256": recipe.digest_of(str(archive))}
    environment = project.write([channel["libx"], channel["python"], replace(half, record=record)])
    cluster.refuses(environment, "it cannot be made in .*/base on this machine: .*/half-1.0-0.conda cannot be read: invalid zip")


def test_a_package_for_a_shorter_prefix(project: Project, channel: dict[str, Package], cluster: Cluster) -> None:
    short = package(project.path, "short", files={"x": b"\0/x/lib\0"}, placeholders={"x": "binary"}, placeholder="/x")
    environment = project.write([channel["libx"], channel["python"], short])
    cluster.refuses(environment, "it cannot be made in .*/base on this machine: .*short")


def test_a_variable_of_the_project_may_have_quotes(tmp_path: Path) -> None:
    value = 'say "it\'s $NAME"'
    script = install_conda._activation(str(tmp_path), {"NAME": "me", "SAID": value}, [])
    done = subprocess.run(["bash", "-c", f'{script}\nprintf %s "$SAID"'], capture_output=True, text=True, check=True)
    assert done.stdout == 'say "it\'s me"' and not done.stderr
