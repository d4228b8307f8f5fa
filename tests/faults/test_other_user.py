"""Tests: another user of the same Slurm cluster can read nothing of a run, connect to nothing, and disturb nothing."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from dagster_rayslurm import ComputeResource, HetComponent, SlurmQueueConfig

from ..conftest import pipes_script, run_asset, small_ray, wait_until
from ..slurm.fixtures import Running, Site
from .conftest import MODES

pytestmark = pytest.mark.timeout(300)

Make = Callable[..., ComputeResource]
Refusals = dict[str, dict[str, int]]
"""The number of refusals by address of a port and by code."""

PYTHON = "/opt/ray/bin/python"
STRANGER = (Path(__file__).parent / "stranger.py").read_text()
SECRET = "s3cret-of-dev"
ROOTS = ["/tmp", "/var/tmp", "/dev/shm", "/run", "/scratch", "/home", "/var/lib/slurm", "/var/log", "/var/spool", "/opt/ray"]
NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
MANY = 200
"""Number of silent connections that the stranger keeps open, more than a session's port and its backlog take."""

BUSY = pipes_script("""
import os, pathlib, time, ray
ray.init()

@ray.remote
class Worker:
    def environment(self):
        return dict(os.environ)

worker = Worker.remote()
environment = ray.get(worker.environment.remote())
data = pathlib.Path(os.environ["RAYSLURM_DATA_DIR"])
(data / "token").write_text(pathlib.Path(os.environ["RAY_AUTH_TOKEN_PATH"]).read_text())
(data / "address").write_text(os.environ["RAY_ADDRESS"])
(data / "up").write_text("x")
while not (data / "go").exists():
    time.sleep(0.05)
alive = ray.get(worker.environment.remote()) == environment
pipes.report_asset_materialization(metadata={"alive": alive, "secret there": "SECRET" in environment})
""")
"""Payload that is busy until the test lets it end."""

QUICK = pipes_script('pipes.report_asset_materialization(metadata={"done": True})')
MEETS = """
import sys, ray
ray.init(address=sys.argv[1])
print("IN", len(ray.nodes()))
"""


@pytest.fixture
def commons(site: Site) -> Iterator[Site]:
    """The stack with its base directory in a place where all users may write, so that only the modes of files protect them."""
    site.base = site.base.replace("/home/dev/", "/scratch/")
    yield site
    site.stack.exec("edge", ["rm", "-rf", site.base, open_to_all(site)])


def open_to_all(site: Site) -> str:
    """A file that the stranger can read, which proves that the search works."""
    return f"{site.base}.open"


@pytest.fixture
def traps(site: Site) -> Iterator[str]:
    """Links that the stranger makes beforehand under predictable names. They lead to a directory that must stay empty."""
    trap, uid = "/tmp/trap", site.stack.exec("edge", ["id", "-u", "dev"]).strip()
    names = f"ray rayslurm-{uid} rs-00000000 rayslurm-ports-{uid}"
    plant = f'umask 0; mkdir -p "$1"; cd /tmp; for each in {names}; do ln -sfn "$1" "$each" || exit; done'
    places = ("edge", "c1", "c2", "g1", "g2")

    def clear(service: str) -> None:
        site.stack.exec(service, ["sh", "-c", f'cd /tmp; rm -rf "$1" {names}', "sh", trap])

    try:
        for service in places:
            clear(service)  # The user's own, from before.
            site.stack.exec(service, ["sh", "-c", plant, "sh", trap], user="other")
        yield trap
        found = {service: site.stack.exec(service, ["find", trap, "-mindepth", "1", "-user", "dev"]) for service in places}
    finally:
        for service in places:
            clear(service)
    assert not any(found.values()), found


def listening(site: Site, service: str) -> list[tuple[str, int]]:
    """The hosts and ports where the user's processes listen in a container."""
    ports = []
    for line in site.stack.exec(service, ["ss", "-ltnpH"], user="dev").splitlines():
        if "pid=" in line:
            host, _, port = line.split()[3].rpartition(":")
            ports.append((reached_at(host.strip("[]"), site.stack.ip(service)), int(port)))
    return ports


def reached_at(host: str, own: str) -> str:
    """The address at which a listener is reached, given one of the machine's own."""
    return own if host in ("*", "0.0.0.0", "::") else host.removeprefix("::ffff:")


