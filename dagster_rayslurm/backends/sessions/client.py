"""Send a request to a session: by TCP through the SSH connection, or by an `srun` in the session's allocation."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...runtime.protocol.rpc import ANSWER, ANSWER_TIMEOUT, SENT, AnswerLost, NotConnected, call
from ...slurm.commands import run_slurm
from ...ssh.base import Connection, ConnectionLost

__all__ = ["Announcement", "AnswerLost", "Unreachable", "parse_announcement", "send_request"]

_TCP_FAILURES = 2
"""Failures of TCP in a row after which this process uses srun alone; a single failure may pass."""
_TCP_RETRY_AFTER = 300.0
"""Seconds after the last failure of TCP until this process tries TCP again."""
_PROOF_TIMEOUT = 3.0
"""Seconds in which a TCP connection is made, and in which the session then proves its identity. A firewall that drops packets
costs as much."""
_SRUN_TIMEOUT = 60.0 + ANSWER_TIMEOUT
"""Seconds for an srun that carries a request: its start, and the session's answer."""

_tcp_failures: dict[str, tuple[int, float]] = {}
"""For each session directory: number of failures of TCP in a row while srun succeeded, and the time of the last failure
(monotonic clock)."""


class Unreachable(OSError):
    """Raised when a session cannot be reached; it has not received the request."""


@dataclass(frozen=True)
class Announcement:
    """How to reach a session, and its state, as the session writes both into `session.json`.

    Attributes:
        cluster_id: name of the session's Ray cluster.
        job_id: Slurm's id of the session's job.
        hosts: names and addresses of the head node, the likeliest first.
        port: the port of the session server.
        key: the secret of the session, hex.
        protocol: version of the protocol.
        closing: why the session accepts no more payloads; None while it accepts them.
        hostname: the head node's own hostname.
        heterogeneous: whether the job has several components, the one with the head node first.
        idle: whether the session has served payloads and runs none now.
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
    """The announcement in the content of a `session.json`; None if it is empty or damaged."""
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


def send_request(
    connection: Connection,
    commands: Connection,
    announcement: Announcement,
    request: Mapping[str, Any],
    carrier: str,
    directory: str,
    ask_command: Sequence[str],
) -> dict[str, Any]:
    """Send a request to a session and return its answer.

    Args:
        connection: the edge node, or this machine.
        commands: runs Slurm's programs there.
        announcement: where the session is.
        request: the request.
        carrier: "direct" for TCP, "srun" for a step in the allocation, "auto" for TCP and, if that fails, srun.
        directory: the directory of the session's generation.
        ask_command: starts the runtime with the role `ask`; `directory` is appended.

    Raises:
        Unreachable: the session did not receive the request.
        AnswerLost: the session may have received the request, but its answer is not known.
        ConnectionFailed: the edge node itself cannot be reached.
    """
    failures, failed_at = _tcp_failures.get(directory, (0, 0.0))
    blocked = failures >= _TCP_FAILURES and time.monotonic() - failed_at < _TCP_RETRY_AFTER
    tcp = carrier == "direct" or (carrier == "auto" and not blocked)
    if tcp:
        try:
            answer = _send_by_tcp(connection, announcement, request)
            _tcp_failures.pop(directory, None)
            return answer
        except NotConnected as error:
            if carrier == "direct":
                raise Unreachable(f"{_name(announcement)} cannot be reached by TCP: {error}") from None
    answer = _send_by_srun(commands, announcement, request, [*ask_command, directory])
    if tcp:  # The session lives, so TCP failed for another reason than its end.
        _tcp_failures[directory] = (failures + 1, time.monotonic())
    return answer


def _name(announcement: Announcement) -> str:
    return f"the session in Slurm job {announcement.job_id} on {announcement.hostname}"


def _send_by_tcp(connection: Connection, announcement: Announcement, request: Mapping[str, Any]) -> dict[str, Any]:
    problem = NotConnected("it announces no host")
    for host in announcement.hosts:
        try:
            with (
                connection.forward(host, announcement.port) as forward,
                socket.create_connection((forward.host, forward.port), _PROOF_TIMEOUT) as sock,
            ):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return call(sock, announcement.key, dict(request), _PROOF_TIMEOUT)
        except AnswerLost:
            raise
        except OSError as error:
            problem = NotConnected(f"{host}:{announcement.port}: {error}")
    raise problem


def _send_by_srun(
    commands: Connection, announcement: Announcement, request: Mapping[str, Any], program: Sequence[str]
) -> dict[str, Any]:
    # Without --overlap the step would wait for the CPUs that the session's own step holds. Without --mem=0 it would request
    # all memory of the job (srun(1), Slurm 22.05). --het-group is needed in a heterogeneous job and fails in any other one
    # (tried on Slurm 22.05 and 24.11).
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
        *program,
    ]
    try:
        done = run_slurm(commands, command, json.dumps(request).encode(), timeout=_SRUN_TIMEOUT)
    except (ConnectionLost, TimeoutError) as error:
        raise AnswerLost(f"{_name(announcement)} may have been asked by srun: {error}") from None
    lines = done.stdout.decode("utf-8", "replace").splitlines()
    for line in lines:
        if line.startswith(ANSWER):
            with contextlib.suppress(ValueError):
                return dict(json.loads(line[len(ANSWER) :]))
    error_text = done.stderr.decode("utf-8", "replace").strip()[-500:] or f"exit code {done.returncode}"
    if SENT in lines:
        raise AnswerLost(f"{_name(announcement)} was asked by srun, and its answer is lost: {error_text}")
    raise Unreachable(f"{_name(announcement)} cannot be reached by srun: {error_text}")
