"""The check of environments on a cluster, over a connection to this machine with realistic prefixes."""

import os
import shlex
import subprocess
import sys
import threading
import time
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dagster_rayslurm.environments import (
    InheritedEnvironment,
    Interpreter,
    PreDeployedEnvironment,
    check,
    path_on_cluster,
    resolve_environment,
)
from dagster_rayslurm.environments.check import Facts, check_environment_on, refusal
from dagster_rayslurm.errors import StartError
from dagster_rayslurm.runtime.protocol.spec import RaySpec
from dagster_rayslurm.ssh.local import LocalConnection

from ..conftest import MARK, marked_processes

SITE = f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"


class Prefix:
    """A virtual environment with what stands for packages in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        venv.EnvBuilder(symlinks=True).create(path)
        self.site = path / SITE

    def add(self, module: str, distribution: str, version: str | None) -> None:
        """Install a package that cannot even be imported: nobody should try."""
        package = self.site / module
        package.mkdir(exist_ok=True)
        (package / "__init__.py").write_text("raise SystemExit('it was imported')")
        for old in self.site.glob(f"{distribution.replace('-', '_')}-*.dist-info"):
            (old / "METADATA").unlink()
            old.rmdir()
        if version is not None:
            info = self.site / f"{distribution.replace('-', '_')}-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")

    def ray(self, version: str | None = "2.60.0") -> "Prefix":
        self.add("ray", "ray", version)
        return self

    def pipes(self, version: str = "1.13.0") -> "Prefix":
        self.add("dagster_pipes", "dagster-pipes", version)
        return self

    def counting(self) -> Callable[[], int]:
        """Have the Python note its starts."""
        python, log = self.path / "bin/python", self.path / "starts"
        real = self.path / "bin/real-python"
        python.rename(real)
        python.write_text(f'#!/bin/sh\necho >>{shlex.quote(str(log))}\nexec {shlex.quote(str(real))} "$@"\n')
        python.chmod(0o755)
        return lambda: len(log.read_text().splitlines()) if log.exists() else 0


@pytest.fixture
def prefix(tmp_path: Path) -> Prefix:
    return Prefix(tmp_path / "an env").ray().pipes()


@pytest.fixture
def look(tmp_path: Path) -> Callable[..., Interpreter]:
    """Looks at an environment as a new process does."""

    def look(path: Any, connection: LocalConnection | None = None, **needs: Any) -> Interpreter:
        environment = path if isinstance(path, InheritedEnvironment) else PreDeployedEnvironment(path=str(path))
        pipes, cache = needs.get("needs_pipes", True), needs.get("cache_dir", str(tmp_path / "kept"))
        return check_environment_on(connection or LocalConnection(), environment, cluster(**needs), pipes, cache)

    return look


def cluster(ray_version: str | None = None, needs_ray: bool = True, token: bool = True, **_: Any) -> RaySpec | None:
    return RaySpec(ray_version=ray_version, auth="token" if token else "disabled") if needs_ray else None


Look = Callable[..., Interpreter]


def kept(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "kept").iterdir())


# -- which Python ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "with space", "quo'te\"s", "$HOME `id`", "-dash", "é ü", "a*", "sub/../other"])
def test_any_path(tmp_path: Path, look: Look, name: str) -> None:
    if "/" in name:
        (tmp_path / "sub").mkdir()
    made = Prefix(tmp_path / name).ray().pipes()
    assert look(made.path) == Interpreter(str(made.path / "bin/python"))
    assert look(made.path) == resolve_environment(PreDeployedEnvironment(path=str(tmp_path / name))) or ".." in name


@pytest.mark.parametrize("below", ["bin/python3", "env/bin/python"])
def test_other_places_of_a_python(tmp_path: Path, prefix: Prefix, look: Look, below: str) -> None:
    packed = tmp_path / "packed"
    if below.startswith("env/"):
        packed.mkdir()
        (packed / "env").symlink_to(prefix.path)
    else:
        packed = prefix.path
        (packed / "bin/python").unlink()
        (packed / "bin/python3").unlink()
        (packed / "bin/python3").symlink_to(os.path.realpath(sys.executable))
    assert look(packed) == Interpreter(f"{packed}/{below}") == resolve_environment(PreDeployedEnvironment(path=str(packed)))


def test_a_sourced_file_sees_no_arguments(tmp_path: Path) -> None:
    """As conda's `activate` takes them for the name of an environment; and it may set arguments of its own."""
    script = tmp_path / "activate.sh"
    script.write_text("[ $# = 0 ] || exit 3; set -- mine; export FOUND=yes\n")
    command = Interpreter(sys.executable, str(script)).start(
        "-c", "import os, sys; print(os.environ['FOUND'], sys.argv[1:])", "a b", ""
    )
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "yes ['a b', '']\n"


