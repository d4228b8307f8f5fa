"""A remote command wrapped so that a login shell can neither misread it nor blur what it says, and nothing of it stays.

The command string that the user's login shell gets (bash, zsh, csh, fish) is the same harmless words every time; what is
to be run follows on standard input and is read by `/bin/sh`. Marks around both output streams separate the command's
own output from what start-up files print, and carry its exit code, so that a lost connection is never taken for an
exit. The rest of standard input is the lifeline: when it ends without a goodbye, the whole process group is ended.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from .base import Completed

# Left of the pipe: the command's input and the lifeline. Only "go" lets the command see the end of its input, so a
# connection lost halfway never makes a cut-off input look complete. A command that does not read all of its input ends
# `head` early; the rest is then read up to its last word. sshd makes each session a process group of its own
# (setsid in do_exec_no_pty, OpenSSH 9.2), which is what `kill 0` reaches.
_SCRIPT = """\
printf %(begin)s; printf %(begin)s >&2
{ %(feed)s read -r word && [ "$word" = go ] && exec >/dev/null && read -r word && [ "$word" = bye ] && exit
[ "$(tail -c 4)" = bye ] && exit
trap "" TERM; kill -TERM 0; sleep 2; kill -KILL 0; } 2>/dev/null | { ( %(command)s )
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

    def complete(self, stdout: bytes | bytearray, stderr: bytes | bytearray) -> bool:
        """Whether the command ended and all that it wrote is here."""
        tail = stderr[-len(self.end) - 8 :]
        return self.end in stdout[-len(self.end) :] and self.end in tail and tail.endswith(b".")

    def parse(self, stdout: bytes, stderr: bytes) -> Completed:
        """The command's own output and exit code, of complete streams."""
        out = stdout.split(self.begin, 1)[1].rsplit(self.end, 1)[0]
        err, code = stderr.split(self.begin, 1)[1].rsplit(self.end, 1)
        return Completed(int(code.strip(b" .")), out, err)


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
