"""Connections without an SSH server: known hosts, options of ssh, askpass, retries."""

import base64
import hashlib
import hmac
import os
import pty
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import paramiko
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from dagster_rayslurm import SSHConnectionResource
from dagster_rayslurm.ssh.base import Backoff, ConnectionFailed, ConnectionGone
from dagster_rayslurm.ssh.local import private_dir
from dagster_rayslurm.ssh.login import SLOTS, KnownKey, Prompts, Trust, check_host_key, judge, known_keys, login_slot
from dagster_rayslurm.ssh.openssh import control_path, explain, master_command, options
from dagster_rayslurm.ssh.paramiko_client import ParamikoTransport, log_in
from dagster_rayslurm.ssh.pool import connection_to

# -- known hosts ---------------------------------------------------------------------------------------------------------


def hashed(name: str, salt: bytes = b"0123456789abcdefghij") -> str:
    digest = hmac.new(salt, name.encode(), hashlib.sha1).digest()
    return f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()}"


@pytest.mark.parametrize(
    ("names", "host", "port", "matches"),
    [
        ("edge", "edge", 22, True),
        ("edge", "EDGE", 22, True),
        ("edge", "edge", 2222, False),
        ("[edge]:2222", "edge", 2222, True),
        ("[edge]:2222", "edge", 22, False),
        ("a,edge,b", "edge", 22, True),
        ("*.site.org", "login1.site.org", 22, True),
        ("*.site.org,!login2.site.org", "login2.site.org", 22, False),
        ("!login2.site.org,*.site.org", "login2.site.org", 22, False),
        ("login?", "login1", 22, True),
        ("[*.site.org]:2222", "login1.site.org", 2222, True),
        ("[2001:db8::1]:2222", "2001:db8::1", 2222, True),
        ("[a-z]", "b", 22, False),
        (hashed("edge"), "edge", 22, True),
        (hashed("[edge]:2222"), "edge", 2222, True),
        (hashed("edge"), "edgf", 22, False),
        ("|1|broken", "edge", 22, False),
    ],
)
def test_names_in_known_hosts(names: str, host: str, port: int, matches: bool) -> None:
    text = f"# comment\n\n{names} ssh-ed25519 AAAA a comment\n"
    assert (known_keys(text, host, port) == [KnownKey("ssh-ed25519", "AAAA")]) is matches


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh-keygen")
@given(host=st.from_regex(r"[a-z0-9]([a-z0-9.-]{0,20}[a-z0-9])?", fullmatch=True), port=st.sampled_from([22, 2222]))
def test_ssh_finds_added_keys(host: str, port: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    key = "AAAAC3NzaC1lZDI1NTE5AAAAIEDShYqB4U8POSp9FNGz41/mdW55+3B0ypEtfSJ2vmv7"
    file = tmp_path_factory.mktemp("k") / "known"
    file.write_text("# without a newline at its end")
    for _ in range(2):
        check_host_key(resource(host=host, port=port, known_hosts_file=str(file)), "ssh-ed25519", key)
    assert file.read_text().count("\n") == 2
    name = host if port == 22 else f"[{host}]:{port}"
    found = subprocess.run(["ssh-keygen", "-F", name, "-f", file], capture_output=True, text=True)
    assert key in found.stdout
    subprocess.run(["ssh-keygen", "-H", "-f", file], capture_output=True, check=True)
    assert known_keys(file.read_text(), host, port) == [KnownKey("ssh-ed25519", key)]


def test_trust_in_a_host_key() -> None:
    known = [KnownKey("ssh-rsa", "R"), KnownKey("ssh-ed25519", "E")]
    assert judge([], "ssh-ed25519", "E") is Trust.NEW
    assert judge(known, "ssh-ed25519", "E") is Trust.KNOWN
    assert judge(known, "ssh-ed25519", "X") is Trust.CHANGED
    assert judge(known, "ecdsa", "X") is Trust.CHANGED
    assert judge([*known, KnownKey("ssh-ed25519", "E", revoked=True)], "ssh-ed25519", "E") is Trust.REVOKED
    assert judge([KnownKey("ssh-ed25519", "O", revoked=True)], "ssh-ed25519", "E") is Trust.NEW


def test_threads_add_a_key_once(tmp_path: Path) -> None:
    file = tmp_path / "dir" / "known"
    servers = [resource(host=f"h{i % 3}", known_hosts_file=str(file)) for i in range(24)]
    threads = [threading.Thread(target=check_host_key, args=(server, "ssh-rsa", "K")) for server in servers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(file.read_text().splitlines()) == [f"h{i} ssh-rsa K" for i in range(3)]
    assert file.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConnectionFailed, match="host key is not the one in"):
        check_host_key(servers[0], "ssh-rsa", "B")


# -- ssh options ---------------------------------------------------------------------------------------------------------


def resource(**fields: Any) -> SSHConnectionResource:
    return SSHConnectionResource(**{"host": "edge", **fields})


def test_only_configured_fields_override_the_users_ssh_config() -> None:
    plain = options(resource(), "/scratch")
    assert not any(option.startswith(("Port=", "User=", "IdentityFile=", "UserKnownHostsFile=")) for option in plain)
    assert "StrictHostKeyChecking=accept-new" in plain and "BatchMode=yes" in plain
    full = options(
        resource(
            port=2222, user="dev", key_path="/k e%y", certificate_path="/c", known_hosts_file="/kh", host_key_checking="strict"
        ),
        "/scratch",
    )
    assert {"Port=2222", "User=dev", 'IdentityFile="/k e%%y"', "IdentitiesOnly=yes", 'CertificateFile="/c"'} < set(full)
    assert {'UserKnownHostsFile="/kh"', "StrictHostKeyChecking=yes"} < set(full)


def test_secrets_are_in_no_option() -> None:
    jump = resource(host="jump", password="s3cret", key_path="/k", key_passphrase="pass")
    ssh = resource(password="s3cret2", jump_host=jump)
    words = " ".join([*options(ssh, "/scratch"), control_path(ssh), master_command(ssh)])
    assert "s3cret" not in words and "pass" not in words.replace("NumberOfPasswordPrompts", "")


def test_each_configuration_has_a_control_socket_of_its_own() -> None:
    variants: list[dict[str, Any]] = [
        {},
        {"port": 2},
        {"user": "u"},
        {"jump_host": resource(host="j")},
        {"host_key_checking": "off"},
    ]
    paths = {control_path(resource(**fields)) for fields in variants}
    assert len(paths) == len(variants) and all(len(path) < 60 for path in paths)


@pytest.mark.parametrize("name", ["-oProxyCommand=touch /tmp/x", "-l", "a b", "", " edge", "edge\n"])
def test_host_and_user_names_that_look_like_options_are_refused(name: str) -> None:
    for fields in ({"host": name}, {"user": name}):
        with pytest.raises(ValidationError, match=r"not a name of a host or user|control character"):
            resource(**fields)


SERVERS = [
    resource(host="jump", user="me", key_path="/home/me/key", key_passphrase="passphrase", password="of jump"),
    resource(host="edge", user="me", password="of edge"),
]


@pytest.mark.parametrize(
    ("prompt", "secret"),
    [
        ("Enter passphrase for key '/home/me/key': ", "passphrase"),
        ("Enter passphrase for key '/home/me/other': ", None),
        ("me@jump's password: ", "of jump"),
        ("me@edge's password: ", "of edge"),
        ("(me@edge) Password: ", "of edge"),
        ("Password: ", None),
        ("me@edge2's password: ", None),
        ("(me@edge) One-time password (OATH): ", None),
        ("(me@edge) Verification code: ", None),
        ("The authenticity of host can't be established. Continue? ", None),
    ],
)
def test_a_prompt_gets_its_own_secret_once(prompt: str, secret: str | None) -> None:
    prompts = Prompts(SERVERS)
    assert prompts.answer(prompt) == secret
    assert prompts.unanswered == ("" if secret else prompt.strip())
    assert prompts.answer(prompt) is None and prompts.unanswered == prompt.strip()


def test_a_prompt_without_a_name_is_clear_if_there_is_one_server() -> None:
    assert Prompts(SERVERS[1:]).answer("Password: ") == "of edge"
    assert Prompts(SERVERS[1:]).answer("somebody@else's password: ") is None


def test_secrets_are_not_printed() -> None:
    text = repr(resource(password="s3cret", key_passphrase="pass-phrase"))
    assert "s3cret" not in text and "pass-phrase" not in text


# -- retries ------------------------------------------------------------------------------------------------------------


def test_backoff_pauses_grow_with_the_outage_and_stay_bounded() -> None:
    for lasted, longest in ((0.0, 1.5), (60.0, 3.0), (86400.0, 30.0)):
        outage = Backoff(time.monotonic() - lasted)
        pauses = [outage.pause() for _ in range(20)]
        assert max(pauses) <= longest + 0.1 and min(pauses) >= 0.1
        assert pauses[0] < pauses[-1]


def test_login_slots_limit_simultaneous_logins() -> None:
    at_once, most, lock = [0], [0], threading.Lock()

    def log_in() -> None:
        with login_slot(resource(host="test-host")):
            with lock:
                at_once[0] += 1
                most[0] = max(most[0], at_once[0])
            time.sleep(0.02)
            with lock:
                at_once[0] -= 1

    threads = [threading.Thread(target=log_in) for _ in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most[0] == SLOTS


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_a_runtime_directory_of_another_user_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """After `su` or `sudo -E`, XDG_RUNTIME_DIR is that of the user before."""
    with tempfile.TemporaryDirectory(dir="/tmp") as runtime:
        os.chown(runtime, 12345, 12345)
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        assert private_dir() == f"/tmp/rayslurm-{os.getuid()}" and not os.listdir(runtime)


def test_a_private_directory_that_others_can_access_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as runtime:  # pytest's own paths are too long for control sockets.
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        path = Path(private_dir())
        assert path.parent == Path(runtime) and path.stat().st_mode & 0o777 == 0o700
        path.chmod(0o722)
        with pytest.raises(OSError, match="is not a directory of user"):
            private_dir()
        path.rmdir()
        path.symlink_to(runtime)
        with pytest.raises(OSError, match="is not a directory of user"):
            private_dir()
        path.unlink()
        if os.getuid() == 0:
            path.mkdir(0o700)
            os.chown(path, 12345, 12345)
            with pytest.raises(OSError, match="is not a directory of user"):
                private_dir()


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("ssh: Could not resolve hostname jump: Name or service not known", "SSH to jump:22: no host is called 'jump'"),
        ("ssh: connect to host edge port 22: Connection refused", "SSH to edge:22: the connection is refused"),
        ("ssh: connect to host jump port 22: No route to host", "SSH to jump:22: it cannot be reached (No route to host)"),
        (
            "channel 0: open failed: connect failed: Connection refused",
            "the jump host jump:22 cannot reach it (Connection refused)",
        ),
        ("me@edge: Permission denied (publickey,password).", "SSH to edge:22: the server refused the login with the keys that"),
        ("Received disconnect from edge port 22:2: Too many authentication failures", "more keys than it allows"),
        ("@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @ edge", "its host key is not the one in"),
        ("No ED25519 host key is known for edge. Host key verification failed.", 'host_key_checking is "strict"'),
        ("@ WARNING: REVOKED HOST KEY DETECTED! @ edge", "is marked @revoked in"),
        ("kex_exchange_identification: Connection closed by remote host", "closes connections before the login"),
        ("kex_exchange_identification: banner line contains invalid characters", "is not an SSH server; check `port`"),
        ("a\n\n b ", "ssh failed: a / b"),
        ("", "ssh failed: it said nothing"),
    ],
)
def test_messages_of_ssh_become_sentences(output: str, message: str) -> None:
    assert message in str(explain(resource(client="openssh", jump_host=resource(host="jump", client="openssh")), output))


