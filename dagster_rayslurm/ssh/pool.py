"""The connections that all threads of this process share: one for each SSH configuration, and one for this machine."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from typing import TYPE_CHECKING

from .base import Connection
from .fields import SSHLogin
from .local import LocalConnection

if TYPE_CHECKING:
    from .connection import SSHConnection

_local = LocalConnection()
_lock = threading.Lock()
_connections: dict[str, Connection] = {}  # The connections to edge nodes, by the SSH configuration as JSON.


def connection_to(ssh: SSHLogin | None) -> Connection:
    """Returns the shared connection to an edge node or, if `ssh` is None, to this machine.

    A connection to an edge node logs in at its first use.
    """
    if ssh is None:
        return _local
    key = ssh.model_dump_json()
    with _lock:
        if key not in _connections:
            _connections[key] = new_connection(ssh)
        return _connections[key]


def connect_early(ssh: SSHLogin | None) -> None:
    """Log in to an edge node in a background thread, unless `ssh` is None, which stands for this machine.

    A failed login is reported only at the first use of the connection.
    """

    def log_in() -> None:
        with contextlib.suppress(OSError, ValueError):
            connection_to(ssh).home()

    threading.Thread(target=log_in, name="rayslurm-connect", daemon=True).start()


def new_connection(ssh: SSHLogin) -> SSHConnection:
    """Returns a new SSH connection that is not shared with other callers. The caller must close the connection."""
    # Imported here, so that local runs save the third of a second that the import of paramiko takes.
    from . import openssh, paramiko_client
    from .connection import SSHConnection

    return SSHConnection(ssh, openssh.log_in if ssh.client == "openssh" else paramiko_client.log_in)


def close_connections() -> None:
    """Log out from all servers to which this process has shared connections. Called when the process exits."""
    with _lock:
        connections = list(_connections.values())
        _connections.clear()
    for connection in connections:
        connection.close()


atexit.register(close_connections)


def _forget_all() -> None:
    """Forget the connections of the parent process, which this forked child cannot use, and create a new lock."""
    global _lock
    _lock = threading.Lock()
    _connections.clear()


os.register_at_fork(after_in_child=_forget_all)
