"""SSH by the `ssh` program: a master connection that all processes share, everything else multiplexed over it."""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import socket
import subprocess
import tempfile
from typing import Any

from . import errors
from .base import ConnectionGone
from .config import SSHConnectionResource
from .connection import SSHConnection
from .login_files import check_files, check_keys
from .openssh_master import ensure_master, existing_master
from .openssh_options import control_path, multiplexed
from .transport import Refused

_MASTERS = 8
# What ssh(1), OpenSSH 8.4 to 10.0, says as a multiplexing client, each on a line of its own.
_REFUSED = re.compile(rb"^mux_client_request_session: session request failed|^Session open refused by peer", re.MULTILINE)
_NO_MASTER = re.compile(
    rb"^Control socket connect\(|^ControlSocket .* already exists|^Connection closed by UNKNOWN|^mux_client_\w+: ", re.MULTILINE
)


class OpenSSHConnection(SSHConnection):
    """An edge node reached by the `ssh` program, with the user's own configuration where ours says nothing.

    Args:
        ssh: the server and how to log in.
    """

    def _login(self) -> OpenSSHLink:
        if shutil.which("ssh") is None:
            raise errors.no_client(self.ssh)
        if self.ssh.require_existing_master:
            return OpenSSHLink(self.ssh, existing_master(self.ssh))
        check_files(self.ssh)
        check_keys(self.ssh)
        for number in range(_MASTERS):
            path = control_path(self.ssh, number)
            ensure_master(self.ssh, path)
            link = OpenSSHLink(self.ssh, path)
            if link.has_room():
                return link
        raise errors.no_sessions(self.ssh)


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
                multiplexed(link.path, *words),
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
            multiplexed(link.path, "-T", "--", "host", command),
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
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            view = memoryview(data)
            while view:
                view = view[self._process.stdin.write(view) :]

    def read(self, timeout: float) -> tuple[bytes, bytes]:
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
        code = self._process.wait()
        problem = self._link.never_began(stderr) if code == 255 else None
        if problem:
            return problem
        if code == 255 or not self._link.alive():
            return errors.lost(self._link.ssh, stderr.decode("utf-8", "replace")[-200:].strip())
        return errors.no_shell(self._link.ssh, (stdout + stderr).decode("utf-8", "replace")[-300:].strip())

    def close(self) -> None:
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
        probe = multiplexed(self.path, "-T", "--", "host", "exit 0")
        try:
            done = subprocess.run(probe, capture_output=True, stdin=subprocess.DEVNULL, timeout=self.ssh.connect_timeout)
        except subprocess.TimeoutExpired:
            return True  # A start-up file that takes its time.
        return not _REFUSED.search(done.stderr)

    def never_began(self, said: bytes) -> Exception | None:
        """What a multiplexing client's words mean, if they mean that nothing was started."""
        if _REFUSED.search(said):
            return Refused()
        if _NO_MASTER.search(said):
            return errors.gone(self.ssh)
        return None

    def subsystem(self, name: str) -> PipeStream:
        """A channel to a subsystem such as "sftp"."""
        return PipeStream(self, "-s", "--", "host", name)

    def execute(self, command: str) -> OpenSSHProcess:
        return OpenSSHProcess(self, command)

    def tunnel(self, host: str, port: int, client: socket.socket) -> None:
        target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        with tempfile.TemporaryFile() as said:
            process = subprocess.Popen(
                multiplexed(self.path, "-W", target, "--", "host"),
                stdin=client.fileno(),
                stdout=client.fileno(),
                stderr=said,
                start_new_session=True,
            )
            if process.wait() == 255:
                said.seek(0)
                if isinstance(problem := self.never_began(said.read()), ConnectionGone):
                    raise problem

    def close(self) -> None:
        """Nothing: other processes use the master, and it goes by itself when nobody does."""
