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
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from ...edge import sessions
from ...edge.sessions import ABANDONED, CURRENT, JOB_ID, MANIFEST
from ...errors import FailureKind, StartError
from ...runtime.protocol.record import SESSION
from ...runtime.protocol.spec import PROTOCOL_VERSION
from ...ssh.base import Connection
from ..payload_files import remote_base_errors
from .matching import Capacity, capacity_from_json, capacity_to_json

T = TypeVar("T")

TOUCH_INTERVAL = 60.0
"""Seconds between two confirmations that a process waits; one that is silent three times as long counts as gone."""
MOST_BYTES = 1024 * 1024
"""Most bytes of a file that are read."""
_MOST_GENERATIONS = 999_999_999
"""Largest number of a generation; longer names in the directory are ignored."""
_TIMEOUT = 120.0
"""Seconds for an operation on a session's directory."""


@dataclass(frozen=True)
class SessionManifest:
    """What the creator of a generation writes down for the processes that find the generation.

    Attributes:
        capacity: what the generation offers to each payload.
        ask_command: the command that hands a request to the session from within its allocation; the directory is appended.
    """

    generation: int
    capacity: Capacity
    ask_command: tuple[str, ...]

    def to_json(self) -> bytes:
        capacity, command = capacity_to_json(self.capacity), list(self.ask_command)
        content = {"protocol": PROTOCOL_VERSION, "generation": self.generation, "offer": capacity, "ask": command}
        return json.dumps(content).encode()


def parse_manifest(data: bytes | str) -> SessionManifest | None:
    """The manifest in the content of a file; None if it is empty, damaged or of another version."""
    try:
        found = json.loads(data)
        number, command = found["generation"], found["ask"]
        if found["protocol"] != PROTOCOL_VERSION or type(number) is not int or not 0 < number <= _MOST_GENERATIONS:
            return None
        if not isinstance(command, list) or not all(isinstance(word, str) for word in command):
            return None
        return SessionManifest(number, capacity_from_json(found["offer"]), tuple(command))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


@dataclass(frozen=True)
class Announcement:
    """How to reach a session, and its state, as the session writes both into `session.json`.

    Attributes:
        job_id: Slurm's id of the session's job, or the id of its process on this machine.
        hosts: names and addresses of the head node, the likeliest first.
        key: the secret of the session, hex.
        closing: why the session accepts no more payloads; None while it accepts them.
        heterogeneous: whether the job has several components, the one with the head node first.
        idle: whether the session has served payloads and runs none now.
        served: payloads that the session has accepted; None if it does not say.
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
    served: int | None = None


def parse_announcement(data: bytes | str) -> Announcement | None:
    """The announcement in the content of a `session.json`; None if it is empty or damaged."""
    try:
        found = json.loads(data)
        bytes.fromhex(str(found["key"]))
        return Announcement(
            cluster_id=str(found["cluster_id"]),
            job_id=str(int(found["job_id"])),
            hosts=tuple(str(host) for host in found["hosts"]),
            port=int(found["port"]),
            key=str(found["key"]),
            protocol=int(found["protocol"]),
            closing=None if found["closing"] is None else str(found["closing"]),
            hostname=str(found["hostname"]),
            heterogeneous=bool(found.get("heterogeneous", False)),
            idle=bool(found.get("idle", False)),
            served=found.get("served"),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


@dataclass(frozen=True)
class NewestGeneration:
    """The newest generation of a session, as one look at the session's directory shows it; number 0 if there is none.

    Attributes:
        age: seconds since the generation was claimed.
        creator: name of the job that the creator submits; "" if that was never written.
        ended: whether the batch script of the job has ended.
    """

    number: int
    age: float = 0.0
    creator: str = ""
    job_id: str | None = None
    abandoned: bool = False
    ended: bool = False


@dataclass(frozen=True)
class LiveSession:
    """A session that accepts requests, in its newest generation; `directory` is the generation's, absolute."""

    directory: str
    manifest: SessionManifest
    announcement: Announcement


_own_directories: weakref.WeakKeyDictionary[Connection, set[str]] = weakref.WeakKeyDictionary()
"""For each connection, the session directories that were found to belong to this user, with their parents."""


