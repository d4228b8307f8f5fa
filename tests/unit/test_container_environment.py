"""Containers, on this machine: real scripts and whole runs, with programs that take the documented options of the real ones.

Charliecloud itself runs in the tests of the stack.
"""

import json
import logging
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dagster_rayslurm import (
    BashLauncher,
    ComputeResource,
    ContainerEnvironment,
    HetComponent,
    PreDeployedEnvironment,
    SessionConfig,
    SlurmQueueConfig,
    SlurmResource,
)
from dagster_rayslurm.environments import container, send
from dagster_rayslurm.environments.check import check_environment_on
from dagster_rayslurm.environments.container import explain
from dagster_rayslurm.errors import StartError
from dagster_rayslurm.runtime.protocol.spec import RaySpec
from dagster_rayslurm.ssh.local import LocalConnection

from ..conftest import run_asset, wait_until
from ..fake_slurm import FakeSlurm

RUNTIMES = {"apptainer": "apptainer", "charliecloud": "ch-run", "podman": "podman"}
LOG = logging.getLogger(__name__)

PROGRAM = """\
#!{python} -IS
# Takes the documented options, and runs the command with the variables that it has inside, on this machine.
import json, os, sys
arguments = sys.argv[1:]
with open({log!r}, "a") as log:
    log.write(json.dumps(arguments) + "\\n")
if {fails!r}:
    sys.exit({fails!r})
flags, valued = {flags!r}, {valued!r}
words, options = list(arguments), {{}}
while words and (words[0].startswith("-") or words[0] in {verbs!r}) and words[0] != "--":
    name, equals, value = words.pop(0).partition("=")
    if name in {verbs!r} or name in flags:
        continue
    if name not in valued:
        sys.exit("unknown option " + name)
    options.setdefault(name, []).append(value if equals else words.pop(0))
image = words.pop(0)
if words[0] == "--":
    words.pop(0)
for cd in options.get("--cd", []) + options.get("--pwd", []) + options.get("--workdir", []):
    os.chdir(cd)
os.environ["PATH"] = "/usr/local/bin:/usr/bin:/bin"
os.environ["INSIDE"] = image
os.execvp(words[0], words)
"""
OPTIONS: dict[str, dict[str, Sequence[str]]] = {
    # "apptainer [global options...] exec [exec options...] <container> <command>" (Apptainer 1.3, user guide).
    "apptainer": {"flags": ["--silent", "--nv", "--rocm"], "valued": ["--bind", "--pwd", "--env"], "verbs": ["exec"]},
    # ch-run(1), Charliecloud 0.31, and --write-fake of 0.38.
    "ch-run": {"flags": ["--home", "--write-fake"], "valued": ["--bind", "--cd", "--set-env", "--unset-env"], "verbs": []},
    # podman-run(1), Podman 4.3.
    "podman": {
        "flags": ["--rm", "--env-host", "--rootfs"],
        "valued": [
            *("--log-level", "--userns", "--pid", "--ipc", "--network", "--uts", "--cgroupns", "--pids-limit", "--security-opt"),
            *("--env", "--env-file", "--workdir", "--volume", "--device"),
        ],
        "verbs": ["run"],
    },
}  # fmt: skip


