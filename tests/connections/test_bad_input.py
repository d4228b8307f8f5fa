"""Mistakes in a configuration: each is reported in time, in one sentence with the remedy, without secrets or tracebacks."""

import contextlib
import os
import re
import shutil
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import paramiko
import pytest
from pydantic import ValidationError

from dagster_rayslurm import SSHConnectionResource
from dagster_rayslurm.ssh.base import ConnectionFailed

from .fixtures import PASSWORD, Connect
from .sshd import Sshd
from .test_logins import PASSPHRASE, Key

SECRETS = (PASSWORD, PASSPHRASE, "wr0ng-secret")


@pytest.fixture
def refused(connect: Connect, client: str, capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Makes a connection that fails, and returns the message."""

    def refuse(server: Any, connect_timeout: int = 5, **fields: Any) -> str:
        capfd.readouterr()
        began = time.monotonic()
        with pytest.raises(ConnectionFailed) as caught:
            connect(server, client, connect_timeout=connect_timeout, **fields).run(["true"])
        took, message, printed = time.monotonic() - began, str(caught.value), "".join(capfd.readouterr())
        assert took < connect_timeout + 9  # paramiko by itself would wait for 15 s.
        assert "\n" not in message and "Traceback" not in printed and "Exception" not in message + printed
        assert message.startswith("SSH to ") and not any(secret in message + printed for secret in SECRETS)
        assert caught.value.__cause__ is None and caught.value.__suppress_context__
        return message

    return refuse


def test_a_wrong_host(refused: Any, server: Sshd) -> None:
    assert re.search(r"no host is called 'no-such-host.invalid'; check `host` and", refused(server, host="no-such-host.invalid"))


def test_an_empty_or_odd_host(refused: Any, server: Sshd) -> None:
    for host in ("ä" * 70, "x" * 300, "$(touch owned)".replace(" ", "\u00a0")):
        with contextlib.suppress(ValidationError):
            refused(server, host=host)
    assert not os.path.exists("owned")


def test_a_wrong_port(refused: Any, server: Sshd) -> None:
    assert "nothing listens there; check `host` and `port`" in refused(server, port=1)


class Service(socketserver.BaseRequestHandler):
    greeting = b""

    def handle(self) -> None:
        self.request.sendall(self.greeting)
        self.request.settimeout(20)
        with_client = b"-"
        while with_client:
            try:
                with_client = self.request.recv(1000)
            except OSError:
                return


@pytest.fixture
def service() -> Iterator[Callable[[bytes], Any]]:
    """Starts a TCP server that is no SSH server."""
    servers = []

    def start(greeting: bytes) -> Any:
        handler = type("Handler", (Service,), {"greeting": greeting})
        server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return type("Server", (), {"host": "127.0.0.1", "port": server.server_address[1]})

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_a_port_that_says_nothing(refused: Any, service: Any) -> None:
    assert "no answer within 2 s; check `host` and `port`, and the VPN or firewall" in refused(service(b""), connect_timeout=2)


def test_a_port_that_speaks_something_else(refused: Any, service: Any) -> None:
    message = refused(service(b"HTTP/1.1 400 Bad Request\r\nServer: x\r\n\r\n" + b"<html>\r\n" * 2000), connect_timeout=3)
    assert "what answers there is not an SSH server; check `port`" in message


def test_a_host_that_does_not_answer(refused: Any, server: Sshd) -> None:
    host = server.host.rpartition(".")[0] + ".253"  # An address of the containers' network that nobody has.
    message = refused(server, host=host, connect_timeout=3)
    assert re.search(r"cannot be reached \(No route to host\); check the network|no answer within 3 s", message)


def test_a_wrong_user(refused: Any, server: Sshd) -> None:
    message = refused(server, user="nobody-here")
    assert re.search(
        r"SSH to nobody-here@.*refused the login with the key .*; it takes publickey; check `user`, `key_path`", message
    )


def test_a_wrong_key(refused: Any, server: Sshd, tmp_path: Path) -> None:
    key = Key(tmp_path / "key")
    assert f"refused the login with the key {key.path}; it takes publickey" in refused(server, key_path=str(key.path))


def test_no_key_at_all(refused: Any, server: Sshd, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    assert "refused the login with" in refused(server, key_path=None)


def test_a_wrong_password(refused: Any, sshd: Any) -> None:
    for method in ("PasswordAuthentication yes", "KbdInteractiveAuthentication yes"):
        server = sshd(method, "PubkeyAuthentication no")
        message = refused(server, connect_timeout=20, key_path=None, password="wr0ng-secret")
        assert "refused the login with" in message and "the password" in message
        assert len(re.findall("Failed (password|keyboard-interactive)", server.log())) == 1  # More tries lock accounts.


def test_a_usual_key_that_cannot_be_read_is_passed_over(
    connect: Connect, sshd: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = sshd("PasswordAuthentication yes")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    (tmp_path / ".ssh" / "id_rsa").mkdir(parents=True)
    connection = connect(server, "paramiko", key_path=None, password=PASSWORD)
    assert connection.run(["echo", "there"]).stdout == b"there\n"


def test_a_public_key_whose_private_key_no_agent_has(
    connect: Connect, server: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    path = f"{Key(tmp_path / 'key').path}.pub"
    with pytest.raises(ConnectionFailed, match="is a public key, and no agent has its private key; run ssh-add, or set"):
        connect(server, "paramiko", key_path=path).run(["true"])


NO_KEY = "is not a private key that can be read"


@pytest.mark.parametrize(
    ("make", "fields", "expected"),
    [
        ("locked", {"key_passphrase": "wr0ng-secret"}, "`key_passphrase` does not open the key PATH"),
        ("locked", {}, "the key PATH is locked; give `key_passphrase`, or add the key to an agent"),
        ("missing", {}, "PATH does not exist; check `key_path`"),
        ("directory", {}, "PATH cannot be read (Is a directory)"),
        ("public", {}, "others can read the key PATH (mode 0644); run: chmod 600 PATH"),
        (b"", {}, f"PATH {NO_KEY}"),
        (b"not a key\n", {}, f"PATH {NO_KEY}"),
        (b"-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n-----END OPENSSH PRIVATE KEY-----\n", {}, f"PATH {NO_KEY}"),
    ],
)
def test_a_key_file_that_cannot_be_used(
    make: str | bytes,
    fields: dict[str, str],
    expected: str,
    refused: Any,
    server: Sshd,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    path = tmp_path / "a 'key'"
    if isinstance(make, bytes):
        path.touch(0o600)
        path.write_bytes(make)
    elif make == "directory":
        path.mkdir()
    elif make != "missing":
        Key(path, passphrase=PASSPHRASE if make == "locked" else None)
        path.chmod(0o644 if make == "public" else 0o600)
    assert expected.replace("PATH", str(path)) in refused(server, key_path=str(path), **fields)


def test_a_certificate_of_another_key(refused: Any, sshd: Any, stack: Any, tmp_path: Path) -> None:
    authority, key, other = Key(tmp_path / "ca"), Key(tmp_path / "key"), Key(tmp_path / "other", "rsa")
    stack.exec("edge", ["sh", "-c", 'echo "$0" > /tmp/ca2.pub', authority.public])
    server = sshd("TrustedUserCAKeys /tmp/ca2.pub", "AuthorizedKeysFile none")
    certificate = other.certify(authority, "dev")
    message = refused(server, key_path=str(key.path), certificate_path=str(certificate))
    assert "is not a certificate for the key" in message or "refused the login with the key" in message
    assert "does not exist; check `certificate_path`" in refused(server, certificate_path=str(tmp_path / "none"))


def test_an_unknown_jump_host(refused: Any, connect: Connect, server: Sshd) -> None:
    jump = connect.fields(server, host="no-such-jump.invalid")
    assert re.search(r"SSH to dev@no-such-jump.invalid:\d+: no host is called", refused(server, jump_host=jump))


def test_a_jump_host_that_refuses_the_login(refused: Any, connect: Connect, server: Sshd, tmp_path: Path) -> None:
    jump = connect.fields(server, user="jumper", key_path=str(Key(tmp_path / "key").path))
    assert re.search(r"refused the login with the key", refused(server, jump_host=jump))


def test_a_host_that_the_jump_host_cannot_reach(refused: Any, connect: Connect, server: Sshd) -> None:
    message = refused(server, port=1, jump_host=connect.fields(server))
    assert re.search(
        rf"the jump host dev@{server.host}:{server.port} cannot reach it \(.*\); check `host` and `port` as seen from", message
    )


def test_a_jump_host_that_does_not_forward(refused: Any, connect: Connect, sshd: Any, server: Sshd) -> None:
    message = refused(server, jump_host=connect.fields(sshd("AllowTcpForwarding no")))
    assert re.search(r"the jump host .* cannot reach it \(.*(rohibited|open failed)\).*AllowTcpForwarding", message)


def test_the_key_of_a_jump_host_has_changed(refused: Any, connect: Connect, server: Sshd, sshd: Any, tmp_path: Path) -> None:
    jump, file = sshd(), tmp_path / "known jump"
    file.write_text(f"[{jump.host}]:{jump.port} {Key(tmp_path / 'k').public}\n")
    message = refused(server, jump_host=connect.fields(jump, known_hosts_file=str(file)))
    assert f"SSH to dev@{jump.host}:{jump.port}: its host key is not the one in {file}" in message


class Questions(paramiko.ServerInterface):
    """A server that asks for a code, as sites with two factors do."""

    def get_allowed_auths(self, username: str) -> str:
        return "keyboard-interactive"

    def check_auth_interactive(self, username: str, submethods: str) -> Any:
        return paramiko.InteractiveQuery("", "", ("Verification code: ", False))

    def check_auth_interactive_response(self, responses: list[str]) -> int:
        return int(paramiko.AUTH_FAILED)


def test_a_prompt_that_nobody_can_answer(refused: Any, client: str) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    host_key = paramiko.RSAKey.generate(2048)

    def serve() -> None:
        while True:
            try:
                stream, _ = listener.accept()
            except OSError:
                return
            transport = paramiko.Transport(stream)
            transport.add_server_key(host_key)
            transport.start_server(server=Questions())

    threading.Thread(target=serve, daemon=True).start()
    place = type("Server", (), {"host": "127.0.0.1", "port": listener.getsockname()[1]})
    message = refused(place, password="wr0ng-secret")
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    assert "the server asks 'Verification code:', which nobody can answer here" in re.sub(r"\(dev@127.0.0.1\) ", "", message)
    assert 'client="openssh" and require_existing_master=True, then type: ssh -M -S /tmp/' in message


def test_a_certificate_with_no_known_hosts_to_write(refused: Any, server: Sshd, tmp_path: Path) -> None:
    (tmp_path / "dir").mkdir()
    message = refused(server, known_hosts_file=str(tmp_path / "dir"))
    assert "cannot be read (Is a directory); check `known_hosts_file`" in message


def test_no_ssh_program(connect: Connect, server: Sshd, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert shutil.which("ssh") is None
    with pytest.raises(ConnectionFailed, match='client="openssh" needs the `ssh` program'):
        connect(server, "openssh").run(["true"])


def test_missing_variables_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import dagster as dg

    monkeypatch.delenv("SITE_HOST", raising=False)

    @dg.asset
    def never(ssh: SSHConnectionResource) -> None:
        raise AssertionError

    with pytest.raises(dg.DagsterInvalidConfigError, match='environment variable "SITE_HOST" which is not set'):
        dg.materialize([never], resources={"ssh": SSHConnectionResource.from_env("SITE")})


def test_a_secret_is_in_no_command_line_and_no_environment(connect: Connect, sshd: Any, openssh_there: None) -> None:
    server = sshd("PasswordAuthentication yes", "PubkeyAuthentication no")
    connection = connect(server, "openssh", key_path=None, password=PASSWORD)
    connection.run(["true"])
    import psutil

    for process in psutil.process_iter():
        try:
            if process.name() == "ssh":
                assert PASSWORD not in " ".join(process.cmdline()) + str(process.environ())
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    for root, _, files in os.walk(f"/tmp/rayslurm-{os.getuid()}"):
        for name in files:
            path = os.path.join(root, name)
            if os.path.isfile(path):
                assert PASSWORD not in Path(path).read_text()
