"""The registry of sessions: files on the cluster through which processes find a session, or agree on who creates it.

A session has a directory, and in it a numbered directory for each of its allocations, which are called generations. Only the
newest generation accepts payloads. The process that makes the next directory, by `mkdir`, has claimed that generation: it is the
generation's creator and submits its job. A generation that is given up is marked as abandoned; it is not removed, so that no
process can remove what another one has just made. Ages are differences between times of that file system, since the clocks of
its clients differ.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
import weakref
from dataclasses import dataclass

from ...errors import FailureKind, StartError
from ...runtime.protocol.record import EXIT, SESSION
from ...runtime.protocol.spec import PROTOCOL_VERSION
from ...slurm.submit import ABANDONED, CREATOR, CURRENT, JOB_ID, MANIFEST
from ...ssh.base import Connection, ConnectionFailed
from ..payload_files import remote_base_errors
from .client import Announcement, parse_announcement
from .matching import Capacity, capacity_from_json, capacity_to_json

WAITING = "waiting"
"""Name of the directory with a file for each process that waits for a generation to start; the process touches its file."""
TOUCH_INTERVAL = 60.0
"""Seconds between two touches of a file in `WAITING`; a process whose file is older than three times as much counts as gone."""
FOREIGN = 77
"""Exit code of a script that finds the directory of another user."""

_MOST_BYTES = 1024 * 1024
"""Most bytes of a file that are read."""
_MOST_GENERATIONS = 999_999_999
"""Largest number of a generation; `_NEWEST` ignores longer names."""
_READ_RETRY = 0.2
"""Seconds before a failed read is repeated: a network file system that lost sight of a file finds it then."""

# `_NEWEST` gets the session's directory as $1, the other scripts a generation's directory. $2 is a word without meaning to the
# shell: a random one, or the name of the process that waits.
_NOW = """\
: >".rs-$2.probe" || exit
now=$(stat -c %Y -- ".rs-$2.probe")
rm -f -- ".rs-$2.probe"
"""

_NEWEST = f"""\
umask 077
cd -- "$1" 2>/dev/null || {{ echo 0; exit 0; }}
newest=0
for each in *; do
    case $each in *[!0-9]*|0*|??????????*) continue ;; esac
    if [ "$each" -gt "$newest" ]; then newest=$each; fi
