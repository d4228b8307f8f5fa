"""Logs in to the edge node as a run does, and examines the login.

The SSH port is never tried without a login, as an SSH server may ban clients that connect and do not log in.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass

from ..edge import machine, slurm
from ..ssh.base import Connection, ConnectionFailed
from ..ssh.config import SSHConnectionResource
from ..ssh.pool import connection_to
from . import Line, failed, failure, ok, warning

_SLOW_LOGIN = 10.0  # Seconds.
_SLOW_COMMAND = 1.0
_FORWARD_TIMEOUT = 10.0
# The parts of a login, in the order in which they can fail; each has a line in the report.
_PARTS = ("network", "host key", "authentication", "login shell")


@dataclass(frozen=True)
class Login:
    """A working connection, and the report lines about the login.

    The edge node's clock is `skew` seconds ahead of this machine's clock, with an error of at most `margin` seconds.
    """

    connection: Connection
    skew: float
    margin: float
    lines: list[Line]


def log_in(ssh: SSHConnectionResource | None) -> Login | list[Line]:
    """Logs in to the edge node; if `ssh` is None, this machine takes the place of the edge node, and no login is necessary.

    Returns only the report lines if the login fails.
    """
    connection, began = connection_to(ssh), time.perf_counter()
    try:
        connection.call(slurm.now, repeat=True)
        seconds = time.perf_counter() - began
        asked = time.time()
        stamp, margin = connection.call(slurm.now, repeat=True), (time.time() - asked) / 2
        connection.home()
    except ConnectionFailed as error:
        return _failed(error)
    except OSError as error:
        return [failure("home", str(error), "ask the site for a home directory")]
    lines = _lines(ssh, connection, seconds, 2 * margin)
    return Login(connection, stamp - asked - margin, margin, lines)


def _failed(error: ConnectionFailed) -> list[Line]:
    """Returns report lines for a failed login: OK for each part of the login that passed, and a failure for the next part."""
    passed = _PARTS[: _PARTS.index(error.subject)]
    return [*(ok(name, "passed") for name in passed), failed(error.subject, error, "try again later")]


def _lines(ssh: SSHConnectionResource | None, connection: Connection, seconds: float, command: float) -> list[Line]:
    """Returns the lines about a successful login.

    `seconds` is the time that the login took, and `command` is the time that a call on the edge node took after that, in seconds.
    """
    if ssh is None:
        return [ok("login", "this machine, without SSH")]
    text = f"{connection.place} with {ssh.client} in {seconds:.2f} s; a command takes {1000 * command:.0f} ms"
    slow = seconds > _SLOW_LOGIN or command > _SLOW_COMMAND
    remedy = "use a nearer or less busy login node, if there is one"
    return [warning("login", text, remedy) if slow else ok("login", text), *_host_keys(ssh), _forwarding(connection)]


def _host_keys(ssh: SSHConnectionResource) -> list[Line]:
    """Returns a line that says whether the host keys of the server and its jump hosts are checked."""
    unchecked = [hop.host for hop in ssh.hops() if hop.host_key_checking == "off" and not hop.host_key]
    if unchecked:
        what = f"the key of {', '.join(unchecked)} is not checked (host_key_checking=off), so anybody could be listening"
        return [warning("host key", what, 'set host_key_checking="accept-new", or pin the key with host_key')]
    return [
        ok("host key", "known" if ssh.host_key_checking == "strict" or ssh.host_key else "known, and learned at the first login")
    ]


def _forwarding(connection: Connection) -> Line:
    """Returns a line that says whether the SSH server forwards TCP connections; the check connects to a port of the edge node."""
    port = connection.call(machine.listen_once, _FORWARD_TIMEOUT, repeat=True)
    answer = b""
    with contextlib.suppress(OSError), connection.connect("127.0.0.1", port, _FORWARD_TIMEOUT) as stream:
        answer = stream.recv(len(machine.GREETING))
    if answer == machine.GREETING:
        return ok("forwarding", "connections through SSH work")
    what = "the SSH server forwards no connections, so that `rayslurm dashboard` reaches the cluster by srun, a second later"
    return warning("forwarding", what, "nothing must be done; to make it faster, ask the site for AllowTcpForwarding")
