"""Parsers for the node lists and durations that Slurm prints. Pure."""

from __future__ import annotations

import itertools
import math
import re
from typing import List, Optional

_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_PART = re.compile(r"\[([^][]*)\]")
_WORD = re.compile(r"(?:\[[^]]*\]|[^,])+")

MAX_NODES = 1 << 20  # Nodes that a list may name at most: a longer list is damaged, and expanding it would fill the memory.


def expand_nodelist(text: str) -> List[str]:
    """The names of the nodes in a list such as `c[1-2,05-07],x3,rack[1-2]n[01-03]` (SLURM_JOB_NODELIST), in order.

    The result is that of `scontrol show hostnames` (Slurm 22.05 and 24.11): numbers have as many digits as the first number of
    their range, and the last bracket of a name varies fastest. "", `(null)`, `None assigned` and `None` stand for empty lists.
    Raises ValueError if the text is not a node list.
    """
    if text.strip() in ("", "(null)", "None assigned", "None"):
        return []
    nodes: List[str] = []
    for word in _WORD.findall(text.strip()):
        pieces = _PART.split(word)  # Literals have even indexes, the contents of brackets odd ones.
        if any(bracket in literal for literal in pieces[::2] for bracket in "[]"):
            raise ValueError("%r is not a list of nodes: a bracket is left over in %r" % (text, word))
        choices = [_numbers(piece, text) if place % 2 else [piece] for place, piece in enumerate(pieces)]
        if len(nodes) + math.prod(map(len, choices)) > MAX_NODES:
            raise ValueError("%r is not a list of nodes: it names more than %d" % (text[:200], MAX_NODES))
        nodes += [name for name in map("".join, itertools.product(*choices)) if name]
    return nodes


def _numbers(inside: str, text: str) -> List[str]:
    """The numbers in one pair of brackets, as text with leading zeros; `text` is the whole list, for the error message."""
    numbers: List[str] = []
    for part in inside.split(","):
        match = _RANGE.fullmatch(part)
        low, high = (match.group(1), match.group(2) or match.group(1)) if match else ("1", "0")
        if not 0 <= int(high) - int(low) < MAX_NODES:
            raise ValueError("%r is not a list of nodes: [%s] is no range" % (text[:200], inside[:200]))
        numbers += ["%0*d" % (len(low), number) for number in range(int(low), int(high) + 1)]
    return numbers


_DURATION = re.compile(r"(?:([0-9]+)-)?(?:([0-9]+):)?([0-9]+):([0-9]+(?:\.[0-9]+)?)")


def parse_duration(text: str) -> Optional[float]:
    """The seconds in a duration such as "[D-]HH:MM:SS" or "MM:SS.mmm" (squeue(1), sacct(1), Slurm 22.05); else None."""
    match = _DURATION.fullmatch(text)
    if match is None:
        return None
    days, hours, minutes = (int(part or 0) for part in match.groups()[:3])
    return 86400.0 * days + 3600 * hours + 60 * minutes + float(match.group(4))
