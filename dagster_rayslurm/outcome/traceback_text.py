"""Find the exception in the text of a traceback, and say it in one line with the line of the user's code and the node. Pure.

Tracebacks may be those of Python 3.8 to 3.14, and the text of Ray's exceptions (Ray 2.60). In the latter, the exceptions of
nested tasks follow each other, the innermost last.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import without_colours

_HEADER = "Traceback (most recent call last):"
_FRAME = re.compile(r'  File "(?P<path>.+)", line (?P<line>\d+)(?:, in (?P<function>.+))?')
_TASK = re.compile(r"ray::(?P<task>\S+)\(\) \(pid=\d+, ip=(?P<address>[^,) ]+)")
_EXCEPTION = re.compile(r"[^\W\d][\w.<>]*(\([\w.<>]+\))?(:.*)?")
_ACTOR = re.compile(r"\t(class_name|ip): (.+)")
# Prefix of a line that Ray prints for another process.
_RAY_LOG = re.compile(r"\((autoscaler|raylet|([^()]+ )?pid=\d+)[^()]*\) ")
_CAUSE = "The above exception was the direct cause of the following exception:"
# Python's lines between two tracebacks, and the value of `Raised.link` for each.
_LINKS = {_CAUSE: "cause", "During handling of the above exception, another exception occurred:": "context"}
# Beginnings of the line before a traceback whose exception does not end the process.
_HARMLESS = ("Exception ignored ", "Exception in thread", "Error in atexit")
# Paths of code that is not the user's own: the standard library, and installed packages.
_LIBRARY = re.compile(r"^<|^python/ray/|/(site|dist)-packages/|/lib/python3\.\d+/")
# Paths of code that only calls other code; passed over if all frames are in libraries.
_PLUMBING = re.compile(r"^<frozen |^python/ray/|/(ray|dagster_pipes)/|/importlib/")
_LONGEST = 400  # Most characters of an exception in a sentence.


@dataclass
class Raised:
    """One exception, as read from the text of a traceback."""

    link: str = ""  # How the exception before led to this one: "cause", "context", or "" if it did not.
    harmless: bool = False  # Whether the process survived the exception.
    task: str = ""  # The Ray task that raised it; "" for the payload's own process.
    address: str = ""  # The IP address of the task's node.
    frames: list[tuple[str, int, str]] = field(default_factory=list)  # Path, line and function, the innermost frame last.
    text: str = ""  # The exception's name and the first line of its message.
    more: int = 0  # Number of lines of the message after the first line.

    def in_words(self, nodes: Mapping[str, str]) -> str:
        """Returns the exception with its file, line, function and node; `nodes` has hostnames by IP address."""
        where = []
        if self.frames:
            # The innermost frame of the user's code, recognised by its path; else the innermost frame.
            own = [[frame for frame in self.frames if not foreign.search(frame[0])] for foreign in (_LIBRARY, _PLUMBING)]
            path, line, function = (own[0] or own[1] or self.frames)[-1]
            where.append(f"{path.rpartition('/')[2]}:{line}")
            if function not in ("", "<module>"):
                where.append(f"in {function}")
        elif self.task:
            where.append(f"in {self.task}")
        if self.address:
            where.append(f"on {nodes.get(self.address, self.address)}")
        text = shortened(self.text)
        return f"{text} ({', '.join(where)})" if where else text


def shortened(text: str) -> str:
    """Returns the text, cut to `_LONGEST` characters to fit into a sentence."""
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def exception_in_words(found: list[Raised], nodes: Mapping[str, str]) -> str:
    """Returns a clause about the last exception, and about the first in the chain of its causes."""
    last = cause = len(found) - 1
    while cause > 0 and found[cause].link == "cause":
        cause -= 1
    sentence = found[last].in_words(nodes)
    return sentence if cause == last else f"{sentence}, caused by {found[cause].in_words(nodes)}"


def traceback_of(exception: Mapping[str, Any]) -> str:
    """Returns the traceback of an exception that Dagster Pipes reported, as Python prints it."""
    cause = exception.get("cause")
    before = f"{traceback_of(cause)}\n{_CAUSE}\n\n" if isinstance(cause, Mapping) else ""
    stack = exception.get("stack")
    frames = "".join(map(str, stack)) if isinstance(stack, list) else ""
    return f"{before}{_HEADER}\n{frames}{exception.get('message') or ''}"


def read_traceback(text: str) -> list[Raised]:
    """Returns the exceptions of all tracebacks in a text, in order, except those that the process survived."""
    found: list[Raised] = []
    link, harmless = "", False
    for line in without_colours(text).splitlines():
        if not line.strip() or _RAY_LOG.match(line):
            continue
        line = line.removeprefix("  | ").rstrip()
        current = found[-1] if found else None
        is_open = current is not None and not current.text
        task, frame = _TASK.search(line), _FRAME.fullmatch(line)
        if task and is_open:
            # The process or task of the open traceback only waited for the failed task.
            found[-1] = current = Raised(found[-1].link, found[-1].harmless)
        elif task or _HEADER in line or (frame and not is_open):
            current = Raised(link, harmless or bool(link and found and found[-1].harmless))
            found.append(current)
            link, harmless = "", False
        if line in _LINKS:
            link = _LINKS[line]
        elif line.startswith(_HARMLESS):
            harmless = True
        elif current is not None and task:
            current.task, current.address = task["task"], task["address"]
        elif current is not None and frame:
            current.frames.append((frame["path"], int(frame["line"]), frame["function"] or ""))
        elif current is not None:
            _take_text(current, line)
    return [each for each in found if each.text and not each.harmless]


def _take_text(current: Raised, line: str) -> None:
    """Add a line that follows the frames of a traceback to its exception: name and message, a further line, or the actor."""
    actor = _ACTOR.match(line)
    if actor and current.text:
        current.text = f"{current.text.rstrip('.')}, {actor[1]} {actor[2]}"
    elif line[0].isspace() or _HEADER in line:
        return
    elif not current.text:
        if _EXCEPTION.fullmatch(line):
            current.text = line
    else:
        current.more += 1
        if current.text.endswith(":"):
            current.text = f"{current.text} {line}"
