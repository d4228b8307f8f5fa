"""Output of several payloads on one stream: whole lines only, each with the name of who printed it. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

_LINE = re.compile(r"[^\r\n]*(?:\r\n|\n|\r)")
"""A line, or the state of a progress bar."""
_LONGEST = 65536
"""Characters of a line that are waited for; a longer one is shown in pieces."""


class MultiplexedOutput:
    """The lines of one payload.

    Args:
        prefix: what each of them begins with.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._partial: dict[str, str] = {}

    def lines(self, stream: str, text: str) -> str:
        """What is to be shown once this text has arrived on a stream; the beginning of a line is kept for later."""
        text = self._partial.pop(stream, "") + text
        # A carriage return at the very end may be half of a line's end.
        end = 1 + max(text.rfind("\n"), text.rfind("\r", 0, -1))
        shown = [self._prefix + line for line in _LINE.findall(text[:end])]
        rest = text[end:]
        if len(rest) > _LONGEST:
            shown.append(f"{self._prefix}{rest}\n")
            rest = ""
        if rest:
            self._partial[stream] = rest
        return "".join(shown)

    @property
    def waits(self) -> bool:
        """Whether the beginning of a line is kept."""
        return bool(self._partial)

    def rest(self) -> Iterator[tuple[str, str]]:
        """The streams whose last line has no end, and that line, which gets one here."""
        for stream, text in self._partial.items():
            yield stream, f"{self._prefix}{text.rstrip()}\n"
        self._partial.clear()
