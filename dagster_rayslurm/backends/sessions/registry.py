"""Sessions on the cluster's file system: one directory for each name, in it one for each allocation there has been.

The newest generation is the session; who makes the next one, by `mkdir`, submits its job. Nothing is removed in a race, so
that nobody can take away what another one has just made; a generation that its maker has left is marked instead. Ages are
differences between times of that file system alone: its clock may be any, and those of its clients differ.
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
from ...slurm.submit import ABANDONED, CREATOR, CURRENT, JOB_ID, OFFER
from ...ssh.base import Connection, ConnectionFailed
from ..payload_files import base_errors
from .client import Announcement, parse_announcement
from .matching import Capacity, capacity_from_json, capacity_to_json

WAITING = "waiting"
"""Directory of files of those who wait for a session to come up, touched by them."""
TOUCH_INTERVAL = 60.0
"""Seconds between two touches of such a file; after three times as long nobody waits there."""

_MOST_BYTES = 1024 * 1024
_MOST_GENERATIONS = 999_999_999
_LOST_SIGHT = 0.2
"""Seconds before a file is read once more that could not be read."""

FOREIGN = 77
"""Exit code of a look at a directory of another user."""
# All of them get the session's directory as $1 and a random word as $2.
_NOW = """\
: >".rs-$2.probe" || exit
now=$(stat -c %Y -- ".rs-$2.probe")
rm -f -- ".rs-$2.probe"
"""

_LOOK = f"""\
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

# Whoever comes while this is decided finds the mark, or a job that is over and the mark.
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
    """What the maker of a generation wrote down for those who find it.

    Attributes:
        generation: its number.
        offer: what it has for each payload.
        ask: the command that hands a request over within its allocation, but for the directory.
    """

    generation: int
    offer: Capacity
    ask: tuple[str, ...]


def charter_to_json(charter: SessionManifest) -> bytes:
    """A charter as a file."""
    content = {"generation": charter.generation, "offer": capacity_to_json(charter.offer), "ask": list(charter.ask)}
    return json.dumps({"protocol": PROTOCOL_VERSION, **content}).encode()


def parse_charter(data: bytes) -> SessionManifest | None:
    """The charter in a file; None if there is none, or it is damaged, or of another version."""
    try:
        found = json.loads(data)
        number, ask = found["generation"], found["ask"]
        if found["protocol"] != PROTOCOL_VERSION or type(number) is not int or not 0 < number <= _MOST_GENERATIONS:
            return None
        if not isinstance(ask, list) or not ask or not all(isinstance(word, str) for word in ask):
            return None
        return SessionManifest(number, capacity_from_json(found["offer"]), tuple(ask))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def never_served(data: bytes) -> bool:
    """Whether what a session says of itself tells that it has never taken a payload."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and found.get("served") == 0


@dataclass(frozen=True)
class Newest:
    """The newest generation, as one look at its directory shows it.

    Attributes:
        number: its number; 0 if there has been none.
        age: seconds since it was claimed.
        creator: name of the job that its maker submits; "" if that was never written.
        job_id: its job; None if that is not known.
        abandoned: whether it was given up.
        ended: whether its batch script has come to an end.
    """

    number: int
    age: float = 0.0
    creator: str = ""
    job_id: str | None = None
    abandoned: bool = False
    ended: bool = False


def parse_newest(text: str) -> Newest:
    """What the look printed.

    Raises:
        ValueError: it is something else.
    """
    lines = text.split("\n")
    number = int(lines[0])
    if number == 0:
        return Newest(0)
    age, creator, job_id, abandoned, ended = lines[1:6]
    known = job_id if re.fullmatch("[0-9]{1,18}", job_id) else None
    return Newest(number, float(age), creator, known, abandoned == "abandoned", ended == "ended")


@dataclass(frozen=True)
class Found:
    """A generation that takes requests.

    Attributes:
        directory: where it is.
        charter: what its maker wrote down.
        announcement: how it is reached.
    """

    directory: str
    charter: SessionManifest
    announcement: Announcement


_ours: weakref.WeakKeyDictionary[Connection, set[str]] = weakref.WeakKeyDictionary()
"""Sessions' directories that belong to this user, as do those above them, on each connection."""


