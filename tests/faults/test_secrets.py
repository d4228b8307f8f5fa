"""Tests: secrets are nowhere but where they belong, during a run and after it has succeeded or failed."""

import json
import os
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from cryptography.hazmat.primitives import serialization
from dagster._core.remote_representation.external_data import RepositorySnap
from dagster_shared.serdes import serialize_value

from dagster_rayslurm import ComputeResource, HetComponent, RunFailure, SlurmQueueConfig, SlurmResource, SSHConnectionResource
from dagster_rayslurm.ssh.openssh import control_path
from dagster_rayslurm.ssh.pool import connection_to

from ..conftest import pipes_script, small_ray, wait_until
from ..connections.fixtures import end_master
from ..slurm.fixtures import NODES, Site
from .conftest import MODES

pytestmark = pytest.mark.timeout(300)

Make = Callable[..., ComputeResource]

PASSPHRASE, PASSWORD, PLAIN, FROM_ENV = "pa55phrase-of-dev", "pa55word-of-dev", "s3cret-as-it-is", "s3cret-of-a-variable"
SERVICES = ("edge", "slurmctld", *NODES)

ACCOUNTED = {"--format=ALL": "|srun ", "--batch-script": "\nsrun ", "--env-vars": "\nPATH="}
"""What sacct is asked for, and what it tells then: scripts and environments are there by Slurm's `AccountingStoreFlags`."""

SAMPLER = """
import contextlib, os, sys, time
with contextlib.suppress(PermissionError):
    os.nice(-20)
looks, seen, until = {}, set(), time.time() + 240
while time.time() < until and not os.path.exists(sys.argv[1]):
    names = set(filter(str.isdecimal, os.listdir("/proc")))
    looks = {name: looks.get(name, -1) + 1 for name in names}
    for name in names:
        if looks[name] < 8 or looks[name] % 64 == 0:
            try:
                with open("/proc/%s/cmdline" % name, "rb") as file:
                    seen.add(file.read())
            except OSError:
                pass
    time.sleep(0.01)
sys.stdout.buffer.write(b"\\n".join(seen).replace(b"\\0", b" "))
"""
"""Program that collects the command lines of all processes until a file exists; it looks at new processes often.

On a busy machine a short one such as sbatch would escape it without priority over the others.
"""

PAYLOAD = pipes_script("""
import json, os, pathlib, ray, subprocess, sys
assert os.environ["PLAIN"] and os.environ["FROM_ENV"]
ray.init()

@ray.remote
def environment():
    return dict(os.environ)

job = os.environ.get("SLURM_JOB_ID", "")
commands = [["scontrol", "show", "job", "-dd", job], ["squeue", "--format=%all"], ["scontrol", "write", "batch_script", job, "-"]]
commands += [["squeue", "--steps", "--format=%all"], ["scontrol", "show", "step", job], ["scontrol", "listpids"]]
told = [subprocess.run(command, capture_output=True, text=True).stdout for command in commands if job]
token = pathlib.Path(os.environ["RAY_AUTH_TOKEN_PATH"]).read_text()
data = pathlib.Path(os.environ["RAYSLURM_DATA_DIR"])
# Backwards, as this file is looked through as well.
(data / "token").write_text(token[::-1])
# What Dagster's own process has in its environment is handed on in local mode.
not_dagsters = lambda environ: {name: value for name, value in environ.items() if not name.startswith("RS_TEST_")}
own = {name: value for name, value in not_dagsters(os.environ).items() if name not in ("PLAIN", "FROM_ENV")}
(data / "told").write_text(json.dumps([told, own, not_dagsters(ray.get(environment.remote()))]))
for pid in filter(str.isdecimal, os.listdir("/proc")):
    try:
        arguments = pathlib.Path("/proc", pid, "cmdline").read_bytes()
        if b"slurm_script" in arguments:  # Its environment is what Slurm keeps with the job.
            (data / "job_environment").write_bytes(pathlib.Path("/proc", pid, "environ").read_bytes())
    except OSError:
        continue
base = pathlib.Path(os.environ["BASE"])
found = {}
for path in base.rglob("*.json"):
    try:
        text = json.loads(path.read_text())
    except (OSError, ValueError):
        continue
    stack = [text]
    while stack:
        part = stack.pop()
        stack += part.values() if isinstance(part, dict) else part if isinstance(part, list) else []
        if isinstance(part, dict):
            found.update({"%s %s" % (path.name, name): part[name] for name in ("control_key", "key", "token") if part.get(name)})
(data / "keys").write_text(json.dumps({name: str(value)[::-1] for name, value in found.items()}))
pipes.report_asset_materialization(metadata={"well": True})
if os.environ.get("FAILS"):
    raise RuntimeError("as it was asked to")
""")


