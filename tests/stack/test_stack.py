"""The Slurm stack does what tests of the cluster modes will ask of it, and its tool says what is wrong."""

import os
import shlex
import stat
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import paramiko
import pytest

from stack import access, cluster
from stack.errors import StackError
from stack.image import node
from stack.settings import COMPUTE_NODES, DEBIANS, ROOT, Settings
from tests.conftest import wait_until

from .access import Stack

EATER = "import time; eaten = b'x' * 400_000_000; time.sleep(60)"
"""A program that takes 400 MB."""


def shell(stack: Stack, script: str, user: str = "dev", service: str = "edge") -> str:
    return stack.exec(service, ["sh", "-c", script], user=user)


def submit(stack: Stack, *options: str, script: str) -> str:
    return stack.exec("edge", ["sbatch", "--parsable", *options, "--wrap", script], user="dev").strip()


def finish(stack: Stack, job: str) -> str:
    """State, reason and exit code of a job that has ended, with all its components."""

    def ended() -> list[str]:
        said = shell(stack, f"squeue --noheader --states=all --jobs={job} --format='%T|%r'").splitlines()
        going_on = [line for line in said if line.startswith(("PENDING", "RUNNING", "COMPLETING"))]
        return [] if going_on else said

    said = wait_until(ended)
    assert said, f"job {job} goes on"
    shown = shell(stack, f"scontrol show job {job}").split()
    codes = [word.removeprefix("ExitCode=") for word in shown if word.startswith("ExitCode=")]
    assert len(set(said)) == len(set(codes)) == 1, (said, codes)
    return f"{said[0]}|{codes[0]}"


# The cluster


def test_nodes_partitions_and_version(stack: Stack) -> None:
    expected = {
        *(f"{name} {partition} 4 4096 (null) idle" for name in ("c1", "c2") for partition in ("compute*", "all")),
        *(f"{name} {partition} 4 4096 gpu:fake:2 idle" for name in ("g1", "g2") for partition in ("gpu", "all")),
    }
    # A job of another test may just be ending.
    nodes = ["sinfo", "--noheader", "--Node", "--format=%N %P %c %m %G %T"]
    assert wait_until(lambda: set(stack.exec("edge", nodes).splitlines()) == expected), stack.exec("edge", nodes)
    for service in ("edge", "slurmctld", *COMPUTE_NODES):
        assert f" {DEBIANS[stack.debian]}." in stack.exec(service, ["sinfo", "--version"])


def test_nodes_are_machines_of_their_own(stack: Stack) -> None:
    said = shell(stack, "srun --nodes=2 sh -c 'echo $(hostname) $(id -un)' | sort")
    assert said.splitlines() == ["c1 dev", "c2 dev"]
    assert len({stack.ip(service) for service in COMPUTE_NODES}) == 4
    for directory, seen in (("/tmp", False), ("/home/dev", True), ("/scratch", True)):
        shell(stack, f"srun --nodelist=c1 touch {directory}/of-c1")
        assert ("of-c1" in shell(stack, f"srun --nodelist=c2 ls {directory}")) == seen
        shell(stack, f"srun --nodelist=c1 rm {directory}/of-c1")


def test_gpus(stack: Stack) -> None:
    tell = "'echo $CUDA_VISIBLE_DEVICES'"
    assert shell(stack, f"srun --partition=gpu --gres=gpu:1 sh -c {tell}") == "0\n"
    assert shell(stack, f"srun --partition=gpu --gpus-per-node=2 sh -c {tell}") == "0,1\n"
    one = "srun --partition=gpu --nodelist=g1 --gres=gpu:1 sh -c 'echo $CUDA_VISIBLE_DEVICES; sleep 1'"
    assert sorted(shell(stack, f"{one} & {one} & wait").split()) == ["0", "1"]
    assert "fakegpu" not in shell(stack, "srun ls /dev")


def test_two_users(stack: Stack) -> None:
    assert shell(stack, "srun id -un", user="other") == "other\n"
    shell(stack, "echo mine > note")
    assert shell(stack, "srun cat /home/dev/note") == "mine\n"
    refused = stack.exec("edge", ["srun", "cat", "/home/dev/note"], user="other", check=False)
    assert "Permission denied" in refused and "mine" not in refused
    shell(stack, "rm note")


def test_batch_job(stack: Stack) -> None:
    job = submit(stack, "--output=/scratch/%j.out", script="echo from $(hostname); exit 3")
    assert finish(stack, job) == "FAILED|NonZeroExitCode|3:0"
    assert shell(stack, f"cat /scratch/{job}.out; rm /scratch/{job}.out") == "from c1\n"
    accounted = f"sacct --noheader --parsable2 --allocations --jobs={job} --format=State,ExitCode,Account,User"
    if stack.accounting:
        assert wait_until(lambda: shell(stack, accounted).strip() == "FAILED|3:0|study|dev"), shell(stack, accounted)
    else:
        assert "accounting storage is disabled" in stack.exec("edge", shlex.split(accounted), user="dev", check=False)


