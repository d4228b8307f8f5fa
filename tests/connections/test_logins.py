"""Every way to log in, on real SSH servers, with both clients."""

import datetime
import os
import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from dagster_rayslurm import SSHConnectionResource
from dagster_rayslurm.ssh.base import ConnectionFailed
from dagster_rayslurm.ssh.openssh import control_path, master_command
from dagster_rayslurm.ssh.pool import close_connections, connection_to

from .fixtures import PASSWORD, Connect, end_master
from .sshd import Sshd

PASSPHRASE = "correct 'horse' $battery \"staple\" é"

SECOND_FACTOR = ("KbdInteractiveAuthentication yes", "AuthenticationMethods publickey,keyboard-interactive")


class Key:
    """A key pair in files, as OpenSSH writes them."""

    def __init__(self, path: Path, kind: str = "ed25519", passphrase: str | None = None) -> None:
        self.path = path
        self.private: Any = {
            "ed25519": ed25519.Ed25519PrivateKey.generate,
            "ecdsa": lambda: ec.generate_private_key(ec.SECP256R1()),
            "rsa": lambda: rsa.generate_private_key(65537, 3072),
        }[kind]()
        lock = serialization.BestAvailableEncryption(passphrase.encode()) if passphrase else serialization.NoEncryption()
        data = self.private.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, lock)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
            file.write(data)
        Path(f"{path}.pub").write_text(self.public + "\n")

    @property
    def public(self) -> str:
        return str(
            self.private.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()
        )

    def certify(self, authority: "Key", user: str) -> Path:
        now = datetime.datetime.now()
        builder = (
            serialization.SSHCertificateBuilder()
            .public_key(self.private.public_key())
            .serial(1)
            .type(serialization.SSHCertificateType.USER)
            .key_id(b"test")
            .valid_principals([user.encode()])
            .valid_after(int((now - datetime.timedelta(hours=1)).timestamp()))
            .valid_before(int((now + datetime.timedelta(hours=1)).timestamp()))
        )
        path = Path(f"{self.path}-cert.pub")
        path.write_bytes(builder.sign(authority.private).public_bytes() + b"\n")
        return path


@pytest.fixture
def authorize(stack: Any) -> Iterator[Callable[[str], None]]:
    """Lets a public key log in as dev until the end of the test."""
    added: list[str] = []

    def add(public: str) -> None:
        added.append(public)
        stack.exec("edge", ["sh", "-c", 'echo "$0" >> /home/dev/.ssh/authorized_keys', public])

    yield add
    for public in added:
        blob = public.split()[1]
        stack.exec(
            "edge",
            ["sh", "-c", 'cd /home/dev/.ssh && grep -vF "$0" authorized_keys > new; cat new > authorized_keys; rm new', blob],
        )


def works(connection: Any) -> None:
    assert connection.run(["id", "-un"]).stdout == b"dev\n"
    assert connection.read("/etc/hostname", 0, 100).startswith(b"edge")


def test_a_key(connect: Connect, server: Sshd, client: str) -> None:
    works(connect(server, client))


@pytest.mark.parametrize("kind", ["ecdsa", "rsa"])
def test_other_kinds_of_keys(kind: str, connect: Connect, server: Sshd, client: str, authorize: Any, tmp_path: Path) -> None:
    key = Key(tmp_path / "key with spaces", kind)
    authorize(key.public)
    works(connect(server, client, key_path=str(key.path)))


def test_a_key_with_a_passphrase(connect: Connect, server: Sshd, client: str, authorize: Any, tmp_path: Path) -> None:
    key = Key(tmp_path / 'it\'s a % "key"', passphrase=PASSPHRASE)
    authorize(key.public)
    works(connect(server, client, key_path=str(key.path), key_passphrase=PASSPHRASE))


def test_a_passphrase_for_a_key_that_has_none_is_no_harm(connect: Connect, server: Sshd, client: str) -> None:
    works(connect(server, client, key_passphrase="not needed"))


