"""The SSH client for `client="openssh"`: the `ssh` program with a master connection.

A master is an `ssh` process that has logged in and lets other `ssh` processes use its connection; all processes of a user share
the master. Each channel is a multiplexing client, an `ssh` process that uses the master. The user's own ssh_config applies to
everything that the configuration leaves open, such as an alias, a ProxyJump, GSSAPI or a smart card. Options are those of ssh(1),
OpenSSH 9.2.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import select
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from . import errors
from .base import ConnectionGone
from .connection import Refused
from .fields import SSHLogin, certificate_path, key_path, known_hosts_path
from .local import locked, private_dir
from .login import Prompts, asks_password, check_files, check_keys, login_slot
from .terminal import has_terminal, shell_status

# Largest number of master connections to one server. A further one is opened when the others allow no more sessions.
_MAX_MASTERS = 8
# Messages of ssh(1) as a multiplexing client, OpenSSH 8.4 to 10.0. Each is on a line of its own.
_REFUSED = re.compile(r"^mux_client_request_session: session request failed|^Session open refused by peer", re.MULTILINE)
_NO_MASTER = re.compile(
    r"^Control socket connect\(|^ControlSocket .* already exists|^Connection closed by UNKNOWN|^mux_client_\w+: ", re.MULTILINE
)
_PERSIST = 60  # Seconds that a master keeps running after its last session, so that the next process finds it.
_ATTEMPT = 10  # Seconds for one TCP connection attempt, and for the server's first answer on it.
# Seconds for `ssh` to answer a question that needs no network; a `Match exec` in its configuration runs commands of the user.
_QUESTION_TIMEOUT = 30.0
# Options in the command that a person types. The other options prevent questions, which a person can answer.
_TYPED = ("Port", "User", "IdentityFile", "CertificateFile", "UserKnownHostsFile", "ProxyCommand")
# Script that passes a prompt of `ssh` to this process and prints the answer (SSH_ASKPASS, ssh(1)); {0} is a temporary directory.
_ASKPASS = """#!/bin/sh
printf %s "$1" > {0}/prompt
{{ read -r answered; IFS= read -r answer; }} < {0}/answer
[ "$answered" = yes ] && printf '%s\\n' "$answer"
"""


def log_in(ssh: SSHLogin) -> OpenSSHTransport:
    """Find or open a master connection to a server; returns a transport that starts commands through this master.

    With `require_existing_master`, only a master that a person opened is used. The user's ssh_config applies where the
    configuration leaves a field open. Raises `ConnectionFailed` if the login fails, or if the required master is missing.
    """
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
    """The standard input and output of a remote command.

    The constructor starts an `ssh` process that runs the command through the running master with the control socket `path`.
    """

    def __init__(self, ssh: SSHLogin, path: str, command: str) -> None:
        self._ssh = ssh
        self._socket, other = socket.socketpair()
        self._stderr = tempfile.TemporaryFile()
        with other:
            self._process = _start(path, ("-T", "--", "host", command), other, self._stderr)
        self.sendall, self.recv = self._socket.sendall, self._socket.recv

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()  # The master closes the channel.
        self._process.wait()

    def failure(self, noise: str) -> Exception:
        code, said = self._process.wait(), _text(self._stderr)
        if code == 255:
            return _start_failure(self._ssh, said) or errors.gone(self._ssh, said[-200:].strip())
        return errors.not_started(self._ssh, code, (noise + said)[-300:].strip())


def _start(path: str, arguments: tuple[str, ...], stream: socket.socket, stderr: Any) -> subprocess.Popen[bytes]:
    """Start an `ssh` process that uses the connection of a running master; returns the process.

    Args:
        path: the path of the master's control socket.
        arguments: the words after the options for the master, such as ("-T", "--", "host", "uname").
        stream: a socket that becomes the standard input and output of the process.
        stderr: a file for the error output of the process.
    """
    command, fd = multiplexed(path, *arguments), stream.fileno()
    return subprocess.Popen(command, stdin=fd, stdout=fd, stderr=stderr, start_new_session=True)


def _start_failure(ssh: SSHLogin, said: str) -> Exception | None:
    """Returns the exception for an `ssh` process whose command certainly did not start; None if the command may have started.

    The exception is `Refused` if the server opens no further session on the master, and `ConnectionGone` if the master has
    ended. `said` is the error output of the process.
    """
    if _REFUSED.search(said):
        return Refused()
    return errors.gone(ssh) if _NO_MASTER.search(said) else None


def _text(file: Any) -> str:
    """Returns the whole content of an open binary file as text."""
    file.seek(0)
    return str(file.read().decode("utf-8", "replace"))


class OpenSSHTransport:
    """Runs commands on a server by `ssh` processes, which use the connection of a running master.

    `path` is the path of the master's control socket, through which the processes reach the master; `log_in` finds or creates
    the socket. If this master allows no more sessions, `start` opens a further master, unless `require_existing_master` is set.
    """

    def __init__(self, ssh: SSHLogin, path: str) -> None:
        self.ssh = ssh
        self.path = path

    def alive(self) -> bool:
        """Returns True if the control socket exists; a master removes its control socket at its end."""
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
            code = _start(self.path, ("-W", target, "--", "host"), client, stderr).wait()
            failure = _start_failure(self.ssh, _text(stderr)) if code == 255 else None
            if isinstance(failure, ConnectionGone):
                raise failure

    def interact(self, command: str) -> int:
        return shell_status(subprocess.call(multiplexed(self.path, "-tt" if has_terminal() else "-T", "--", "host", command)))

    def close(self) -> None:
        """Do nothing: other processes may use the master, and a master that nobody uses ends by itself."""


# -- options -------------------------------------------------------------------------------------------------------------


def options(ssh: SSHLogin, scratch: str = "") -> list[str]:
    """Returns the `-o` options of `ssh` for a login to a server through its jump hosts.

    `scratch` is a directory with a known hosts file for each configured `host_key`. The `ssh` processes for the jump hosts write
    their error output to a file in `scratch`, because `ssh` with ControlPersist hides this output. If `scratch` is "", the result
    has only the options that a person has to type.
    """
    values = {
        # TCP repeats a lost packet later and later, so a new attempt succeeds earlier.
        "ConnectTimeout": str(min(_ATTEMPT, ssh.connect_timeout)),
        "ConnectionAttempts": str(max(1, ssh.connect_timeout // _ATTEMPT)),
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
        values["Port"] = str(ssh.port)
    if ssh.user:
        values["User"] = ssh.user
    if key := key_path(ssh):
        values["IdentityFile"] = _file(key)
        values["IdentitiesOnly"] = "yes"  # Otherwise an agent with many keys uses up the server's MaxAuthTries.
    if certificate := certificate_path(ssh):
        values["CertificateFile"] = _file(certificate)
    if ssh.host_key and scratch:
        pinned = _file(f"{scratch}/pinned-{len(ssh.hops())}")
        values |= {"UserKnownHostsFile": pinned, "GlobalKnownHostsFile": "/dev/null", "StrictHostKeyChecking": "yes"}
        values |= {"IgnoreUnknown": "KnownHostsCommand", "KnownHostsCommand": "none"}  # OpenSSH 8.5.
    elif ssh.host_key_checking == "off":
        values |= {"UserKnownHostsFile": "/dev/null", "GlobalKnownHostsFile": "/dev/null"}
    elif ssh.known_hosts_file:
        values["UserKnownHostsFile"] = _file(known_hosts_path(ssh))
    if ssh.key_passphrase is None and ssh.password is None:
        values["BatchMode"] = "yes"
    if jump := ssh.jump_host:
        words = ["ssh", *options(jump, scratch), *(("-o", "ControlMaster=no", "-o", "ControlPath=none") if scratch else ())]
        command = f"{_plain(shlex.join(words))} -W '[%h]:%p' -- {_plain(shlex.quote(jump.host))}"
        values["ProxyCommand"] = command + (f" 2>> {_plain(shlex.quote(f'{scratch}/log'))}" if scratch else "")
    return [word for name, value in values.items() if scratch or name in _TYPED for word in ("-o", f"{name}={value}")]


def _plain(text: str) -> str:
    """Returns `text` with doubled percent signs, for a ProxyCommand, in which ssh expands single percent signs."""
    return text.replace("%", "%%")


def _file(path: str) -> str:
    """Returns the file name `path` as the value of an `ssh` option, quoted and with percent signs doubled.

    Without these changes ssh would split the value at spaces and expand percent signs.
    """
    return '"' + path.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%") + '"'


def control_path(ssh: SSHLogin, number: int = 0) -> str:
    """Returns the path of the control socket of a master; equal SSH configurations give equal paths in all processes.

    `number` tells the masters to one server apart: 0 for the first master, and 1, 2 and so on for further masters.
    """
    # Timeouts do not count, so that a change of a timeout does not lose a login that a person made.
    fields = ("host", "port", "user", "key_path", "certificate_path", "host_key", "host_key_checking", "known_hosts_file")
    identity = repr([[getattr(hop, field) for field in fields] for hop in ssh.hops()])
    return os.path.join(private_dir(), f"{hashlib.sha256(identity.encode()).hexdigest()[:16]}-{number}")


def multiplexed(path: str, *words: str) -> list[str]:
    """Returns a command line of `ssh` that uses the master with the control socket `path`, and fails without this master.

    `words` are the further words of the command line.
    """
    guard = ["-o", "ControlMaster=no", "-o", "ProxyCommand=false", "-o", "BatchMode=yes", "-o", "LogLevel=ERROR"]
    return ["ssh", "-F", "none", "-S", path, *guard, *words]


def master_command(ssh: SSHLogin) -> str:
    """Returns the command with which a person opens the master that `require_existing_master` needs."""
    alive = ["-o", f"ServerAliveInterval={ssh.keepalive}", "-o", "ServerAliveCountMax=1"]
    return shlex.join(["ssh", "-M", "-S", control_path(ssh), "-fN", *alive, *options(ssh), "--", ssh.host])


# -- masters -------------------------------------------------------------------------------------------------------------


def existing_master(ssh: SSHLogin) -> str:
    """Returns the path of the control socket of a running master that a person opened.

    Raises `ConnectionFailed` if there is no such master.
    """
    login = [*(["-l", ssh.user] if ssh.user else []), *(["-p", str(ssh.port)] if ssh.port != 22 else [])]
    configuration = _ask(["ssh", "-G", *login, "--", ssh.host]) or ""
    own = re.search(r"^controlpath (?!none$)(.+)$", configuration, re.MULTILINE)
    for path in [control_path(ssh), *([own[1]] if own else [])]:
        if _master_runs(path):
            return path
    raise errors.no_master(ssh, master_command(ssh))


def _master_runs(path: str) -> bool:
    """Returns True if a master with the control socket `path` runs."""
    return os.path.exists(path) and _ask(multiplexed(path, "-O", "check", "--", "host")) is not None


def _ask(command: list[str]) -> str | None:
    """Run an `ssh` command that needs no network, such as `ssh -O check`; returns the output, or None if the command failed."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=_QUESTION_TIMEOUT)
        return None if done.returncode else done.stdout
    return None


