"""SSH by the `ssh` program: a master connection that all processes share, everything else multiplexed over it."""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import json
import os
import re
import select
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from . import failures, openssh_askpass
from .base import ConnectionFailed
from .config import SSHConnectionResource
from .credentials import check_files, key_path, known_hosts_path
from .keys import check_keys
from .link import Refused
from .logins import login_slot
from .openssh_options import control_path, jump_options, login_options, master_command
from .private_dir import private_dir
from .ssh import SSHConnection

_MASTERS = 8
_PERSIST = 60
"""Seconds that a master stays after its last session, so that the next process finds it."""
_FIRST_SLICE = 5.0
"""Seconds after which a TCP connection is tried anew: the kernel waits ever longer between its own tries."""
_REFUSED = re.compile(rb"Session open refused by peer|mux_client_request_session: session request failed")
_NO_MASTER = re.compile(
    rb"Control socket connect|ControlSocket|Connection closed by UNKNOWN|mux_client_hello|No such file or directory"
)


class OpenSSHConnection(SSHConnection):
    """An edge node reached by the `ssh` program, with the user's own configuration where ours says nothing.

    Args:
        ssh: the server and how to log in.
    """

    def _login(self) -> OpenSSHLink:
        if shutil.which("ssh") is None:
            raise failures.no_client(self.ssh)
        if self.ssh.require_existing_master:
            return _existing_master(self.ssh)
        check_files(self.ssh)
        check_keys(self.ssh)
        for number in range(_MASTERS):
            path = control_path(self.ssh, number)
            _ensure_master(self.ssh, path)
            link = OpenSSHLink(self.ssh, path)
            if link.has_room():
                return link
        raise failures.no_sessions(self.ssh)


