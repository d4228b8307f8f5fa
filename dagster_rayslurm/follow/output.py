"""Show the output of payloads on Dagster's own stdout and stderr."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

_LINE = re.compile(r"[^\r\n]*(?:\r\n|\n|\r)")
"""A line with its end; a progress bar ends each of its states with a carriage return."""
_LONGEST = 65536
"""Characters after which a line without an end is shown in pieces."""


class LinePrefixer:
    """Puts a prefix before each line of a payload's output, so that several payloads can share a stream. Pure."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._partial: dict[str, str] = {}

    def add(self, stream: str, text: str) -> str:
        """Add new text; returns the complete lines with prefix, and keeps an unfinished line for the next call."""
        text = self._partial.pop(stream, "") + text
        # A carriage return as the last character may be the first half of a line end.
        end = 1 + max(text.rfind("\n"), text.rfind("\r", 0, -1))
        lines = [self._prefix + line for line in _LINE.findall(text[:end])]
        rest = text[end:]
        if len(rest) > _LONGEST:
            lines.append(f"{self._prefix}{rest}\n")
        elif rest:
            self._partial[stream] = rest
        return "".join(lines)

    @property
    def has_partial_line(self) -> bool:
        """Whether an unfinished line is kept for later."""
        return bool(self._partial)

    def flush(self) -> Iterator[tuple[str, str]]:
        """Yields the stream and the text of each unfinished line, with a line end, and forgets the line."""
        for stream, text in self._partial.items():
            yield stream, f"{self._prefix}{text.rstrip()}\n"
        self._partial.clear()


class OutputWriter:
    """Writes a payload's output to Dagster's stdout and stderr.

    If Dagster's own terminal is lost or its disk is full, that is logged once and does not end the payload.

    Args:
        component: prefix of each line; None shows the output as it is.
    """

    def __init__(self, component: str | None, warn: Callable[[str], None]) -> None:
        self._prefixer = None if component is None else LinePrefixer(f"[{component}] ")
        self._warn = warn
        self._failed = False

    @property
    def has_partial_line(self) -> bool:
        """Whether an unfinished line has been written but is not shown yet."""
        return self._prefixer is not None and self._prefixer.has_partial_line

    def write(self, stream: str, text: str) -> None:
        """Show some output of the payload; `stream` is "stdout" or "stderr"."""
        self._print(stream, text if self._prefixer is None else self._prefixer.add(stream, text))

    def flush(self) -> None:
        self._guard(lambda: (sys.stdout.flush(), sys.stderr.flush()))

    def finish(self) -> None:
        """Show unfinished lines; called when no more output comes."""
        for stream, text in self._prefixer.flush() if self._prefixer is not None else ():
            self._print(stream, text)

    def _print(self, name: str, text: str) -> None:
        stream = sys.stderr if name == "stderr" else sys.stdout
        try:
            self._guard(lambda: stream.write(text))
        except UnicodeEncodeError:  # Dagster runs in a locale without UTF-8.
            self._guard(lambda: stream.write(text.encode("ascii", "backslashreplace").decode("ascii")))

    def _guard(self, write: Callable[[], Any]) -> None:
        """Call `write`; log the first OSError, and ignore the next."""
        try:
            write()
        except OSError as error:
            if not self._failed:
                self._failed = True
                self._warn(f"the payload's output cannot be shown: {error}")
