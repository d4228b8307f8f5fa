"""The SSH client for `client="openssh"`: the `ssh` program with a master connection.

A master is an `ssh` process that has logged in and lets other `ssh` processes use its connection; all processes of a user share
it. Every channel is such a process, a multiplexing client. Fields that the configuration leaves open are left to the user's own
ssh_config, such as an alias, a ProxyJump, GSSAPI or a smart card. Options are those of ssh(1), OpenSSH 9.2.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..runtime.process.scratch import Scratch, sweep
from . import errors, openssh_askpass
from .base import ConnectionGone
from .config import SSHConnectionResource
from .connection import Refused
from .known_hosts import known_hosts_path
from .local import private_dir
from .login import certificate_path, check_files, check_keys, key_path, login_slot

_MAX_MASTERS = 8
"""Largest number of master connections to one server. A further one is opened when the others allow no more sessions."""
# Messages of ssh(1) as a multiplexing client, OpenSSH 8.4 to 10.0. Each is on a line of its own.
_REFUSED = re.compile(rb"^mux_client_request_session: session request failed|^Session open refused by peer", re.MULTILINE)
_NO_MASTER = re.compile(
    rb"^Control socket connect\(|^ControlSocket .* already exists|^Connection closed by UNKNOWN|^mux_client_\w+: ", re.MULTILINE
)
_PERSIST = 60
"""Seconds that a master keeps running after its last session, so that the next process finds it."""
_CHECK_TIMEOUT = 10.0
"""Seconds for a master to answer the question whether it runs."""
_CONFIG_TIMEOUT = 30.0
"""Seconds for ssh to read its configuration files; a `Match exec` in them runs commands of the user."""
_CONNECT_SLICE = 5.0
"""Seconds after which the first TCP connection attempt is given up and a new one starts; doubled each time.

The kernel repeats a lost packet later and later, so a new attempt succeeds earlier.
"""


def log_in(ssh: SSHConnectionResource) -> OpenSSHTransport:
    """Find or open a master connection to a server. The user's ssh_config applies where the resource leaves a field open."""
    if shutil.which("ssh") is None:
        raise errors.no_client(ssh)
    if ssh.require_existing_master:
        return OpenSSHTransport(ssh, existing_master(ssh))
    check_files(ssh)
    check_keys(ssh)
    path = control_path(ssh)
    ensure_master(ssh, path)
    return OpenSSHTransport(ssh, path)


class OpenSSHStream:
    """A remote command, run by an `ssh` process as a multiplexing client."""

    def __init__(self, ssh: SSHConnectionResource, path: str, command: str) -> None:
        self._ssh = ssh
        self._socket, other = socket.socketpair()
        self._stderr = tempfile.TemporaryFile()
        with other:
            self._process = _start(path, ("-T", "--", "host", command), other.fileno(), other.fileno(), self._stderr)
        self.sendall, self.recv = self._socket.sendall, self._socket.recv

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()  # The master closes the channel.
        self._process.wait()

    def failure(self, noise: str) -> Exception:
        code = self._process.wait()
        self._stderr.seek(0)
        stderr = self._stderr.read()
        if code == 255:
            return _start_failure(self._ssh, stderr) or errors.gone(self._ssh, stderr.decode("utf-8", "replace")[-200:].strip())
        return errors.not_started(self._ssh, code, (noise + stderr.decode("utf-8", "replace"))[-300:].strip())


def _start(path: str, arguments: Sequence[str], stdin: int, stdout: int, stderr: Any) -> subprocess.Popen[bytes]:
    """Start an `ssh` process that uses the master with the control socket `path`, and return the process."""
    command = multiplexed(path, *arguments)
    return subprocess.Popen(command, bufsize=0, stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True)


def _start_failure(ssh: SSHConnectionResource, stderr: bytes) -> Exception | None:
    """The exception for a multiplexing client that started nothing, by its error output; None if it may have."""
    if _REFUSED.search(stderr):
        return Refused()
    return errors.gone(ssh) if _NO_MASTER.search(stderr) else None