def test_a_job_above_its_memory_is_killed(stack: Stack) -> None:
    """No cgroup counts here, so it is no OUT_OF_MEMORY: Slurm looks each second, cancels the step and says why."""
    reason = {"bookworm": "JobLaunchFailure", "trixie": "RaisedSignal:9(Killed)"}[stack.debian]
    eat = f'python3 -c "{EATER}"'
    batch = submit(stack, "--mem=100", "--output=/scratch/%j.out", script=eat)
    step = submit(stack, "--mem=100", "--output=/scratch/%j.out", script=f"srun {eat}; echo srun ended with $?")
    assert finish(stack, batch) == f"FAILED|{reason}|0:9"
    assert finish(stack, step) == "COMPLETED|None|0:0"
    said = shell(stack, f"cat /scratch/{batch}.out; rm /scratch/{batch}.out")
    assert f"StepId={batch}.batch exceeded memory limit" in said
    said = shell(stack, f"cat /scratch/{step}.out; rm /scratch/{step}.out")
    assert f"StepId={step}.0 exceeded memory limit" in said and "srun ended with 137" in said
    if stack.accounting:
        expected = {
            (batch, "FAILED", "0:9"),
            (f"{batch}.batch", "CANCELLED by 0", "0:9"),
            (step, "COMPLETED", "0:0"),
            (f"{step}.batch", "COMPLETED", "0:0"),
            (f"{step}.0", "CANCELLED by 0", "0:9"),
        }
        command = f"sacct --noheader --parsable2 --jobs={batch},{step} --format=JobID,State,ExitCode"

        def accounted() -> set[tuple[str, ...]]:
            return {tuple(line.split("|")) for line in shell(stack, command).splitlines()}

        assert wait_until(lambda: accounted() == expected), accounted()


def test_ray_on_a_compute_node(stack: Stack) -> None:
    python = stack.env["RAYSLURM_ENV_PATH"] + "/bin/python"
    assert shell(stack, f"srun {python} -c 'import dagster_pipes, ray; print(ray.__version__)'").count(".") == 2


def test_heterogeneous_job(stack: Stack) -> None:
    tell = "sh -c 'echo $SLURM_PROCID $(hostname) $CUDA_VISIBLE_DEVICES'"
    job = submit(
        stack,
        "--output=/scratch/%j.out",
        "--nodes=2",
        ":",
        "--partition=gpu",
        "--gres=gpu:1",
        script=f"srun --het-group=0,1 {tell}",
    )
    assert finish(stack, job) == "COMPLETED|None|0:0"
    assert sorted(shell(stack, f"cat /scratch/{job}.out; rm /scratch/{job}.out").splitlines()) == ["0 c1", "1 c2", "2 g1 0"]


def test_login(stack: Stack) -> None:
    for user in ("dev", "other"):
        client = paramiko.SSHClient()
        client.load_host_keys(stack.env["SLURM_EDGE_NODE_KNOWN_HOSTS_FILE"])
        port, key = int(stack.env["SLURM_EDGE_NODE_PORT"]), stack.env["SLURM_EDGE_NODE_KEY_PATH"]
        client.connect(stack.env["SLURM_EDGE_NODE_HOST"], port, user, key_filename=key, allow_agent=False, look_for_keys=False)
        with client:
            assert (
                client.exec_command("id -un; hostname; squeue --version | cut -c 1-5")[1].read()
                == f"{user}\nedge\nslurm\n".encode()
            )
            mode = client.open_sftp().stat(f"/home/{user}").st_mode
            assert mode is not None and stat.S_IMODE(mode) == 0o700