def _existing_master(ssh: SSHConnectionResource) -> OpenSSHLink:
    """The master that a person opened: where their own configuration puts it, or where the command we name does."""
    asked = subprocess.run(
        [
            "ssh",
            "-G",
            *(["-l", ssh.user] if ssh.user else []),
            *(["-p", str(ssh.port)] if ssh.port != 22 else []),
            "--",
            ssh.host,
        ],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    own = re.search(r"^controlpath (?!none$)(.+)$", asked.stdout, re.MULTILINE)
    for path in [control_path(ssh), *([own[1]] if own else [])]:
        if _master_runs(path):
            return OpenSSHLink(ssh, path)
    raise failures.no_master(ssh, master_command(ssh))


def _master_runs(path: str) -> bool:
    """Whether a master answers at a control socket."""
    return (
        os.path.exists(path)
        and subprocess.run(_multiplexed(path, "-O", "check", "--", "host"), capture_output=True).returncode == 0
    )


def _multiplexed(path: str, *words: str) -> list[str]:
    """An `ssh` that uses the master at `path` or fails: it could not even make a connection of its own."""
    guard = ["-o", "ControlMaster=no", "-o", "ProxyCommand=false", "-o", "BatchMode=yes", "-o", "LogLevel=ERROR"]
    return ["ssh", "-F", "none", "-S", path, *guard, *words]


def _ensure_master(ssh: SSHConnectionResource, path: str) -> None:
    """Open a master at a control socket unless one is there; one process does it, others wait.

    Raises:
        ConnectionFailed: the login does not work out.
    """
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _master_runs(path):
            return
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        _open_master(ssh, path)


def _open_master(ssh: SSHConnectionResource, path: str) -> None:
    deadline, timeout = time.monotonic() + ssh.connect_timeout * len(ssh.hops()), _FIRST_SLICE
    while True:
        remaining = deadline - time.monotonic()
        try:
            with login_slot(f"{ssh.host}:{ssh.port}", ssh.connect_timeout), _scratch(ssh) as scratch:
                return _try_to_open(ssh, path, scratch, remaining, int(max(1, min(timeout, remaining))))
        except TimeoutError as error:
            raise failures.other(ssh, str(error), temporary=True) from None
        except _NoAnswer as error:
            if time.monotonic() >= deadline - 1:
                raise failures.no_answer(error.ssh) from None
            timeout *= 2  # The server may also be slow to greet.


class _NoAnswer(Exception):
    def __init__(self, ssh: SSHConnectionResource) -> None:
        self.ssh = ssh


@contextlib.contextmanager
def _scratch(ssh: SSHConnectionResource) -> Iterator[str]:
    """A directory for one login: the askpass program with its answers, pinned host keys, what ssh says."""
    with tempfile.TemporaryDirectory(prefix="login.", dir=private_dir()) as scratch:
        answers = []
        for number, hop in enumerate(ssh.hops()):
            if hop.host_key:
                _write(os.path.join(scratch, f"pinned-{number}"), f"* {hop.host_key}\n")
            if hop.key_passphrase is not None:
                answers.append({"kind": "passphrase", "for": key_path(hop) or "", "secret": hop.key_passphrase})
            if hop.password is not None:
                answers.append({"kind": "password", "for": f"{hop.user or getpass.getuser()}@{hop.host}", "secret": hop.password})
        _write(os.path.join(scratch, openssh_askpass.ANSWERS), json.dumps(answers))
        program = shlex.join([sys.executable, "-I", openssh_askpass.__file__, scratch])
        _write(os.path.join(scratch, "askpass"), f'#!/bin/sh\nexec {program} "$1"\n', 0o700)
        yield scratch


def _write(path: str, text: str, mode: int = 0o600) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        file.write(text)


def _try_to_open(ssh: SSHConnectionResource, path: str, scratch: str, remaining: float, tcp_timeout: int) -> None:
    pinned = {number: os.path.join(scratch, f"pinned-{number}") for number, hop in enumerate(ssh.hops()) if hop.host_key}
    said_path = os.path.join(scratch, "said")
    words = [
        *("ssh", "-o", f"ConnectTimeout={tcp_timeout}", "-M", "-S", path, "-o", f"ControlPersist={_PERSIST}", "-fN"),
        *login_options(ssh, pinned.get(len(ssh.hops()) - 1)),
        *jump_options(ssh, pinned, said_path),
        *("--", ssh.host),
    ]
    environ = {
        **os.environ,
        "LC_ALL": "C",
        "SSH_ASKPASS": os.path.join(scratch, "askpass"),
        "SSH_ASKPASS_REQUIRE": "force",  # OpenSSH 8.4; older ones want a display and no terminal.
        "DISPLAY": os.environ.get("DISPLAY", ":0"),
    }
    with open(said_path, "ab") as said:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=environ, start_new_session=True, close_fds=True
        )
        try:
            code = process.wait(max(1.0, remaining))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise failures.no_answer(ssh) from None
    if code:
        with open(said_path, errors="replace") as file:
            text = file.read()
        with contextlib.suppress(FileNotFoundError), open(os.path.join(scratch, openssh_askpass.UNANSWERED)) as file:
            prompt = file.readline().strip()
            if "password" not in prompt.lower():
                raise failures.prompt_unanswered(ssh, prompt, master_command(ssh))
        raise explain(ssh, text)


