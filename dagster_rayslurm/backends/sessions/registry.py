"""The registry of sessions: files on the cluster through which processes find a session, or agree on who creates the session.

A session has a directory, and in the directory a numbered directory for each allocation of the session. The allocations are
called generations. Only the newest generation accepts payloads. The process that creates the next directory, by `mkdir`, has
claimed the generation: the process is the generation's creator and submits the generation's job. A generation that is given up is
marked as abandoned. The directory of an abandoned generation is not removed, so that no process can remove files that another
process has just written. `edge.sessions` reads and writes the files on the cluster.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ...edge import sessions
from ...edge.sessions import ABANDONED, CREATOR, JOB_ID, MANIFEST
from ...runtime.protocol.record import EXIT, SESSION
from ...runtime.protocol.spec import PROTOCOL_VERSION, Announcement, from_fields
from ...slurm.steps import parse_exit
from ...ssh.base import Connection
from ..layout import remote_base_errors

if TYPE_CHECKING:
    from .matching import Capacity

# Seconds between two confirmations that a process waits; one that is silent three times as long counts as gone.
TOUCH_INTERVAL = 60.0
MOST_BYTES = 1024 * 1024  # Most bytes of a file that are read.
_TIMEOUT = 120.0  # Seconds for an operation on the directories of sessions.


@dataclass(frozen=True)
class SessionManifest:
    """What another process must know about a generation of a session to use it: its capacity, and how to send requests."""

    generation: int
    capacity: Capacity
    # A command to run by srun in the session's allocation. The command passes the request on its standard input to the session.
    # The caller appends the path of the generation's directory to the command.
    ask_command: tuple[str, ...]

    def to_json(self) -> bytes:
        capacity, command = self.capacity.to_json(), list(self.ask_command)
        content = {"protocol": PROTOCOL_VERSION, "generation": self.generation, "offer": capacity, "ask": command}
        return json.dumps(content).encode()


def parse_manifest(data: bytes | str) -> SessionManifest | None:
    """Returns the manifest in a file's content; None if the content is empty, damaged or of another version."""
    from .matching import capacity_from_json  # Imports Dagster, which lists of sessions do without.

    try:
        found = json.loads(data)
        if found["protocol"] != PROTOCOL_VERSION:
            return None
        return SessionManifest(int(found["generation"]), capacity_from_json(found["offer"]), tuple(map(str, found["ask"])))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def parse_announcement(data: bytes | str) -> Announcement | None:
    """Returns the announcement (the address and state of a session) in the content of a `session.json`.

    None if the content is empty or damaged.
    """
    try:
        found = json.loads(data)
        bytes.fromhex(found["key"])
        known = {each.name: found[each.name] for each in fields(Announcement) if each.name in found}
        return from_fields(Announcement, known)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


@dataclass(frozen=True)
class LiveSession:
    """A generation of a session that accepted requests when its files were read.

    `directory` is the absolute path of the generation's directory.
    """

    directory: str
    manifest: SessionManifest
    announcement: Announcement


@dataclass(frozen=True)
class Generation:
    """One allocation of a session, as its files showed it when they were read; the object does not change later.

    Values that were not written yet are None or empty.
    """

    key: str  # Name of the session's directory.
    number: int
    directory: str
    job_id: int | None = None
    job_name: str = ""  # Name of the job that the creator submits.
    ended: bool = False  # Whether the batch script of the job has ended.
    announcement: Announcement | None = None
    manifest_text: str = ""  # Content of the manifest's file.
    abandoned: bool = False  # Whether the generation was given up; its creator then cancels its job.
    age: float = 0.0  # Seconds since the generation was claimed; 0 if the session has announced itself.

    @cached_property
    def manifest(self) -> SessionManifest | None:
        """The manifest; None if the manifest was not written yet, is damaged, or is of another version."""
        return parse_manifest(self.manifest_text)

    @property
    def live(self) -> LiveSession | None:
        """This generation as a live session.

        None if the session has not announced itself, is closing, has no readable manifest, or has another protocol version than
        this process.
        """
        said, manifest = self.announcement, self.manifest
        if manifest is None or said is None or said.protocol != PROTOCOL_VERSION or said.closing is not None:
            return None
        return LiveSession(self.directory, manifest, said)


def list_generations(connection: Connection, base: str, key: str = "*", newest: bool = False) -> list[Generation]:
    """Returns the generations of sessions below the base directory `base`, sorted by session and number.

    `key` is a pattern with wildcards for the names of sessions' directories. If `newest` is True, `key` is instead the name of
    one session's directory, and the function returns only the newest generation of this session. Raises OSError if the cluster
    cannot be reached, or if a directory belongs to another user.
    """
    try:
        found = connection.call(sessions.generations, base, key, newest, repeat=True, timeout=_TIMEOUT)
    except PermissionError as error:
        if error.filename is None:
            raise  # A connection over SSH has named the place and the directory.
        raise PermissionError(f"{connection.place}: {error.filename} {error.strerror}") from None
    return sorted((generation_of(base, each) for each in found), key=lambda each: (each.key, each.number))


