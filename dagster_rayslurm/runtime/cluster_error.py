"""Why there is no Ray cluster, or none any more."""

from __future__ import annotations

import re

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_PREFIX = re.compile(r"^\d{4}-\d\d-\d\d [\d:,]+\t[A-Z]+ \S+ -- ")
_TELLS_NOTHING = re.compile(r"\b(DEBUG|INFO)\b|`\{\}`")
"""Lines that are no errors, and the ones in which `ray start` prints a format without its values."""


class ClusterError(Exception):
    """The cluster did not start or was lost.

    Attributes:
        reason: "environment", "cluster-start" or "cluster-lost", as in the `end` record.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def last_words(log: str) -> str:
    """The last line of the log of `ray start` that may tell why it ended; "" if there is none."""
    lines = [line for line in map(str.strip, _COLOURS.sub("", log).splitlines()) if line and not _TELLS_NOTHING.search(line)]
    return _PREFIX.sub("", lines[-1])[:500] if lines else ""