class OpenSSHTransport:
    """One login by the `ssh` program: the master with the control socket `path`, or the next if it allows no more sessions."""

    def __init__(self, ssh: SSHConnectionResource, path: str) -> None:
        self.ssh = ssh
        self.path = path

    def alive(self) -> bool:
        """Whether the control socket exists: a master removes it when it ends."""
        return os.path.exists(self.path)

    def start(self, command: str) -> Iterator[OpenSSHStream]:
        yield OpenSSHStream(self.ssh, self.path, command)
        for number in range(1, 1 if self.ssh.require_existing_master else _MAX_MASTERS):
            self.path = control_path(self.ssh, number)
            ensure_master(self.ssh, self.path)
            yield OpenSSHStream(self.ssh, self.path, command)

    def tunnel(self, host: str, port: int, client: socket.socket) -> None:
        target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        with tempfile.TemporaryFile() as stderr:
            process = _start(self.path, ("-W", target, "--", "host"), client.fileno(), client.fileno(), stderr)
            if process.wait() == 255:
                stderr.seek(0)
                if isinstance(failure := _start_failure(self.ssh, stderr.read()), ConnectionGone):
                    raise failure

    def close(self) -> None:
        """Do nothing: other processes may use the master, and a master that nobody uses ends by itself."""


# -- options -------------------------------------------------------------------------------------------------------------


def login_options(ssh: SSHConnectionResource, pinned_keys: str | None = None) -> list[str]:
    """The `-o` options of `ssh` for one server; `pinned_keys` is a known hosts file with only the configured `host_key`."""
    options = {
        "ConnectTimeout": str(ssh.connect_timeout),
        "ServerAliveInterval": str(ssh.keepalive),
        # One missed answer is enough: a new login costs less than a connection that hangs.
        "ServerAliveCountMax": "1",
        "StrictHostKeyChecking": {"accept-new": "accept-new", "strict": "yes", "off": "no"}[ssh.host_key_checking],
        "HashKnownHosts": "no",
        "UpdateHostKeys": "no",
        "NumberOfPasswordPrompts": "1",
        "ForwardAgent": "no",
        "ForwardX11": "no",
        "PermitLocalCommand": "no",
        "ClearAllForwardings": "yes",
        "RequestTTY": "no",
        "RemoteCommand": "none",
        "VerifyHostKeyDNS": "no",
        "NoHostAuthenticationForLocalhost": "no",
        "LogLevel": "INFO",
    }
    if ssh.port != 22:
        options["Port"] = str(ssh.port)
    if ssh.user:
        options["User"] = ssh.user
    key, certificate = key_path(ssh), certificate_path(ssh)
    if key:
        options["IdentityFile"] = _file(key)
        options["IdentitiesOnly"] = "yes"  # Otherwise an agent with many keys uses up the server's MaxAuthTries.
    if certificate:
        options["CertificateFile"] = _file(certificate)
    if pinned_keys:
        options |= {"UserKnownHostsFile": _file(pinned_keys), "GlobalKnownHostsFile": "/dev/null", "StrictHostKeyChecking": "yes"}
        options |= {"IgnoreUnknown": "KnownHostsCommand", "KnownHostsCommand": "none"}  # OpenSSH 8.5.
    elif ssh.host_key_checking == "off":
        options |= {"UserKnownHostsFile": "/dev/null", "GlobalKnownHostsFile": "/dev/null"}
    elif ssh.known_hosts_file:
        options["UserKnownHostsFile"] = _file(known_hosts_path(ssh))
    if ssh.key_passphrase is None and ssh.password is None:
        options["BatchMode"] = "yes"
    return [word for name, value in options.items() for word in ("-o", f"{name}={value}")]


def jump_options(ssh: SSHConnectionResource, pinned_keys: dict[int, str], log: str = "/dev/null") -> list[str]:
    """The options of `ssh` for the jump hosts of a server: a ProxyCommand, which may have another one inside.

    Args:
        ssh: the server behind the jump hosts.
        pinned_keys: known hosts files with one `host_key` each, by the position of the server in `ssh.hops()`.
        log: file for the messages of the jump hosts' ssh, which ssh hides when it has ControlPersist.
    """
    jump = ssh.jump_host
    if jump is None:
        return []
    words = [
        "ssh",
        *login_options(jump, pinned_keys.get(len(jump.hops()) - 1)),
        *jump_options(jump, pinned_keys, log),
        *("-o", "ControlMaster=no", "-o", "ControlPath=none"),
    ]
    command = f"{_plain(shlex.join(words))} -W '[%h]:%p' -- {_plain(shlex.quote(jump.host))} 2>> {_plain(shlex.quote(log))}"
    return ["-o", f"ProxyCommand={command}"]