def explain(ssh: SSHConnectionResource, said: str) -> Exception:
    """What ssh(1) means by what it says when a login fails. Pure.

    Args:
        ssh: the server that was to be reached.
        said: its words, in the C locale.
    """
    hops = ssh.hops()
    # The hop that is spoken of: the innermost ssh complains first, and names its host.
    at = next((hop for hop in hops if re.search(rf"(?<![\w.-]){re.escape(hop.host)}(?![\w-]).*?\b{hop.port}\b", said)), None)
    at = at or next((hop for hop in hops if hop.host in said), ssh)
    file = known_hosts_path(at)
    if re.search(r"REVOKED HOST KEY|is marked as revoked", said, re.IGNORECASE):
        return failures.host_key_revoked(at, file)
    if "HOST IDENTIFICATION HAS CHANGED" in said or "No matching host key" in said:
        return failures.host_key_not_pinned(at, "") if at.host_key else failures.host_key_changed(at, file, "")
    if "Host key verification failed" in said:
        return failures.host_key_not_pinned(at, "") if at.host_key else failures.host_key_unknown(at, file, "")
    if "Could not resolve hostname" in said:
        return failures.unknown_host(at)
    if refused := re.search(r"open failed: (?:connect failed|administratively prohibited): (.*)", said):
        return failures.jump_refused(ssh, ssh.jump_host or ssh, refused[1].strip())
    if "Connection refused" in said:
        return failures.nothing_listens(at)
    if re.search(r"Connection timed out|Operation timed out|Connection to \S+ port \d+ timed out", said):
        return _NoAnswer(at)
    if routed := re.search(r"No route to host|Network is unreachable|Host is down", said):
        return failures.unreachable(at, routed[0])
    if locked := re.search(r'Load key "?(.+?)"?: incorrect passphrase', said):
        return failures.bad_file(at, f"`key_passphrase` does not open the key {locked[1]}, or it is missing; check it")
    if invalid := re.search(r'Load key "?(.+?)"?: (.+)', said):
        return failures.bad_file(
            at, f"{invalid[1]} is not a private key that can be read ({invalid[2].strip()}); check `key_path`"
        )
    if denied := re.search(r"Permission denied \(([^)]*)\)", said):
        return failures.login_refused(at, _credentials(at), denied[1].replace(",", ", "))
    if "Too many authentication failures" in said:
        return failures.login_refused(at, "more keys than it allows", "")
    if re.search(
        r"kex_exchange_identification: (read: )?Connection (closed|reset)|banner exchange.*(closed|reset)", said, re.IGNORECASE
    ):
        return failures.busy(at)
    if re.search(
        r"kex_exchange_identification: (banner line|client sent)|Bad remote protocol|invalid format", said, re.IGNORECASE
    ):
        return failures.not_ssh(at)
    words = " / ".join(line.strip() for line in said.splitlines() if line.strip())[-300:]
    return failures.other(ssh, f"ssh failed: {words or 'it said nothing'}", temporary=True)


def _credentials(ssh: SSHConnectionResource) -> str:
    key = key_path(ssh)
    parts = [f"the key {key}" if key else "the keys that ssh finds", *(["the password"] if ssh.password is not None else [])]
    return " and ".join(parts)