ACTIVATE = """
echo "loading module python/3.11"; echo '{"python": [2, 7]}'; echo oops >&2
cat >/dev/null
cd /usr
"""


def test_output_of_an_activate_script_is_ignored(prefix: Prefix, look: Look) -> None:
    (prefix.path / "activate.sh").write_text(ACTIVATE)
    assert look(prefix.path) == Interpreter(str(prefix.path / "bin/python"), str(prefix.path / "activate.sh"))
    assert look(prefix.path).start("-c", "")[0] == "bash"


def test_an_activate_script_chooses_the_python(tmp_path: Path, prefix: Prefix, look: Look) -> None:
    only = tmp_path / "it's only a script"
    only.mkdir()
    (only / "activate.sh").write_text(f"export PATH={shlex.quote(str(prefix.path))}/bin:$PATH\n")
    found = look(only)
    assert found == Interpreter("python3", str(only / "activate.sh"))
    said = subprocess.run(found.start("-c", "import sys; print(sys.prefix)"), capture_output=True, text=True, check=True)
    assert said.stdout.strip() == str(prefix.path)


def test_packages_on_the_path_that_an_activate_script_sets(tmp_path: Path, prefix: Prefix, look: Look) -> None:
    bare = Prefix(tmp_path / "bare")
    (bare.path / "activate.sh").write_text(f"export PYTHONPATH={shlex.quote(str(prefix.site))}\n")
    assert look(bare.path).activate
    (bare.path / "activate.sh").write_text("true\n")
    with pytest.raises(StartError, match="has no Ray"):
        look(bare.path)


def test_background_processes_of_an_activate_script_are_not_waited_for(prefix: Prefix, look: Look) -> None:
    (prefix.path / "activate.sh").write_text("sleep 60 &\n")
    began = time.monotonic()
    look(prefix.path)
    assert time.monotonic() - began < 30
    for process in marked_processes(os.environ[MARK]):
        process.kill()


def test_the_python_that_runs_dagster(look: Look) -> None:
    assert look(InheritedEnvironment()) == Interpreter(sys.executable)
    assert look(InheritedEnvironment()) == Interpreter(sys.executable)


def test_the_home_directory_is_the_clusters(prefix: Prefix, look: Look) -> None:
    class Elsewhere(LocalConnection):
        def home(self) -> str:
            return str(prefix.path.parent)

    assert look(f"~/{prefix.path.name}", Elsewhere()).python == str(prefix.path / "bin/python")


def test_the_path_of_an_environment_on_the_cluster() -> None:
    assert path_on_cluster(PreDeployedEnvironment(path="/opt/ray"), over_ssh=True) == "/opt/ray"
    assert path_on_cluster(PreDeployedEnvironment(path="~/env"), over_ssh=True) == "~/env"
    assert path_on_cluster(PreDeployedEnvironment(path="env"), over_ssh=False) == os.path.abspath("env")
    assert path_on_cluster(InheritedEnvironment(), over_ssh=False) == sys.executable
    with pytest.raises(ValueError, match=r'is not on the cluster; name the environment there: pre_deployed_env_path="'):
        path_on_cluster(InheritedEnvironment(), over_ssh=True)
    for path in ("env", "./env", "~other/env"):
        with pytest.raises(ValueError, match="does not say where it is on the cluster; write an absolute path"):
            path_on_cluster(PreDeployedEnvironment(path=path), over_ssh=True)