def paths(site: Site, service: str) -> list[str]:
    """The paths of all files of the user in a container, without those that Ray's dashboard comes with."""
    script = 'find "$1" "$1.open" /tmp/rs-* /dev/shm -user dev 2>/dev/null || true'
    return site.stack.exec(service, ["sh", "-c", script, "sh", site.base], user="dev").splitlines()


def got(site: Site, service: str) -> dict[str, Any]:
    """The result of the stranger's attack in a container; on a compute node it runs in the stranger's own job."""
    given = [json.dumps(each) for each in (listening(site, service), paths(site, service), ROOTS)]
    command = [PYTHON, "-c", STRANGER, "try", "dev", *given]
    if service != "edge":
        command = ["srun", "--quiet", "--partition=all", f"--nodelist={service}", "--mem=300M", "--chdir=/tmp", *command]
    said = site.stack.exec("edge", command, user="other")
    return dict(json.loads(said.splitlines()[-1]))


def check(site: Site, service: str, secrets: dict[str, str]) -> Refusals:
    """Check that the stranger's attack in a container gets nothing; returns the refusals."""
    return check_found(got(site, service), open_to_all(site), secrets)


def check_found(found: dict[str, Any], to_be_found: str, secrets: dict[str, str]) -> Refusals:
    """Check that the stranger found the one readable file and no more; returns the refusals."""
    assert found["files"] == found["opened"] == [to_be_found] and not found["processes"], found
    for address, answers in found["answers"].items():
        for where, text in answers.items():
            assert is_harmless(where, str(text)), (address, where, text)
    for name, secret in secrets.items():
        assert secret not in json.dumps(found), name
    return dict(found["refusals"])


def ports_with(code: str, refusals: Refusals) -> int:
    """The number of ports that refused a request with a code."""
    return sum(code in codes for codes in refusals.values())


def is_harmless(where: str, text: str) -> bool:
    """Whether this is an answer that Ray 2.60 gives everybody: its health, that it needs a token, an empty page, metrics."""
    path = where.removesuffix(" with a wrong token")
    known = {"GET /": "<!doctype html>", "GET /api/authentication_mode": '{"authentication_mode": "token"}'}
    lives = path in ("GET /api/gcs_healthz", "GET /api/local_raylet_healthz") and text == "success"
    return lives or text.startswith("# HELP ") or text.startswith(known.get(path, "\0"))


def keys(site: Site) -> dict[str, str]:
    """The secrets of a run, its Ray cluster and its session."""
    found = {"secret": SECRET, "token": site.lines("token")[0]}
    specs = site.sh('find "$1" -name "runtime*.json" -o -name session.json | xargs cat', site.base)
    decoder, rest = json.JSONDecoder(), specs.lstrip()
    while rest:
        spec, end = decoder.raw_decode(rest)
        found.update({name: spec[name] for name in ("control_key", "key", "token") if spec.get(name)})
        rest = rest[end:].lstrip()
    assert "control_key" in found or "key" in found, specs
    return found