@pytest.fixture
def encrypted(site: Site, tmp_path: Path) -> str:
    """The private key of the stack's user, encrypted with a passphrase."""
    assert site.ssh.key_path
    key = serialization.load_ssh_private_key(Path(site.ssh.key_path).read_bytes(), None)
    cipher = serialization.BestAvailableEncryption(PASSPHRASE.encode())
    path = tmp_path / "encrypted"
    path.touch(0o600)
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, cipher))
    return str(path)


class Here:
    """This machine, with the methods of `Site` that these tests call."""

    def __init__(self, base: Path) -> None:
        self.base = str(base)

    def sh(self, script: str, *arguments: str) -> str:
        """Run a shell script, and return its output."""
        return subprocess.run(["sh", "-c", script, "sh", *arguments], check=True, capture_output=True, text=True).stdout

    def lines(self, name: str) -> list[str]:
        """The lines of a file in the data directory."""
        return Path(self.base, "data", name).read_text().splitlines()


@contextmanager
def sampled() -> Iterator[list[str]]:
    """The arguments of all processes meanwhile, filled in at the end; those of the stack's containers are seen from here."""
    seen: list[str] = []
    stop = f"/tmp/stop-{os.getpid()}"
    sampler = subprocess.Popen([sys.executable, "-c", SAMPLER, stop], stdout=subprocess.PIPE)
    try:
        yield seen
    finally:
        Path(stop).touch()
        seen += sampler.communicate(timeout=30)[0].decode("utf-8", "replace").splitlines()
        Path(stop).unlink()


def ssh_to(site: Site, mode: str, key: str, passphrase: Any) -> SSHConnectionResource:
    login = {"key_path": key, "key_passphrase": passphrase, "password": PASSWORD}
    client = "openssh" if mode == "slurm-session" else "paramiko"
    return SSHConnectionResource(**{**site.ssh.model_dump(), **login, "client": client})


def computes(mode: str, site: Site, make: Make, session: Make, key: str) -> ComputeResource:
    ssh = ssh_to(site, mode, key, dg.EnvVar("RS_TEST_PASSPHRASE"))
    queue: dict[str, Any] = {"mem": "2500M", "cpus_per_node": 2}
    fields: dict[str, Any] = {"slurm": {"ssh": ssh}, "default_launcher": small_ray()}
    if mode == "slurm":
        return make(queue, **fields)
    if mode == "slurm-session":
        return session(queue, enable_cluster_reuse=True, **fields)
    parts = [
        HetComponent(component_id=name, queue=SlurmQueueConfig(partition=where, time_limit="00:05:00", **queue))
        for name, where in (("cpu", "compute"), ("gpu", "gpu"))
    ]
    return make(mode=mode, components=parts, **fields)


def text_of(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)) + repr(error) + repr(getattr(error, "metadata", ""))


Words = dict[str, str]
"""Texts, each by the place where it was found."""
Look = Callable[[ComputeResource, Site | Here], tuple[Words, Words]]


def job_ids(site: Site) -> list[str]:
    """The ids of the test's jobs, ended ones too. A heterogeneous job has the id of its first component."""
    listed = site.sh("squeue --me --states=all --noheader --format='%i %Z'").splitlines()
    return sorted({line.split()[0].partition("+")[0] for line in listed if f" {site.base}/" in line})


def accounted(site: Site, job: str, option: str) -> str:
    """What accounting tells about a job, as soon as it knows the job."""

    def told() -> str:
        said = site.sh(f"sacct -j {job} --parsable2 {option}")
        return said if ACCOUNTED[option] in said else ""

    text = wait_until(told)
    assert text, (job, option)
    return str(text)