# -- what is wrong with it ---------------------------------------------------------------------------------------------


def test_a_missing_directory_is_refused(tmp_path: Path, look: Look) -> None:
    with pytest.raises(StartError, match=f"^environment: on this machine there is no directory {tmp_path}/nothing, or") as caught:
        look(tmp_path / "nothing")
    assert caught.value.kind == "environment"
    (tmp_path / "file").touch()
    with pytest.raises(StartError, match=f"{tmp_path}/file is a file; name the prefix, the directory that has bin/python in it"):
        look(tmp_path / "file")


def test_a_directory_without_an_environment_is_refused(tmp_path: Path, look: Look) -> None:
    (tmp_path / "empty/bin/python").mkdir(parents=True)
    with pytest.raises(StartError, match=f"{tmp_path}/empty has neither bin/python nor activate.sh; point it at"):
        look(tmp_path / "empty")
    assert not (tmp_path / "kept").exists()


def test_a_dangling_python_is_refused(tmp_path: Path, look: Look) -> None:
    (tmp_path / "old/bin").mkdir(parents=True)
    (tmp_path / "old/bin/python").symlink_to("/usr/bin/python3.1")
    with pytest.raises(StartError, match=r"old/bin/python is a link that leads nowhere; make the environment anew"):
        look(tmp_path / "old")


@pytest.mark.parametrize("script, code", [("echo no such module >&2; false", 1), ("echo quota >&2; exit 3", 3), ("if then", 2)])
def test_an_activate_script_that_fails(prefix: Prefix, look: Look, script: str, code: int) -> None:
    (prefix.path / "activate.sh").write_text(script + "\n")
    says = "syntax error" if code == 2 else "no such module|quota"
    code_is = r"[12]" if code == 2 else str(code)
    with pytest.raises(StartError, match=rf"an env/activate.sh failed with exit code {code_is}: (.|\n)*({says})"):
        look(prefix.path)


def test_an_activate_script_that_ends_the_shell(prefix: Prefix, look: Look) -> None:
    (prefix.path / "activate.sh").write_text("exit 0\n")
    with pytest.raises(StartError, match=r"activate.sh failed with exit code 0$"):
        look(prefix.path)


def test_an_activate_script_that_never_ends(prefix: Prefix, look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "_TIMEOUT", 0.5)
    (prefix.path / "activate.sh").write_text("sleep 60\n")
    with pytest.raises(StartError, match=r"activate\.sh or its Python does not come to an end within 0\.5 s"):
        look(prefix.path)


def test_a_python_that_does_not_start(prefix: Prefix, look: Look) -> None:
    python = prefix.path / "bin/python"
    python.unlink()
    python.write_text("#!/bin/sh\necho 'libpython3.11.so.1.0: cannot open shared object file' >&2\nexit 127\n")
    python.chmod(0o755)
    with pytest.raises(StartError, match=r"an env cannot be started, it ended with exit code 127: libpython3.11.so.1.0: cannot"):
        look(prefix.path)


def test_a_python_that_is_too_old(prefix: Prefix, look: Look) -> None:
    python = prefix.path / "bin/python"
    python.unlink()
    old = "import sys; sys.version_info = (3, 6, 8); sys.modules['importlib.metadata'] = None; exec(sys.argv[1])"
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c "{old}" "$2"\n')
    python.chmod(0o755)
    with pytest.raises(StartError, match=r"an env has Python 3.6.8, and 3.8 or newer is needed"):
        look(prefix.path)


def test_a_missing_ray_is_refused(tmp_path: Path, look: Look) -> None:
    bare = Prefix(tmp_path / "bare").pipes()
    (bare.site / "ray").mkdir()  # What an uninstallation leaves.
    with pytest.raises(
        StartError, match=r"bare has no Ray; install it there: .*/bin/python -m pip install 'ray\[default\]>=2.52'"
    ):
        look(bare.path)
    with pytest.raises(StartError, match=r"'ray\[default\]==2.55.1'"):
        look(bare.path, ray_version="2.55.1")
    assert look(bare.path, needs_ray=False)