def control_path(ssh: SSHConnectionResource, number: int = 0) -> str:
    """The path of the control socket of a master. It is the same in all processes with the same SSH configuration."""
    # Timeouts do not count, so that a change of a timeout does not lose a login that a person made.
    fields = ("host", "port", "user", "key_path", "certificate_path", "host_key", "host_key_checking", "known_hosts_file")
    identity = repr([[getattr(hop, field) for field in fields] for hop in ssh.hops()])
    return os.path.join(private_dir(), f"{hashlib.sha256(identity.encode()).hexdigest()[:16]}-{number}")


def multiplexed(path: str, *words: str) -> list[str]:
    """A command line of `ssh` that uses the master with the control socket `path` and never connects by itself."""
    guard = ["-o", "ControlMaster=no", "-o", "ProxyCommand=false", "-o", "BatchMode=yes", "-o", "LogLevel=ERROR"]
    return ["ssh", "-F", "none", "-S", path, *guard, *words]


def master_command(ssh: SSHConnectionResource) -> str:
    """The command for a person to type, which opens the master that `require_existing_master` needs."""
    alive = ["-o", f"ServerAliveInterval={ssh.keepalive}", "-o", "ServerAliveCountMax=1"]
    return shlex.join(["ssh", "-M", "-S", control_path(ssh), "-fN", *alive, *_typed_options(ssh), "--", ssh.host])


def _typed_options(ssh: SSHConnectionResource) -> list[str]:
    """The options of `master_command` for one server and its jump hosts, without those that only matter to a program."""
    words = ["-p", str(ssh.port)] if ssh.port != 22 else []
    if ssh.user:
        words += ["-l", ssh.user]
    key, certificate, jump = key_path(ssh), certificate_path(ssh), ssh.jump_host
    words += ["-o", f"IdentityFile={_file(key)}"] if key else []
    words += ["-o", f"CertificateFile={_file(certificate)}"] if certificate else []
    if ssh.known_hosts_file:
        words += ["-o", f"UserKnownHostsFile={_file(known_hosts_path(ssh))}"]
    if jump:
        through = _plain(shlex.join(["ssh", *_typed_options(jump)]))
        words += ["-o", f"ProxyCommand={through} -W '[%h]:%p' -- {_plain(shlex.quote(jump.host))}"]
    return words


def _plain(text: str) -> str:
    """Text for a ProxyCommand with its percent signs doubled, because ssh expands single ones."""
    return text.replace("%", "%%")


def _file(path: str) -> str:
    """A file name as the value of an option of `ssh`: quoted, because ssh splits at spaces, with percent signs doubled."""
    return '"' + path.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%") + '"'


# -- masters -------------------------------------------------------------------------------------------------------------


def existing_master(ssh: SSHConnectionResource) -> str:
    """The control socket of a master that a person opened: at `control_path`, or at the ControlPath of the user's ssh_config."""
    login = [*(["-l", ssh.user] if ssh.user else []), *(["-p", str(ssh.port)] if ssh.port != 22 else [])]
    words = ["ssh", "-G", *login, "--", ssh.host]
    try:
        configuration = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=_CONFIG_TIMEOUT)
    except subprocess.TimeoutExpired:
        raise errors.failed(
            ssh,
            f"`{shlex.join(words)}` took over {_CONFIG_TIMEOUT:.0f} s; see what its configuration runs (`Match exec`)",
            temporary=True,
        ) from None
    own = re.search(r"^controlpath (?!none$)(.+)$", configuration.stdout, re.MULTILINE)
    for path in [control_path(ssh), *([own[1]] if own else [])]:
        if _master_runs(path):
            return path
    raise errors.no_master(ssh, master_command(ssh))