def test_second_up_disturbs_nothing_and_nothing_is_left(stack: Stack) -> None:
    job = submit(stack, "--output=/dev/null", script="sleep 100")
    running = f"squeue --noheader --jobs={job} --states=RUNNING"
    assert wait_until(lambda: shell(stack, running))
    services = ("slurmctld", "edge", *COMPUTE_NODES)
    before = [stack.container(service) for service in services]
    settings = {"RAYSLURM_STACK_DEBIAN": stack.debian, "RAYSLURM_STACK_ACCOUNTING": "on" if stack.accounting else "off"}
    done = subprocess.run(
        [sys.executable, "-m", "stack", "up"], cwd=ROOT, env={**os.environ, **settings}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert [stack.container(service) for service in services] == before
    assert shell(stack, running)
    shell(stack, f"scancel {job}")
    finish(stack, job)
    for service in services:
        processes = stack.exec(service, ["ps", "--no-headers", "-eo", "stat,user:10,comm"]).splitlines()
        assert not [line for line in processes if line.startswith("Z")], processes
        assert service == "edge" or not [line for line in processes if line.split()[1] in node.USERS], processes


# Its tool


def test_keys_are_private_and_made_once(tmp_path: Path) -> None:
    settings = replace(Settings(), directory=tmp_path / "the stack's", ssh_port=2222)
    first = access.ensure_keys(settings)
    assert access.ensure_keys(settings) == first
    keys = access.keys_directory(settings)
    assert stat.S_IMODE(keys.stat().st_mode) == 0o700
    assert Counter(stat.S_IMODE(path.stat().st_mode) for path in keys.iterdir()) == {0o600: 5}
    (keys / "munge.key").unlink()
    assert access.ensure_keys(settings) != first
    access.write_environment(settings)
    access.write_known_hosts(settings)
    command = '. "$1" && cat "$SLURM_EDGE_NODE_KNOWN_HOSTS_FILE"'
    said = subprocess.run(["sh", "-c", command, "sh", str(access.environment_file(settings))], capture_output=True, text=True)
    assert said.stdout.startswith("[127.0.0.1]:2222 ssh-ed25519 AAAA")
    assert access.read_environment(settings) == access.environment(settings)


def test_git_ignores_what_is_secret_or_of_this_machine() -> None:
    for path, code in (
        (".stack/keys/id_ed25519", 0),
        (".stack/env", 0),
        ("stack/image/ca/bundle.pem", 0),
        ("stack/image/ca/.gitkeep", 1),
    ):
        assert subprocess.run(["git", "check-ignore", "--quiet", path], cwd=ROOT).returncode == code, path


def test_configuration() -> None:
    assert "AccountingStorageHost=slurmdbd" in node.slurm_conf(accounting=True)
    assert "accounting_storage/none" in node.slurm_conf(accounting=False)
    assert "slurmdbd" not in node.slurm_conf(accounting=False)


def test_settings(tmp_path: Path) -> None:
    assert Settings.from_environment({}) == Settings()
    chosen = {"DEBIAN": "trixie", "ACCOUNTING": "off", "SSH_PORT": "2222", "PROJECT": "mine", "DIR": str(tmp_path)}
    settings = Settings.from_environment({f"RAYSLURM_STACK_{name}": value for name, value in chosen.items()})
    assert settings == Settings("trixie", False, 2222, "mine", tmp_path)
    assert settings.image == "rayslurm-stack:trixie"
    assert settings.services == ("slurmctld", "edge", *COMPUTE_NODES)


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("DEBIAN", "buster", "bookworm (Slurm 22.05) or trixie (Slurm 24.11)"),
        ("ACCOUNTING", "maybe", "on or off"),
        ("SSH_PORT", "ssh", "from 1 to 65535"),
        ("PROJECT", "Mine!", "lower-case letters"),
    ],
)
def test_a_wrong_setting_is_named(name: str, value: str, remedy: str) -> None:
    with pytest.raises(StackError) as raised:
        Settings.from_environment({f"RAYSLURM_STACK_{name}": value})
    assert f"RAYSLURM_STACK_{name}={value} " in raised.value.message and remedy in raised.value.message


def commands(directory: Path, **scripts: str) -> str:
    """A PATH with these shell scripts alone."""
    for name, text in scripts.items():
        path = directory / name.replace("_", "-")
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    return str(directory)


def test_what_docker_lacks_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sentence(**scripts: str) -> str:
        monkeypatch.setenv("PATH", commands(tmp_path, **scripts))
        with pytest.raises(StackError) as raised:
            cluster.find_compose()
        return raised.value.message

    assert "install Docker" in sentence()
    assert "systemctl start docker" in sentence(docker="echo Cannot connect >&2; exit 1")
    assert "join the group `docker`" in sentence(docker="echo 'Permission denied while trying' >&2; exit 1")
    assert "install it" in sentence(docker='test "$1" = version')


def test_either_compose_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", commands(tmp_path, docker='test "$1" = version', docker_compose="exit 0"))
    assert cluster.find_compose() == ["docker-compose"]
    commands(tmp_path, docker="exit 0")
    assert cluster.find_compose() == ["docker", "compose"]


def test_a_taken_port_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = 'case "$*" in *"up "*) echo Bind for 127.0.0.1:22022 failed: port is already allocated >&2; exit 1;; esac'
    monkeypatch.setenv("PATH", commands(tmp_path, docker=taken))
    with pytest.raises(StackError, match="set RAYSLURM_STACK_SSH_PORT"):
        cluster.Cluster(Settings()).up("")


def test_ca_bundle_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "ca").mkdir()
    (tmp_path / "bundle").write_text("certificates")
    cluster.provide_ca(tmp_path / "ca", {})
    assert not list((tmp_path / "ca").iterdir())
    cluster.provide_ca(tmp_path / "ca", {"PIP_CERT": str(tmp_path / "none"), "SSL_CERT_FILE": str(tmp_path / "bundle")})
    cluster.provide_ca(tmp_path / "ca", {})
    assert (tmp_path / "ca" / "bundle.pem").read_text() == "certificates"


@pytest.mark.parametrize(("arguments", "sentence"), [(["compute"], "make stack-up"), (["potato"], "a role is needed")])
def test_a_container_by_hand_says_what_it_needs(arguments: list[str], sentence: str) -> None:
    done = subprocess.run([sys.executable, str(ROOT / "stack" / "image" / "node.py"), *arguments], capture_output=True, text=True)
    assert done.returncode == 1 and sentence in done.stderr