def test_another_version_of_ray_is_refused(prefix: Prefix, look: Look) -> None:
    with pytest.raises(StartError, match=r"has Ray 2.60.0, and ray_version asks for 2.55.1"):
        look(prefix.path, ray_version="2.55.1")
    assert look(prefix.path, ray_version="2.60.0") and look(prefix.path, ray_version="2.55.1", needs_ray=False)


def test_a_ray_without_token_authentication_is_refused(prefix: Prefix, look: Look) -> None:
    prefix.ray("2.49.0")
    with pytest.raises(StartError, match=r"an env: Ray 2.49.0 has no token authentication .* RayLauncher\(auth=\"disabled\"\)"):
        look(prefix.path)
    assert look(prefix.path, token=False) and look(prefix.path, needs_ray=False)


def test_a_ray_that_does_not_say_its_version(prefix: Prefix, look: Look) -> None:
    prefix.ray(None)
    assert look(prefix.path, ray_version="2.60.0")  # The runtime asks Ray itself before it starts it.


def test_missing_pipes_are_refused(tmp_path: Path, look: Look) -> None:
    bare = Prefix(tmp_path / "bare").ray()
    with pytest.raises(StartError, match=r"bare has no Dagster Pipes; install it there: .*pip install dagster-pipes"):
        look(bare.path)
    assert look(bare.path, needs_pipes=False)


