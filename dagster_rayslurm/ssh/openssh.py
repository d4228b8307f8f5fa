"""The SSH client for `client="openssh"`: runs the `ssh` program. All processes of the user share a master connection of it.

Every channel is an `ssh` process of its own, a multiplexing client, which talks to the master over a control socket (ssh(1)).
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from typing import Any

from . import errors
from .base import ConnectionGone
from .channels import Refused, Transport
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


def log_in(ssh: SSHConnectionResource) -> Transport:
    """Find or open a master connection to a server on which one more session is allowed, and return it.

    The user's ssh_config applies where the resource leaves a field open.

    Raises:
        ConnectionFailed: the login failed.
    """
    if shutil.which("ssh") is None:
        raise errors.no_client(ssh)
    if ssh.require_existing_master:
        return OpenSSHTransport(ssh, existing_master(ssh))
    check_files(ssh)
    check_keys(ssh)
    for number in range(_MAX_MASTERS):
        path = control_path(ssh, number)
        ensure_master(ssh, path)
        transport = OpenSSHTransport(ssh, path)
        if transport.has_room():
            return transport
    raise errors.no_sessions(ssh)


class PipeStream:
    """The standard input and output of an `ssh` process, with the methods of a paramiko channel that `Sftp` calls."""

    def __init__(self, transport: OpenSSHTransport, *arguments: str) -> None:
        self._transport = transport
        self._socket, other = socket.socketpair()
        self._stderr = tempfile.TemporaryFile()
        with other:
            self._process = _start(transport.path, arguments, other.fileno(), other.fileno(), self._stderr)

    def get_name(self) -> str:
        """The name of this channel in paramiko's log."""
        return self._transport.path

    def send(self, data: bytes) -> int:
        """Send the bytes or a first part of them; returns the number of bytes sent."""
        return self._socket.send(data)

    def recv(self, size: int) -> bytes:
        """Up to `size` received bytes, or b"" at the end of the stream.

        Raises:
            Refused, ConnectionFailed: the master or the server did not open the channel.
        """
        data = b""
        with contextlib.suppress(ConnectionResetError):  # The process ended before it read all input.
            data = self._socket.recv(size)
        if not data:
            self._process.wait()
            self._stderr.seek(0)
            failure = self._transport.start_failure(self._stderr.read())
            if failure:
                raise failure
        return data

    def close(self) -> None:
        """End the `ssh` process and its channel."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        _end(self._process)
        self._stderr.close()


class OpenSSHProcess:
    """A remote command, run by an `ssh` process as a multiplexing client."""

    def __init__(self, transport: OpenSSHTransport, command: str) -> None:
        self._transport = transport
        pipes = subprocess.PIPE, subprocess.PIPE, subprocess.PIPE
        self._process = _start(transport.path, ("-T", "--", "host", command), *pipes)
        assert self._process.stdout is not None and self._process.stderr is not None
        self._open = {self._process.stdout.fileno(): 0, self._process.stderr.fileno(): 1}
        self._poll = select.poll()
        for fd in self._open:
            self._poll.register(fd, select.POLLIN)

    def write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            view = memoryview(data)
            while view:
                view = view[self._process.stdin.write(view) :]

    def read(self, timeout: float) -> tuple[bytes, bytes]:
        if not self._open:
            raise EOFError
        streams = [b"", b""]
        for fd, _ in self._poll.poll(max(0, timeout) * 1000):
            data = os.read(fd, 65536)
            if not data:
                self._poll.unregister(fd)
                del self._open[fd]
            streams[self._open.get(fd, 0)] += data
        return streams[0], streams[1]

    def why(self, stdout: bytes, stderr: bytes) -> Exception:
        code = self._process.wait()
        failure = self._transport.start_failure(stderr) if code == 255 else None
        if failure:
            return failure
        if code == 255 or not self._transport.alive():
            return errors.lost(self._transport.ssh, stderr.decode("utf-8", "replace")[-200:].strip())
        return errors.no_shell(self._transport.ssh, (stdout + stderr).decode("utf-8", "replace")[-300:].strip())

    def close(self) -> None:
        _end(self._process)
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


def _start(path: str, arguments: Sequence[str], stdin: int, stdout: int, stderr: Any) -> subprocess.Popen[bytes]:
    """Start an `ssh` process that uses the master with the control socket `path`, and return the process."""
    command = multiplexed(path, *arguments)
    return subprocess.Popen(command, bufsize=0, stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True)


def _end(process: subprocess.Popen[Any]) -> None:
    """End a multiplexing client, which makes the master close its channel."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    process.wait()


class OpenSSHTransport:
    """One login by the `ssh` program: a running master connection.

    Args:
        ssh: the server.
        path: the control socket of the master.
    """

    def __init__(self, ssh: SSHConnectionResource, path: str) -> None:
        self.ssh = ssh
        self.path = path

    def alive(self) -> bool:
        """Whether the control socket exists: a master removes it when it ends."""
        return os.path.exists(self.path)

    def has_room(self) -> bool:
        """Whether the server allows one more session on this master."""
        probe = multiplexed(self.path, "-T", "--", "host", "exit 0")
        try:
            done = subprocess.run(probe, capture_output=True, stdin=subprocess.DEVNULL, timeout=self.ssh.connect_timeout)
        except subprocess.TimeoutExpired:
            return True  # A start-up file of the shell may be slow.
        return not _REFUSED.search(done.stderr)

    def start_failure(self, stderr: bytes) -> Exception | None:
        """The exception for a multiplexing client that started nothing, by its error output.

        None if the client may have started something.
        """
        if _REFUSED.search(stderr):
            return Refused()
        if _NO_MASTER.search(stderr):
            return errors.gone(self.ssh)
        return None

    def subsystem(self, name: str) -> PipeStream:
        return PipeStream(self, "-s", "--", "host", name)

    def execute(self, command: str) -> OpenSSHProcess:
        return OpenSSHProcess(self, command)

    def tunnel(self, host: str, port: int, client: socket.socket) -> None:
        target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        with tempfile.TemporaryFile() as stderr:
            process = _start(self.path, ("-W", target, "--", "host"), client.fileno(), client.fileno(), stderr)
            if process.wait() == 255:
                stderr.seek(0)
                if isinstance(failure := self.start_failure(stderr.read()), ConnectionGone):
                    raise failure

    def close(self) -> None:
        """Do nothing: other processes may use the master, and a master that nobody uses ends by itself."""