@pytest.fixture
def agent(openssh_there: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    socket = tmp_path / "agent"
    process = subprocess.Popen(["ssh-agent", "-D", "-a", str(socket)], stdout=subprocess.DEVNULL)
    monkeypatch.setenv("SSH_AUTH_SOCK", str(socket))
    while not socket.exists():
        assert process.poll() is None
    yield
    process.terminate()
    process.wait()


def add_to_agent(key: Key) -> None:
    plain = key.path.with_name("plain")
    data = key.private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    with open(os.open(plain, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
        file.write(data)
    subprocess.run(["ssh-add", "-q", str(plain)], check=True)
    plain.unlink()


def test_the_agent(connect: Connect, server: Sshd, client: str, agent: None, authorize: Any, tmp_path: Path) -> None:
    key = Key(tmp_path / "key")
    authorize(key.public)
    for index in range(3):
        add_to_agent(Key(tmp_path / f"other{index}"))
    add_to_agent(key)
    works(connect(server, client, key_path=None))


def test_a_locked_key_that_the_agent_holds(
    connect: Connect, server: Sshd, client: str, agent: None, authorize: Any, tmp_path: Path
) -> None:
    key = Key(tmp_path / "key", passphrase=PASSPHRASE)
    authorize(key.public)
    for index in range(7):  # More than sshd's MaxAuthTries: only the named key may be tried.
        add_to_agent(Key(tmp_path / f"other{index}"))
    add_to_agent(key)
    works(connect(server, client, key_path=str(key.path)))


def test_a_public_key_selects_a_key_of_the_agent(
    connect: Connect, server: Sshd, client: str, agent: None, authorize: Any, tmp_path: Path
) -> None:
    key = Key(tmp_path / "key")
    authorize(key.public)
    for index in range(7):  # More than sshd's MaxAuthTries: only the named key may be tried.
        add_to_agent(Key(tmp_path / f"other{index}"))
    add_to_agent(key)
    key.path.unlink()
    public = Path(f"{key.path}.pub")
    public.chmod(0o644)
    works(connect(server, client, key_path=str(public)))


@pytest.mark.parametrize("named", [True, False])
def test_a_user_certificate(
    named: bool, connect: Connect, sshd: Callable[..., Sshd], client: str, stack: Any, tmp_path: Path
) -> None:
    authority, key = Key(tmp_path / "authority"), Key(tmp_path / "key")
    stack.exec("edge", ["sh", "-c", 'echo "$0" > /tmp/ca.pub', authority.public])
    server = sshd("TrustedUserCAKeys /tmp/ca.pub", "AuthorizedKeysFile none")
    certificate = key.certify(authority, "dev")
    if named:
        certificate = certificate.rename(tmp_path / "elsewhere.pub")
    works(connect(server, client, key_path=str(key.path), certificate_path=str(certificate) if named else None))
    assert "ED25519-CERT" in server.log()


@pytest.mark.parametrize("method", ["PasswordAuthentication yes", "KbdInteractiveAuthentication yes"])
def test_a_password(method: str, connect: Connect, sshd: Callable[..., Sshd], client: str) -> None:
    server = sshd(method, "PubkeyAuthentication no")
    works(connect(server, client, key_path=None, password=PASSWORD))
    assert PASSWORD not in server.log()


def test_a_key_and_a_keyboard_interactive_second_factor(connect: Connect, sshd: Callable[..., Sshd], client: str) -> None:
    server = sshd(*SECOND_FACTOR)
    works(connect(server, client, password=PASSWORD))
    assert "Partial publickey" in server.log() and "Accepted keyboard-interactive/pam" in server.log()


def test_two_jump_hosts_each_with_a_login_of_its_own(
    connect: Connect, sshd: Callable[..., Sshd], client: str, authorize: Any, tmp_path: Path
) -> None:
    first = sshd("PasswordAuthentication yes", "PubkeyAuthentication no", service="c1")
    second = sshd()
    last = sshd()
    key = Key(tmp_path / "100% odd 'key'", passphrase=PASSPHRASE)
    authorize(key.public)
    hop1 = connect.fields(first, key_path=None, password=PASSWORD)
    hop2 = connect.fields(second, key_path=str(key.path), key_passphrase=PASSPHRASE, jump_host=hop1)
    connection = connect(last, client, jump_host=hop2)
    works(connection)
    assert [server.logins() for server in (first, second, last)] == [1, 1, 1]
    assert f"from {second.host}" in last.log()  # It came from the second hop, not from here.


def test_one_login_serves_everything(connect: Connect, server: Sshd, client: str) -> None:
    connection = connect(server, client)
    for _ in range(20):
        connection.run(["true"])
        connection.write(f"/tmp/one-{os.getpid()}", b"x")
        connection.read(f"/tmp/one-{os.getpid()}", 0, 1)
        connection.connect("127.0.0.1", server.port, 5).close()
    connection.remove(f"/tmp/one-{os.getpid()}")
    assert server.logins() == 1


# -- host keys ---------------------------------------------------------------------------------------------------------


def host_key(stack: Any) -> str:
    return " ".join(stack.exec("edge", ["ssh-keygen", "-y", "-f", "/etc/ssh/ssh_host_ed25519_key"]).split()[:2])


def other_key(tmp_path: Path) -> str:
    return Key(tmp_path / "other host key").public


def test_a_new_host_key_is_learned_once(connect: Connect, server: Sshd, client: str, stack: Any, tmp_path: Path) -> None:
    file = tmp_path / "known"
    last = "" if client == "paramiko" else "\n"  # ssh itself would write on at the end of the last line.
    file.write_text(f"# a comment\n@cert-authority *.example.org ssh-ed25519 AAAA\nother ssh-ed25519 AAAA{last}")
    works(connect(server, client, known_hosts_file=str(file)))
    added = f"[{server.host}]:{server.port} {host_key(stack)}"
    assert file.read_text().splitlines() == [
        "# a comment",
        "@cert-authority *.example.org ssh-ed25519 AAAA",
        "other ssh-ed25519 AAAA",
        added,
    ]
    works(connect(server, client, known_hosts_file=str(file), host_key_checking="strict"))
    assert file.read_text().count(added) == 1


def test_strict_refuses_what_it_does_not_know(connect: Connect, server: Sshd, client: str, tmp_path: Path) -> None:
    with pytest.raises(ConnectionFailed, match=r"host key is not in .*known.* and host_key_checking is \"strict\"; compare"):
        connect(server, client, known_hosts_file=str(tmp_path / "known"), host_key_checking="strict").run(["true"])
    assert server.logins() == 0


@pytest.mark.parametrize("checking", ["accept-new", "strict"])
def test_a_changed_host_key_is_refused(checking: str, connect: Connect, server: Sshd, client: str, tmp_path: Path) -> None:
    file = tmp_path / "known"
    file.write_text(f"[{server.host}]:{server.port} {other_key(tmp_path)}\n")
    before = file.read_text()
    with pytest.raises(ConnectionFailed, match=r"host key is not the one in .*known.*ask the site") as caught:
        connect(server, client, known_hosts_file=str(file), host_key_checking=checking, password=PASSWORD).run(["true"])
    assert not caught.value.temporary and file.read_text() == before
    assert "Accepted" not in server.log() and "Failed" not in server.log()  # Nothing was sent.


def test_a_revoked_host_key_is_refused(connect: Connect, server: Sshd, client: str, stack: Any, tmp_path: Path) -> None:
    file = tmp_path / "known"
    file.write_text(f"[{server.host}]:{server.port} {host_key(stack)}\n@revoked * {host_key(stack)}\n")
    with pytest.raises(ConnectionFailed, match="marked @revoked"):
        connect(server, client, known_hosts_file=str(file)).run(["true"])


def test_a_host_key_of_another_type_counts_as_changed(connect: Connect, server: Sshd, client: str, tmp_path: Path) -> None:
    file = tmp_path / "known"
    file.write_text(f"[{server.host}]:{server.port} {Key(tmp_path / 'rsa', 'ecdsa').public}\n")
    if client == "paramiko":  # ssh itself learns a key of another type as new; it has nothing to compare.
        with pytest.raises(ConnectionFailed, match="host key is not the one"):
            connect(server, client, known_hosts_file=str(file)).run(["true"])


def test_a_pinned_host_key(connect: Connect, server: Sshd, client: str, stack: Any, tmp_path: Path) -> None:
    file = tmp_path / "never made"
    works(connect(server, client, host_key=host_key(stack), known_hosts_file=str(file)))
    assert not file.exists()
    with pytest.raises(ConnectionFailed, match="host key is not the one in `host_key`"):
        connect(server, client, host_key=other_key(tmp_path), known_hosts_file=str(file)).run(["true"])


def test_off_takes_any_key_and_learns_none(connect: Connect, server: Sshd, client: str, tmp_path: Path) -> None:
    file = tmp_path / "known"
    file.write_text(f"[{server.host}]:{server.port} {other_key(tmp_path)}\n")
    before = file.read_text()
    works(connect(server, client, known_hosts_file=str(file), host_key_checking="off"))
    assert file.read_text() == before


# -- login shells ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("user", ["chatty", "cshell"])
def test_login_shells_that_print(user: str, connect: Connect, sshd: Callable[..., Sshd], client: str, stack: Any) -> None:
    stack.exec("edge", ["sh", "-c", "echo 'Authorized use only!' > /etc/ssh/test-banner"])
    server = sshd("Banner /etc/ssh/test-banner", "PrintMotd yes")
    connection = connect(server, client, user=user)
    for word in ("!!", "a'b", "$x", "`id`", "\n", "~", "*"):
        done = connection.run(["printf", "%s", word], stdin=b"input")
        assert (done.stdout, done.stderr, done.returncode) == (word.encode(), b"", 0)
    assert connection.run(["cat"], stdin=b"input").stdout == b"input"
    path = f"{connection.home()}/file {os.getpid()}"
    assert path.startswith(f"/home/{user}/")
    connection.write(path, b"content")
    assert connection.read(path, 0, 100) == b"content"
    connection.remove(path)


@pytest.mark.parametrize(("user", "message"), [("nologin", "This account is currently not available"), ("exits", "has expired")])
def test_login_shells_that_run_nothing(user: str, message: str, connect: Connect, server: Sshd, client: str) -> None:
    with pytest.raises(ConnectionFailed, match=f"login shell ended before it ran anything and said .*{message}"):
        connect(server, client, user=user).run(["true"])


def test_a_server_without_the_configured_python(connect: Connect, sshd: Callable[..., Sshd], client: str) -> None:
    server = sshd()
    for user in ("dev", "cshell"):
        with pytest.raises(
            ConnectionFailed, match=r"python9 does not run there \(.*\); name a Python 3.6 or newer .* as `python`"
        ):
            connect(server, client, user=user, python="/opt/python9").run(["true"])
    with pytest.raises(ConnectionFailed, match=r"neither a restricted shell nor a ForceCommand"):
        connect(sshd("ForceCommand internal-sftp"), client, connect_timeout=3).run(["true"])
    works(connect(server, client, python="/usr/bin/python3"))


# -- a master that a person opened -------------------------------------------------------------------------------------


def test_a_master_opened_by_hand(connect: Connect, server: Sshd, openssh_there: None, tmp_path: Path) -> None:
    ssh = connect.fields(server, client="openssh", require_existing_master=True, user="dev")
    connection = connect.to(ssh)
    with pytest.raises(
        ConnectionFailed, match="no master connection is open and require_existing_master is set; type: ssh"
    ) as caught:
        connection.run(["true"])
    assert server.logins() == 0  # It never logs in by itself.
    command = str(caught.value).split("type: ")[1]
    command = command.replace(" -- ", " -o StrictHostKeyChecking=accept-new -- ")
    subprocess.run(["sh", "-c", command], check=True, stderr=subprocess.DEVNULL)
    works(connection)
    assert server.logins() == 1
    end_master(control_path(ssh))
    with pytest.raises(ConnectionFailed, match="type: ssh -M"):
        connect.to(ssh).run(["true"])
    assert server.logins() == 1


def test_a_master_of_the_users_own_configuration(
    connect: Connect, server: Sshd, openssh_there: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ssh reads its configuration from the home directory of the passwd entry, so a wrapper passes -F."""
    own = f"/tmp/own-{os.getpid()}"
    wrapper = tmp_path / "bin" / "ssh"
    wrapper.parent.mkdir()
    (tmp_path / "config").write_text(f"Host {server.host}\n  ControlPath {own}\n")
    real = subprocess.run(["sh", "-c", "command -v ssh"], capture_output=True, text=True, check=True).stdout.strip()
    wrapper.write_text(f'#!/bin/sh\ncase "$1" in -G) exec {real} -F {tmp_path}/config "$@";; *) exec {real} "$@";; esac\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{wrapper.parent}:{os.environ['PATH']}")
    key = connect.fields(server).key_path
    options = ["-i", str(key), "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-p", str(server.port)]
    subprocess.run([real, "-M", "-S", own, "-fN", *options, "-l", "dev", server.host], check=True, stderr=subprocess.DEVNULL)
    try:
        works(connect(server, "openssh", require_existing_master=True))
        assert server.logins() == 1
    finally:
        end_master(own)


def test_a_master_opened_by_hand_through_two_jump_hosts(
    connect: Connect, sshd: Callable[..., Sshd], openssh_there: None, tmp_path: Path
) -> None:
    first, second, last = sshd(), sshd(), sshd()
    key = tmp_path / "100% of 'it'"
    key.touch(0o600)
    key.write_bytes(Path(str(connect.fields(first).key_path)).read_bytes())
    hops = connect.fields(second, key_path=str(key), jump_host=connect.fields(first))
    for server in (first, second, last):  # The command is for a person, who would say yes to each new host key.
        connect(server, "paramiko").run(["true"])
    ssh = connect.fields(last, client="openssh", require_existing_master=True, jump_host=hops)
    subprocess.run(["sh", "-c", master_command(ssh)], check=True, stderr=subprocess.DEVNULL)
    works(connect.to(ssh))
    assert [server.logins() for server in (first, second, last)] == [2, 2, 2]


def test_jump_hosts_work_for_users_without_a_shell(
    connect: Connect, sshd: Callable[..., Sshd], client: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHELL", "/usr/sbin/nologin")
    jump, last = sshd(), sshd()
    works(connect(last, client, jump_host=connect.fields(jump)))


def test_a_password_goes_to_its_own_host_only(connect: Connect, sshd: Callable[..., Sshd], client: str, tmp_path: Path) -> None:
    jump = sshd("PasswordAuthentication yes", "KbdInteractiveAuthentication yes", service="c1")
    last = sshd()
    hop = connect.fields(jump, key_path=str(Key(tmp_path / "unknown", passphrase=PASSPHRASE).path), key_passphrase=PASSPHRASE)
    with pytest.raises(ConnectionFailed, match="refused the login"):
        connect(last, client, password=PASSWORD, jump_host=hop, connect_timeout=8).run(["true"])
    assert jump.logins() == 0  # It would have taken the password: the account is the same.


def test_an_agent_that_does_not_answer(connect: Connect, server: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "stale"))
    listener.listen()
    monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "stale"))
    monkeypatch.setenv("HOME", str(tmp_path))
    began = time.monotonic()
    with listener, pytest.raises(ConnectionFailed, match=r"refused the login|no answer"):
        connect(server, "paramiko", key_path=None, connect_timeout=10).run(["true"])
    assert time.monotonic() - began < 15


# -- shared connections, and the environment -----------------------------------------------------------------------------


def test_processes_share_a_master(connect: Connect, server: Sshd, openssh_there: None) -> None:
    works(connect(server, "openssh"))
    works(connect(server, "openssh"))  # As another process would: nothing but the control socket in common.
    assert server.logins() == 1


def test_a_process_has_one_connection_for_each_configuration(connect: Connect, server: Sshd, client: str) -> None:
    ssh = connect.fields(server, client=client)
    try:
        assert connection_to(ssh) is connection_to(ssh.model_copy())
        assert connection_to(ssh) is not connection_to(ssh.model_copy(update={"user": "other"}))
        works(connection_to(ssh))
        assert server.logins() == 1
    finally:
        connect.to(ssh)  # Ends the master.
        close_connections()


def test_the_stack_by_its_environment(stack: Any, client: str, monkeypatch: pytest.MonkeyPatch, connect: Connect) -> None:
    import dagster as dg

    for name, value in stack.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_EDGE_NODE_CLIENT", client)
    outputs = []

    @dg.asset
    def who(ssh: SSHConnectionResource) -> None:
        outputs.append(connect.to(ssh).run(["sinfo", "--noheader", "-o", "%P"]).stdout)

    assert dg.materialize([who], resources={"ssh": SSHConnectionResource.from_env()}).success
    assert re.search(rb"compute\*?\ngpu", outputs[0])


def test_a_jump_host_from_the_environment(
    connect: Connect, sshd: Callable[..., Sshd], client: str, stack: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import dagster as dg

    jump, last = sshd(), sshd()
    defaults = connect.fields(last)
    values = {"HOST": last.host, "PORT": last.port, "USER": "dev", "KEY_PATH": defaults.key_path, "CLIENT": client}
    values |= {f"JUMP_{name}": value for name, value in values.items()} | {"JUMP_PORT": jump.port}
    for name, value in values.items():
        monkeypatch.setenv(f"SITE_{name}", str(value))
        monkeypatch.setenv("SITE_KNOWN_HOSTS_FILE", str(defaults.known_hosts_file))
        monkeypatch.setenv("SITE_JUMP_KNOWN_HOSTS_FILE", str(defaults.known_hosts_file))

    @dg.asset
    def who(ssh: SSHConnectionResource) -> None:
        works(connect.to(ssh))

    assert dg.materialize([who], resources={"ssh": SSHConnectionResource.from_env("SITE")}).success
    assert (jump.logins(), last.logins()) == (1, 1)