def test_packages_of_dagsters_own_process_do_not_count(
    tmp_path: Path, prefix: Prefix, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without SSH its environment is at hand, but jobs do not get it."""
    monkeypatch.setenv("PYTHONPATH", str(prefix.site))
    with pytest.raises(StartError, match="has no Dagster Pipes"):
        look(Prefix(tmp_path / "other").ray().path)


def test_a_refusal_names_the_first_problem() -> None:
    fine = Facts(Interpreter("/e/bin/python"), (3, 11, 2), "2.60.0", "1.13.0")
    assert refusal(fine, "/e", RaySpec(ray_version="2.60.0"), True) is None
    assert "Python 3.7.1" in str(refusal(Facts(fine.interpreter, (3, 7, 1), None, None), "/e", None, False))
    nightly = Facts(fine.interpreter, (3, 14), "3.0.0.dev0", "")
    assert refusal(nightly, "/e", RaySpec(), True) is None


# -- what is kept ------------------------------------------------------------------------------------------------------


def test_a_known_environment_starts_no_python(tmp_path: Path, prefix: Prefix, look: Look) -> None:
    starts = prefix.counting()
    first = look(prefix.path)
    assert starts() == 1
    assert look(prefix.path) == first == Interpreter(str(prefix.path / "bin/python")) and starts() == 1
    (answer,) = kept(tmp_path)
    assert len(answer.name) == 32 and answer.stat().st_mode & 0o077 == 0 and answer.parent.stat().st_mode & 0o077 == 0


def test_a_known_environment_with_a_script_is_not_activated(prefix: Prefix, look: Look) -> None:
    log = prefix.path / "activations"
    (prefix.path / "activate.sh").write_text(f"echo x >>{shlex.quote(str(log))}\n")
    assert look(prefix.path) == look(prefix.path)
    assert log.read_text() == "x\n"
    (prefix.path / "activate.sh").write_text(f"echo y >>{shlex.quote(str(log))}\n")
    look(prefix.path)
    assert log.read_text() == "x\ny\n"


@pytest.mark.parametrize(
    "change",
    [
        lambda prefix: prefix.ray("2.61.0"),
        lambda prefix: (prefix.site / "more.pth").touch(),
        lambda prefix: (prefix.path / "pyvenv.cfg").write_text((prefix.path / "pyvenv.cfg").read_text() + "\n"),
        lambda prefix: (prefix.path / "activate.sh").touch(),
        lambda prefix: os.utime(prefix.path / "bin/python"),
    ],
    ids=["an upgrade", "a path file", "pyvenv.cfg", "an activate.sh", "another Python"],
)
def test_a_changed_environment_is_probed_again(prefix: Prefix, look: Look, change: Callable[[Prefix], Any]) -> None:
    starts = prefix.counting()
    look(prefix.path)
    change(prefix)
    look(prefix.path)
    assert starts() == 2
    look(prefix.path)
    assert starts() == 2


def test_a_recreated_environment_is_probed_again(prefix: Prefix, look: Look) -> None:
    look(prefix.path)
    subprocess.run(["rm", "-r", prefix.path], check=True)
    with pytest.raises(StartError, match="there is no directory"):
        look(prefix.path)
    Prefix(prefix.path).pipes()
    with pytest.raises(StartError, match="has no Ray"):
        look(prefix.path)


def test_a_refusal_is_not_cached(prefix: Prefix, look: Look) -> None:
    connection = LocalConnection()
    prefix.ray("2.49.0")
    with pytest.raises(StartError, match="no token authentication"):
        look(prefix.path, connection)
    prefix.ray("2.60.0")
    look(prefix.path, connection)
    prefix.ray("2.61.0")
    look(prefix.path, connection, ray_version="2.61.0")  # What this process knows would refuse it.


def test_a_cached_answer_is_never_the_reason_to_refuse(tmp_path: Path, prefix: Prefix, look: Look) -> None:
    look(prefix.path)
    (answer,) = kept(tmp_path)
    answer.write_text(answer.read_text().replace('"2.60.0"', '"2.40.0"'))
    assert look(prefix.path)
    assert '"2.60.0"' in answer.read_text()


@pytest.mark.parametrize("text", ["", "\n", "garbage", "{}", "[]"])
def test_a_damaged_cache_entry_is_replaced(tmp_path: Path, prefix: Prefix, look: Look, text: str) -> None:
    starts = prefix.counting()
    look(prefix.path)
    (answer,) = kept(tmp_path)
    answer.write_text(text)
    assert look(prefix.path) and starts() == 2
    assert look(prefix.path) and starts() == 2


def test_a_cached_answer_expires(tmp_path: Path, prefix: Prefix, look: Look) -> None:
    starts = prefix.counting()
    look(prefix.path)
    (answer,) = kept(tmp_path)
    os.utime(answer, (time.time() - 86500,) * 2)
    look(prefix.path)
    look(prefix.path)
    assert starts() == 2


def test_a_process_caches_the_answer(prefix: Prefix, look: Look) -> None:
    class Counting(LocalConnection):
        commands = 0

        def call(self, *arguments: Any, **named: Any) -> Any:
            self.commands += 1
            return super().call(*arguments, **named)

    connection = Counting()
    for _ in range(3):
        look(prefix.path, connection)
    assert connection.commands == 1
    with pytest.raises(StartError):
        look(prefix.path, connection, ray_version="1.0")
    assert connection.commands == 3  # Asked, then asked anew.


@pytest.mark.parametrize(("imports", "starts"), [([], 1), (["json"], 2)])
def test_each_start_of_python_has_its_time(imports: list[str], starts: int, tmp_path: Path, prefix: Prefix) -> None:
    class Timed(LocalConnection):
        def call(self, *arguments: Any, **named: Any) -> Any:
            assert starts < named["timeout"] / arguments[-1] < starts + 1  # The last argument has the seconds for each start.
            return super().call(*arguments, **named)

    wanted = PreDeployedEnvironment(path=str(prefix.path), imports=imports)
    assert check_environment_on(Timed(), wanted, cluster(), True, str(tmp_path / "kept"))


def test_concurrent_checks_agree(tmp_path: Path, prefix: Prefix, look: Look) -> None:
    found: list[Interpreter] = []
    threads = [threading.Thread(target=lambda: found.append(look(prefix.path))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [Interpreter(str(prefix.path / "bin/python"))] * 8
    assert len(kept(tmp_path)) == 1


def test_an_unwritable_cache_is_an_error(tmp_path: Path, prefix: Prefix, look: Look) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="Not a directory"):
        look(prefix.path, cache_dir=str(tmp_path / "file/kept"))
