"""Runs on the stack's Slurm, each with a base directory of its own, and the proof that nothing is left there."""

import json
import os
import shlex
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dagster_rayslurm import BashLauncher, ComputeResource, SessionConfig, SlurmQueueConfig, SlurmResource, SSHConnectionResource
from dagster_rayslurm.ssh.base import Connection
from dagster_rayslurm.ssh.openssh import control_path
from dagster_rayslurm.ssh.pool import connection_to

from ..conftest import Ran, pipes_script, run_asset, wait_until
from ..connections.fixtures import end_master
from ..stack.access import Stack
from .container import BASE, prefix_after, prefix_inside

ROOT = Path(__file__).resolve().parents[2]
NODES = ("c1", "c2", "g1", "g2")

HEARS_USR1 = pipes_script("""
import signal, time
heard = []
signal.signal(signal.SIGUSR1, lambda *_: heard.append(time.time()))
began = time.time()
while not heard and time.time() - began < 50:
    time.sleep(0.1)
pipes.report_asset_materialization(metadata={"after": heard[0] - began})
""")
"""A payload that reports after how many seconds it has heard SIGUSR1."""

_DEFINITIONS = """
import dagster as dg
from dagster_rayslurm import *

@dg.asset
def slow(context: dg.AssetExecutionContext, compute: ComputeResource):
    return compute.run(context=context, payload_path={payload!r}, uses_pipes=False).get_materialize_result()

compute = ComputeResource(**{compute})
job = dg.define_asset_job("job", "slow", executor_def=dg.{executor})
defs = dg.Definitions([slow], jobs=[job], resources={{"compute": compute}})
"""


