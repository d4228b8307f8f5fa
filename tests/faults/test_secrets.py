"""Secrets are where they belong and nowhere else: while runs go on, and after they have ended well or badly."""

import json
import os
import subprocess
import sys
import threading
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

from ..conftest import pipes_script, small_ray
from ..slurm.fixtures import NODES, Site

pytestmark = pytest.mark.timeout(300)

Make = Callable[..., ComputeResource]

PASSPHRASE, PASSWORD, PLAIN, FROM_ENV = "pa55phrase-of-dev", "pa55word-of-dev", "s3cret-as-it-is", "s3cret-of-a-variable"
SERVICES = ("edge", "slurmctld", *NODES)

SAMPLER = """
import os, sys, time
seen, until = set(), time.time() + 240
while time.time() < until and not os.path.exists(sys.argv[1]):
    for name in os.listdir("/proc"):
        if name.isdecimal():
            for kind in ("cmdline", "comm"):
                try:
                    with open("/proc/%s/%s" % (name, kind), "rb") as file:
                        seen.add(file.read())
                except OSError:
                    pass
    time.sleep(0.01)
sys.stdout.buffer.write(b"\\n".join(seen).replace(b"\\0", b" "))
"""
"""Collects the arguments of all processes of a machine until a file is there."""

PAYLOAD = pipes_script("""
import json, os, pathlib, ray, subprocess, sys
assert os.environ["PLAIN"] and os.environ["FROM_ENV"]
ray.init()

@ray.remote
def environment():
    return dict(os.environ)

job = os.environ["SLURM_JOB_ID"]
commands = [["scontrol", "show", "job", "-dd", job], ["squeue", "--format=%all"], ["scontrol", "write", "batch_script", job, "-"]]
commands += [["squeue", "--steps", "--format=%all"], ["scontrol", "show", "step", job], ["scontrol", "listpids"]]
told = [subprocess.run(command, capture_output=True, text=True).stdout for command in commands]
token = pathlib.Path(os.environ["RAY_AUTH_TOKEN_PATH"]).read_text()
data = pathlib.Path(os.environ["RAYSLURM_DATA_DIR"])
# Backwards, as this file is looked through as well.
(data / "token").write_text(token[::-1])
own = {name: value for name, value in os.environ.items() if name not in ("PLAIN", "FROM_ENV")}
(data / "told").write_text(json.dumps([told, own, ray.get(environment.remote())]))
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
    """The key of the stack's user, with a passphrase."""
    assert site.ssh.key_path
    key = serialization.load_ssh_private_key(Path(site.ssh.key_path).read_bytes(), None)
    cipher = serialization.BestAvailableEncryption(PASSPHRASE.encode())
    path = tmp_path / "encrypted"
    path.touch(0o600)
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, cipher))
    return str(path)


@contextmanager
def sampled(site: Site) -> Iterator[dict[str, str]]:
    """The arguments of all processes on all machines meanwhile, by machine; filled in at the end."""
    seen: dict[str, str] = {}
    stop = f"/tmp/stop-{os.path.basename(site.base)}"
    here = subprocess.Popen([sys.executable, "-c", SAMPLER, stop], stdout=subprocess.PIPE)

    def there(service: str) -> None:
        seen[service] = site.stack.exec(service, ["python3", "-c", SAMPLER, stop])

    threads = [threading.Thread(target=there, args=(service,)) for service in SERVICES]
    for thread in threads:
        thread.start()
    try:
        yield seen
    finally:
        for service in SERVICES:
            site.stack.exec(service, ["touch", stop])
        Path(stop).touch()
        seen["here"] = here.communicate(timeout=30)[0].decode("utf-8", "replace")
        for thread in threads:
            thread.join(30)
        Path(stop).unlink()
        for service in SERVICES:
            site.stack.exec(service, ["rm", "-f", stop])


def computes(mode: str, site: Site, make: Make, session: Make, key: str) -> ComputeResource:
    ssh = SSHConnectionResource(
        **{
            **site.ssh.model_dump(),
            "key_path": key,
            "key_passphrase": dg.EnvVar("RS_TEST_PASSPHRASE"),
            "password": PASSWORD,
            "client": "openssh" if mode == "slurm-session" else "paramiko",
        }
    )
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


