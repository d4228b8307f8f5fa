"""The SSH client for `client="openssh"`: runs the `ssh` program. All processes of the user share a master connection of it.

Every channel is an `ssh` process of its own, a multiplexing client, which talks to the master over a control socket (ssh(1)).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from . import errors
from .agent_client import Refused
from .base import ConnectionGone
from .config import SSHConnectionResource
from .login import check_files, check_keys
from .openssh_master import control_path, ensure_master, existing_master, multiplexed

_MAX_MASTERS = 8
"""Largest number of master connections to one server. A further one is opened when the others allow no more sessions."""
# Messages of ssh(1) as a multiplexing client, OpenSSH 8.4 to 10.0. Each is on a line of its own.
_REFUSED = re.compile(rb"^mux_client_request_session: session request failed|^Session open refused by peer", re.MULTILINE)
_NO_MASTER = re.compile(
    rb"^Control socket connect\(|^ControlSocket .* already exists|^Connection closed by UNKNOWN|^mux_client_\w+: ", re.MULTILINE
)


def log_in(ssh: SSHConnectionResource) -> OpenSSHTransport:
    """Find or open a master connection to a server. The user's ssh_config applies where the resource leaves a field open.

    Raises:
        ConnectionFailed: the login failed.
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
    """One login by the `ssh` program: a running master connection, or several if the server allows few sessions on each.

    Args:
        ssh: the server.
        path: the control socket of the master in use.
    """

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
