"""A remote command wrapped so that a login shell can neither misread it nor blur what it says, and nothing of it stays.

The command string that the user's login shell gets (bash, zsh, csh, fish) is the same harmless words every time; what is
to be run follows on standard input and is read by `/bin/sh`. Marks around both output streams separate the command's
own output from what start-up files print, and carry its exit code, so that a lost connection is never taken for an
exit. The rest of standard input is the lifeline: when it ends without a goodbye, the whole session is ended; only what
made a session of its own escapes. It takes coreutils' `head` and `dd`; busybox's `head` reads too far.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from .base import Completed

# Left of the pipe: the command's input and the lifeline. Only "go" lets the command see the end of its input, so a
# connection lost halfway never makes a cut-off input look complete. A command that does not read all of its input ends
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
        command: what the login shell gets.
        stdin: what follows on standard input, before the lifeline.
        begin: mark before the output on both streams.
        end: mark after it; on stderr the exit code and a full stop follow.
    """

    command: str
    stdin: bytes
    begin: bytes
    end: bytes


class Output:
    """Both streams of a framed command as they come in.

    Args:
        framed: the command.
    """

    def __init__(self, framed: Frame) -> None:
        self._begin, self._end = framed.begin, framed.end
        self._streams = (bytearray(), bytearray())
        self._ends = [-1, -1]
        self._code: int | None = None

    @property
    def began(self) -> bool:
        """Whether the command may have run: what is older is the login shell's."""
        return any(self._begin in stream for stream in self._streams)

    def noise(self) -> tuple[bytes, bytes]:
        """All that came, for messages."""
        return bytes(self._streams[0]), bytes(self._streams[1])

    def feed(self, stdout: bytes, stderr: bytes) -> bool:
        """Take what came; whether the command has ended and all that it wrote is here.

        What a background child of it writes later is of no interest.
        """
        for number, data in enumerate((stdout, stderr)):
            stream = self._streams[number]
            look_from = max(0, len(stream) - len(self._end) - 8)
            stream += data
            if self._ends[number] < 0:
                self._ends[number] = stream.find(self._end, look_from)
        if self._ends[1] >= 0 and self._code is None:
            code = re.match(rb" (\d+)\.", self._streams[1][self._ends[1] + len(self._end) :][:8])
            self._code = int(code[1]) if code else None
        return self._ends[0] >= 0 and self._code is not None

    def completed(self) -> Completed:
        """The command's own output and exit code, once `feed` has said that it is complete."""
        assert self._code is not None
        out, err = (
            bytes(stream[stream.index(self._begin) + len(self._begin) : end])
            for stream, end in zip(self._streams, self._ends, strict=True)
        )
        return Completed(self._code, out, err)


def frame(command: Sequence[str], stdin: bytes) -> Frame:
    """Wrap a command and its input.

    Args:
        command: the program and its arguments.
        stdin: all that it can read.

    Raises:
        ValueError: there is no word, or one contains a NUL character.
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
    """A word in single quotes, all of them: an unquoted `if` or `A=b` would mean something to the shell."""
    encoded = os.fsencode(word)
    if b"\0" in encoded:
        raise ValueError(f"{word[:80]!r} contains a NUL character, which no command line can hold; remove it")
    return b"'" + encoded.replace(b"'", b"'\\''") + b"'"