class Cluster:
    """A base directory on this machine, an image, and the programs that run containers."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.base, self.image, self.bin, self.log = path / "base", path / "an image", path / "bin", path / "log"
        self.data = path / "data"
        for each in (self.image, self.bin, self.data):
            each.mkdir()
        for each in (self.base, self.data):  # Where Charliecloud 0.31 can mount something.
            (self.image / each.relative_to("/")).mkdir(parents=True)
        # Else the base directory is below /tmp, which containers see anyway.
        monkeypatch.setattr(container, "_SHARED", ("/dev", "/proc", "/sys"))
        monkeypatch.setenv("PATH", f"{self.bin}:/usr/bin:/bin")
        monkeypatch.setenv("HOME", str(path / "home"))
        monkeypatch.setenv("XDG_CACHE_HOME", str(path / "cache"))
        (path / "home").mkdir()
        (self.image / (path / "home").relative_to("/")).mkdir()
        for name in OPTIONS:
            self.program(name)

    def program(self, name: str, text: str | None = None, fails: str = "") -> None:
        """Put a program on the PATH; one that `fails` prints that."""
        file = self.bin / name
        file.write_text(text or PROGRAM.format(python=sys.executable, log=str(self.log), fails=fails, **OPTIONS[name]))
        file.chmod(0o755)

    def calls(self) -> list[list[str]]:
        """The arguments of all programs so far."""
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []

    def environment(self, runtime: str, **fields: Any) -> ContainerEnvironment:
        return ContainerEnvironment(**{"image": str(self.image), "runtime": runtime, "python": sys.executable, **fields})

    def send(self, environment: ContainerEnvironment) -> str:
        """The prefix of an environment, as another process asks for it."""
        found = send.send_environment(LocalConnection(), environment, str(self.base), LOG)
        assert isinstance(found, PreDeployedEnvironment)
        return found.path

    def check(self, environment: ContainerEnvironment, ray: RaySpec | None = None, pipes: bool = False) -> Any:
        """Send an environment and check it, as before a submission."""
        located = PreDeployedEnvironment(path=self.send(environment))
        return check_environment_on(LocalConnection(), located, ray, pipes, str(self.base / "environments"))

    def refuses(self, environment: ContainerEnvironment, says: str, **needs: Any) -> None:
        with pytest.raises(StartError, match=says) as error:
            self.check(environment, **needs)
        assert "\n" not in str(error.value)

    def compute(self, environment: ContainerEnvironment, **fields: Any) -> ComputeResource:
        queue = SlurmQueueConfig(time_limit="00:10:00")
        defaults = {
            "mode": "slurm",
            "slurm": SlurmResource(remote_base=str(self.base), poll_interval=1, queue=queue),
            "session": SessionConfig(idle_timeout=1),
            "default_launcher": BashLauncher(),
            "environment": environment,
            "local_base": str(self.base) + "-local",
        }
        return ComputeResource(**{**defaults, **fields})


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(tmp_path, monkeypatch)


def start(prefix: str, *arguments: str, cwd: Path, **options: Any) -> "subprocess.Popen[str]":
    """The container's Python as a task of a Slurm step starts it."""
    env = {**os.environ, "SLURM_NODEID": "0", **options}
    pipe = subprocess.PIPE
    return subprocess.Popen([f"{prefix}/bin/python", *arguments], cwd=cwd, env=env, stdout=pipe, stderr=pipe, text=True)


# -- payloads inside -----------------------------------------------------------------------------------------------------

PAYLOAD = """
import os, subprocess, sys
jobs = subprocess.run(["squeue", "--noheader", "--format=%A"], capture_output=True, text=True)
parent = "RAYSLURM_PARENT" in os.environ
open(sys.argv[1], "w").write(repr([os.environ.get("INSIDE"), jobs.stdout.split(), jobs.stderr, os.getcwd(), parent]))
"""


@pytest.mark.parametrize("runtime", list(RUNTIMES))
@pytest.mark.parametrize("mode", ["slurm", "slurm-session"])
def test_payloads_run_inside(cluster: Cluster, fake_slurm: FakeSlurm, tmp_path: Path, runtime: str, mode: str) -> None:
    script, said = tmp_path / "payload.py", tmp_path / "said"
    script.write_text(PAYLOAD)
    compute = cluster.compute(cluster.environment(runtime), mode=mode, data_dir=str(cluster.data))
    ran = run_asset(compute, f"python {script} {said}", uses_pipes=False)
    assert not ran.failures, ran.failures
    inside, jobs, error, cwd, parent = eval(said.read_text())
    assert inside == str(cluster.image)
    assert [len(jobs), error, parent] == [1, "", False]
    assert cwd.startswith(f"{cluster.base}/runs/")
    mounts = [word for word in cluster.calls()[-1] if str(cluster.data) in word]
    assert f"{cluster.data}:{cluster.data}" in mounts[0]
    # Nothing of this is left running.
    assert wait_until(lambda: not [line for line in processes() if str(cluster.base) in line]), processes()


def processes() -> list[str]:
    """The command lines of all processes."""
    return subprocess.run(["ps", "-eo", "args="], capture_output=True, text=True).stdout.splitlines()


def test_programs_of_slurm_run_outside(cluster: Cluster, tmp_path: Path) -> None:
    cluster.program("squeue", '#!/bin/sh\nprintf "<%s>" "$INSIDE" "$@"\necho no such job >&2\nexit 3\n')
    prefix = cluster.send(cluster.environment("charliecloud"))
    code = """
import subprocess
for words in (["squeue", "--format=%A %L", "it's", "$HOME", ""], ["scontrol", "show"]):
    done = subprocess.run(words, capture_output=True, text=True)
    print(done.returncode, done.stdout, done.stderr.strip())
"""
    said, error = start(prefix, "-c", code, cwd=tmp_path).communicate(timeout=30)
    assert said.splitlines()[0] == "3 <><--format=%A %L><it's><$HOME><> no such job", (said, error)
    assert said.splitlines()[1].startswith("127 ")
    (left,) = tmp_path.glob(".slurm.*")
    assert [each.name for each in left.iterdir()] == ["calls"]


