"""Frames a remote command, so that login shells and lost connections cannot falsify its words, output or exit code.

The user's login shell (bash, zsh, csh, fish) gets the same harmless command line every time. A script with the command follows
on standard input, and `/bin/sh` reads it. Marks around both output streams separate the output of the command from that of
start-up files, and carry the exit code, so a lost connection is never taken for an exit. The rest of standard input is the
lifeline: if it ends without "bye", all processes of the session are killed; only those with a session of their own survive.
The script needs `head` and `dd` of coreutils, because `head` of busybox reads too far.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from .base import Completed

# Left of the pipe: the input of the command, and the lifeline. The command sees the end of its input only after "go", so a
# connection that is lost halfway never makes the input look complete. A command that does not read all of its input ends
# `head` early; the rest is then read up to its last word. sshd gives each command a session of its own (setsid in
# do_exec_no_pty, OpenSSH 9.2), led by this shell; timeout(1) and the like make process groups, but no sessions.
_SCRIPT = """\
printf %(begin)s; printf %(begin)s >&2
{ %(feed)s read -r word && [ "$word" = go ] && exec >/dev/null && read -r word && [ "$word" = bye ] && exit
[ "$(tail -c 4)" = bye ] && exit
trap "" TERM; pkill -TERM -s $$ || kill -TERM 0; sleep 2; pkill -KILL -s $$ || kill -KILL 0; } 2>/dev/null | { ( %(command)s )
rc=$?; printf %(end)s; printf "%(end)s $rc." >&2; }
"""

GO = b"go\n"
BYE = b"bye\n"


@dataclass(frozen=True)
class Frame:
    """A framed command.

    Attributes:
        command: command line for the login shell.
        stdin: standard input up to the lifeline.
        begin: mark before the output on both streams.
        end: mark after the output; on stderr the exit code and a full stop follow.
    """

    command: str
    stdin: bytes
    begin: bytes
    end: bytes


class Output:
    """Parses both streams of a framed command as they arrive."""

    def __init__(self, framed: Frame) -> None:
        self._begin, self._end = framed.begin, framed.end
        self._streams = (bytearray(), bytearray())
        self._ends = [-1, -1]
        self._code: int | None = None

    @property
    def began(self) -> bool:
        """Whether the command may have run. Earlier output comes from the login shell."""
        return any(self._begin in stream for stream in self._streams)

    def noise(self) -> tuple[bytes, bytes]:
        """All received bytes of both streams, for messages."""
        return bytes(self._streams[0]), bytes(self._streams[1])

    def feed(self, stdout: bytes, stderr: bytes) -> bool:
        """Add received bytes. Returns whether the command has ended and its output is complete.

        Later output of its background processes is ignored.
        """
        for number, data in enumerate((stdout, stderr)):
            stream = self._streams[number]
            search_from = max(0, len(stream) - len(self._end) - 8)
            stream += data
            if self._ends[number] < 0:
                self._ends[number] = stream.find(self._end, search_from)
        if self._ends[1] >= 0 and self._code is None:
            code = re.match(rb" (\d+)\.", self._streams[1][self._ends[1] + len(self._end) :][:8])
            self._code = int(code[1]) if code else None
        return self._ends[0] >= 0 and self._code is not None

    def completed(self) -> Completed:
        """Exit code and output of the command, once `feed` has returned True."""
        assert self._code is not None
        out, err = (
            bytes(stream[stream.index(self._begin) + len(self._begin) : end])
            for stream, end in zip(self._streams, self._ends, strict=True)
        )
        return Completed(self._code, out, err)


def frame(command: Sequence[str], stdin: bytes) -> Frame:
    """Frame a command with its standard input.

    Raises:
        ValueError: the command is empty, or a word contains a NUL character.
    """
    if not command:
        raise ValueError("an empty command cannot be run")
    mark = secrets.token_hex(8)
    begin, end = f"begin-{mark}.", f"end-{mark}"
    text = {"begin": begin, "end": end, "command": "@", "feed": f"head -c {len(stdin)} &&" if stdin else ""}
    before, after = (_SCRIPT % text).split("@")
    script = before.encode() + b" ".join(map(_quote, command)) + after.encode()
    shell = f"exec /bin/sh -c 'eval \"$(dd bs=1 count={len(script)} 2>/dev/null)\"'"
    return Frame(shell, script + stdin + GO, begin.encode(), end.encode())


def _quote(word: str) -> bytes:
    """A word in single quotes, because even `if` or `A=b` has a meaning for the shell without them."""
    encoded = os.fsencode(word)
    if b"\0" in encoded:
        raise ValueError(f"{word[:80]!r} contains a NUL character, which no command line can hold; remove it")
    return b"'" + encoded.replace(b"'", b"'\\''") + b"'"