@contextmanager
def dagster_run(
    directory: Path, compute: str, payload: Path, executor: str = "in_process_executor"
) -> Iterator["subprocess.Popen[bytes]"]:
    """A Dagster run in a process of its own, which writes to `log`; `compute` is Python for the resource's fields."""
    definitions = directory / "definitions.py"
    definitions.write_text(_DEFINITIONS.format(payload=str(payload), compute=compute, executor=executor))
    env = {**os.environ, "DAGSTER_HOME": str(directory), "DAGSTER_DISABLE_TELEMETRY": "yes"}
    command = [sys.executable, "-m", "dagster", "job", "execute", "-f", str(definitions), "-j", "job"]
    with open(directory / "log", "wb") as log:
        process = subprocess.Popen(command, env=env, cwd=directory, stdout=log, stderr=log, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@dataclass
class Site:
    """The stack as a site: how to reach it, and a base directory of the test's own."""

    stack: Stack
    ssh: SSHConnectionResource
    base: str
    env_path: str
    killed: bool = False
    """Whether runtimes were killed with their keepers: what they leave is swept by the next one on the node."""

    @property
    def in_container(self) -> bool:
        """Whether payloads run in a container."""
        return self.env_path.startswith(f"{BASE}/")

    @property
    def connection(self) -> Connection:
        return connection_to(self.ssh)

    def login(self, first: str = "", **variables: str) -> Connection:
        """A connection as if the user's start-up files set these variables and then ran the shell commands `first`."""
        path = f"{self.base}/python-{uuid.uuid4().hex[:8]}"
        lines = ["#!/bin/sh", *(f"export {name}={shlex.quote(value)}" for name, value in variables.items()), first]
        self.connection.make_dir(self.base)
        self.connection.write(path, "\n".join([*lines, 'exec python3 "$@"', ""]).encode(), mode=0o700)
        return connection_to(self.ssh.model_copy(update={"python": path}))

    def env_after(self, script: str, python: str = "/opt/ray/bin/python") -> str:
        """The environment of payloads with a shell script that runs before its Python starts, in the container if it is there.

        Another `python` is one in the directory `env` below the base directory.
        """
        if self.in_container:
            return prefix_after(self.connection, self.base, script, python)
        self.connection.make_dir(f"{self.base}/env")
        self.connection.write(f"{self.base}/env/activate.sh", f"{script}\nexport PATH=/opt/ray/bin:$PATH\n".encode(), mode=0o700)
        return f"{self.base}/env"

    def sh(self, script: str, *arguments: str) -> str:
        """What a shell script prints on the edge, as the user."""
        done = self.connection.run(["sh", "-c", script, "sh", *arguments])
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode()

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a terminal that works on this site."""
        own = {name: value for name, value in self.stack.env.items() if name.startswith("SLURM_EDGE_NODE_")}
        more = {"RAYSLURM_REMOTE_BASE": self.base, "RAYSLURM_ENV_PATH": self.env_path, "RAYSLURM_BASE": "/nonexistent"}
        return {**os.environ, **own, **more}

    def rayslurm(self, *arguments: str, directory: Path | None = None) -> "subprocess.CompletedProcess[str]":
        """Run the command in a process of its own."""
        command = [sys.executable, "-m", "dagster_rayslurm.cli", *arguments]
        return subprocess.run(
            command, env=self.environment, cwd=directory, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
        )

    def jobs(self) -> list[str]:
        """Ids of the user's jobs that are not over."""
        return self.sh("squeue --me --noheader --format=%A").split()

    def submitted(self) -> list[str]:
        """Ids of the jobs of sessions below the base directory, over or not: Slurm remembers them for minutes."""
        listed = self.sh("squeue --me --states=all --noheader --format='%A %Z'").splitlines()
        return [line.split()[0] for line in listed if f"{self.base}/" in line and "/sessions/" in line]

    def lines(self, name: str) -> list[str]:
        """Lines of a file in the data directory."""
        return self.connection.read(f"{self.base}/data/{name}", 0, 1 << 20).decode().splitlines()

    def processes(self, service: str) -> list[str]:
        """Command lines of the user's processes in a container, but for what a login needs."""
        listed = self.stack.processes(service)
        return [line for line in listed if not line.startswith(("sshd: ", "/usr/lib/openssh/sftp-server"))]

    def left(self, service: str) -> list[str]:
        """Scratch directories of the runtime on a node, and what a dashboard of Ray might leave."""
        if self.killed:
            code = "import sys; sys.path.insert(0, sys.argv[1]); from rayslurm_runtime.process import scratch; scratch.sweep()"
            runtime = self.sh('ls "$1"/runtime/*.pyz', self.base).strip()
            self.stack.exec(service, ["/opt/ray/bin/python", "-c", code, runtime], user="dev")
        return self.stack.look(service, "ls -d /tmp/rs-* /var/tmp/rs-* /tmp/pymp-*").split()


@pytest.fixture(scope="session")
def site_ssh(stack: Stack) -> SSHConnectionResource:
    values = {name: value for name, value in stack.env.items() if name.startswith("SLURM_EDGE_NODE_")}
    return SSHConnectionResource(
        host=values["SLURM_EDGE_NODE_HOST"],
        port=int(values["SLURM_EDGE_NODE_PORT"]),
        user=values["SLURM_EDGE_NODE_USER"],
        key_path=values["SLURM_EDGE_NODE_KEY_PATH"],
        known_hosts_file=values["SLURM_EDGE_NODE_KNOWN_HOSTS_FILE"],
    )


@pytest.fixture(scope="session")
def env_path(stack: Stack, site_ssh: SSHConnectionResource, request: pytest.FixtureRequest) -> str:
    """The environment of payloads: that of the nodes, or with the parameter "container" the same in a container."""
    inside = getattr(request, "param", "") == "container"
    return prefix_inside(connection_to(site_ssh)) if inside else stack.env["RAYSLURM_ENV_PATH"]


@pytest.fixture
def site(stack: Stack, site_ssh: SSHConnectionResource, env_path: str) -> Iterator[Site]:
    """The stack; afterwards it must be as quiet as it was."""
    base = f"/home/dev/t-{uuid.uuid4().hex[:8]}"
    place = Site(stack, site_ssh, base, env_path)
    yield place
    try:
        assert wait_until(lambda: not place.jobs(), 45), place.sh("squeue --me")
        for service in NODES:
            assert wait_until(lambda node=service: not place.processes(node)), (service, place.processes(service))
            assert wait_until(lambda node=service: not place.left(node)), (service, place.left(service))
        assert not (own := [line for line in place.processes("edge") if base in line]), own
    finally:
        place.sh('scancel --quiet --me; chmod -R u+w -- "$1" 2>/dev/null; rm -rf -- "$1"', base)


@pytest.fixture
def openssh(site_ssh: SSHConnectionResource) -> Iterator[SSHConnectionResource]:
    """The stack by the `ssh` program, whose master connection ends with the test."""
    ssh = SSHConnectionResource(**{**site_ssh.model_dump(), "client": "openssh"})
    yield ssh
    connection_to(ssh).close()
    end_master(control_path(ssh, 0))


@pytest.fixture
def slurm_compute(site: Site, tmp_path: Any) -> Callable[..., ComputeResource]:
    """Makes resources for mode "slurm" on the stack; `queue` fields and resource fields may be given."""

    def make(queue: dict[str, Any] | None = None, **fields: Any) -> ComputeResource:
        asked = {"partition": "compute", "time_limit": "00:05:00", **(queue or {})}
        slurm = {"ssh": site.ssh, "queue": SlurmQueueConfig(**asked), "remote_base": site.base, "poll_interval": 1}
        slurm.update(fields.pop("slurm", {}))
        defaults: dict[str, Any] = {
            "mode": "slurm",
            "slurm": SlurmResource(**slurm),
            "pre_deployed_env_path": site.env_path,
            "default_launcher": BashLauncher(grace_period=3),
            "local_base": str(tmp_path / "base"),
        }
        return ComputeResource(**{**defaults, **fields})

    return make


@pytest.fixture
def session_compute(site: Site, slurm_compute: Callable[..., ComputeResource]) -> Iterator[Callable[..., ComputeResource]]:
    """Makes resources for mode "slurm-session"; what they have started is ended with the test, as a user would end it."""
    made: list[ComputeResource] = []

    def make(queue: dict[str, Any] | None = None, session: dict[str, Any] | None = None, **fields: Any) -> ComputeResource:
        config = SessionConfig(**{"idle_timeout": 60, **(session or {})})
        made.append(slurm_compute(queue, **{"mode": "slurm-session", "session": config, **fields}))
        return made[-1]

    yield make
    if site.jobs():
        specs = site.sh('find "$1" -path "*/sessions/*/runtime.json" -exec sh -c \'tr -d "\\n" <"$1"; echo\' _ {} ";"', site.base)
        for cluster_id in {json.loads(spec)["cluster_id"] for spec in specs.splitlines()}:
            any(compute.cleanup_cluster(cluster_id) for compute in made)


class Elsewhere:
    """Dagster processes of their own that use a session; see `elsewhere.py`."""

    def __init__(self, site: Site, directory: Path, payload: Path, names: Sequence[str], **options: Any) -> None:
        home = directory / f"home-{uuid.uuid4().hex[:6]}"
        home.mkdir()
        queue = {"partition": "compute", "time_limit": "00:05:00", **options.pop("queue", {})}
        order = {
            "ssh": {**site.ssh.model_dump(), **options.pop("ssh", {})},
            "queue": queue,
            "slurm": {"remote_base": site.base, "poll_interval": 1},
            "session": {"idle_timeout": 60, **options.pop("session", {})},
            "fields": {"mode": "slurm-session", "pre_deployed_env_path": site.env_path, "local_base": str(home / "base")},
            "payload": str(payload),
            "names": names,
            "env": options.pop("env", {}),
        }
        assert not options, options
        self._log = home / "log"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.slurm.elsewhere", json.dumps(order)],
            cwd=ROOT,
            env={**os.environ, "HOME": str(home)},
            stdout=subprocess.PIPE,
            stderr=self._log.open("wb"),
            start_new_session=True,
        )

    def results(self, timeout: float = 120) -> list[dict[str, Any]]:
        """What each of them says."""
        try:
            said = self.process.communicate(timeout=timeout)[0]
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, 9)
            raise AssertionError(self._log.read_text()[-4000:]) from None
        found = [json.loads(line) for line in said.splitlines()]
        assert found, self._log.read_text()[-4000:]
        return found

    def kill(self) -> None:
        """End it at once."""
        os.killpg(self.process.pid, 9)
        self.process.communicate()