def test_a_local_connection_connects_directly() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, connection_to(None).connect(*server.getsockname(), 5) as stream:
        assert stream.getpeername() == server.getsockname()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("terminal", [True, False])
def test_ctrl_c_does_not_kill_a_local_command_that_goes_on(terminal: bool) -> None:
    """As a Python prompt, which `rayslurm attach --python` opens; it takes its time."""
    command = """if True:
        import signal, sys, time
        got = []
        signal.signal(signal.SIGINT, lambda *_: got.append(1))
        print("ready", flush=True)
        while not got:
            time.sleep(0.05)
        time.sleep(1)
        sys.exit(7)
    """
    attach = """if True:
        import sys
        from dagster_rayslurm.ssh.local import LocalConnection
        sys.exit(LocalConnection().interact(sys.argv[1:]))
    """
    pid, fd = pty.fork()
    if pid == 0:
        if not terminal:  # As in `rayslurm attach … | cat`; the end of the input does not interest the command.
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.execv(sys.executable, [sys.executable, "-c", attach, sys.executable, "-c", command])
    said = b""
    while b"ready" not in said:
        said += os.read(fd, 100)
    os.write(fd, b"\x03")
    _, status = os.waitpid(pid, 0)
    os.close(fd)
    assert os.waitstatus_to_exitcode(status) == 7