def logs(site: Site, jobs: list[str]) -> Words:
    """The logs of the Slurm daemons that handled these jobs."""
    found = {}
    for service in (*SERVICES, *(("slurmdbd", "database") if site.stack.accounting else ())):
        since = ["docker", "logs", "--since=10m", site.stack.container(service)]
        done = subprocess.run(since, check=True, capture_output=True, text=True)
        files = "cat /var/log/slurm*/* /var/log/*log 2>/dev/null; true"
        found[f"log of {service}"] = done.stdout + done.stderr + site.stack.exec(service, ["sh", "-c", files])
    assert "Accepted publickey for dev" in found["log of edge"]
    for job in jobs:
        assert f"JobId={job} " in found["log of slurmctld"]
        assert any(f"Launching batch job {job} " in found[f"log of {node}"] for node in NODES)
    return found


@pytest.fixture
def look(
    script: Any, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Look:
    """Run a payload that succeeds and one that fails; returns all readable text about them, and the secrets."""
    monkeypatch.setenv("RS_TEST_PASSPHRASE", PASSPHRASE)
    monkeypatch.setenv("RS_TEST_SECRET", FROM_ENV)
    payload = script(PAYLOAD)

    def both(compute: ComputeResource, place: Site | Here) -> tuple[Words, Words]:
        raised: list[RunFailure] = []

        @dg.asset
        def with_secrets(context: dg.AssetExecutionContext, compute: ComputeResource) -> Any:
            secret_env = {"PLAIN": PLAIN, "FROM_ENV": dg.EnvVar("RS_TEST_SECRET")}
            extra_env = {"FAILS": context.run.tags.get("fails", ""), "BASE": place.base}
            try:
                run = compute.run(context=context, payload_path=payload, secret_env=secret_env, extra_env=extra_env)
            except RunFailure as failure:
                raised.append(failure)
                raise
            return run.get_materialize_result()

        said: Words = {}
        secrets = {"passphrase": PASSPHRASE, "password": PASSWORD, "plain": PLAIN, "from a variable": FROM_ENV}
        definitions = dg.Definitions([with_secrets], resources={"compute": compute})
        said["definitions"] = serialize_value(RepositorySnap.from_def(definitions.get_repository_def()))
        said["resource"] = repr(compute) + str(compute)
        instance = dg.DagsterInstance.ephemeral()
        with warnings.catch_warnings(record=True) as warned, sampled() as seen:
            warnings.simplefilter("always")
            for fails in ("", "yes"):
                resources, tags = {"compute": compute}, {"fails": fails}
                ran = dg.materialize([with_secrets], instance=instance, resources=resources, tags=tags, raise_on_error=False)
                assert ran.success == (not fails), raised
                said[f"what the payload saw {fails}"] = "".join(place.lines("told"))
                said[f"events {fails}"] = "".join(map(serialize_value, instance.all_logs(ran.run_id)))
                said[f"run {fails}"] = serialize_value(instance.get_run_by_id(ran.run_id))
                secrets[f"token {fails}"] = place.lines("token")[0][::-1]
                found = json.loads(place.lines("keys")[0])
                secrets.update({f"{name} {fails}": value[::-1] for name, value in found.items()})
        assert raised[0].kind == "payload" and "as it was asked to" in text_of(raised[0])
        said["arguments"] = "\n".join(seen)
        said["warnings"] = "".join(map(str, warned))
        said["failure"] = text_of(raised[0])
        said["logs"] = caplog.text
        said["output"] = "".join(capfd.readouterr())
        return said, secrets

    return both


def check(said: Words, secrets: Words, place: Site | Here) -> None:
    """Check that no readable text contains a secret, and that only the user can read keys of Ray clusters."""
    assert all(len(secret) >= 15 for secret in secrets.values()), secrets
    leaks = [(where, name) for where, text in said.items() for name, secret in secrets.items() if secret in text]
    assert not leaks
    for name, secret in secrets.items():
        holders = place.sh('grep -rlF -e "$2" "$1" 2>/dev/null || true', place.base, secret).splitlines()
        assert not holders or name not in ("passphrase", "password", "plain", "from a variable"), (name, holders)
        modes = {path: place.sh('stat -c %a -- "$1"', path).strip() for path in holders}
        assert set(modes.values()) <= {"400", "600"}, (name, modes)
    # What payloads put into the data directory is for whomever the user's umask lets read it.
    opened = place.sh('cd "$1" && find . -maxdepth 2 -path ./data -prune -o -perm /077 -print', place.base).splitlines()
    assert not opened, opened


@pytest.mark.thorough
@pytest.mark.parametrize("reuse", [False, True], ids=["each its own cluster", "a warm cluster"])
def test_secrets_are_nowhere_else_on_this_machine(reuse: bool, base: Path, look: Look) -> None:
    compute = ComputeResource(local_base=str(base), default_launcher=small_ray(), enable_cluster_reuse=reuse)
    place = Here(base)
    try:
        said, secrets = look(compute, place)
    finally:
        for path in base.rglob("session.json"):
            compute.cleanup_cluster(json.loads(path.read_text())["cluster_id"])
    assert "ray-node" in said["arguments"] and "RAYSLURM_" in said["what the payload saw "]
    check(said, secrets, place)


@pytest.mark.parametrize("mode", MODES)
def test_secrets_are_nowhere_else(
    mode: str, site: Site, slurm_compute: Make, session_compute: Make, encrypted: str, look: Look
) -> None:
    compute = computes(mode, site, slurm_compute, session_compute, encrypted)
    try:
        said, secrets = look(compute, site)
        said["job's environment"] = "".join(site.lines("job_environment"))
        jobs = job_ids(site)
        assert len(jobs) == (1 if mode == "slurm-session" else 2), jobs
        if site.stack.accounting:
            said.update({f"{option} of {job}": accounted(site, job, option) for job in jobs for option in ACCOUNTED})
        said.update(logs(site, jobs))
        assert all(word in said["arguments"] for word in ("sbatch", "slurm_script", "ray-node")), said["arguments"]
        # Processes outside a container do not show their environment inside.
        assert site.in_container or "SLURM_JOB_ID" in said["job's environment"]
        assert "JobName=rayslurm" in said["what the payload saw "]
        assert any("control_key" in name for name in secrets), secrets.keys()
        check(said, secrets, site)
    finally:
        if mode == "slurm-session":  # While the variable of its passphrase is set.
            site.sh("scancel --me")
            assert wait_until(lambda: not site.jobs(), 45)
            ssh = ssh_to(site, mode, encrypted, PASSPHRASE)
            connection_to(ssh).close()
            end_master(control_path(ssh, 0))


# ---- Mistakes


MISTAKES: list[tuple[Any, dict[str, Any]]] = [
    (SSHConnectionResource, {"host": "e", "passwrod": PASSWORD}),
    (SSHConnectionResource, {"host": "e", "password": [PASSWORD]}),
    (SSHConnectionResource, {"host": "e", "key_passphrase": {"a": PASSWORD}}),
    (SSHConnectionResource, {"host": "e", "jump_host": f"dev:{PASSWORD}@jump"}),
    (SlurmResource, {"ssh": {"host": "e", "passwrod": PASSWORD}}),
    (SlurmResource, {"ssh": {"host": ["e"], "password": PASSWORD}}),
    (SlurmResource, {"site": {"TOKEN": [PASSWORD]}}),
    (ComputeResource, {"slurm": {"ssh": {"host": "e", "password": PASSWORD, "prot": 1}}}),
    (ComputeResource, {"slurm": {"ssh": {"host": "e", "passwrod": PASSWORD}}}),
    (ComputeResource, {"secret_env": {"TOKEN": PASSWORD}}),
]


@pytest.mark.parametrize(("kind", "fields"), MISTAKES)
def test_a_mistake_beside_a_secret_does_not_quote_it(kind: Any, fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="validation error") as caught:
        kind(**fields)
    assert PASSWORD not in text_of(caught.value)


@pytest.mark.parametrize("secret_env", [{"A B": PASSWORD}, {"A": 5}, {"RAY_ADDRESS": PASSWORD}, {"A": PASSWORD + "\0"}])
def test_a_variable_that_cannot_be_is_refused_without_its_value(secret_env: Any, compute: ComputeResource) -> None:
    held = []

    @dg.asset
    def refused(context: dg.AssetExecutionContext) -> None:
        try:
            compute.run(context=context, payload_path="python -V", secret_env=secret_env)
        except RunFailure as failure:
            held.append(failure)
            raise

    assert not dg.materialize([refused], raise_on_error=False).success
    assert held[0].kind == "configuration" and PASSWORD not in text_of(held[0])