@pytest.fixture
def elsewhere(site: Site, tmp_path: Path) -> Callable[..., Elsewhere]:
    """Starts Dagster processes on what might be another machine: with another home, and nothing known."""

    def begin(payload: Path, *names: str, **options: Any) -> Elsewhere:
        return Elsewhere(site, tmp_path, payload, names, **options)

    return begin


@pytest.fixture
def back_to_idle(site: Site) -> Iterator[None]:
    """Nodes that a test has ended are back afterwards."""
    yield

    def idle() -> bool:
        return site.sh("sinfo --noheader --Node --partition=compute --format=%t").split() == ["idle", "idle"]

    assert wait_until(idle, 90), site.sh("sinfo --Node")


class Running:
    """An asset at work in a thread. Its payload makes the file `up` in the data directory once it runs."""

    def __init__(self, site: Site, compute: ComputeResource, payload: Any, **arguments: Any) -> None:
        self._site = site
        self._pool = ThreadPoolExecutor(1)
        self._ran = self._pool.submit(run_asset, compute, payload, **arguments)

    def job(self, state: str = "RUNNING") -> str:
        """The id of its job, once that has a state."""
        found = wait_until(lambda: self._ran.done() or self._site.sh(f"squeue --me --noheader --states={state} --format=%A"), 60)
        assert found and found is not True, "there is no such job"
        return str(found).split()[0]

    def up(self, name: str = "up") -> str:
        """The id of its job, once the payload has made a file."""
        path = f"{self._site.base}/data/{name}"
        assert wait_until(lambda: self._ran.done() or self._site.connection.read(path, 0, 1), 90) and not self._ran.done()
        return self.job()

    def result(self, timeout: float = 150) -> Ran:
        return self._ran.result(timeout)


@pytest.fixture
def start(site: Site) -> Callable[..., Running]:
    """Starts an asset in a thread."""

    def begin(compute: ComputeResource, payload: Any, **arguments: Any) -> Running:
        return Running(site, compute, payload, **arguments)

    return begin