def _master_runs(path: str) -> bool:
    if not os.path.exists(path):
        return False
    check = multiplexed(path, "-O", "check", "--", "host")
    try:
        return subprocess.run(check, capture_output=True, timeout=_CHECK_TIMEOUT).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def ensure_master(ssh: SSHConnectionResource, path: str) -> None:
    """Open a master with the control socket `path`, unless one runs already. Other processes that want it wait meanwhile."""
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            if not _master_runs(path):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
                _open_master(ssh, path)
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # A forked child holds the file open as well.


def _open_master(ssh: SSHConnectionResource, path: str) -> None:
    deadline, tcp_timeout = time.monotonic() + ssh.connect_timeout * len(ssh.hops()), _CONNECT_SLICE
    while True:
        remaining = deadline - time.monotonic()
        try:
            with login_slot(f"{ssh.host}:{ssh.port}", ssh.connect_timeout), _scratch_dir(ssh) as scratch:
                return _start_master(ssh, path, scratch, remaining, int(max(1, min(tcp_timeout, remaining))))
        except TimeoutError as error:
            raise errors.failed(ssh, str(error), temporary=True) from None
        except _NoAnswer as error:
            if time.monotonic() >= deadline - 1:
                raise errors.no_answer(error.ssh) from None
            tcp_timeout *= 2  # The server may also be slow to answer.


class _NoAnswer(Exception):
    """Raised when a TCP connection to a server or jump host timed out. The attempt may be repeated."""

    def __init__(self, ssh: SSHConnectionResource) -> None:
        self.ssh = ssh


@contextlib.contextmanager
def _scratch_dir(ssh: SSHConnectionResource) -> Iterator[str]:
    """A temporary directory for one login: the askpass program and its answers, the configured host keys, ssh's log."""
    sweep()  # A killed login may have left secrets.
    directory = Scratch()
    scratch = directory.path
    try:
        answers = []
        for number, hop in enumerate(ssh.hops()):
            if hop.host_key:
                _write(os.path.join(scratch, f"pinned-{number}"), f"* {hop.host_key}\n")
            if hop.key_passphrase is not None:
                answers.append({"kind": "passphrase", "for": key_path(hop) or "", "secret": hop.key_passphrase})
            if hop.password is not None:
                login = f"{hop.user or getpass.getuser()}@{hop.host}"
                answers.append(
                    {"kind": "password", "for": login, "secret": hop.password, "alone": "yes" if len(ssh.hops()) == 1 else ""}
                )
        _write(os.path.join(scratch, openssh_askpass.ANSWERS), json.dumps(answers))
        program = shlex.join([sys.executable, "-I", openssh_askpass.__file__, scratch])
        _write(os.path.join(scratch, "askpass"), f'#!/bin/sh\nexec {program} "$1"\n', 0o700)
        yield scratch
    finally:
        directory.remove()


def _write(path: str, text: str, mode: int = 0o600) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        file.write(text)


def _start_master(ssh: SSHConnectionResource, path: str, scratch: str, remaining: float, tcp_timeout: int) -> None:
    pinned = {number: os.path.join(scratch, f"pinned-{number}") for number, hop in enumerate(ssh.hops()) if hop.host_key}
    log_path = os.path.join(scratch, "log")
    command = [
        *("ssh", "-o", f"ConnectTimeout={tcp_timeout}", "-M", "-S", path, "-o", f"ControlPersist={_PERSIST}", "-fN"),
        *login_options(ssh, pinned.get(len(ssh.hops()) - 1)),
        *jump_options(ssh, pinned, log_path),
        *("--", ssh.host),
    ]
    environ = {
        **os.environ,
        "LC_ALL": "C",
        "SHELL": "/bin/sh",  # Runs the ProxyCommand. The shell of a service user is often nologin.
        "SSH_ASKPASS": os.path.join(scratch, "askpass"),
        "SSH_ASKPASS_REQUIRE": "force",  # Since OpenSSH 8.4; older versions need a display and no terminal.
        "DISPLAY": os.environ.get("DISPLAY", ":0"),
    }
    with open(log_path, "ab") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environ, start_new_session=True, close_fds=True
        )
        try:
            code = process.wait(max(1.0, remaining))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise errors.no_answer(ssh) from None
    if code:
        with open(log_path, errors="replace") as file:
            text = file.read()
        with contextlib.suppress(FileNotFoundError), open(os.path.join(scratch, openssh_askpass.UNANSWERED)) as file:
            prompt = file.readline().strip()
            if not openssh_askpass.asks_password(prompt):
                raise errors.prompt_unanswered(ssh, prompt, master_command(ssh))
        raise explain(ssh, text)