def generation_of(base: str, found: dict[str, Any]) -> Generation:
    """Returns the generation for `found`, an element of the list that `edge.sessions.generations` returned for `base`."""
    key, number, files = found["session"], found["number"], found["files"]
    announcement = parse_announcement(files[SESSION])
    text = files[JOB_ID].strip() if announcement is None else announcement.job_id
    job_id = int(text) if re.fullmatch("[0-9]{1,18}", text) else None
    return Generation(
        key=key,
        number=number,
        directory=os.path.join(base, "sessions", key, str(number)),
        job_id=job_id,
        job_name=_job_name(files[CREATOR]),
        ended=job_id is not None and parse_exit(files[EXIT].encode(), job_id) is not None,
        announcement=announcement,
        manifest_text=files[MANIFEST],
        abandoned=found["abandoned"],
        age=found["age"],
    )


def _job_name(creator: str) -> str:
    """Returns the name of the job in the content of a file `CREATOR`; "" if the file is empty."""
    return creator.partition("\n")[0].strip()[:300]


def session_of_cluster(connection: Connection, base: str, cluster_id: str) -> LiveSession | None:
    """Returns the session of the Ray cluster `cluster_id` below the base directory `base`, even if it accepts no more payloads.

    Returns None if no generation has announced this Ray cluster, or if its manifest is not readable. Raises what
    `list_generations` raises.
    """
    for each in list_generations(connection, base):
        said, manifest = each.announcement, each.manifest
        if said is not None and manifest is not None and said.cluster_id == cluster_id:
            return LiveSession(each.directory, manifest, said)
    return None


@dataclass(frozen=True)
class SessionRegistry:
    """The files of one session on the cluster: the directory of the session and the directories of the session's generations.

    Methods raise OSError if a directory cannot be used.
    """

    connection: Connection
    base: str
    key: str

    @property
    def directory(self) -> str:
        """The directory of the session, absolute."""
        return os.path.join(self.base, "sessions", self.key)

    def generation_dir(self, number: int) -> str:
        """Returns the absolute path of a generation's directory."""
        return os.path.join(self.directory, str(number))

    def newest(self) -> Generation:
        """Returns the newest generation; a generation with number 0 if none exists.

        Raises StartError if a directory belongs to another user.
        """
        try:
            found = list_generations(self.connection, self.base, self.key, newest=True)
        except PermissionError as error:
            with remote_base_errors(self.base):
                raise error from None
        return found[0] if found else Generation(self.key, 0, self.generation_dir(0))

    def announcement(self, number: int) -> Announcement | None:
        """Returns the announcement of a generation; None if there is none. A closing session has an announcement, too."""
        return parse_announcement(self.connection.read(os.path.join(self.generation_dir(number), SESSION), 0, MOST_BYTES))

    def creator(self, number: int) -> str:
        """Returns the name of the job for which a process has claimed a generation; "" if no process has, or has just done so."""
        content = self.connection.read(os.path.join(self.generation_dir(number), CREATOR), 0, MOST_BYTES)
        return _job_name(content.decode("utf-8", "replace"))

    def wait_for(self, number: int, waiter: str) -> None:
        """Record that a process waits for generation `number` to start, so that no other process cancels its job.

        `waiter` is a text that no other process uses. Returns at once. The record is valid for three times `TOUCH_INTERVAL`
        seconds, so a process that waits longer calls the method repeatedly.
        """
        self.connection.call(sessions.wait_for, self.generation_dir(number), waiter, repeat=True, timeout=_TIMEOUT)

    def stop_waiting(self, number: int, waiter: str) -> bool:
        """Record that the process `waiter` no longer waits for generation `number`; returns whether to cancel the job.

        If no process waits any more, and the session has not announced itself, the function marks the generation as abandoned
        and returns True: the caller must cancel the generation's job. Otherwise the function returns False.
        """
        arguments = self.generation_dir(number), waiter, 3 * TOUCH_INTERVAL
        return self.connection.call(sessions.stop_waiting, *arguments, repeat=True, timeout=_TIMEOUT)

    def abandon(self, number: int) -> None:
        """Mark a generation as abandoned, so that no step uses it.

        If the generation's creator submits the job after that, the creator finds the mark and cancels the job.
        """
        self.connection.make_dir(os.path.join(self.generation_dir(number), ABANDONED))
