"""The connections of this process: one for each configuration, however many steps and threads ask for it."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from typing import TYPE_CHECKING

from .base import Connection
from .config import SSHConnectionResource
from .local import LocalConnection

if TYPE_CHECKING:
    from .connection import SSHConnection

_here = LocalConnection()
_lock = threading.Lock()
_connections: dict[str, Connection] = {}


def connection_to(ssh: SSHConnectionResource | None) -> Connection:
    """The connection to an edge node, shared within this process; to this machine if there is no SSH.

    Nothing is sent before its first use.

    Args:
        ssh: the edge node, or None when Dagster runs where `sbatch` is.
    """
    if ssh is None:
        return _here
    key = ssh.model_dump_json()
    with _lock:
        if key not in _connections:
            _connections[key] = new_connection(ssh)
        return _connections[key]


def connect_early(ssh: SSHConnectionResource | None) -> None:
    """Begin to log in, in the background: a step that is being prepared will need it in a moment, and who it is there.

    What goes wrong is said to whoever uses the connection.
    """

    def log_in() -> None:
        with contextlib.suppress(OSError, ValueError):
            connection = connection_to(ssh)
            connection.user_id()
            connection.stat("/")  # Opens what files go over.

    threading.Thread(target=log_in, name="rayslurm-connect", daemon=True).start()


def new_connection(ssh: SSHConnectionResource) -> SSHConnection:
    """A connection of the caller's own, who closes it.

    Args:
        ssh: the edge node.
    """
    # Imported here: paramiko takes a third of a second that local runs need not pay.
    if ssh.client == "openssh":
        from .openssh import OpenSSHConnection

        return OpenSSHConnection(ssh)
    from .paramiko_client import ParamikoConnection

    return ParamikoConnection(ssh)


def close_connections() -> None:
    """Log out everywhere."""
    with _lock:
        connections = list(_connections.values())
        _connections.clear()
    for connection in connections:
        connection.close()


atexit.register(close_connections)


def _start_anew() -> None:
    """In a forked child: it must not speak on its parent's connections, nor wait for a thread that it does not have."""
    global _lock
    _lock = threading.Lock()
    _connections.clear()


os.register_at_fork(after_in_child=_start_anew)