done
echo "$newest"
if [ "$newest" = 0 ]; then exit 0; fi
{_NOW}
made=$(stat -c %Y -- "$newest/{CREATOR}" 2>/dev/null || stat -c %Y -- "$newest")
echo $((now - made))
for name in {CREATOR} {JOB_ID}; do printf '%s\\n' "$(head -n 1 -- "$newest/$name" 2>/dev/null | head -c 300)"; done
if [ -e "$newest/{ABANDONED}" ] || ! [ -d "$newest" ]; then echo abandoned; else echo; fi
if [ -s "$newest/{EXIT}" ]; then echo ended; else echo; fi
"""

_WAIT = f"""\
umask 077
cd -- "$1" && mkdir -p {WAITING} && touch -- "{WAITING}/$2"
"""

# The session may announce itself while this script runs, so the script looks for an announcement before and after it makes the
# mark `ABANDONED`.
_LEAVE = f"""\
cd -- "$1" || exit 0
rm -f -- "{WAITING}/$2"
{_NOW}
for each in {WAITING}/*; do
    if seen=$(stat -c %Y -- "$each" 2>/dev/null) && [ $((now - seen)) -lt "$3" ]; then echo others; exit; fi
done
if [ -s {SESSION} ]; then echo announced; exit; fi
mkdir {ABANDONED} 2>/dev/null
if [ -s {SESSION} ]; then echo announced; exit; fi
echo last
"""


@dataclass(frozen=True)
class SessionManifest:
    """What the creator of a generation writes down for the processes that find the generation.

    Attributes:
        generation: the generation's number.
        capacity: what the generation offers to each payload.
        ask_command: the command that hands a request to the session from within its allocation; the directory is appended.
    """

    generation: int
    capacity: Capacity
    ask_command: tuple[str, ...]


def manifest_to_json(manifest: SessionManifest) -> bytes:
    """The content of the manifest's file."""
    content = {
        "protocol": PROTOCOL_VERSION,
        "generation": manifest.generation,
        "offer": capacity_to_json(manifest.capacity),
        "ask": list(manifest.ask_command),
    }
    return json.dumps(content).encode()


def parse_manifest(data: bytes) -> SessionManifest | None:
    """The manifest in the content of a file; None if it is empty, damaged or of another version."""
    try:
        found = json.loads(data)
        number, command = found["generation"], found["ask"]
        if found["protocol"] != PROTOCOL_VERSION or type(number) is not int or not 0 < number <= _MOST_GENERATIONS:
            return None
        if not isinstance(command, list) or not command or not all(isinstance(word, str) for word in command):
            return None
        return SessionManifest(number, capacity_from_json(found["offer"]), tuple(command))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


@dataclass(frozen=True)
class NewestGeneration:
    """The newest generation of a session, as one look at the session's directory shows it.

    Attributes:
        number: the generation's number; 0 if the session has had none.
        age: seconds since the generation was claimed.
        creator: name of the job that the creator submits; "" if that was never written.
        job_id: Slurm's id of the job; None if it is not written yet.
        abandoned: whether the generation is marked as abandoned.
        ended: whether the batch script of the job has ended.
    """

    number: int
    age: float = 0.0
    creator: str = ""
    job_id: str | None = None
    abandoned: bool = False
    ended: bool = False


def parse_newest(text: str) -> NewestGeneration:
    """The newest generation, from the output of the script `_NEWEST`.

    Raises:
        ValueError: the text is no output of that script.
    """
    lines = text.split("\n")
    number = int(lines[0])
    if number == 0:
        return NewestGeneration(0)
    age, creator, job_id, abandoned, ended = lines[1:6]
    known = job_id if re.fullmatch("[0-9]{1,18}", job_id) else None
    return NewestGeneration(number, float(age), creator, known, abandoned == "abandoned", ended == "ended")


@dataclass(frozen=True)
class LiveSession:
    """A session that accepts requests, in its newest generation.

    Attributes:
        directory: the generation's directory, absolute.
        manifest: what the creator wrote down.
        announcement: how to reach the session.
    """

    directory: str
    manifest: SessionManifest
    announcement: Announcement


_own_directories: weakref.WeakKeyDictionary[Connection, set[str]] = weakref.WeakKeyDictionary()
"""For each connection, the session directories that were found to belong to this user, with their parents."""


class SessionRegistry:
    """The generations of one session, read from and written to its directory.

    Methods raise `StartError` if the directory belongs to another user, and `OSError` if it cannot be used.

    Args:
        commands: runs commands on the edge node and reaches the files.
        directory: the session's directory, absolute.
    """

    def __init__(self, commands: Connection, directory: str) -> None:
        self.directory = directory
        self._commands = commands

    def generation_dir(self, number: int) -> str:
        """The directory of a generation."""
        return os.path.join(self.directory, str(number))

    def current(self) -> LiveSession | None:
        """The session, if it accepts requests, found by the last creator's hint in `current`: two reads and no command."""
        manifest = parse_manifest(self._read(CURRENT))
        return self._live(manifest) if manifest is not None else None

    def session(self, number: int) -> LiveSession | None:
        """The session in a generation, if it accepts requests; corrects the hint that `current` follows."""
        manifest = parse_manifest(self._read(str(number), MANIFEST))
        if manifest is None or manifest.generation != number:
            return None
        session = self._live(manifest)
        if session is not None and parse_manifest(self._read(CURRENT)) != manifest:
            self._commands.write(os.path.join(self.directory, CURRENT), manifest_to_json(manifest))
        return session

    def _live(self, manifest: SessionManifest) -> LiveSession | None:
        announcement = self.announcement(manifest.generation)
        if announcement is None or announcement.protocol != PROTOCOL_VERSION or announcement.closing is not None:
            return None
        return LiveSession(self.generation_dir(manifest.generation), manifest, announcement)

    def announcement(self, number: int) -> Announcement | None:
        """The announcement of a generation, whether or not it accepts requests."""
        return parse_announcement(self._read(str(number), SESSION))

    def never_served(self, number: int) -> bool:
        """Whether a generation announces that it has never accepted a payload."""
        try:
            found = json.loads(self._read(str(number), SESSION))
        except (ValueError, RecursionError):
            return False
        return isinstance(found, dict) and found.get("served") == 0

    def newest(self) -> NewestGeneration:
        """The newest generation and its state; one command."""
        self._check_owner()
        output = self._run(_NEWEST, self.directory, secrets.token_hex(8))
        try:
            newest = parse_newest(output)
        except ValueError:
            raise OSError(f"{self._commands.place}: {self.directory} cannot be read: {output[-300:]!r}") from None
        if newest.number >= _MOST_GENERATIONS:
            where = f"{self._commands.place}:{self.generation_dir(newest.number)}"
            sentence = f"{where} leaves no number for another allocation of this session: remove it"
            raise StartError(FailureKind.CONFIGURATION, sentence)
        return newest

    def wait_for(self, number: int, waiter: str) -> None:
        """Record that a process waits for a generation to start; to be repeated every `TOUCH_INTERVAL` seconds."""
        self._run(_WAIT, self.generation_dir(number), waiter)

    def stop_waiting(self, number: int, waiter: str) -> bool:
        """Record that a process no longer waits for a generation.

        Returns True if no process waits any more and the session has not announced itself. The generation is then marked as
        abandoned, and the caller must cancel its job.
        """
        fresh = str(round(3 * TOUCH_INTERVAL))
        return self._run(_LEAVE, self.generation_dir(number), waiter, fresh).strip() == "last"

    def abandon(self, number: int) -> None:
        """Mark a generation as abandoned: if its creator submits the job after all, the creator cancels it."""
        self._commands.make_dir(os.path.join(self.generation_dir(number), ABANDONED))

    def is_abandoned(self, number: int) -> bool:
        """Whether a generation is marked as abandoned, so that its creator cancels the job if it submits one."""
        done = self._commands.run(["test", "-e", os.path.join(self.generation_dir(number), ABANDONED)])
        return done.returncode == 0

    def write_job_id(self, number: int, job_id: str) -> None:
        """Write down the id of a generation's job, in place of a creator that was cut off before it did so."""
        self._commands.write(os.path.join(self.generation_dir(number), JOB_ID), f"{job_id}\n".encode())

    def _check_owner(self) -> bool:
        """Check that the session's directory and its parents belong to this user, once per process.

        Returns whether they exist. The names of sessions are predictable: the owner of a parent directory could put a session
        of their own there, with a command that every process runs that finds the session.
        """
        known = _own_directories.setdefault(self._commands, set())
        if self.directory in known:
            return True
        sessions = os.path.dirname(self.directory)
        base = os.path.dirname(sessions)
        user = self._commands.user_id()
        for each in (base, sessions, self.directory):
            found = self._commands.stat(each)
            if found is None:
                return False
            if found.owner != user:
                done = self._commands.run(["stat", "-L", "-c", "%U", "--", each])
                owner = done.stdout.decode("utf-8", "replace").strip() or f"user {found.owner}"
                with remote_base_errors(base):
                    raise PermissionError(f"{self._commands.place}: {each} belongs to {owner}, who could change what runs there")
        known.add(self.directory)
        return True

    def _read(self, *names: str) -> bytes:
        if not self._check_owner():
            return b""
        path = os.path.join(self.directory, *names)
        try:
            return self._commands.read(path, 0, _MOST_BYTES)
        except (ConnectionFailed, PermissionError):
            raise
        except OSError:
            time.sleep(_READ_RETRY)
            return self._commands.read(path, 0, _MOST_BYTES)

    def _run(self, script: str, directory: str, *words: str) -> str:
        done = self._commands.run(["sh", "-c", script, "sh", directory, *words], timeout=120)
        if done.returncode:
            error = done.stderr.decode("utf-8", "replace").strip()[-300:] or f"exit code {done.returncode}"
            raise OSError(f"{self._commands.place}: {directory} cannot be used: {error}")
        return done.stdout.decode("utf-8", "replace")