def test_what_runs_programs_outside_ends_with_the_runtime(cluster: Cluster, tmp_path: Path) -> None:
    cluster.program("squeue", "#!/bin/sh\necho yes\n")
    prefix = cluster.send(cluster.environment("charliecloud"))
    code = "import os, time\nprint(os.popen('squeue').read().strip(), flush=True)\ntime.sleep(60)"
    runtime = start(prefix, "-c", code, cwd=tmp_path)
    assert runtime.stdout is not None and runtime.stdout.readline() == "yes\n"

    def loops() -> list[int]:
        done = subprocess.run(["pgrep", "-f", f"rayslurm-slurm {tmp_path}"], capture_output=True, text=True)
        return [int(pid) for pid in done.stdout.split()]

    (loop,) = loops()
    assert os.stat(f"/proc/{loop}").st_uid == os.getuid()
    with open(f"/proc/{loop}/stat") as file:
        assert int(file.read().rpartition(")")[2].split()[1]) != runtime.pid  # The runtime ends all its children.
    os.kill(loop, signal.SIGTERM)
    time.sleep(0.1)
    assert loops() == [loop]  # scancel signals the whole step, and the runtime may have a grace period.
    runtime.kill()
    runtime.communicate()
    assert wait_until(lambda: not loops())


@pytest.mark.parametrize("runtime", list(RUNTIMES))
def test_options_and_mounts_in_any_words(cluster: Cluster, tmp_path: Path, runtime: str) -> None:
    odd = tmp_path / "it's a $dir"
    odd.mkdir()
    (cluster.image / "mnt").mkdir()
    environment = cluster.environment(runtime, mounts=[f"{odd}:/mnt"], commands=["export STUDY='a b'"])
    prefix = cluster.send(environment)
    said, error = start(prefix, "-c", "import sys; print(sys.argv[1:])", "a b", "$x", "'", cwd=tmp_path).communicate(timeout=30)
    assert said == """['a b', '$x', "'"]\n""", error
    (call,) = cluster.calls()
    assert {"apptainer": f"--bind={odd}:/mnt", "charliecloud": f"--bind={odd}:/mnt", "podman": f"--volume={odd}:/mnt"}[
        runtime
    ] in call
    assert "STUDY='a b'" in Path(prefix, "activate.sh").read_text()


# -- Pyxis ---------------------------------------------------------------------------------------------------------------


def test_pyxis_is_options_of_srun(cluster: Cluster) -> None:
    environment = cluster.environment(
        "pyxis", image="docker://nvcr.io#nvidia/pytorch:25.01-py3", python="python", options=["--x"]
    )
    cluster.program("srun", "#!/bin/sh\necho '      --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH'\n")
    found = cluster.check(environment, RaySpec())
    assert found.start("-I") == ["python", "-I"]
    assert found.srun == (
        "--container-image=nvcr.io#nvidia/pytorch:25.01-py3",
        f"--container-mounts={cluster.base}:{cluster.base},/tmp:/tmp",
        "--container-mount-home",
        "--no-container-remap-root",
        "--x",
    )


@pytest.mark.parametrize("mode", ["slurm", "slurm-hetjob", "slurm-session"])
def test_jobs_of_pyxis(cluster: Cluster, fake_slurm: FakeSlurm, tmp_path: Path, mode: str) -> None:
    """The fake srun takes Pyxis' options as any others, and runs the task on this machine."""
    image = tmp_path / "image.sqsh"
    image.touch()
    real = fake_slurm.base / "bin" / "srun"
    text = real.read_text().replace("#!/bin/sh\n", '#!/bin/sh\n[ "$1" != --help ] || { echo --container-image; exit; }\n', 1)
    text = text.replace("#!/bin/sh\n", f"#!/bin/sh\nprintf '%s\\n' \"$@\" >>{shlex.quote(str(cluster.log))}\n", 1)
    real.write_text(text)
    components = [HetComponent(component_id=name, queue=SlurmQueueConfig(time_limit="00:10:00")) for name in ("a", "b")]
    fields = {"components": components if mode == "slurm-hetjob" else []}
    environment = cluster.environment("pyxis", image=str(image))
    ran = run_asset(cluster.compute(environment, mode=mode, **fields), ["true"], uses_pipes=False)
    assert not ran.failures, ran.failures
    words = cluster.log.read_text().splitlines()
    assert f"--container-image={image}" in words
    (workdir,) = (word for word in words if word.startswith("--container-workdir="))
    assert os.path.isdir(os.path.dirname(workdir.partition("=")[2]))
    if mode == "slurm-session":
        (manifest,) = cluster.base.glob("sessions/**/offer.json")
        assert f"--container-image={image}" in json.loads(manifest.read_text())["ask"]