def explain(ssh: SSHConnectionResource, output: str) -> Exception:
    """The exception for a failed login, by the output of ssh(1) in the C locale."""
    hops = ssh.hops()
    # The server or jump host that failed: the ssh of the first one prints its message first, with the name of its host.
    hop = next((hop for hop in hops if re.search(rf"(?<![\w.-]){re.escape(hop.host)}(?![\w-]).*?\b{hop.port}\b", output)), None)
    hop = hop or next((hop for hop in hops if hop.host in output), ssh)
    for pattern, make in _FAILURES.items():
        if match := re.search(pattern, output):
            said = match[1].strip() if match.re.groups else match[0]
            return make(ssh, said) if make is _jump_refused else make(hop, said)
    words = " / ".join(line.strip() for line in output.splitlines() if line.strip())[-300:]
    return errors.failed(ssh, f"ssh failed: {words or 'it said nothing'}", temporary=True)


def _host_key(ssh: SSHConnectionResource, said: str) -> Exception:
    if ssh.host_key:
        return errors.host_key_not_pinned(ssh, "")
    unknown = said.startswith("Host key verification")
    return (errors.host_key_unknown if unknown else errors.host_key_changed)(ssh, known_hosts_path(ssh), "")


def _jump_refused(ssh: SSHConnectionResource, said: str) -> Exception:
    return errors.jump_refused(ssh, ssh.jump_host or ssh, said)


_FAILURES: dict[str, Callable[[SSHConnectionResource, str], Exception]] = {
    "(?i)REVOKED HOST KEY|is marked as revoked": lambda hop, _: errors.host_key_revoked(hop, known_hosts_path(hop)),
    "HOST IDENTIFICATION HAS CHANGED|No matching host key": _host_key,
    "Host key verification failed": _host_key,
    "Could not resolve hostname": lambda hop, _: errors.unknown_host(hop),
    "open failed: (?:connect failed|administratively prohibited): (.*)": _jump_refused,
    "Connection refused": lambda hop, _: errors.nothing_listens(hop),
    r"Connection timed out|Operation timed out|Connection to \S+ port \d+ timed out": lambda hop, _: _NoAnswer(hop),
    "No route to host|Network is unreachable|Host is down": errors.unreachable,
    'Load key "?(.+?)"?: incorrect passphrase': lambda hop, key: errors.failed(
        hop, f"`key_passphrase` does not open the key {key}, or it is missing; check it"
    ),
    'Load key "?(.+?"?: .+)': lambda hop, said: errors.failed(
        hop, "{} is not a private key that can be read ({}); check `key_path`".format(*re.split('"?: ', said, maxsplit=1))
    ),
    r"Permission denied \(([^)]*)\)": lambda hop, methods: errors.login_refused(
        hop, _credentials(hop), methods.replace(",", ", ")
    ),
    "Too many authentication failures": lambda hop, _: errors.login_refused(hop, "more keys than it allows", ""),
    "(?i)kex_exchange_identification: (?:read: )?Connection (?:closed|reset)|banner exchange.*(?:closed|reset)": lambda hop, _: (
        errors.busy(hop)
    ),
    "(?i)kex_exchange_identification: (?:banner line|client sent)|Bad remote protocol|invalid format": lambda hop, _: (
        errors.not_ssh(hop)
    ),
}
"""What ssh(1) prints, and the exception for it: of the server that failed, and of the group of the pattern or its match."""


def _credentials(ssh: SSHConnectionResource) -> str:
    key = key_path(ssh)
    parts = [f"the key {key}" if key else "the keys that ssh finds", *(["the password"] if ssh.password is not None else [])]
    return " and ".join(parts)
