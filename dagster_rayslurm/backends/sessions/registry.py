"""The registry of sessions: files on the cluster through which processes find a session, or agree on who creates it.

A session has a directory, and in it a numbered directory for each of its allocations, which are called generations. Only the
newest generation accepts payloads. The process that makes the next directory, by `mkdir`, has claimed that generation: it is the
generation's creator and submits its job. A generation that is given up is marked as abandoned; it is not removed, so that no
process can remove what another one has just made. `edge.sessions` reads and writes the files on the cluster.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, fields
from typing import Any

from ...edge import sessions
from ...edge.sessions import ABANDONED, CREATOR, JOB_ID, MANIFEST
from ...runtime.protocol.record import EXIT, SESSION
from ...runtime.protocol.spec import PROTOCOL_VERSION, Announcement, from_fields
from ...slurm.request import parse_exit
from ...ssh.base import Connection
from ..payload_files import remote_base_errors
from .matching import Capacity, capacity_from_json

# Seconds between two confirmations that a process waits; one that is silent three times as long counts as gone.
TOUCH_INTERVAL = 60.0
MOST_BYTES = 1024 * 1024  # Most bytes of a file that are read.
_TIMEOUT = 120.0  # Seconds for an operation on the directories of sessions.


@dataclass(frozen=True)
class SessionManifest:
    """What the creator of a generation writes down for the processes that find the generation."""

    generation: int
    capacity: Capacity
    ask_command: tuple[str, ...]  # Hands a request to the session from within its allocation; the directory is appended.

    def to_json(self) -> bytes:
        capacity, command = self.capacity.to_json(), list(self.ask_command)
        content = {"protocol": PROTOCOL_VERSION, "generation": self.generation, "offer": capacity, "ask": command}
        return json.dumps(content).encode()


def parse_manifest(data: bytes | str) -> SessionManifest | None:
    """The manifest in the content of a file; None if it is empty, damaged or of another version."""
    try:
        found = json.loads(data)
        if found["protocol"] != PROTOCOL_VERSION:
            return None
        return SessionManifest(int(found["generation"]), capacity_from_json(found["offer"]), tuple(map(str, found["ask"])))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def parse_announcement(data: bytes | str) -> Announcement | None:
    """The announcement in the content of a `session.json`; None if it is empty or damaged."""
    try:
        found = json.loads(data)
        bytes.fromhex(found["key"])
        known = {each.name: found[each.name] for each in fields(Announcement) if each.name in found}
        return from_fields(Announcement, known)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


@dataclass(frozen=True)
class LiveSession:
    """A session that accepts requests, in its newest generation; `directory` is the generation's, absolute."""

    directory: str
    manifest: SessionManifest
    announcement: Announcement


@dataclass(frozen=True)
class Generation:
    """One allocation of a session, as one look at its directory shows it; what is not written yet is None or empty."""

    key: str  # Name of the session's directory.
    number: int
    directory: str
    job_id: int | None = None
    job_name: str = ""  # Of the job that the creator submits.
    ended: bool = False  # Whether the batch script of the job has ended.
    announcement: Announcement | None = None
    manifest: SessionManifest | None = None
    abandoned: bool = False  # If the creator submits the job after all, the creator cancels it.
    age: float = 0.0  # Seconds since the generation was claimed; 0 if the session has announced itself.

    @property
    def live(self) -> LiveSession | None:
        """The session, if it accepts requests that this process can make."""
        said, manifest = self.announcement, self.manifest
        if manifest is None or said is None or said.protocol != PROTOCOL_VERSION or said.closing is not None:
            return None
        return LiveSession(self.directory, manifest, said)


def list_generations(connection: Connection, base: str, key: str = "*", newest: bool = False) -> list[Generation]:
    """All generations of sessions below a base directory, sorted by session and number, or only the newest one of a session.

    `key` is the name of a session's directory, or a pattern of names. Raises OSError if the cluster cannot be reached, or a
    directory is another user's.
    """
    try:
        found = connection.call(sessions.generations, base, key, newest, repeat=True, timeout=_TIMEOUT)
    except PermissionError as error:
        if error.filename is None:
            raise  # A connection over SSH has named the place and the directory.
        raise PermissionError(f"{connection.place}: {error.filename} {error.strerror}") from None
    return sorted((generation_of(base, each) for each in found), key=lambda each: (each.key, each.number))


def generation_of(base: str, found: dict[str, Any]) -> Generation:
    """The generation that `edge.sessions.generations` has found below a base directory."""
    key, number, files = found["session"], found["number"], found["files"]
    announcement = parse_announcement(files[SESSION])
    text = files[JOB_ID].strip() if announcement is None else announcement.job_id
    job_id = int(text) if re.fullmatch("[0-9]{1,18}", text) else None
    return Generation(
        key=key,
        number=number,
        directory=os.path.join(base, "sessions", key, str(number)),
        job_id=job_id,
        job_name=files[CREATOR].partition("\n")[0].strip()[:300],
        ended=job_id is not None and parse_exit(files[EXIT].encode(), job_id) is not None,
        announcement=announcement,
        manifest=parse_manifest(files[MANIFEST]),
        abandoned=found["abandoned"],
        age=found["age"],
    )


@dataclass(frozen=True)
class SessionRegistry:
    """The generations of one session, read from and written to its directory. Methods raise OSError if that cannot be used."""

    connection: Connection
    base: str
    key: str

    @property
    def directory(self) -> str:
        """The directory of the session, absolute."""
        return os.path.join(self.base, "sessions", self.key)

    def generation_dir(self, number: int) -> str:
        """The directory of a generation."""
        return os.path.join(self.directory, str(number))

    def newest(self) -> Generation:
        """The newest generation, with number 0 if there is none; raises StartError if a directory belongs to another user."""
        try:
            found = list_generations(self.connection, self.base, self.key, newest=True)
        except PermissionError as error:
            with remote_base_errors(self.base):
                raise error from None
        return found[0] if found else Generation(self.key, 0, self.generation_dir(0))

    def announcement(self, number: int) -> Announcement | None:
        """The announcement of a generation, whether or not it accepts requests."""
        return parse_announcement(self.connection.read(os.path.join(self.generation_dir(number), SESSION), 0, MOST_BYTES))

    def wait_for(self, number: int, waiter: str) -> None:
        """Record that a process waits for a generation to start; to be repeated every `TOUCH_INTERVAL` seconds."""
        self.connection.call(sessions.wait_for, self.generation_dir(number), waiter, repeat=True, timeout=_TIMEOUT)

    def stop_waiting(self, number: int, waiter: str) -> bool:
        """Record that a process no longer waits for a generation; if True, the caller must cancel the generation's job.

        Then no process waits any more, the session has not announced itself, and the generation is marked as abandoned.
        """
        arguments = self.generation_dir(number), waiter, 3 * TOUCH_INTERVAL
        return self.connection.call(sessions.stop_waiting, *arguments, repeat=True, timeout=_TIMEOUT)

    def abandon(self, number: int) -> None:
        """Mark a generation as abandoned: if its creator submits the job after all, the creator cancels it."""
        self.connection.make_dir(os.path.join(self.generation_dir(number), ABANDONED))
