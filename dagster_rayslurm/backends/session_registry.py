"""Sessions on the cluster's file system: one directory for each name, in it one for each allocation there has been.

The newest generation is the session; who makes the next one, by `mkdir`, submits its job. Nothing is removed in a race, so
that nobody can take away what another one has just made; a generation that its maker has left is marked instead. Ages are
differences between times of that file system alone: its clock may be any, and those of its clients differ.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..connections.base import Connection
from ..fit import Offer, offer_from_json, offer_to_json
from ..runtime import PROTOCOL_VERSION
from ..runtime.record import EXIT, SESSION
from ..slurm.submit import ABANDONED, CREATOR, CURRENT, JOB_ID, OFFER
from .session_client import Announcement, parse_announcement

WAITING = "waiting"
"""Directory of files of those who wait for a session to come up, touched by them."""
TOUCH_INTERVAL = 60.0
"""Seconds between two touches of such a file; after three times as long nobody waits there."""

_MOST_BYTES = 1024 * 1024

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
class Charter:
    """What the maker of a generation wrote down for those who find it.

    Attributes:
        generation: its number.
        offer: what it has for each payload.
        ask: the command that hands a request over within its allocation, but for the directory.
    """

    generation: int
    offer: Offer
    ask: tuple[str, ...]


def charter_to_json(charter: Charter) -> bytes:
    """A charter as a file."""
    content = {"generation": charter.generation, "offer": offer_to_json(charter.offer), "ask": list(charter.ask)}
    return json.dumps({"protocol": PROTOCOL_VERSION, **content}).encode()


def parse_charter(data: bytes) -> Charter | None:
    """The charter in a file; None if there is none, or it is damaged, or of another version."""
    try:
        found: Mapping[str, Any] = json.loads(data)
        if found["protocol"] != PROTOCOL_VERSION:
            return None
        ask = tuple(str(word) for word in found["ask"])
        return Charter(int(found["generation"]), offer_from_json(found["offer"]), ask)
    except (ValueError, KeyError, TypeError):
        return None


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
    known = job_id if job_id.isdigit() else None
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
    charter: Charter
    announcement: Announcement


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
        """The session, if it is where its last maker said; two reads, and no command."""
        charter = parse_charter(self._commands.read(os.path.join(self.directory, CURRENT), 0, _MOST_BYTES))
        return self._with_announcement(charter) if charter is not None else None

    def found(self, number: int) -> Found | None:
        """A generation that takes requests, whatever is said of it elsewhere; then that is put right.

        Raises:
            OSError: it cannot be read.
        """
        path = os.path.join(self.generation(number), OFFER)
        charter = parse_charter(self._commands.read(path, 0, _MOST_BYTES))
        if charter is None or charter.generation != number:
            return None
        found = self._with_announcement(charter)
        current = os.path.join(self.directory, CURRENT)
        if found is not None and parse_charter(self._commands.read(current, 0, _MOST_BYTES)) != charter:
            self._commands.write(current, charter_to_json(charter))
        return found

    def announcement(self, number: int) -> Announcement | None:
        """What a generation says of itself."""
        return parse_announcement(self._commands.read(os.path.join(self.generation(number), SESSION), 0, _MOST_BYTES))

    def _with_announcement(self, charter: Charter) -> Found | None:
        announcement = self.announcement(charter.generation)
        if announcement is None or announcement.protocol != PROTOCOL_VERSION or announcement.closing is not None:
            return None
        return Found(self.generation(charter.generation), charter, announcement)

    def look(self) -> Newest:
        """The newest generation; one command.

        Raises:
            OSError: the directory cannot be read.
        """
        said = self._run(_LOOK)
        try:
            return parse_newest(said)
        except ValueError:
            raise OSError(f"{self._commands.place}: {self.directory} cannot be read: {said[-300:]!r}") from None

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

    def _run(self, script: str, directory: str | None = None, *words: str) -> str:
        place = directory or self.directory
        arguments = words or (secrets.token_hex(8),)
        done = self._commands.run(["sh", "-c", script, "sh", place, *arguments], timeout=120)
        if done.returncode:
            said = done.stderr.decode("utf-8", "replace").strip()[-300:]
            raise OSError(f"{self._commands.place}: {place} cannot be used: {said or f'exit code {done.returncode}'}")
        return done.stdout.decode("utf-8", "replace")
