"""List the sessions of a user on a Slurm cluster, and end them with confirmation by Slurm."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from ...errors import FailureKind, StartError
from ...runtime.protocol.messages import Operation
from ...runtime.protocol.record import EXIT, SESSION
from ...slurm.script import parse_exit
from ...slurm.shared_queue import QueueRow, QueueSnapshot, fetch_queue
from ...slurm.states import TERMINAL, WAITING
from ...slurm.submit import ABANDONED, CREATOR, JOB_ID, MANIFEST, cancel_named, wait_until_gone
from ...ssh.base import Connection
from .client import Announcement, AnswerLost, Unreachable, parse_announcement, send_request
from .registry import FOREIGN, parse_manifest

_TIMEOUT = 120.0
"""Seconds for the command that lists sessions."""
_END_TIMEOUT = 45.0
"""Seconds in which a session ends after a stop request; its payloads and Ray have grace periods. Then its job is cancelled."""

# Directories are listed too: one without files is a session that is being submitted. Files may disappear meanwhile.
_LIST = f"""\
unset TAR_OPTIONS
for each in "$1" "$1/sessions"; do
    if [ -e "$each" ] && ! [ -O "$each" ]; then stat -L -c '%U' -- "$each"; exit {FOREIGN}; fi
done
cd -- "$1/sessions" 2>/dev/null || exit 0
find . -mindepth 2 -maxdepth 3 -path "./$2/*" \
    '(' -type d -o -type f '(' -name {JOB_ID} -o -name {EXIT} -o -name {SESSION} -o -name {CREATOR} -o -name {MANIFEST} ')' ')' \
    -print0 2>/dev/null |
    tar -c --no-recursion --null --ignore-failed-read --files-from=- 2>/dev/null
exit 0
"""
_log = logging.getLogger("rayslurm")


class SessionState(str, Enum):
    """The state of a session, derived from its files, Slurm's queue, and the session's own description."""

    PENDING = "pending"
    STARTING = "starting"
    UP = "up"
    """The session announces itself; only its own description says whether it is ready."""
    READY = "ready"
    DRAINING = "draining"
    """The session runs its payloads to their end, and accepts no more."""
    SILENT = "silent"
    """The session announces itself but does not answer."""
    ENDED = "ended"
    DEAD = "dead"
    """The session's job ended without withdrawing the announcement."""

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Generation:
    """One allocation of a session, as its directory shows it.

    Attributes:
        key: the name of the session's directory.
        number: the number of the generation.
        directory: the generation's directory, absolute.
        job_id: Slurm's id of the job; None if it is not known (yet).
        job_name: name of the job; "" if that was not written yet.
        exit_code: exit code of the job's script; None before its end.
        announcement: how to reach the session; None before the session accepts requests.
        ask_command: the command that hands a request to the session from within its allocation; the directory is appended.
        components: names of the allocation's components, the head's first; empty where all nodes are alike.
    """

    key: str
    number: int
    directory: str
    job_id: int | None
    job_name: str
    exit_code: int | None
    announcement: Announcement | None
    ask_command: tuple[str, ...]
    components: tuple[str, ...] = ()


def list_generations(connection: Connection, base: str, key: str = "*") -> list[Generation]:
    """All generations of sessions below a base directory, sorted by session and number; one command on the cluster.

    Args:
        connection: the edge node of the cluster.
        base: the base directory, absolute.
        key: the name of a session's directory, or a pattern of names.

    Raises:
        OSError: the cluster cannot be reached, or the directory is another user's.
    """
    done = connection.run(["sh", "-c", _LIST, "sh", base, key], timeout=_TIMEOUT)
    if done.returncode == FOREIGN:
        owner = done.stdout.decode("utf-8", "replace").strip()
        raise PermissionError(f"{connection.place}: {base} belongs to {owner}, who could change what runs there")
    return parse_listing(done.stdout, base)


def parse_listing(data: bytes, base: str) -> list[Generation]:
    """The generations in a tar file of the directories of sessions; unknown and damaged entries are left out."""
    files: dict[tuple[str, int], dict[str, bytes]] = {}
    known: set[tuple[str, int]] = set()
    # The beginning of a listing that was cut off is used.
    with contextlib.suppress(tarfile.TarError), tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for member in archive:
            key, _, rest = member.name.removeprefix("./").partition("/")
            number, _, name = rest.partition("/")
            if not (number.isascii() and number.isdecimal()):
                continue
            if not name:
                known.add((key, int(number)))
            elif content := archive.extractfile(member) if member.isfile() else None:
                files.setdefault((key, int(number)), {})[name] = content.read()
    found = [_generation(base, *which, files.get(which, {})) for which in known]
    return sorted(found, key=lambda each: (each.key, each.number))