@pytest.mark.parametrize("mode", ["slurm", "slurm-session", "slurm-hetjob"])
def test_secrets_are_nowhere_else(
    mode: str,
    site: Site,
    slurm_compute: Make,
    session_compute: Make,
    encrypted: str,
    script: Any,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RS_TEST_PASSPHRASE", PASSPHRASE)
    monkeypatch.setenv("RS_TEST_SECRET", FROM_ENV)
    compute = computes(mode, site, slurm_compute, session_compute, encrypted)
    payload = script(PAYLOAD)
    raised: list[RunFailure] = []

    @dg.asset
    def with_secrets(context: dg.AssetExecutionContext, compute: ComputeResource) -> Any:
        fails = context.run.tags.get("fails", "")
        secret_env = {"PLAIN": PLAIN, "FROM_ENV": dg.EnvVar("RS_TEST_SECRET")}
        extra_env = {"FAILS": fails, "BASE": site.base}
        try:
            run = compute.run(context=context, payload_path=payload, secret_env=secret_env, extra_env=extra_env)
        except RunFailure as failure:
            raised.append(failure)
            raise
        return run.get_materialize_result()

    instance = dg.DagsterInstance.ephemeral()
    said: dict[str, str] = {}
    keys: dict[str, str] = {}
    jobs = set()
    with warnings.catch_warnings(record=True) as warned, sampled(site) as seen:
        warnings.simplefilter("always")
        for fails in ("", "yes"):
            result = dg.materialize(
                [with_secrets],
                resources={"compute": compute},
                instance=instance,
                raise_on_error=False,
                tags={"fails": fails},
            )
            assert result.success == (not fails), raised
            said[f"told {fails}"] = "".join(site.lines("told"))
            if mode != "slurm-session":
                said[f"job's environment {fails}"] = "".join(site.lines("job_environment"))
            keys.update({f"token {fails}": site.lines("token")[0][::-1]})
            found = json.loads(site.lines("keys")[0])
            keys.update({f"{name} {fails}": value[::-1] for name, value in found.items()})
            jobs.update(site.submitted() if mode == "slurm-session" else [])
            said[f"events {fails}"] = "".join(map(serialize_value, instance.all_logs(result.run_id)))
            run = instance.get_run_by_id(result.run_id)
            assert run is not None
            said[f"run {fails}"] = serialize_value(run)
    assert any("control_key" in name for name in keys) and all(len(value) >= 32 for value in keys.values()), keys.keys()
    said.update({f"arguments on {name}": text for name, text in seen.items()})
    assert "slurm_script" in said["arguments on c1"] + said["arguments on c2"] and "sbatch" in said["arguments on edge"]
    said["warnings"] = "".join(map(str, warned))
    said["failure"] = "".join(map(text_of, raised))
    said["logs"] = caplog.text
    said["output"] = "".join(capfd.readouterr())
    said["repr"] = repr(compute) + str(compute)
    definitions = dg.Definitions([with_secrets], resources={"compute": compute})
    said["definitions"] = serialize_value(RepositorySnap.from_def(definitions.get_repository_def()))
    said["sacct"] = site.sh(
        "sacct --user=dev --format=ALL --parsable2 2>&1; for a in --batch-script --env-vars; do "
        "sacct --user=dev $a 2>&1; done; true"
    )
    for service in SERVICES:
        logs = subprocess.run(["docker", "logs", "--since=10m", site.stack.container(service)], capture_output=True, text=True)
        said[f"log of {service}"] = logs.stdout + logs.stderr
        said[f"logs on {service}"] = site.stack.exec(
            service, ["sh", "-c", "cat /var/log/slurm*/* /var/log/*log 2>/dev/null; true"]
        )
    cli = subprocess.run(
        [sys.executable, "-m", "dagster_rayslurm.cli", "session", "list", "--help"], capture_output=True, text=True
    )
    said["command line"] = cli.stdout + cli.stderr

    secrets = {"passphrase": PASSPHRASE, "password": PASSWORD, "plain": PLAIN, "from a variable": FROM_ENV, **keys}
    leaks = [(where, name) for where, text in said.items() for name, secret in secrets.items() if secret in text]
    assert not leaks
    # Of files on the cluster, those of the user alone hold keys of clusters, and none a value of `secret_env`.
    holders = {
        name: site.sh('grep -rlF -e "$2" "$1" 2>/dev/null || true', site.base, secret).splitlines()
        for name, secret in secrets.items()
    }
    assert not any(holders[name] for name in ("passphrase", "password", "plain", "from a variable")), holders
    for path in {path for paths in holders.values() for path in paths}:
        assert site.sh('stat -c %a -- "$1"', path).strip() in ("600", "400"), path
    opened = site.sh('cd "$1" && find . -maxdepth 2 -type d -perm /077', site.base).splitlines()
    assert not opened, opened


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
