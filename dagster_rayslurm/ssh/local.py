"""What the processes and threads of a user share on this machine: connections, and a private directory with locks."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import random
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from .base import Connection, Submit
from .config import SSHConnectionResource

if TYPE_CHECKING:
    from .connection import SSHConnection

T = TypeVar("T")

# Characters of XDG_RUNTIME_DIR up to which `private_dir` lies in it; the path of a control socket must stay short.
_LONGEST_DIR = 40


class LocalConnection(Connection):
    """Files and commands of this machine, without SSH."""

    @property
    def place(self) -> str:
        return "this machine"

    def attempt(self, doing: str, operation: Callable[[Submit], T], repeat: bool, deadline: float | None = None) -> T:  # noqa: ARG002
        return operation(_submit)

    def connect(self, host: str, port: int, timeout: float) -> socket.socket:
        stream = socket.create_connection((host, port), timeout)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return stream

    def stream(self, command: Sequence[str]) -> socket.socket:
        stream, other = socket.socketpair()
        with other:
            fd = other.fileno()
            process = subprocess.Popen(command, stdin=fd, stdout=fd, stderr=fd, start_new_session=True)
        threading.Thread(target=process.wait, name="rayslurm-stream", daemon=True).start()
        return stream

    def close(self) -> None: ...


def _submit(function: Callable[..., T], *arguments: object) -> Callable[[], T]:
    result = function(*arguments)
    return lambda: result


_local = LocalConnection()
_lock = threading.Lock()
_connections: dict[str, Connection] = {}


def connection_to(ssh: SSHConnectionResource | None) -> Connection:
    """The shared connection to an edge node, or to this machine if `ssh` is None. The connection logs in at its first use."""
    if ssh is None:
        return _local
    key = ssh.model_dump_json()
    with _lock:
        if key not in _connections:
            _connections[key] = new_connection(ssh)
        return _connections[key]


def connect_early(ssh: SSHConnectionResource | None) -> None:
    """Start to log in in the background. A failure is not reported here, but at the first use of the connection."""

    def log_in() -> None:
        with contextlib.suppress(OSError, ValueError):
            connection_to(ssh).home()

    threading.Thread(target=log_in, name="rayslurm-connect", daemon=True).start()


def new_connection(ssh: SSHConnectionResource) -> SSHConnection:
    """A new connection that is not shared with other callers. The caller closes it."""
    # Imported here, so that local runs save the third of a second that the import of paramiko takes.
    from . import openssh, paramiko_client
    from .connection import SSHConnection

    return SSHConnection(ssh, openssh.log_in if ssh.client == "openssh" else paramiko_client.log_in)


def close_connections() -> None:
    """Log out from all servers that this process is connected to. Called when the process exits."""
    with _lock:
        connections = list(_connections.values())
        _connections.clear()
    for connection in connections:
        connection.close()


atexit.register(close_connections)


def _forget_all() -> None:
    """Called in a forked child: forget the parent's connections, which the child must not use, and replace the lock."""
    global _lock
    _lock = threading.Lock()
    _connections.clear()


os.register_at_fork(after_in_child=_forget_all)


def private_dir() -> str:
    """The directory for sockets and locks that only this user's processes can access. It is made at the first use.

    The path is short, because the path of a control socket in it may not exceed 107 bytes (unix(7)). Raises `OSError` if the
    directory cannot be made, or other users can access it.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    short = 0 < len(runtime) <= _LONGEST_DIR and os.path.isdir(runtime)
    path = f"{runtime}/rayslurm" if short else f"/tmp/rayslurm-{os.getuid()}"
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        status = os.lstat(path)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise OSError(f"{path} is not a directory of user {os.getuid()} alone; remove it or mend its owner and mode")
    return path


@contextlib.contextmanager
def locked(name: str, count: int = 1, timeout: float = float("inf")) -> Iterator[None]:
    """Inside the block, hold one of the `count` locks of a name, which all processes of the user on this machine share.

    Raises `TimeoutError` if none was free for `timeout` seconds.
    """
    paths = [os.path.join(private_dir(), f"{name}-{index}") for index in range(count)]
    deadline = time.monotonic() + timeout
    while True:
        for path in random.sample(paths, count):
            with open(path, "a") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                try:
                    yield
                    return
                finally:
                    fcntl.flock(lock, fcntl.LOCK_UN)  # Closing is not enough: a forked child holds the file open as well.
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(random.uniform(0.02, 0.1))