def ensure_master(ssh: SSHLogin, path: str) -> None:
    """Open a master with the control socket `path`, unless this master runs already.

    Raises `ConnectionFailed` if the login fails. Other processes that need the same master wait until the master is open.
    """
    with locked(os.path.basename(path)):
        if not _master_runs(path):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            with login_slot(ssh), tempfile.TemporaryDirectory(prefix="rayslurm-") as scratch:
                _open_master(ssh, path, scratch)


def _open_master(ssh: SSHLogin, path: str, scratch: str) -> None:
    """Log in to a server, and leave a master with the control socket `path` running; raises `ConnectionFailed` if this fails.

    `scratch` is an empty temporary directory for the files of this login.
    """
    hops, askpass = ssh.hops(), os.path.join(scratch, "askpass")
    for number, hop in enumerate(hops, 1):
        if hop.host_key:
            _write(f"{scratch}/pinned-{number}", f"* {hop.host_key}\n")
    _write(askpass, _ASKPASS.format(shlex.quote(scratch)), 0o700)
    command = ["ssh", "-M", "-S", path, "-o", f"ControlPersist={_PERSIST}", "-fN", *options(ssh, scratch), "--", ssh.host]
    environ = {
        **os.environ,
        "LC_ALL": "C",
        "SHELL": "/bin/sh",  # Runs the ProxyCommand. The shell of a service user is often nologin.
        "SSH_ASKPASS": askpass,
        "SSH_ASKPASS_REQUIRE": "force",  # Since OpenSSH 8.4; older versions need a display and no terminal.
        "DISPLAY": os.environ.get("DISPLAY", ":0"),
    }
    prompts, deadline = Prompts(hops), time.monotonic() + ssh.connect_timeout * len(hops)
    with open(f"{scratch}/log", "a+b") as log, _pipe(scratch, "prompt") as asked, _pipe(scratch, "answer") as answers:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environ, start_new_session=True)
        while process.poll() is None:
            if select.select([asked], [], [], 0.02)[0]:
                answer = prompts.answer(asked.read().decode("utf-8", "replace"))
                answers.write(b"no\n\n" if answer is None else b"yes\n" + answer.encode() + b"\n")
            if time.monotonic() > deadline:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                raise errors.no_answer(ssh)
        if process.returncode:
            if prompts.unanswered and not asks_password(prompts.unanswered):
                raise errors.prompt_unanswered(ssh, prompts.unanswered, command=master_command(ssh))
            raise explain(ssh, _text(log))


