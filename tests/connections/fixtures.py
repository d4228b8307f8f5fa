"""Connections of each kind, with SSH servers and accounts for their tests."""

import contextlib
import os
import shutil
import subprocess
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dagster_rayslurm import SSHConnectionResource
from dagster_rayslurm.ssh.base import Connection
from dagster_rayslurm.ssh.connection import SSHConnection
from dagster_rayslurm.ssh.local import LocalConnection
from dagster_rayslurm.ssh.openssh import control_path
from dagster_rayslurm.ssh.pool import new_connection

from ..conftest import MARK
from .sshd import Sshd

CLIENTS = ("paramiko", "openssh")
PASSWORD = """s3cret "pa$$'word"""

ACCOUNTS = {
    # Prints to both streams from its start-up file, as many sites do.
    "chatty": ("/bin/bash", ".bashrc", "echo 'Welcome! Quota: 3 GB'; echo 'maintenance on Monday' >&2"),
    "cshell": ("/bin/tcsh", ".cshrc", "echo 'csh says hello!'"),
    "nologin": ("/usr/sbin/nologin", ".bashrc", ""),
    "exits": ("/bin/bash", ".bashrc", "echo 'your account has expired'; exit 3"),
}


@dataclass
class Place:
    """A connection, and a new directory on its machine."""

    connection: Connection
    dir: str


@pytest.fixture(scope="session")
def accounts(stack: Any) -> None:
    """Users with different login shells on the edge node. All of them accept the key of the stack."""
    script = ["set -e"]
    for name, (shell, file, text) in ACCOUNTS.items():
        script += [
            f"id {name} >/dev/null 2>&1 || useradd --create-home --shell {shell} {name}",
            f"cat > /home/{name}/{file} <<'EOF'\n{text}\nEOF",
            f"mkdir -p /home/{name}/.ssh && cp /home/dev/.ssh/authorized_keys /home/{name}/.ssh/",
            f"chown -R {name}: /home/{name}",
        ]
    script.append(f"chpasswd <<'EOF'\ndev:{PASSWORD}\nEOF")
    for service in ("edge", "c1"):
        stack.exec(service, ["sh", "-c", "\n".join(script)])


@pytest.fixture(scope="session")
def openssh_there() -> None:
    if shutil.which("ssh") is None:
        if os.environ.get("CI"):
            pytest.fail("the ssh program is not here; install openssh-client")
        pytest.skip("needs the ssh program (openssh-client)")


@pytest.fixture
def sshd(stack: Any, accounts: None) -> Iterator[Callable[..., Sshd]]:
    """Starts SSH servers with the given options of sshd_config(5)."""
    servers: list[Sshd] = []

    def start(*options: str, service: str = "edge") -> Sshd:
        servers.append(Sshd(stack, service, *options))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def server(sshd: Callable[..., Sshd]) -> Sshd:
    """A new server with the default options of sshd."""
    return sshd()


@pytest.fixture(params=CLIENTS)
def client(request: pytest.FixtureRequest) -> str:
    if request.param == "openssh":
        request.getfixturevalue("openssh_there")
    return str(request.param)


@contextlib.contextmanager
def unmarked() -> Iterator[None]:
    """Processes that are started in this context may outlive the test."""
    mark = os.environ.pop(MARK, None)
    try:
        yield
    finally:
        if mark is not None:
            os.environ[MARK] = mark


class Connect:
    """Makes connections, and closes them with their master processes."""

    def __init__(self, stack: Any, known_hosts: Path) -> None:
        self._stack = stack
        self._known_hosts = known_hosts
        self._made: list[SSHConnection] = []

    def fields(self, server: Any, **fields: Any) -> SSHConnectionResource:
        defaults = {
            "host": server.host,
            "port": server.port,
            "user": "dev",
            "key_path": self._stack.env["SLURM_EDGE_NODE_KEY_PATH"],
            "known_hosts_file": str(self._known_hosts),
        }
        return SSHConnectionResource(**{**defaults, **fields})

    def __call__(self, server: Any, client: str, **fields: Any) -> SSHConnection:
        return self.to(self.fields(server, client=client, **fields))

    def to(self, ssh: SSHConnectionResource) -> SSHConnection:
        made = new_connection(ssh)
        self._made.append(made)
        return made

    def close(self) -> None:
        for connection in self._made:
            connection.close()
            if connection.ssh.client == "openssh":
                for number in range(8):
                    end_master(control_path(connection.ssh, number))


def end_master(path: str) -> None:
    if os.path.exists(path):
        subprocess.run(["ssh", "-S", path, "-O", "exit", "host"], capture_output=True)


@pytest.fixture
def connect(stack: Any, tmp_path: Path) -> Iterator[Connect]:
    made = Connect(stack, tmp_path / "known_hosts")
    yield made
    made.close()


@pytest.fixture(scope="module")
def shared_connect(stack: Any, accounts: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Any]]:
    """One connection of each kind for all tests of a module."""
    server = Sshd(stack, "edge")
    connect = Connect(stack, tmp_path_factory.mktemp("ssh") / "known_hosts")
    made: dict[str, Any] = {}

    def get(client: str) -> Any:
        if client not in made:
            made[client] = connect(server, client)
        return made[client]

    yield get
    connect.close()
    server.close()


@pytest.fixture(params=[*(pytest.param(client, marks=pytest.mark.stack) for client in CLIENTS), "local"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """Each kind of connection in turn."""
    if request.param == "local":
        yield Place(LocalConnection(), str(tmp_path))
        return
    if request.param == "openssh":
        request.getfixturevalue("openssh_there")
    with unmarked():  # A master process outlives the test.
        connection = request.getfixturevalue("shared_connect")(request.param)
        path = f"{connection.home()}/test-{uuid.uuid4().hex[:12]}"
        connection.make_dir(path)
    yield Place(connection, path)
    with unmarked(), contextlib.suppress(OSError):
        connection.remove(path)
