"""Frames a remote command, so that login shells and lost connections cannot falsify its words, output or exit code.

A framed command is a script for `/bin/sh` that contains the command. The user's login shell (bash, zsh, csh, fish) gets a fixed
command line, which makes `/bin/sh` read the script from standard input. The script prints marks on both output streams before
and after the command. The marks separate the output of the command from that of the shell's start-up files, and the last mark
carries the exit code, so a lost connection is never taken for an exit.

Standard input stays open as a lifeline: if it ends without the word "bye", the script kills all processes of its Unix session.
Processes that have started a Unix session of their own survive. The script needs `head` and `dd` of coreutils, because `head` of
busybox reads too far.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from .base import Completed

# Left of the pipe: the input of the command, and the lifeline. The command sees the end of its input only after the word "go",
# so input that a lost connection cuts off never looks complete. If the command does not read all of its input, `head` ends early;
# `tail` then reads the rest and compares its last word. sshd gives each command a Unix session of its own (setsid in
# do_exec_no_pty, OpenSSH 9.2), led by this shell; timeout(1) and similar programs make process groups, but no sessions.
_SCRIPT = """\
printf %(begin)s; printf %(begin)s >&2
{ %(feed)s read -r word && [ "$word" = go ] && exec >/dev/null && read -r word && [ "$word" = bye ] && exit
[ "$(tail -c 4)" = bye ] && exit
trap "" TERM; pkill -TERM -s $$ || kill -TERM 0; sleep 2; pkill -KILL -s $$ || kill -KILL 0; } 2>/dev/null | { ( %(command)s )
rc=$?; printf %(end)s; printf "%(end)s $rc." >&2; }
"""

GO = b"go\n"
"""Sent after the command's input: the input is complete."""
BYE = b"bye\n"
"""Sent after the command's end: the script ends without killing processes that the command left behind."""


@dataclass(frozen=True)
class Frame:
    """A framed command: what to send to the server, and the marks in its output.

    Attributes:
        command: fixed command line for the login shell.
        stdin: the script, the command's input and `GO`.
        begin: mark before the command's output, on stdout and on stderr.
        end: mark after the command's output, on both; on stderr the exit code and a full stop follow.
    """

    command: str
    stdin: bytes
    begin: bytes
    end: bytes


class Output:
    """Finds the output and exit code of a framed command in the bytes that arrive on stdout and stderr."""

    def __init__(self, framed: Frame) -> None:
        self._begin, self._end = framed.begin, framed.end
        self._streams = (bytearray(), bytearray())
        self._ends = [-1, -1]
        self._code: int | None = None

    @property
    def began(self) -> bool:
        """Whether the command may have run: a mark has arrived. Output before the mark comes from the login shell."""
        return any(self._begin in stream for stream in self._streams)

    def noise(self) -> tuple[bytes, bytes]:
        """All received bytes of stdout and of stderr, marks included, for error messages."""
        return bytes(self._streams[0]), bytes(self._streams[1])

    def feed(self, stdout: bytes, stderr: bytes) -> bool:
        """Add received bytes. Returns whether the command has ended and its output is complete.

        Output that background processes of the command write after its end is ignored.
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
        """The command's exit code and output. May be called once `feed` has returned True."""
        assert self._code is not None
        out, err = (
            bytes(stream[stream.index(self._begin) + len(self._begin) : end])
            for stream, end in zip(self._streams, self._ends, strict=True)
        )
        return Completed(self._code, out, err)


def frame(command: Sequence[str], stdin: bytes) -> Frame:
    """The framed form of a command and its standard input.

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
    """A word in single quotes. Without quotes even `if` or `A=b` has a meaning for the shell."""
    encoded = os.fsencode(word)
    if b"\0" in encoded:
        raise ValueError(f"{word[:80]!r} contains a NUL character, which no command line can hold; remove it")
    return b"'" + encoded.replace(b"'", b"'\\''") + b"'"