def test_a_jump_host_that_goes_away_does_not_count_as_silent() -> None:
    here, there = socket.socketpair()
    server, client = paramiko.Transport(there), paramiko.Transport(here)

    class Server(paramiko.ServerInterface):
        def check_auth_none(self, username: str) -> int:
            return paramiko.AUTH_SUCCESSFUL

        def check_channel_direct_tcpip_request(self, *_: Any) -> int:
            server.close()
            return paramiko.OPEN_FAILED_CONNECT_FAILED

    server.add_server_key(paramiko.ECDSAKey.generate())
    server.start_server(event=threading.Event(), server=Server())
    jump = resource(host="jump", keepalive=0)
    try:
        client.start_client(timeout=10)
        client.auth_none("me")
        with pytest.raises(ConnectionGone, match=r"SSH to .*jump:22: the connection is gone"):
            ParamikoTransport(jump, client, None).open_tcp(resource(host="last", jump_host=jump))
    finally:
        client.close()
        server.close()


def test_a_connection_that_is_lost_in_the_login_is_no_refusal(tmp_path: Path) -> None:
    """A link may be cut at any moment, and a refused key is not tried again."""
    key = paramiko.ECDSAKey.generate()
    key.write_private_key_file(str(tmp_path / "key"))
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            stream, _ = listener.accept()
            transport = paramiko.Transport(stream)

            class Server(paramiko.ServerInterface):
                def get_allowed_auths(self, username: str) -> str:
                    return "publickey"

                def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
                    stream.close()
                    return paramiko.AUTH_FAILED

            transport.add_server_key(key)
            transport.start_server(server=Server())

        threading.Thread(target=serve, daemon=True).start()
        host, port = listener.getsockname()
        ssh = resource(host=host, port=port, user="me", key_path=str(tmp_path / "key"), host_key_checking="off")
        with pytest.raises(ConnectionFailed) as caught:
            log_in(ssh)
    assert caught.value.temporary and str(caught.value).endswith("the connection was lost during the login")