class SessionRegistry:
    """The generations of one session, read from and written to its directory, which is absolute.

    Methods raise `StartError` if the directory belongs to another user, and `OSError` if it cannot be used.
    """

    def __init__(self, connection: Connection, directory: str) -> None:
        self.directory = directory
        self._connection = connection

    def generation_dir(self, number: int) -> str:
        """The directory of a generation."""
        return os.path.join(self.directory, str(number))

    def current(self) -> LiveSession | None:
        """The session, if it accepts requests, found by the last creator's hint in `current`: two reads and no search."""
        manifest = parse_manifest(self._read(CURRENT)[0])
        return self._live(manifest, self._read(f"{manifest.generation}/{SESSION}")[0]) if manifest is not None else None

    def session(self, number: int) -> LiveSession | None:
        """The session in a generation, if it accepts requests; corrects the hint that `current` follows."""
        text, announced, hint = self._read(f"{number}/{MANIFEST}", f"{number}/{SESSION}", CURRENT)
        manifest = parse_manifest(text)
        if manifest is None or manifest.generation != number:
            return None
        session = self._live(manifest, announced)
        if session is not None and parse_manifest(hint) != manifest:
            self._connection.write(os.path.join(self.directory, CURRENT), manifest.to_json())
        return session

    def _live(self, manifest: SessionManifest, announced: str) -> LiveSession | None:
        announcement = parse_announcement(announced)
        if announcement is None or announcement.protocol != PROTOCOL_VERSION or announcement.closing is not None:
            return None
        return LiveSession(self.generation_dir(manifest.generation), manifest, announcement)

    def announcement(self, number: int) -> Announcement | None:
        """The announcement of a generation, whether or not it accepts requests."""
        return parse_announcement(self._read(f"{number}/{SESSION}")[0])

    def newest(self) -> NewestGeneration:
        """The newest generation and its state."""
        self._check_owner()
        number, age, creator, job_id, *flags = self._call(sessions.newest, self.directory)
        if number >= _MOST_GENERATIONS:
            where = f"{self._connection.place}:{self.generation_dir(number)}"
            sentence = f"{where} leaves no number for another allocation of this session: remove it"
            raise StartError(FailureKind.CONFIGURATION, sentence)
        known = job_id if re.fullmatch("[0-9]{1,18}", job_id) else None
        return NewestGeneration(number, age, creator, known, *flags)

    def wait_for(self, number: int, waiter: str) -> None:
        """Record that a process waits for a generation to start; to be repeated every `TOUCH_INTERVAL` seconds."""
        self._call(sessions.wait_for, self.generation_dir(number), waiter)

    def stop_waiting(self, number: int, waiter: str) -> bool:
        """Record that a process no longer waits for a generation; if True, the caller must cancel the generation's job.

        Then no process waits any more, the session has not announced itself, and the generation is marked as abandoned.
        """
        return self._call(sessions.stop_waiting, self.generation_dir(number), waiter, 3 * TOUCH_INTERVAL)

    def abandon(self, number: int) -> None:
        """Mark a generation as abandoned: if its creator submits the job after all, the creator cancels it."""
        self._connection.make_dir(os.path.join(self.generation_dir(number), ABANDONED))

    def is_abandoned(self, number: int) -> bool:
        """Whether a generation is marked as abandoned."""
        return self._connection.stat(os.path.join(self.generation_dir(number), ABANDONED)) is not None

    def write_job_id(self, number: int, job_id: str) -> None:
        """Write down the id of a generation's job, in place of a creator that was cut off before it did so."""
        self._connection.write(os.path.join(self.generation_dir(number), JOB_ID), f"{job_id}\n".encode())

    def _check_owner(self) -> bool:
        """Check that the session's directory and its parents belong to this user, once per process; returns whether they exist.

        The names of sessions are predictable: the owner of a parent directory could put a session of their own there, with a
        command that every process runs that finds the session.
        """
        known = _own_directories.setdefault(self._connection, set())
        if self.directory not in known:
            parent = os.path.dirname(self.directory)
            if not check_owner(self._connection, os.path.dirname(parent), parent, self.directory):
                return False
            known.add(self.directory)
        return True

    def _read(self, *names: str) -> list[str]:
        if not self._check_owner():
            return [""] * len(names)
        return self._call(sessions.read, self.directory, list(names))

    def _call(self, function: Callable[..., T], *arguments: Any) -> T:
        return self._connection.call(function, *arguments, repeat=True, timeout=_TIMEOUT)


def check_owner(connection: Connection, base: str, *directories: str) -> bool:
    """Whether these directories exist; raises StartError if one of them, or `base`, belongs to another user."""
    exist, foreign, owner = connection.call(sessions.owner, [base, *directories], repeat=True, timeout=_TIMEOUT)
    if foreign:
        with remote_base_errors(base):
            raise PermissionError(f"{connection.place}: {foreign} belongs to {owner}, who could change what runs there")
    return exist
