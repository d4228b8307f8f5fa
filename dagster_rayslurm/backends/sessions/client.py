"""How a request gets to a session: by TCP through the connection, or by a step in its allocation that hands it over."""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...runtime.protocol.rpc_call import ANSWER, ANSWER_TIMEOUT, SENT, AnswerLost, NotConnected, call
from ...slurm.commands import without_option_variables
from ...ssh.base import Connection, ConnectionLost

__all__ = ["Announcement", "AnswerLost", "Unreachable", "ask", "parse_announcement"]

NO_DIRECT = "no-direct"
"""File in a session's directory: TCP does not get through from the edge node, so no request waits for a try."""

_LOOK_AGAIN = 300.0
"""Seconds between two looks of one process at whether TCP gets through after all: networks get mended."""

_PROVE_WITHIN = 3.0
"""Seconds in which a session that TCP reaches proves itself; a firewall that drops packets costs as much, once."""
_SRUN_TIMEOUT = 60.0 + ANSWER_TIMEOUT


class Unreachable(OSError):
    """No carrier gets to the session; nothing was asked."""


@dataclass(frozen=True)
class Announcement:
    """What a session says of itself in `session.json`.

    Attributes:
        cluster_id: name of its cluster.
        job_id: Slurm's job id.
        hosts: names and addresses of its head node, the likeliest first.
        port: where it listens there.
        key: what who asks must know.
        protocol: version of what it understands.
        closing: why it takes no more payloads; None while it does.
        hostname: what the head node calls itself.
        idle: whether it has served payloads, and has none now.
        heterogeneous: whether its job is one of several components, whose first one has the head.
    """

    cluster_id: str
    job_id: str
    hosts: tuple[str, ...]
    port: int
    key: str
    protocol: int
    closing: str | None
    hostname: str
    heterogeneous: bool = False
    idle: bool = False


def parse_announcement(data: bytes) -> Announcement | None:
    """The announcement in a file; None if there is none, or it is damaged."""
    try:
        found = json.loads(data)
        key = str(found["key"])
        bytes.fromhex(key)
        return Announcement(
            cluster_id=str(found["cluster_id"]),
            job_id=str(int(found["job_id"])),
            hosts=tuple(str(host) for host in found["hosts"]),
            port=int(found["port"]),
            key=key,
            protocol=int(found["protocol"]),
            closing=None if found["closing"] is None else str(found["closing"]),
            hostname=str(found["hostname"]),
            heterogeneous=bool(found.get("heterogeneous", False)),
            idle=bool(found.get("idle", False)),
        )
    except (ValueError, KeyError, TypeError):
        return None


def ask(
    connection: Connection,
    commands: Connection,
    announcement: Announcement,
    request: Mapping[str, Any],
    carrier: str,
    directory: str,
    start: Sequence[str],
    patience: float = _SRUN_TIMEOUT,
) -> dict[str, Any]:
    """Put a request to a session.

    Args:
        connection: the edge node, or this machine.
        commands: runs Slurm's programs there.
        announcement: where the session is.
        request: what it is asked.
        carrier: "direct" for TCP, "srun" for a step in its allocation, "auto" for the first that works.
        directory: the session's directory.
        start: the command that starts the runtime there with the role `ask`, without the directory.
        patience: seconds for a step in its allocation.

    Returns:
        Its answer.

    Raises:
        Unreachable: nobody is there by any carrier; nothing was asked.
        AnswerLost: it was asked, and the answer is not known.
        ConnectionFailed: the edge node itself cannot be reached.
    """
    path = os.path.join(directory, NO_DIRECT)
    marked = carrier == "auto" and connection.read(path, 0, 1) != b""
    if carrier != "srun" and not marked:
        try:
            return _ask_directly(connection, announcement, request)
        except NotConnected as error:
            if carrier == "direct":
                raise Unreachable(f"{_name(announcement)} cannot be reached by TCP: {error}") from None
    answer = _ask_by_step(commands, announcement, request, directory, start, patience)
    now = time.monotonic()
    if carrier == "auto" and not (marked and now - _looked_at.get(path, -math.inf) < _LOOK_AGAIN):
        _looked_at[path] = now
        _look_whether_direct(connection, announcement, path)
    return answer


_looked_at: dict[str, float] = {}
"""When this process last looked whether TCP gets through, by the file that says that it does not; on the monotonic clock."""


def _look_whether_direct(connection: Connection, announcement: Announcement, path: str) -> None:
    """Note whether TCP gets through to a session that is known to live; nobody waits for it."""

    def look() -> None:
        with contextlib.suppress(OSError):
            try:
                _ask_directly(connection, announcement, {"op": "describe"})
            except NotConnected as error:
                connection.write(path, str(error).encode("utf-8", "replace"))
            else:
                connection.remove(path)

    threading.Thread(target=look, name="rayslurm-no-direct", daemon=True).start()


def _name(announcement: Announcement) -> str:
    return f"the session in Slurm job {announcement.job_id} on {announcement.hostname}"


def _ask_directly(connection: Connection, announcement: Announcement, request: Mapping[str, Any]) -> dict[str, Any]:
    problem = NotConnected("it announces no host")
    for host in announcement.hosts:
        try:
            with (
                connection.forward(host, announcement.port) as forward,
                socket.create_connection((forward.host, forward.port), _PROVE_WITHIN) as sock,
            ):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return call(sock, announcement.key, dict(request), _PROVE_WITHIN)
        except AnswerLost:
            raise
        except OSError as error:
            problem = NotConnected(f"{host}:{announcement.port}: {error}")
    raise problem


def _ask_by_step(
    commands: Connection,
    announcement: Announcement,
    request: Mapping[str, Any],
    directory: str,
    start: Sequence[str],
    patience: float,
) -> dict[str, Any]:
    # Without --overlap the step would wait for the CPUs that the session's own step holds, and a step asks for all of
    # the job's memory unless it is told otherwise (srun(1), Slurm 22.05). In a heterogeneous job srun finds nothing to start
    # in unless it is told which component, and in any other job if it is told so (tried on Slurm 22.05 and 24.11).
    command = [
        "srun",
        "--overlap",
        f"--jobid={announcement.job_id}",
        *(["--het-group=0"] if announcement.heterogeneous else []),
        "--nodes=1",
        "--ntasks=1",
        f"--nodelist={announcement.hosts[0]}",
        "--mem=0",
        "--cpu-bind=none",
        "--mpi=none",
        "--quiet",
        "--chdir=/",
        *start,
        directory,
    ]
    try:
        done = commands.run(without_option_variables(command), json.dumps(request).encode(), timeout=patience)
    except (ConnectionLost, TimeoutError) as error:
        raise AnswerLost(f"{_name(announcement)} may have been asked by srun: {error}") from None
    lines = done.stdout.decode("utf-8", "replace").splitlines()
    for line in lines:
        if line.startswith(ANSWER):
            with contextlib.suppress(ValueError):
                return dict(json.loads(line[len(ANSWER) :]))
    said = done.stderr.decode("utf-8", "replace").strip()[-500:] or f"exit code {done.returncode}"
    if SENT in lines:
        raise AnswerLost(f"{_name(announcement)} was asked by srun, and its answer is lost: {said}")
    raise Unreachable(f"{_name(announcement)} cannot be reached by srun: {said}")