def _generation(base: str, key: str, number: int, files: Mapping[str, bytes]) -> Generation:
    text = files.get(JOB_ID, b"").decode("ascii", "replace").strip()
    job_id = int(text) if text.isdecimal() else None
    announcement = parse_announcement(files.get(SESSION, b""))
    if job_id is None and announcement is not None:
        job_id = int(announcement.job_id)
    manifest = parse_manifest(files.get(MANIFEST, b""))
    return Generation(
        key=key,
        number=number,
        directory=os.path.join(base, "sessions", key, str(number)),
        job_id=job_id,
        job_name=files.get(CREATOR, b"").decode("utf-8", "replace").strip(),
        exit_code=None if job_id is None else parse_exit(files.get(EXIT, b""), job_id),
        announcement=announcement,
        ask_command=manifest.ask_command if manifest is not None else (),
        components=tuple(manifest.capacity.components) if manifest is not None else (),
    )


def job_of(generation: Generation, snapshot: QueueSnapshot) -> QueueRow | None:
    """The row of a generation's job (its first component) in the queue; None if the job has ended or is not in the queue."""
    if generation.exit_code is not None:
        return None
    if generation.job_id is not None:
        row = snapshot.job(generation.job_id)
    else:
        named = [row for row in snapshot.rows if row.name == generation.job_name and row.is_leader]
        row = named[-1] if generation.job_name and named else None
    return None if row is None or row.state in TERMINAL else row


def state_of(generation: Generation, row: QueueRow | None) -> SessionState:
    """The state of a session, derived from its files and the row of its job in the queue (see `job_of`)."""
    announcement = generation.announcement
    if row is None:
        dead = generation.exit_code is None and announcement is not None and announcement.closing is None
        return SessionState.DEAD if dead else SessionState.ENDED
    if row.state in WAITING:
        return SessionState.PENDING
    if announcement is None:
        return SessionState.STARTING
    return SessionState.DRAINING if announcement.closing else SessionState.UP


def ask_session(connection: Connection, generation: Generation, request: Mapping[str, object]) -> dict[str, object]:
    """Send a request to a session and return the session's answer; raises what `send_request` raises."""
    if generation.announcement is None:
        raise Unreachable(f"the session {generation.key} does not say where it is")
    command, directory = generation.ask_command, generation.directory
    carrier = "auto" if command else "direct"
    return send_request(connection, connection, generation.announcement, request, carrier, directory, command)


def end_sessions(connection: Connection, base: str, key: str) -> bool:
    """End all generations of a session and wait until Slurm confirms their end; False if no generation was alive.

    Args:
        connection: the edge node of the cluster.
        base: the base directory there, absolute.
        key: the name of the session's directory, or a pattern of names.

    Raises:
        StartError: Slurm does not confirm the end.
        OSError: the cluster or Slurm does not answer.
    """
    return end_generations(connection, list_generations(connection, base, key))


def end_generations(connection: Connection, generations: Iterable[Generation]) -> bool:
    """End the given generations and wait until Slurm confirms their end; False if none was alive. Raises as `end_sessions`."""
    commands = connection
    snapshot = fetch_queue(commands)
    ended = False
    for generation in generations:
        row = job_of(generation, snapshot)
        if row is not None:
            _end(connection, commands, generation, row)
            ended = True
        elif generation.job_id is None and generation.job_name:
            # The submission was cut off or is under way. If it succeeds, the creator finds this mark and cancels the job.
            connection.make_dir(os.path.join(generation.directory, ABANDONED))
            cancel_named(commands, generation.job_name, _log)
    return ended


def _end(connection: Connection, commands: Connection, generation: Generation, row: QueueRow) -> None:
    stopping = False
    if generation.announcement is not None:
        with contextlib.suppress(Unreachable, AnswerLost):
            stopping = bool(ask_session(connection, generation, {"op": Operation.STOP}).get("ok"))
    if not wait_until_gone(commands, row.job_id, _END_TIMEOUT if stopping else 0.0):
        raise StartError(FailureKind.RUNTIME, f"Slurm does not confirm the end of job {row.job_id}; run `scancel {row.job_id}`")