class PipeStream:
    """The standard streams of an `ssh` process as one channel.

    Args:
        link: the master that it runs over.
        words: what to add to the command line.
    """

    def __init__(self, link: OpenSSHLink, *words: str) -> None:
        self._link = link
        self._socket, other = socket.socketpair()
        self._said = tempfile.TemporaryFile()
        with other:
            self._process = subprocess.Popen(
                _multiplexed(link.path, *words),
                stdin=other.fileno(),
                stdout=other.fileno(),
                stderr=self._said,
                start_new_session=True,
            )

    def get_name(self) -> str:
        """What paramiko's log calls it."""
        return self._link.path

    def send(self, data: bytes) -> int:
        """Hand over some of the bytes; how many."""
        return self._socket.send(data)

    def recv(self, size: int) -> bytes:
        """Bytes, or b"" at the end.

        Raises:
            Refused, ConnectionFailed: it never began.
        """
        data = b""
        with contextlib.suppress(ConnectionResetError):  # It ended without reading all that it was sent.
            data = self._socket.recv(size)
        if not data:
            self._process.wait()
            self._said.seek(0)
            problem = self._link.never_began(self._said.read())
            if problem:
                raise problem
        return data

    def close(self) -> None:
        """End the `ssh` process; its channel is closed."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        _end(self._process)
        self._said.close()


class OpenSSHProcess:
    """A remote command with its streams.

    Args:
        link: the master that it runs over.
        command: for the login shell.
    """

    def __init__(self, link: OpenSSHLink, command: str) -> None:
        self._link = link
        self._process = subprocess.Popen(
            _multiplexed(link.path, "-T", "--", "host", command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            bufsize=0,
        )
        assert self._process.stdout is not None and self._process.stderr is not None
        self._open = {self._process.stdout.fileno(): 0, self._process.stderr.fileno(): 1}
        self._poll = select.poll()
        for fd in self._open:
            self._poll.register(fd, select.POLLIN)

    def write(self, data: bytes) -> None:
        """Hand it input; blocks while the server takes none. What it takes no more is dropped."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            view = memoryview(data)
            while view:
                view = view[self._process.stdin.write(view) :]

    def read(self, timeout: float) -> tuple[bytes, bytes]:
        """What came on stdout and stderr; two times nothing after `timeout` seconds.

        Raises:
            EOFError: the command's streams are closed and read.
        """
        if not self._open:
            raise EOFError
        got = [b"", b""]
        for fd, _ in self._poll.poll(max(0, timeout) * 1000):
            data = os.read(fd, 65536)
            if not data:
                self._poll.unregister(fd)
                del self._open[fd]
            got[self._open.get(fd, 0)] += data
        return got[0], got[1]

    def why(self, stdout: bytes, stderr: bytes) -> Exception:
        """Why the streams ended before the command did."""
        problem = self._link.never_began(stderr)
        if problem:
            return problem
        if self._process.wait() == 255 and not stdout:
            return failures.lost(self._link.ssh, stderr.decode("utf-8", "replace")[-200:].strip())
        if self._link.alive():
            return failures.no_shell(self._link.ssh, (stdout + stderr).decode("utf-8", "replace")[-300:].strip())
        return failures.lost(self._link.ssh)

    def close(self) -> None:
        """Let go of it; its lifeline ends."""
        _end(self._process)
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


def _end(process: subprocess.Popen[Any]) -> None:
    """End a multiplexing client; the master closes its channel."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    process.wait()


class OpenSSHLink:
    """A master connection.

    Args:
        ssh: the server.
        path: the master's control socket.
    """

    def __init__(self, ssh: SSHConnectionResource, path: str) -> None:
        self.ssh = ssh
        self.path = path

    def alive(self) -> bool:
        """Whether it still works, as far as is known: a master that ends removes its socket."""
        return os.path.exists(self.path)

    def has_room(self) -> bool:
        """Whether the server opens a session for us beside those of other processes."""
        done = subprocess.run(
            _multiplexed(self.path, "-T", "--", "host", "exit 0"), capture_output=True, stdin=subprocess.DEVNULL
        )
        return not _REFUSED.search(done.stderr)

    def never_began(self, said: bytes) -> Exception | None:
        """What a multiplexing client's words mean, if they mean that nothing was started."""
        if _REFUSED.search(said):
            return Refused()
        if _NO_MASTER.search(said):
            return failures.gone(self.ssh)
        return None

    def subsystem(self, name: str) -> PipeStream:
        """A channel to a subsystem such as "sftp"."""
        return PipeStream(self, "-s", "--", "host", name)

    def execute(self, command: str) -> OpenSSHProcess:
        """Start a command in the login shell."""
        return OpenSSHProcess(self, command)

    def tunnel(self, host: str, port: int, client: socket.socket) -> None:
        """Carry a client's bytes to and from a port that is reached from there, until both sides are done."""
        target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        process = subprocess.Popen(
            _multiplexed(self.path, "-W", target, "--", "host"),
            stdin=client.fileno(),
            stdout=client.fileno(),
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        process.wait()

    def close(self) -> None:
        """Nothing: other processes use the master, and it goes by itself when nobody does."""


__all__ = ["ConnectionFailed", "OpenSSHConnection", "OpenSSHLink", "explain"]