@contextlib.contextmanager
def held_open(site: Site, host: str, port: int) -> Iterator[None]:
    """Keeps `MANY` silent connections of the stranger open."""
    command = ["docker", "exec", "-i", "-u", "other", site.stack.container("edge"), PYTHON, "-c", STRANGER, "hold", host]
    holder = subprocess.Popen([*command, str(port), str(MANY)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert int(holder.stdout.readline()) > MANY / 2
        yield
    finally:
        holder.communicate("\n", timeout=20)


def try_ray(site: Site, node: str, address: str) -> None:
    """Try to use Ray's own clients without a token and with a wrong one."""
    for token in ({}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}):
        # Ray asks some twenty times else, whatever is said to it.
        setting = {"HOME": "/nonexistent", "RAY_NUM_REDIS_GET_RETRIES": "3", **token}
        command = ["env", *(f"{name}={value}" for name, value in setting.items()), "timeout", "25", PYTHON, "-c", MEETS, address]
        said = site.stack.exec(node, command, user="other", check=False)
        assert "IN " not in said and "ray.exceptions.AuthenticationError" in said, said[-2000:]


def start_one(mode: str, make: Make, session: Make, ray: Any) -> ComputeResource:
    queue = {"num_nodes": 2, "mem": "2500M", "cpus_per_node": 2}
    if mode == "slurm":
        return make(queue, default_launcher=ray)
    if mode == "slurm-session":
        return session(queue, {"max_concurrent_payloads": 2}, default_launcher=ray, enable_cluster_reuse=True)
    parts = [
        HetComponent(
            component_id=name,
            queue=SlurmQueueConfig(partition=partition, time_limit="00:05:00", mem="2500M", cpus_per_node=2),
        )
        for name, partition in (("cpu", "compute"), ("gpu", "gpu"))
    ]
    return make(mode="slurm-hetjob", default_launcher=ray, components=parts)


@pytest.mark.parametrize("mode", MODES)
def test_a_stranger_gets_hold_of_nothing(
    mode: str,
    commons: Site,
    traps: str,
    slurm_compute: Make,
    session_compute: Make,
    start: Callable[..., Running],
    script: Any,
) -> None:
    site = commons
    # With a range, ports are divided by locks below a name that can be foreseen.
    ray = small_ray(dashboard=True, port_range="21000-21999" if mode == "slurm" else None)
    compute = start_one(mode, slurm_compute, session_compute, ray)
    running = start(compute, script(BUSY), secret_env={"SECRET": SECRET})
    running.up()
    secrets = keys(site)
    site.sh('umask 022; echo x >"$1"', open_to_all(site))
    nodes = [node for node in ("c1", "c2", "g1", "g2") if site.processes(node)]
    assert len(nodes) == 2, nodes
    # The raylet, its two agents and their metrics listen in their own time.
    assert wait_until(lambda: all(len(listening(site, node)) >= 7 for node in nodes), 60)
    found = {service: check(site, service, secrets) for service in ("edge", *nodes)}
    # It did speak to Ray: by its own protocol with each daemon and worker, by HTTP with each agent and the head's dashboard.
    (head, worker), address = nodes, site.lines("address")[0]
    assert found[head][address]["UNAUTHENTICATED"], found
    assert all(ports_with("UNAUTHENTICATED", found[node]) >= 3 for node in nodes), found
    # 401 is said where there is no token, and 403 to a wrong one.
    assert all(ports_with(code, found[head]) > ports_with(code, found[worker]) > 0 for code in ("401", "403")), found
    try_ray(site, head, address)
    if mode == "slurm-session":
        announced = json.loads(site.sh('find "$1" -path "*/sessions/*" -name session.json -exec cat {} +', site.base))
        quick = script(QUICK, "quick.py")
        with held_open(site, site.stack.ip(announced["hostname"]), announced["port"]):
            second = run_asset(compute, quick)
        assert second.metadata["done"] and second.completed[0].job_id == running.job()
    site.sh('touch "$1/data/go"', site.base)
    ran = running.result()
    assert not ran.failures, ran.failures[0].description
    assert ran.metadata["alive"] and not ran.metadata["secret there"]


@pytest.fixture
def open_place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory of this machine that all users can read, for base directories and scratch directories."""
    if os.geteuid() != 0 or subprocess.run([*NOBODY, sys.executable, "-c", "import grpc"], capture_output=True).returncode:
        pytest.skip("only root can be somebody else, whom this Python must be open to")
    path = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp"))
    path.chmod(0o755)
    monkeypatch.setenv("TMPDIR", str(path))
    yield path
    try:
        assert wait_until(lambda: not list(path.glob("rs-*"))), list(path.glob("rs-*"))
    finally:
        shutil.rmtree(path)


@pytest.mark.thorough
def test_a_stranger_gets_hold_of_nothing_on_this_machine(open_place: Path, script: Any) -> None:
    base = open_place / "base"
    compute = ComputeResource(local_base=str(base), default_launcher=small_ray(dashboard=True, num_cpus_per_node=2))
    control = open_place / "open"
    control.write_text("x")
    control.chmod(0o644)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run_asset, compute, script(BUSY), secret_env={"SECRET": SECRET})
        try:
            up = base / "data" / "up"
            assert wait_until(lambda: running.done() or up.exists(), 90) and not running.done()
            ports = {
                (reached_at(each.laddr.ip, "127.0.0.1"), each.laddr.port)
                for process in psutil.Process().children(recursive=True)
                for each in process.net_connections("tcp")
                if each.status == psutil.CONN_LISTEN
            }
            known = [str(path) for path in (control, *open_place.glob("rs-*/**/*"), *base.rglob("*"))]
            given = [json.dumps(each) for each in (sorted(ports), known, [str(open_place)])]
            command = [*NOBODY, sys.executable, "-c", STRANGER, "try", "root", *given]
            said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            secrets = {"secret": SECRET, "token": (base / "data" / "token").read_text()}
            refusals = check_found(json.loads(said), str(control), secrets)
            assert all(ports_with(code, refusals) >= 3 for code in ("UNAUTHENTICATED", "401", "403")), refusals
            port = (base / "data" / "address").read_text().rpartition(":")[2]
            assert refusals[f"127.0.0.1:{port}"]["UNAUTHENTICATED"], (port, refusals)
        finally:
            (base / "data" / "go").write_text("x")
        ran = running.result(60)
    assert not ran.failures and ran.metadata["alive"] and not ran.metadata["secret there"]


@pytest.mark.parametrize("taken", ["", "bundles", "runtime", "runs", "sessions"])
def test_a_base_directory_that_a_stranger_made_is_refused(
    taken: str, commons: Site, slurm_compute: Make, session_compute: Make, script: Any
) -> None:
    """Else a runtime, a bundle or a run directory of the stranger's would be what runs as the user."""
    site = commons
    user = "dev" if taken else "other"
    site.stack.exec("edge", ["sh", "-c", 'umask 0; mkdir "$1"', "sh", site.base], user=user)
    if taken:
        site.stack.exec("edge", ["mkdir", "-m", "777", f"{site.base}/{taken}"], user="other")
        site.stack.exec("edge", ["chmod", "700", site.base], user="dev")
    make = session_compute if taken == "sessions" else slurm_compute
    failure = run_asset(make(), script(QUICK)).failure
    assert failure.kind == "configuration" and not failure.allow_retries
    assert "belongs to other, who could change what runs there" in (failure.description or "")
    assert not site.jobs() and not site.stack.exec("edge", ["find", site.base, "-name", "job.sh"])


def test_a_base_directory_that_is_open_to_all_is_refused(commons: Site, slurm_compute: Make, script: Any) -> None:
    site = commons
    site.stack.exec("edge", ["mkdir", "-m", "777", site.base], user="dev")
    failure = run_asset(slurm_compute(), script(QUICK)).failure
    assert failure.kind == "configuration" and f"chmod o-w {site.base}" in (failure.description or "")
    site.stack.exec("edge", ["chmod", "755", site.base], user="dev")
    assert run_asset(slurm_compute(), script(QUICK)).metadata["done"]
    modes = site.sh('cd "$1" && find . -mindepth 1 -maxdepth 1 -type d ! -name data ! -perm 700', site.base)
    assert not modes, modes


def test_jobs_are_not_the_strangers_to_change(
    commons: Site, slurm_compute: Make, start: Callable[..., Running], script: Any
) -> None:
    """Nor to be read more of than Slurm shows to everybody."""
    site = commons
    wait = 'import os, pathlib, time\npathlib.Path(os.environ["RAYSLURM_DATA_DIR"], "up").write_text("x")\n' + (
        'while not pathlib.Path(os.environ["RAYSLURM_DATA_DIR"], "go").exists(): time.sleep(0.05)'
    )
    running = start(slurm_compute(), script(wait), uses_pipes=False, secret_env={"SECRET": SECRET})
    job_id = running.up()
    try:
        for command in (
            ["scancel", job_id],
            ["scancel", "--signal=USR1", job_id],
            ["scontrol", "update", f"jobid={job_id}", "timelimit=1"],
            ["scontrol", "write", "batch_script", job_id, "-"],
            ["srun", "--overlap", f"--jobid={job_id}", "true"],
            ["sattach", f"{job_id}.0"],
        ):
            said = site.stack.exec("edge", ["timeout", "20", *command], user="other", check=False)
            assert any(word in said.lower() for word in ("denied", "invalid", "not permitted", "error", "no tasks")), (
                command,
                said,
            )
        shown = site.stack.exec("edge", ["scontrol", "show", "job", "-dd", job_id], user="other")
        assert SECRET not in shown and f"JobId={job_id}" in shown
        if site.stack.accounting:
            for option, line in (("--batch-script", "\nsrun "), ("--env-vars", "\nPATH=")):
                asked = ["sacct", "-j", job_id, option]
                assert wait_until(lambda asked=asked, line=line: line in site.stack.exec("edge", asked, user="dev")), option
                told = site.stack.exec("edge", asked, user="other", check=False)
                assert line not in told and job_id not in told, told
    finally:
        site.sh('touch "$1/data/go"', site.base)
    assert not running.result().failures