def _pipe(scratch: str, name: str) -> Any:
    """Returns a new named pipe `name` in the directory `scratch`, opened for reading and writing without blocking.

    The pipe has no end of file as long as it is open, because this process can write to it.
    """
    path = os.path.join(scratch, name)
    os.mkfifo(path, 0o600)
    return os.fdopen(os.open(path, os.O_RDWR | os.O_NONBLOCK), "r+b", buffering=0)


def _write(path: str, text: str, mode: int = 0o600) -> None:
    """Create the file `path` with the content `text` and the permissions `mode`."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        file.write(text)


def explain(ssh: SSHLogin, output: str) -> Exception:
    """Returns the exception for a failed login to the server `ssh`; `output` is the output of `ssh` in the C locale."""
    hops = ssh.hops()
    # The server or jump host that failed: the ssh of the first one prints its message first, with the name of its host.
    hop = next((hop for hop in hops if re.search(rf"(?<![\w.-]){re.escape(hop.host)}(?![\w-]).*?\b{hop.port}\b", output)), None)
    hop = hop or next((hop for hop in hops if hop.host in output), ssh)
    for pattern, make in _FAILURES.items():
        if match := re.search(pattern, output):
            said = match[1].strip() if match.re.groups else match[0]
            return make(ssh if make is errors.jump_refused else hop, said)
    words = " / ".join(line.strip() for line in output.splitlines() if line.strip())[-300:]
    return errors.failed(ssh, f"ssh failed: {words or 'it said nothing'}", temporary=True)


def _host_key(ssh: SSHLogin, said: str) -> Exception:
    """Returns the exception for a host key that `ssh` has not accepted; `said` is the message of `ssh`."""
    if ssh.host_key:
        return errors.host_key_not_pinned(ssh)
    return errors.host_key_unknown(ssh) if said.startswith("Host key verification") else errors.host_key_changed(ssh)


def _login_refused(ssh: SSHLogin, methods: str) -> Exception:
    """Returns the exception for a refused login; `methods` are the methods that the server takes, as "publickey,password"."""
    key = f"the key {key_path(ssh)}" if ssh.key_path else "the keys that ssh finds"
    tried = key if ssh.password is None else f"{key} and the password"
    return errors.login_refused(ssh, tried, offered=f"; it takes {methods.replace(',', ', ')}")


# Patterns of the messages of ssh(1), and the function that returns the exception for each message. The arguments of the function
# are the server that failed, and the text of the pattern's group, or of the whole match if the pattern has no group.
_FAILURES: dict[str, Callable[[SSHLogin, str], Exception]] = {
    "(?i)REVOKED HOST KEY|is marked as revoked": errors.host_key_revoked,
    "HOST IDENTIFICATION HAS CHANGED|No matching host key": _host_key,
    "Host key verification failed": _host_key,
    "Could not resolve hostname": errors.unknown_host,
    "open failed: (?:connect failed|administratively prohibited): (.*)": errors.jump_refused,
    "Connection refused": errors.nothing_listens,
    r"Connection timed out|Operation timed out|Connection to \S+ port \d+ timed out": errors.no_answer,
    "No route to host|Network is unreachable|Host is down": errors.unreachable,
    r"Permission denied \(([^)]*)\)": _login_refused,
    "Too many authentication failures": lambda ssh, _: errors.login_refused(ssh, "more keys than it allows", offered=""),
    "(?i)kex_exchange_identification: (?:read: )?Connection (?:closed|reset)|banner exchange.*(?:closed|reset)": errors.busy,
    "(?i)kex_exchange_identification: (?:banner line|client sent)|Bad remote protocol|invalid format": errors.not_ssh,
}