# -- images that are fetched or sent ---------------------------------------------------------------------------------------


def test_a_reference_is_fetched_once(cluster: Cluster, tmp_path: Path) -> None:
    """By the documented "apptainer pull [pull options...] [output file] <URI>"."""
    fetched = tmp_path / "fetched"
    text = f'#!/bin/sh\n[ "$2" = pull ] || exec {cluster.bin}/real "$@"\necho "$4" >>{fetched}\nsleep 0.2\necho SIF >"$3"\n'
    (cluster.bin / "apptainer").rename(cluster.bin / "real")
    cluster.program("apptainer", text)
    environment = cluster.environment("apptainer", image="rayproject/ray:2.54.0")
    paths: list[str] = []
    threads = [threading.Thread(target=lambda: paths.append(cluster.send(environment))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fetched.read_text() == "docker://rayproject/ray:2.54.0\n"
    assert len(set(paths)) == 1
    cluster.check(environment)
    cluster.check(environment.model_copy(update={"mounts": [str(cluster.data)]}))
    assert fetched.read_text() == "docker://rayproject/ray:2.54.0\n"  # Other mounts need no other image.
    cluster.program("apptainer", "#!/bin/sh\necho 'FATAL:   While making image: manifest unknown' >&2\nexit 255\n")
    cluster.refuses(
        environment.model_copy(update={"image": "docker://no/such"}), "cannot be made in .*: FATAL: .* manifest unknown"
    )


def test_an_image_of_this_machine_is_sent_and_unpacked_once(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "root"
    for name in ("usr", "etc", "dev"):
        (root / name).mkdir(parents=True)
    (root / "etc/os-release").write_text("first")
    (root / "dev/null").write_text("")

    def pack() -> None:
        with tarfile.open("image.tar.gz", "w:gz") as tar:
            for name in ("usr", "etc", "dev"):
                tar.add(root / name, name)

    pack()
    environment = cluster.environment("charliecloud", image="./image.tar.gz")
    first = cluster.send(environment)
    cluster.check(environment)
    (made,) = {each.resolve() for each in cluster.base.glob("prefixes/*/image/etc/os-release")}
    assert made.read_text() == "first"
    assert not os.path.exists(f"{made.parents[1]}/dev/null")
    assert os.path.isdir(f"{made.parents[1]}{cluster.base}")  # Where something is mounted.
    assert cluster.send(environment) == first
    (root / "etc/os-release").write_text("second")
    pack()
    assert cluster.send(environment) != first
    Path("empty.tar.gz").write_bytes(b"")
    cluster.refuses(environment.model_copy(update={"image": "./empty.tar.gz"}), "cannot be made in .*tar: .*|neither usr nor bin")
    cluster.refuses(
        environment.model_copy(update={"image": "./none.tar"}), "the image .*/none.tar cannot be read on this machine"
    )


def test_an_image_file_of_this_machine_is_sent(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("image.sif").write_bytes(b"SIF")
    environment = cluster.environment("apptainer", image="./image.sif")
    cluster.check(environment)
    (call,) = cluster.calls()
    (image,) = (word for word in call if word.endswith("/image"))
    assert Path(image).read_bytes() == b"SIF"


# -- bad input -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("runtime", list(RUNTIMES))
def test_what_is_missing_is_one_sentence(cluster: Cluster, tmp_path: Path, runtime: str) -> None:
    program, here = RUNTIMES[runtime], os.uname().nodename
    good = cluster.environment(runtime)
    cluster.refuses(
        cluster.environment(runtime, image=str(tmp_path / "no.sif")),
        f"environment: on .* there is no image .*/no.sif on {here}; name",
    )
    cluster.refuses(
        cluster.environment(runtime, mounts=["/nowhere"]), f"there is no /nowhere on {here} to mount into the container"
    )
    cluster.refuses(
        cluster.environment(runtime, python="python4"), r"the image has no python4; name its Python: ContainerEnvironment"
    )
    for said in (
        "ch-run[7]: error: can't init user+mount namespaces: Operation not permitted (ch_core.c:436 1)",
        "\x1b[91mERROR  : Failed to create user namespace: not allowed to create user namespace\n\x1b[0m",
        "cannot clone: Operation not permitted\nError: cannot re-exec process",
    ):
        cluster.program(program, fails=said)
        cluster.refuses(good, rf"{program} may not make user namespaces there \(.*\); ask the administrators")
    (cluster.bin / program).unlink()
    cluster.refuses(good, f"there is no program {program} on {here}; load its module by ContainerEnvironment")


def test_what_an_image_lacks(cluster: Cluster, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    environment = cluster.environment("podman", python=f"{bare}/bin/python")
    install = r"have it installed when the image is made: python3 -m pip install"
    cluster.refuses(environment, rf"the image .* has no Ray; {install} 'ray\[default\]>=2.52'", ray=RaySpec())
    cluster.refuses(environment, f"the image .* has no Dagster Pipes; {install} dagster-pipes", pipes=True)


def test_mount_points_that_an_image_lacks(cluster: Cluster, tmp_path: Path) -> None:
    environment = cluster.environment("charliecloud", mounts=[f"{tmp_path}:/study"])
    cluster.refuses(environment, "the image .* has no directory /study to mount at; make it: mkdir -p .*/an image/study")
    (cluster.bin / "ch-run").rename(cluster.bin / "real")
    helps = "[ \"$1\" != --help ] || { echo '  -W, --write-fake'; exit; }"
    cluster.program("ch-run", f'#!/bin/sh\n{helps}\nexec {cluster.bin}/real "$@"\n')
    cluster.check(environment)
    assert "--write-fake" in cluster.calls()[-1]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"mounts": ["data"]}, "mounts: 'data' is not SOURCE, SOURCE:TARGET or SOURCE:TARGET:OPTIONS with absolute paths"),
        ({"mounts": ["/a:b"]}, "mounts: '/a:b' is not SOURCE"),
        ({"mounts": ["/a:/b:ro"]}, "mounts: Charliecloud has no options for mounts; write '/a:/b'"),
        ({"image": "/images/$NAME"}, "image"),
    ],
)
def test_fields_that_cannot_be(cluster: Cluster, fields: dict[str, Any], says: str) -> None:
    cluster.refuses(cluster.environment("charliecloud", **fields), says)


def test_a_runtime_that_is_not_known() -> None:
    with pytest.raises(ValueError, match="'docker' is not one of 'apptainer', 'charliecloud', 'podman', 'pyxis'"):
        ContainerEnvironment(image="/x.sif", runtime="docker")


def test_pyxis_that_is_not_there(cluster: Cluster, tmp_path: Path) -> None:
    environment = cluster.environment("pyxis", image=str(tmp_path / "none.sqsh"))
    cluster.refuses(environment, r"the image .*/none.sqsh is not there; name one")
    cluster.program("srun", "#!/bin/sh\necho '  --overlap'\n")
    cluster.refuses(environment.model_copy(update={"image": "ray"}), "srun knows no --container-image, so Pyxis is not installed")


def test_errors_of_programs_are_one_line() -> None:
    said = "time=now level=warning msg=x\nError: newuidmap: write to uid_map failed: Operation not permitted\n"
    assert explain(said, "podman").startswith("podman has no range of user ids there (Error: newuidmap: write to uid_map failed")
    assert explain("one\ntwo  three\n", "podman") == "one two three"


def test_the_keeper_ends_with_the_process_that_it_is_told(tmp_path: Path) -> None:
    """Between it and slurmstepd there may be the program that runs the container."""
    code = """
import signal, time
from dagster_rayslurm.runtime.process import processes
def main():
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    open("up", "w").close()
    time.sleep(60)
raise SystemExit(processes.guard(main, in_a_step=True))
"""
    stepd = subprocess.Popen(["sleep", "60"])
    env = {**os.environ, "RAYSLURM_PARENT": str(stepd.pid)}
    keeper = subprocess.Popen([sys.executable, "-c", code], env={**env, "PYTHONPATH": os.getcwd()}, cwd=tmp_path)
    assert wait_until((tmp_path / "up").exists)
    stepd.kill()
    stepd.wait()
    assert keeper.wait(20) == 128 + signal.SIGTERM


def test_the_keeper_goes_on_if_the_process_that_it_is_told_was_never_visible() -> None:
    """As where /proc hides the processes of other users, or where the container has process ids of its own."""
    code = """
import signal, time
from dagster_rayslurm.runtime.process import processes
processes._PARENT_CHECK_INTERVAL = 0.05
def main():
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    time.sleep(1)
    return 7
raise SystemExit(processes.guard(main, in_a_step=True))
"""
    hidden = subprocess.Popen(["true"])
    hidden.wait()
    env = {**os.environ, "RAYSLURM_PARENT": str(hidden.pid), "PYTHONPATH": os.getcwd()}
    assert subprocess.run([sys.executable, "-c", code], env=env, timeout=60).returncode == 7