class SessionRegistry:
    """The generations of one session.

    Args:
        commands: runs commands on the edge node and reaches the files.
        directory: the session's directory, absolute.
    """

    def __init__(self, commands: Connection, directory: str) -> None:
        self.directory = directory
        self._commands = commands

    def generation(self, number: int) -> str:
        """The directory of a generation."""
        return os.path.join(self.directory, str(number))

    def hinted(self) -> Found | None:
        """The session, if it is where its last maker said; two reads, and no command.

        Raises:
            StartError: the directory is another user's.
            OSError: it cannot be read.
        """
        charter = parse_charter(self._read(CURRENT))
        return self._with_announcement(charter) if charter is not None else None

    def found(self, number: int) -> Found | None:
        """A generation that takes requests, whatever is said of it elsewhere; then that is put right.

        Raises:
            StartError: the directory is another user's.
            OSError: it cannot be read.
        """
        charter = parse_charter(self._read(str(number), OFFER))
        if charter is None or charter.generation != number:
            return None
        found = self._with_announcement(charter)
        if found is not None and parse_charter(self._read(CURRENT)) != charter:
            self._commands.write(os.path.join(self.directory, CURRENT), charter_to_json(charter))
        return found

    def announcement(self, number: int) -> Announcement | None:
        """What a generation says of itself.

        Raises:
            StartError: the directory is another user's.
            OSError: it cannot be read.
        """
        return parse_announcement(self._read(str(number), SESSION))

    def took_nothing(self, number: int) -> bool:
        """Whether a generation that takes no payload has never taken one.

        Raises:
            StartError: the directory is another user's.
            OSError: it cannot be read.
        """
        return never_served(self._read(str(number), SESSION))

    def _with_announcement(self, charter: SessionManifest) -> Found | None:
        announcement = self.announcement(charter.generation)
        if announcement is None or announcement.protocol != PROTOCOL_VERSION or announcement.closing is not None:
            return None
        return Found(self.generation(charter.generation), charter, announcement)

    def look(self) -> Newest:
        """The newest generation; one command.

        Raises:
            StartError: the directory is another user's, or no allocation can come after the newest one.
            OSError: the directory cannot be read.
        """
        self._is_ours()
        said = self._run(_LOOK)
        try:
            newest = parse_newest(said)
        except ValueError:
            raise OSError(f"{self._commands.place}: {self.directory} cannot be read: {said[-300:]!r}") from None
        if newest.number >= _MOST_GENERATIONS:
            where = f"{self._commands.place}:{self.generation(newest.number)}"
            message = f"{where} leaves no number for another allocation of this session: remove it"
            raise StartError(FailureKind.CONFIGURATION, message)
        return newest

    def wait_at(self, number: int, who: str) -> None:
        """Say that somebody waits for a generation to come up; to be repeated every `TOUCH_INTERVAL` seconds.

        Raises:
            OSError: that cannot be written.
        """
        self._run(_WAIT, self.generation(number), who)

    def leave(self, number: int, who: str) -> bool:
        """Wait no longer.

        Returns:
            Whether nobody waits for it now, so that its job has to go; it counts as abandoned then.

        Raises:
            OSError: that cannot be found out.
        """
        fresh = str(round(3 * TOUCH_INTERVAL))
        return self._run(_LEAVE, self.generation(number), who, fresh).strip() == "last"

    def abandon(self, number: int) -> None:
        """Give a generation up: whoever made it takes it down if its job comes into being after all.

        Raises:
            OSError: the mark cannot be made.
        """
        self._commands.make_dir(os.path.join(self.generation(number), ABANDONED))

    def is_abandoned(self, number: int) -> bool:
        """Whether a generation was given up.

        Raises:
            OSError: that cannot be found out.
        """
        done = self._commands.run(["test", "-e", os.path.join(self.generation(number), ABANDONED)])
        return done.returncode == 0

    def adopt(self, number: int, job_id: str) -> None:
        """Write down a job whose maker did not come to it.

        Raises:
            OSError: it cannot be written.
        """
        self._commands.write(os.path.join(self.generation(number), JOB_ID), f"{job_id}\n".encode())

    def _is_ours(self) -> bool:
        """Whether the session's directory is there, and of nobody else; looked up once by each process.

        Who owns one on the way could put a session of their own there, with a command that is run by those who find it:
        what a session is called can be foreseen.

        Raises:
            StartError: it is another user's, or one above it is.
            OSError: that cannot be found out.
        """
        known = _ours.setdefault(self._commands, set())
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
                with base_errors(base):
                    raise PermissionError(f"{self._commands.place}: {each} belongs to {owner}, who could change what runs there")
        known.add(self.directory)
        return True

    def _read(self, *names: str) -> bytes:
        """What is in a file of the session's directory; nothing at all is believed unless that is this user's."""
        if not self._is_ours():
            return b""
        path = os.path.join(self.directory, *names)
        try:
            return self._commands.read(path, 0, _MOST_BYTES)
        except (ConnectionFailed, PermissionError):
            raise
        except OSError:  # A network file system that has lost sight of a file finds it when it is asked again.
            time.sleep(_LOST_SIGHT)
            return self._commands.read(path, 0, _MOST_BYTES)

    def _run(self, script: str, directory: str | None = None, *words: str) -> str:
        place = directory or self.directory
        arguments = words or (secrets.token_hex(8),)
        done = self._commands.run(["sh", "-c", script, "sh", place, *arguments], timeout=120)
        if done.returncode:
            said = done.stderr.decode("utf-8", "replace").strip()[-300:]
            raise OSError(f"{self._commands.place}: {place} cannot be used: {said or f'exit code {done.returncode}'}")
        return done.stdout.decode("utf-8", "replace")
